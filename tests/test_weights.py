"""Formats of weights: of transformers and back, of this project and of its neighbours. The other recipes'
exports are in test_export.py, damaged and hostile files in test_hostile.py."""
import dataclasses
import http.server
import os
import subprocess
import sys
import tempfile
import threading

import pytest
import torch

from helpers import HANG, ROOT, llm_c_file, script
from model import GPT, GPT2_SIZES, GPTConfig, load_model, main
from runtime.cli import UserError
from runtime.console import HEADER
from runtime.huggingface import EXPORTED, MODELING, OPENAI_NAMES
from runtime.tokenizer import EOT, VOCAB_SIZE, encode
from peers import make_model, nanogpt_checkpoint, own_checkpoint, plain_gpt2, save, tokens, write_peer


def refused(source, named=None):
    with pytest.raises(UserError) as caught:
        load_model(source)
    assert str(named or source) in str(caught.value) and "\n" not in str(caught.value)


# -----------------------------------------------------------------------------
# transformers, in both directions

def random_transformers_model(**config):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    shape = dict(vocab_size=96, n_positions=24, n_layer=2, n_head=2, n_embd=16)
    theirs = GPT2LMHeadModel(GPT2Config(**shape | config))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return theirs.eval()


@torch.no_grad()
def same_logits(ours, theirs, tolerance=1e-4):
    V = theirs.config.vocab_size
    idx = tokens(2, min(64, ours.config.block_size), V)
    torch.testing.assert_close(ours(idx)[0][..., :V], theirs(idx).logits, atol=tolerance, rtol=0)


def as_one_bin(theirs, folder):
    theirs.config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")


def without_prefix(theirs, folder):
    """As the hub's own gpt2 is: no `transformer.`, no head, and the mask buffers of old."""
    from safetensors.torch import save_file
    theirs.config.save_pretrained(folder)
    weights = {name: p.clone() for name, p in theirs.transformer.state_dict().items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8) for i in range(2)}
    save_file(weights, folder / "model.safetensors")


LAYOUTS = {
    "safetensors": lambda theirs, folder: theirs.save_pretrained(folder),
    "sharded": lambda theirs, folder: theirs.save_pretrained(folder, max_shard_size="8KB"),
    "bin": as_one_bin,
    "hub's old names": without_prefix,
}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_transformers_gives_its_logits(layout, activation, tmp_path):
    theirs = random_transformers_model(activation_function=activation)
    LAYOUTS[layout](theirs, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 or layout != "sharded"
    same_logits(GPT.from_pretrained(tmp_path), theirs)
    same_logits(load_model(str(tmp_path)), theirs)


def test_half_precision_weights_become_fp32(tmp_path):
    theirs = random_transformers_model().half()
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert {(p.dtype, p.is_contiguous()) for p in ours.parameters()} == {(torch.float32, True)}
    same_logits(ours, theirs.float())


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_transformers_gets_our_logits_from_an_exported_folder_without_the_padding(gelu, tmp_path):
    from transformers import GPT2LMHeadModel
    ours = make_model(vocab_size=50304, gelu=gelu)
    ours.save_pretrained(tmp_path / "exported")
    theirs, loading = GPT2LMHeadModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.config.vocab_size == theirs.get_input_embeddings().weight.size(0) == 50257
    assert theirs.config.eos_token_id == theirs.config.bos_token_id == EOT and theirs.config.n_positions == 24
    same_logits(ours, theirs)
    again = load_model(tmp_path / "exported")
    assert again.config == dataclasses.replace(ours.config, vocab_size=50257)
    for name, p in again.state_dict().items():
        assert torch.equal(p, ours.state_dict()[name][:50257]), name


def test_the_exported_tokenizer_is_gpt2s_and_round_trips(tmp_path):
    from transformers import AutoTokenizer
    make_model(vocab_size=50304).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [(ROOT / "input.txt").read_text(encoding="utf-8")[:20_000], "  two  spaces\n\n\tand tabs ",
                 "naïve Ω 日本語 🙂 e\u0301", "1234 don't"]:
        ids = theirs(text)["input_ids"]
        assert ids == encode(text).tolist() and theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    assert theirs("a<|endoftext|>")["input_ids"] == [64, EOT]
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.convert_tokens_to_ids("<|endoftext|>") == EOT
    assert theirs.model_max_length == 24 and len(theirs) == 50257


def test_the_full_124m_goes_to_transformers_and_back():
    from transformers import GPT2LMHeadModel
    torch.manual_seed(0)
    ours = GPT(GPTConfig(vocab_size=50304))
    with tempfile.TemporaryDirectory() as folder:       # half a gigabyte, which pytest's tmp_path would keep
        ours.save_pretrained(folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
        same_logits(ours, theirs)
        del ours
        same_logits(GPT.from_pretrained(folder), theirs)


# -----------------------------------------------------------------------------
# checkpoints of this project and of its neighbours

def check_logits(path, weights, gelu):
    model, idx = load_model(path), tokens(3, 24)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(model(idx)[0], plain_gpt2(weights, 2, idx, gelu), atol=1e-4, rtol=0)
    model(idx, idx)[1].backward()


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_this_projects_checkpoint_loads_and_lives_on_when_its_file_is_overwritten(gelu, tmp_path):
    model = make_model(gelu=gelu)
    path = save(tmp_path / "checkpoint_000003.pt", own_checkpoint(model))
    check_logits(path, model.state_dict(), gelu)
    loaded = load_model(str(path))
    path.write_bytes(bytes(path.stat().st_size))
    assert loaded.config == model.config
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))


