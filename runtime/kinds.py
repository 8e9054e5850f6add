"""What a file is by its first bytes. It is asked only where reading has failed."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.cli import RunError, UserError

LFS_POINTER = b"version https://git-lfs"
# (the first bytes, the endings that say the same, what the file is and what to do)
KINDS = [
    (b"\x1f\x8b", (".gz", ".gzip"), "gzip: add .gz to its name, or gunzip it"),
    (b"\x28\xb5\x2f\xfd", (".zst", ".zstd"), "zstd: add .zst to its name, or decompress it"),
    (b"BZh", (".bz2",), "bzip2: add .bz2 to its name, or bunzip2 it"),
    (b"PAR1", (".parquet",), "Parquet: rename it to .parquet"),
    (b"ARROW1", (".arrow",), "Arrow: rename it to .arrow"),
    (b"PK\x03\x04", (".pt", ".pth", ".bin", ".npz"), "a zip archive: unzip it"),
    ((b"\xff\xfe", b"\xfe\xff"), (),
     "UTF-16 (expected UTF-8): convert it with `iconv -f UTF-16 -t UTF-8`"),
    (LFS_POINTER, (), "a pointer of git-lfs, not the file: fetch it with `git lfs pull`"),
]


def kind_by_first_bytes(path: str | Path) -> str:
    """What a file is, and what to do, if it is not what its name says; else ""."""
    path = Path(path)
    with open(path, "rb") as file:
        head = file.read(64)
    for first_bytes, endings, kind in KINDS:
        if head.startswith(first_bytes) and path.suffix.lower() not in endings:
            return kind
    if path.suffix == ".npy" and head and not head.startswith(b"\x93NUMPY"):
        return ("raw numbers without NumPy's header, as OLMo's tokens are, which are not GPT-2's: "
                "make shards of its text")
    return ""


@contextmanager
def first_bytes_tell(path: str | Path) -> Iterator[None]:
    """Around the reading of a file. Where that fails and the file is of another kind than its name
    says, a UserError tells the kind."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        # An error of the system about a path says enough.
        if getattr(error, "filename", None):
            raise
        kind = kind_by_first_bytes(path)
        if not kind:
            raise
        raise UserError(f"{path} is {kind}") from None
