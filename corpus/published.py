"""Token shards that others have published on the Hugging Face hub: fineweb.py --pretokenized."""
import json
import re
import sys
from pathlib import Path

from runtime.cli import RunError, UserError
from runtime.files import file_sha256, read_text, remove_leftovers, replace_file, writable
from runtime.hub import fetch_file, need_hub, published_sha256
from runtime.progress import Progress
from runtime.shards import SHARD_NAME, is_whole, recorded_sums
from runtime.start import same_command_resumes

# (variant, sample): dataset, prefix, number of training shards
PRETOKENIZED = {("classic", "10BT"): ("kjj0/fineweb10B-gpt2", "fineweb", 103),
                ("classic", "100BT"): ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
                ("edu", "10BT"): ("kjj0/finewebedu10B-gpt2", "finewebedu", 99)}


def check_source(out: Path, repo: str, prefix: str) -> None:
    """UserError if the shards in `out` are not from `repo`: by its manifest, without one by their names."""
    names = [path.name for path in out.glob("*") if SHARD_NAME.match(path.name)]
    try:
        found = json.loads(read_text(out / "manifest.json"))
        ours = isinstance(found, dict) and found.get("pretokenized") == repo
    except FileNotFoundError:
        ours = all(re.fullmatch(rf"{prefix}_(val|train)_\d{{6}}\.bin", name) for name in names)
    except (ValueError, RecursionError):
        ours = False
    if names and not ours:
        raise UserError(f"{out} holds shards of another source than {repo}: choose another --out")


def save_sums(out: Path, repo: str, sums: dict[str, str]) -> None:
    """Writes the manifest of fetched shards."""
    content = {"pretokenized": repo, "shards": [{"file": name, "sha256": sha256}
                                                for name, sha256 in sorted(sums.items())]}
    replace_file(out / "manifest.json", lambda file: file.write(json.dumps(content, indent=1).encode()))


def fetch_whole(repo: str, path: Path) -> str:
    """Downloads `path`. Its SHA-256, or '' if it is no shard or, by its SHA-256, not the file on the hub."""
    fetch_file(repo, path)
    sha256 = file_sha256(path) if is_whole(path) else ""
    if sha256 and published_sha256(path) not in (sha256, None):
        path.unlink()                             # else the next run would take it for whole
        return ""
    return sha256


def fetch_shards(repo: str, prefix: str, count: int, out: Path) -> str:
    """--pretokenized: downloads the validation shard and the first `count` training shards, as far as `out`
    lacks them, and records the SHA-256 of each in manifest.json. UserError if `out` holds shards of another
    source, RunError if a download fails. Returns what was done, in words."""
    paths = [out / f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    with writable(out):
        check_source(out, repo, prefix)
    sums = {}
    if missing := [path for path in paths if not is_whole(path)]:
        need_hub(f"{len(missing)} of {len(paths)} files of {repo}")
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            remove_leftovers(out, r"manifest\.json")
            sums = {name: sum for name, sum in recorded_sums(out).items() if out / name not in missing}
            save_sums(out, repo, sums)
    progress = Progress(enabled=not sys.stderr.isatty())          # on a terminal huggingface_hub has its bars
    with progress(f"{out}: fetching from {repo}", len(missing), "shards") as task:
        for path in missing:
            if sums:
                same_command_resumes()
            if not (sha256 := fetch_whole(repo, path) or fetch_whole(repo, path)):
                raise RunError(f"{path} came damaged from {repo} twice: run the same command again, or ask "
                               f"for fewer shards")
            sums[path.name] = sha256
            save_sums(out, repo, sums)
            task.update()
    return f"{len(missing)} of {len(paths)} shards fetched from {repo}"
