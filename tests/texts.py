"""Documents for the tests of texts, their tokens, and files of them."""
import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

import fineweb
import runtime.text

# As documents come: short, long, with the special token's name, other scripts, odd white space.
DOCUMENTS = [
    "Hello, world.", "<|endoftext|>", " \n\n\t x  y", "naïve café 中文 🙂 \u200b", "a" * 300,
    "word " * 400, "def f(x):\r\n    return x\r\n", "ࢎ's and 𐤀's", "తెలుగు's",
    "春眠不覺曉、處處聞啼鳥。\n" * 20, "👩‍👩‍👧 🇨🇭 fun\u3000\u3000 " * 9]
for number in range(150):
    DOCUMENTS.append(f"Document {number}: " + "it's 1 of many. " * (number % 13))


def tokens_of(gpt2, documents):
    """build-nanogpt's tokens: 50256 and those of the text, document by document."""
    tokens = []
    for text in documents:
        tokens.append(50256)
        tokens.extend(gpt2.encode_ordinary(text))
    return tokens


def write_documents(path, documents):
    """Writes documents in the format that the name asks for: .parquet, .csv, .jsonl, .json.gz."""
    path = Path(path)
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(documents)), "text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=40, write_page_checksum=True)
    elif path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "id"])
            rows.writerows([text, 1] for text in documents)
    else:
        lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in documents]
        data = "".join(line + "\n" for line in lines).encode()
        if path.suffix == ".gz":
            data = gzip.compress(data)
        path.write_bytes(data)
    return path


def encode_short_chunks():
    """For `before`: chunks are of a few documents, as if the texts were long."""
    from ready import ENCODER
    runtime.text.BLOCK = 900
    fineweb.Encoder = lambda name: ENCODER
