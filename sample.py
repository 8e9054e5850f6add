"""Text from a checkpoint.

    python sample.py --model log/checkpoint_019073.pt --prompt "Hello, I'm a language model,"
"""
from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.tokenizer import EOT, encode, tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = FlagParser(prog="sample.py", description=__doc__)
    parser.add_argument("--model", default="gpt2",
                        help="checkpoint, Hugging Face folder, or hub name (default gpt2)")
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument("--num_samples", type=parse_int, default=4, help="number of samples (default 4)")
    parser.add_argument("--max_new_tokens", type=parse_int, default=200,
                        help="tokens per sample (default 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 for greedy decoding (default 1.0)")
    parser.add_argument("--top_k", type=parse_int, default=50,
                        help="sample from the k most likely tokens; 0: all (default 50)")
    parser.add_argument("--seed", type=parse_int, default=42, help="random seed (default 42)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    args = parser.parse_args(argv)
    if (args.num_samples < 1 or args.max_new_tokens < 1 or args.top_k < 0
            or not 0 <= args.temperature < float("inf")):
        raise UserError("--num_samples and --max_new_tokens must be at least 1, --top_k and --temperature at "
                        "least 0")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: must be from 0 to 2^63 - 1")

    import torch

    from model import load_model
    from runtime.device import choose_device, oom_as_user_error
    from runtime.weights import check_tokens
    device = choose_device(args.device)
    with oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --num_samples, or another "
                                   f"--device"):
        model = load_model(args.model).to(device)
        check_tokens(model, args.model)
        prompt = encode(args.prompt).tolist() or [EOT]
        idx = torch.tensor([prompt] * args.num_samples, dtype=torch.int64, device=device)
        generator = torch.Generator(device=device).manual_seed(args.seed)
        rows = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, generator).tolist()
    for i, row in enumerate(rows):
        end = row.index(EOT, len(prompt)) if EOT in row[len(prompt):] else len(row)     # end of the document
        text = tokenizer().decode([token for token in row[:end] if token != EOT])
        print(f"--- sample {i + 1} of {args.num_samples}\n{text}")


if __name__ == "__main__":
    run_command(main)
