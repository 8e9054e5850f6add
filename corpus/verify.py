"""Every shard of a folder against the SHA-256 in its manifests: fineweb.py --verify."""
import hashlib
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from corpus.progress import Progress
from runtime.cli import UserError
from runtime.files import read_text, readable
from runtime.shards import MANIFEST_NAME, SHARD_NAME, open_shard
from runtime.tokenizer import VOCAB_SIZE

OTHER_BYTES = "its SHA-256 is not that in its manifest"


def is_whole(path: Path) -> bool:
    """Whether open_shard reads it."""
    with suppress(UserError):
        return open_shard(path) is not None
    return False


def recorded_sums(folder: str | Path) -> dict[str, str]:
    """{name of a shard: SHA-256 of its file}, of all shards that the manifests in `folder` list; '' where
    there is none, as in manifests of earlier versions. UserError for a manifest that is damaged."""
    sums = {}
    for path in sorted(Path(folder).glob("manifest*.json")):
        if not MANIFEST_NAME.fullmatch(path.name):
            continue
        with readable(path, "restore it, or remove it: its shards are then not checked"):
            found = json.loads(read_text(path, errors="strict"))
            shards = found.get("shards") if isinstance(found, dict) else None
            for shard in shards if isinstance(shards, list) else ():      # or another project's manifest
                if isinstance(shard, dict) and isinstance(shard.get("file"), str):
                    sha256 = shard.get("sha256", "")
                    if not re.fullmatch(r"([0-9a-f]{64})?", sha256):
                        raise ValueError("a sha256 in it is not one")
                    sums[Path(shard["file"]).name] = sha256
    return sums


def damage_of(path: Path, sha256: str = "") -> str:
    """What is wrong with a shard, all of whose bytes are read: '' if nothing."""
    if not os.path.isfile(path):
        return "missing"
    found, largest, piece = hashlib.sha256(), 0, np.empty(1 << 23, dtype=np.uint8)
    try:
        offset = open_shard(path).offset
        with readable(path, "copy it again"), open(path, "rb") as file:
            found.update(file.read(offset))
            while n := file.readinto(piece):
                found.update(piece[:n])
                largest = max(largest, int(piece[:n // 2 * 2].view("<u2").max()))
    except UserError as error:
        return OTHER_BYTES if sha256 and not isinstance(error.__context__, OSError) else str(error)
    if sha256 and found.hexdigest() != sha256:
        return OTHER_BYTES
    return f"it holds token {largest}, and GPT-2's end at {VOCAB_SIZE - 1}" if largest >= VOCAB_SIZE else ""


def verify(folder: Path) -> None:
    """--verify: reads all shards in `folder` and compares them with the SHA-256 in its manifests. UserError
    names those that differ or are missing."""
    start = time.perf_counter()
    if not os.path.isdir(folder):
        raise UserError(f"--verify {folder}: there is no such folder")
    found = {path.name: "" for path in folder.glob("*") if SHARD_NAME.match(path.name)}
    sums = dict(sorted((found | recorded_sums(folder)).items()))
    if not any(sums.values()):
        raise UserError(f"no shard in {folder} can be checked: no manifest in it has a SHA-256 (those of "
                        f"earlier versions have none)")
    bad = [f"{name} ({why})" for name in Progress().over(f"{folder}: checking", [*sums], "shards")
           if (why := damage_of(folder / name, sums[name]))]
    unknown = ", ".join(name for name, sha256 in sums.items() if not sha256)
    unknown = unknown and f"; not checked (no SHA-256 in its manifest): {unknown}"
    if bad:
        raise UserError(f"{len(bad)} of {len(sums)} shards in {folder} are damaged or missing: "
                        f"{', '.join(bad)}. Restore them from a copy, or make them again: remove them "
                        f"(--pretokenized) or the folder, and run the command that made it{unknown}")
    size = sum((folder / name).stat().st_size for name, sha256 in sums.items() if sha256)
    print(f"{folder}: {sum(map(bool, sums.values()))} shards, {size / 1e6:,.1f} MB, are as they were "
          f"written, after {time.perf_counter() - start:.1f} s{unknown}")
