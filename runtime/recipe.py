"""What a recipe is, and how the batch of a run grows."""
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.cli import UserError


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: everything in which the training of one recipe differs from another's.

    `progress` is the share of the run's tokens that came before a step, from 0 to 1. `config` is
    train_gpt2.Config. A schedule is a function of these alone, so a resumed run continues it exactly.
    """
    make_optimizers: Callable           # (model, config) -> list of optimizers with their largest rates
    lr_scale: Callable                  # (step, progress, config) -> factor of every learning rate
    momentum: Callable | None = None    # (progress, config) -> momentum of Muon; None: a constant one
    window: Callable | None = None      # (progress, config) -> tokens of the sliding window; None: no window
    defaults: dict = field(default_factory=dict)    # of the flags, where they differ from Config's
    own_flags: tuple[str, ...] = ()     # flags that only recipes that name them have
    automatic: Callable = lambda config, world_size: {}     # flags -> what "auto" means in this recipe


class BatchSchedule:
    """The number of sequences of every optimizer step, and where in the data the step begins.

    Training begins with batches of `initial` sequences: all of the `final` ones, a half or a quarter. They
    double after one and two thirds of the run's tokens until they are `final`. Everything is in closed form,
    so that a run that resumes needs no state of the data loader.
    """

    def __init__(self, initial: int, final: int, max_steps: int):
        self.max_steps = max_steps

        # A third of the tokens takes twice as many steps in batches of half the size.
        growth = final // initial
        divisors = [max(1, growth >> third) for third in range(3)]
        self.growths = []               # (step, how many sequences a batch has more from this step on)
        first_step, size = 0, 0
        for divisor in divisors:
            self.growths.append((round(first_step), final // divisor - size))
            first_step += max_steps * divisor / sum(divisors)
            size = final // divisor

        self.shift = 0                  # see `resume`

    def resume(self, step: int, sequences: int) -> None:
        """Lets `step` begin at this sequence, where the checkpoint says that training came to. That is
        somewhere else than planned if --max_steps or the first batch have changed since."""
        self.shift += sequences - self.sequences_before(step)

    def sequences(self, step: int) -> int:
        """How many sequences the step has."""
        return sum(added for first_step, added in self.growths if step >= first_step)

    def sequences_before(self, step: int) -> int:
        """How many sequences all earlier steps have: the number of the first sequence of this one."""
        counts = [added * max(0, step - first_step) for first_step, added in self.growths]
        return self.shift + sum(counts)

    def progress(self, step: int) -> float:
        """The share of the run's tokens that came before the step."""
        return self.sequences_before(step) / self.sequences_before(self.max_steps)


def batch_schedule(config, world_size: int) -> BatchSchedule:
    """The schedule of --initial_batch_size, --total_batch_size and --max_steps. UserError if a step does not
    divide into sequences, the same number for every process."""
    initial, final = config.initial_batch_size, config.total_batch_size
    if final not in (initial, 2 * initial, 4 * initial):
        raise UserError(f"--initial_batch_size {initial}: give --total_batch_size ({final}), "
                        "or a half or a quarter of it")

    T = config.sequence_length
    unit = T * world_size * (final // initial)
    units, rest = divmod(final, unit)
    if rest or not units:
        nearest = [str(count * unit) for count in (units, units + 1) if count]
        raise UserError(f"--total_batch_size {final} does not divide into sequences of {T} tokens on "
                        f"{world_size} process(es), beginning with --initial_batch_size {initial}: "
                        f"give {' or '.join(nearest)}")

    return BatchSchedule(initial // T, final // T, config.max_steps)


def divide_batch(sequences: int, world_size: int, batch_size: int) -> tuple[int, int]:
    """(B, n): each process computes its share of a step's sequences as n micro-batches of B sequences. B is
    the largest divisor of the share that is at most `batch_size`."""
    share = sequences // world_size
    B = min(batch_size, share)
    while share % B != 0:
        B -= 1
    return B, share // B
