"""Which rank no longer answers: each writes a number into the store of the run now and then."""
import os
import socket
import time

from runtime.progress import duration

EVERY = 5.0             # seconds between two heartbeats of a rank
SILENT = 60.0           # seconds without one after which a rank is said not to answer
RESUMES = "the checkpoints are whole, and the same command resumes from the newest"


class Heartbeats:
    """Of one rank, called by its watch thread. The lowest rank that answers tells of the others. A rank whose
    thread lives while its training hangs is not noticed: the collective's own timeout ends that run."""

    def __init__(self, store, rank: int, world_size: int, timeout: float, say):
        """`timeout`: seconds of silence that end the run. `say`: prints a line."""
        self.store, self.rank, self.timeout, self.say = store, rank, timeout, say
        self.silent_after = min(SILENT, timeout)
        self.others = [other for other in range(world_size) if other != rank]
        self.clock, self.looked = 0.0, time.monotonic()
        self.seen = {}          # rank: (its number, self.clock when that was first seen)
        self.missed = set()     # ranks that were told of
        store.set(f"where {rank}", f"pid {os.getpid()} on {socket.gethostname()}")

    def look(self) -> str | None:
        """Call it often. What to end the run with, if a rank has not answered for too long."""
        now = time.monotonic()
        if now < self.looked + EVERY:
            return None
        # a process that was itself suspended must not take that time for the others' silence
        self.clock += min(now - self.looked, 2 * EVERY)
        self.looked = now
        self.store.add(f"beat {self.rank}", 1)
        for rank in sorted(self.missed):
            if self._silence(rank) < self.silent_after:
                self.missed.remove(rank)
                self.say(f"process {rank} answers again")
        if any(self._silence(rank) < self.silent_after for rank in range(self.rank)):
            return None                         # that one tells
        limit = f"--rank_timeout {self.timeout / 60:g}"
        for rank in self.others:
            silence = self._silence(rank)
            if silence > self.timeout:
                return f"{self._said(rank, silence)} ({limit}): {RESUMES}"
            if silence >= self.silent_after and rank not in self.missed:
                self.missed.add(rank)
                self.say(f"{self._said(rank, silence)}: the others wait for it, and after {limit} minutes "
                         "the run ends")
        return None

    def leave(self) -> None:
        """This rank has done its part: it is not missed, though others may take longer."""
        self.store.add(f"beat {self.rank}", -2**60)

    def _silence(self, rank):
        """Seconds since that rank's number last changed; 0 once it has left."""
        number = self.store.add(f"beat {rank}", 0)
        if number < 0 or self.seen.get(rank, (None,))[0] != number:
            self.seen[rank] = number, self.clock
        return self.clock - self.seen[rank][1]

    def _said(self, rank, silence):
        known = self.store.check([f"where {rank}"])
        where = self.store.get(f"where {rank}").decode() if known else "still starting"
        return f"process {rank} ({where}) has not answered for {duration(silence)}"
