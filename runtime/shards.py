"""Token shards: files of 1-D uint16 tokens, as .npy, or as the .bin of llm.c and modded-nanogpt.
And the manifest of a folder of shards, by which fineweb.py goes on after a kill."""
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.cli import UserError, unexpected
from runtime.files import is_there, read_text, reading, replace_file
from runtime.tokenizer import EOT, VOCAB_SIZE

# Of a shard; llm.c's tiny_shakespeare_train.bin and nanoGPT's train.bin have no number. Hidden
# files are no shards: a Mac leaves one beside each file that it copies to another disk,
# ._x_train_000001.npy.
SHARD_NAME = re.compile(r"(?!\.)(?:.*_)?(train|val)(?:_\d+\.npy|(?:_\d+)?\.bin)$")
NANOGPT = ("train.bin", "val.bin")          # uint16 tokens without a header
NPY_MAGIC = b"\x93NUMPY"
BIN_MAGIC = 20240520            # llm.c, dev/data/data_common.py
BIN_START = BIN_MAGIC.to_bytes(4, "little")
BIN_VERSION = 1
BIN_HEADER = 256                # int32 numbers: magic, version, number of tokens, zeros
REMEDY = "copy or make the shard again"
SAMPLE = 2**18                  # numbers of 32 bits: a megabyte of a file, which tells its kind


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


def count_tokens(path: str | Path) -> int:
    """How many tokens a .npy or .bin shard has. UserError if it is truncated or no shard."""
    with reading(path, REMEDY), open(path, "rb") as file:
        _, length = find_tokens(file)
        if Path(path).name in NANOGPT:
            check_nanogpt(Path(path))
        return length


def read_shard(path: str | Path, first: int = 0, count: int | None = None) -> np.ndarray:
    """The tokens of a shard from number `first` on, at most `count`: 1-D uint16, in memory.

    UserError if the shard is truncated or none. The file is read, not mapped: where it becomes
    shorter, or its disk goes away, a map would kill the process (SIGBUS), and not all file systems
    have maps.
    """
    with reading(path, REMEDY), open(path, "rb") as file:
        offset, length = find_tokens(file)
        end = length
        if count is not None:
            end = min(length, first + count)
        tokens = np.empty(max(0, end - first), dtype="<u2")
        file.seek(offset + 2 * first)
        if file.readinto(tokens) < tokens.nbytes:
            raise ValueError("it has become shorter while it was read")
        return tokens


def find_tokens(file: BinaryIO) -> tuple[int, int]:
    """(bytes before the first token, number of tokens) of a shard. Nothing is ever unpickled.

    ValueError if it is truncated or no shard.
    """
    path = Path(file.name)
    size = os.fstat(file.fileno()).st_size
    if path.name in NANOGPT:
        length = size // 2
    elif path.suffix == ".bin":
        length = read_bin_header(file)
    else:
        length = read_npy_header(file)

    offset = file.tell()
    if length < 1 or size != offset + 2 * length:
        raise ValueError(f"its {size:,} bytes do not match {length:,} tokens after a header of "
                         f"{offset}")
    return offset, length


def read_bin_header(file: BinaryIO) -> int:
    """The number of tokens in a .bin with llm.c's header. ValueError for another one."""
    content = file.read(4 * BIN_HEADER)
    header = np.frombuffer(content.ljust(4 * BIN_HEADER), dtype="<i4")
    if not BIN_START.startswith(content[:4]):
        raise without_header(Path(file.name), "llm.c's")
    if (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"it does not start with llm.c's header, which has magic {BIN_MAGIC} and "
                         f"version {BIN_VERSION}")
    return int(header[2])


def read_npy_header(file: BinaryIO) -> int:
    """The number of tokens in a .npy. ValueError if it holds other numbers, or is none."""
    # Not np.load, which takes what is no .npy for a pickle or an archive.
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    start = file.read(len(NPY_MAGIC))
    if not NPY_MAGIC.startswith(start):
        raise without_header(Path(file.name), "NumPy's")
    file.seek(0)
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise unexpected("its version of .npy", "(1, 0) or (2, 0)", str(version))
    shape, _, dtype = readers[version](file)
    if dtype != np.uint16 or len(shape) != 1:
        raise ValueError(f"expected 1-D uint16 tokens, found {dtype} {shape}")
    return shape[0]


