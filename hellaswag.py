"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings has the lowest loss?

    python hellaswag.py --model gpt2                           the 10,042 validation examples, from the hub
    python hellaswag.py --model log/checkpoint_019073.pt --data my_examples.jsonl --limit 200

Completion style: the loss of an ending's tokens given the context, summed (acc) or averaged
(acc_norm). GPT-2 124M: acc 0.2859, acc_norm 0.2955 in build-nanogpt; 0.2892 and 0.3114 in the
Eleuther harness, multiple choice style.
"""
# first, because it refuses an old Python in one line
from runtime.cli import FlagParser, UserError, import_package, run_command

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from runtime.files import read_text, readable
from runtime.tokenizer import encode

HUB_NAME = "Rowan/hellaswag"


def load_examples(path: str | Path | None = None) -> list[dict]:
    """Dicts with `ctx`, `endings` (4 strings) and `label` (0-3): from the .jsonl file `path`, else the hub's
    validation split. Raises UserError if they cannot be read."""
    if path is None:
        datasets = import_package("datasets")
        with readable(f"HellaSwag ({HUB_NAME})", "check the connection, or give a .jsonl file of its form",
                      problem="cannot be fetched from the Hugging Face hub"):
            rows = datasets.load_dataset(HUB_NAME, split="validation")
        return [_checked(row, f"{HUB_NAME}, row {i}") for i, row in enumerate(rows)]
    examples = []
    with readable(f"HellaSwag's data {path}", "give a .jsonl file of HellaSwag's form"):
        lines = read_text(path, errors="strict").split("\n")             # str.splitlines also cuts at U+2028
    for number, line in enumerate(lines, 1):
        if line.strip():
            with readable(f"{path}, line {number}", "repair or remove the line"):
                examples.append(_checked(json.loads(line), f"{path}, line {number}"))
    if not examples:
        raise UserError(f"{path} holds no example: give a .jsonl file of HellaSwag's form")
    return examples


def _checked(row, where):
    """The three fields of `row` that are used. Raises UserError naming `where` if one is wrong."""
    try:
        ctx, endings, label = row["ctx"], row["endings"], int(str(row["label"]))     # "1" and 1, not 1.5
        strings = isinstance(endings, list) and all(isinstance(s, str) for s in (ctx, *endings))
        if strings and len(endings) == 4 and 0 <= label < 4:
            return {"ctx": ctx, "endings": endings, "label": label}
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f"{where}: not a HellaSwag example (ctx: a string, endings: four strings, label: 0 to 3)")


def render_example(example: dict) -> list[tuple[np.ndarray, int]]:
    """The four rows of an example: 1-D uint16 tokens of context + " " + ending, and how many of these are the
    ending's."""
    ctx = encode(example["ctx"])
    endings = [encode(" " + ending) for ending in example["endings"]]
    return [(np.concatenate((ctx, ending)), len(ending)) for ending in endings]


