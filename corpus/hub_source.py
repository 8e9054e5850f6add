"""A dataset of the Hugging Face hub as a source of text, as corpus/sources.py describes it."""
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from corpus.shard_writer import read_manifest
from corpus.sources import BYTES_PER_TOKEN, DAMAGED_CURSOR, TEXT_FIELD, UNPACKED, Piece
from runtime.cli import UserError, brief_error
from runtime.files import writable
from runtime.hub import causes, need_hub, wait_to_retry
from runtime.shards import MANIFEST_NAME

CURSOR_EVERY = 1000             # documents between two cursors of a stream
SIZES = 100                     # files whose size is asked for, at most
OWN_FOLDERS = "assets", "benchmarks", "corpus", "docs", "runtime", "tests"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
# --variant: dataset, prefix of the shards, beginning of the folder's name
FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}


def default_names(repo: str, name: str | None, split: str) -> tuple[str, str]:
    """(prefix of the shards, folder) of a dataset. FineWeb's samples have build-nanogpt's."""
    for fineweb, prefix, folder in FINEWEB.values():
        if repo == fineweb and split == "train" and (sample := re.fullmatch(r"sample-(\d+B)T", name or "")):
            return prefix, folder + sample[1]
    words = [repo.partition("/")[2], name or "", split if split != "train" else ""]
    # without underscores: those are between the parts of a shard's name
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, words)))[:100].strip("-.")
    plain = plain or "hub"
    # not into the project's own folders
    return plain, repo.replace("/", "-") if plain in OWN_FOLDERS else plain


def shortened(names: Iterable[str]) -> str:
    """As many of the names as fit into a line."""
    names, shown = [str(name)[:100] for name in names], []
    while len(shown) < len(names) and len(", ".join(shown)) < 160:
        shown.append(names[len(shown)])
    return ", ".join(shown) + f" ... ({len(names)} in all)" * (len(shown) < len(names))