@pytest.fixture
def a_run(tmp_path):
    """A run's folder and the models of its checkpoints by step; of these the last but one was the best."""
    folder, models = tmp_path / "log", {step: make_model(seed=step) for step in (2, 10, 999_999, 1_000_000)}
    folder.mkdir()
    for step, model in models.items():          # in order of their names the newest is not the last
        save(folder / f"checkpoint_{step:06d}.pt", own_checkpoint(model))
    (folder / "metrics.csv").write_text(
        f"{HEADER}\n2,0,0,5,4.0,,,,\n3,0,0,5,1.0,,,,\n10,0,0,5,,,,,\n"
        "999999,0,0,5,3.0,,,,\n1000000,0,0,,3.5,,,,\n")
    (folder / "checkpoint_2000000.pt.tmp").touch()
    (folder / "previous_1").mkdir()
    return folder, models


def same_weights(source, model):
    assert all(map(torch.equal, load_model(source).parameters(), model.parameters()))


def test_a_runs_folder_is_its_newest_checkpoint_and_best_the_one_of_the_lowest_validation_loss(a_run,
                                                                                               monkeypatch):
    folder, models = a_run
    for source in (folder, f"{folder}/"):
        same_weights(source, models[1_000_000])
    for source in (folder / "best", f"{folder}/best/", f"{folder}/../log/best"):
        same_weights(source, models[999_999])
    monkeypatch.chdir(folder)
    same_weights(".", models[1_000_000])
    same_weights("best", models[999_999])


@pytest.mark.parametrize("kind", ["file", "folder", "run"])
def test_a_real_file_or_folder_called_best_wins(a_run, kind):
    folder, models = a_run
    if kind == "file":
        save(folder / "best", own_checkpoint(models[10]))
    elif kind == "folder":
        models[10].save_pretrained(folder / "best")
    else:
        (folder / "best").mkdir()
        save(folder / "best" / "checkpoint_000010.pt", own_checkpoint(models[10]))
    same_weights(folder / "best", models[10])


