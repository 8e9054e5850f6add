"""The first seconds of a command, while it imports torch, and Ctrl-C at any moment. A script calls `begin`
before its other imports; cli.run_command does the rest.

Imports only what Python has loaded by then. While it imported signal, threading and contextlib, Ctrl-C would
still be a traceback.
"""
import _signal as signal
import _thread
import os
import sys
import time

QUIET = 2.0             # seconds of importing before the first progress line
PRESSED = []                        # when Ctrl-C was pressed first
LINE = ["stopped by Ctrl-C"]        # what is said then, once


def begin(torch: bool = True) -> None:
    """Until run_command: Ctrl-C ends the process with one line and exit code 130. If `torch` is imported and
    that takes long, a line on a terminal says so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:    # else it is ignored
        signal.signal(signal.SIGINT, stop_at_once)
    if hasattr(signal, "SIGUSR2"):      # there is nothing to save yet
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if torch and is_rank0() and os.isatty(2):
        _thread.start_new_thread(_sign_of_life, ())
    import atexit                       # from here on Ctrl-C is no traceback
    atexit.register(_ignore_ctrl_c)     # registered first, hence called last


def _ignore_ctrl_c():
    """Python's finalization would give SIGINT back its default action: in the seconds that it takes to free
    torch, Ctrl-C would replace an exit code that is settled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _sign_of_life():
    time.sleep(QUIET)
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", True):
        _say("loading torch ...")


def _say(text):
    """Not print: a signal may have interrupted one."""
    try:
        os.write(2, f"{os.path.basename(sys.argv[0])}: {text}\n".encode())
    except OSError:                     # it is closed
        pass


def same_command_resumes() -> None:
    """From now on the line after Ctrl-C says so."""
    if LINE:
        LINE[1:] = ["the same command resumes"]


def tell_stopped() -> None:
    """The line after Ctrl-C, once, by rank 0."""
    if is_rank0() and LINE:
        _say("; ".join(LINE))
    LINE.clear()


def stop_at_once(number=None, frame=None) -> None:
    """SIGINT while nothing has to be cleaned up."""
    tell_stopped()
    os._exit(130)


def _stop(number, frame):
    """SIGINT while a command runs. A second one within a second is the same, come twice (torchrun passes a
    terminal's on); a later one does not wait for the cleaning up."""
    if not PRESSED:
        PRESSED.append(time.monotonic())
        raise KeyboardInterrupt
    if time.monotonic() > PRESSED[0] + 1:
        stop_at_once()


def ctrl_c_is_handled() -> None:
    """After a KeyboardInterrupt that ended only a part of the command: the next Ctrl-C is a first one."""
    PRESSED.clear()


def _unraisable(lost, hook=sys.unraisablehook):
    """Python prints what is raised inside a callback or a destructor, and continues."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        stop_at_once()
    hook(lost)


def imports_are_done() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that a command cleans up."""
    if signal.getsignal(signal.SIGINT) is stop_at_once:
        sys.unraisablehook = _unraisable
        signal.signal(signal.SIGINT, _stop)


def command_is_done() -> None:
    """From here on Ctrl-C ends the process at once: a KeyboardInterrupt in Python's finalization would be a
    traceback."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, stop_at_once)