def shard_names(folder: str | Path) -> list[str]:
    """The sorted names of all shards in a folder; none if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if SHARD_NAME.match(name))


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """The sorted paths of a folder's shards of a split, 'train' or 'val'. UserError if there are
    none."""
    names = shard_names(folder)
    of_split = [name for name in names if SHARD_NAME.match(name)[1] == split]
    if of_split:
        return [Path(folder, name) for name in of_split]

    if names and split == "train":
        raise UserError(f"{folder} has validation shards alone, which are for --eval_only: to "
                        "train, make another folder with `python fineweb.py --input YOUR_TEXT "
                        "--out ANOTHER`, and name it with --data")
    if names:
        raise UserError(f"{folder} has training shards alone: train with --val_every 0, or put "
                        "validation shards beside them, whose names have val in the place of train")
    if is_there(folder):
        check_other_files(folder, split)

    # fineweb.py makes these two folders without --out; any other is named by it.
    flags = {"edu_fineweb10B": "", "fineweb10B": " --pretokenized 17"}
    own_text = f" --input YOUR_TEXT --out {shlex.quote(str(folder))}"
    command = f"python fineweb.py{flags.get(str(folder), own_text)}"
    raise UserError(f"{folder} has no shards *_{split}_*.npy or .bin: make them with `{command}`, "
                    "or name another folder with --data")


# ------------------------------------------------------------ tokens of other programs

def check_nanogpt(path: Path) -> None:
    """UserError unless train.bin or val.bin can be tokens of 16 bits without a header."""
    if suffix_by_header(path):
        raise UserError(f"{path} has a header, and nanoGPT's file of this name has none: "
                        f"{conversion(path)}")
    if raw_dtype(path) == "<u4":
        raise UserError(f"{path} has numbers of 32 bits, not of 16: {conversion(path)}")


def without_header(path: Path, whose: str) -> UserError:
    """The error of a shard that has only the name of one."""
    with open(path, "rb") as file:
        start = file.read(8)
    return UserError(f"{path} begins with {start!r}, not with {whose} header: {conversion(path)}")


def check_other_files(folder: str | Path, split: str) -> None:
    """UserError if a folder without shards has tokens, by another name or of another program."""
    for name in sorted(os.listdir(folder)):
        path = Path(folder, name)
        if name.startswith(".") or not path.is_file():
            continue
        kind = ""
        if path.suffix == ".ds":
            kind = "is datatrove's"
        elif path.suffix == ".bin" and is_there(path.with_suffix(".idx")):
            kind = "is Megatron's"
        elif path.suffix == ".npy":
            kind = "has no header, as those of OLMo"
        if path.suffix in (".npy", ".bin") and suffix_by_header(path):
            kind = "does not have the name of a shard"
        if kind:
            raise UserError(f"{path} {kind}: {conversion(path, split)}")


def suffix_by_header(path: Path) -> str:
    """'.npy' or '.bin' of a file that begins as NumPy's or llm.c's do, else ''."""
    with open(path, "rb") as file:
        start = file.read(len(NPY_MAGIC))
    if start == NPY_MAGIC:
        return ".npy"
    if start[:4] == BIN_START:
        return ".bin"
    return ""


def raw_dtype(path: Path) -> str:
    """'<u4' of a file of 32-bit tokens, whose upper halves are below 4, and '<u2' of others."""
    numbers = np.fromfile(path, "<u2", 2 * SAMPLE)
    if numbers[1::2].max(initial=0) < 4 <= numbers[0::2].max(initial=0):
        return "<u4"
    return "<u2"


def conversion(path: Path, split: str = "") -> str:
    """How a file becomes a shard, for a message. Its name says of which split, else `split`."""
    named = SHARD_NAME.match(path.name)
    if named:
        split = named[1]
    shard = f"text_{split}_000001"
    suffix = suffix_by_header(path)
    if suffix:
        return f"rename it to {shard}{suffix}"

    dtype = raw_dtype(path)
    largest = np.fromfile(path, dtype, SAMPLE).max(initial=0)
    if largest >= VOCAB_SIZE:
        return (f"they are another tokenizer's tokens (found {largest}, and GPT-2's largest is "
                f"{EOT}): make shards of the text with `python fineweb.py --input YOUR_TEXT`")
    return ("if they are GPT-2's tokens, convert this file, and then that of the other split, in "
            "Python: import os, numpy as np; from runtime.shards import write_shard; "
            f"t = np.fromfile({str(path)!r}, '{dtype}'); assert t.max() < {VOCAB_SIZE}; "
            f"os.makedirs('NEW', exist_ok=True); write_shard('NEW/{shard}.npy', t)")


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------ the manifest of a folder

def read_manifest(folder: Path) -> dict:
    """What a folder's manifest.json records, {} without one. UserError if it is damaged."""
    path = folder / "manifest.json"
    with reading(path, "restore the file, or choose another --out"):
        if not is_there(path):
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

    found = read_manifest(folder)
    if not found:
        raise UserError(f"{folder} has shards, but manifest.json is missing, which says how they "
                        "were made: restore the file, choose another --out, or train on these "
                        "shards as they are")

    # The version comes first: of the manifest of another command it is null.
    for key, value in settings.items():
        if found.get(key) != value:
            begun = ""
            if not isinstance(found.get(key), list):        # of files it is long
                begun = f", {json.dumps(found.get(key))[:80]}"
            raise UserError(f"{folder} was begun with another {key}{begun}: use the same {key}, "
                            f"choose another --out, or train on these shards as they are")

    with reading(folder / "manifest.json", "choose another --out"):
        for shard in found["shards"]:
            # Its bytes are compared by --verify only: that takes minutes for 10 billion tokens.
            length = count_tokens(folder / shard["file"])
            if shard["tokens"] != length or len(shard["cursor"]) != 2:
                raise ValueError(f"its entry of {shard['file']} does not match that file")
    return found
