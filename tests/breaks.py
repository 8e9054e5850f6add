"""Deliberate breaks of the code, one at a time, and which tests notice them:

    python tests/breaks.py                  all of them: an hour on two cores
    python tests/breaks.py ID ...           some of them
    python tests/breaks.py --quick          by the tests that a break names alone, and not by the whole suite

A break is a mistake that a maintainer could make, that no forward pass shows, and from which a user would
suffer. It is made in a copy of the working tree, in a temporary folder. Exit code 1 if one is not noticed.

An edit is (file, old, new). `old` is found whatever its spaces and line breaks are, in `file`, or if the code
has moved, in the one other file that has it. Where it is found nowhere, or twice, write the edit anew.
"""
import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1200            # seconds: a break may make a run endless


class Break(NamedTuple):
    id: str
    why: str            # what a user would suffer
    tests: str          # arguments for pytest: the tests that should notice
    edits: list         # of (file, old, new)


BREAKS: list[Break] = []


def as_pattern(code: str) -> str:
    """A regular expression for `code` with any white space between its words and signs."""
    words = re.findall(r"\w+|[^\w\s]", code)
    pattern = r"\s*".join(map(re.escape, words))
    return (r"(?<!\w)" if words[0].isidentifier() else "") + pattern + (
        r"(?!\w)" if words[-1].isidentifier() else "")


def locate(folder: Path, file: str, old: str) -> tuple[Path, int, int]:
    """(path, start, end) of the one place that has `old`. LookupError if there is none, or more than one."""
    others = [*folder.glob("*.py"), *folder.glob("runtime/*.py"), *folder.glob("benchmarks/*.py"),
              *folder.glob("assets/*.py")]
    for paths in ([folder / file], others):
        found = [(path, match.start(), match.end()) for path in paths if path.exists()
                 for match in re.finditer(as_pattern(old), path.read_text(encoding="utf-8"))]
        if len(found) == 1:
            return found[0]
    raise LookupError(f"{len(found)} places have: {old}")


NO_SUCH_TESTS = "no such tests"


def run_tests(folder: Path, arguments: list[str]) -> str:
    """The name of a test that fails, "" if none does, or NO_SUCH_TESTS."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "--tb=no", "-q", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "a time-out"
    if process.returncode == 0:
        return ""
    if process.returncode in (4, 5):            # pytest's codes for wrong arguments, and for no tests
        return NO_SUCH_TESTS
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else f"pytest's exit code {process.returncode}: {output[-300:]}"


def try_break(it: Break, folder: Path, quick: bool) -> str:
    """What noticed the break, "" if nothing did. LookupError if it cannot be made."""
    before = {}
    try:
        for file, old, new in it.edits:
            path, start, end = locate(folder, file, old)
            text = path.read_text(encoding="utf-8")
            before.setdefault(path, text)
            path.write_text(text[:start] + new + text[end:], encoding="utf-8")
        noticed = run_tests(folder, ["-n", "0", *it.tests.split()])
        if noticed in ("", NO_SUCH_TESTS):
            noticed = "" if quick else run_tests(folder, ["tests"])
        return noticed
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")


def copy_tree(folder: Path) -> Path:
    """The working tree, without what git ignores."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--quick", action="store_true", help="not the whole suite")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at a time (default 2)")
    parser.add_argument("--list", type=Path, help="a Python file with other BREAKS")
    args = parser.parse_args()
    breaks = BREAKS
    if args.list:
        scope = {"Break": Break}
        exec(compile(args.list.read_text(encoding="utf-8"), str(args.list), "exec"), scope)
        breaks = scope["BREAKS"]
    if len({it.id for it in breaks}) != len(breaks):
        raise SystemExit("two breaks have the same id")
    if unknown := {*args.ids} - {it.id for it in breaks}:
        raise SystemExit(f"there is no break {', '.join(sorted(unknown))}")
    waiting, missed = queue.SimpleQueue(), []
    chosen = [it for it in breaks if it.id in args.ids or not args.ids]
    for it in chosen:
        waiting.put(it)

    def work(folder):
        while not waiting.empty():
            it = waiting.get()
            try:
                noticed = try_break(it, folder, args.quick)
                line = f"noticed by {noticed}" if noticed else f"NOT NOTICED: {it.why}"
            except LookupError as error:
                noticed, line = "", f"CANNOT BE MADE: {error}"
            if not noticed:
                missed.append(it.id)
            print(f"{it.id:24s} {line}", flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folders = [copy_tree(Path(temporary, str(i))) for i in range(args.jobs)]
        # what fails without a break notices nothing; without the `-k WORD` of single breaks
        files = {word for it in chosen for word in it.tests.split() if word.startswith("tests/")}
        if failed := run_tests(folders[0], sorted(files)):
            raise SystemExit(f"without any break this test fails: {failed}")
        workers = [threading.Thread(target=work, args=(folder,)) for folder in folders]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"{len(chosen) - len(missed)} of {len(chosen)} breaks were noticed"
          + (f"; not {' '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
