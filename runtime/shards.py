"""Token shards: 1-D uint16 in .npy, or in the .bin of llm.c and modded-nanogpt."""
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import read_text, readable, remove_leftovers, replace_file, writable

# not of a hidden file, as a Mac leaves one beside each that it copies to another disk: ._x_train_000001.npy
SHARD_NAME = re.compile(r"(?!\.)(?:.*_)?(train|val)_\d+\.(npy|bin)$")
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py


def write_shard(path: str | Path, *parts: np.ndarray, further: Iterable[np.ndarray] = ()) -> int:
    """Writes 1-D uint16 tokens, all `parts` of them and `further` ones as they come, atomically as .npy or
    .bin, by the suffix of `path`. Their number."""
    def write(file):
        nonlocal n
        file.seek(start)
        # not np.save: on a full disk it can lose a file's last bytes without an error
        for part in chain(parts, further):
            n += file.write(np.ascontiguousarray(part, dtype="<u2")) // 2
        file.seek(0)
        if Path(path).suffix == ".bin":
            file.write(np.array([BIN_MAGIC, BIN_VERSION, n] + [0] * (BIN_HEADER - 3), dtype="<i4"))
        else:
            head = {"descr": "<u2", "fortran_order": False, "shape": (n,)}
            np.lib.format.write_array_header_1_0(file, head)
        assert file.tell() == start

    n, start = 0, 4 * BIN_HEADER if Path(path).suffix == ".bin" else 128          # as NumPy fills it up
    replace_file(path, write)
    return n


def open_shard(path: str | Path) -> np.memmap:
    """Tokens of a .npy or .bin shard as a read-only memory map, 1-D uint16. Raises UserError if the file is
    missing, truncated or not a shard; nothing in it is ever unpickled."""
    path = Path(path)
    # an unusual header makes numpy warn: the error is enough
    with readable(path, "copy it or make it again"), warnings.catch_warnings(action="ignore"):
        if not path.is_file():                    # opening a named pipe would block forever
            raise ValueError("no regular file is there")
        # not np.load: it takes a file that is no .npy for a pickle or an archive
        tokens = _open_bin(path) if path.suffix == ".bin" else np.lib.format.open_memmap(path, mode="r")
        if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"a shard is 1-D uint16 tokens, it holds {tokens.dtype} {tokens.shape}")
        if path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError(f"its size is not that of the {len(tokens):,} tokens its header states")
        return tokens


def _open_bin(path):
    header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
    if len(header) < BIN_HEADER or (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"it does not start with llm.c's header: magic {BIN_MAGIC}, version {BIN_VERSION}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER, shape=(int(header[2]),))


def read_shard(path: str | Path) -> np.ndarray:
    """Tokens of a shard in memory, 1-D uint16. Not copied from the memory map: if the file is truncated
    meanwhile, that kills the process (SIGBUS), while a read returns fewer tokens."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


def shard_names(folder: str | Path) -> list[str]:
    """The sorted names of all shards in a folder, none if there is no such folder. UserError if it cannot be
    read, or is a file."""
    with readable(folder, "make it readable, or give another folder"):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            raise UserError(f"{folder} is a file: give the folder of the shards") from None
    return sorted(name for name in names if SHARD_NAME.match(name))


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a folder's shards of `split`, 'train' or 'val'. Raises UserError if there is none."""
    paths = [Path(folder, name) for name in shard_names(folder) if SHARD_NAME.match(name)[1] == split]
    if not paths:
        raise UserError(f"there is no data in {folder}, no *_{split}_*.npy or .bin: "
                        f"`python fineweb.py` makes edu_fineweb10B, with --pretokenized 9 it fetches "
                        f"fineweb10B, with --input YOUR_TEXT --out {folder} it makes shards of your own text")
    return paths


def read_manifest(folder: Path) -> dict:
    """What a folder's manifest.json records, {} without one. UserError if it is damaged."""
    path = folder / "manifest.json"
    with readable(path, "restore it, or choose another --out"):
        if not path.exists():
            return {}
        found = json.loads(read_text(path, errors="strict"))
        if not all(SHARD_NAME.match(shard["file"]) and "/" not in shard["file"] for shard in found["shards"]):
            raise ValueError("a shard in it is none")
        return found


def write_manifest(folder: Path, manifest: dict) -> None:
    replace_file(folder / "manifest.json", lambda file: file.write(json.dumps(manifest, indent=1).encode()))


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Writes the shards of a folder, each atomically, and manifest.json, by which a killed run goes on: the
    `settings`, which determine every byte, and of each shard its tokens, its SHA-256 and the cursor, where in
    the text the next one begins. UserError if the folder has shards of other settings."""

    def __init__(self, out: Path, prefix: str, settings: dict):
        self.out, self.prefix, self.new = out, prefix, []
        self.cursor = 0, 0      # where the next shard begins: number of a file, tokens of that which are used
        # a manifest without any shard, of a run that failed before, binds nobody
        found = read_manifest(out) if shard_names(out) else None
        if found == {}:
            raise UserError(f"{out} already holds shards without a manifest.json: choose another --out")
        for key in settings if found else ():
            if (old := found.get(key)) != settings[key]:
                raise UserError(f"{out} was begun with another {key} ({json.dumps(old)[:80]} instead of "
                                f"{json.dumps(settings[key])[:80]}): give the same, or choose another --out")
        self.manifest = {**settings, "complete": False, "shards": []} | (found or {})
        with readable(out / "manifest.json", "choose another --out"):
            for shard in self.manifest["shards"]:
                numbers = shard["tokens"], *shard["cursor"], self.manifest["block"]
                if [type(n) for n in numbers] != [int] * 4 or min(numbers) < 0 or (
                        (shard["split"], shard["tokens"]) != (SHARD_NAME.match(shard["file"])[1],
                                                              len(open_shard(out / shard["file"])))):
                    raise ValueError(f"{shard['file']} is not the shard that it describes")
                self.cursor = tuple(shard["cursor"])

    def count(self, split: str) -> int:
        """Tokens of the shards of a split."""
        return sum(shard["tokens"] for shard in self.manifest["shards"] if shard["split"] == split)

    def write(self, split: str, parts: Iterable[np.ndarray]) -> None:
        """Writes the next shard of a split."""
        number = sum(shard["split"] == split for shard in self.manifest["shards"]) + (split == "train")
        path = self.out / f"{self.prefix}_{split}_{number:06d}.{self.manifest['format']}"
        with writable(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if not self.manifest["shards"]:           # without it the first shard would not be ours
            write_manifest(self.out, self.manifest)
        self.new.append({"file": path.name, "split": split, "tokens": write_shard(path, further=parts),
                         "sha256": file_sha256(path)})

    def record(self, cursor: tuple[int, int], complete: bool = False) -> None:
        """Records the shards that were written: the manifest gets all of them or none."""
        self.manifest["shards"] += [shard | {"cursor": cursor} for shard in self.new]
        self.manifest["complete"], self.new, self.cursor = complete, [], cursor
        remove_leftovers(self.out, rf"{re.escape(self.prefix)}_(train|val)_\d+\.(npy|bin)|manifest\.json")
        write_manifest(self.out, self.manifest)
