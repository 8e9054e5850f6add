"""Writes a model in the Hugging Face format, for transformers, lm-evaluation-harness and others:

    python model.py export log/best exported
    python model.py export log/checkpoint_019073.pt exported
"""
import os
from pathlib import Path

# This import is the first of ours, because it refuses an old Python in one line.
from runtime.cli import FlagParser, UserError, run_command

from recipes import check_tokens, load_model
from runtime.files import writing
from runtime.huggingface import (
    EXPORTED,
    EXPORTED_BY,
    MODELING,
    export_files,
    read_json,
    write_export,
)


def refuse_other_files(folder: Path) -> None:
    """UserError unless `folder` is new, empty or an earlier export, which main() may replace."""
    if not os.path.lexists(folder):
        return

    # Hidden files, such as a Mac's .DS_Store, do not count.
    names = {name for name in os.listdir(folder) if not name.startswith(".")}
    if not names:
        return

    # An earlier export has no other files than those that save_pretrained writes.
    other_names = names - EXPORTED
    if other_names:
        raise UserError(f"{folder} has files that are not of an earlier export "
                        f"({min(other_names)}): choose a new or empty folder")

    # Its config.json says that it is ours.
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        config = {}
    if not EXPORTED_BY.items() <= config.items():
        raise UserError(f"{folder} has the files of another model ({min(names)}): choose a new or "
                        "empty folder")


def remove_export(folder: Path) -> None:
    for name in EXPORTED:
        (folder / name).unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    """`python model.py export SOURCE FOLDER`."""
    parser = FlagParser(prog="model.py", description=__doc__)
    parser.add_argument("command", choices=["export"],
                        help="Write a model in the Hugging Face format.")
    parser.add_argument("source", metavar="SOURCE",
                        help="A checkpoint (of this project, nanoGPT or build-nanogpt), the "
                             "folder of a run (its newest checkpoint), FOLDER/best (the "
                             "checkpoint with the lowest validation loss), a folder in the "
                             "Hugging Face format, or a name on the Hugging Face hub.")
    parser.add_argument("folder", metavar="FOLDER",
                        help="A new or empty folder, or an earlier export, which is replaced.")
    args = parser.parse_args(argv)

    # What can fail comes before the earlier export is removed. `writing` turns what the system
    # refuses into a UserError that names the folder.
    folder = Path(args.folder)
    with writing(folder):
        refuse_other_files(folder)
    model = load_model(args.source)
    check_tokens(model, args.source)
    files = export_files(model)

    # All old files go before a new one comes: a mixture of two exports could be read as one. After a
    # failure the new ones go, too: then the same command can be given again.
    with writing(folder):
        remove_export(folder)
        try:
            write_export(files, folder)
        except BaseException:
            remove_export(folder)
            raise

    arguments = repr(os.path.abspath(folder))
    if (folder / MODELING).exists():
        arguments += ", trust_remote_code=True"
    print(f"{folder} is in the Hugging Face format: read it with transformers' "
          f"AutoModelForCausalLM and AutoTokenizer by from_pretrained({arguments})")


if __name__ == "__main__":
    run_command(main)
