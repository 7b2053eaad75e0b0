import json
import os

import pytest
import torch
from conftest import small_config, waves
from safetensors.torch import load_file, save_file

from escrag_min.model import checkpoint
from escrag_min.qwen2 import Qwen2

TOKENS = torch.tensor([[3, 17, 42, 9]])


def saved(tmp_path, tie=False, name="model", **raw):
    model = waves(Qwen2(small_config(tie, **raw)))
    model.save_pretrained(tmp_path / name)
    return model, tmp_path / name


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


@pytest.mark.parametrize("tie", [True, False])
def test_save_and_load_again(tmp_path, tie):
    model, folder = saved(tmp_path, tie)
    again = Qwen2.from_pretrained(folder)
    torch.testing.assert_close(again.logits(again(TOKENS)), model.logits(model(TOKENS)), atol=0, rtol=0)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
    assert all(p.requires_grad for p in again.parameters())


def test_tied_weights_are_written_once_and_reload_tied_case29(tmp_path):
    _, folder = saved(tmp_path, tie=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    again = Qwen2.from_pretrained(folder)
    with torch.no_grad():
        again.model.embed_tokens.weight[5] = 7.0
    assert (again.lm_head.weight[5] == 7.0).all()


def test_tied_and_untied_heads_case30(tmp_path):
    _, folder = saved(tmp_path, tie=True)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    again = Qwen2.from_pretrained(folder)                                           # a redundant head: accepted, stays tied
    assert again.lm_head.weight is again.model.embed_tokens.weight
    _, folder = saved(tmp_path, tie=False, name="untied")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        Qwen2.from_pretrained(folder)


def test_missing_and_unexpected_weights_are_named_case34(tmp_path):
    _, folder = saved(tmp_path)
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.bias"
    save_file({k: v for k, v in whole.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is missing"):
        Qwen2.from_pretrained(folder)
    save_file({**whole, "model.layers.0.self_attn.o_proj.bias": torch.zeros(24)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected weight model.layers.0.self_attn.o_proj.bias"):
        Qwen2.from_pretrained(folder)
    save_file({**whole, name: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"k_proj.bias has shape \[3\], config.json implies \[12\]"):
        Qwen2.from_pretrained(folder)


@pytest.mark.parametrize("dialect", [
    {"rope_theta": 1e6, "torch_dtype": "bfloat16"},
    {"rope_theta": 1000000, "rope_scaling": None, "dtype": "bfloat16"},
    {"rope_theta": "absent", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": None}])
def test_config_dialects_case32(tmp_path, dialect):
    _, folder = saved(tmp_path)
    edit_config(folder, **dialect)
    assert Qwen2.from_pretrained(folder).config.rope_theta == 1e6


@pytest.mark.parametrize("change, words", [
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaling 'yarn'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "scaling 'linear'"),
    ({"model_type": "llama"}, "model_type is 'llama'"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"hidden_size": "absent"}, "'hidden_size' is missing")])
def test_what_would_be_computed_wrong_is_refused_case32(tmp_path, change, words):
    _, folder = saved(tmp_path)
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=words):
        Qwen2.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_file_dtype_loads_into_float32(tmp_path, dtype):
    model = waves(Qwen2(small_config()))
    model.save_pretrained(tmp_path / "m", dtype=dtype)
    assert json.loads((tmp_path / "m/config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    again = Qwen2.from_pretrained(tmp_path / "m")
    for a, b in zip(again.parameters(), model.parameters()):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.to(dtype).float(), atol=0, rtol=0)


def test_large_models_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8000)
    model, folder = saved(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    again = Qwen2.from_pretrained(folder)
    torch.testing.assert_close(again(TOKENS), model(TOKENS), atol=0, rtol=0)
    os.remove(folder / sorted(set(index["weight_map"].values()))[0])
    with pytest.raises(FileNotFoundError, match="model-00001-of"):
        Qwen2.from_pretrained(folder)


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    model, folder = saved(tmp_path)
    before = (folder / "model.safetensors").read_bytes()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
    monkeypatch.setattr(checkpoint, "write_json", interrupted)      # after the weights, before config.json
    waves(model, scale=0.1)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_over_a_model_replaces_it(tmp_path, tiny):
    model, folder = saved(tmp_path)
    waves(model, scale=0.1).save_pretrained(folder, tokenizer_from=tiny)
    torch.testing.assert_close(Qwen2.from_pretrained(folder)(TOKENS), model(TOKENS), atol=0, rtol=0)
    assert (folder / "tokenizer.json").exists() and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_tokenizer_of_a_hub_id_is_saved_too(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tiny))
    Qwen2.from_pretrained("someone/tiny").save_pretrained(tmp_path / "model", tokenizer_from="someone/tiny")
    assert (tmp_path / "model/tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_wrong_paths_and_truncated_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        Qwen2.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        Qwen2.from_pretrained(tmp_path)
    _, folder = saved(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        Qwen2.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        Qwen2.from_pretrained(folder)
