"""The processes that bench.py starts: how they run, why one failed, and that all end with bench.py."""
import signal
import subprocess
import threading
from contextlib import contextmanager

from runtime.cli import RunError


class Children:
    """Processes that several threads start and wait for, and that end together.

    As a context manager it ends those that still run when an error, Ctrl-C or a signal leaves the
    block, and then starts no more. Without that their threads would wait until all have ended.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.running = set()
        self.ended = False

    def __enter__(self):
        self.ended = False
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is None:
            return
        with self.lock:
            self.ended = True
            for process in self.running:
                process.kill()

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess:
        """subprocess.run of a command, with its output captured as text."""
        with self.lock:
            self.check()
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
            self.running.add(process)

        with process:
            try:
                output, errors = process.communicate()
            except BaseException:           # Ctrl-C or a signal, in the main thread
                process.kill()
                raise
            finally:
                with self.lock:
                    self.running.discard(process)
        self.check()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def check(self) -> None:
        if self.ended:
            raise RunError("bench.py has been stopped")


CHILDREN = Children()
run_process = CHILDREN.run


def why_it_failed(done: subprocess.CompletedProcess) -> str:
    """The signal that killed a process, or else the last line that it wrote to stderr."""
    # The signal comes first: a process that is killed may have written warnings before.
    number = -done.returncode
    if number == 9:
        return "killed by SIGKILL, as Linux does where memory runs out"
    if number > 0:
        return f"killed by signal {number} ({signal.strsignal(number)})"

    lines = done.stderr.strip().splitlines()
    if lines:
        return lines[-1][:200]
    return f"exit code {done.returncode}"


@contextmanager
def signals_as_errors():
    """Inside, SIGTERM and SIGHUP raise a RunError, as Ctrl-C raises KeyboardInterrupt.

    They would end this process at once, and leave those that it has started. An error ends them.
    """
    def stop(number, frame):
        raise RunError(f"stopped by {signal.Signals(number).name}")

    handlers = {}                           # those of before
    if threading.current_thread() is threading.main_thread():       # Python allows no other one
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)                    # Windows has no SIGHUP
            if number is None or signal.getsignal(number) == signal.SIG_IGN:
                continue                                            # nohup lets SIGHUP be ignored
            handlers[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
