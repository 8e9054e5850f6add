"""Where the text comes from: files of your own, or a dataset of the Hugging Face hub.

Both classes have the same three members: `settings`, which the manifest records and which tell
this text from every other one; `prefix`, with which the names of its shards begin; and
`files(first)`, which yields (number, path, name for messages) of the files of text from number
`first` on.
"""
import glob
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from runtime.cli import RunError, UserError, brief_error
from runtime.shards import read_manifest
from runtime.text import READERS, TEXT_FILES, Layout, kind_of

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
# Where the folders of FineWeb's samples begin, as in build-nanogpt: sample-10BT is edu_fineweb10B.
FINEWEB = {FINEWEB_EDU: "edu_fineweb", "HuggingFaceFW/fineweb": "fineweb"}
DESCRIBED_BYTES = 1 << 16       # of each end of a file, by which it is told from another one
KINDS = ", ".join(READERS)

Files = Iterator[tuple[int, Path, str]]


def check_layout(layout: Layout, files: list) -> None:
    """UserError for a flag that is about a kind of file of which `files` has none."""
    kinds = {kind_of(file) for file in files}
    if layout.separator and not kinds & TEXT_FILES:
        raise UserError("--separator applies to .txt and .md files, but the input has none: leave "
                        "the flag out")


# ----------------------------------------------------------------------------- files

class LocalFiles:
    """The files of --val_input, and after them those of --input."""
    prefix = "text"

    def __init__(self, inputs: list[str], val_inputs: list[str], layout: Layout, out: Path):
        val_paths = find_files("val_input", val_inputs, out)
        train_paths = find_files("input", inputs, out)
        twice = {os.path.realpath(path) for path in val_paths} & {
            os.path.realpath(path) for path in train_paths}
        if twice:
            raise UserError(f"{min(twice)} is both in --input and in --val_input: leave the file "
                            f"out of one of them")

        self.paths = [(path, f"--val_input {path}") for path in val_paths]
        self.paths += [(path, f"--input {path}") for path in train_paths]
        check_layout(layout, [path for path, _ in self.paths])
        self.settings = {
            "val_input": [describe(path) for path in val_paths],
            "input": [describe(path) for path in train_paths],
        }

    def files(self, first: int) -> Files:
        for number, (path, name) in enumerate(self.paths):
            if number >= first:
                yield number, path, name

    def clean_up(self) -> None:
        """Nothing: the files are the user's."""


def find_files(flag: str, patterns: list[str], out: Path) -> list[Path]:
    """The files of paths, folders and globs, in order, each once, without hidden ones. UserError
    for one of them without any file of a known kind."""
    # A .json like others, where the shards are made beside their text.
    manifest = os.path.realpath(out / "manifest.json")

    first_path = {}             # {real path of a file: as it was found first}
    for pattern in patterns:
        found = [path for path in list_files(pattern)
                 if kind_of(path) and os.path.realpath(path) != manifest]
        if not found:
            raise UserError(f"--{flag} {pattern} matches no file of a known kind ({KINDS}): check "
                            f"the path")
        for path in found:
            first_path.setdefault(os.path.realpath(path), path)
    return list(first_path.values())


def list_files(pattern: str) -> list[Path]:
    """The sorted files that a path, folder or glob means."""
    # A path is taken as it is, though its name may look like a glob: notes[1].txt.
    if os.path.isfile(pattern):
        return [Path(pattern)]
    if os.path.isdir(pattern):
        names = os.listdir(pattern)
        paths = [os.path.join(pattern, name) for name in names if not name.startswith(".")]
    else:
        paths = glob.glob(pattern, recursive=True)

    # Sorted, because a disk has an order of its own, and the shards should be the same anywhere.
    return [Path(path) for path in sorted(paths) if os.path.isfile(path)]


def describe(path: Path) -> dict:
    """What the manifest says of a file: the SHA-256 of its ends tells it from others of its name
    and size."""
    with open(path, "rb") as file:
        size = path.stat().st_size
        sha256 = hashlib.sha256(file.read(DESCRIBED_BYTES))
        file.seek(max(0, size - DESCRIBED_BYTES))
        sha256.update(file.read())
        return {"name": path.name, "bytes": size, "sha256_of_ends": sha256.hexdigest()}


# ----------------------------------------------------------------------------- the hub

def hub_names(dataset: str, name: str | None, split: str) -> tuple[str, str]:
    """(prefix of the shards, default --out) of a dataset of the hub."""
    if dataset in FINEWEB and split == "train" and name:
        sample = re.fullmatch(r"sample-(\d+B)T", name)
        if sample:
            folder = FINEWEB[dataset]
            return folder.replace("_", ""), folder + sample[1]
    words = [dataset.rpartition("/")[2]]
    if name:
        words.append(name)
    if split != "train":
        words.append(split)

    # No underscores: what follows the last ones in a shard's name are its split and number.
    joined = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))[:100].strip("-.")
    if not joined:
        joined = "hub"
    return joined, joined


