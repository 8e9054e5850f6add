"""The Hugging Face format: reads folders and models of the hub, writes folders for transformers."""
import copy
import dataclasses
import difflib
import importlib.util
import json
import math
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.cli import UserError, brief_error, print_error, unexpected
from runtime.files import is_there, reading, replace_file
from runtime.tokenizer import ASSETS, EOT, VOCAB_SIZE, bpe_file, token_bytes
from runtime.weights import EMBEDDING, HEAD, build_model, gpt2_in_our_names, transpose

# The files that have a tokenizer's tokens. Older models have both, newer ones the second alone.
TOKENIZERS = ("vocab.json", "tokenizer.json")

# The models on the hub whose owner, openai-community, can be left out.
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# Settings of a GPT-2's config.json that have one value here: a file may leave them out, but may not
# have another. (auto_map would name code in the folder, which never runs here.)
FIXED_SETTINGS = {
    "auto_map": None,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}

# Names of the two kinds of GELU in config.json, and what GPTConfig.gelu calls them.
ACTIVATIONS = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu": "none",
}

# How far a model's logits may be from those of its export, in standard deviations of the logits.
# Rounding makes 3e-6 at most, and the exact GELU in place of tanh's makes 1e-4.
DIFFERENCE = 5e-5

# The files that save_model writes. The last one is our code of speedrun and frontier for
# transformers, which has none. Only their folders have it.
MODELING = "modeling_modern.py"
EXPORTED = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    MODELING,
}


# ---------------------------------------------------------------------- reading

def from_huggingface(source: str | Path, models: dict):
    """The model of a folder in the Hugging Face format, or of a name on the hub.

    It may be a GPT-2, or an export of another recipe in `models`, which is {recipe: class}.
    UserError if it is neither.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = download_model(str(source))

    # `reading` turns any error in here into a UserError that names the source.
    problem = "is neither a GPT-2 nor an export of this project in the Hugging Face format"
    remedy = ("choose another model (docs/formats.md), or bring back the model's code, if you have "
              "changed it since")
    with reading(source, remedy, problem=problem):
        config = read_json(folder / "config.json")
        recipe = config.get("model_type")
        if recipe in models and recipe != "gpt2":
            config["vocab_size"] = config["padded_vocab_size"]
            weights = read_weights(folder)
        else:
            recipe = "gpt2"
            config |= gpt2_settings(config)
            # Fewer tokens than GPT-2 has are known to be others wherever they are used.
            if config.get("vocab_size", VOCAB_SIZE) >= VOCAB_SIZE:
                check_tokenizer(source, folder)
            weights = gpt2_in_our_names(read_weights(folder))
        return build_model(models[recipe], config, weights)


def download_model(name: str) -> Path:
    """The folder with the hub's model `name`. UserError if it cannot be fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RemoteEntryNotFoundError

    repo = name
    if name in OPENAI_NAMES:
        repo = f"openai-community/{name}"

    check_hub_name(name)

    # First without a connection, from the hub's cache on this machine.
    for cached in (True, False):
        try:
            hf_hub_download(repo, "model.safetensors", local_files_only=cached)
            config = hf_hub_download(repo, "config.json", local_files_only=cached)
            if name not in OPENAI_NAMES:                        # for check_tokenizer
                for optional in TOKENIZERS:
                    with suppress(EntryNotFoundError):
                        hf_hub_download(repo, optional, local_files_only=cached)
                        break
            return Path(config).parent
        except RemoteEntryNotFoundError:
            raise UserError(f"{name} on the Hugging Face hub has no model.safetensors or no "
                            "config.json: read it with transformers' from_pretrained, and write "
                            "it into a folder with save_pretrained") from None
        except Exception as error:      # of the network's errors each library has its own classes
            why = brief_error(error)[:100]

    raise UserError(f"{name} is neither a file nor a folder, and cannot be fetched from the "
                    f"Hugging Face hub ({why}): check the name and the connection, or use the path "
                    "of a checkpoint")


def check_hub_name(name: str) -> None:
    """UserError for a path that is not there. On the hub a name is OWNER/NAME."""
    folder = Path(name).parent
    if "/" in name and folder.is_dir():
        names = os.listdir(folder)
        if "metrics.csv" in names:
            names.append("best")                # of a run, and no file
        near = difflib.get_close_matches(Path(name).name, names)
        if near:
            raise UserError(f"{name} is not there, but {folder} has {' and '.join(near)}: check "
                            "the path")
        if "metrics.csv" in names:
            raise UserError(f"{name} is not there, and {folder} is the folder of a run: check the "
                            "path")

    if name.count("/") > 1:
        raise UserError(f"{name} is neither a file nor a folder: check the path")


