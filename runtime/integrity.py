"""Whether a file still holds what was written into it: checksums, and numbers that training can have made."""
import math
import os
import re
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from runtime.cli import RunError, UserError, brief_error
from runtime.files import file_sha256, read_text, readable, replace_file

BLOCK = 1 << 22                 # bytes that are read at a time
SUMS = "SHA256SUMS"             # beside an export; `sha256sum -c` reads it


def check_archive(path: str | Path, archive) -> None:
    """Compares the CRC-32 of each record of a file that torch.save wrote with its content: torch.load does
    not. ValueError for a difference. `archive`: torch's own reader of that file, which says where it reads a
    record, because another reader may find another archive in the same file."""
    with zipfile.ZipFile(path) as listing:
        listed = {info.filename.partition("/")[2]: info for info in listing.infolist()}
    records = archive.get_all_records()
    if sorted(records) != sorted(listed):
        raise ValueError("its two lists of records differ")

    def differs(name):
        return _crc(path, archive.get_record_offset(name), listed[name].file_size) != listed[name].CRC
    # zlib and reads of files do without Python's lock
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "checksums") as pool:
        damaged = [name for name, wrong in zip(records, pool.map(differs, records), strict=True) if wrong]
    # all of them: it was saved without, by torch.serialization.set_crc32_options(False)
    if damaged and len(damaged) < len(records):
        raise ValueError(f"its record {damaged[0][:80]} does not have its checksum: bits have changed")


def _crc(path, offset, left):
    crc, buffer = 0, memoryview(bytearray(min(BLOCK, left)))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left and (n := file.readinto(buffer[:left])):
            crc, left = zlib.crc32(buffer[:n], crc), left - n
    return -1 if left else crc


def check_written(path: Path) -> None:
    """Reads a checkpoint that was just written and fsynced. RunError, and no such file, if it is not as it
    was written."""
    try:
        if hasattr(os, "posix_fadvise"):        # from the disk, and not from the memory it was written from
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        check_archive(path, torch._C.PyTorchFileReader(str(path)))
    except OSError as error:
        raise RunError(f"{path} was written, but cannot be read again ({brief_error(error)}): look after its "
                       f"disk; older checkpoints are still there") from None
    except (RuntimeError, ValueError, zipfile.BadZipFile) as error:
        path.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be read as it was written ({brief_error(error)}), and was removed: "
                       "this disk or this machine's memory is failing; the checkpoints of other steps are "
                       "still there, and the same command resumes from them") from None


def fault_of(tensor: torch.Tensor, minimum: float = -math.inf) -> str | None:
    """What no training makes of a float tensor: 'NaN', 'infinite' or, below `minimum`, 'negative' numbers.
    None if there is nothing of the kind. One pass, without a copy."""
    low, high = (end.item() for end in tensor.detach().aminmax())           # a NaN makes both NaN
    if math.isnan(low):
        return "NaN"
    if math.isinf(low) or math.isinf(high):
        return "infinite"
    return "negative" if low < minimum else None


def find_fault(model: dict, optimizers: list[dict] = ()) -> str | None:
    """Of a state dict and of those of its optimizers, the first tensor with a number that no training makes,
    as 'lm_head.weight holds NaN numbers'. None if there is none."""
    for name, tensor in model.items():
        if tensor.is_floating_point() and tensor.numel() and (fault := fault_of(tensor)):
            return f"{name} holds {fault} numbers"
    for saved in optimizers:
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        for i, state in saved["state"].items():
            for key, tensor in state.items():
                if fault := fault_of(tensor, 0 if key in ("step", "exp_avg_sq") else -math.inf):
                    return f"the optimizer's {key} of {names[i]} holds {fault} numbers"
    return None


def read_sums(folder: Path) -> dict[str, str]:
    """{name: SHA-256} as the folder's SHA256SUMS says, in the format of sha256sum; {} without one."""
    path = folder / SUMS
    if not os.path.lexists(path):
        return {}
    with readable(path, "remove it, or copy or export the folder again"):
        lines = read_text(path, 1 << 20).splitlines()
    found = filter(None, (re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line) for line in lines))
    return {m[2]: m[1].lower() for m in found}


def check_sums(folder: Path) -> None:
    """UserError if a file of the folder is not the one of its SHA256SUMS. Files that it does not name are not
    looked at."""
    for name, digest in read_sums(folder).items():
        if Path(name).name == name and (folder / name).is_file() and file_sha256(folder / name) != digest:
            raise UserError(f"{folder / name} does not match {SUMS}: it was damaged, or changed since; copy "
                            f"or export it again, or remove {SUMS} if the change was meant")


def write_sums(folder: Path, names: list[str]) -> None:
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in sorted(names)]
    replace_file(folder / SUMS, lambda file: file.write("".join(lines).encode()))
