"""Token shards: files of 1-D uint16 tokens, as .npy, or as the .bin of llm.c and modded-nanogpt.
And the manifest of a folder of shards, by which fineweb.py goes on after a kill."""
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

# Not a hidden file: a Mac leaves one beside each file that it copies to another disk,
# ._x_train_000001.npy.
SHARD_NAME = re.compile(r"(?!\.)(?:.*_)?(train|val)_\d+\.(npy|bin)$")
BIN_MAGIC = 20240520            # llm.c, dev/data/data_common.py
BIN_VERSION = 1
BIN_HEADER = 256                # int32 numbers: magic, version, number of tokens, zeros


def write_shard(path: str | Path, *parts: np.ndarray, further: Iterable[np.ndarray] = ()) -> int:
    """Writes tokens, all `parts` of them and the `further` ones as they come (1-D uint16),
    atomically as a .npy or .bin, by the suffix of `path`. Returns how many. RunError where the
    disk is full."""
    length = 0
    is_bin = Path(path).suffix == ".bin"

    def write(file):
        nonlocal length

        # The header has the number of tokens, which is known at the end: room is left for it.
        # NumPy fills its header up to 128 bytes.
        start = 4 * BIN_HEADER if is_bin else 128
        file.seek(start)

        # Not np.save: on a full disk it can lose the last bytes of a file without an error.
        for part in chain(parts, further):
            file.write(np.ascontiguousarray(part, dtype="<u2"))
            length += len(part)

        file.seek(0)
        if is_bin:
            numbers = [BIN_MAGIC, BIN_VERSION, length] + [0] * (BIN_HEADER - 3)
            file.write(np.array(numbers, dtype="<i4"))
        else:
            header = {"descr": "<u2", "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
        assert file.tell() == start

    replace_file(path, write)
    return length


def open_shard(path: str | Path) -> np.memmap:
    """The tokens of a .npy or .bin shard, 1-D uint16, as a read-only map of the file. UserError
    if the file is missing, truncated or no shard. Nothing in it is ever unpickled."""
    path = Path(path)

    # NumPy warns about an unusual header, but the error is enough.
    with readable(path, "copy it or make it again"), warnings.catch_warnings(action="ignore"):
        # To open a named pipe would wait forever.
        if not path.is_file():
            raise ValueError("no regular file is there")

        if path.suffix == ".bin":
            tokens = open_bin(path)
        else:
            # Not np.load, which takes what is no .npy for a pickle or an archive.
            tokens = np.lib.format.open_memmap(path, mode="r")

        if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"a shard is 1-D uint16 tokens, it holds {tokens.dtype} "
                             f"{tokens.shape}")
        if path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError(f"its size is not that of the {len(tokens):,} tokens its header "
                             f"states")
        return tokens


