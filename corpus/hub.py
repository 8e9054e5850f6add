"""The Hugging Face hub: is it reachable, and files of a dataset."""
import errno
import itertools
import math
import os
import re
import time
from collections.abc import Container
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from runtime.cli import RunError, brief_error, print_error
from runtime.files import read_text

RETRIES = 8                     # waits of 1, 2, 4 ... 128 s: about four minutes without the network
LONGEST_WAIT = 3600             # seconds, whatever the hub asks for
REPO_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*(?<![-.])", re.ASCII)          # OWNER/NAME
# errors of the disk (errno) and of HTTP (status)
NOT_WORTH_RETRYING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
                      errno.EISDIR, 401, 403, 404}


def causes(error: BaseException) -> list[BaseException]:
    """An error, then the one that it came from, and so on."""
    chain = []
    while error and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def reach_hub() -> bool:
    """Whether the Hugging Face hub answers. If not, its libraries are set to use their caches only:
    otherwise they retry for half a minute and print each attempt."""
    import huggingface_hub
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
    except Exception:                             # network errors come in the classes of many libraries
        os.environ["HF_HUB_OFFLINE"] = "1"        # for libraries imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return not huggingface_hub.constants.HF_HUB_OFFLINE


def need_hub(what: str) -> None:
    """Raises RunError if the hub is out of reach: at once, not after minutes of retries."""
    if not reach_hub():
        raise RunError(f"the Hugging Face hub is out of reach (or HF_HUB_OFFLINE is set): connect to a "
                       f"network to get {what}, or give your own text with --input")


def asked_wait(error: Exception) -> int:
    """Seconds that the hub asks to wait, by the Retry-After (seconds or a date) or else the RateLimit header
    of the answer that `error` came from. 0 if it does not ask."""
    for response in (getattr(cause, "response", None) for cause in causes(error)):
        if getattr(response, "status_code", None) in (429, 503):
            after, limit = (response.headers.get(name, "") for name in ("retry-after", "ratelimit"))
            with suppress(ValueError, OverflowError):
                seconds = after or (re.search(r"\bt\s*=\s*(\d+)", limit) or ["", 0])[1]
                if after and not after.strip().isdecimal():
                    seconds = (parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds()
                return math.ceil(max(0, min(LONGEST_WAIT, float(seconds))))
    return 0


def wait_to_retry(error: Exception, failures: int, repo: str, what: str,
                  final: Container = NOT_WORTH_RETRYING) -> None:
    """Exponential backoff: prints `error` and sleeps 2^failures seconds, or longer if the hub asks for it.
    `failures`: how many before it. Raises RunError "`what` (`error`) ..." after RETRIES retries, or at once
    for the error codes in `final`."""
    code = getattr(error, "errno", None) or getattr(getattr(error, "response", None), "status_code", None)
    if failures == RETRIES or code in final:
        raise RunError(f"{what} ({brief_error(error)}): run the same command again to resume, or give your "
                       f"own text with --input") from None
    seconds, whose = max((2 ** failures, ""), (asked_wait(error), ", as the hub asks"))
    print_error(f"{repo}: {brief_error(error)[:120]}; trying again in {seconds} s{whose}")
    time.sleep(seconds)


def fetch_file(repo: str, path: Path) -> None:
    """Downloads a file of a hub dataset to `path`; huggingface_hub resumes an interrupted download. Raises
    RunError if it fails after all retries."""
    from huggingface_hub import hf_hub_download
    for failures in itertools.count():
        try:
            path.unlink(missing_ok=True)          # huggingface_hub would accept a truncated file there
            hf_hub_download(repo, path.name, repo_type="dataset", local_dir=path.parent)
            return
        except Exception as error:                # network errors come in the classes of many libraries
            wait_to_retry(error, failures, repo, f"cannot fetch {path} from {repo} on the Hugging Face hub")


def published_sha256(path: Path) -> str | None:
    """SHA-256 of the file on the hub that fetch_file downloaded to `path`, from the note that huggingface_hub
    leaves: a large file's etag is its SHA-256. None where it has no such."""
    note = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
    with suppress(OSError, ValueError):
        if found := re.search(r"\b[0-9a-f]{64}\b", read_text(note, 1 << 16)):
            return found[0]
    return None
