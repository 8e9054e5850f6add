"""The cross-entropy of a model on a CPU, computed for some tokens at a time.

The logits of a step are its largest tensor: 50,304 for each token. Here those of `chunk` tokens are
computed, turned into loss and gradients, and forgotten, before the next are. Compiled models and
GPUs use F.cross_entropy instead.

Shapes: N tokens in all, n of them at a time, C = n_embd, V = vocab_size.
"""
import math

import numpy as np
import torch
from torch import Tensor

from runtime.layers import matmul_dtype

LN2 = math.log(2)


# ---------------------------------------------------------------------- a sample of the vocabulary
# Most tokens are rare: 1,800 of GPT-2's 50,257 make up 89% of Shakespeare. The softmax needs the
# others only for its sum, which a few of them, each of which counts for many, tell well enough. So
# a step draws the tokens whose logits it computes, some 6,500. A token that is drawn with
# probability q counts 1 / q times, so that the mean of the sum over all draws is the whole sum.

class VocabularySample:
    """The tokens whose logits a step computes, drawn anew for each step by the seed alone.

    `occurrences`, int64 (V,), is how often each token occurs in the training text.
    """

    def __init__(self, occurrences: np.ndarray, seed: int):
        # A token that is one in 20,000 of the text is always drawn, the rarest in 1 of 16 steps.
        share = occurrences / occurrences.sum()
        self.probability = np.clip(20_000 * share, 1 / 16, 1.0)
        self.seed = seed
        self.draw(0, torch.empty(0, dtype=torch.int64))

    def draw(self, step: int, tokens: Tensor) -> None:
        """Draws for a step. `tokens`, of any shape, are all of this step, on all processes."""
        generator = np.random.Philox(np.random.SeedSequence((self.seed, step)))
        drawn = generator.random_raw(len(self.probability)) <= 2.0**64 * self.probability

        # float32 (V,): how often each token counts, 0 where it was not drawn. Those of the step
        # count once: they are the targets, and what the model may expect to come again.
        self.counts = torch.from_numpy(np.where(drawn, 1 / self.probability, 0.0)).float()
        self.counts[tokens.flatten()] = 1.0

    def choose(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The ids (K,) of the chosen tokens, the targets' places among them, their counts (K,).

        targets (N,); -1 is ignored.
        """
        counts = self.counts.clone()
        counts[targets.clamp(min=0)] = 1.0         # a trial's targets are not those of a step
        ids = counts.nonzero().flatten()
        places = torch.where(targets >= 0, counts.sign().long().cumsum(0)[targets] - 1, -1)
        return ids, places, counts[ids]


# ---------------------------------------------------------------------- the loss of some tokens
# A token's loss with the logits z_1 ... z_V and the target t is
#
#     loss = ln(sum_j exp(z_j)) - z_t,        and so      d loss / d z_j = p_j - [j = t]
#
# where p_j = exp(z_j) / sum_k exp(z_k) and [j = t] is 1 for the target, 0 otherwise. Adding one
# constant to all z_j changes neither.
#
# With a softcap c, z = c tanh(u) for the head's output y and u = y / c. In terms of the sigmoid
# s = sigmoid(2 u) that is
#
#     c tanh(u) = 2 c s - c,                  and         d z / d y = 1 - tanh(u)^2 = 4 s (1 - s)
#
# of which the constant -c can be left out.

def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, softcap: float = 0.0, counts: Tensor | None = None
) -> Tensor:
    """The losses (nats), (n,), for the head's output `logits` (n, V), before the softcap.

    targets (n,); -1 is ignored. `counts` (V,), if given: how often each logit counts in the sum of
    exponentials, once for a target. Overwrites `logits` with the gradient of the losses' sum.
    """
    is_scored = (targets >= 0)[:, None]                                         # (n, 1)
    targets = targets.clamp(min=0)[:, None]                                     # (n, 1)

    # On AMD's CPUs torch's exp and tanh can take many times as long as its exp2. So tanh is written
    # with sigmoid, as above, and exp(z) as exp2(z / ln 2). `z` starts as y; then it is the z above,
    # divided by ln 2. In place, fewer tensors compete for the CPU's cache.
    z = logits.float()
    if softcap:
        # These z lie between 0 and 2 softcap / ln 2. No maximum has to be subtracted from them:
        # 300,000 is more than any vocabulary here, and 300,000 exp(76) is below float32's limit.
        assert softcap <= 38, "beyond 38 the sum of 300,000 exp(2 softcap) overflows float32"
        s = z.mul_(2 / softcap).sigmoid_()
        z = s * (2 * softcap / LN2)
    else:
        z = z.mul_(1 / LN2)
        z = z.sub_(z.amax(dim=1, keepdim=True))         # the largest is 0, so that no exp overflows

    z_of_target = z.gather(1, targets)                                          # (n, 1)
    exps = torch.exp2_(z)                                                       # (n, V)
    if counts is not None:
        exps.mul_(counts)
    total = exps.sum(dim=1, keepdim=True)                                       # (n, 1)
    losses = (total.log() - z_of_target * LN2) * is_scored                      # (n, 1)

    # The gradient is (p_j - [j = t]) factor, and with a softcap times s (1 - s).
    factor = is_scored * 1.0
    if softcap:
        factor = is_scored * 4.0
    gradient = exps.mul_(factor / total)
    gradient.scatter_add_(1, targets, -factor)
    if softcap:
        torch.ops.aten.sigmoid_backward.grad_input(gradient, s, grad_input=gradient)

    logits.copy_(gradient)
    return losses[:, 0]


# ---------------------------------------------------------------------- all tokens
# The loss is at the end of what a step computes: its backward is given a single number g, 1 or
# float16's scale. So the forward already knows the gradients but for that number. It computes
# those of x and W while it has the logits, of which they are matrix products:
#
#     logits = x W^T,         d loss / d x = G W,         d loss / d W = G^T x
#
# where G (n, V), the gradient of the logits, takes the place of the logits. The backward multiplies
# both by g. Autograd would keep all logits from the forward to the backward instead.

class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy (nats) of the logits x W^T, with `chunk` tokens' logits in memory.

    x (N, C), weight (V, C), targets int64 (N,), of which -1 is ignored. `counts` are those of
    cross_entropy_in_place. Returns the losses (N,), which have no gradient, and their mean.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, softcap, counts, needs_gradient):
        dtype = matmul_dtype(x)

        # The loss takes less time if it is computed for a few rows at a time, whose float32 logits,
        # 1.6 MB for each core, stay in the cache (docs/speed.md).
        tile = max(1, 400_000 // weight.size(0)) * torch.get_num_threads()

        with torch.autocast(x.device.type, enabled=False):
            losses = []
            dx = torch.empty_like(x)
            dw = None
            w = weight.to(dtype)
            x = x.to(dtype)

            chunks = zip(x.split(chunk), dx.split(chunk), targets.split(chunk), strict=True)
            for x_i, dx_i, targets_i in chunks:
                logits = x_i @ w.t()                                            # (n, V)
                tiles = zip(logits.split(tile), targets_i.split(tile), strict=True)
                for rows, targets_of_rows in tiles:
                    losses.append(cross_entropy_in_place(rows, targets_of_rows, softcap, counts))

                if needs_gradient:
                    gradient = logits           # cross_entropy_in_place has overwritten them
                    dx_i.copy_(gradient @ w)
                    dw_i = gradient.t() @ x_i                                   # (V, C)
                    if dw is None:
                        dw = dw_i.to(weight.dtype)
                    else:
                        dw.add_(dw_i)
                    del gradient
                del logits, rows        # otherwise they would be kept until the next are allocated

            # The mean is taken last: dx and dw are still those of the sum, because the gradients of
            # the mean, divided by N, could be too small for float16.
            scale = 1 / (targets >= 0).sum().clamp(min=1)
            if needs_gradient:
                ctx.save_for_backward(dx, dw, scale)
            losses = torch.cat(losses)
            ctx.mark_non_differentiable(losses)
            return losses, losses.sum() * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _, g):
        dx, dw, scale = ctx.saved_tensors
        factor = g * scale
        # dw is overwritten, as nothing needs it again: autograd refuses a second backward.
        return dx * factor, dw.mul_(factor), None, None, None, None, None


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    softcap: float = 0.0,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ChunkedCrossEntropy, with gradients where torch computes gradients."""
    needs_gradient = torch.is_grad_enabled()
    return ChunkedCrossEntropy.apply(x, weight, targets, chunk, softcap, counts, needs_gradient)
