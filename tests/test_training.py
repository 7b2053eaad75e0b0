import json
import math

import pytest
import torch
from conftest import small_config, waves

import train_sft
from escrag_min.args import option, parse
from escrag_min.qwen2 import Qwen2
from escrag_min.training import (batch_indices, derived_seed, learning_rate, load_checkpoint, log_metrics, make_optimizer,
                                 save_checkpoint, step_generator, update)


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


def test_a_gradient_that_is_not_finite_changes_nothing():
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    model = torch.nn.ParameterList([weight])
    optimizer = make_optimizer(model, 0.1)
    weight.grad = torch.tensor([math.nan])
    assert math.isnan(update(model, optimizer, 0.1)) and weight.item() == 0.5 and weight.grad is None


def test_every_record_once_an_epoch_and_batches_run_across_epochs():
    steps = [batch_indices(5, 4, step, seed=0) for step in range(5)]
    flat = sum(steps, [])
    assert [sorted(flat[i:i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 3, 4]] * 4
    assert flat[:5] != flat[5:10] and steps[1] == batch_indices(5, 4, 1, seed=0) != batch_indices(5, 4, 1, seed=1)


def test_random_streams_do_not_depend_on_the_process():
    assert derived_seed(0, "rollout", 3) == 1320416013433573303
    a, b = (torch.rand(3, generator=step_generator(0, 3)) for _ in range(2))
    assert torch.equal(a, b) and not torch.equal(a, torch.rand(3, generator=step_generator(0, 4)))


def test_identical_micro_batches_are_full_size_steps_case03(tiny):
    """Five records in batches of four: two steps, the second as large as the first though one record remained."""
    tree = ([5, 6, 7], [[8, 9]])
    model = Qwen2.from_pretrained(tiny)
    args = train_sft.Args(tokens_per_batch=5)

    def gradient(count):
        train_sft.batch_loss(model, [tree] * count, args, "cpu", backward=True)
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
        loss = train_sft.batch_loss(model, trees, train_sft.Args(tokens_per_batch=budget), "cpu", backward=True)
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])
    (one, gradient), (two, gradient_two) = run(100), run(7)
    assert one == pytest.approx(two, rel=1e-6)
    assert (gradient - gradient_two).norm() < 1e-5 * gradient.norm()


def test_checkpoints_restore_weights_moments_and_step_case28(tmp_path, capsys):
    def take_step(model, optimizer):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        update(model, optimizer, 1e-2)
    model = waves(Qwen2(small_config(tie=True)))
    optimizer = make_optimizer(model, 1e-2)
    for step in (1, 2, 3):
        take_step(model, optimizer)
        log_metrics(tmp_path, {"step": step})
        save_checkpoint(tmp_path, step, model, optimizer, None)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]

    def resumed():
        other = waves(Qwen2(small_config(tie=True)))
        moments = make_optimizer(other, 1e-2)
        return load_checkpoint(tmp_path, other, moments), other, moments
    step, other, moments = resumed()
    assert step == 3
    take_step(model, optimizer), take_step(other, moments)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
    # a truncated newest checkpoint: said, and the one before is taken
    weights = tmp_path / "checkpoints/step-000003/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert resumed()[0] == 2
    assert "step-000003 is not complete" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


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
