"""Where the text comes from: files of your own, or a dataset of the Hugging Face hub.

Both classes have the same three members: `settings`, which the manifest records and which tell
this text from every other one; `prefix`, with which the names of its shards begin; and
`files(first)`, which yields (number, path) of the files of text from number `first` on.
"""
import glob
import hashlib
import json
import os
import re
import shlex
import tempfile
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

from runtime.cli import RunError, UserError, brief_error, print_error
from runtime.files import read_text, reading
from runtime.shards import SHARD_NAME, read_manifest
from runtime.text import KINDS, READERS, ending

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB = (FINEWEB_EDU, "HuggingFaceFW/fineweb")
DOWNLOAD = ".download"          # the folder, in --out, of files while they are read
DESCRIBED_BYTES = 1 << 16       # of each end of a file, by which it is told from another one
# Splits that are not for training. The first of them that a folder has is for validation.
HELD_OUT = ("validation", "valid", "val", "dev", "evaluation", "eval", "heldout", "held_out",
            "held-out", "test")
LETTER = r"[^\W\d_]"
# A word that names a split, as in train-0, training, squad_dev and testSet, but not in latest.
SPLIT = re.compile(
    rf"(?<!{LETTER})(train|{'|'.join(HELD_OUT)})(ing|set)?(?!{LETTER})", re.IGNORECASE)
SHARD_NUMBER = re.compile(r"\d+-of-\d+")     # as in train-00000-of-00002.parquet


# ----------------------------------------------------------------------------- files

class LocalFiles:
    """The files of --val_input, and after them the others of --input."""
    prefix = "text"

    def __init__(self, args, out: Path):
        folders = [Path(pattern) for pattern in args.input + args.val_input]
        if args.split != "train" and not any(map(has_splits, folders)):
            raise UserError(f"--split {args.split} needs a folder with splits, as save_to_disk "
                            f"writes it: leave --split out")

        val_files = find_files("val_input", args.val_input, args.split, out)
        train_files = find_files("input", args.input, args.split, out, held_back=val_files)
        if args.input and not train_files:
            raise UserError("--val_input names all files of --input, so that none is left to train "
                            "on: leave --input out for shards to evaluate on, or name others")

        self.paths = [*val_files.values(), *train_files.values()]
        self.settings = {
            "val_input": [describe(path) for path in val_files.values()],
            "input": [describe(path) for path in train_files.values()],
        }

    def files(self, first: int) -> Iterator[tuple[int, Path]]:
        for number in range(first, len(self.paths)):
            yield number, self.paths[number]


def find_files(
    flag: str, patterns: list[str], split: str, out: Path, held_back: Container[str] = (),
) -> dict[str, Path]:
    """{real path of a file of text: its path}, of all that paths, folders and globs mean, in order,
    but for the real paths in `held_back`. UserError for one of them without any text, with several
    splits, or with files of several kinds. One line for each tells what none of them reads."""
    # Shards may be made in the folder of their text, and have a .json beside them.
    manifest = os.path.realpath(out / "manifest.json")

    found, unread = {}, {}
    for pattern in patterns:
        meant, matched = list_files(pattern, split)
        matched = [path for path in matched if os.path.realpath(path) != manifest
                   and not SHARD_NAME.match(path.name)]
        texts = [path for path in matched if is_text(path)]
        not_held_back = [path for path in texts if os.path.realpath(path) not in held_back]
        check_splits(flag, pattern, not_held_back, meant)
        check_kinds(flag, pattern, not_held_back, meant)
        texts = [path for path in texts if path in meant]
        unread[pattern] = set(matched).difference(texts)
        if not texts:
            kinds = ", ".join(KINDS)
            remedy = describe_unread(unread[pattern]) or "check the path"
            raise UserError(f"--{flag} {pattern} matches no file of a known kind ({kinds}): "
                            f"{remedy}")

        for path in texts:
            if os.path.realpath(path) not in held_back:
                found.setdefault(os.path.realpath(path), path)

    for pattern, paths in unread.items():
        line = describe_unread({path for path in paths if os.path.realpath(path) not in found})
        if line:
            print_error(f"--{flag} {pattern}: {line}")
    return found