def make_batches(examples: list[dict], block_size: int, batch_size: int = 32) -> list[tuple[np.ndarray, ...]]:
    """Batches of at most batch_size rows, the examples sorted by length: little of a batch is padding, and
    what does not fit into memory fails in the first. A row longer than block_size loses its beginning.

    Returns a list of (idx, targets, positions, labels), all int64:
    idx, targets: (4 n, T), four rows an example; targets are -1 outside the endings.
    positions: (P,), the indices into the flat targets (4 n T) of those >= 0.
    labels: (n,)
    """
    rendered = [(render_example(example), example["label"]) for example in examples]
    rendered.sort(key=lambda pair: max(len(row) for row, _ in pair[0]), reverse=True)
    n = max(1, batch_size // 4)
    return [_make_batch(rendered[i:i + n], block_size) for i in range(0, len(rendered), n)]


def _make_batch(rendered, block_size):
    rows = [(row[-(block_size + 1):], length) for four, _ in rendered for row, length in four]
    T = max(1, *(len(row) - 1 for row, _ in rows))
    idx, targets = np.zeros((len(rows), T), dtype=np.int64), np.full((len(rows), T), -1, dtype=np.int64)
    for j, (row, length) in enumerate(rows):
        end = len(row) - 1
        first = max(0, end - length)            # without a context the first token has nothing before it
        idx[j, :end], targets[j, first:end] = row[:-1], row[first + 1:]
    return idx, targets, np.flatnonzero(targets >= 0), np.array([label for _, label in rendered])


def evaluate(model, batches: list[tuple[np.ndarray, ...]], device: str, autocast=None, rank: int = 0,
             world_size: int = 1, watched: Callable[[list], Iterable] = iter) -> np.ndarray:
    """int64 (3,): correct by summed loss (acc), correct by mean loss (acc_norm), and examples, of this rank's
    share of `batches`; to be summed over the ranks. `watched(batches)` yields the batches: it may show
    progress, and end early after a signal."""
    import torch
    counts = torch.zeros(3, dtype=torch.int64, device=device)       # on the device: no wait in the loop

    def move(array):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if counts.is_cuda else tensor.to(device)
    # autocast is around the loop, so that it converts the weights once
    with torch.no_grad(), autocast or contextlib.nullcontext():
        for batch in watched(batches[rank::world_size]):
            idx, targets, positions, labels = map(move, batch)
            losses = model.token_losses(idx, targets, positions)          # (4 n, T), 0 outside the endings
            total = losses.sum(dim=1).view(-1, 4)                         # (n, 4)
            mean = total / (targets >= 0).sum(dim=1).view(-1, 4)
            counts[0] += (total.argmin(1) == labels).sum()
            counts[1] += (mean.argmin(1) == labels).sum()
            counts[2] += len(labels)
    return counts.cpu().numpy()


def hellaswag_batches(config, explicit_flags: set[str], process) -> list[tuple]:
    """Batches of a training run, [] without HellaSwag. Rank 0 fetches the examples before the first step.
    If that fails: a warning, or a UserError where a flag asked for HellaSwag."""
    if not config.hellaswag_every:
        return []
    try:
        examples = process.rank0_first(load_examples, config.hellaswag_data or None)
    except UserError as error:
        if explicit_flags & {"hellaswag_every", "hellaswag_data"}:
            raise UserError(f"{error} (or --hellaswag_every 0)") from None
        process.print0(f"warning: continuing without HellaSwag. {error}")
        return []
    batch_size = 128 if process.device.startswith("cuda") else 32
    return make_batches(examples, config.block_size, batch_size)


def main(argv: list[str] | None = None) -> None:
    parser = FlagParser(prog="hellaswag.py", description=__doc__)
    parser.add_argument("--model", default="gpt2",
                        help="checkpoint, run's folder, Hugging Face folder, or hub name (default gpt2)")
    parser.add_argument("--data", metavar="FILE.jsonl",
                        help=f'a line each: {{"ctx": "...", "endings": ["...", 4 in all], "label": 0}} '
                             f"(default: the validation split of {HUB_NAME}, from the hub)")
    parser.add_argument("--limit", type=int, help="number of examples, from the first (default: all)")
    parser.add_argument("--batch_size", type=int, default=32,
                        help="rows per forward, four per example (default 32)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="autocast dtype (default float32)")
    args = parser.parse_args(argv)
    if args.batch_size < 4 or (args.limit is not None and args.limit < 1):
        raise UserError("--batch_size must be at least 4 (one example) and --limit at least 1")
    import torch
    from tqdm import tqdm

    from recipes import check_tokens, load_model
    from runtime.device import choose_device, oom_as_user_error
    device = choose_device(args.device)
    examples = load_examples(args.data) if args.data else None      # before the model: errors show at once
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --batch_size, or another "
                                   f"--device"):
        model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        examples = (examples or load_examples())[:args.limit]
        batches = make_batches(examples, model.config.block_size, args.batch_size)
        autocast = torch.autocast(device.split(":")[0], getattr(torch, args.dtype),
                                  enabled=args.dtype != "float32")
        acc, acc_norm, n = evaluate(model, batches, device, autocast,
                                    watched=lambda batches: tqdm(batches, "HellaSwag", delay=10,
                                                                  disable=None))
    print(f"acc: {acc}/{n}={acc / n:.4f}\nacc_norm: {acc_norm}/{n}={acc_norm / n:.4f}")


if __name__ == "__main__":
    run_command(main)
