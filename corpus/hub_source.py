"""A dataset of the Hugging Face hub as a source of text, as corpus/sources.py describes it."""
import functools
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from corpus.hub import causes, need_hub, wait_to_retry
from corpus.shard_writer import read_manifests
from corpus.sources import BYTES_PER_TOKEN, DAMAGED_CURSOR, TEXT_FIELD, Piece, text_bytes
from runtime.cli import UserError, brief_error

CURSOR_EVERY = 1000             # documents between two cursors of a stream
SIZES = 100                     # files whose size is asked for, at most
# --variant: dataset, prefix of the shards, beginning of the folder's name
FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}


def default_names(repo: str, name: str | None, split: str) -> tuple[str, str]:
    """(prefix of the shards, folder) of a dataset. FineWeb's samples have build-nanogpt's."""
    for fineweb, prefix, folder in FINEWEB.values():
        if repo == fineweb and split == "train" and (sample := re.fullmatch(r"sample-(\d+B)T", name or "")):
            return prefix, folder + sample[1]
    words = [repo.partition("/")[2], name, None if split == "train" else split]
    # without underscores: those are between the parts of a shard's name
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(filter(None, words)))[:100].strip("-.") or "hub"
    return plain, plain


class HubSource:
    """A dataset of the Hugging Face hub, streamed: its files are not stored on disk. `name`: of its
    configuration. Its `description` is complete after `pin`."""
    notes = ()

    def __init__(self, repo: str, name: str | None, part: tuple[int, int] = (0, 1), split: str = "train",
                 text_field: str = TEXT_FIELD):
        self.repo, self.name, self.part, self.split, self.field = repo, name, part, split, text_field
        settings = {"repo": repo, "name": name, "split": split, "text_field": text_field}
        usual = {"name": None, "split": "train", "text_field": TEXT_FIELD}      # as in earlier manifests
        self.description = {key: value for key, value in settings.items() if value != usual.get(key)}
        self.shuffled = repo in [fineweb for fineweb, *_ in FINEWEB.values()]

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
        for source in (found.get("source") for found in read_manifests(out).values()):
            # no revision in the manifests of earlier versions: then unpinned
            if isinstance(source, dict) and self.description == {
                    key: value for key, value in source.items() if key not in ("revision", "bytes")}:
                revision, size = source.get("revision", "0" * 40), source.get("bytes", 0)
                if not (re.fullmatch(r"[0-9a-f]{40}", str(revision)) and type(size) is int and
                        0 <= size < 1 << 60):
                    raise UserError(DAMAGED_CURSOR)
                self.description = source
            return                                # of another source: ShardWriter refuses it
        need_hub(self.repo)
        from huggingface_hub import HfApi
        self.description["revision"] = self._retried(
            lambda: HfApi().dataset_info(self.repo, expand=["sha"])).sha
        if self.expected == math.inf and (size := self._retried(self._text_bytes)):
            self.description["bytes"] = size

    def _retried(self, call: Callable):
        """What `call`, which opens the dataset, returns. UserError if the hub has no such dataset."""
        for failures in itertools.count():
            try:
                return call()
            except Exception as error:            # network errors come in the classes of many libraries
                if mistake := self._mistake(error):
                    raise mistake from None
                self._wait(error, failures)

    def _wait(self, error, failures):
        wait_to_retry(error, failures, self.repo, f"cannot read {self.repo} from the Hugging Face hub",
                      final=())                   # even 403: a stream's signed links expire

    def read(self, start: int = 0, cursor: list | None = None) -> Iterator[Piece]:
        """A cursor's state is that of the stream. A dropped connection is retried from the last cursor."""
        from datasets.table import CastError
        if cursor and not (len(cursor) == 2 and isinstance(cursor[1], dict)):
            raise UserError(DAMAGED_CURSOR)
        need_hub(self.repo)
        (at, state), failures = cursor or (0, None), 0
        while True:
            number = at
            stream = self._retried(functools.partial(self._open, state))
            try:
                for row in stream:
                    if number >= start:
                        yield Piece(self._text(row, number), cursor=state if number == at else None)
                        start, failures = number + 1, 0
                    number += 1
                    if number % CURSOR_EVERY == 0 and hasattr(stream, "state_dict"):
                        at, state = number, stream.state_dict()
                return
            except UserError:
                raise
            except CastError as error:
                raise UserError(f"{self.repo}: its files have not all the same columns "
                                f"({brief_error(error)}): choose another dataset or --name") from None
            except Exception as error:            # network errors come in the classes of many libraries
                self._wait(error, failures)
                failures += 1

    def _text(self, row, number):
        text = row.get(self.field, number)
        if text is None:                          # an empty document: the others are worth reading
            return ""
        if not isinstance(text, str):
            raise UserError(f"{self.repo}: document {number} has no string `{self.field}`; its columns are "
                            f"{', '.join(row)[:160]}: give another --text_field")
        return text

    @functools.cached_property
    def _builder(self):
        import datasets
        # If the hub does not answer, `datasets` takes what a cache has, of whatever revision: hence an empty
        # one. And with hf:// it never takes a local folder OWNER/NAME.
        with tempfile.TemporaryDirectory() as empty:
            return datasets.load_dataset_builder(f"hf://datasets/{self.repo}", self.name, cache_dir=empty,
                                                 revision=self.description.get("revision"))

    def _open(self, state):
        """The stream at a state."""
        stream = self._builder.as_streaming_dataset(split=self.split)
        if self.part[1] > 1:                      # whole files if their number allows it, else every n-th row
            from datasets.distributed import split_dataset_by_node
            stream = split_dataset_by_node(stream, *self.part)
        if state:
            stream.load_state_dict(state)
        return stream

    def _text_bytes(self):
        """About how many bytes of text the split has, as corpus/sources.py estimates it; 0 if it is unknown.
        `datasets` has listed the files before: that is remembered, and asks nothing of the network."""
        from datasets.config import HF_ENDPOINT
        from huggingface_hub import HfFileSystem
        files = self._builder.config.data_files.get(self.split, ())
        if not files or not all(file.startswith("hf://") for file in files):
            return 0
        hub, some = HfFileSystem(endpoint=HF_ENDPOINT), files[:SIZES]
        sizes = [text_bytes(file, hub.info(file)["size"]) for file in some]
        return sum(sizes) * len(files) // len(sizes)

    def _mistake(self, error):
        """The UserError for an error of opening the dataset, None if it is worth a retry."""
        from datasets.exceptions import FileNotFoundDatasetsError
        from huggingface_hub import errors

        def is_a(kind):
            return any(isinstance(cause, kind) for cause in causes(error))

        what, brief = f"--dataset {self.repo}", brief_error(error)
        if is_a(errors.RevisionNotFoundError):
            return UserError(f"{what}: revision {self.description.get('revision')}, of which the folder was "
                             f"made, is no longer on the hub: choose another --out to begin anew")
        status = getattr(getattr(error, "response", None), "status_code", None)
        # GatedRepoError is a RepositoryNotFoundError
        if is_a(errors.RepositoryNotFoundError) or "gated dataset" in brief or status in (401, 403, 404):
            return UserError(f"{what}: the hub shows no such dataset ({brief}): check the name; if it is "
                             f"private or gated, accept its terms on its page and log in "
                             f"with `hf auth login` or set HF_TOKEN")
        if "scripts are no longer supported" in brief:
            return UserError(f"{what} needs a script of its own to be read, and code from the hub is never "
                             f"run: choose a dataset of .parquet, .jsonl or other files")
        # no such --name or --split: `brief` lists those that there are. JSONDecodeError is a proxy's page in
        # the place of the hub's answer, BadRequestError HTTP's
        if isinstance(error, FileNotFoundDatasetsError | ValueError) and not isinstance(
                error, json.JSONDecodeError | errors.HfHubHTTPError):
            return UserError(f"{what} cannot be read ({brief}): give another --name, --split or dataset")
        return None
