"""Text from a checkpoint.

    python sample.py --model log --prompt "Hello, I'm a language model,"
    python sample.py --model log --interactive          # a prompt, its continuation, the next prompt
"""
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a progress line
    from runtime.start import begin
    begin()
import codecs
import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator

from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.files import read_text, readable
from runtime.start import ctrl_c_is_handled
from runtime.tokenizer import EOT, encode, tokenizer

LONGEST = 1 << 20       # characters of a line on stdin, bytes of a prompt's file


def parse_flags(argv):
    parser = FlagParser(prog="sample.py", description=__doc__)
    parser.add_argument("--model", default="gpt2",
                        help="checkpoint, a run's folder (its newest checkpoint) or FOLDER/best (its lowest "
                             "validation loss), Hugging Face folder or hub name (default gpt2)")
    parser.add_argument("--prompt", help="text to continue (default: none, a new document)")
    parser.add_argument("--prompt_file", metavar="FILE",
                        help="file whose text is the prompt as it is, with the newline at its end")
    parser.add_argument("--interactive", action="store_true",
                        help="continue each line of stdin, an empty one with a new document, until Ctrl-D; "
                             "Ctrl-C ends a continuation, and at the prompt the program")
    parser.add_argument("--num_samples", type=parse_int,
                        help="number of samples (default 4; with --interactive 1, shown without its prompt)")
    parser.add_argument("--max_new_tokens", type=parse_int, default=200,
                        help="tokens per sample, fewer where its document ends before (default 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 for greedy decoding (default 1.0)")
    parser.add_argument("--top_k", type=parse_int, default=50,
                        help="sample from the k most likely tokens; 0: all (default 50)")
    parser.add_argument("--top_p", type=float, default=1.0,
                        help="of those, the fewest most likely whose probabilities sum to at least p "
                             "(nucleus sampling); 1.0: all (default 1.0)")
    parser.add_argument("--repetition_penalty", type=float, default=1.0,
                        help="divides the logits of tokens that the text has already, multiplies negative "
                             "ones (arXiv:1909.05858 has 1.2); 1.0: none (default 1.0)")
    parser.add_argument("--seed", type=parse_int, default=42,
                        help="decides every random choice: on the same machine the same seed and flags give "
                             "the same text (default 42)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"],
                        help="of the matrix products; 16 bits are faster on a GPU and change the text; auto: "
                             "bfloat16 where the hardware has it (default float32)")
    args = parser.parse_args(argv)
    if args.interactive + (args.prompt is not None) + (args.prompt_file is not None) > 1:
        raise UserError("--prompt, --prompt_file and --interactive exclude each other: give one of them")
    if args.num_samples is None:
        args.num_samples = 1 if args.interactive else 4
    check_numbers(args)
    if args.prompt_file is not None:
        with readable(f"--prompt_file {args.prompt_file}", "give a text file in UTF-8"):
            args.prompt = read_text(args.prompt_file, LONGEST, errors="strict")
    return args


def check_numbers(args) -> None:
    for name, valid, rule in (
            ("num_samples", args.num_samples >= 1, "at least 1"),
            ("num_samples", args.num_samples <= 1000, "at most 1000; for more, repeat with another --seed"),
            ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
            ("top_k", args.top_k >= 0, "at least 0"),
            ("temperature", 0 <= args.temperature < float("inf"), "at least 0 and finite"),
            ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 1 <= args.repetition_penalty <= 1000, "from 1.0, which is none, to 1000"),
            ("seed", 0 <= args.seed < 2**63, "from 0 to 2^63 - 1")):
        if not valid:
            raise UserError(f"--{name} {getattr(args, name)}: must be {rule}")


