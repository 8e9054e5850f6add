"""presets.py: which preset, with which flags, fineweb.py's last line names for a text."""
from pathlib import Path

import pytest

import frontier
from config import Config
from presets import PRESETS, SMALL_TEXT, next_command
from runtime.recipe import make_batch_schedule


@pytest.mark.parametrize("preset, count", [
    ("shakespeare", 32_767_999), ("small", 32_768_000), ("small", 10**9 - 1), ("gpt2", 10**9)])
def test_the_next_command_names_the_preset_for_so_many_training_tokens(preset, count):
    line = next_command(Path("d"), [10**5], [count - 1, 1])
    assert f"--preset {preset} " in line


# The batch of --preset shakespeare doubles after 204 steps, so that no run reads 313,344 to 419,840
# tokens: of those the nearer number is taken.
@pytest.mark.parametrize("count, expected, tolerance", [
    (120_000, 2, 0.02), (183_000, 2, 0.3), (184_000, 2, 0.3), (306_054, 2, 0.02), (10**6, 2, 0.02),
    (2 * 10**6, 1, 0.02)])
def test_the_next_command_has_the_steps_of_two_epochs_of_a_small_text_and_one_of_a_large(
        count, expected, tolerance):
    words = next_command(Path("d"), [10**5], [count]).split()
    max_steps = int(words[words.index("--max_steps") + 1])
    config = Config(**PRESETS["shakespeare"].flags | {"max_steps": max_steps})
    config.sequence_length = config.block_size
    schedule = make_batch_schedule(frontier.RECIPE, config, world_size=1)
    epochs = schedule.tokens_before(config.max_steps) / count
    assert epochs == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("count", [
    300, 5000, 40_000, 120_000, 200_000, 306_054, 450_000, 600_000, 10**6, 2 * 10**6, 10**7])
def test_a_run_of_the_next_command_validates_8_to_15_times_where_it_reads_forwards(count):
    words = next_command(Path("d"), [10**5], [count]).split()
    flags = dict(zip(words, words[1:], strict=False))
    values = PRESETS["shakespeare"].flags | {"max_steps": int(flags["--max_steps"])}
    values["val_every"] = int(flags.get("--val_every", values["val_every"]))
    config = Config(**values)
    config.sequence_length = config.block_size
    schedule = make_batch_schedule(frontier.RECIPE, config, world_size=1)

    sequences = schedule.tokens_before(config.max_steps) // 1024
    backward = 0
    if count <= SMALL_TEXT:
        backward = frontier.read_backwards(config, sequences, (count - 1) // 1024)
    steps = []
    for step in range(config.max_steps + 1):
        is_due = step % config.val_every == 0 or step == config.max_steps
        if is_due and schedule.tokens_before(step) > 1024 * backward:
            steps.append(step)
    assert 8 <= len(steps) <= 15


@pytest.mark.parametrize("count, words", [
    (5000, ["38 epochs", "docs/finetuning.md"]),         # of 4 sequences of 1,024 tokens
    (306_054, ["2 epochs", "the first of them backwards"]),
    (10**7, ["1 epoch of"]),
    (65_536_000, ["0.5 epochs"]),
    (10**10, ["1 epoch of"]),
])
def test_the_line_before_the_next_command_says_how_often_the_text_is_read(count, words):
    line, command = next_command(Path("d"), [10**5], [count]).splitlines()
    label, command = command.split(": ", 1)
    assert command.startswith("python train_gpt2.py")
    assert (label == "next") == (count != 5000)
    for word in words:
        assert word in line
    assert ("finetuning" in line) == (count == 5000)


def test_small_reads_its_text_once_at_most():
    flags = PRESETS["small"].flags
    assert flags["total_batch_size"] * flags["max_steps"] <= 32_768_000


@pytest.mark.parametrize("preset, count", [
    ("shakespeare", 10**6), ("small", 10**8), ("gpt2", 10**9)])
def test_a_sequence_and_its_last_target_fit_into_a_shard(preset, count):
    T = PRESETS[preset].flags.get("block_size", Config.block_size)
    assert "--block_size" not in next_command(Path("d"), [T + 1], [count])
    assert next_command(Path("d"), [T], [count]).endswith(f"--block_size {T // 2}")


def test_a_sequence_of_the_next_command_fits_into_small_shards_of_both_splits():
    words = next_command(Path("d"), [10**5], [300] * 1000).split()
    assert words[-2:] == ["--block_size", "256"]
    words = next_command(Path("d"), [300] * 100, [10**6]).split()
    assert words[-2:] == ["--block_size", "256"]


def test_a_short_last_shard_does_not_shorten_the_sequences():
    T = PRESETS["shakespeare"].flags["block_size"]
    line = next_command(Path("d"), [T + 1, 3], [10**6, 3])
    assert "--block_size" not in line