def is_text(path: Path) -> bool:
    """Whether it is a file of a known kind."""
    return path.is_file() and ending(path) in KINDS


def check_kinds(flag: str, pattern: str, texts: list[Path], meant: set[Path]) -> None:
    """UserError if one path, folder or glob has files of several kinds, such as the README.md of a
    dataset and its .parquet: those of one kind are about the others."""
    if len({READERS.get(ending(path)) for path in texts}) > 1:
        its_glob = f"*{texts[-1].suffix}"
        if texts[-1] not in meant:              # it lies in a subfolder
            its_glob = f"**/{its_glob}"
        raise UserError(f"--{flag} {pattern} has files of several kinds ({count_endings(texts)}): "
                        f"name those that hold the text, as in 'FOLDER/{its_glob}'")


def count_endings(paths: Iterable[Path]) -> str:
    """'2 .md, 1 .parquet'."""
    suffixes = Counter(path.suffix if path.suffix else "without an ending" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))


def check_splits(flag: str, pattern: str, texts: list[Path], meant: set[Path]) -> None:
    """UserError if one folder or glob has files for training and, beside them, files that are
    held out, as a clone of a dataset has, and any of them is meant to be read."""
    splits = defaultdict(dict)      # {(a folder, a group of names in it): {split: its glob}}
    groups_to_read = set()
    paths_to_read = {path for text in meant for path in (text, *text.parents)}
    for path in dict.fromkeys(path for text in texts for path in (text, *text.parents)):
        for split, group, its_glob in splits_of_name(path):
            splits[path.parent, group].setdefault(split, its_glob)
            if path in paths_to_read:
                groups_to_read.add((path.parent, group))

    for group, globs in splits.items():
        held_out = [split for split in HELD_OUT if split in globs]
        if group in groups_to_read and "train" in globs and held_out:
            flags = f"--val_input {shlex.quote(globs[held_out[0]])}"
            if flag == "input":
                flags = f"--input {shlex.quote(globs['train'])} {flags}"
            raise UserError(f"--{flag} {pattern} has the splits train, {', '.join(held_out)}: give "
                            f"each its flag, as in {flags}")