def read_prompts() -> Iterator[str]:
    """The lines of stdin, on a terminal until Ctrl-D."""
    if sys.stdin is None:
        raise UserError("--interactive reads prompts from stdin, which is closed: give --prompt")
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401   input() then edits lines and remembers them
    sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            if terminal:
                line = input("> " if sys.stdout.isatty() else "") + "\n"
            else:
                line = sys.stdin.readline(LONGEST)
        except (EOFError, KeyboardInterrupt) as end:            # readline raises no EOFError
            print()                             # what comes next begins a line
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        except OSError as error:
            raise UserError(f"stdin cannot be read ({error.strerror}): give --prompt") from None
        if len(line) >= LONGEST:
            raise UserError(f"a line on stdin has {LONGEST:,} characters or more: give --prompt_file")
        if not line:
            return
        yield line.removesuffix("\n")


def stream_text(steps: Iterable, prompt: list[int], num_samples: int, titles: bool = True) -> Iterator[str]:
    """The output in pieces: the first sample's text as its tokens come, that of a later one, as far as it is
    there, once the samples before it have ended. Reads `steps`, the next ids (num_samples, 1) of each, until
    all samples have ended. A character that spans several tokens comes as a whole. `titles`: whether each
    sample has a line above it."""
    bytes_of = tokenizer().decode_single_token_bytes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    start = b"".join(map(bytes_of, prompt))
    texts = [f"--- sample {i + 1} of {num_samples}\n" * titles + decoder.decode(start)      # not yet yielded
             for i, decoder in enumerate(decoders)]
    ended, current = [False] * num_samples, 0
    for new in steps:
        for i, token in enumerate(new.flatten().tolist()):
            if not ended[i]:
                ended[i] = token == EOT                 # the end of its document
                texts[i] += decoders[i].decode(b"" if ended[i] else bytes_of(token), final=ended[i])
                texts[i] += "\n" if ended[i] else ""
        while current < num_samples:
            yield texts[current]
            texts[current] = ""
            if not ended[current]:
                break
            current += 1
        if current == num_samples:
            return
    for i in range(current, num_samples):
        yield texts[i] if ended[i] else texts[i] + decoders[i].decode(b"", final=True) + "\n"


def continuations(args, model, device: str, generator, text: str) -> Iterator[str]:
    """The samples that continue `text`, as stream_text yields them."""
    import torch

    from runtime.generation import generate_tokens
    prompt, block_size, n = encode(text).tolist(), model.config.block_size, args.num_samples
    if len(prompt) > block_size:
        print(f"the prompt has {len(prompt):,} tokens, and the model's context {block_size:,}: it is cut, "
              f"and the last {block_size:,} are used", file=sys.stderr, flush=True)
    start = prompt[-block_size:] or [EOT]
    idx = torch.tensor([start] * n, dtype=torch.int64, device=device)                       # (B, T)
    steps = generate_tokens(model, idx, args.max_new_tokens, args.temperature, args.top_k, generator,
                            args.top_p, args.repetition_penalty)
    alone = args.interactive and n == 1         # right below its prompt
    return stream_text(steps, [] if alone else prompt, n, titles=not alone)


def main(argv: list[str] | None = None) -> None:
    args = parse_flags(argv)

    import torch

    from model import load_model
    from runtime.device import choose_device, choose_dtype, make_autocast, oom_as_user_error
    from runtime.progress import Progress
    from runtime.weights import check_tokens
    device, progress = choose_device(args.device), Progress()
    autocast = make_autocast(device, choose_dtype(args.dtype, device))
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --num_samples, or another "
                                   f"--device"):
        with progress(f"loading {args.model}"):
            model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        generator = torch.Generator(device=device).manual_seed(args.seed)
        for text in read_prompts() if args.interactive else [args.prompt or ""]:
            try:
                pieces = continuations(args, model, device, generator, text)
                with autocast:
                    with progress("generating the first token"):
                        first = next(pieces)
                    for piece in itertools.chain([first], pieces):      # now the text shows the progress
                        print(piece, end="", flush=True)
            except KeyboardInterrupt:
                if not args.interactive:
                    raise
                ctrl_c_is_handled()
                print()


if __name__ == "__main__":
    run_command(main)