@pytest.mark.parametrize("metrics", [None, "", f"{HEADER}\n3,0,0,5,1.0,,,,\n", "step,val\n10,1\n"])
def test_without_a_best_checkpoint_one_line_says_what_to_give(a_run, metrics):
    folder, _ = a_run
    (folder / "metrics.csv").unlink() if metrics is None else (folder / "metrics.csv").write_text(metrics)
    refused(folder / "best", named=folder)
    load_model(folder)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy file"])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoint_loads_with_its_exact_gelu(bias, zipped, tmp_path):
    weights = {name: p for name, p in make_model().state_dict().items() if bias or not name.endswith(".bias")}
    path = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(weights, bias, gelu="tanh"),
                _use_new_zipfile_serialization=zipped)
    check_logits(path, weights, "none")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_compile_and_ddp_and_old_mask_buffers_are_dropped(prefix, bias, tmp_path):
    weights = {name: p for name, p in make_model().state_dict().items() if bias or not name.endswith(".bias")}
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(24, 24).tril()[None, None] for i in range(2)}
    prefixed = {prefix + name: p for name, p in {**weights, **masks}.items()}
    check_logits(save(tmp_path / "ckpt.pt", nanogpt_checkpoint(prefixed, bias)), weights, "none")


BUILD_NANOGPT = """
import sys, torch
from dataclasses import dataclass
@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
weights = torch.load(sys.argv[1])
config = GPTConfig(block_size=24, vocab_size=96, n_layer=2, n_head=2, n_embd=16)
torch.save({'model': weights, 'config': config, 'step': 5000, 'val_loss': 3.1}, sys.argv[2])
"""


def test_build_nanogpts_checkpoint_loads_though_its_config_is_a_class_of_main(tmp_path):
    weights = make_model().state_dict()
    source, path = save(tmp_path / "weights.pt", weights), tmp_path / "model_05000.pt"
    subprocess.run([sys.executable, "-c", BUILD_NANOGPT, source, path], check=True, timeout=HANG)
    check_logits(path, weights, "tanh")


@pytest.mark.parametrize("version, dtype", [(3, torch.float32), (5, torch.bfloat16)])
def test_llm_cs_model_has_the_logits_of_the_same_weights_as_a_state_dict(version, dtype, tmp_path):
    """To the last bit, and without the padding of its vocabulary, which llm.c's softmax leaves out."""
    source = make_model()
    path = llm_c_file(tmp_path / "gpt2_124M.bin", source, version, padding=32, pad=1e30)
    weights = {name: p.to(dtype).float() for name, p in source.state_dict().items()}
    check_logits(path, weights, "tanh")
    (same := GPT(source.config)).load_state_dict(weights)
    loaded, idx = load_model(str(path)), tokens(3, 24)
    assert loaded.config == source.config
    assert torch.equal(loaded(idx)[0], same(idx)[0]) and torch.equal(loaded(idx, idx)[1], same(idx, idx)[1])
    path.write_bytes(bytes(path.stat().st_size))        # it was read, and not mapped for good
    assert all(map(torch.equal, loaded.parameters(), same.parameters()))


def test_a_folder_named_like_a_checkpoint_is_still_a_folder(tmp_path):
    make_model().save_pretrained(tmp_path / "model.pt")
    assert load_model(tmp_path / "model.pt").config.n_embd == 16


# -----------------------------------------------------------------------------
# the export, as a real command

