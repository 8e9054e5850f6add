"""check.py: each mistake, made here in this process, is named by its check; right models pass."""
import dataclasses
import math
import multiprocessing
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import check
import model
import train_gpt2
from model import GPT
from recipes import RECIPES
from speedrun import rotary_tables, rotate

TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=128)


@pytest.fixture
def use(monkeypatch):
    """use(cls): from now on the recipe gpt2 has this model."""
    def use_model(cls):
        monkeypatch.setitem(RECIPES, "gpt2", dataclasses.replace(RECIPES["gpt2"], model=cls))
    return use_model


@pytest.fixture
def lab(tmp_path):
    """lab(): a Lab of the recipe gpt2, as it is when this is called."""
    torch.set_num_threads(1)
    return partial(check.Lab, TINY, tmp_path)


def first_failure(lab, checks=check.FAST):
    """The name of the first check that fails; None if all are ok."""
    for one in checks:
        if check.outcome(one, lab) == "FAILED":
            return one.__name__
    return None


# ----------------------------------------------------------------------- right models

@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_pass(recipe, capsys):
    code = check.main(["--fast", f"--recipe={recipe}", "--n_embd=32", "--vocab_size=256"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert lines[-1] == f"{len(check.FAST)} of {len(check.FAST)} checks are ok"
    assert [line.split()[1] for line in lines if line.startswith("ok ")] == [
        one.__name__ for one in check.FAST]


class WithDropout(GPT):
    """As nanoGPT's: after the embedding, and an attribute for attention."""

    def __init__(self, config):
        super().__init__(config)
        self.drop = nn.Dropout(0.2)
        self.dropout = 0.1
        for block in self.transformer.h:
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.2))

    def hidden(self, idx, past=None):
        return F.dropout(self.drop(super().hidden(idx, past)), self.dropout, self.training)


class FrozenTable(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.wpe.weight.requires_grad_(False)


class WithRope(GPT):
    """Rotary tables in buffers that no checkpoint has, in place of learned positions."""

    def __init__(self, config):
        super().__init__(config)
        del self.transformer["wpe"]
        hs = config.n_embd // config.n_head
        cos, sin = rotary_tables(config.block_size, config.block_size, hs, torch.float32, "cpu")
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, idx, past=None):
        first = past.length if past else 0
        x = self.transformer.wte(idx[:, first:])
        T = x.size(1)
        tables = self.cos[first:first + T], self.sin[first:first + T]
        for block in self.transformer.h:
            x = x + self.rotary_attention(block.attn, block.ln_1(x), tables, past)
            x = x + block.mlp(block.ln_2(x))
        return self.transformer.ln_f(x)

    def rotary_attention(self, attn, x, tables, past):
        B, T, C = x.shape
        q, k, v = attn.c_attn(x).view(B, T, 3, attn.n_head, -1).unbind(2)
        q, k = rotate(q, *tables), rotate(k, *tables)
        if past is not None:
            k, v = past.append(attn, k, v)
        return attn.c_proj(model.attention(q, k, v, attn.kernel).flatten(2))


@pytest.mark.parametrize("cls, printed", [
    (WithDropout, "ok      dropout           the loss in train() depends on the seed"),
    (FrozenTable, "ok      export"),
    (WithRope, "none    export            the model's weights are not GPT-2's"),
])
def test_a_right_model_passes(cls, printed, use, lab, capsys):
    use(cls)
    assert first_failure(lab()) is None
    assert printed in capsys.readouterr().out


def test_what_had_nothing_to_check_is_neither_right_nor_wrong(use, lab, capsys):
    use(WithRope)
    assert check.check_all(lab(), [check.same_in_eval, check.export])
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 2 checks are ok, 1 ")


def test_a_model_that_is_random_in_any_case_is_not_compared(use, lab, capsys):
    class AlwaysDrops(GPT):
        def hidden(self, idx, past=None):
            return F.dropout(super().hidden(idx, past), 0.1, self.training)

    use(AlwaysDrops)
    assert first_failure(lab()) is None
    assert "none    micro_steps       the model is random" in capsys.readouterr().out
    assert first_failure(lab(), check.SLOW) is None


