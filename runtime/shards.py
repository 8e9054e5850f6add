"""Token shards: 1-D uint16 in .npy, or in the .bin of llm.c and modded-nanogpt."""
import hashlib
import io
import json
import os
import re
import shlex
import textwrap
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import read_text, readable, replace_file
from runtime.tokenizer import EOT, VOCAB_SIZE, tokenizer

MANIFEST_NAME = re.compile(r"manifest(_p\d+of\d+)?\.json")
SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py


def write_shard(path: str | Path, *parts: np.ndarray) -> str:
    """Writes 1-D uint16 tokens, all `parts` of them, atomically as .npy or .bin, by the suffix of `path`.
    Returns the SHA-256 of the file."""
    head, n = io.BytesIO(), sum(map(len, parts))
    if Path(path).suffix == ".bin":
        head.write(np.array([BIN_MAGIC, BIN_VERSION, n] + [0] * (BIN_HEADER - 3), dtype="<i4"))
    else:
        np.lib.format.write_array_header_1_0(head, {"descr": "<u2", "fortran_order": False, "shape": (n,)})
    sha256 = hashlib.sha256()

    def write(file):            # not np.save: on a full disk it can lose a file's last bytes without an error
        for part in (head.getvalue(), *parts):
            sha256.update(part)
            file.write(part)
    replace_file(path, write)
    return sha256.hexdigest()


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


def is_whole(path: Path) -> bool:
    """Whether open_shard reads it."""
    with suppress(UserError):
        return open_shard(path) is not None
    return False


def read_shard(path: str | Path, sha256: str = "") -> np.ndarray:
    """Tokens of a shard in memory, 1-D uint16. Not copied from the memory map: if the file is truncated
    meanwhile, that kills the process (SIGBUS), while a read returns fewer tokens. UserError if `sha256` is
    given and is not that of the bytes that were read."""
    tokens = open_shard(path)
    data = np.fromfile(path, dtype=np.uint8, count=tokens.offset + tokens.nbytes)
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(path, OTHER_BYTES)
    data = data[tokens.offset:]
    return data[:len(data) // 2 * 2].view("<u2")


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a folder's shards of `split`, 'train' or 'val'. Raises UserError if there is none."""
    if os.path.exists(folder) and not os.path.isdir(folder):      # unlike Path's, these never raise
        raise UserError(f"{folder} is a file: give the folder of the shards")
    paths = Path(folder).glob("*") if os.path.isdir(folder) else ()
    paths = sorted(path for path in paths if (m := SHARD_NAME.match(path.name)) and m[1] == split)
    if not paths:
        raise UserError(f"there is no data in {folder}, no *_{split}_000000.npy or .bin: "
                        f"`python fineweb.py` makes edu_fineweb10B, with --pretokenized 9 it fetches "
                        f"fineweb10B, with --input YOUR_TEXT --out {folder} it makes shards of your own text")
    return paths


def first_words(folder: str | Path) -> str:
    """The words with which a user's own text begins, of its first line at most five and 40 characters. '' for
    shards that `fineweb.py --input` has not made by their manifest, and where none can be read."""
    with suppress(UserError, OSError, ValueError, LookupError, TypeError, RecursionError):
        manifest = min(path for path in Path(folder).iterdir() if MANIFEST_NAME.fullmatch(path.name))
        files = json.loads(read_text(manifest))["source"]["files"]
        for split in ("train", "val") if files else ():       # earlier versions put the beginning into val
            tokens = open_shard(list_shards(folder, split)[0])[:200].tolist()
            if tokens[0] == EOT:
                text = tokenizer().decode(tokens, errors="ignore").replace("<|endoftext|>", "\n")
                words = next(filter(None, map(str.split, text.splitlines())), ())[:5]
                return textwrap.wrap(" ".join(words), 40, break_on_hyphens=False)[0]
    return ""


# -----------------------------------------------------------------------------
# the SHA-256 of each shard's file, which its manifest records

OTHER_BYTES = "its SHA-256 is not that in its manifest"


def damaged(path: str | Path, why: str) -> UserError:
    folder = shlex.quote(str(Path(path).parent))
    return UserError(f"{path} is damaged ({why}): restore it from a copy or make it again; "
                     f"`python fineweb.py --verify {folder}` checks all shards of its folder")


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


def damage_of(path: Path, sha256: str = "", stop: Callable[[], bool] = lambda: False) -> str:
    """What is wrong with a shard, all of whose bytes are read: '' if nothing. Reads and hashes in pieces,
    while other threads continue; once `stop` says so, no further."""
    if not os.path.isfile(path):
        return "missing"
    found, largest, piece = hashlib.sha256(), 0, np.empty(1 << 23, dtype=np.uint8)
    try:
        offset = open_shard(path).offset
        with readable(path, "copy it again"), open(path, "rb") as file:
            found.update(file.read(offset))
            while n := file.readinto(piece):
                if stop():
                    return ""
                found.update(piece[:n])
                largest = max(largest, int(piece[:n // 2 * 2].view("<u2").max()))
    except UserError as error:
        return OTHER_BYTES if sha256 and not isinstance(error.__context__, OSError) else str(error)
    if sha256 and found.hexdigest() != sha256:
        return OTHER_BYTES
    return f"it holds token {largest}, and GPT-2's end at {VOCAB_SIZE - 1}" if largest >= VOCAB_SIZE else ""


def check_shard(path: Path, sha256: str, stop: Callable[[], bool] = lambda: False) -> None:
    """Reads all bytes of a shard. UserError if they are damaged, or not those of `sha256`."""
    if why := damage_of(path, sha256, stop):
        raise damaged(path, why)
