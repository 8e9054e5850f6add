"""GPT-2's byte-level BPE, from assets/, without a network."""
import functools
import hashlib
import json
from pathlib import Path

import numpy as np

from runtime.cli import UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
VOCAB_SIZE = 50257              # 50,000 merges + 256 bytes + <|endoftext|>
EOT = 50256                     # <|endoftext|>
# GPT-2's pattern. tiktoken's engine matches an alternative without lookahead by a table, and one that is a
# group of such at once: 1.6x as fast as r50k_pat_str of tiktoken_ext, with the same matches.
PATTERN = (r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)"
           r"|\s++$|\s+(?!\S)|\s")
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
    return tiktoken.Encoding("gpt2", explicit_n_vocab=VOCAB_SIZE, pat_str=PATTERN,
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
