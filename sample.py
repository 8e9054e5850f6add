"""Text from a checkpoint.

    python sample.py --model log --prompt "Hello, I'm a language model,"
    python sample.py --model log --interactive          # a prompt, its continuation, the next prompt
"""
# first, because it refuses an old Python in one line
from runtime.cli import FlagParser, UserError, run_command

import codecs
import itertools
import math
import sys
from collections.abc import Iterable, Iterator

from runtime.tokenizer import EOT, encode, tokenizer


NUMBERS = {         # flag: type, default, least, most, help
    "num_samples": (int, None, 1, 1000, "number of samples (default 4, with --interactive 1)"),
    "max_new_tokens": (int, 200, 1, math.inf, "tokens a sample, fewer where its document ends before"),
    "temperature": (float, 1.0, 0, 1000, "0 for greedy decoding"),
    "top_k": (int, 50, 0, math.inf, "sample from the k most likely tokens; 0: all"),
    "seed": (int, 42, 0, 2**63 - 1, "the same seed and flags give the same text on the same machine"),
}


def parse_flags(argv):
    parser = FlagParser(prog="sample.py", description=__doc__)
    parser.add_argument("--model", default="gpt2",
                        help="checkpoint, run's folder (its newest checkpoint) or FOLDER/best (its lowest "
                             "validation loss), Hugging Face folder or hub name (default gpt2)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--prompt", help="text to continue (default: none, a new document)")
    one.add_argument("--interactive", action="store_true",
                     help="continue each line of stdin (an empty line: a new document) until Ctrl-D; "
                          "Ctrl-C stops a continuation, or at the prompt quits")
    for name, (kind, default, _, _, help) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=kind, default=default,
                            help=help + (f" (default {default})" if default else ""))
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"],
                        help="autocast dtype; auto: bfloat16 where the hardware has it (default float32)")
    args = parser.parse_args(argv)
    if args.num_samples is None:
        args.num_samples = 1 if args.interactive else 4
    for name, (_, _, least, most, _) in NUMBERS.items():
        if not least <= getattr(args, name) <= most:
            raise UserError(f"--{name} {getattr(args, name)}: must be from {least} to {most}")
    return args


def read_prompts() -> Iterator[str]:
    """The lines of stdin, on a terminal until Ctrl-D."""
    if sys.stdin is None:
        raise UserError("--interactive reads prompts from stdin, which is closed: give --prompt")
    if hasattr(sys.stdin, "reconfigure"):       # a notebook's has none
        sys.stdin.reconfigure(errors="replace")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        while True:
            yield input("> " if terminal else "")
    except (EOFError, KeyboardInterrupt) as end:
        print(end="\n" if terminal else "")     # what comes next begins a line
        if isinstance(end, KeyboardInterrupt):
            raise


def stream_text(steps: Iterable, prompt: list[int], num_samples: int, titles: bool = True) -> Iterator[str]:
    """The samples' text, one sample after the other, each from its `prompt` to the end of its document, in
    pieces, which come as the tokens do. A character that spans several tokens comes as a whole. `steps`: the
    next ids (num_samples, 1) of all samples; no more of them are taken than are shown."""
    bytes_of, steps = tokenizer().decode_single_token_bytes, (new.flatten().tolist() for new in steps)
    for i, copy in enumerate(itertools.tee(steps, num_samples)):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        yield f"--- sample {i + 1} of {num_samples}\n" * titles
        yield decoder.decode(b"".join(map(bytes_of, prompt)))
        for ids in copy:
            if ids[i] == EOT:
                break
            yield decoder.decode(bytes_of(ids[i]))
        yield decoder.decode(b"", final=True) + "\n"


def continuations(args, model, device: str, generator, text: str) -> Iterator[str]:
    """The samples that continue `text`, as stream_text yields them."""
    import torch

    from runtime.language_model import generate_tokens
    prompt, block_size, n = encode(text).tolist(), model.config.block_size, args.num_samples
    if len(prompt) > block_size:
        print(f"of the prompt's {len(prompt):,} tokens the last {block_size:,} are used, the model's context",
              file=sys.stderr)
    idx = torch.tensor([prompt[-block_size:] or [EOT]] * n, dtype=torch.int64, device=device)       # (B, T)
    steps = generate_tokens(model, idx, args.max_new_tokens, args.temperature, args.top_k, generator)
    alone = args.interactive and n == 1         # its prompt is right above it
    return stream_text(steps, [] if alone else prompt, n, titles=not alone)


def main(argv: list[str] | None = None) -> None:
    args = parse_flags(argv)
    import torch

    from recipes import check_tokens, load_model
    from runtime.device import choose_device, choose_dtype, oom_as_user_error
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    autocast = torch.autocast(device.split(":")[0], getattr(torch, dtype), enabled=dtype != "float32")
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --num_samples"):
        model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        generator = torch.Generator(device=device).manual_seed(args.seed)
        for text in read_prompts() if args.interactive else [args.prompt or ""]:
            try:
                with autocast:
                    for piece in continuations(args, model, device, generator, text):
                        print(piece, end="", flush=True)
            except KeyboardInterrupt:
                if not args.interactive:
                    raise
                print()


if __name__ == "__main__":
    run_command(main)