def check_tokenizer(source: str | Path, folder: Path) -> None:
    """UserError if the folder has a tokenizer, and its tokens are not GPT-2's."""
    vocabulary, tokenizer = (folder / name for name in TOKENIZERS)
    if vocabulary.is_file():
        tokens = read_json(vocabulary)
    elif tokenizer.is_file():
        tokens = read_json(tokenizer).get("model", {}).get("vocab")
    else:
        return

    # It may have more: many add one for padding. Some have <|endoftext|> in another file.
    ours = json.loads(bpe_file("encoder.json"))
    del ours["<|endoftext|>"]
    if not isinstance(tokens, dict) or not ours.items() <= tokens.items():
        raise UserError(f"{source} has a tokenizer of its own, and all scripts here use GPT-2's: "
                        "choose a model with GPT-2's tokens (docs/finetuning.md)")


def read_json(path: Path) -> dict:
    """The object in a JSON file. ValueError or OSError if there is none."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise unexpected(f"its {path.name}", "a JSON object", settings)
    return settings


def gpt2_settings(config: dict) -> dict:
    """GPTConfig's fields that a GPT-2's config.json names otherwise: {name: value}.

    ValueError if the file is another model's, or a GPT-2's that model.GPT cannot compute.
    """
    required = {"model_type": "gpt2"} | FIXED_SETTINGS
    for key, expected in required.items():
        found = config.get(key, FIXED_SETTINGS.get(key))
        if key == "layer_norm_epsilon" and math.isclose(found, expected, rel_tol=1e-6):
            continue                    # a folder that went through GGUF has it in float32
        if found != expected:
            raise unexpected(f"its config.json's {key}", expected, found)

    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        known = " or ".join(ACTIVATIONS)
        raise unexpected("its config.json's activation_function", known, activation)

    n_inner = config.get("n_inner")
    expected = 4 * config["n_embd"]
    if n_inner not in (None, expected):
        raise unexpected("its config.json's n_inner", expected, n_inner)

    return {
        "block_size": config.get("n_positions", 1024),
        "gelu": ACTIVATIONS[activation],
    }


def read_weights(folder: Path) -> dict:
    """The tensors of model.safetensors, or of several files, which an index names: {name: it}."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
    elif list(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} has its weights in pytorch_model.bin (expected "
                        "model.safetensors): read the folder with transformers' from_pretrained, "
                        "and write another one with save_pretrained, which makes safetensors")
    else:
        raise ValueError("it has no model.safetensors")

    weights = {}
    for name in names:
        if not is_there(folder / name):
            raise UserError(f"{folder / name} is missing, which {index.name} names: fetch it")
        weights |= load_file(folder / name)
    return weights


# ---------------------------------------------------------------------- writing

def export_gpt2(model) -> tuple[dict, dict]:
    """What transformers' GPT2LMHeadModel reads: (config.json, {name: tensor})."""
    c = model.config

    # Without the rows that pad the vocabulary. The head is tied to the embedding, and not stored.
    vocab_size = min(c.vocab_size, VOCAB_SIZE)
    weights = transpose(model.state_dict())
    del weights[HEAD]
    weights[EMBEDDING] = weights[EMBEDDING][:vocab_size]

    # The names in OpenAI's own file on the hub have no prefix, and mlx-lm knows these only.
    weights = {name.removeprefix("transformer."): p for name, p in weights.items()}

    activation = "gelu"
    if c.gelu == "tanh":
        activation = "gelu_new"
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": c.block_size,
        "n_ctx": c.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": activation,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
    }
    return config, weights


def export_modern(model) -> tuple[dict, dict]:
    """What a class in assets/modeling_modern.py reads: (config.json, {name: tensor})."""
    module = MODELING.removesuffix(".py")
    name = model.recipe.capitalize()

    # The rows that pad the vocabulary stay: frontier's probabilities are over all of them.
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model.recipe,
        "auto_map": {
            "AutoConfig": f"{module}.{name}Config",
            "AutoModelForCausalLM": f"{module}.{name}ForCausalLM",
        },
        **dataclasses.asdict(model.config),
        "vocab_size": min(model.config.vocab_size, VOCAB_SIZE),
        "padded_vocab_size": model.config.vocab_size,
        "tie_word_embeddings": False,
    }

    # With the buffers that a checkpoint leaves out: an export has no tokenizer to compute them.
    weights = model.state_dict() | dict(model.named_buffers())
    if model.lm_head.weight is model.transformer.wte.weight:
        del weights[HEAD]
    if "part" in model.transformer:
        config["n_part"] = model.transformer["part"].num_embeddings
    return config, weights


# ---------------------------------------------------------------------- is it the same model?
# Who rewrites GPT-2's MLP trains and samples it at once. But an export says "GPT-2", or has the
# code of MODELING, and those who read it would compute that.