def splits_of_name(path: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yields (split, group, a glob of the split) for each split that a path may be named after.

    The group is the name without that word: en_train and en_test are splits of one text, en_train
    and fr_test are not. A file whose name begins or ends with the word is also in the group (),
    with all such files of its folder."""
    folder = glob.escape(str(path.parent))
    kind = ending(path)
    is_file = kind in KINDS
    name = path.name
    if is_file:
        name = name[:name.lower().rindex(kind)]

    words = list(SPLIT.finditer(name))
    is_placed = False               # in the group (); train_test.txt is there once
    for word in words:
        split = word[1].lower()
        before = name_words(name[:word.start()])
        after = name_words(name[word.end():])
        if is_file and not (before and after) and not is_placed:
            is_placed = True
            its_glob = f"{word[0]}*"
            if word.start() > 0:
                # *_test* is not in contest_train.txt.
                its_glob = f"*{glob.escape(name[word.start() - 1])}{its_glob}"
            yield split, (), f"{folder}/{its_glob}"

        its_glob = f"{glob.escape(name[:word.end()])}*"
        if not is_file:
            its_glob = f"{glob.escape(name)}/**"
        yield split, before + after, f"{folder}/{its_glob}"

    # mC4 has c4-en-validation.00000-of-00001.json.gz beside c4-en.00000-of-01024.json.gz.
    number = SHARD_NUMBER.search(name)
    if is_file and number and not words:
        its_glob = f"{glob.escape(name[:number.start()])}[0-9]*"
        yield "train", name_words(name), f"{folder}/{its_glob}"


def name_words(name: str) -> tuple[str, ...]:
    """The words of a part of a name, without its numbers, such as 00000-of-00002, 1 and 10M."""
    name = SHARD_NUMBER.sub(" ", name)
    name = re.sub(r"\d+[^\W_]*", " ", name)
    return tuple(re.findall(f"{LETTER}+", name.lower()))


def has_splits(folder: Path) -> bool:
    """Whether the save_to_disk of `datasets` has written several splits into the folder."""
    return (folder / "dataset_dict.json").is_file()


def is_saved(folder: Path) -> bool:
    """Whether the save_to_disk of `datasets` has written one split into the folder."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def is_about_text(path: Path) -> bool:
    """Whether `datasets` describes a text with it, or has computed it from one."""
    if path.name == "state.json":
        return is_saved(path.parent)
    if path.name in ("dataset_info.json", "dataset_dict.json"):
        return True
    return bool(re.fullmatch(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow", path.name))


def saved_files(folder: Path, split: str) -> list[Path]:
    """The files of a folder that save_to_disk has written, or of a split of it; [] of any other.
    UserError for a split that it does not have, and for rows that are to be read in another order
    than that of the files."""
    remedy = "write the dataset again, by its save_to_disk"
    if has_splits(folder):
        path = folder / "dataset_dict.json"
        with reading(path, remedy):
            splits = [str(name) for name in json.loads(read_text(path))["splits"]]
        if split not in splits:
            raise UserError(f"{folder} has the splits {', '.join(splits)}, and no {split}: choose "
                            f"one of them by --split")
        folder = folder / split
    elif not is_saved(folder):
        return []

    path = folder / "state.json"
    with reading(path, remedy):
        state = json.loads(read_text(path))
        files = [folder / file["filename"] for file in state["_data_files"]]
        # Up to 1.13 `datasets` kept selected or shuffled rows as a list of their numbers. 1.17
        # ignores the list, and would read all rows.
        has_indices = bool(state.get("_indices_data_files"))
    if has_indices:
        raise UserError(
            f"{folder} has selected or shuffled rows, whose numbers are in indices.arrow: with "
            f"datasets 1.13, which reads them, write the rows by load_from_disk({str(folder)!r})."
            f"flatten_indices().save_to_disk(ANOTHER_FOLDER)")
    return files


def list_files(pattern: str, split: str) -> tuple[set[Path], list[Path]]:
    """(the files that a path, folder or glob asks for; these and all in the subfolders that it
    matches, sorted). Hidden files are in neither."""
    saved = saved_files(Path(pattern), split)
    if saved:
        return set(saved), saved

    matches = [pattern]
    if os.path.isdir(pattern) and ending(pattern) not in KINDS:
        names = os.listdir(pattern)
        matches = [os.path.join(pattern, name) for name in names if not name.startswith(".")]
    elif not os.path.exists(pattern):
        # A path is taken as it is, though its name may look like a glob: notes[1].txt.
        matches = glob.glob(pattern, recursive=True)

    meant = set()
    matched = set()
    for match in matches:
        files = list(files_below(match))
        matched.update(files)

        # Spark and Dask write a folder a.parquet, which stands for the files in it.
        if os.path.isfile(match) or ending(match) in KINDS:
            meant.update(files)

    # A file that is named itself is read, whatever it is.
    if not os.path.isfile(pattern):
        matched = {path for path in matched if not is_about_text(path)}

    # Sorted, because a disk has an order of its own, and the shards should be the same anywhere.
    return meant, sorted(matched, key=str)


def files_below(path: str) -> Iterator[Path]:
    """A file itself, or all files in a folder and its subfolders. OSError for a folder that cannot
    be read."""
    if not os.path.isdir(path):
        yield Path(path)
        return

    def fail(error):
        raise error

    for folder, subfolders, names in os.walk(path, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


def describe_unread(unread: set[Path]) -> str:
    """How many files of which endings are not read, and where. '' if none."""
    if not unread:
        return ""
    # As it was typed, relative or absolute. Path() makes '.' of ''.
    folder = Path(os.path.commonpath([path.parent for path in unread]))
    line = f"not read: {count_endings(unread)} in {folder}"
    if any(is_text(path) for path in unread):
        line += "; what is in subfolders is read by 'FOLDER/**'"
    return line


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
    # As in build-nanogpt.
    if (dataset, name, split) == (FINEWEB_EDU, "sample-10BT", "train"):
        return "edufineweb", "edu_fineweb10B"

    words = [dataset.rpartition("/")[2]]
    if name:
        words.append(name)
    if split != "train":
        words.append(split)

    # No underscores: what follows the last ones in a shard's name are its split and number.
    joined = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))[:100].strip("-.")
    return joined, joined


class HubDataset:
    """A split of a dataset, at the revision that the manifest in `out` records, or else at the
    newest one."""

    def __init__(self, dataset: str, name: str | None, split: str, out: Path):
        self.prefix, _ = hub_names(dataset, name, split)
        self.folder = out / DOWNLOAD

        # A run that continues reads the revision that it began with.
        found = read_manifest(out)
        revision = None
        if found.get("dataset") == dataset:
            revision = found.get("revision")
        if not revision:
            with hub_errors(f"--dataset {dataset}") as hub:
                revision = hub.HfApi().dataset_info(dataset, expand=["sha"]).sha
        self.settings = {"dataset": dataset, "name": name, "split": split, "revision": revision}

    def files(self, first: int) -> Iterator[tuple[int, Path]]:
        """As one file is read, the next one is fetched, and the one before has been removed: two
        are on the disk at most."""
        names = self.list_names()

        # Not concurrent.futures, for whose thread a stopped process would wait.
        with ThreadPool(1) as pool:
            following = pool.apply_async(self.download, [names[first]])
            for number in range(first, len(names)):
                path = Path(following.get())
                if number + 1 < len(names):
                    following = pool.apply_async(self.download, [names[number + 1]])
                yield number, path
                path.unlink()

    def list_names(self) -> list[str]:
        """The paths in the dataset of the files of the split."""
        import datasets

        dataset = self.settings["dataset"]
        split = self.settings["split"]
        revision = self.settings["revision"]

        # Where the hub does not answer, `datasets` would take what its cache has: hence an empty
        # cache. And without hf:// it would take a local folder OWNER/NAME.
        with hub_errors(f"--dataset {dataset}"), tempfile.TemporaryDirectory() as empty:
            builder = datasets.load_dataset_builder(
                f"hf://datasets/{dataset}", self.settings["name"], cache_dir=empty,
                revision=revision)
            splits = builder.config.data_files

            # hf://datasets/OWNER/NAME@REVISION/path/in/the/dataset
            names = [url.partition(f"@{revision}/")[2] for url in splits.get(split, ())]
            if not names or not all(ending(name) in KINDS for name in names):
                kinds = ", ".join(KINDS)
                raise ValueError(f"its split {split} has no files, or files of other kinds than "
                                 f"{kinds}; its splits are {', '.join(map(str, splits))}")
            return names

    def download(self, name: str) -> str:
        """Fetches a file of the dataset. Returns its path on the disk."""
        dataset = self.settings["dataset"]
        with hub_errors(f"{dataset}: {name}") as hub:
            return hub.hf_hub_download(dataset, name, repo_type="dataset", local_dir=self.folder,
                                       revision=self.settings["revision"])


@contextmanager
def hub_errors(what: str):
    """Around calls of the hub's libraries, with huggingface_hub as its value. Their errors, which
    come in many classes, become one line about `what`: a UserError where another command helps,
    else a RunError."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield huggingface_hub
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except Exception as error:
        # Of the system, which names a path: a full disk, say.
        if getattr(error, "filename", None):
            raise
        why = brief_error(error)
        refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404)

        # `datasets` lists the configurations and splits that there are, or says that the dataset
        # is made by scripts, which are never run. A hub out of reach is no mistake of the user's.
        explained = isinstance(error, ValueError | FileNotFoundError) or "scripts" in why
        if refused or (explained and not isinstance(error, LocalEntryNotFoundError)):
            raise UserError(f"{what} cannot be read ({why}): check its name, --name and --split; "
                            f"for a private or gated dataset accept its terms on the hub, and run "
                            f"`hf auth login`") from None
        raise RunError(f"{what} cannot be fetched from the Hugging Face hub ({why}): check the "
                       f"network and run the same command again") from None
