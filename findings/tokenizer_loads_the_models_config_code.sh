#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer.from_pretrained(FOLDER) reads the config of the model first, even where
# tokenizer_config.json names a class of transformers' own and tokenizer.json has the whole tokenizer. So for a model
# that brings its own config class (auto_map in config.json)
# - without trust_remote_code it asks on the terminal whether the model's code may run, and warns that a model of this
#   type is used "to instantiate a model of type ''", though only a tokenizer was asked for;
# - with trust_remote_code=True it imports the model's code, which the tokenizer does not need.
# transformers 4.57.3 does neither. The tokens are the same in all cases. A script that nobody watches passes
# trust_remote_code to AutoTokenizer as to AutoModelForCausalLM, or takes PreTrainedTokenizerFast instead.
# Seen: "asks: yes, imports the model's code: yes" with 5.24.0, "no, no" with 4.57.3.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cat >"$tmp/try.py" <<'PYTHON'
import contextlib
import io
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

folder = Path("folder")
folder.mkdir(exist_ok=True)
words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save(str(folder / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))

settings = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
(folder / "config.json").write_text(json.dumps(settings))
(folder / "configuration_mine.py").write_text("""
from transformers import PretrainedConfig
print("imported")

class MineConfig(PretrainedConfig):
    model_type = "mine"
""")


def load(**how):
    """What is printed, and the tokens."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        tokenizer = AutoTokenizer.from_pretrained("folder", **how)
    return said.getvalue(), tokenizer("a b")["input_ids"]


answer = {True: "yes", False: "no"}
asked, tokens = load()
trusted, same_tokens = load(trust_remote_code=True)
assert tokens == same_tokens == [0, 1]
print(f"asks: {answer['run the custom code' in asked]}, "
      f"imports the model's code: {answer['imported' in trusted]}")
PYTHON
for version in 5.24.0 4.57.3; do
  python3 -m venv "$tmp/$version"
  "$tmp/$version/bin/pip" install -q "transformers==$version"
  (cd "$tmp" && HF_HOME="$tmp/home-$version" "$version/bin/python" try.py </dev/null) 2>"$tmp/stderr" | tee "$tmp/out-$version"
done
grep -qx "asks: yes, imports the model's code: yes" "$tmp/out-5.24.0" || { cat "$tmp/stderr"; echo "changed"; exit 1; }
grep -qx "asks: no, imports the model's code: no" "$tmp/out-4.57.3" || { cat "$tmp/stderr"; echo "changed"; exit 1; }
