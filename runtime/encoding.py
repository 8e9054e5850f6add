"""Text -> tokens, by worker processes, in the order of the text.

Processes and not threads: what stands beside tiktoken (reading, parsing, joining) then runs in parallel too,
and each has an Encoding of its own, for threads that share one wait for each other inside it.
"""
import multiprocessing
import os
import queue
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from runtime.cli import RunError, UserError
from runtime.sources import LARGE_TASK, Task
from runtime.tokenizer import EOT, encode, tokenizer


START = np.array([EOT], dtype=np.uint16)


class Tokens(NamedTuple):
    """Of successive documents: all their tokens (1-D uint16) and the number of each one's."""
    tokens: np.ndarray
    lengths: list[int]
    cursor: object = None           # the source's state before the first of them


def tokenize(task: Task, opened: dict) -> tuple[np.ndarray, list[int], bool]:
    """The tokens of a task, with <|endoftext|> before each document; the length of each; and whether that
    is all. It stops behind twice the text that a task should have, for then more may come than memory
    holds; the rest is the same task with more to skip."""
    parts, lengths, size, is_all = [], [], 0, True
    for text, starts_document in task.read(task.skip, opened):
        if size >= 2 * LARGE_TASK:
            is_all = False
            break
        tokens = encode(text)
        if starts_document:
            parts.append(START)
        parts.append(tokens)
        lengths.append(starts_document + len(tokens))
        size += len(text)
    return np.concatenate(parts or [np.empty(0, np.uint16)]), lengths, is_all


def serve(connection, other_end) -> None:
    """The worker process: tokenises what comes, until the other end is closed or its process is dead."""
    other_end.close()               # this process's copy: it would keep the pipe open
    opened = {}
    with suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                tokens, *rest = tokenize(task, opened)
            except (UserError, RunError) as error:
                connection.send(error)
            except Exception:                     # as text: not every error can go to another process
                connection.send(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
            else:
                connection.send(rest)
                connection.send_bytes(tokens)
    os._exit(0)                     # without the cleaning up of what this process has from the first one


class Workers:
    """`n` processes, each with a thread here that waits for it. Make it before other threads start: on Linux
    the processes are forks, and have the tokenizer at once."""

    def __init__(self, n: int):
        tokenizer()
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.processes, self.idle = [], queue.SimpleQueue()
        # Ctrl-C reaches every process: the first decides. Before they start, for there is time until they run
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(n):
            # a fork also has the ends that this process keeps of the workers before it. So if this process
            # is killed, the last worker's pipe ends, then with that worker the pipe of the one before
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, ours), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.idle.put((ours, process))
        signal.signal(signal.SIGINT, before)
        self.threads = ThreadPoolExecutor(n)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()                        # they hold nothing; the threads' waiting ends with them
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.join()

    def submit(self, task):
        return self.threads.submit(self.tokenize, task)

    def tokenize(self, task):
        """As `tokenize`, in a worker. Raises RunError if that process is dead."""
        connection, process = self.idle.get()
        try:
            connection.send(task)
            answer = connection.recv()
            if isinstance(answer, Exception):
                raise answer
            return np.frombuffer(connection.recv_bytes(), dtype=np.uint16), *answer
        except (EOFError, ConnectionError):
            process.join(10)
            killed = (process.exitcode or 0) < 0
            raise RunError(f"a worker process {'was killed' if killed else 'failed'} (exit code "
                           f"{process.exitcode}){', as when memory runs out' * killed}. Complete shards are "
                           f"kept: the same command goes on after them"
                           f"{', with fewer --workers in less memory' * killed}") from None
        finally:
            self.idle.put((connection, process))


def submit_all(tasks: Iterable[Task], workers: Workers) -> Iterator[tuple[Task | None, Future]]:
    """(task, the future of its tokens). An error of the source comes last, as one: what was read before it is
    not lost."""
    try:
        for task in tasks:
            yield task, workers.submit(task)
    except (UserError, RunError) as error:
        failed = Future()
        failed.set_exception(error)
        yield None, failed


def encode_stream(tasks: Iterable[Task], workers: Workers | None = None) -> Iterator[Tokens]:
    """The tokens of `tasks` in their order; without `workers` by this process alone."""
    if workers is None:
        run = partial(tokenize, opened={})
        for task in tasks:
            yield from whole_task(task, run(task), run)
        return
    pending = deque()
    for submitted in submit_all(tasks, workers):
        pending.append(submitted)
        if len(pending) > 2 * len(workers.processes):     # bounds memory, keeps every worker busy
            task, future = pending.popleft()
            yield from whole_task(task, future.result(), workers.tokenize)
    for task, future in pending:
        yield from whole_task(task, future.result(), workers.tokenize)


def whole_task(task: Task, answer: tuple, run: Callable[[Task], tuple]) -> Iterator[Tokens]:
    """The tokens of a task, of which `answer` is the beginning."""
    tokens, lengths, is_all = answer
    yield Tokens(tokens, lengths, task.cursor)
    while not is_all:
        task = replace(task, skip=task.skip + len(lengths))
        tokens, lengths, is_all = run(task)
        yield Tokens(tokens, lengths)