def test_a_trained_model_is_checked_by_its_own_weights(lab, tmp_path, capsys):
    """At 64 tokens, or block_size; what trains is a small model of its kind."""
    first = lab()
    run = first.run(out=str(tmp_path / "log"))
    run.loader.close()
    with torch.no_grad():
        run.state.model.lm_head.weight.mul_(30)
    train_gpt2.save(1, run)

    second = check.Lab({}, tmp_path, str(tmp_path / "log"))
    assert torch.equal(second.model().lm_head.weight, run.state.model.lm_head.weight)
    assert second.x.shape == (2, 16)
    assert first_failure(second) is None


# ----------------------------------------------------------------------- what is printed

def test_a_new_models_deviations_ties_and_frozen_tables_are_printed(use, lab):
    class Untied(FrozenTable):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head.weight = nn.Parameter(2 * self.transformer.wte.weight.detach())

    tied = check.describe(lab().new_model())
    use(Untied)
    untied = check.describe(lab().new_model())

    assert "    0.02  wte.weight, " in tied
    assert "   all 1  h.*.ln_1.weight, h.*.ln_2.weight, ln_f.weight" in tied
    assert "    tied  transformer.wte.weight = lm_head.weight" in tied
    assert "frozen" not in tied
    assert "    0.04  lm_head.weight" in untied
    assert "  frozen  transformer.wpe.weight" in untied
    assert "tied" not in untied


