#!/usr/bin/env bash
# transformers.js 4.3.2 decodes other text than transformers 5.24.0 from the same folder: where tokenizer_config.json
# does not name clean_up_tokenization_spaces, JavaScript takes it for true and Python for false. So decode(encode(text))
# loses blanks before . , ! ? and n't 's 'm 've 're, which French typography, code and Treebank text have. "false" in
# the file makes both alike. Seen: "Ça va ? [ 1 , 2 ]" becomes "Ça va? [ 1, 2 ]" in JavaScript, and stays in Python.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install -q transformers==5.24.0
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/transformers@4.3.2 >/dev/null

# A byte-level BPE without merges: a token for each byte. One folder names the setting, the other one does not.
cat >make.py <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
for name, more in (("silent", {}), ("false", {"clean_up_tokenization_spaces": False})):
    folder = Path(name)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    python = AutoTokenizer.from_pretrained(name)
    print(f"{name}, Python:     {python.decode(python('Ça va ? [ 1 , 2 ]')['input_ids'])}")
PYTHON
cat >try.mjs <<'JAVASCRIPT'
import { AutoTokenizer, env } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = "./";
for (const name of ["silent", "false"]) {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  console.log(`${name}, JavaScript: ${tokenizer.decode(tokenizer.encode("Ça va ? [ 1 , 2 ]"))}`);
}
JAVASCRIPT
venv/bin/python make.py | tee python.txt
node try.mjs | tee javascript.txt

grep -q "silent, Python:     Ça va ? \[ 1 , 2 \]" python.txt || { echo "changed: Python removes blanks"; exit 1; }
grep -q "false, JavaScript: Ça va ? \[ 1 , 2 \]" javascript.txt || { echo "changed: false is not enough"; exit 1; }
grep -q "silent, JavaScript: Ça va? \[ 1, 2 \]" javascript.txt || { echo "changed: JavaScript keeps blanks"; exit 1; }
