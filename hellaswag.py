"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings has the lowest loss?

    python hellaswag.py --model gpt2                           the 10,042 validation examples, from the hub
    python hellaswag.py --model log/checkpoint_019073.pt --data my_examples.jsonl --limit 200

Completion style: the loss of an ending's tokens given the context, summed (acc) or averaged
(acc_norm). GPT-2 124M: acc 0.2859, acc_norm 0.2955 in build-nanogpt; 0.2892 and 0.3114 in the
Eleuther harness, multiple choice style.
"""
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a progress line
    from runtime.start import begin
    begin()
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.files import read_text, readable
from runtime.hub import reach_hub
from runtime.tokenizer import encode

HUB_NAME = "Rowan/hellaswag"


def load_examples(path: str | Path | None = None) -> list[dict]:
    """Dicts with `ctx`, `endings` (4 strings) and `label` (0-3): from the .jsonl file `path`, else the hub's
    validation split. Raises UserError if they cannot be read."""
    if path is None:
        with readable(f"HellaSwag ({HUB_NAME})", "check the connection, or give a .jsonl file of its form",
                      problem="cannot be fetched from the Hugging Face hub"):
            reach_hub()
            from datasets import load_dataset
            rows = load_dataset(HUB_NAME, split="validation")
        return [_checked(row, f"{HUB_NAME}, row {i}") for i, row in enumerate(rows)]
    with readable(f"HellaSwag's data {path}", "give a .jsonl file of HellaSwag's form"):
        lines = read_text(path, errors="strict").split("\n")             # str.splitlines also cuts at U+2028
    examples = []
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


def render_example(example: dict) -> tuple[list[np.ndarray], list[int]]:
    """Four 1-D uint16 rows of tokens (context + " " + ending), and how many tokens each ending has."""
    ctx = encode(example["ctx"])
    endings = [encode(" " + ending) for ending in example["endings"]]
    return [np.concatenate((ctx, ending)) for ending in endings], [len(ending) for ending in endings]


def make_batches(examples: list[dict], block_size: int, batch_size: int = 32) -> list[tuple[np.ndarray, ...]]:
    """Examples as batches of few shapes, sorted by length: little padding, and few graphs to compile.

    Returns a list of (idx, targets, positions, labels), all int64:
    idx, targets: (4 n, T), four rows an example; targets are -1 outside the endings.
    positions: (P,), the indices into the flat targets (4 n T) of those >= 0, some repeated to fill P.
    labels: (n,), -1 for an example that only fills the batch.
    All batches have the same n, 4 n <= batch_size, and at most four P for one T. A row longer than
    block_size loses its beginning.
    """
    rendered = [(*render_example(e), e["label"]) for e in examples]
    rendered.sort(key=lambda r: max(map(len, r[0])))
    n, by_shape = max(1, min(batch_size // 4, len(examples))), {}
    for end in range(len(rendered), 0, -n):     # longest first: the batch to fill up is then the shortest
        T = min(block_size, _round_up(max(map(len, rendered[end - 1][0])) - 1, 32))
        by_shape.setdefault(T, []).extend(rendered[max(0, end - n):end])
    return [batch for T, group in by_shape.items() for batch in _batches_of_one_shape(group, n, T)]


def _round_up(number, multiple):
    return -(-number // multiple) * multiple


def _batches_of_one_shape(group, n, T):
    """Examples are dealt out back and forth by the length of their endings, so that all batches have about
    the same number of tokens to score."""
    group.sort(key=lambda r: sum(r[1]))
    k = -(-len(group) // n)
    batches = [_pad(group[j::2 * k] + group[2 * k - 1 - j::2 * k], n, T) for j in range(k)]
    scored = [np.flatnonzero(targets >= 0) for _, targets, _ in batches]
    step = _round_up(max(1, *map(len, scored)), 64) // 4            # one P for all but the smallest batches
    # np.resize repeats the positions
    return [(idx, targets, np.resize(positions, _round_up(len(positions), step)), labels)
            for (idx, targets, labels), positions in zip(batches, scored, strict=True)]


def _pad(group, n, T):
    """idx, targets (4 n, T) and labels (n,) of up to n examples."""
    idx = np.zeros((4 * n, T), dtype=np.int64)
    targets, labels = np.full((4 * n, T), -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    labels[:len(group)] = [label for _, _, label in group]
    pairs = (pair for rows, lengths, _ in group for pair in zip(rows, lengths, strict=True))
    for j, (row, length) in enumerate(pairs):
        row = row[-(T + 1):]
        first, end = max(0, len(row) - 1 - length), len(row) - 1
        idx[j, :end], targets[j, first:end] = row[:-1], row[first + 1:]
    return idx, targets, labels


def evaluate(model, batches: list[tuple[np.ndarray, ...]], device: str, autocast=None, rank: int = 0,
             world_size: int = 1, watched: Callable = lambda what, items, unit: items) -> np.ndarray:
    """int64 (3,): correct by summed loss, correct by mean loss, and examples, over this rank's `batches`.
    `watched` yields the batches, with progress shown, until a signal."""
    import torch
    counts = torch.zeros(3, dtype=torch.int64, device=device)       # on the device: no wait in the loop

    def move(array):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if counts.is_cuda else tensor.to(device)
    # autocast is around the loop, so that it converts the weights once
    rounds = range(rank, _round_up(len(batches), world_size), world_size)      # equally many on each rank
    with torch.no_grad(), autocast or contextlib.nullcontext():
        for i in watched("HellaSwag", rounds, "batches"):
            if i >= len(batches):
                continue
            idx, targets, positions, labels = map(move, batches[i])
            losses = model.token_losses(idx, targets, positions)          # (4 n, T), 0 outside the endings
            total = losses.sum(dim=1).view(-1, 4)                         # (n, 4)
            mean = total / (targets >= 0).sum(dim=1).view(-1, 4)
            correct = total.argmin(1) == labels, mean.argmin(1) == labels
            counts += torch.stack((*correct, labels >= 0)).sum(dim=1)
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
                        help=f"examples (default: the validation split of {HUB_NAME}, from the hub)")
    parser.add_argument("--limit", type=parse_int, help="number of examples, from the first (default: all)")
    parser.add_argument("--batch_size", type=parse_int, default=32,
                        help="rows per forward, four per example (default 32)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="autocast dtype (default float32)")
    args = parser.parse_args(argv)
    if args.batch_size < 4 or (args.limit is not None and args.limit < 1):
        raise UserError("--batch_size must be at least 4 (one example) and --limit at least 1")
    from model import load_model
    from runtime.device import choose_device, make_autocast, oom_as_user_error
    from runtime.progress import Progress
    from runtime.weights import check_tokens
    device = choose_device(args.device)
    progress = Progress()
    examples = load_examples(args.data) if args.data else None      # before the model: errors show at once
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --batch_size, or another "
                                   f"--device"):
        with progress(f"loading {args.model}"):
            model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        examples = (examples or load_examples())[:args.limit]
        batches = make_batches(examples, model.config.block_size, args.batch_size)
        correct, correct_norm, n = evaluate(model, batches, device, make_autocast(device, args.dtype),
                                            watched=progress.over)
    print(f"acc: {correct}/{n}={correct / n:.4f}\nacc_norm: {correct_norm}/{n}={correct_norm / n:.4f}")


if __name__ == "__main__":
    run_command(main)