class HubSource:
    """A dataset of the Hugging Face hub, streamed: its files are not stored on disk.

    `name`: of its configuration. `description`: what the manifest records of the source; it is complete after
    `pin`. `expected`: about how many tokens there are, math.inf if unknown. `shuffled`: whether the first
    tokens are as good as any for validation.
    """
    shuffled, notes = True, ()

    def __init__(self, repo: str, name: str | None, part: tuple[int, int] = (0, 1), split: str = "train",
                 text_field: str = TEXT_FIELD):
        self.repo, self.name, self.part, self.split, self.field = repo, name, part, split, text_field
        settings = {"repo": repo, "name": name, "split": split, "text_field": text_field}
        usual = {"name": None, "split": "train", "text_field": TEXT_FIELD}      # as in earlier manifests
        self.description = {key: value for key, value in settings.items() if value != usual.get(key)}
        self.shuffled = repo in [fineweb for fineweb, *_ in FINEWEB.values()]
        self.opened = None                        # the stream that `pin` has opened

    @property
    def expected(self):
        sample = re.fullmatch(r"sample-(\d+)BT", self.name or "")
        if self.shuffled and self.split == "train" and sample:
            return int(sample[1]) * 10**9 // self.part[1]
        size = self.description.get("bytes")
        return int(size / BYTES_PER_TOKEN) // self.part[1] if size else math.inf

    def pin(self, out: Path) -> None:
        """Decides on the revision: the one that a manifest in `out` records, else the hub's newest. What the
        folder records needs no network."""
        with writable(out):
            manifests = [path for path in sorted(out.glob("manifest*.json"))
                         if MANIFEST_NAME.fullmatch(path.name)]
        try:
            manifests = [read_manifest(path) or {} for path in manifests]
        except UserError:
            return                                # ShardWriter says which one is damaged
        for source, shards in ((found.get("source"), found.get("shards")) for found in manifests):
            if isinstance(source, dict) and self.description == {
                    key: value for key, value in source.items() if key not in ("revision", "bytes")}:
                recorded = {key: source[key] for key in ("revision", "bytes") if key in source}
                if not (re.fullmatch(r"[0-9a-f]{40}", str(recorded.get("revision", "0" * 40))) and
                        type(recorded.get("bytes", 0)) is int and 0 <= recorded.get("bytes", 0) < 1 << 60):
                    raise UserError(DAMAGED_CURSOR)
                self.description |= recorded      # none in the manifests of earlier versions: then unpinned
                return
            if shards:
                return                            # of another source: ShardWriter refuses it
        need_hub(self.repo)
        self.description["revision"] = self._retried(self._newest)
        if self.expected == math.inf:
            self.opened, size = self._retried(lambda: self._open(None, measure=True))
            self.description |= {"bytes": size} if size else {}

    def _newest(self):
        import huggingface_hub
        try:
            return huggingface_hub.HfApi().dataset_info(self.repo, expand=["sha"]).sha
        except huggingface_hub.errors.HfHubHTTPError as error:
            raise self._mistake(error, refused=(401, 403, 404)) or error from None

    def _retried(self, call: Callable):
        for failures in itertools.count():
            try:
                return call()
            except UserError:
                raise
            except Exception as error:            # network errors come in the classes of many libraries
                self._wait(error, failures)

    def _wait(self, error, failures):
        wait_to_retry(error, failures, self.repo, f"cannot read {self.repo} from the Hugging Face hub",
                      final=())                   # even 403: a stream's signed links expire

    def read(self, start: int = 0, cursor: list | None = None) -> Iterator[Piece]:
        """A cursor's state is that of the stream."""
        for text, state in self._documents(start, cursor):
            yield Piece([text], cursor=state)

    def _documents(self, start, cursor):
        """(text, the stream's state before it or None). A dropped connection is retried from the last
        cursor."""
        from datasets.table import CastError
        if cursor and not (len(cursor) == 2 and isinstance(cursor[1], dict)):
            raise UserError(DAMAGED_CURSOR)
        need_hub(self.repo)
        failures, state_before = 0, None
        while True:
            try:
                number, state = cursor or (0, None)
                stream, self.opened = self.opened or self._open(state)[0], None
                for document in stream:
                    if self.field in document and document[self.field] is None:
                        document[self.field] = ""         # an empty document: the others are worth reading
                    if not isinstance(document.get(self.field), str):
                        raise UserError(f"{self.repo}: document {number} has no string `{self.field}`; its "
                                        f"columns are {shortened(document)}: give another --text_field")
                    number += 1
                    if number > start:
                        yield document[self.field], state_before
                        start, failures, state_before = number, 0, None
                    if number % CURSOR_EVERY == 0 and hasattr(stream, "state_dict"):
                        cursor = number, stream.state_dict()
                        state_before = cursor[1] if number == start else None
                return
            except UserError:
                raise
            except CastError as error:
                raise UserError(f"{self.repo}: its files have not all the same columns "
                                f"({brief_error(error)}): choose another dataset or --name") from None
            except Exception as error:            # network errors come in the classes of many libraries
                self._wait(error, failures)
                failures += 1

    def _open(self, state, measure=False):
        """The stream at a state, and if asked for about how many bytes of text it has (0: unknown). UserError
        if the hub has no such dataset, configuration, split or column."""
        import datasets
        revision = self.description.get("revision")
        # If the hub does not answer, `datasets` takes what a cache has, of whatever revision: hence an empty
        # one. And with hf:// it never takes a local folder OWNER/NAME.
        with tempfile.TemporaryDirectory() as empty:
            try:
                builder = datasets.load_dataset_builder(f"hf://datasets/{self.repo}", name=self.name,
                                                        revision=revision, cache_dir=empty)
                stream = builder.as_streaming_dataset(split=self.split)
            except Exception as error:
                raise self._mistake(error) or error from None
        columns = getattr(stream, "column_names", None)             # None: known with the first document
        if columns and self.field not in columns:
            raise UserError(f"{self.repo} has no column {self.field}: give --text_field, one of "
                            f"{shortened(columns)}")
        size = text_bytes(builder.config.data_files.get(self.split, ())) if measure else 0
        if self.part[1] > 1:                      # whole files if their number allows it, else every n-th row
            from datasets.distributed import split_dataset_by_node
            stream = split_dataset_by_node(stream, *self.part)
        if state:
            stream.load_state_dict(state)
        return stream, size

    def _mistake(self, error, refused=()):
        """The UserError for an error of opening a dataset, None if it is worth a retry. `refused`: statuses
        of the hub's answer that say that there is none."""
        from datasets.exceptions import FileNotFoundDatasetsError
        from huggingface_hub import errors
        chain, what = causes(error), f"--dataset {self.repo}"
        is_gated = isinstance(error, FileNotFoundDatasetsError) and "is a gated dataset" in str(error)
        if is_gated or any(isinstance(cause, errors.GatedRepoError) for cause in chain):
            return UserError(f"{what} is gated: accept its terms on its page of the hub, then {LOG_IN}")
        if any(isinstance(cause, errors.RevisionNotFoundError) for cause in chain):
            return UserError(f"{what}: revision {self.description.get('revision')}, of which the folder was "
                             f"made, is no longer on the hub: choose another --out to begin anew")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in chain) or status in refused:
            return UserError(f"{what}: the hub has no public dataset of this name: check it, or if it is "
                             f"private, {LOG_IN}")
        if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
            return UserError(f"{what} needs a script of its own to be read, and code from the hub is never "
                             f"run: choose a dataset of .parquet, .jsonl or other files")
        # JSONDecodeError: a proxy's page in the place of the hub's answer; BadRequestError is HTTP's
        if isinstance(error, FileNotFoundDatasetsError) or isinstance(error, ValueError) and not isinstance(
                error, json.JSONDecodeError | errors.HfHubHTTPError):
            if not (choices := re.search(r"available[^\[]*\[(.*)\]", str(error), re.I)):
                return UserError(f"{what} cannot be read ({brief_error(error)}): choose another dataset")
            flag, kind = ("split", "splits") if "split" in str(error) else ("name", "configurations")
            given = getattr(self, flag) and f"{what} has no --{flag} {getattr(self, flag)}: its {kind} are "
            names = re.findall(r"'([^']*)'", choices[1])
            return UserError((given or f"{what} has several {kind}: give --name, one of ") + shortened(names))
        return None


def text_bytes(files: list[str]) -> int:
    """About how many bytes of text are in these files of the hub, as corpus/sources.py estimates it. 0 if it
    is unknown. `datasets` has listed them before: that is remembered, and asks nothing of the network."""
    from datasets.config import HF_ENDPOINT
    from huggingface_hub import HfFileSystem
    if not all(file.startswith("hf://") for file in files):
        return 0
    hub = HfFileSystem(endpoint=HF_ENDPOINT)
    sizes = [hub.info(file)["size"] * UNPACKED.get(Path(file).suffix.lower(), 1) for file in files[:SIZES]]
    return sum(sizes) * len(files) // max(1, len(sizes))
