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

# The first sentence of the Universal Declaration of Human Rights, or some of it, in scripts with
# and without blanks; and code.
SCRIPTS = {
    "chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应和睦相处。",
    "traditional": "人人生而自由、在尊嚴和權利上一律平等；他們賦有理性和良心！並應和睦相處？",
    "japanese": "すべての人間は、生まれながらにして自由であり、ソンゲンと権利とについて平等だ。",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាពនិងសមភាព។",
    "lao": "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ",
    "burmese": "လူတိုင်းသည်တူညီလွတ်လပ်သောဂုဏ်သိက္ခာဖြင့်၊",
    "tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས།",
    "arabic": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.",
    "hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "tamil": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்;",
    "amharic": "የሰው፡ልጅ፡ሁሉ፡ሲወለድ፡ነጻና፡በክብርና፡በመብትም፡እኩልነት፡ያለው፡ነው።",
    "greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "russian": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "emoji": "👩‍👩‍👧🇨🇭🙂",
    "code": "for(i=0;i<n;i++){a[i]+=b[i]*'x';}",
}


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
