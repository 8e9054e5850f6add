"""Token shards: .npy, and the .bin of llm.c and modded-nanogpt."""
import io
import os
import re
import warnings
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import replace_file

SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes 1-D uint16 `tokens` as .npy or .bin, by the name's ending."""
    head = io.BytesIO()
    if Path(path).suffix == ".bin":
        head.write(np.array([BIN_MAGIC, BIN_VERSION, len(tokens)] + [0] * (BIN_HEADER - 3), dtype="<i4"))
    else:
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tokens))
    # not by np.save: with the disk full it can lose a file's last bytes without an error
    replace_file(path, lambda file: file.writelines((head.getvalue(), tokens)))


def open_shard(path: str | Path) -> np.memmap:
    """Tokens of a .npy or .bin shard as a read-only memory map, 1-D uint16. Raises UserError if the file is
    not a whole shard; nothing in it is ever unpickled."""
    path = Path(path)
    try:
        if not path.is_file():                    # a named pipe would never answer
            raise ValueError("it is no file")
        if path.suffix == ".bin":
            header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
            if len(header) < BIN_HEADER or (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
                raise ValueError(f"it does not start with llm.c's header: magic {BIN_MAGIC}, version {BIN_VERSION}")
            if path.stat().st_size != 4 * BIN_HEADER + 2 * int(header[2]):
                raise ValueError(f"its size is not that of the {header[2]:,} tokens which its header promises")
            tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER)
        else:
            with warnings.catch_warnings(action="ignore"):        # a strange header's come beside the error
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(tokens, np.memmap) or tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"it holds {getattr(tokens, 'dtype', 'an archive')} {getattr(tokens, 'shape', '')}")
        if path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError(f"it goes on after the {len(tokens):,} tokens which its header promises")
    except Exception as error:                    # numpy's reader fails in many ways on a broken header
        reason = "it is no .npy, or holds pickled objects" if "pickle" in str(error) else str(error)[:200]
        raise UserError(f"{path} is not a whole shard, 1-D uint16 tokens ({reason}): copy or make it again") from None
    return tokens


def is_whole(path: Path) -> bool:
    try:
        return open_shard(path) is not None
    except UserError:
        return False


def read_shard(path: str | Path) -> np.ndarray:
    """Tokens of a shard in memory. Not copied from the memory map: a file that is cut off meanwhile would kill the
    process there (SIGBUS), where a read comes back short."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a folder's shards of `split` ('train' or 'val')."""
    if os.path.exists(folder) and not os.path.isdir(folder):       # os.path's questions raise nothing for a strange name
        raise UserError(f"{folder} is a file: give the folder of the shards")
    paths = Path(folder).glob("*") if os.path.isdir(folder) else ()
    paths = sorted(path for path in paths if (m := SHARD_NAME.match(path.name)) and m[1] == split)
    if not paths:
        raise UserError(f"there is no data in {folder}, no *_{split}_000000.npy or .bin: `python fineweb.py` makes "
                        f"edu_fineweb10B, with --pretokenized 9 it fetches fineweb10B, and with --input YOUR_TEXT --out "
                        f"{folder} it makes shards of your own text")
    return paths
