"""What a recipe is, and how the batch of a run grows."""
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.cli import UserError


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: everything in which the training of one recipe differs from
    another's.

    `config` is train_gpt2.Config, and `progress` the share of the run's tokens that came before a
    step, from 0 to 1. Schedules are functions of these alone, so a resumed run continues them
    exactly.
    """
    make_optimizers: Callable           # (model, config) -> list of optimizers with their largest rates
    lr_scale: Callable                  # (step, progress, config) -> factor of every learning rate
    momentum: Callable | None = None    # (progress, config) -> Muon's momentum
    window: Callable | None = None      # (progress, config) -> tokens of the sliding window; None: no window
    defaults: dict = field(default_factory=dict)        # of the flags, where they differ from Config's
    rates: dict = field(default_factory=dict)           # such defaults that a preset does not change
    own_flags: tuple[str, ...] = ()     # flags that only the recipes that name them have
    automatic: Callable = lambda config, world_size: {}     # flags -> what "auto" means in this recipe


class BatchSchedule:
    """How many tokens each optimizer step has, and how many came before it.

    Training begins with batches of `initial` tokens: all of the `final` ones, a half or a quarter.
    They double after one and two thirds of the run's tokens until they are `final`. Everything is
    in closed form, so that a run that resumes needs no state of the data loader.
    """

    def __init__(self, initial: int, final: int, max_steps: int):
        self.max_steps = max_steps
        self.shift = 0                  # see `resume`

        # A third of the tokens takes twice as many steps in batches of half the size.
        growth = final // initial
        divisors = [max(1, growth >> third) for third in range(3)]
        self.additions = []             # (step, how many tokens a batch has more from this step on)
        first_step, size = 0, 0
        for divisor in divisors:
            self.additions.append((round(first_step), final // divisor - size))
            first_step += max_steps * divisor / sum(divisors)
            size = final // divisor

    def resume(self, step: int, tokens: int) -> None:
        """Lets `step` begin after so many tokens, to which training came according to the
        checkpoint. They are others than planned if --max_steps or the first batch have changed
        since."""
        self.shift += tokens - self.tokens_before(step)

    def tokens(self, step: int) -> int:
        return sum(added for first_step, added in self.additions if step >= first_step)

    def tokens_before(self, step: int) -> int:
        """The tokens of all earlier steps; of step max_steps those of the whole run."""
        planned = sum(added * max(0, step - first_step) for first_step, added in self.additions)
        return self.shift + planned

    def tokens_left(self, step: int) -> int:
        return self.tokens_before(self.max_steps) - self.tokens_before(step)

    def progress(self, step: int) -> float:
        """The share of the run's tokens that came before the step."""
        return self.tokens_before(step) / self.tokens_before(self.max_steps)


def batch_schedule(config, world_size: int) -> BatchSchedule:
    """The schedule of --initial_batch_size, --total_batch_size and --max_steps. UserError if the
    steps do not divide into sequences, as many for every process."""
    initial, final, T = config.initial_batch_size, config.total_batch_size, config.sequence_length
    if final not in (initial, 2 * initial, 4 * initial):
        raise UserError(f"--initial_batch_size {initial}: give --total_batch_size ({final}), "
                        "or a half or a quarter of it")

    unit = T * world_size * (final // initial)
    if final % unit != 0:
        below = final // unit * unit
        nearest = f"{below} or {below + unit}" if below else unit
        raise UserError(f"--total_batch_size {final} does not divide into sequences of {T} tokens on "
                        f"{world_size} process(es), beginning with --initial_batch_size {initial}: "
                        f"give {nearest}")
    return BatchSchedule(initial, final, config.max_steps)


def divide_batch(sequences: int, world_size: int, batch_size: int) -> tuple[int, int]:
    """(B, n): each process computes its share of a step's sequences as n micro-batches of B
    sequences. B is the largest divisor of the share that is at most `batch_size`."""
    share = sequences // world_size
    B = min(batch_size, share)
    while share % B != 0:
        B -= 1
    return B, share // B
