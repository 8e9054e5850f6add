"""The Hugging Face format: folders and models of the hub in, `model.py export` out."""
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.cli import FlagParser, UserError, safe_repr
from runtime.files import file_sha256, read_text, readable, replace_file, writable
from runtime.hub import download_model
from runtime.integrity import SUMS, check_sums, read_sums, write_sums
from runtime.progress import Progress
from runtime.tokenizer import EOT, VOCAB_SIZE, checked_asset
from runtime.weights import build_model, canonical, check_tokens, load_pickle

# what a GPT-2's config.json may leave out, but not say otherwise. auto_map is code of its own: never run here
GPT2 = {"auto_map": None, "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
MODELING = "modeling_modern.py"         # in assets/: transformers' code of the recipes that it does not know
# what save_pretrained writes, MODELING only where it is needed
EXPORTED = {"config.json", "tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt",
            "model.safetensors", MODELING}
# GPT-2's own code stores these as (in, out), nn.Linear as (out, in)
CONV1D = "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"


def from_huggingface(source, MODELS):
    """The model of a folder in the Hugging Face format or a name on the hub: a GPT-2, or what another recipe
    of `MODELS` exports. No code in it runs. UserError if it is neither."""
    folder = Path(source)
    if not os.path.isdir(folder):       # Path.is_dir raises OSError for some names
        folder = download_model(str(source))
    with readable(source, "give another model",
                  problem="is not a GPT-2 or an export of ours in the Hugging Face format"):
        check_sums(folder)
        if not (folder / "config.json").exists():
            raise ValueError("it has no config.json")
        config = json.loads(read_text(folder / "config.json", errors="strict"))
        if not isinstance(config, dict):
            raise ValueError("its config.json holds no settings")
        recipe = config.get("model_type")
        if recipe != "gpt2" and isinstance(recipe, str) and recipe in MODELS:
            return _modern_model(MODELS[recipe], config, folder)
        return _gpt2_model(MODELS["gpt2"], config, folder)


def _gpt2_model(GPT, config, folder):
    for key, value in {"model_type": "gpt2", **GPT2}.items():
        if (found := config.get(key, GPT2.get(key))) != value:
            raise ValueError(f"its config.json says {key} = {safe_repr(found)} instead of {value}")
    gelu = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}.get(
        config.get("activation_function", "gelu_new"))
    if gelu is None or config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError("its config.json asks for another activation or n_inner than GPT-2's")
    weights = canonical(_folder_weights(folder))
    weights = {name: t.t() if name.endswith(CONV1D) else t for name, t in weights.items()}
    shape = {name: config[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    return build_model(GPT, GPT.Config(config.get("n_positions", 1024), **shape, gelu=gelu), weights)


def _modern_model(cls, config, folder):
    config = config | {"vocab_size": config["padded_vocab_size"]}
    weights, none = _folder_weights(folder, pickles=False), torch.tensor([])
    stems = weights.pop("stems", none)
    model = build_model(cls, cls.Config(**{f.name: config[f.name] for f in dataclasses.fields(cls.Config)}),
                        weights)
    if not torch.equal(stems, getattr(model, "stems", none)):
        raise ValueError("its stems are not those of GPT-2's tokens")
    return model


def _folder_weights(folder, pickles=True):
    """The tensors of a folder: from safetensors, in one file or several, else from pytorch_model.bin."""
    from safetensors.torch import load_file
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    if index.is_file():
        weights = {}
        for name in sorted(set(json.loads(read_text(index, errors="strict"))["weight_map"].values())):
            if Path(name).name != name:
                raise ValueError(f"its index names a file outside the folder ({str(name)[:80]})")
            weights |= load_file(folder / name)
        return weights
    if pickles and (folder / "pytorch_model.bin").is_file():
        return load_pickle(folder / "pytorch_model.bin")
    raise ValueError("it has neither model.safetensors nor pytorch_model.bin" if pickles else
                     "it has no model.safetensors")


def save_gpt2(model, folder: str | Path) -> None:
    """GPT.save_pretrained: writes `model` into `folder` in the Hugging Face format, as fp32."""
    c = model.config
    vocab_size = min(c.vocab_size, VOCAB_SIZE)
    weights = {}
    for name, p in model.state_dict().items():
        if name != "lm_head.weight":                                        # tied to wte
            weights[name] = p[:vocab_size] if name.endswith("wte.weight") else p.t() if name.endswith(
                CONV1D) else p
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size,
              "n_positions": c.block_size, "n_ctx": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer,
              "n_head": c.n_head, "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
              "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
              "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02}
    _write(folder, config, c.block_size, weights, EXPORTED - {MODELING})


def save_modern(model, folder: str | Path) -> None:
    """ModernLanguageModel.save_pretrained: as save_gpt2, with MODELING and the padding of the vocabulary,
    because the rows of the bigram table are counted modulo its size. MODELING has no logits of it."""
    weights, name = model.state_dict(), model.recipe.capitalize()
    config = {"architectures": [f"{name}ForCausalLM"], "model_type": model.recipe,
              "auto_map": {"AutoConfig": f"{MODELING[:-3]}.{name}Config",
                           "AutoModelForCausalLM": f"{MODELING[:-3]}.{name}ForCausalLM"},
              **dataclasses.asdict(model.config), "vocab_size": min(model.config.vocab_size, VOCAB_SIZE),
              "padded_vocab_size": model.config.vocab_size, "tie_word_embeddings": False}
    if hasattr(model, "stems"):
        del weights["lm_head.weight"]                                       # tied to wte
        weights["stems"] = model.stems
        config["n_stem"] = model.transformer.stem.num_embeddings
    _write(folder, config, model.config.block_size, weights, EXPORTED)


def _write(folder, config, block_size, weights, names):
    from safetensors.torch import save
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config |= {"bos_token_id": EOT, "eos_token_id": EOT, "dtype": "float32"}
    eot = "<|endoftext|>"
    tokens = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size, "add_prefix_space": False,
              "bos_token": eot, "eos_token": eot, "unk_token": eot}
    encoder, merges = checked_asset("encoder.json"), checked_asset("vocab.bpe")
    bpe = {"type": "BPE", "vocab": json.loads(encoder.read_text(encoding="utf-8")),
           "merges": merges.read_text(encoding="utf-8").splitlines()[1:]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "model": bpe, "pre_tokenizer": byte_level, "decoder": byte_level,
                 "added_tokens": [{"id": EOT, "content": eot, "special": True, "normalized": False,
                                   "single_word": False, "lstrip": False, "rstrip": False}]}
    for name, content in (("config.json", config), ("tokenizer_config.json", tokens),
                          ("tokenizer.json", tokenizer)):
        data = json.dumps(content, indent=2).encode()
        replace_file(folder / name, lambda file, data=data: file.write(data))
    shutil.copyfile(encoder, folder / "vocab.json")
    shutil.copyfile(merges, folder / "merges.txt")
    if MODELING in names:
        shutil.copyfile(encoder.with_name(MODELING), folder / MODELING)
    weights = {name: t.detach().to(torch.float32 if t.is_floating_point() else t.dtype).cpu().contiguous()
               for name, t in weights.items()}
    data = save(weights, metadata={"format": "pt"})
    replace_file(folder / "model.safetensors", lambda file: file.write(data))
    write_sums(folder, names)


def not_exported(folder: Path) -> set[str]:
    """Names of what `export` did not write in a folder, or what was changed since: never replaced."""
    sums = read_sums(folder)
    ours = {name for name in EXPORTED & sums.keys() if (folder / name).is_file()
            and file_sha256(folder / name) == sums[name]}
    exported = sums.keys() <= EXPORTED <= sums.keys() | {MODELING, "tokenizer.json"}     # not in older ones
    return set(os.listdir(folder)) - ours - ({SUMS} if exported else set())


def export(load_model: Callable, description: str, argv: list[str] | None = None) -> None:
    """`python model.py export SOURCE FOLDER`. Replaces an earlier export, and no other files."""
    parser = FlagParser(prog="model.py", description=description)
    parser.add_argument("command", choices=["export"], help="write a model in the Hugging Face format")
    parser.add_argument("source", metavar="SOURCE",
                        help="checkpoint (also nanoGPT's, build-nanogpt's or llm.c's), a run's folder or "
                             "FOLDER/best, Hugging Face folder or hub name")
    parser.add_argument("folder", metavar="FOLDER",
                        help="new, empty, or of an earlier export, which is replaced")
    args = parser.parse_args(argv)
    if all(map(os.path.exists, (args.source, args.folder))) and os.path.samefile(args.source, args.folder):
        raise UserError(f"{args.folder} is the source itself: give another folder")
    with writable(args.folder):
        if os.path.exists(args.folder) and (other := not_exported(Path(args.folder))):
            raise UserError(f"{args.folder} holds other files than an earlier export ({min(other)}): give a "
                            f"new or empty folder")
    with Progress()(f"exporting {args.source}"):
        model = load_model(args.source)
        check_tokens(model, args.source)
        with writable(args.folder):
            model.save_pretrained(args.folder)
            if not (code := MODELING in read_sums(Path(args.folder))):
                (Path(args.folder) / MODELING).unlink(missing_ok=True)      # of the earlier export
    print(f"{args.folder} is in the Hugging Face format: transformers' AutoModelForCausalLM and "
          f"AutoTokenizer read it with from_pretrained({os.path.abspath(args.folder)!r}"
          f"{', trust_remote_code=True' * code})")
