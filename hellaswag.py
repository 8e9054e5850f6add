"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings does the model find likeliest?

    python hellaswag.py --model gpt2                           the 10,042 validation examples, from the hub
    python hellaswag.py --model log/checkpoint_019073.pt --data my_examples.jsonl --limit 200

Completion style: the loss of an ending's tokens given the context, summed (acc) or averaged
(acc_norm). GPT-2 124M: acc 0.2859, acc_norm 0.2955 (build-nanogpt; the Eleuther harness, multiple
choice style, says 0.2892 and 0.3114).
"""
import json
from pathlib import Path

import numpy as np

from fineweb import FlagParser, UserError, encode, reach_hub, run_command, whole_number

HUB_NAME = "Rowan/hellaswag"


def load_examples(path=None):
    """Dicts with `ctx`, `endings` (4 strings) and `label` (0-3): from a .jsonl file, or the hub's validation split."""
    if path is None:
        try:
            reach_hub()
            from datasets import load_dataset
            rows = load_dataset(HUB_NAME, split="validation")
        except Exception as error:      # the network's errors are of many libraries' classes
            raise UserError(f"HellaSwag ({HUB_NAME}) cannot be had from the Hugging Face hub ({str(error)[:200]}): "
                            f"check the connection, or give a .jsonl file of the same form") from None
        return [_checked(row, f"{HUB_NAME}, row {i}") for i, row in enumerate(rows)]
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")     # str.splitlines also cuts at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"HellaSwag's data {path} cannot be read ({error}): give a .jsonl file of its form") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(_checked(json.loads(line), f"{path}, line {number}"))
            except (ValueError, RecursionError):
                raise UserError(f"{path}, line {number}: not JSON; mend or remove the line") from None
    if not examples:
        raise UserError(f"{path} holds no example: give a .jsonl file of HellaSwag's form")
    return examples


def _checked(row, where):
    try:
        ctx, endings, label = row["ctx"], row["endings"], int(str(row["label"]))     # "1" and 1, not 1.5
        strings = isinstance(endings, list) and all(isinstance(s, str) for s in (ctx, *endings))
        if strings and len(endings) == 4 and 0 <= label < 4:
            return {"ctx": ctx, "endings": endings, "label": label}
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f"{where}: not a HellaSwag example (ctx: a string, endings: four strings, label: 0 to 3)")


def render_example(example):
    """The four rows of tokens (context + " " + ending) and the length of each row's ending."""
    ctx = encode(example["ctx"])
    endings = [encode(" " + ending) for ending in example["endings"]]
    return [np.concatenate((ctx, ending)) for ending in endings], [len(ending) for ending in endings]


def make_batches(examples, block_size, batch_size=32):
    """Examples as padded arrays, the similar in length together, so that little of a batch is padding.

    Returns a list of (idx, targets, labels): idx and targets int64 (4 n, T), targets -1 outside the
    endings, labels (n,); 4 n <= batch_size. A row longer than block_size loses its beginning.
    """
    rendered = [(*render_example(e), e["label"]) for e in examples]
    rendered.sort(key=lambda r: max(map(len, r[0])))
    batches, n = [], max(1, batch_size // 4)
    for i in range(0, len(rendered), n):
        group = rendered[i:i + n]
        T = min(block_size, max(len(row) for rows, _, _ in group for row in rows) - 1)
        idx = np.zeros((4 * len(group), T), dtype=np.int64)
        targets = np.full((4 * len(group), T), -1, dtype=np.int64)
        flat = [pair for rows, lengths, _ in group for pair in zip(rows, lengths, strict=True)]
        for j, (row, length) in enumerate(flat):
            row = row[-(block_size + 1):]
            length = min(length, len(row) - 1)
            idx[j, :len(row) - 1] = row[:-1]
            targets[j, len(row) - 1 - length:len(row) - 1] = row[len(row) - length:]
        batches.append((idx, targets, np.array([label for _, _, label in group])))
    return batches


def evaluate(model, batches, device, autocast=None, rank=0, world_size=1, progress=None):
    """Counts (correct by summed loss, correct by mean loss, examples) over this rank's share of `batches`."""
    import contextlib

    import torch
    counts = np.zeros(3, dtype=np.int64)
    for idx, targets, labels in batches[rank::world_size]:
        with torch.no_grad(), autocast or contextlib.nullcontext():
            idx, targets = torch.from_numpy(idx).to(device), torch.from_numpy(targets).to(device)
            losses = model.token_losses(idx, targets)                           # (4 n, T), 0 outside the endings
            total = losses.sum(dim=1).view(-1, 4)                               # (n, 4)
            mean = total / (targets >= 0).sum(dim=1).view(-1, 4)
        labels = torch.from_numpy(labels).to(device)
        correct, correct_norm = (total.argmin(1) == labels).sum(), (mean.argmin(1) == labels).sum()
        counts += int(correct), int(correct_norm), len(labels)
        if progress:
            progress.update(len(labels))
    return counts


def main(argv=None):
    parser = FlagParser(prog="hellaswag.py", description=__doc__)
    parser.add_argument("--model", default="gpt2", help="checkpoint, Hugging Face folder, or name on the hub (default gpt2)")
    parser.add_argument("--data", metavar="FILE.jsonl", help=f"examples (default: {HUB_NAME}, validation, from the hub)")
    parser.add_argument("--limit", type=whole_number, help="only the first so many examples")
    parser.add_argument("--batch_size", type=whole_number, default=32, help="rows a forward, four an example (default 32)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="of the matrix products (default float32)")
    args = parser.parse_args(argv)
    if args.batch_size < 4 or (args.limit is not None and args.limit < 1):
        raise UserError("--batch_size must be at least 4 (one example) and --limit at least 1")
    from tqdm import tqdm

    from model import choose_device, load_model, make_autocast
    device = choose_device(args.device)
    examples = load_examples(args.data) if args.data else None      # what is quick to find wrong comes first
    model = load_model(args.model).to(device)
    examples = (examples or load_examples())[:args.limit]
    batches = make_batches(examples, model.config.block_size, args.batch_size)
    with tqdm(total=len(examples), unit="ex", disable=None) as bar:
        correct, correct_norm, n = evaluate(model, batches, device, make_autocast(device, args.dtype), progress=bar)
    print(f"acc: {correct}/{n}={correct / n:.4f}\nacc_norm: {correct_norm}/{n}={correct_norm / n:.4f}")


if __name__ == "__main__":
    run_command(main)
