"""What a recipe is, and how many tokens each step of a run has."""
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.cli import UserError


@dataclass
class Recipe:
    """How a model is trained: everything in which the training of one recipe differs from another's.

    `config` is train_gpt2.Config, and `progress` is the share of the run's tokens that came before a
    step, from 0 to 1. Schedules depend on these alone, so a run that resumes continues them exactly.
    """
    # (model, config) -> a list of optimizers. Each of their groups has its largest learning rate.
    make_optimizers: Callable

    # (step, progress, config) -> the factor by which every learning rate is multiplied.
    lr_scale: Callable

    # (progress, config) -> the momentum of Muon.
    momentum: Callable | None = None

    # (progress, config) -> how many tokens attention looks back. None: the recipe has no window.
    window: Callable | None = None

    # (config) -> the batch schedule's divisors; see BatchSchedule.
    batch_divisors: Callable = lambda config: (1, 1, 1)

    # Defaults of flags, where they differ from Config's. `rates` are those that a preset does not
    # change: the learning rates of the presets are for AdamW.
    defaults: dict = field(default_factory=dict)
    rates: dict = field(default_factory=dict)

    # Flags that belong to this recipe, and to others that name them, too.
    own_flags: tuple[str, ...] = ()

    # (config) -> {flag: value}: what "auto" means in this recipe.
    automatic: Callable = lambda config: {}


class BatchSchedule:
    """How many tokens each step has, and how many came before it.

    The run's tokens have three thirds. With `divisors` (a, b, c) the steps of the first third have
    total_batch_size / a tokens, those of the second / b, those of the last / c. Both numbers have a
    closed form: the tokens of a step follow from its number alone, after any resume.
    """

    def __init__(self, total_batch_size: int, max_steps: int, divisors: tuple = (1, 1, 1)):
        self.max_steps = max_steps
        self.offset = 0                 # tokens; see `resume`

        # A third with batches of half the size has twice as many steps.
        self.stages = []                # (first step, tokens of a step), one for each third
        first_step = 0.0
        for divisor in divisors:
            self.stages.append((round(first_step), total_batch_size // divisor))
            first_step += max_steps * divisor / sum(divisors)

    def tokens(self, step: int) -> int:
        """The tokens of one step, on all processes together."""
        return [tokens for first_step, tokens in self.stages if step >= first_step][-1]

    def tokens_before(self, step: int) -> int:
        """The tokens of all earlier steps. For step max_steps these are the tokens of the run."""
        before = self.offset
        ends = [first_step for first_step, _ in self.stages[1:]] + [step]
        for (first_step, tokens), end in zip(self.stages, ends, strict=True):
            before += tokens * max(0, min(step, end) - first_step)
        return before

    def tokens_left(self, step: int) -> int:
        return self.tokens_before(self.max_steps) - self.tokens_before(step)

    def progress(self, step: int) -> float:
        """The share of the run's tokens that came before the step."""
        return self.tokens_before(step) / self.tokens_before(self.max_steps)

    def resume(self, step: int, tokens: int) -> None:
        """Makes `step` begin after `tokens` tokens, which a checkpoint says the run has seen.

        The schedule alone would say something else if --max_steps has changed since: the thirds
        then have other steps.
        """
        self.offset += tokens - self.tokens_before(step)


def make_batch_schedule(recipe: Recipe, config, world_size: int) -> BatchSchedule:
    """The schedule of a run. UserError if the processes cannot share each step equally."""
    divisors = recipe.batch_divisors(config)
    unit = config.sequence_length * world_size * max(divisors)
    total = config.total_batch_size
    if total % unit != 0:
        smaller = total // unit * unit
        nearest = f"{smaller} or {smaller + unit}" if smaller else f"{unit}"
        growth = ""
        if max(divisors) > 1:
            growth = f" (the first steps have 1/{max(divisors)} of it)"
        raise UserError(f"--total_batch_size {total} must be a multiple of {unit}: sequences of "
                        f"{config.sequence_length} tokens for each of {world_size} process(es)"
                        f"{growth}. Give {nearest}")
    return BatchSchedule(total, config.max_steps, divisors)
