"""Writes a model in the Hugging Face format, for transformers, lm-evaluation-harness and others.

    python model.py export log/best exported
    python model.py export log/checkpoint_019073.pt exported
"""
import os
from pathlib import Path

# First, because it refuses an old Python in one line.
from runtime.cli import FlagParser, UserError, run_command

from recipes import check_tokens, load_model
from runtime.files import writable
from runtime.huggingface import EXPORTED, EXPORTED_BY, MODELING, read_json


def refuse_other_files(folder: Path) -> None:
    """UserError unless a folder is new, empty or an earlier export, which main() may replace.

    An earlier export has no files but those that we write, and a config.json that says it is ours.
    Hidden files, such as a Mac's .DS_Store, do not count.
    """
    if not os.path.lexists(folder):
        return
    names = {name for name in os.listdir(folder) if not name.startswith(".")}
    if not names:
        return

    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        config = {}
    others = names - EXPORTED
    ours = EXPORTED_BY.items() <= config.items()
    if others or not ours:
        name = min(others or names)
        raise UserError(f"{folder} holds other files than an earlier export ({name}): give a new "
                        "or empty folder")


def main(argv: list[str] | None = None) -> None:
    """`python model.py export SOURCE FOLDER`."""
    parser = FlagParser(prog="model.py", description=__doc__)
    parser.add_argument("command", choices=["export"],
                        help="write a model in the Hugging Face format")
    parser.add_argument("source", metavar="SOURCE",
                        help="A checkpoint (also nanoGPT's or build-nanogpt's), a run's "
                             "folder or FOLDER/best, a Hugging Face folder, or a hub name.")
    parser.add_argument("folder", metavar="FOLDER",
                        help="A new or empty folder. An earlier export there is replaced.")
    args = parser.parse_args(argv)

    # All that can fail does so before the earlier export is removed.
    folder = Path(args.folder)
    with writable(folder):
        refuse_other_files(folder)
    model = load_model(args.source)
    check_tokens(model, args.source)

    with writable(folder):
        # First the old files go, so that no mixture of two exports can be read as one.
        for name in EXPORTED:
            (folder / name).unlink(missing_ok=True)
        model.save_pretrained(folder)

    arguments = repr(os.path.abspath(folder))
    if (folder / MODELING).exists():
        arguments += ", trust_remote_code=True"
    print(f"{folder} is in the Hugging Face format: transformers' AutoModelForCausalLM and "
          f"AutoTokenizer read it with from_pretrained({arguments})")


if __name__ == "__main__":
    run_command(main)
