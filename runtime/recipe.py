"""What a recipe is, and how many tokens each step of a run has. It needs no torch."""
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.cli import UserError


@dataclass
class Recipe:
    """A model, and how it is trained: all in which one recipe differs from another.

    `config` is config.Config. Schedules keep no state of their own: a resumed run continues them
    exactly.
    """
    # The class of the model, a runtime.language_model.LanguageModel.
    model: type

    # (model, config) -> a list of optimizers, in which each parameter is once. The "lr" of each
    # group is its peak, which lr_scale multiplies.
    make_optimizers: Callable | None = None

    # (step, config) -> the factor by which every learning rate is multiplied.
    lr_scale: Callable | None = None

    # (step, config) -> the momentum of every group that has a "momentum", as Muon's have.
    momentum: Callable | None = None

    # (config) -> the batch schedule's divisors; see BatchSchedule.
    batch_divisors: Callable = lambda config: (1, 1, 1)

    # (text, schedule, model, config): before a run, sets what depends on the training text, a
    # TokenDataset. `schedule` is the BatchSchedule.
    look_at_text: Callable = lambda text, schedule, model, config: None

    # (model, step, loader): before each step, whatever else changes. `loader` is the TrainLoader.
    before_step: Callable = lambda model, step, loader: None

    # {flag: value} where this recipe's default is not that of Config. `rates` also win over a
    # preset, whose learning rates are for AdamW.
    defaults: dict = field(default_factory=dict)
    rates: dict = field(default_factory=dict)

    # Flags that are taken only with the recipes that list them here.
    own_flags: tuple[str, ...] = ()

    # (config) -> {flag: value}: what "auto" means in this recipe.
    automatic: Callable = lambda config: {}

    def set_others(self, step: int, run) -> None:
        """Sets what this recipe changes beside the learning rates. `run` is a train_gpt2.Run."""
        if self.momentum:
            momentum = self.momentum(step, run.config)
            for group in run.state.optimizer.groups():
                if "momentum" in group:
                    group["momentum"] = momentum
        self.before_step(run.state.model, step, run.loader)


class BatchSchedule:
    """How many tokens each step has, and how many came before it.

    The run's tokens are cut into three equal parts. With `divisors` (a, b, c) a step of the first
    part has total_batch_size / a tokens, of the second / b, of the third / c. The run has max_steps
    in any case, so larger divisors mean fewer tokens in all. Everything is computed from the number
    of a step: a run that resumes needs no count of its own.
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
        next_stages = self.stages[1:] + [(step, 0)]
        for (first_step, tokens), (end, _) in zip(self.stages, next_stages, strict=True):
            steps_done = min(step, end) - first_step
            before += tokens * max(0, steps_done)
        return before

    def tokens_left(self, step: int) -> int:
        return self.tokens_before(self.max_steps) - self.tokens_before(step)

    def first_step_after(self, tokens: int) -> int:
        """The first step before which so many tokens have been read, or max_steps."""
        return bisect_left(range(self.max_steps), tokens, key=self.tokens_before)

    def progress(self, step: int) -> float:
        """The share of the run's tokens that came before the step."""
        return self.tokens_before(step) / self.tokens_before(self.max_steps)

    def resume(self, step: int, tokens: int) -> None:
        """Shifts the count so that `step` begins after `tokens`, as the checkpoint recorded."""
        # With another --max_steps than before, the thirds have other steps. The offset keeps the
        # place in the data.
        self.offset += tokens - self.tokens_before(step)


def growing_batch(config) -> tuple[int, int, int]:
    """Divisors of --total_batch_size in the three thirds of a run, for Recipe.batch_divisors.

    A run of D tokens begins best with batches of sqrt(5 D) tokens (docs/lab-notes.md). So the first
    batch is halved, at most twice, while it is at least sqrt(2) times that.
    """
    divisors = (1, 1, 1)
    for smaller_at_first in ((2, 1, 1), (4, 2, 1)):
        # With smaller batches the same steps have fewer tokens: D is counted anew.
        schedule = BatchSchedule(config.total_batch_size, config.max_steps, divisors)
        best_first_batch = math.sqrt(5 * schedule.tokens_before(config.max_steps))
        if schedule.tokens(0) < math.sqrt(2) * best_first_batch:
            break

        # All of its sequences must be whole.
        if config.total_batch_size % (smaller_at_first[0] * config.sequence_length) != 0:
            break
        divisors = smaller_at_first
    return divisors


def make_batch_schedule(recipe: Recipe, config, world_size: int) -> BatchSchedule:
    """The schedule of a run. UserError if the processes cannot share each step equally."""
    # The number of processes is only checked here. It does not change how many tokens a step has.
    divisors = recipe.batch_divisors(config)
    unit = config.sequence_length * world_size * math.lcm(*divisors)
    total = config.total_batch_size
    if total % unit != 0:
        smaller = total // unit * unit
        nearest = f"{smaller} or {smaller + unit}" if smaller else f"{unit}"
        reason = f"{config.sequence_length} tokens per sequence x {world_size} process(es)"
        if max(divisors) > 1:
            reason += f" x {math.lcm(*divisors)}, because the first steps have a smaller batch"
        if world_size > 1:
            nearest = f"another number of processes, or {nearest}"
        raise UserError(f"--total_batch_size {total} must be a multiple of {unit} ({reason}): "
                        f"choose {nearest}")
    return BatchSchedule(total, config.max_steps, divisors)
