"""Token shards: 1-D uint16 in .npy, or in the .bin of llm.c and modded-nanogpt."""
import io
import os
import re
import warnings
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import readable, replace_file

SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py


def write_shard(path: str | Path, *parts: np.ndarray) -> None:
    """Writes 1-D uint16 tokens, all `parts` of them, atomically as .npy or .bin, by the suffix of `path`."""
    head, n = io.BytesIO(), sum(map(len, parts))
    if Path(path).suffix == ".bin":
        head.write(np.array([BIN_MAGIC, BIN_VERSION, n] + [0] * (BIN_HEADER - 3), dtype="<i4"))
    else:
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(parts[0])
                                               | {"shape": (n,)})
    # not np.save: on a full disk it can lose a file's last bytes without an error
    replace_file(path, lambda file: file.writelines((head.getvalue(), *parts)))


def open_shard(path: str | Path) -> np.memmap:
    """Tokens of a .npy or .bin shard as a read-only memory map, 1-D uint16. Raises UserError if the file is
    missing, truncated or not a shard; nothing in it is ever unpickled."""
    path = Path(path)
    with readable(path, "copy it or make it again"):
        if not path.is_file():                    # opening a named pipe would block forever
            raise ValueError("no regular file is there")
        tokens = (_open_bin if path.suffix == ".bin" else _open_npy)(path)
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


def _open_npy(path):
    with open(path, "rb") as file:                # np.load takes any other file for a pickle or an archive
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            raise ValueError("it is not a .npy file")
    with warnings.catch_warnings(action="ignore"):        # about an unusual header: the error is enough
        return np.load(path, mmap_mode="r", allow_pickle=False)


def is_whole(path: Path) -> bool:
    """Whether open_shard reads it."""
    try:
        return open_shard(path) is not None
    except UserError:
        return False


def read_shard(path: str | Path) -> np.ndarray:
    """Tokens of a shard in memory, 1-D uint16. Not copied from the memory map: if the file is truncated
    meanwhile, that kills the process (SIGBUS), while a read returns fewer tokens."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


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
