"""The Hugging Face format: folders and models of the hub in, `model.py export` out."""
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

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
# what save_pretrained writes
EXPORTED = {"config.json", "tokenizer_config.json", "vocab.json", "merges.txt", "model.safetensors"}
# GPT-2's own code stores these as (in, out), nn.Linear as (out, in)
CONV1D = "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"


def from_huggingface(source, GPT, GPTConfig):
    """A GPT from a folder in the Hugging Face format or a name on the hub. UserError if it is not a GPT-2."""
    folder = Path(source)
    if not os.path.isdir(folder):       # Path.is_dir raises OSError for some names
        folder = download_model(str(source))
    with readable(source, "give another model", problem="is not a GPT-2 in the Hugging Face format"):
        check_sums(folder)
        if not (folder / "config.json").exists():
            raise ValueError("it has no config.json")
        config = json.loads(read_text(folder / "config.json", errors="strict"))
        if not isinstance(config, dict):
            raise ValueError("its config.json holds no settings")
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
        return build_model(GPT, GPTConfig(config.get("n_positions", 1024), **shape, gelu=gelu), weights)


def _folder_weights(folder):
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
    if (folder / "pytorch_model.bin").is_file():
        return load_pickle(folder / "pytorch_model.bin")
    raise ValueError("it has neither model.safetensors nor pytorch_model.bin")


def save_huggingface(model, folder: str | Path) -> None:
    """GPT.save_pretrained: writes `model` into `folder` in the Hugging Face format, as fp32."""
    from safetensors.torch import save
    folder, c = Path(folder), model.config
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = min(c.vocab_size, VOCAB_SIZE)
    weights = {}
    for name, p in model.state_dict().items():
        if name != "lm_head.weight":                                        # tied to wte
            p = p[:vocab_size] if name.endswith("wte.weight") else p.t() if name.endswith(CONV1D) else p
            weights[name] = p.detach().float().cpu().contiguous()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size,
              "n_positions": c.block_size, "n_ctx": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer,
              "n_head": c.n_head, "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
              "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
              "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02,
              "bos_token_id": EOT, "eos_token_id": EOT, "dtype": "float32"}
    eot = "<|endoftext|>"
    tokens = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": c.block_size, "add_prefix_space": False,
              "bos_token": eot, "eos_token": eot, "unk_token": eot}
    for name, content in (("config.json", config), ("tokenizer_config.json", tokens)):
        data = json.dumps(content, indent=2).encode()
        replace_file(folder / name, lambda file, data=data: file.write(data))
    shutil.copyfile(checked_asset("encoder.json"), folder / "vocab.json")
    shutil.copyfile(checked_asset("vocab.bpe"), folder / "merges.txt")
    data = save(weights, metadata={"format": "pt"})
    replace_file(folder / "model.safetensors", lambda file: file.write(data))
    write_sums(folder, EXPORTED)


def not_exported(folder: Path) -> set[str]:
    """Names of what `export` did not write in a folder, or what was changed since: never replaced."""
    sums = read_sums(folder)
    ours = {name for name in EXPORTED & sums.keys() if (folder / name).is_file()
            and file_sha256(folder / name) == sums[name]}
    return set(os.listdir(folder)) - ours - ({SUMS} if sums.keys() == EXPORTED else set())


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
    print(f"{args.folder} is in the Hugging Face format: transformers' AutoModelForCausalLM and "
          f"AutoTokenizer read it with from_pretrained({os.path.abspath(args.folder)!r})")
