"""GPT-2's byte-level BPE, from assets/, without a network: tiktoken, and for much text gigatoken."""
import functools
import hashlib
import json
import re
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.cli import RunError, UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
VOCAB_SIZE = 50257              # 50,000 merges + 256 bytes + <|endoftext|>
EOT = 50256                     # <|endoftext|>
# the last place where a cut of a text changes no token: after a character that is not white
# space and before a space or a line end. No alternative of GPT-2's pattern matches across it, or looks on
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)
COMPARED = 1000                 # bytes of each megabyte that tiktoken encodes, too
BPE_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def checked_asset(name: str) -> Path:
    """Path of one of GPT-2's two BPE files in assets/. Raises UserError if its hash is wrong."""
    path = ASSETS / name
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != BPE_SHA256[name]:
        raise UserError(f"{path} is missing or is not GPT-2's file: restore it with `git checkout -- assets`")
    return path


@functools.cache
def token_bytes() -> dict[bytes, int]:
    """{bytes of a token: its id}, in the order of the ids, for all but <|endoftext|>."""
    # encoder.json writes bytes as printable characters: a printable one of Latin-1 as itself, the other 68
    # as the code points from 256 on. Its ids are the merge ranks
    printable = [b for b in range(256) if chr(b).isprintable() and b != ord(" ")]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    encoder = json.loads(checked_asset("encoder.json").read_text(encoding="utf-8"))
    return {bytes(byte_of[c] for c in token): rank for token, rank in encoder.items() if rank != EOT}


@functools.cache
def token_lengths() -> np.ndarray:
    """Bytes of each token, uint8 (VOCAB_SIZE,); <|endoftext|> has none."""
    return np.array([*map(len, token_bytes()), 0], dtype=np.uint8)


@functools.cache
def tokenizer():
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) as a tiktoken Encoding. Its tokens are those
    of `tiktoken.get_encoding("gpt2")`, which downloads the two files."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str       # GPT-2's pattern
    return tiktoken.Encoding("gpt2", explicit_n_vocab=VOCAB_SIZE, pat_str=r50k_pat_str,
                             mergeable_ranks=token_bytes(), special_tokens={"<|endoftext|>": EOT})


def encode(text: str) -> np.ndarray:
    """GPT-2 tokens of `text`, 1-D uint16; `<|endoftext|>` in it is ordinary text. Raises UserError for a run
    of white space that is too long for tiktoken."""
    try:
        return tokenizer().encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except UnicodeEncodeError:                    # lone surrogates: U+FFFD instead, as tiktoken has it
        return encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:                            # the regular expression runs out of stack
        raise UserError("a document has too long a run of white space for tiktoken: shorten it") from None


class Encoder:
    """Rows of documents -> tokens, on any number of threads: by gigatoken, some 30 times as fast as tiktoken,
    or where that is not installed by tiktoken.

    A row is UTF-8, with `separator` before each document, which becomes <|endoftext|>. It is drawn at random:
    no text holds it, and `<|endoftext|>` in a text stays text. A row without one continues a document."""

    def __init__(self):
        self.separator, self.gigatoken = f"<|{secrets.token_hex(16)}|>".encode(), None
        # of a character's first three bytes in UTF-8: 0 not asked yet, 1 both tokenizers agree, 2 they do not
        self.agree = np.zeros(1 << 24, dtype=np.uint8)        # a page that is not written to takes no memory
        with suppress(ImportError):
            from gigatoken.gigatoken_rs import load_hf_json
            merges, vocabulary = (checked_asset(name).read_text(encoding="utf-8") for name in BPE_SHA256)
            model = {"type": "BPE", "vocab": json.loads(vocabulary), "merges": merges.split("\n")[1:-1]}
            self.gigatoken = load_hf_json(json.dumps({        # as much of a tokenizer.json as it reads
                "added_tokens": [{"id": EOT, "content": self.separator.decode(), "special": True}],
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                "model": model}))

    def encode(self, row: bytes) -> np.ndarray:
        """Tokens of a row, 1-D uint16. RunError where those of its first COMPARED bytes are not tiktoken's;
        UserError as `encode`, where tiktoken does the work."""
        if not self.gigatoken or self._needs_tiktoken(row):
            return self._by_tiktoken(row)
        tokens, cut = self._by_gigatoken(row), LAST_CUT.match(row[:COMPARED].decode(errors="ignore"))
        head = row if len(row) <= COMPARED else cut[0].encode() if cut else b""
        want = self._by_tiktoken(head)
        if not np.array_equal(want, tokens[:len(want)]):
            raise RunError("gigatoken's tokens are not tiktoken's: uninstall it, and run the command again")
        return tokens

    def _by_gigatoken(self, row):
        from gigatoken.gigatoken_rs import BytesSource, PadTruncate
        # the method that neither holds the GIL nor imports awkward; on this thread alone
        padded, lengths = self.gigatoken.encode_batch_padded(BytesSource(row), PadTruncate(0), parallel=False)
        return padded[0, :lengths[0]].astype(np.uint16)

    def _by_tiktoken(self, row):
        parts = [part for text in row.split(self.separator) for part in ([EOT], encode(text.decode()))]
        return np.concatenate(parts[1:], dtype=np.uint16, casting="unsafe")

    def _needs_tiktoken(self, row):
        """Whether the two differ about a character in it: a letter of Unicode 17 is none to tiktoken yet,
        which matters before 's, 're ... Each is asked of both, once. New letters have three bytes or four."""
        if row.isascii():
            return False
        data = np.frombuffer(row, dtype=np.uint8)
        at = np.flatnonzero(data >= 0xe0)
        found = data[at].astype(np.uint32) << 16 | data[at + 1].astype(np.uint32) << 8 | data[at + 2]
        for new in np.unique(found[self.agree[found] == 0]).tolist():
            start = new.to_bytes(3)               # of one character, or of 64 with four bytes
            chars = [start + bytes([end]) for end in range(0x80, 0xc0)] if start[0] >= 0xf0 else [start]
            text = b"".join(b"%b's%b1 %b%b\n" % (c, c, c, c) for c in chars)
            self.agree[new] = 1 if np.array_equal(self._by_gigatoken(text), self._by_tiktoken(text)) else 2
        return bool((self.agree[found] == 2).any())
