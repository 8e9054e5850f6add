"""A dataset of the Hugging Face hub as a source of text, as corpus/sources.py describes it."""
import re
from collections.abc import Iterator

from corpus.sources import DAMAGED_CURSOR, Piece
from runtime.cli import UserError
from runtime.hub import need_hub, wait_to_retry

CURSOR_EVERY = 1000             # documents between two cursors of a stream


class HubSource:
    """A dataset of the Hugging Face hub, streamed: its files are not stored on disk.

    `description`: what the manifest records of the source. `expected`: about how many tokens it has.
    """
    shuffled, notes = True, ()

    def __init__(self, repo: str, name: str, part: tuple[int, int] = (0, 1)):
        self.repo, self.name, self.part = repo, name, part
        self.description = {"repo": repo, "name": name}
        self.expected = int(re.findall(r"\d+", name)[0]) * 10**9 // part[1]

    def read(self, start: int = 0, cursor: list | None = None) -> Iterator[Piece]:
        """A cursor's state is that of the stream."""
        for text, state in self._documents(start, cursor):
            yield Piece([text], cursor=state)

    def _documents(self, start, cursor):
        """(text, the stream's state before it or None). A dropped connection is retried from the last
        cursor."""
        if cursor and not (len(cursor) == 2 and isinstance(cursor[1], dict)):
            raise UserError(DAMAGED_CURSOR)
        need_hub(self.repo)
        failures, state_before = 0, None
        while True:
            try:
                number, state = cursor or (0, None)
                stream = self._open(state)
                for document in stream:
                    if not isinstance(document.get("text"), str):
                        raise UserError(f"{self.repo}: document {number} has no string `text`")
                    number += 1
                    if number > start:
                        yield document["text"], state_before
                        start, failures, state_before = number, 0, None
                    if number % CURSOR_EVERY == 0 and hasattr(stream, "state_dict"):
                        cursor = number, stream.state_dict()
                        state_before = cursor[1] if number == start else None
                return
            except UserError:
                raise
            except Exception as error:            # network errors come in the classes of many libraries
                wait_to_retry(error, failures, self.repo,
                              f"cannot read {self.repo} from the Hugging Face hub",
                              final=())           # even 403: a stream's signed links expire
                failures += 1

    def _open(self, state):
        from datasets import load_dataset
        stream = load_dataset(self.repo, name=self.name, split="train", streaming=True)
        if self.part[1] > 1:                      # whole files if their number allows it, else every n-th row
            from datasets.distributed import split_dataset_by_node
            stream = split_dataset_by_node(stream, *self.part)
        if state:
            stream.load_state_dict(state)
        return stream
