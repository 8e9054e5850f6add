"""Token shards: 1-D uint16 in .npy, or in the .bin of llm.c and modded-nanogpt."""
import io
import os
import re
import textwrap
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.files import readable, replace_file
from runtime.tokenizer import EOT, tokenizer

MANIFEST_NAME = re.compile(r"manifest(_p\d+of\d+)?\.json")
SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")
OWN_TEXT = "text"               # with this the names of shards begin that `fineweb.py --input` makes
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py


def write_shard(path: str | Path, *parts: np.ndarray) -> None:
    """Writes 1-D uint16 tokens, all `parts` of them, atomically as .npy or .bin, by the suffix of `path`."""
    head, n = io.BytesIO(), sum(map(len, parts))
    if Path(path).suffix == ".bin":
        head.write(np.array([BIN_MAGIC, BIN_VERSION, n] + [0] * (BIN_HEADER - 3), dtype="<i4"))
    else:
        np.lib.format.write_array_header_1_0(head, {"descr": "<u2", "fortran_order": False, "shape": (n,)})
    # not np.save: on a full disk it can lose a file's last bytes without an error
    replace_file(path, lambda file: file.writelines([head.getvalue(), *parts]))


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
    other shards than `fineweb.py --input` makes, and where none can be read."""
    with suppress(UserError, KeyError):           # KeyError: of tiktoken, for an id beyond its vocabulary
        path = list_shards(folder, "train")[0]
        tokens = open_shard(path)[:200].tolist()
        if path.name.startswith(f"{OWN_TEXT}_") and tokens[0] == EOT:
            text = tokenizer().decode(tokens, errors="ignore").replace("<|endoftext|>", "\n")
            words = next(filter(None, map(str.split, text.splitlines())), [])[:5]
            return "".join(textwrap.wrap(" ".join(words), 40, break_on_hyphens=False)[:1])
    return ""