def open_bin(path: Path) -> np.memmap:
    """The tokens of a .bin. ValueError if it has another header than llm.c's."""
    # A file that is too short gives fewer numbers than are asked for.
    header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
    if len(header) < BIN_HEADER or (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"it does not start with llm.c's header: magic {BIN_MAGIC}, version "
                         f"{BIN_VERSION}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER, shape=(int(header[2]),))


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of a shard in memory, 1-D uint16. They are read, not copied from the map of
    open_shard: if the file is truncated meanwhile, the map would kill the process (SIGBUS), and a
    read returns less."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


def shard_names(folder: str | Path) -> list[str]:
    """The sorted names of all shards in a folder; none if there is no such folder. UserError if
    it cannot be read, or is a file."""
    with readable(folder, "make it readable, or give another folder"):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            names = []
        except NotADirectoryError:
            raise UserError(f"{folder} is a file: give the folder of the shards") from None
    return sorted(name for name in names if SHARD_NAME.match(name))


def split_of(name: str) -> str:
    """The split of a shard by its name: 'train' or 'val'."""
    return SHARD_NAME.match(name)[1]


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """The sorted paths of a folder's shards of a split, 'train' or 'val'. UserError if there are
    none."""
    paths = [Path(folder, name) for name in shard_names(folder) if split_of(name) == split]
    if not paths:
        raise UserError(
            f"there is no data in {folder}, no *_{split}_*.npy or .bin: `python fineweb.py` "
            f"makes edu_fineweb10B, with --pretokenized 9 it fetches fineweb10B, with --input "
            f"YOUR_TEXT --out {folder} it makes shards of your own text")
    return paths


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------ the manifest of a folder

def read_manifest(folder: Path) -> dict:
    """What a folder's manifest.json records, {} without one. UserError if it is damaged."""
    path = folder / "manifest.json"
    with readable(path, "restore it, or choose another --out"):
        if not path.exists():
            return {}
        manifest = json.loads(read_text(path, errors="strict"))
        for shard in manifest["shards"]:
            name = shard["file"]

            # A name with a slash would make --verify read files elsewhere.
            if "/" in name or not SHARD_NAME.match(name):
                raise ValueError("it lists a file that is no shard of this folder")
        return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    data = json.dumps(manifest, indent=1).encode()
    replace_file(folder / "manifest.json", lambda file: file.write(data))


class ShardWriter:
    """Writes the shards of a folder, each atomically, and the manifest, by which a killed run
    goes on.

    The manifest has the `settings`, which determine every byte of the shards, the number of
    tokens `validation` that fineweb.py has chosen by them, and for each shard its tokens, its
    SHA-256 and its cursor: (the number of a file of the text, how many tokens of that file are
    done) at the end of the shard. UserError if the folder has shards of other settings."""

    def __init__(self, out: Path, prefix: str, settings: dict):
        self.out = out
        self.prefix = prefix
        self.manifest = {**settings, "validation": None, "complete": False, "shards": []}
        self.cursor = (0, 0)                      # where the next shard begins
        self.tokens = {"val": 0, "train": 0}      # in the shards of each split

        # A manifest without a shard is of a run that failed early, and binds nobody.
        if shard_names(out):
            self.manifest = self.manifest_to_continue(settings)

        # Of a new folder there are none.
        for shard in self.manifest["shards"]:
            self.go_behind(shard)

    def go_behind(self, shard: dict) -> None:
        """The next shard begins where this one of the manifest ends."""
        self.tokens[shard["split"]] += shard["tokens"]
        self.cursor = tuple(shard["cursor"])

    def manifest_to_continue(self, settings: dict) -> dict:
        """The manifest of the shards in the folder. UserError unless it has these settings and is
        whole."""
        found = read_manifest(self.out)
        if not found:
            raise UserError(f"{self.out} already holds shards without a manifest.json: choose "
                            f"another --out")
        if "version" not in found:                # of --pretokenized
            raise UserError(f"{self.out} holds shards of another source: choose another --out")
        if found["version"] != settings["version"]:
            raise UserError(
                f"{self.out} was made by another version of fineweb.py (its manifest is of "
                f"version {found['version']}, expected {settings['version']}): train on it as it "
                f"is, or choose another --out")
        for key, value in settings.items():
            if found.get(key) != value:
                raise UserError(
                    f"{self.out} was begun with another {key} ({json.dumps(found.get(key))[:80]} "
                    f"instead of {json.dumps(value)[:80]}): give the same, or choose another "
                    f"--out")

        with readable(self.out / "manifest.json", "choose another --out"):
            check_count(found["validation"], "validation")
            for shard in found["shards"]:
                file, done = shard["cursor"]
                for number in (file, done, shard["tokens"]):
                    check_count(number, shard["file"])

                # Its bytes are compared by --verify only: that takes minutes for 10 billion tokens.
                length = len(open_shard(self.out / shard["file"]))
                if shard["tokens"] != length or shard["split"] != split_of(shard["file"]):
                    raise ValueError(f"{shard['file']} is not the shard that it describes")
        return found

    def write(self, split: str, stream, parts: Iterable[np.ndarray]) -> None:
        """Writes `parts` of the tokens of a TokenStream as the next shard of a split, and then
        the manifest that lists it. If a kill comes between the two, the shard is made again."""
        listed = self.manifest["shards"]
        number = sum(shard["split"] == split for shard in listed)

        # As in build-nanogpt, whose shard 0 is validation.
        if split == "train":
            number += 1
        path = self.out / f"{self.prefix}_{split}_{number:06d}.{self.manifest['format']}"

        # Made only now, so that a mistake that is found before leaves no folder.
        with writable(self.out):
            self.out.mkdir(parents=True, exist_ok=True)

        # Without it the first shard would be a stranger's, if a kill comes before its own manifest.
        if not listed:
            write_manifest(self.out, self.manifest)
        length = write_shard(path, further=parts)
        listed.append({
            "file": path.name,
            "split": split,
            "tokens": length,
            "sha256": file_sha256(path),
            "cursor": stream.cursor,
        })
        self.go_behind(listed[-1])
        self.write_manifest()

    def write_manifest(self) -> None:
        """Writes the manifest, and removes what killed runs of the command have left
        half-written."""
        leftovers = rf"{re.escape(self.prefix)}_(train|val)_\d+\.(npy|bin)|manifest\.json"
        remove_leftovers(self.out, leftovers)
        write_manifest(self.out, self.manifest)

    def finish(self) -> None:
        """After the last token. UserError if there was none for training."""
        if not self.tokens["train"]:
            raise UserError("no text is left for training: give more text, fewer --val_tokens "
                            "or more --max_tokens, in another --out")
        self.manifest["complete"] = True
        self.write_manifest()


def check_count(number: object, what: str) -> None:
    """ValueError unless `number`, of a manifest, counts something."""
    if type(number) is not int or number < 0:
        raise ValueError(f"of {what} it has {number!r} where a number belongs")
