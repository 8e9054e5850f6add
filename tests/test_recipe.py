"""runtime/recipe.py: how many tokens each step has, and the place of a step in the data."""
from types import SimpleNamespace

import pytest

from runtime.cli import UserError
from runtime.recipe import BatchSchedule, Recipe, make_batch_schedule

CONSTANT = (1, 1, 1)
DOUBLED = (2, 1, 1)             # half the batch in the first third
GROWING = (4, 2, 1)


@pytest.mark.parametrize("divisors, steps, sizes", [
    (CONSTANT, 5, [16, 16, 16, 16, 16]),
    (DOUBLED, 3, [8, 8, 16]),
    (DOUBLED, 8, [8, 8, 8, 8, 16, 16, 16, 16]),
    (GROWING, 1, [4]),
    (GROWING, 7, [4, 4, 4, 4, 8, 8, 16]),
    (GROWING, 10, [4, 4, 4, 4, 4, 4, 8, 8, 8, 16]),
    (GROWING, 14, [4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 16, 16]),
])
def test_each_batch_size_has_a_third_of_the_tokens(divisors, steps, sizes):
    schedule = BatchSchedule(16, steps, divisors)

    all_tokens = sum(sizes)
    before = 0
    for step, size in enumerate(sizes):
        assert schedule.tokens(step) == size
        assert schedule.tokens_before(step) == before
        assert schedule.tokens_left(step) == all_tokens - before
        assert schedule.progress(step) == pytest.approx(before / all_tokens)
        before += size
    assert schedule.tokens_before(steps) == all_tokens
    assert schedule.progress(steps) == 1


def test_after_its_last_step_a_schedule_goes_on_with_the_whole_batch():
    schedule = BatchSchedule(16, 7, GROWING)
    assert schedule.tokens(7) == 16
    assert schedule.tokens(99) == 16
    assert schedule.tokens_before(9) == schedule.tokens_before(7) + 2 * 16


def test_the_recipe_decides_how_the_batch_grows():
    config = SimpleNamespace(total_batch_size=64, sequence_length=8, max_steps=7)
    recipe = Recipe(None, None, batch_divisors=lambda config: GROWING)
    plain_recipe = Recipe(None, None)

    growing = make_batch_schedule(recipe, config, world_size=2)
    plain = make_batch_schedule(plain_recipe, config, world_size=2)

    sizes = [growing.tokens(step) for step in range(7)]
    assert sizes == [16, 16, 16, 16, 32, 32, 64]
    sizes = [plain.tokens(step) for step in range(7)]
    assert sizes == [64, 64, 64, 64, 64, 64, 64]


# ----------------------------------------------------------------------- resumed with other steps

# A run of 7 steps has 4, 4, 4, 4, 8, 8 and 16 tokens in them. A run of 21 steps has 12 steps of 4
# tokens, 6 of 8 and 3 of 16.
AFTER_FIVE_STEPS = 7 * 4 + 6 * 8 + 3 * 16


def test_a_longer_run_goes_on_after_the_tokens_that_it_has_seen():
    done = BatchSchedule(16, 7, GROWING)
    longer = BatchSchedule(16, 21, GROWING)

    longer.resume(5, done.tokens_before(5))

    assert longer.tokens_before(5) == 4 * 4 + 8
    assert longer.tokens(5) == 4
    assert longer.tokens_before(6) == 24 + 4
    assert longer.tokens_left(5) == AFTER_FIVE_STEPS


def test_the_progress_of_a_resumed_run_counts_the_tokens_that_it_has_seen():
    longer = BatchSchedule(16, 21, GROWING)
    longer.resume(5, 24)

    all_tokens = 24 + AFTER_FIVE_STEPS
    assert longer.progress(5) == pytest.approx(24 / all_tokens)
    assert longer.progress(6) == pytest.approx(28 / all_tokens)
    assert longer.progress(21) == 1


def test_a_run_that_resumes_twice_keeps_its_place():
    schedule = BatchSchedule(16, 21, GROWING)
    schedule.resume(5, 24)
    schedule.resume(5, 24)
    assert schedule.tokens_before(5) == 24
    schedule.resume(6, 30)
    assert schedule.tokens_before(6) == 30


def test_a_run_that_resumes_unchanged_keeps_its_schedule():
    whole = BatchSchedule(16, 21, GROWING)
    resumed = BatchSchedule(16, 21, GROWING)
    resumed.resume(13, whole.tokens_before(13))
    for step in range(22):
        assert resumed.tokens_before(step) == whole.tokens_before(step)
        assert resumed.progress(step) == whole.progress(step)


# ----------------------------------------------------------------------- what cannot be shared

@pytest.mark.parametrize("total, divisors, world_size, nearest", [
    (250, CONSTANT, 1, "248 or 256"),
    (8, CONSTANT, 2, "another number of processes, or 16"),   # a sequence for one rank only
    (40, CONSTANT, 3, "another number of processes, or 24 or 48"),
    (48, GROWING, 1, "32 or 64"),
    (16, GROWING, 1, "32"),
])
def test_a_batch_that_the_ranks_cannot_share_equally_is_refused(
        total, divisors, world_size, nearest):
    config = SimpleNamespace(total_batch_size=total, sequence_length=8, max_steps=7)
    recipe = Recipe(None, None, batch_divisors=lambda config: divisors)
    with pytest.raises(UserError, match=f"--total_batch_size {total} .*choose {nearest}$"):
        make_batch_schedule(recipe, config, world_size)
