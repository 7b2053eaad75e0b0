import math

import pytest
import torch
from conftest import small_config

import train_sft
from escrag_min.qwen2 import Qwen2
from escrag_min.runtime.args import option, parse
from escrag_min.runtime.optimizer import (
    batch_indices,
    check_batch,
    derived_seed,
    learning_rate,
    make_optimizer,
    step_generator,
    update,
)


def test_small_steps_need_float32_masters_case04():
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    model = torch.nn.ParameterList([weight])
    optimizer = make_optimizer(model, lr=1e-6)
    for _ in range(1000):
        weight.grad = torch.ones(1)
        update(model, optimizer, 1e-6, max_norm=1e9)
    assert weight.item() == pytest.approx(0.499, abs=2e-5)
    low = torch.tensor([0.5], dtype=torch.bfloat16)
    assert (low - 1e-6).item() == 0.5                                   # what a bf16 weight would do
    with pytest.raises(ValueError, match="float32 master"):
        make_optimizer(torch.nn.ParameterList([torch.nn.Parameter(low)]), 1e-6)


def test_weight_decay_is_for_matrices_only():
    groups = make_optimizer(Qwen2(small_config()), 1e-3, weight_decay=0.1).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])


def test_schedule_by_hand():
    assert [learning_rate(s, 10, 1.0, 4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(7, 10, 1.0, 4) == pytest.approx(0.55)          # half way: 0.1 + 0.45·(1 + cos(π/2))
    assert learning_rate(10, 10, 1.0, 4) == pytest.approx(0.1)
    assert learning_rate(0, 1, 1.0, 0) == pytest.approx(1.0)
    for steps in range(1, 60):          # a warmup that is no whole number of steps never overshoots
        assert max(learning_rate(s, steps, 1.0, 0.05 * steps) for s in range(steps)) <= 1.0


@pytest.mark.parametrize("gradient, loss", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_changes_nothing(gradient, loss, capsys):
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    model = torch.nn.ParameterList([weight])
    optimizer = make_optimizer(model, 0.1)
    weight.grad = torch.tensor([gradient])
    norm, skipped = update(model, optimizer, 0.1, 1.0, loss)
    assert skipped and weight.item() == 0.5 and weight.grad is None and not optimizer.state
    assert "step skipped" in capsys.readouterr().out


def test_every_record_once_an_epoch_and_batches_run_across_epochs():
    steps = [batch_indices(5, 4, step, seed=0) for step in range(5)]
    flat = sum(steps, [])
    assert [sorted(flat[i:i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 3, 4]] * 4
    assert flat[:5] != flat[5:10] and steps[1] == batch_indices(5, 4, 1, seed=0) != batch_indices(5, 4, 1, seed=1)


def test_random_streams_do_not_depend_on_the_process():
    assert derived_seed(0, "rollout", 3) == 1320416013433573303
    a, b = (torch.rand(3, generator=step_generator(0, 3, 1)) for _ in range(2))
    assert torch.equal(a, b)
    assert not any(torch.equal(a, torch.rand(3, generator=step_generator(0, *other))) for other in ((4, 1), (3, 0)))


def test_a_batch_that_does_not_divide_is_refused_with_valid_values_case43(monkeypatch):
    monkeypatch.setattr("escrag_min.runtime.optimizer.size", lambda: 3)
    check_batch("--batch-size", 6, "pairs")
    with pytest.raises(ValueError, match=r"--prompts-per-step 8 counts prompts \(not replies\) and must be a multiple of the 3 ranks, "
                                         "such as 6 or 9"):
        check_batch("--prompts-per-step", 8, "prompts (not replies)")
    with pytest.raises(ValueError, match="such as 3 or 6"):
        check_batch("--batch-size", 2, "pairs")


def test_identical_micro_batches_are_full_size_steps_case03(tiny):
    """Five records in batches of four: two steps, the second as large as the first though one record remained."""
    tree = ([5, 6, 7], [[8, 9]])
    model = Qwen2.from_pretrained(tiny)
    args = train_sft.Args(tokens_per_batch=5)

    def gradient(count):
        train_sft.batch_loss(model, [tree] * count, args, "cpu", train=True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        model.zero_grad()
        return norm
    assert len(batch_indices(5, 4, 1, 0)) == 4 and math.ceil(5 / 4) == 2
    assert gradient(4) == pytest.approx(gradient(1), rel=1e-5)


def test_micro_batches_of_any_size_give_one_gradient_case01_case02(tiny):
    trees = [([5, 6, 7], [[8, 9]]), ([10], [[11, 12, 13, 14, 15, 16]])]
    model = Qwen2.from_pretrained(tiny)

    def run(budget):
        model.zero_grad()
        loss = train_sft.batch_loss(model, trees, train_sft.Args(tokens_per_batch=budget), "cpu", train=True)
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])
    (one, gradient), (two, gradient_two) = run(100), run(7)
    assert one == pytest.approx(two, rel=1e-6)
    assert (gradient - gradient_two).norm() < 1e-5 * gradient.norm()


def test_options_come_from_a_dataclass(capsys):
    from dataclasses import dataclass

    @dataclass
    class Args:
        lr: float = option(1e-6, "peak (ours)")
        steps: int | None = option(None, "how many")
        keep: bool = option(True, "keep it")
        how: str = option("a", "which", ("a", "b"))
        group_size: int = option(8, "G")
    assert parse(Args, "d", []) == Args()
    assert parse(Args, "d", ["--lr", "3e-6", "--steps", "4", "--no-keep", "--how", "b", "--group-size", "2"]) == Args(3e-6, 4, False, "b", 2)
    for wrong in (["--group", "2"], ["--learning-rate", "1"], ["--steps", "x"], ["--how", "c"], ["stray"]):
        with pytest.raises(SystemExit) as stop:
            parse(Args, "d", wrong)
        assert stop.value.code == 2
    assert "--group" in capsys.readouterr().err
