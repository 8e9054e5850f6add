"""GPT-2's byte-level BPE (Radford et al. 2019, section 2.2), from the two files in assets/,
without a network.

tiktoken is the reference. gigatoken encodes large texts, some 30 times as fast, and is compared
with it.
"""
import functools
import hashlib
import json
import re
import secrets
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.cli import RunError, UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
VOCAB_SIZE = 50257              # 50,000 merges + 256 bytes + <|endoftext|>
EOT = 50256                     # <|endoftext|>
BPE_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
SAMPLE_BYTES = 1000             # of each chunk, which tiktoken encodes, too
FRESH_SECONDS = 2.0             # of encoding, after which gigatoken is loaded anew
LAST_TOKENS = 12                # of a sample, which are not compared: what follows it can change
                                # some of them (of 300,000 samples 6 tokens at most)

# Matches a text up to the last place where it can be cut without changing a token. GPT-2's pattern
# always begins a new piece there, and decides nothing before it by what comes after it:
# - behind a character that is no white space, and before a space or a line end
# - behind a Chinese or Japanese sign, and before a letter, of those that every version of Unicode
#   has (Hiragana, Katakana, Chinese). A book may have neither spaces nor line ends.
LAST_CUT = re.compile(r".*(?:\S(?=[ \n\r])|[。，！？、；](?=[ぁ-ゔァ-ヺ一-龥]))", re.DOTALL)


