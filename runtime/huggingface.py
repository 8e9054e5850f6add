"""The Hugging Face format: folders and models of the hub in, `model.py export` out."""
import dataclasses
import json
import os
from pathlib import Path

from runtime.cli import UserError, brief_error, import_package, safe_repr
from runtime.files import read_text, readable, replace_file
from runtime.tokenizer import EOT, VOCAB_SIZE, checked_asset
from runtime.weights import HEAD, OPENAI_NAMES, WTE, load_pickle, model_from_checkpoint, refuse_hiding

# what a GPT-2's config.json may leave out, but not say otherwise. auto_map is code of its own: never run here
GPT2 = {"auto_map": None, "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
MODELING = "modeling_modern.py"         # in assets/: transformers' code of the recipes that it does not know
# what save_pretrained writes, MODELING only where it is needed, with EXPORTED_BY in its config.json
EXPORTED = {"config.json", "tokenizer_config.json", "vocab.json", "merges.txt", "model.safetensors", MODELING}
EXPORTED_BY = {"exported_by": "model.py of train-gpt2"}
# GPT-2's own code stores these as (in, out), nn.Linear as (out, in)
CONV1D = "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"


def from_huggingface(source, MODELS):
    """The model of a folder in the Hugging Face format or a name on the hub: a GPT-2, or what another recipe
    of `MODELS` exports. No code in it runs. UserError if it is neither."""
    if os.path.isdir(source):
        folder = Path(source)
        if not os.path.exists(folder / "config.json"):
            refuse_hiding(source)
    else:
        folder = download_model(str(source))
    with readable(source, "give another", problem="is no GPT-2 or export of ours in the Hugging Face format"):
        config = read_json(folder / "config.json")
        recipe = config.get("model_type")
        if recipe in [*MODELS] and recipe != "gpt2":            # a list: the file's may be no name
            weights, config["vocab_size"] = folder_weights(folder), config["padded_vocab_size"]
        else:
            recipe, config = "gpt2", config | gpt2_settings(config)
            weights = {name: t.t() if name.endswith(CONV1D) else t
                       for name, t in folder_weights(folder, pickles=True).items()}
        weights.pop("parts", None)              # they follow from GPT-2's tokens
        checkpoint = {"model": weights, "model_config": config, "recipe": recipe}
        return model_from_checkpoint(checkpoint, source, MODELS, "give another")


def download_model(name: str) -> Path:
    """Folder of the hub's model `name`. UserError if there is no such model or no connection."""
    repo = f"openai-community/{name}" if name in OPENAI_NAMES else name
    owner = name.partition("/")[0]
    if name[:1] in "./~":
        raise UserError(f"there is no file or folder {name}: check the path")
    if os.path.isdir(owner):
        raise UserError(f"there is no file or folder {name}: check the path (a model of this name on the hub "
                        f"is hidden by the folder {os.path.abspath(owner)})")
    hf_hub_download = import_package("huggingface_hub").hf_hub_download
    for cached in (True, False):        # what is on this machine needs no connection
        try:
            hf_hub_download(repo, "model.safetensors", local_files_only=cached)
            return Path(hf_hub_download(repo, "config.json", local_files_only=cached)).parent
        except Exception as error:                # network errors come in the classes of many libraries
            why = brief_error(error)[:100]
    raise UserError(f"{name} is no file or folder here, and cannot be fetched from the Hugging Face hub "
                    f"({why}): check the name and the connection, or give the path of a checkpoint")


def read_json(path):
    settings = json.loads(read_text(path, errors="strict"))
    if not isinstance(settings, dict):
        raise ValueError(f"its {path.name} holds no settings")
    return settings


def gpt2_settings(config):
    """What GPTConfig calls otherwise than a GPT-2's config.json. ValueError for another model's."""
    for key, value in {"model_type": "gpt2", **GPT2}.items():
        if (found := config.get(key, GPT2.get(key))) != value:
            raise ValueError(f"its config.json says {key} = {safe_repr(found)} instead of {value}")
    gelu = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}.get(
        config.get("activation_function", "gelu_new"))
    if gelu is None or config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError("its config.json asks for another activation or n_inner than GPT-2's")
    return {"block_size": config.get("n_positions", 1024), "gelu": gelu}


def folder_weights(folder, pickles=False):
    """The tensors of a folder: of safetensors, one file or several, else of pytorch_model.bin."""
    load_file = import_package("safetensors.torch").load_file
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / names[0]).is_file():
        if index.is_file():
            names = sorted(set(read_json(index)["weight_map"].values()))
        elif pickles and (folder / "pytorch_model.bin").is_file():
            return load_pickle(folder / "pytorch_model.bin")
        else:
            raise ValueError("it has no model.safetensors")
    if any(Path(name).name != name for name in names):
        raise ValueError("its index names a file outside the folder")
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def export_gpt2(model):
    """(config.json, tensors) of GPT2LMHeadModel: CONV1D transposed, the vocabulary's padding cut off."""
    c = model.config
    vocab_size = min(c.vocab_size, VOCAB_SIZE)
    weights = {name: p.t() if name.endswith(CONV1D) else p for name, p in model.state_dict().items()}
    weights[WTE] = weights.pop(HEAD)[:vocab_size]                               # they are tied
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size,
            "n_positions": c.block_size, "n_ctx": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer,
            "n_head": c.n_head, "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02}, weights


def export_modern(model):
    """The same for MODELING, with the padding: the rows of the bigram table are counted modulo its size."""
    weights, name = model.state_dict(), model.recipe.capitalize()
    config = {"architectures": [f"{name}ForCausalLM"], "model_type": model.recipe,
              "auto_map": {"AutoConfig": f"{MODELING[:-3]}.{name}Config",
                           "AutoModelForCausalLM": f"{MODELING[:-3]}.{name}ForCausalLM"},
              **dataclasses.asdict(model.config), "vocab_size": min(model.config.vocab_size, VOCAB_SIZE),
              "padded_vocab_size": model.config.vocab_size, "tie_word_embeddings": False}
    if hasattr(model, "parts"):
        del weights[HEAD]                                                   # tied to wte
        weights["parts"] = model.parts
        config["n_part"] = model.transformer.part.num_embeddings
    return config, weights


def save_model(model, folder: str | Path) -> None:
    """LanguageModel.save_pretrained. Weights are stored as fp32."""
    save = import_package("safetensors.torch").save
    config, weights = (export_gpt2 if model.recipe == "gpt2" else export_modern)(model)
    eot = "<|endoftext|>"
    settings = {
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "model_max_length": model.config.block_size,
            "add_prefix_space": False, "bos_token": eot, "eos_token": eot, "unk_token": eot},
        "config.json": config | {"bos_token_id": EOT, "eos_token_id": EOT, "dtype": "float32", **EXPORTED_BY}}
    encoder, merges = checked_asset("encoder.json"), checked_asset("vocab.bpe")
    weights = {name: (t.float() if t.is_floating_point() else t).detach().cpu().contiguous()
               for name, t in weights.items()}
    files = {"vocab.json": encoder.read_bytes(), "merges.txt": merges.read_bytes(),
             "model.safetensors": save(weights, {"format": "pt"})}
    if "auto_map" in config:
        files[MODELING] = encoder.with_name(MODELING).read_bytes()
    files |= {name: json.dumps(values, indent=2).encode() for name, values in settings.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():            # config.json last: without it, the folder is no model
        replace_file(Path(folder) / name, lambda file, data=data: file.write(data))
