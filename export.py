"""Writes a model in the Hugging Face format, for transformers, lm-evaluation-harness and others:

    python export.py log/best exported
    python export.py log/checkpoint_019073.pt exported
"""
from importlib.util import find_spec
from pathlib import Path

from recipes import load_model
from runtime.cli import MODEL_HELP, FlagParser, UserError, run_command, user_path
from runtime.huggingface import EXPORTED, MODELING


def main(argv: list[str] | None = None) -> None:
    parser = FlagParser(prog="export.py", description=__doc__)
    parser.add_argument("source", type=user_path, metavar="SOURCE", help=f"{MODEL_HELP}.")
    parser.add_argument("folder", type=user_path, metavar="FOLDER", help="A new or empty folder.")
    args = parser.parse_args(argv)

    # The files of two models in one folder could be read as those of one.
    folder = Path(args.folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new or empty folder")

    model = load_model(args.source, refuse_other_code=True)
    if find_spec("transformers"):
        print(f"{args.source} is read; comparing its logits with those of transformers: if they "
              "differ, nothing is written ...", flush=True)
    try:
        model.save_pretrained(folder)
    except BaseException:
        # Also after Ctrl-C the folder is empty again, so that the same command can be repeated.
        for name in EXPORTED:
            (folder / name).unlink(missing_ok=True)
        raise

    arguments = repr(str(folder.absolute()))
    if (folder / MODELING).exists():
        arguments += ", trust_remote_code=True"
    classes = "AutoModelForCausalLM"
    if (folder / "tokenizer.json").exists():
        classes += " and AutoTokenizer"
    print(f"{folder} is in the Hugging Face format: read it with transformers' {classes} by "
          f"from_pretrained({arguments})")


if __name__ == "__main__":
    run_command(main)
