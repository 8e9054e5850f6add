"""Token shards: files of 1-D uint16 tokens, as .npy, or as the .bin of llm.c and modded-nanogpt.
And the manifest of a folder of shards, by which fineweb.py goes on after a kill."""
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import read_text, reading, replace_file
from runtime.kinds import first_bytes_tell

# Of a shard, or one of nanoGPT's two files. Hidden files are no shards: a Mac leaves one beside
# each file that it copies to another disk, ._x_train_000001.npy.
SHARD_NAME = re.compile(r"(?!\.)(?:(?:.*_)?(train|val)_\d+\.(?:npy|bin)|(train|val)\.bin)$")
NANOGPT = ("train.bin", "val.bin")          # uint16 tokens without a header
BIN_MAGIC = 20240520            # llm.c, dev/data/data_common.py
BIN_VERSION = 1
BIN_HEADER = 256                # int32 numbers: magic, version, number of tokens, zeros


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes tokens (1-D uint16) atomically as a .npy or .bin, by the suffix of `path`."""
    write_parts(path, len(tokens), [tokens])


def write_parts(path: str | Path, length: int, parts: Iterable[np.ndarray]) -> None:
    """As write_shard, of `length` tokens that come in parts."""
    def write(file):
        if Path(path).suffix == ".bin":
            numbers = [BIN_MAGIC, BIN_VERSION, length] + [0] * (BIN_HEADER - 3)
            file.write(np.array(numbers, dtype="<i4"))
        else:
            header = {"descr": "<u2", "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)

        # Not np.save: on a full disk it can lose the last bytes of a file without an error.
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype="<u2"))

    replace_file(path, write)


def open_shard(path: str | Path) -> np.memmap:
    """The tokens of a .npy or .bin shard, 1-D uint16, as a read-only map of the file. UserError
    if it is truncated or no shard. Nothing in it is ever unpickled."""
    path = Path(path)
    with reading(path, "copy or make the shard again"), first_bytes_tell(path):
        if path.name in NANOGPT:
            tokens = np.memmap(path, dtype="<u2", mode="r")
        elif path.suffix == ".bin":
            tokens = open_bin(path)
        else:
            # Not np.load, which takes what is no .npy for a pickle or an archive.
            tokens = np.lib.format.open_memmap(path, mode="r")

        if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"expected 1-D uint16 tokens, found {tokens.dtype} {tokens.shape}")
        if path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError(f"its size does not match the {len(tokens):,} tokens of its header")
        return tokens


def open_bin(path: Path) -> np.memmap:
    """The tokens of a .bin. ValueError if it has another header than llm.c's."""
    # A file that is too short gives fewer numbers than are asked for.
    header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
    if len(header) < BIN_HEADER or (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"it does not start with llm.c's header, which has magic {BIN_MAGIC} and "
                         f"version {BIN_VERSION}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER, shape=(int(header[2]),))


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard in memory, 1-D uint16. They are read, not copied from the map of
    open_shard: if the file is truncated meanwhile, the map would kill the process (SIGBUS), and a
    read returns less."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


def shard_names(folder: str | Path) -> list[str]:
    """The sorted names of all shards in a folder; none if there is no such folder."""
    if not os.path.lexists(folder):
        return []
    return sorted(name for name in os.listdir(folder) if SHARD_NAME.match(name))


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """The sorted paths of a folder's shards of a split, 'train' or 'val'. UserError if there are
    none."""
    names = [name for name in shard_names(folder) if split in SHARD_NAME.match(name).groups()]
    if not names:
        raise UserError(
            f"{folder} has no shards *_{split}_*.npy or .bin: make edu_fineweb10B with `python "
            f"fineweb.py`, or for speedrun fineweb10B with `--pretokenized 17`, or shards of your "
            f"own text with `--input YOUR_TEXT --out {folder}`")
    return [Path(folder, name) for name in names]


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------ the manifest of a folder

def read_manifest(folder: Path) -> dict:
    """What a folder's manifest.json records, {} without one. UserError if it is damaged."""
    path = folder / "manifest.json"
    with reading(path, "restore the file, or choose another --out"):
        if not path.exists():
            return {}
        return json.loads(read_text(path, errors="strict"))


def unfinished(folder: str | Path) -> str:
    """A line about shards to which fineweb.py was still to add others, else an empty text."""
    try:
        complete = read_manifest(Path(folder)).get("complete", True)
    except (UserError, AttributeError):
        return ""               # it is the manifest of another program
    if complete:
        return ""
    return (f"warning: {folder} has only a part of its text, because fineweb.py was interrupted: "
            f"run the same fineweb.py command again, which adds the rest")


def write_manifest(folder: Path, manifest: dict) -> None:
    data = json.dumps(manifest, indent=1).encode()
    replace_file(folder / "manifest.json", lambda file: file.write(data))


def manifest_to_continue(folder: Path, settings: dict) -> dict:
    """The manifest of the shards in `folder`; a new one with the `settings` if there are none.
    UserError unless the shards were made with these settings, and the manifest is whole."""
    # A manifest without a shard is of a run that failed early, and binds nobody.
    if not shard_names(folder):
        return {**settings, "validation": None, "complete": False, "shards": []}

    # The version comes first: of the manifest of another command it is null.
    found = read_manifest(folder)
    for key, value in settings.items():
        if found.get(key) != value:
            begun = json.dumps(found.get(key))[:80]
            raise UserError(f"{folder} was begun with another {key}, {begun}: use the same {key}, "
                            f"choose another --out, or train on these shards as they are")

    with reading(folder / "manifest.json", "choose another --out"):
        for shard in found["shards"]:
            # Its bytes are compared by --verify only: that takes minutes for 10 billion tokens.
            length = len(open_shard(folder / shard["file"]))
            if shard["tokens"] != length or len(shard["cursor"]) != 2:
                raise ValueError(f"its entry of {shard['file']} does not match that file")
    return found
