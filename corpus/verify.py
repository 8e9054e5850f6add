"""Every shard of a folder against the SHA-256 in its manifests: fineweb.py --verify."""
import os
import time
from pathlib import Path

from runtime.cli import UserError
from runtime.progress import Progress
from runtime.shards import SHARD_NAME, damage_of, recorded_sums


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
