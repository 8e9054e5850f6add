"""The Hugging Face hub."""
import errno
import itertools
import os
import time
from pathlib import Path

from runtime.cli import RunError, UserError, brief_error, print_error

RETRIES = 8                     # waits of 1, 2, 4 ... 128 s: about four minutes without the network
# the disk's and HTTP's errors that no waiting mends
NOT_WORTH_RETRYING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, 401, 403, 404}
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")           # names that stand there without their owner


def reach_hub() -> bool:
    """Whether the Hugging Face hub answers. Where it does not, lets its libraries look into their caches only: they would
    try for half a minute, and print each attempt."""
    import huggingface_hub
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
    except Exception:                             # the network's errors are of many libraries' classes
        os.environ["HF_HUB_OFFLINE"] = "1"        # for what is imported only now
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return not huggingface_hub.constants.HF_HUB_OFFLINE


def need_hub(what: str) -> None:
    """RunError at once, rather than after minutes of retries, where no hub is in reach."""
    if not reach_hub():
        raise RunError(f"the Hugging Face hub is out of reach (or HF_HUB_OFFLINE is set), and {what} must come from there: run "
                       f"the same command again with a network, or give text of your own by --input")


def fetch_file(repo: str, path: Path) -> None:
    """Fetches a file of a hub dataset to `path`; huggingface_hub goes on where an earlier call of it ended."""
    from huggingface_hub import hf_hub_download
    for failures in itertools.count():
        try:
            path.unlink(missing_ok=True)          # a file cut off later on passes there for what was fetched
            hf_hub_download(repo, path.name, repo_type="dataset", local_dir=path.parent)
            return
        except Exception as error:                # the network's errors are of many libraries' classes
            code = getattr(error, "errno", None) or getattr(getattr(error, "response", None), "status_code", None)
            if failures == RETRIES or code in NOT_WORTH_RETRYING:
                raise RunError(f"cannot fetch {path} from the Hugging Face hub, {repo}: {error}. Run the same command again "
                               f"to go on, or give text of your own by --input") from None
            print_error(f"{repo}: {error}; trying again in {2 ** failures} s")
            time.sleep(2 ** failures)


def download_model(name: str) -> Path:
    """Folder of the hub's config.json and model.safetensors of `name`, from huggingface_hub's cache where it can."""
    repo = f"openai-community/{name}" if name in OPENAI_NAMES else name
    try:
        if "/" not in repo:
            raise ValueError(f"names there have an owner, but for {', '.join(OPENAI_NAMES)}")
        reach_hub()
        from huggingface_hub import hf_hub_download
        hf_hub_download(repo, "model.safetensors")
        return Path(hf_hub_download(repo, "config.json")).parent
    except Exception as error:      # the network's errors are of many libraries' classes
        raise UserError(f"{name} is neither a file or folder here nor to be had from the Hugging Face hub "
                        f"({brief_error(error)}): check the name and the connection, "
                        f"or give the path of a checkpoint") from None