@pytest.mark.parametrize("kind", ["this project", "nanoGPT without biases", "build-nanogpt, DDP", "llm.c"])
def test_export_gives_transformers_the_logits_and_the_tokens_of_every_kind_of_checkpoint(kind, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel
    source, model = write_peer(kind, tmp_path)
    folder = tmp_path / "new" / "exported"
    result = script("model.py", "export", source, folder)
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert result.stdout.startswith(f"{folder} is ") and f"from_pretrained({str(folder)!r})" in result.stdout
    text = "Speak, speak — naïve citizens!  Résolus à mourir?"
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == encode(text).tolist() and len(ids) <= 24
    idx = torch.tensor([ids])
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(folder)(idx).logits                    # in evaluation mode
        torch.testing.assert_close(logits, model(idx)[0][..., :VOCAB_SIZE], atol=1e-4, rtol=0)
    assert {path.name for path in folder.iterdir()} == EXPORTED - {MODELING}


def test_export_replaces_an_earlier_export_and_nothing_else(tmp_path):
    source, model = write_peer("this project", tmp_path)
    for name in ("earlier", "theirs", "more"):
        make_model(seed=7, vocab_size=50304).save_pretrained(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for folder in ("earlier", "empty"):
        main(["export", str(source), str(tmp_path / folder)])
        assert torch.equal(load_model(tmp_path / folder).transformer.wpe.weight, model.transformer.wpe.weight)
    random_transformers_model().config.save_pretrained(tmp_path / "theirs")     # of an export's names only
    (tmp_path / "more" / "thesis.tex").write_text("not a file of an export")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.safetensors").write_text("a folder without a config.json")
    (tmp_path / "file").write_text("not a folder")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("theirs", "more", "half", "file", "file/a"):
        with pytest.raises(UserError, match=name):
            main(["export", str(source), str(tmp_path / name)])
    main(["export", str(tmp_path / "empty"), str(tmp_path / "empty")])          # the same again
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_model_that_gpt2s_tokenizer_cannot_go_with_is_not_exported(tmp_path):
    characters = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(make_model().state_dict()))
    with pytest.raises(UserError, match="has a vocabulary of 96"):
        main(["export", str(characters), str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()


def test_a_mistake_in_an_export_exits_2_with_one_line(tmp_path):
    result = script("model.py", "export", tmp_path / "nowhere.pt", tmp_path / "exported")
    assert result.returncode == 2 and result.stdout == "" and not (tmp_path / "exported").exists()
    assert result.stderr.startswith("model.py: ") and "nowhere.pt" in result.stderr
    assert result.stderr.count("\n") == 1
    for arguments in (["expor", "a", "b"], ["export", "a"], ["export", "a", "b", "--c"]):
        with pytest.raises(UserError, match="model.py --help"):
            main(arguments)


# -----------------------------------------------------------------------------
# the hub

@pytest.mark.parametrize("name", ["gpt2-huge", "a/b/c", "x" * 300, "no such name", "../weights", "./gpt2"])
def test_what_cannot_be_a_models_name_is_not_looked_for_on_the_hub(name, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **how: pytest.fail("it was asked"))
    refused(name)


@pytest.mark.parametrize("name", ["gpt2", "no/such-model"])
def test_a_model_that_is_not_here_is_refused_in_one_sentence_offline(name, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(name)


class StandInHub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does: it has gpt2, the files of `folder`; others are not there, or without
    model.safetensors."""
    folder = None

    def do_HEAD(self):
        owner, _, _, _, name = self.path[1:].split("/")
        code = {"nobody": "RepoNotFound", "other": "EntryNotFound"}.get(owner)
        self.send_response(404 if code else 200)
        if code:
            self.send_header("X-Error-Code", code)
            return self.end_headers()
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{name}"')
        self.send_header("Content-Length", str((self.folder / name).stat().st_size))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write((self.folder / self.path.rpartition("/")[2]).read_bytes())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment of a process that takes this stand-in for the hub."""
    StandInHub.folder = tmp_path / "gpt2's"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandInHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        yield env | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"),
                     "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                     "PYTHONPATH": str(ROOT)}
        server.shutdown()


def test_gpt2_comes_from_the_hub_and_then_from_its_cache(hub):
    random_transformers_model().save_pretrained(StandInHub.folder)
    code = ("import torch; from model import GPT\n"
            "for p in GPT.from_pretrained('gpt2').parameters(): print(p.double().sum().item())")
    for env in (hub, hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        sums = [p.double().sum().item() for p in load_model(StandInHub.folder).parameters()]
        assert [*map(float, result.stdout.split())] == sums


@pytest.mark.parametrize("name, words", [("nobody/model", "no model with a model.safetensors on the hub"),
                                         ("other/model", "no model with a model.safetensors on the hub")])
def test_a_model_that_the_hub_does_not_have_is_told_in_one_line(name, words, hub):
    result = subprocess.run([sys.executable, ROOT / "model.py", "export", name, "hf"], env=hub, text=True,
                            capture_output=True, timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith(f"model.py: {name}") and words in result.stderr


def test_importing_model_prints_nothing_and_leaves_the_optional_libraries_alone(tmp_path):
    code = ("import model, sys; "
            "assert not {'transformers', 'datasets', 'huggingface_hub', 'safetensors'} & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


def test_the_hubs_names_without_an_owner_are_the_sizes():
    assert OPENAI_NAMES == tuple(GPT2_SIZES)
