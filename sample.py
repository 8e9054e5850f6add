"""Text from a checkpoint.

    python sample.py --model log --prompt "Hello, I'm a language model,"
"""
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a progress line
    from runtime.start import begin
    begin()
import codecs
import itertools
from collections.abc import Iterable, Iterator

from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.tokenizer import EOT, encode, tokenizer


def parse_flags(argv):
    parser = FlagParser(prog="sample.py", description=__doc__)
    parser.add_argument("--model", default="gpt2",
                        help="checkpoint, a run's folder (its newest checkpoint) or FOLDER/best (its lowest "
                             "validation loss), Hugging Face folder or hub name (default gpt2)")
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument("--num_samples", type=parse_int, default=4, help="number of samples (default 4)")
    parser.add_argument("--max_new_tokens", type=parse_int, default=200,
                        help="tokens per sample, fewer where its document ends before (default 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 for greedy decoding (default 1.0)")
    parser.add_argument("--top_k", type=parse_int, default=50,
                        help="sample from the k most likely tokens; 0: all (default 50)")
    parser.add_argument("--top_p", type=float, default=1.0,
                        help="of those, the fewest most likely whose probabilities sum to at least p "
                             "(nucleus sampling); 1.0: all (default 1.0)")
    parser.add_argument("--seed", type=parse_int, default=42,
                        help="decides every random choice: on the same machine the same seed and flags give "
                             "the same text (default 42)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"],
                        help="of the matrix products; 16 bits are faster on a GPU and change the text; auto: "
                             "bfloat16 where the hardware has it (default float32)")
    args = parser.parse_args(argv)
    for name, valid, rule in (
            ("num_samples", args.num_samples >= 1, "at least 1"),
            ("num_samples", args.num_samples <= 1000, "at most 1000; for more, repeat with another --seed"),
            ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
            ("top_k", args.top_k >= 0, "at least 0"),
            ("temperature", 0 <= args.temperature < float("inf"), "at least 0 and finite"),
            ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
            ("seed", 0 <= args.seed < 2**63, "from 0 to 2^63 - 1")):
        if not valid:
            raise UserError(f"--{name} {getattr(args, name)}: must be {rule}")
    return args


def stream_text(steps: Iterable, prompt: list[int], num_samples: int) -> Iterator[str]:
    """The output in pieces: the first sample's text as its tokens come, that of a later one, as far as it is
    there, once the samples before it have ended. Reads `steps`, the next ids (num_samples, 1) of each, until
    all samples have ended. A character that spans several tokens comes as a whole."""
    bytes_of = tokenizer().decode_single_token_bytes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    start = b"".join(map(bytes_of, prompt))
    texts = [f"--- sample {i + 1} of {num_samples}\n{decoder.decode(start)}"        # not yet yielded
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


def main(argv: list[str] | None = None) -> None:
    args = parse_flags(argv)

    import torch

    from model import load_model
    from runtime.device import choose_device, choose_dtype, make_autocast, oom_as_user_error
    from runtime.generation import generate_tokens
    from runtime.progress import Progress
    from runtime.weights import check_tokens
    device, progress, prompt = choose_device(args.device), Progress(), encode(args.prompt).tolist()
    autocast = make_autocast(device, choose_dtype(args.dtype, device))
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --num_samples, or another "
                                   f"--device"):
        with progress(f"loading {args.model}"):
            model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        idx = torch.tensor([prompt or [EOT]] * args.num_samples, dtype=torch.int64, device=device)  # (B, T)
        generator = torch.Generator(device=device).manual_seed(args.seed)
        steps = generate_tokens(model, idx, args.max_new_tokens, args.temperature, args.top_k, generator,
                                args.top_p)
        pieces = stream_text(steps, prompt, args.num_samples)
        with autocast:
            with progress("generating the first token"):
                first = next(pieces)
            for text in itertools.chain([first], pieces):       # from here on the text shows the progress
                print(text, end="", flush=True)


if __name__ == "__main__":
    run_command(main)