@torch.no_grad()
def check_formula(model, config: dict, weights: dict) -> None:
    """UserError unless the model's logits are those that config.json and the weights mean."""
    meant = f"those of {ASSETS / MODELING}"
    remedy = "change that file, too"
    if model.recipe == "gpt2":
        meant = "GPT-2's"
        remedy = "give it a recipe with a class of its own (CONTRIBUTING.md)"

    # The folder has float32. In bfloat16 rounding would hide a small change.
    if model.lm_head.weight.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    weights = {name: p.float() if p.is_floating_point() else p for name, p in weights.items()}

    # Two documents, as long as the model takes: attention may see a window or a document only.
    V, T = config["vocab_size"], model.config.block_size
    idx = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(0))
    idx[:, T // 2] = min(EOT, V - 1)
    idx = idx.to(model.lm_head.weight.device)

    found = model(idx)[0][..., :V]                                              # (1, T, V)
    try:
        expected = logits_in_transformers(config, weights, idx)
    except ModuleNotFoundError as error:
        print_error(f"the model is exported without a check of its code, because {error.name} is "
                    f"not installed: pip install {error.name}")
        return
    except (AttributeError, RuntimeError):
        raise UserError(f"the model's weights are not {meant}, but have other names or shapes: "
                        f"{remedy}") from None

    difference = F.mse_loss(found, expected).sqrt()
    if not difference <= DIFFERENCE * expected.std():
        raise UserError(f"the model's logits are not {meant}, but differ by {difference:.1e}: "
                        f"{remedy}")


def logits_in_transformers(config: dict, weights: dict, idx: Tensor) -> Tensor:
    """What transformers computes from what is exported: the logits of idx (B, T)."""
    import transformers

    module = transformers
    if "auto_map" in config:
        spec = importlib.util.spec_from_file_location("modeling_modern", ASSETS / MODELING)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

    cls = getattr(module, config["architectures"][0])
    model = cls(cls.config_class(**config))
    part = model
    if config["model_type"] == "gpt2":          # its file has the names of the model in the model
        part = model.transformer
    part.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.eval()(idx).logits


def save_model(model, folder: str | Path) -> None:
    """LanguageModel.save_pretrained: writes the EXPORTED files, weights as float32."""
    files = export_files(model)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(folder / name, lambda file, content=content: file.write(content))


def export_files(model) -> dict[str, bytes]:
    """{name: content} of the EXPORTED files, in the order in which they are to be written."""
    if VOCAB_SIZE != len(token_bytes()) + 1:
        raise UserError(f"runtime/tokenizer.py has {VOCAB_SIZE} tokens, and an export is written "
                        "with GPT-2's tokenizer: write yours in runtime/huggingface.py")
    if model.recipe == "gpt2":
        config, weights = export_gpt2(model)
    else:
        config, weights = export_modern(model)
    check_formula(model, config, weights)

    # The tokens of a vocabulary of another size were made by another tokenizer.
    files = {}
    if config["vocab_size"] == len(json.loads(bpe_file("encoder.json"))):
        config |= {"bos_token_id": EOT, "eos_token_id": EOT}
        files = tokenizer_files(model.config.block_size)
    else:
        config |= {"bos_token_id": None, "eos_token_id": None}      # transformers' are GPT-2's
        print_error(f"a vocabulary of {config['vocab_size']} tokens is not GPT-2's: the model is "
                    "exported without a tokenizer")
    config["dtype"] = "float32"
    files["model.safetensors"] = safetensors_of(weights)
    if "auto_map" in config:
        files[MODELING] = (ASSETS / MODELING).read_bytes()

    # config.json is written last: without it, after a crash, the folder is no model.
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def tokenizer_files(block_size: int) -> dict[str, bytes]:
    """{name: content} of the files that are GPT-2's tokenizer."""
    eot = "<|endoftext|>"
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": block_size,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,      # transformers.js takes a missing one for true
        "bos_token": eot,
        "eos_token": eot,
        "unk_token": eot,
    }

    return {
        "vocab.json": bpe_file("encoder.json"),
        "merges.txt": bpe_file("vocab.bpe"),
        "tokenizer.json": json.dumps(tokenizer_json(), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2).encode(),
    }


def tokenizer_json() -> dict:
    """What Hugging Face's tokenizer.json says of GPT-2's tokenizer, as in the hub's gpt2."""
    merges = bpe_file("vocab.bpe").decode().splitlines()
    end_of_text = {
        "id": EOT,
        "content": "<|endoftext|>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }

    # It writes each byte as one character, and has the pattern that cuts a text into pieces.
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": json.loads(bpe_file("encoder.json")),
        "merges": merges[1:],           # the first line names the file's version
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end_of_text],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def safetensors_of(weights: dict) -> bytes:
    """The content of a .safetensors file, with floats as float32."""
    from safetensors.torch import save

    stored = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            tensor = tensor.float()
        stored[name] = tensor.detach().cpu().contiguous()
    return save(stored, {"format": "pt"})