def bpe_file(name: str) -> bytes:
    """One of GPT-2's two BPE files. UserError if it is not GPT-2's: all tokens would be wrong."""
    content = (ASSETS / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != BPE_SHA256[name]:
        raise UserError(f"{ASSETS / name} is not GPT-2's file: restore it with `git checkout -- "
                        "assets`")
    return content


@functools.cache
def token_bytes() -> dict[bytes, int]:
    """{bytes of a token: its id}, in the order of the ids, for all tokens but <|endoftext|>."""
    # encoder.json writes every byte as one printable character. A byte that is printable in
    # Latin-1 is written as itself. The other 68 are written, in their order, as the code points
    # from 256 on: this table takes them back.
    unprintable = [byte for byte in range(256) if byte == 32 or not chr(byte).isprintable()]
    table = {256 + i: byte for i, byte in enumerate(unprintable)}

    # The ids are in the order of the merges, so that they are the ranks that tiktoken asks for.
    ids = json.loads(bpe_file("encoder.json"))
    del ids["<|endoftext|>"]
    return {token.translate(table).encode("latin-1"): id for token, id in ids.items()}


@functools.cache
def token_lengths() -> np.ndarray:
    """How many bytes of text each token stands for: uint8 (VOCAB_SIZE,). <|endoftext|> has none."""
    lengths = [len(token) for token in token_bytes()]
    return np.array([*lengths, 0], dtype=np.uint8)


@functools.cache
def tokenizer():
    """GPT-2's tokenizer as a tiktoken Encoding, made once."""
    return new_encoding()


def new_encoding():
    """A tiktoken Encoding with the tokens of `tiktoken.get_encoding("gpt2")`, which would download
    the two files."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str       # GPT-2's pattern
    return tiktoken.Encoding(
        "gpt2", explicit_n_vocab=VOCAB_SIZE, pat_str=r50k_pat_str, mergeable_ranks=token_bytes(),
        special_tokens={"<|endoftext|>": EOT})


def encode(text: str, encoding=None) -> np.ndarray:
    """GPT-2's tokens of `text`, 1-D uint16, by a tiktoken Encoding (None: by `tokenizer()`), where
    `<|endoftext|>` is ordinary text. UserError for white space that is too long for tiktoken."""
    if encoding is None:
        encoding = tokenizer()
    try:
        tokens = encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        return encode(replace_surrogates(text), encoding)
    except ValueError:                            # tiktoken's regular expression runs out of stack
        raise UserError("a document has a run of white space that is too long for tiktoken: "
                        "shorten the run") from None
    return tokens.astype(np.uint16)


def document_start(vocab_size: int) -> int:
    """The token with which a sample begins that has no prompt: <|endoftext|>, or 0 in a vocabulary
    that is not GPT-2's. Of nanoGPT's characters that is the line end."""
    if vocab_size < VOCAB_SIZE:
        return 0
    return EOT


def token_as_text(vocab_size: int) -> Callable[[int], bytes]:
    """A function: token -> its text in UTF-8. In a vocabulary that is not GPT-2's it is the
    token's number and a blank."""
    if vocab_size < VOCAB_SIZE:
        return lambda token: b"%d " % token
    return tokenizer().decode_single_token_bytes


def tokens_as_text(tokens: list[int], vocab_size: int) -> str:
    """The text of tokens, or their numbers, as of token_as_text."""
    return b"".join(map(token_as_text(vocab_size), tokens)).decode(errors="replace")


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for each surrogate that has lost its other half, as tiktoken has it.
    UTF-8 has none, but an escape in JSON can make one."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def load_gigatoken(mark: str):
    """gigatoken's tokenizer with GPT-2's tokens, to which `mark` is <|endoftext|>.

    ImportError where gigatoken is not installed.
    """
    from gigatoken.gigatoken_rs import BPETokenizer

    # tiktoken's format of a file, which loads in half the time of a tokenizer.json: each line has
    # a token in base64 and its rank.
    lines = [b"%b %d\n" % (b64encode(token), rank) for token, rank in token_bytes().items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt2.tiktoken")
        path.write_bytes(b"".join(lines))
        return BPETokenizer.from_tiktoken(path, "gpt2", {mark: EOT})


class Encoder:
    """Chunks of documents -> tokens, on any number of threads.

    A chunk is text in UTF-8, with `mark` before each document in it, which becomes
    <|endoftext|>. The mark is drawn at random, so that no text holds it: `<|endoftext|>` in
    a text stays text. A chunk that does not begin with it continues a document.

    `name` is "gigatoken", "tiktoken", or "auto": gigatoken where it is installed, else tiktoken."""

    def __init__(self, name: str = "auto"):
        self.mark = f"<|{secrets.token_hex(16)}|>".encode()
        self.gigatoken = None                     # where it is None, tiktoken does the work
        self.seconds = 0.0                        # of encoding, since it was loaded
        self.thread = threading.local()           # has the Encoding of a thread
        if name == "tiktoken":
            return

        try:
            self.gigatoken = load_gigatoken(self.mark.decode())
        except ImportError:
            if name == "gigatoken":
                raise
            return
        tokenizer()             # with which it is compared: later each thread would make one

    def encode(self, chunk: bytes) -> np.ndarray:
        """The tokens of a chunk, 1-D uint16. RunError if gigatoken's are not tiktoken's, as far as
        they are compared; UserError as of `encode`, where tiktoken does the work."""
        if self.gigatoken is None:
            return self._by_tiktoken(chunk)

        tokens = self._by_gigatoken(chunk)
        self._compare_sample(chunk, tokens)
        return tokens

    def _by_gigatoken(self, chunk: bytes) -> np.ndarray:
        from gigatoken.gigatoken_rs import BytesSource, PadTruncate

        # Of gigatoken's methods this one neither holds the GIL nor imports another package. The
        # threads are ours, so it works on the one that calls it.
        begun = time.thread_time()
        padded, lengths = self.gigatoken.encode_batch_padded(
            BytesSource(chunk), PadTruncate(0), parallel=False)
        self.seconds += time.thread_time() - begun

        # gigatoken keeps each piece of text that it has seen, without a limit: of Chinese, whose
        # pieces are parts of sentences, 5 bytes for each byte. So it is loaded anew, which is fast.
        if self.seconds > FRESH_SECONDS:
            self.seconds = 0.0
            self.gigatoken = load_gigatoken(self.mark.decode())
        return padded[0, :lengths[0]].astype(np.uint16)

    def _by_tiktoken(self, chunk: bytes) -> np.ndarray:
        # Threads that share an Encoding wait for each other, which matters where it does all the
        # work: then each has its own.
        if self.gigatoken is not None:
            encoding = tokenizer()
        else:
            if not hasattr(self.thread, "encoding"):
                self.thread.encoding = new_encoding()
            encoding = self.thread.encoding

        continued, *documents = chunk.split(self.mark)
        parts = [encode(continued.decode(), encoding)]
        for document in documents:
            parts.append(np.array([EOT], dtype=np.uint16))
            parts.append(encode(document.decode(), encoding))
        return np.concatenate(parts)

    def _compare_sample(self, chunk: bytes, tokens: np.ndarray) -> None:
        """RunError if the tokens of the chunk's first SAMPLE_BYTES are not those of tiktoken."""
        sample = chunk[:SAMPLE_BYTES]

        # A part of a mark would be read as text.
        last_mark = chunk.rfind(self.mark, 0, SAMPLE_BYTES + len(self.mark) - 1)
        if last_mark + len(self.mark) > SAMPLE_BYTES:
            sample = chunk[:last_mark]

        # The sample may end inside a character, whose bytes are left out.
        sample = sample.decode(errors="ignore")
        expected = self._by_tiktoken(sample.encode())

        # It may end inside a word, too. So of a longer chunk its last tokens are not compared.
        if len(chunk) > SAMPLE_BYTES:
            expected = expected[:-LAST_TOKENS]
            tokens = tokens[:len(expected)]
        if np.array_equal(tokens, expected):
            return

        raise RunError(f"gigatoken's tokens differ from tiktoken's in a text that begins with "
                       f"{sample[:80]!r}: install the version of gigatoken "
                       f"in requirements.txt, or use --encoder tiktoken, which is slower")
