"""Samples text from a model.

    python sample.py --model log --prompt "Hello, I'm a language model,"
    python sample.py --model log --interactive      # a prompt, its continuation, the next prompt
"""
import argparse
import codecs
import itertools
import sys
from collections.abc import Iterable, Iterator

from runtime.cli import MODEL_HELP, FlagParser, UserError, check_range, run_command, user_path
from runtime.tokenizer import EOT, VOCAB_SIZE, document_start, encode, token_as_text


def make_parser() -> FlagParser:
    parser = FlagParser(prog="sample.py", description=__doc__)
    parser.add_argument("--model", type=user_path, default="gpt2",
                        help=f"{MODEL_HELP} (default gpt2).")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--prompt", default="",
                       help="The text to continue (default: a new document). A model whose "
                            "vocabulary is not GPT-2's takes none, and its samples are numbers of "
                            "tokens.")
    start.add_argument("--interactive", action="store_true",
                       help="Continue each line of stdin, until Ctrl-D. An empty line begins a "
                            "new document. Ctrl-C stops a continuation, and quits at the prompt.")
    parser.add_argument("--num_samples", type=int,
                        help="The number of samples (default 4, or 1 with --interactive).")
    parser.add_argument("--max_new_tokens", type=int, default=200,
                        help="The most tokens in a sample, which may be shorter because its "
                             "document ends (default 200).")
    parser.add_argument("--temperature", type=float, default=1.0,
                        help="Higher temperatures make the text more varied, and 0 always takes "
                             "the most likely token (default 1.0).")
    parser.add_argument("--top_k", type=int, default=50,
                        help="Sample from the k most likely tokens, or from all if k is 0 "
                             "(default 50).")
    parser.add_argument("--seed", type=int, default=42,
                        help="The random seed: the same flags give the same text on the same "
                             "machine (default 42).")
    parser.add_argument("--device", default="auto",
                        help="The device: cuda, mps or cpu. 'auto' means the first of these that "
                             "is available (default auto).")
    parser.add_argument("--dtype", default="float32",
                        choices=["auto", "float32", "bfloat16", "float16"],
                        help="The number format of matrix products (autocast). 'auto' means "
                             "bfloat16 where the hardware has it (default float32).")
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    if args.num_samples is None:
        args.num_samples = 4
        if args.interactive:
            args.num_samples = 1

    check_range("num_samples", args.num_samples, 1, 1000)
    check_range("max_new_tokens", args.max_new_tokens, 1, 2**40)
    check_range("temperature", args.temperature, 0, 1000)
    check_range("top_k", args.top_k, 0, 2**40)
    check_range("seed", args.seed, 0, 2**63 - 1)
    return args


def check_prompt(args: argparse.Namespace, vocab_size: int) -> None:
    """UserError for a prompt to a model whose tokens are not GPT-2's."""
    for name in ("prompt", "interactive"):
        if vocab_size < VOCAB_SIZE and getattr(args, name):
            raise UserError(f"--{name} takes text, but {args.model} has a vocabulary of "
                            f"{vocab_size} tokens, which are not GPT-2's: leave --{name} out, or "
                            "see \"Tokens that are not GPT-2's\" in docs/data.md")


def read_prompts() -> Iterator[str]:
    """The lines of stdin, on a terminal until Ctrl-D."""
    sys.stdin.reconfigure(errors="replace")     # whatever bytes a pipe may bring
    question = ""
    at_end = ""
    if sys.stdin.isatty() and sys.stdout.isatty():
        question = "> "
        at_end = "\n"           # after ^D or ^C, so that the next output begins a line

    while True:
        try:
            line = input(question)
        except EOFError:
            print(end=at_end)
            return
        except KeyboardInterrupt:
            print(end=at_end)
            raise
        yield line


def stream_text(
    steps: Iterable,
    prompt: list[int],
    num_samples: int,
    titles: bool = True,
    vocab_size: int = VOCAB_SIZE,
) -> Iterator[str]:
    """The text of the samples in pieces, which come as soon as their tokens do.

    All samples are computed together and shown one after the other, each from its `prompt` to the
    end of its document. `steps` yields the next tokens of all of them at once, (num_samples, 1). It
    is advanced only as far as what is shown needs. Of a vocabulary that is not GPT-2's the numbers
    of the tokens are shown.
    """
    bytes_of = token_as_text(vocab_size)
    ids_of_steps = (step.flatten().tolist() for step in steps)

    # tee keeps what the first sample has taken, for those after it.
    copies = itertools.tee(ids_of_steps, num_samples)
    for i, own_copy in enumerate(copies):
        # A character may span several tokens. The decoder keeps its beginning until it is complete.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if titles:
            yield f"--- sample {i + 1} of {num_samples}\n"
        yield decoder.decode(b"".join(bytes_of(token) for token in prompt))
        for ids in own_copy:
            if ids[i] == EOT:
                break
            yield decoder.decode(bytes_of(ids[i]))
        yield decoder.decode(b"", final=True) + "\n"


def continuations(
    args: argparse.Namespace, model, device: str, generator, text: str
) -> Iterator[str]:
    """The samples that continue `text`, as stream_text yields them."""
    import torch

    prompt = encode(text).tolist()
    block_size, vocab_size = model.config.block_size, model.config.vocab_size
    if len(prompt) > block_size:
        print(f"the prompt has {len(prompt):,} tokens, but only the last {block_size:,} fit into "
              f"the model's context and are used", file=sys.stderr)
    start = prompt[-block_size:]

    if not start:
        start = [document_start(vocab_size)]

    # (num_samples, T)
    idx = torch.tensor([start] * args.num_samples, dtype=torch.int64, device=device)
    steps = model.generate_tokens(
        idx, args.max_new_tokens, args.temperature, args.top_k, generator)

    # A single continuation follows the line that was just typed: the prompt is not printed again.
    if args.interactive and args.num_samples == 1:
        return stream_text(steps, [], 1, titles=False)
    return stream_text(steps, prompt, args.num_samples, vocab_size=vocab_size)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)

    # Only now, because torch takes seconds to import.
    import torch

    from recipes import load_model
    from runtime.hardware import choose_device, choose_dtype, oom_as_user_error
    from runtime.weights import tell_of_best
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    autocast = torch.autocast(
        device.split(":")[0], getattr(torch, dtype), enabled=dtype != "float32")

    prompts = [args.prompt]
    if args.interactive:
        prompts = read_prompts()

    with oom_as_user_error(lambda: f"{device} is out of memory: lower --num_samples"):
        model = load_model(args.model).to(device)
        tell_of_best(args.model)
        check_prompt(args, model.config.vocab_size)

        # One generator for all prompts: the same prompt twice has two continuations.
        generator = torch.Generator(device=device).manual_seed(args.seed)
        for text in prompts:
            try:
                with autocast:
                    for piece in continuations(args, model, device, generator, text):
                        print(piece, end="", flush=True)
            except KeyboardInterrupt:
                if not args.interactive:
                    raise

                # Ctrl-C has ended this continuation, and the next prompt comes.
                print()


if __name__ == "__main__":
    run_command(main)
