"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings has the lowest loss?

    python hellaswag.py --model gpt2                    the 10,042 validation examples, from the hub
    python hellaswag.py --model log/checkpoint_019073.pt --data my_examples.jsonl --limit 200

Completion style: the loss of an ending's tokens given the context, summed (acc) or averaged
(acc_norm). GPT-2 124M: acc 0.2859, acc_norm 0.2955 in build-nanogpt; 0.2892 and 0.3114 in the
Eleuther harness.
"""
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from runtime.cli import (
    MODEL_HELP,
    FlagParser,
    UserError,
    brief_error,
    check_range,
    run_command,
    user_path,
)
from runtime.files import read_text, reading
from runtime.tokenizer import encode

HUB_NAME = "Rowan/hellaswag"


# ----------------------------------------------------------------------------- examples

def load_examples(path: str | Path | None = None) -> list[dict]:
    """The examples of the .jsonl file `path`, or without one the hub's validation split.

    Each is a dict with `ctx`, `endings` (4 strings) and `label` (0-3). UserError if they cannot be
    read.
    """
    if not path:
        return load_examples_of_the_hub()
    with reading(f"HellaSwag's data {path}", "choose a .jsonl file of HellaSwag examples"):
        text = read_text(path, errors="strict")

    examples = []

    # Not str.splitlines, which also cuts at U+2028 and other characters that JSON may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            with reading(where, "repair or remove this line"):
                row = json.loads(line)
            examples.append(check_example(row, where))
    if not examples:
        raise UserError(f"{path} has no example: choose a .jsonl file of HellaSwag examples")
    return examples


def load_examples_of_the_hub() -> list[dict]:
    import datasets

    try:
        rows = datasets.load_dataset(HUB_NAME, split="validation")
    except Exception as error:          # of the network's errors each library has its own classes
        raise UserError(f"HellaSwag ({HUB_NAME}) cannot be fetched from the Hugging Face hub "
                        f"({brief_error(error)}): check the connection, or name a .jsonl file of "
                        "its examples (--data; of train_gpt2.py --hellaswag_data)") from None
    return [check_example(row, f"{HUB_NAME}, row {i}") for i, row in enumerate(rows)]


def check_example(row: dict, where: str) -> dict:
    """The three fields of `row` that are used.

    UserError, with `where` the row stands, if one of them is wrong.
    """
    problem = UserError(f"{where} is not a HellaSwag example (expected ctx, a string; endings, "
                        f"four strings; label, 0 to 3): repair or remove the example")
    try:
        ctx = row["ctx"]
        endings = row["endings"]

        # The hub has "1", other files have 1, and 1.5 is a mistake.
        label = int(str(row["label"]))
    except (KeyError, TypeError, ValueError):
        raise problem from None
    if not isinstance(endings, list) or len(endings) != 4:
        raise problem
    if not all(isinstance(text, str) for text in (ctx, *endings)):
        raise problem
    if not 0 <= label < 4:
        raise problem
    return {"ctx": ctx, "endings": endings, "label": label}


# ----------------------------------------------------------------------------- batches

def render_example(example: dict) -> list[tuple[np.ndarray, int]]:
    """The four rows of an example: (context + " " + ending, how many tokens are the ending's).

    The tokens of a row are 1-D uint16.
    """
    ctx = encode(example["ctx"])
    rows = []
    for text in example["endings"]:
        ending = encode(" " + text)               # GPT-2's tokens of words begin with their space
        rows.append((np.concatenate((ctx, ending)), len(ending)))
    return rows


def make_batches(
    examples: list[dict], block_size: int, batch_size: int = 32,
) -> list[tuple[np.ndarray, ...]]:
    """Batches of at most batch_size rows: a list of (idx, targets, positions, labels), all int64.

    A batch of n examples has
    - idx, targets: (4 n, T), four rows for each example; targets are -1 outside the endings
    - positions: (P,), the indices into the flat targets (4 n T) of those >= 0
    - labels: (n,)

    Examples are sorted, the longest first: a batch holds little padding, and if memory runs out, it
    does so in the first one. A row longer than block_size loses its beginning.
    """
    rendered = [(render_example(example), example["label"]) for example in examples]
    rendered.sort(key=longest_row, reverse=True)

    # The four rows of an example stay in one batch.
    n = max(1, batch_size // 4)
    return [make_batch(rendered[i:i + n], block_size) for i in range(0, len(rendered), n)]


def longest_row(rendered: tuple[list, int]) -> int:
    rows, _ = rendered
    return max(len(row) for row, _ in rows)


def make_batch(rendered: list[tuple[list, int]], block_size: int) -> tuple[np.ndarray, ...]:
    """One of the batches of make_batches."""
    rows = []
    for four, _ in rendered:
        for row, length in four:
            rows.append((row[-(block_size + 1):], length))

    # Endings of one token without a context have nothing to be predicted from, and T is still 1.
    T = max(1, *(len(row) - 1 for row, _ in rows))
    idx = np.zeros((len(rows), T), dtype=np.int64)
    targets = np.full((len(rows), T), -1, dtype=np.int64)

    for j, (row, length) in enumerate(rows):
        end = len(row) - 1

        # Of a row that has no context the first token cannot be predicted: nothing is before it.
        first = max(0, end - length)
        idx[j, :end] = row[:-1]
        targets[j, first:end] = row[first + 1:]
    labels = np.array([label for _, label in rendered])
    return idx, targets, np.flatnonzero(targets >= 0), labels


# ----------------------------------------------------------------------------- evaluation

def evaluate(
    model, batches: Iterable[tuple[np.ndarray, ...]], device: str, autocast=None,
) -> list[int]:
    """[right by summed loss, right by mean loss, all examples], counted over `batches`.

    The first two are acc and acc_norm, times the third. Ranks have batches of their own, and sum
    what this returns.
    """
    import torch

    # The counts stay on the device: reading one would wait for all of its work.
    counts = torch.zeros(3, dtype=torch.int64, device=device)

    def move(array):
        tensor = torch.from_numpy(array)
        if counts.is_cuda:
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    if autocast is None:
        autocast = contextlib.nullcontext()

    # autocast is around the whole loop, so that it converts the weights only once.
    with torch.no_grad(), autocast:
        for batch in batches:
            idx, targets, positions, labels = map(move, batch)

            # (4 n, T), 0 outside the endings
            losses = model.token_losses(idx, targets, positions)
            sums = losses.sum(dim=1).view(-1, 4)                # (n, 4)
            lengths = (targets >= 0).sum(dim=1).view(-1, 4)     # (n, 4), in tokens
            means = sums / lengths
            counts[0] += (sums.argmin(1) == labels).sum()
            counts[1] += (means.argmin(1) == labels).sum()
            counts[2] += len(labels)
    return counts.tolist()


def batches_of_run(config, process) -> list[tuple]:
    """The batches of a training run, the same on all ranks; [] without HellaSwag.

    A file that --hellaswag_data names has to be right. Without the hub a run goes on.
    """
    if not config.hellaswag_every:
        return []
    if config.hellaswag_data:
        with process.together():
            examples = load_examples(config.hellaswag_data)
    else:
        examples = fetch_examples(process)
        if not examples:
            return []

    # A GPU has room for more rows than most CPUs.
    batch_size = 32
    if process.on_gpu:
        batch_size = 128
    return make_batches(examples, config.block_size, batch_size)


def fetch_examples(process) -> list[dict]:
    """The hub's examples, on all ranks. [], after a warning, if they cannot be fetched."""
    # Rank 0 is the first. The others find the examples in its cache, or do not try.
    examples, problem = [], ""
    if process.is_master:
        examples, problem = examples_or_problem()
    problem = process.from_master(problem)
    if not process.is_master and not problem:
        examples, problem = examples_or_problem()

    problems = [text for text in process.gather(problem) if text]
    if problems:
        process.print0(f"warning: continuing without HellaSwag, because {problems[0]}")
        return []
    return examples


def examples_or_problem() -> tuple[list[dict], str]:
    """(the hub's examples, ""), or ([], why they cannot be fetched)."""
    try:
        return load_examples(), ""
    except (UserError, ModuleNotFoundError) as error:
        return [], str(error)


# ----------------------------------------------------------------------------- the command

def parse_args(argv: list[str] | None):
    parser = FlagParser(prog="hellaswag.py", description=__doc__)
    parser.add_argument("--model", type=user_path, default="gpt2",
                        help=f"{MODEL_HELP} (default gpt2).")
    parser.add_argument("--data", type=user_path, metavar="FILE.jsonl",
                        help='A file of examples, each a line {"ctx": "...", "endings": [four '
                             'strings], "label": 0} (default: the validation split of '
                             f"{HUB_NAME} on the Hugging Face hub).")
    parser.add_argument("--limit", type=int,
                        help="Use only this number of examples, from the beginning (default: all "
                             "of them).")
    parser.add_argument("--batch_size", type=int, default=32,
                        help="The number of rows in a forward pass, four for each example "
                             "(default 32).")
    parser.add_argument("--device", default="auto",
                        help="The device: cuda, mps or cpu. 'auto' means the first of these that "
                             "is available (default auto).")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="The number format of matrix products, by autocast (default "
                             "float32).")
    args = parser.parse_args(argv)
    check_range("batch_size", args.batch_size, 4, 2**40)
    if args.limit is not None:
        check_range("limit", args.limit, 1, 2**40)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)

    # Only now, because torch takes seconds to import.
    import torch
    from tqdm import tqdm

    from recipes import check_tokens, load_model
    from runtime.hardware import choose_device, oom_as_user_error
    device = choose_device(args.device)
    examples = None

    # Before the model, so that a mistake in the file shows at once.
    if args.data:
        examples = load_examples(args.data)

    def out_of_memory():
        return f"{device} is out of memory: lower --batch_size, or choose another --device"

    with oom_as_user_error(out_of_memory):
        model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        if examples is None:
            examples = load_examples()
        examples = examples[:args.limit]
        batches = make_batches(examples, model.config.block_size, args.batch_size)
        autocast = torch.autocast(device.split(":")[0], getattr(torch, args.dtype),
                                  enabled=args.dtype != "float32")
        watched = tqdm(batches, "HellaSwag", delay=10, disable=None)
        acc, acc_norm, n = evaluate(model, watched, device, autocast)
    print(f"acc: {acc}/{n}={acc / n:.4f}")
    print(f"acc_norm: {acc_norm}/{n}={acc_norm / n:.4f}")


if __name__ == "__main__":
    run_command(main)
