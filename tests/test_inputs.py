"""Hidden files, packages that are not installed, folders that hide a name of the hub."""
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import refused, script

from model import GPT, GPTConfig, load_model
from model import main as export

@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_hidden_files_do_not_keep_an_export_from_its_folder_and_stay_there():
    GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4)).save_pretrained("one")
    Path("two").mkdir()
    for folder in ("one", "two"):
        Path(folder, ".DS_Store").write_text("Finder's")
    for source, folder in (("one", "two"), ("two", "one")):
        export(["export", source, folder])
        assert Path(folder, ".DS_Store").read_text() == "Finder's" and load_model(folder)


# ----------------------------------------------------------------------------- packages that are not there

@pytest.mark.parametrize("package, module, call", [
    ("huggingface_hub", "", partial(load_model, "gpt2")),
    ("safetensors", ".torch", partial(load_model, "exported")),
    ("safetensors", ".torch", partial(export, ["export", "exported/a.pt", "new"]))])
def test_a_package_that_is_not_installed_is_named_with_its_installation(package, module, call, monkeypatch):
    from peers import make_model, own_checkpoint, save
    model = make_model(vocab_size=50257, n_layer=1, n_head=1, n_embd=4)
    model.save_pretrained("exported")
    save("exported/a.pt", own_checkpoint(model))
    monkeypatch.setitem(sys.modules, package + module, None)
    assert refused(call).endswith(f": pip install {package}")
    assert not Path("out").exists()


def test_a_folder_that_hides_a_name_of_the_hub_is_told():
    Path("gpt2/drafts").mkdir(parents=True)
    for read_it in (load_model, GPT.from_pretrained):
        refused(lambda read_it=read_it: read_it("gpt2"), Path("gpt2").absolute(), "openai-community/gpt2")
    refused(lambda: load_model("gpt2/weights"), "gpt2/weights", Path("gpt2").absolute())
    assert "hub" not in refused(lambda: load_model("gpt2/drafts"), "gpt2/drafts")
    refused(lambda: script("model.py", "export", "gpt2", "new"), "model.py: ", "openai-community/gpt2")
