"""The run's folder: what a checkpoint restores, what is survived, what ends a run (one process; more ranks in runtime/test_distributed.py)."""
import json
import math
import os
import signal
from dataclasses import dataclass

import pytest
import torch
from conftest import small_config, waves

import train_sft
from escrag_min.model.export import export
from escrag_min.qwen2 import Qwen2
from escrag_min.runtime import runs
from escrag_min.runtime.optimizer import make_optimizer, update
from escrag_min.runtime.runs import Run, RunArgs


@dataclass
class Args(RunArgs):
    save_every: int = 1


def started(out, resume=False, **options):
    run = Run("test", Args(out=str(out), resume=resume, **options), ("held_out_loss", min))
    model = waves(Qwen2(small_config(tie=True)))
    run.start(model, make_optimizer(model, 1e-2))
    return run


def take_step(run, step, **metrics):
    run.model(torch.tensor([[1, 2, 3 + step]])).square().mean().backward()
    norm, skipped = update(run.model, run.optimizer, 1e-2)
    run.log({"step": step + 1, "loss": norm, "skipped": int(skipped), **metrics}, show="loss")


def train(run, steps):
    for step in run.steps(steps, "test"):
        take_step(run, step)
    return run


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def steps_logged(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def names(out):
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def test_a_checkpoint_restores_weights_moments_and_step(tmp_path, capsys):
    straight = train(started(tmp_path / "a"), 5)
    train(started(tmp_path / "b"), 4)
    assert names(tmp_path / "b") == ["latest", "step-000003", "step-000004"]
    assert os.readlink(tmp_path / "b/checkpoints/latest") == "step-000004"
    run = started(tmp_path / "b", resume=True)
    assert run.finished == 4 and "resuming" in capsys.readouterr().out and steps_logged(tmp_path / "b") == [1, 2, 3, 4]
    train(run, 5)
    assert torch.equal(weights(run), weights(straight)) and steps_logged(tmp_path / "b") == [1, 2, 3, 4, 5]
    assert run.rows == straight.rows


def test_the_last_step_has_a_checkpoint_so_that_a_finished_run_asked_again_stays_as_it_is(tmp_path):
    run = train(started(tmp_path, save_every=100), 3)
    again = train(started(tmp_path, save_every=100, resume=True), 3)
    assert names(tmp_path) == ["latest", "step-000003"] and steps_logged(tmp_path) == [1, 2, 3]
    assert again.finished == 3 and torch.equal(weights(again), weights(run)) and again.rows == run.rows


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    train(started(tmp_path), 2)

    def stale(folder):
        raise OSError(116, "Stale file handle")
    monkeypatch.setattr(runs, "checksums", stale)
    with pytest.raises(OSError, match="Stale"):
        started(tmp_path, resume=True)
    monkeypatch.undo()
    assert started(tmp_path, resume=True).finished == 2


@pytest.mark.parametrize("damage", ["truncated", "one byte", "missing", "no state"])
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_taken_case28(tmp_path, capsys, damage):
    straight = train(started(tmp_path), 4)
    newest = tmp_path / "checkpoints/step-000004"
    file = newest / ("state.json" if damage == "no state" else "__0_0.distcp")
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:len(content) // 2])
    elif damage == "one byte":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    run = started(tmp_path, resume=True)
    assert run.finished == 3 and "step-000004 is not complete" in capsys.readouterr().out
    assert torch.equal(weights(train(run, 4)), weights(straight))
    assert names(tmp_path) == ["latest", "step-000003", "step-000004"]          # written again, over the damaged one
    assert started(tmp_path, resume=True).finished == 4


def test_a_damaged_checkpoint_takes_no_place_among_those_kept(tmp_path):
    train(started(tmp_path), 4)
    (tmp_path / "checkpoints/step-000004/.metadata").unlink()
    run = started(tmp_path, resume=True, keep_last=1)
    assert run.finished == 3
    assert names(tmp_path) == ["latest", "step-000003", "step-000004.damaged"] and run.newest().name == "step-000003"
    train(run, 5)
    assert names(tmp_path) == ["latest", "step-000005"]


def test_no_whole_checkpoint_means_the_start(tmp_path, capsys):
    train(started(tmp_path), 1)
    (tmp_path / "checkpoints/step-000001/.metadata").unlink()
    run = started(tmp_path, resume=True)
    assert run.finished == 0 and "has no checkpoint yet" in capsys.readouterr().out and steps_logged(tmp_path) == []
    assert torch.equal(weights(run), torch.cat([p.detach().flatten() for p in waves(Qwen2(small_config(tie=True))).parameters()]))


def test_a_full_disk_leaves_the_earlier_checkpoint_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    run = started(tmp_path)
    real, calls = runs.save_state, []

    def full_at_two(tensors, folder):
        real(tensors, folder)
        calls.append(folder)
        if len(calls) >= 2:
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(runs, "save_state", full_at_two)
    train(run, 3)
    assert "step-000002 could not be written" in capsys.readouterr().out and names(tmp_path) == ["latest", "step-000001"]
    assert started(tmp_path, resume=True).finished == 1


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    train(started(tmp_path), 3)
    for rest in ("checkpoints/step-000009.part", "checkpoints/step-000001.gone", "model.tmp-abc"):
        (tmp_path / rest).mkdir()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    started(tmp_path, resume=True)
    assert names(tmp_path) == ["latest", "step-000002", "step-000003"] and not list(tmp_path.glob("*.tmp-*"))
    assert steps_logged(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_finished_steps_and_ends_the_run(tmp_path, capsys, number):
    straight = train(started(tmp_path / "a"), 4)
    run = started(tmp_path / "b", save_every=100)
    with pytest.raises(SystemExit) as stop:
        for step in run.steps(4, "test"):
            take_step(run, step)
            if step == 1:
                os.kill(os.getpid(), number)
    assert stop.value.code == 128 + number and names(tmp_path / "b") == ["latest", "step-000002"]
    assert "after 2 finished steps" in capsys.readouterr().out
    assert torch.equal(weights(train(started(tmp_path / "b", resume=True), 4)), weights(straight))


def test_a_signal_within_a_step_ends_long_work_and_undoes_the_step(tmp_path):
    run = started(tmp_path)
    with pytest.raises(SystemExit):
        for step in run.steps(4, "test"):
            if step == 2:       # in the middle of a rollout, and before it, with a gradient begun
                assert run.unless_stopped(lambda: os.kill(os.getpid(), signal.SIGTERM) or signal.pause()) is None
                assert run.unless_stopped(lambda: 1) is None
                run.stop_if_asked()
            take_step(run, step)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"] and steps_logged(tmp_path) == [1, 2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL       # as it was before


def test_three_skipped_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(tmp_path):
    run = started(tmp_path)
    with pytest.raises(ValueError, match="3 steps in a row had no finite loss.*last good checkpoint is .*step-000004"):
        for step in run.steps(20, "test"):
            if step in (1, 4, 5, 6):
                run.log({"step": step + 1, "loss": math.nan, "skipped": 1}, show="loss")
            else:
                take_step(run, step)
    assert [json.loads(line)["loss"] is None for line in (tmp_path / "metrics.jsonl").read_text().splitlines()].count(True) == 4


def test_the_count_of_skipped_steps_survives_a_signal(tmp_path):
    run = started(tmp_path)
    with pytest.raises(SystemExit):
        for step in run.steps(3, "test"):
            run.log({"step": step + 1, "loss": math.nan, "skipped": 1}, show="loss")
            os.kill(os.getpid(), signal.SIGTERM)
    assert started(tmp_path, resume=True).skipped == 1


def test_the_best_value_survives_a_resume(tmp_path):
    run = started(tmp_path)
    for step in run.steps(4, "test"):
        metrics = {"step": step + 1, "held_out_loss": [2.0, 1.0, math.nan, 1.5][step]}
        assert run.improves(metrics) == (step < 2)
        take_step(run, step)
    run = started(tmp_path, resume=True)
    assert run.best == {"step": 2, "held_out_loss": 1.0} and not run.improves({"step": 4, "held_out_loss": 1.0})


def test_resume_starts_a_new_run_and_says_what_changed(tmp_path, capsys):
    run = started(tmp_path / "new", resume=True)
    assert run.finished == 0 and (tmp_path / "new/config.json").exists()
    started(tmp_path / "new", resume=True, lr=0.5)
    assert "--lr was 1e-05, is 0.5" in capsys.readouterr().out
    started(tmp_path / "new", resume=True, lr=0.5)
    assert "--lr was" not in capsys.readouterr().out               # said once, and kept
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["options"]["lr"] == 1e-5 and [r["options"] for r in config["resumed"]] == [{"lr": 0.5}]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run to go on with"):
        started(tmp_path / "other", resume=True)
    with pytest.raises(ValueError, match="not empty"):
        started(tmp_path / "new" if (tmp_path / "new/metrics.jsonl").exists() else tmp_path / "other")


def test_a_checkpoint_is_exported_as_a_model_folder(tmp_path, tiny):
    common = ["--model", str(tiny), "--steps", "3", "--save-every", "2", "--limit", "12", "--batch-size", "4"]
    train_sft.main([*common, "--out", str(tmp_path / "run")])
    export(tmp_path / "run/checkpoints/latest", tmp_path / "exported")
    model = Qwen2.from_pretrained(tmp_path / "exported")
    run = Run("train_sft", train_sft.Args(out=str(tmp_path / "run"), resume=True), ("held_out_loss", min))
    restored = Qwen2.from_pretrained(tiny)
    run.start(restored, make_optimizer(restored, 1e-2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters()))
    assert not torch.equal(model.lm_head.weight, Qwen2.from_pretrained(tiny).lm_head.weight)
    with pytest.raises(ValueError, match="exists; choose another name"):
        export(tmp_path / "run/checkpoints/latest", tmp_path / "exported")
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        export(tmp_path / "run", tmp_path / "other")


def test_a_full_disk_while_best_is_written_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")
    run = started(tmp_path, keep_best=True)
    monkeypatch.setattr(runs, "save_pretrained", full)
    run.save_best()
    assert "best could not be written ([Errno 28] No space left on device)" in capsys.readouterr().out
