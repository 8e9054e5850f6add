"""Token shards that others have published on the Hugging Face hub: fineweb.py --pretokenized."""
import re
import sys
from pathlib import Path

from corpus.hub import fetch_file, need_hub, published_sha256
from corpus.progress import Progress
from corpus.shard_writer import file_sha256, read_manifests, write_manifest
from corpus.verify import is_whole, recorded_sums
from runtime.cli import RunError, UserError
from runtime.files import remove_leftovers, writable
from runtime.shards import SHARD_NAME

# (variant, sample): dataset, prefix, number of training shards
PRETOKENIZED = {("classic", "10BT"): ("kjj0/fineweb10B-gpt2", "fineweb", 103),
                ("classic", "100BT"): ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
                ("edu", "10BT"): ("kjj0/finewebedu10B-gpt2", "finewebedu", 99)}


def check_source(out: Path, repo: str, prefix: str) -> None:
    """UserError if the shards in `out` are not from `repo`: by its manifest, without one by their names."""
    names = [path.name for path in out.glob("*") if SHARD_NAME.match(path.name)]
    found = read_manifests(out).get("manifest.json")
    ours = (found.get("pretokenized") == repo if found is not None else
            all(re.fullmatch(rf"{prefix}_(val|train)_\d{{6}}\.bin", name) for name in names))
    if names and not ours:
        raise UserError(f"{out} holds shards of another source than {repo}: choose another --out")


def fetch_whole(repo: str, path: Path) -> str:
    """Downloads `path`, a second time if it is no shard or, by its SHA-256, not the file on the hub. Its
    SHA-256; RunError if it comes damaged twice."""
    for _ in range(2):
        fetch_file(repo, path)
        if is_whole(path) and published_sha256(path) in (sha256 := file_sha256(path), None):
            return sha256
        path.unlink(missing_ok=True)              # else the next run would take it for whole
    raise RunError(f"{path} came damaged from {repo} twice: run the same command again, or ask for fewer "
                   f"shards")


def fetch_shards(repo: str, prefix: str, count: int, out: Path) -> str:
    """--pretokenized: downloads the validation shard and the first `count` training shards, as far as `out`
    lacks them, and records the SHA-256 of each in manifest.json. UserError if `out` holds shards of another
    source, RunError if a download fails. Returns what was done, in words."""
    paths = [out / f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    check_source(out, repo, prefix)
    sums, missing = recorded_sums(out), [path for path in paths if not is_whole(path)]
    for path in missing:
        sums.pop(path.name, None)

    def save():
        shards = [{"file": name, "sha256": sha256} for name, sha256 in sorted(sums.items())]
        write_manifest(out / "manifest.json", {"pretokenized": repo, "shards": shards})

    if missing:
        need_hub(f"{len(missing)} of {len(paths)} files of {repo}")
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            remove_leftovers(out, r"manifest\.json")
            save()
    progress = Progress(enabled=not sys.stderr.isatty())          # on a terminal huggingface_hub has its bars
    for path in progress.over(f"{out}: fetching from {repo}", missing, "shards"):
        sums[path.name] = fetch_whole(repo, path)
        save()
    return f"{len(missing)} of {len(paths)} shards fetched from {repo}"