def test_the_exit_code_is_1_and_a_mistake_ends_what_it_makes_meaningless(use, capsys):
    use(SumOfTargets)
    assert check.main(["--fast", "--n_embd=32", "--vocab_size=256"]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Repair this first: the checks that follow would say nothing."
    [failed] = [i for i, line in enumerate(lines) if line.startswith("FAILED  loss_of_targets")]
    assert "In eval() the loss is the mean cross-entropy" in lines[failed + 1]


# ----------------------------------------------------------------------- attention

def edited_attention(hides, dim=-1):
    """model.attention with another mask: hides(query, key) says which scores, (nh, T, S), are -inf.

    A query and a key are positions, int64 (T, 1) and (S,); `dim` is the softmax's.
    """
    def attention(q, k, v, kernel="auto"):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = q @ k.mT / math.sqrt(q.size(3))                                # (B, nh, T, S)
        T, S = scores.shape[2:]
        key = torch.arange(S)
        query = key[S - T:, None]
        scores = scores.masked_fill(hides(query, key), -1e30)
        return (F.softmax(scores, dim=dim) @ v).transpose(1, 2)
    return attention


def one_head_without_mask(query, key):
    hidden = torch.stack((key > query, key > query))                            # (nh, T, S)
    hidden[1] = False
    return hidden


@pytest.mark.parametrize("hides, dim, name", [
    (lambda query, key: key > query + 1, -1, "past_alone"),
    (one_head_without_mask, -1, "past_alone"),
    (lambda query, key: key > query, -2, "past_alone"),
    (lambda query, key: (key > query) | (key == query - 5), -1, None),      # a second block sees it
    (lambda query, key: (key > query) | (key < query - 3), -1, "all_of_the_past"),
    (lambda query, key: (key > query) | ((key == 0) & (query > 0)), -1, "all_of_the_past"),
], ids=["one later", "in one head", "over queries", "a gap", "a window", "not the first"])
def test_a_mask(hides, dim, name, lab, monkeypatch):
    monkeypatch.setattr(model, "attention", edited_attention(hides, dim))
    assert first_failure(lab()) == name


def test_a_window_that_is_declared(use, lab, monkeypatch):
    class Windowed(GPT):
        window = 4

    use(Windowed)
    monkeypatch.setattr(model, "attention", edited_attention(
        lambda query, key: (key > query) | (key < query - 3)))
    assert first_failure(lab()) is None

    Windowed.window = 9         # two blocks of it see 7 tokens
    assert first_failure(lab()) == "all_of_the_past"


def test_one_of_two_kernels(lab, monkeypatch):
    formula = model.attention_by_formula
    monkeypatch.setattr(model, "attention_by_formula", lambda q, k, v, is_causal: formula(
        2 * q, k, v, is_causal))
    assert first_failure(lab()) == "kernels"


# ----------------------------------------------------------------------- other models

class BatchNorm(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.n_embd)

    def logits(self, x):
        if x.dim() == 3:
            return super().logits(self.norm(x.mT).mT)
        return super().logits(self.norm(x))


class SumOfTargets(GPT):
    def loss(self, x, targets):
        return super().loss(x, targets) * targets.numel()


class LossOfInputs(GPT):
    def forward(self, idx, targets=None):
        if targets is not None:
            targets = torch.where(targets < 0, -1, idx)
        return super().forward(idx, targets)


class HeadWithoutGradient(GPT):
    """It is tied, so that the embedding's gradient hides it."""

    def logits(self, x):
        return F.linear(x, self.lm_head.weight.detach())


class InNoOptimizer(GPT):
    def configure_optimizers(self, *args, **kwargs):
        optimizer = super().configure_optimizers(*args, **kwargs)
        groups = optimizer.param_groups
        groups[1]["params"] = [
            p for p in groups[1]["params"] if p is not self.transformer.ln_f.bias]
        return optimizer


class NeverMoves(GPT):
    def configure_optimizers(self, *args, **kwargs):
        optimizer = super().configure_optimizers(*args, **kwargs)
        optimizer.param_groups[1]["lr"] = 0.0
        return optimizer


class WideEmbedding(GPT):
    def init_weights(self):
        super().init_weights()
        self.transformer.wte.weight.data.mul_(10)


class PositionsRestart(GPT):
    def hidden(self, idx, past=None):
        first = past.length if past else 0
        x = self.transformer.wte(idx[:, first:])
        x = x + self.transformer.wpe(torch.arange(x.size(1)))
        for block in self.transformer.h:
            x = block(x, past)
        return self.transformer.ln_f(x)


class DropoutInEvaluation(GPT):
    def hidden(self, idx, past=None):
        return F.dropout(super().hidden(idx, past), 0.1)


class DropoutOff(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.drop = nn.Dropout(0.1)

    def hidden(self, idx, past=None):
        self.drop.eval()
        return self.drop(super().hidden(idx, past))


class LostBuffer(GPT):
    """A running scale, which training changes and a checkpoint does not have."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def hidden(self, idx, past=None):
        x = super().hidden(idx, past)
        scaled = x / self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().square().mean().sqrt()
        return scaled


class OnlyTheFirstHalf(GPT):
    """A loss in chunks that is another one, without the comparison of LanguageModel.faster."""

    def use_chunks(self, chunk=2048):
        own = self.loss
        self.loss = lambda x, targets: own(x[:, ::2], targets[:, ::2])
        return True


class StateInABlock(GPT):
    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp = Counting(block.mlp)


class Counting(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.calls = 0              # a buffer would be put back

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            self.calls += 1
        return self.mlp(x) * (1 + 0.01 * self.calls)


@pytest.mark.parametrize("cls, name, found", [
    (DropoutInEvaluation, "same_in_eval", "logits differ by "),
    (LossOfInputs, "loss_of_targets", ""),
    (WideEmbedding, "first_loss", ""),
    (OnlyTheFirstHalf, "loss_in_chunks", "gradients differ by "),
    (BatchNorm, "sequences_apart", "logits change by "),
    (PositionsRestart, "cache", "logits differ by "),
    (DropoutOff, "dropout", "1 modules have a rate above 0"),
    (HeadWithoutGradient, "gradients_arrive", "no gradient: lm_head.weight\n"),
    (InNoOptimizer, "optimizers", "transformer.ln_f.bias is in 0 optimizers\n"),
    (NeverMoves, "optimizers", "transformer.h.0.ln_1.weight does not move; "),
    (LostBuffer, "checkpoints", "logits differ by "),
])
def test_a_mistake_is_named_first_by_its_check(cls, name, found, use, lab, capsys):
    use(cls)
    assert first_failure(lab()) == name
    assert f"FAILED  {name:17} {found}" in capsys.readouterr().out


def test_a_recomputed_block_that_counts(use, lab):
    use(StateInABlock)
    assert first_failure(lab(), [check.recompute]) == "recompute"


def test_an_export_that_is_read_as_another_model(lab, monkeypatch):
    monkeypatch.setattr(check, "load_model", lambda source: lab().new_model())
    assert first_failure(lab(), [check.export]) == "export"


def test_rows_of_tokens_that_never_move_are_printed(use, lab, capsys):
    class WithoutLateTokens(GPT):
        def __init__(self, config):
            super().__init__(config)
            late = torch.arange(config.vocab_size)[:, None] >= 64
            self.lm_head.weight.register_hook(lambda grad: grad.masked_fill(late, 0))

        def configure_optimizers(self, max_lr, weight_decay, **settings):
            return super().configure_optimizers(max_lr, 0.0, **settings)

    one = lab()
    late = (one.x.unique() >= 64).sum().item()
    use(WithoutLateTokens)
    assert first_failure(one, [check.optimizers]) is None
    assert f"that do not move: {late} in the embedding, {late} in the head" in (
        capsys.readouterr().out)


# ----------------------------------------------------------------------- other loops

def test_targets_that_are_the_inputs_in_the_loader(lab, monkeypatch):
    next_batch = check.TrainLoader.next_batch

    def without_shift(loader):
        x, _ = next_batch(loader)
        return x, x

    monkeypatch.setattr(check.TrainLoader, "next_batch", without_shift)
    assert first_failure(lab(), [check.by_heart]) == "by_heart"


def test_a_rate_that_is_too_low(lab, monkeypatch):
    monkeypatch.setattr(train_gpt2, "begin_step", lambda step, run: 0.0)
    made = train_gpt2.make_adamw

    def too_low(edited_model, config):
        return made(edited_model, dataclasses.replace(config, max_lr=1e-6))

    monkeypatch.setattr(train_gpt2, "GPT2", dataclasses.replace(
        train_gpt2.GPT2, make_optimizers=too_low))
    assert first_failure(lab(), [check.by_heart]) == "by_heart"


def test_a_loss_that_is_a_sum_over_the_micro_batch(use, lab):
    use(SumOfTargets)
    assert first_failure(lab(), [check.micro_steps]) == "micro_steps"


def test_a_count_of_steps_that_is_not_saved(lab, monkeypatch):
    steps = []

    def fewer_and_fewer(step, progress, config):
        steps.append(step)
        return 1 / len(steps)

    monkeypatch.setattr(train_gpt2, "GPT2", dataclasses.replace(
        train_gpt2.GPT2, lr_scale=fewer_and_fewer))
    assert first_failure(lab(), [check.resume]) == "resume"


def divided_twice(given, source, path):
    """step_of_rank with gradients that the number of ranks divides once more."""
    make_train_state = train_gpt2.make_train_state

    def edited(config, recipe, edited_model, process):
        for p in edited_model.parameters():
            p.register_hook(lambda grad: grad / process.world_size)
        return make_train_state(config, recipe, edited_model, process)

    train_gpt2.make_train_state = edited
    check.step_of_rank(given, source, path)


def test_gradients_divided_by_the_ranks_twice(lab, monkeypatch):
    multiprocessing.set_forkserver_preload(["check"])
    monkeypatch.setattr(check, "step_of_rank", divided_twice)
    assert first_failure(lab(), [check.processes]) == "processes"


def fails_on_rank_1(given, source, path):
    import torch.distributed as dist

    train_step = train_gpt2.train_step

    def edited(step, run):
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")
        return train_step(step, run)

    train_gpt2.train_step = edited
    check.step_of_rank(given, source, path)


def test_an_error_of_one_process_is_told_with_its_line(lab, monkeypatch, capsys):
    multiprocessing.set_forkserver_preload(["check"])
    monkeypatch.setattr(check, "step_of_rank", fails_on_rank_1)
    assert first_failure(lab(), [check.processes]) == "processes"
    assert "2 processes: ValueError: not on this rank (test_check.py:" in capsys.readouterr().out


def test_a_graph_that_is_divided(use, lab, capsys):
    class Divided(GPT):
        def hidden(self, idx, past=None):
            x = super().hidden(idx, past)
            return x if x.sum().item() < 1e9 else 2 * x

    use(Divided)
    assert first_failure(lab(), [check.compiles]) == "compiles"