class HubDataset:
    """A split of a dataset, at the revision that the manifest in `out` records, or else at the
    newest one."""

    def __init__(self, dataset: str, name: str | None, split: str, layout: Layout, out: Path):
        self.prefix, _ = hub_names(dataset, name, split)
        self.layout = layout
        self.folder = out / ".download"           # of the files while they are read

        # A run that continues reads the revision that it began with.
        found = read_manifest(out)
        revision = None
        if found.get("dataset") == dataset:
            revision = found.get("revision")
        if not revision:
            with hub_errors(f"--dataset {dataset}") as hub:
                revision = hub.HfApi().dataset_info(dataset, expand=["sha"]).sha
        self.settings = {"dataset": dataset, "name": name, "split": split, "revision": revision}

    def files(self, first: int) -> Files:
        """As one file is read, the next one is fetched, and the one before has been removed: two
        are on the disk at most."""
        names = self.list_names()
        check_layout(self.layout, names)

        # A killed run may have left others than the two that are read and fetched now.
        for path in self.folder.glob("**/*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and kind_of(path) and name not in names[first:first + 2]:
                path.unlink()

        downloads = deque()     # of this file and the next one
        for number in range(first, len(names)):
            for name in names[number + len(downloads):number + 2]:
                downloads.append(self.start_download(name))
            path = Path(downloads.popleft().result())
            yield number, path, f"{self.settings['dataset']}: {names[number]}"
            path.unlink()

    def clean_up(self) -> None:
        """Removes what is left of the downloads, when all shards are written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def list_names(self) -> list[str]:
        """The paths in the dataset of the files of the split."""
        import datasets

        dataset, name, split, revision = self.settings.values()

        # Where the hub does not answer, `datasets` would take what its cache has: hence an empty
        # cache. And without hf:// it would take a local folder OWNER/NAME.
        with hub_errors(f"--dataset {dataset}"), tempfile.TemporaryDirectory() as empty:
            builder = datasets.load_dataset_builder(
                f"hf://datasets/{dataset}", name, cache_dir=empty, revision=revision)
            splits = builder.config.data_files
            if splits is None:
                splits = {}

            # hf://datasets/OWNER/NAME@REVISION/path/in/the/dataset
            names = [url.partition(f"@{revision}/")[2] for url in splits.get(split, ())]
            if not names or not all(kind_of(name) for name in names):
                raise ValueError(f"its split {split} has no files, or files of other kinds than "
                                 f"{KINDS}; its splits are {', '.join(map(str, splits))}")
            return names

    def start_download(self, name: str) -> Future:
        """Begins to fetch a file of the dataset. The result is its path on the disk."""
        dataset = self.settings["dataset"]
        future = Future()

        def fetch():
            try:
                with hub_errors(f"{dataset}: {name}") as hub:
                    path = hub.hf_hub_download(
                        dataset, name, repo_type="dataset", revision=self.settings["revision"],
                        local_dir=self.folder)
                    future.set_result(path)
            except BaseException as error:
                future.set_exception(error)

        # A daemon ends with the process. A pool's thread would keep a stopped run until its file
        # is fetched.
        threading.Thread(target=fetch, daemon=True).start()
        return future


@contextmanager
def hub_errors(what: str):
    """Around calls of the hub's libraries, with huggingface_hub as its value. Their errors, which
    come in many classes, become one line about `what`: a UserError where another command helps,
    else a RunError."""
    import huggingface_hub

    try:
        yield huggingface_hub
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except Exception as error:
        if getattr(error, "filename", None):
            # A full disk, say, is no fault of the hub's.
            raise
        why = brief_error(error)
        if is_users_mistake(error, why):
            raise UserError(f"{what} cannot be read ({why}): check its name, --name and --split; "
                            f"for a private or gated dataset accept its terms on the hub, and run "
                            f"`hf auth login`") from None
        raise RunError(f"{what} cannot be fetched from the Hugging Face hub ({why}): check the "
                       f"network and run the same command again, or use your own text with "
                       f"--input") from None


def is_users_mistake(error: Exception, why: str) -> bool:
    """Whether the hub has answered that there is no such dataset, --name or --split (`why` lists
    those that there are), or none that may be read; and not that it cannot be reached."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return True

    # `datasets` says so of a dataset that is made by code of its own, which is never run.
    if "scripts" in why:
        return True

    # These are derived from those below, but mean that there was no answer.
    if isinstance(error, errors.LocalEntryNotFoundError | errors.BadRequestError):
        return False
    return isinstance(error, ValueError | FileNotFoundError | errors.RepositoryNotFoundError)
