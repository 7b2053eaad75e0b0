"""The memory plan against what is counted: parameters, saved activations, torch's FSDP memory tracker."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, small_config, waves

import train_grpo
import train_rm
import train_sft
from escrag_min.packing import pack
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import RewardModel
from escrag_min.runtime import memory
from escrag_min.runtime.presets import PRESETS, parse_run

SCRIPTS = {"train_sft": train_sft, "train_rm": train_rm, "train_grpo": train_grpo}


@pytest.mark.parametrize("size, billions", [("0.5B", 0.494), ("1.5B", 1.544), ("3B", 3.086), ("7B", 7.616), ("14B", 14.77),
                                            ("32B", 32.76), ("72B", 72.71)])
def test_parameters_of_the_published_models(size, billions):
    config = memory.published(size)
    assert memory.parameters(config) / 1e9 == pytest.approx(billions, abs=0.006)
    for cls in (Qwen2, RewardModel):
        with torch.device("meta"):
            model = cls(config)
        assert sum(p.numel() for p in model.parameters()) == memory.parameters(config, reward=cls is RewardModel)


@pytest.mark.parametrize("kv_heads, autocast", [(2, False), (4, False), (4, True)])
def test_activations_are_those_that_autograd_keeps(kv_heads, autocast):
    """autocast: bf16 on one GPU, here on a CPU; its copies of the weights are counted elsewhere."""
    config = small_config(kv_heads=kv_heads)
    model = waves(Qwen2(config))
    trees = [(list(range(20)), [[5] * 6, [6] * 9]), (list(range(12)), [[5] * 11])]
    packed = pack(trees)
    branched = sum(len(prompt) * len(branches[1:]) for prompt, branches in trees)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}

    def saved(layers):
        kept = {}

        def count(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tuple(sorted(tensor.shape)) not in shapes:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)       # the tensor too, so that no address is used twice
            return tensor
        model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:layers])
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(packed.tokens[None], mask=packed)
        return sum(size for size, _ in kept.values())
    block = saved(2) - saved(1)     # what one more block keeps
    planned = memory.block_activations(config, len(packed.tokens), 2 if autocast else 4, branched, residual=4)
    assert planned == pytest.approx(block, rel=0.15)


@pytest.mark.parametrize("script, size, ranks", [("train_rm", "7B", 2), ("train_sft", "7B", 4)])
def test_the_plan_agrees_with_torchs_fsdp_memory_tracker(script, size, ranks):
    """Shapes of the paper, four layers of them, bf16: peak of the update within 5%."""
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch cannot trace FSDP on a CPU")
    result = subprocess.run([sys.executable, "tests/track_memory.py", script, size, str(ranks), "8192", "4"], cwd=ROOT,
                            env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["planned"] == pytest.approx(found["tracked"], rel=0.05)


def test_every_preset_fits_80_gb_and_prints_a_plan(capsys):
    for script, presets in PRESETS.items():
        for name, preset in presets.items():
            if not preset.size:
                continue
            SCRIPTS[script].main(["--preset", name, "--plan"])
            peak = float(capsys.readouterr().out.strip().splitlines()[-1].split()[-1])
            assert 10 < peak < 80, name
            SCRIPTS[script].main(["--preset", name, "--plan", "--ranks", str(2 * preset.ranks)])
            assert float(capsys.readouterr().out.strip().splitlines()[-1].split()[-1]) < peak


def test_a_plan_by_hand():
    """3B on two ranks: 3.086e9 parameters · 4 / 2 = 6.17 GB of weights, twice that of moments, 6.17 of gradients; the policy
    gathered in bf16 6.17; 8 prompts a rank of 3072 tokens and 8 · 512 new ones, 57344 · 36 layers · 2 · 2 heads · 128 · 2 bytes
    = 2.11 GB."""
    args = train_grpo.Args(**{name: value for name, (value, _) in PRESETS["train_grpo"]["grpo-3b"].options.items()})
    phases = memory.plan_items("train_grpo", args, 2, memory.published("3B"), memory.published("7B"))
    sizes = {what: size / 1e9 for items in phases.values() for what, size in items}
    assert sizes["weights, float32"] == sizes["gradients, float32"] == pytest.approx(6.172, abs=0.001)
    assert sizes["AdamW moments, float32"] == pytest.approx(12.344, abs=0.001)
    assert sizes["gathered policy"] == pytest.approx(6.172, abs=0.001)
    assert dict(phases["sampling"])["keys and values"] / 1e9 == pytest.approx(2.114, abs=0.001)
    assert sizes["reward model, frozen"] == pytest.approx(7.07, abs=0.01)
    # the drafts of train_sft.py --retrieve: 28 prompts of 2048 + 256 tokens in 65536; 28 · 2304 · 36864 bytes
    phases = memory.plan_items("train_sft", train_sft.Args(retrieve=3), 2, memory.published("3B"))
    assert dict(phases["sampling of drafts"])["keys and values"] / 1e9 == pytest.approx(2.378, abs=0.001)


@pytest.mark.parametrize("script, name, shrink", [
    ("train_sft", "sft-3b", ("--batch-size", "4")), ("train_sft", "sft-7b", ("--batch-size", "4")),
    ("train_rm", "rm-7b", ("--batch-size", "4")),
    ("train_grpo", "grpo-3b", ("--prompts-per-step", "2", "--max-new-tokens", "12", "--max-prompt", "1500")),
    ("train_grpo", "grpo-7b", ("--prompts-per-step", "2", "--max-new-tokens", "12", "--max-prompt", "1500"))])
def test_every_preset_runs_through_on_a_tiny_model(tiny, tiny_reward, tmp_path, capsys, script, name, shrink):
    reward = ["--reward-model", str(tiny_reward)] if script == "train_grpo" else []
    SCRIPTS[script].main(["--preset", name, "--model", str(tiny), *reward, "--out", str(tmp_path / "run"), "--steps", "2",
                          "--limit", "30", *shrink])
    said = capsys.readouterr().out
    assert "(paper C)" in said and "given; the preset has" in said and "ours" in said
    options = json.loads((tmp_path / "run/config.json").read_text())["options"]
    assert options["checkpoint_blocks"] and options["tokens_per_batch"] == 8192 and options["keep_best"] and options["steps"] == 2
    assert (tmp_path / "run/model").exists() and (tmp_path / "run/best").exists()


def test_epochs_asked_for_win_over_a_presets_steps():
    assert parse_run("train_sft", train_sft.Args, "", ["--preset", "tiny"]).steps == 4
    assert parse_run("train_sft", train_sft.Args, "", ["--preset", "tiny", "--epochs", "7"]).steps is None


def test_a_plan_of_a_folder_and_of_nothing(tiny, capsys):
    train_sft.main(["--model", str(tiny), "--plan"])
    assert "memory in GB of each of 1 rank" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--plan: --model .none. is not a folder here"):
        train_sft.main(["--plan"])
