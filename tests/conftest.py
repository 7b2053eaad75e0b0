"""What several test files share: a tiny model folder, real checkpoints where there are any, deterministic weights."""
import os
import sys
from pathlib import Path

import pytest
import torch

from escrag_min.chat import Tokenizer
from escrag_min.model.tiny import make_tiny_model
from escrag_min.qwen2 import Config, Qwen2
from escrag_min.reward import RewardModel

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "experiments")]

torch.set_num_threads(2)


def pytest_configure(config):
    config.addinivalue_line("markers", "parity: against transformers, skipped without it")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny checkpoint folder (vocabulary 512)."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, words=512)


@pytest.fixture(scope="session")
def tiny_reward(tiny, tmp_path_factory):
    """A reward model with the tiny checkpoint's body and a head of sine waves."""
    model = RewardModel.from_pretrained(tiny)
    waves(model.score)
    folder = tmp_path_factory.mktemp("models") / "tiny-reward"
    model.save_pretrained(folder, tiny)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return Tokenizer.from_pretrained(tiny)


@pytest.fixture
def model(tiny):
    return Qwen2.from_pretrained(tiny)


@pytest.fixture(scope="session")
def esconv():
    """Folder of ESConv's published split."""
    folder = SHARED / "data" / "esconv"
    if not folder.exists():
        pytest.skip(f"ESConv is not at {folder}")
    return folder


def real_model(name):
    """Folder of a real checkpoint (qwen05, smol) under $ESCRAG_MODELS, or skip."""
    folder = Path(os.environ.get("ESCRAG_MODELS", "models")) / name
    if not (folder / "config.json").exists():
        pytest.skip(f"no real checkpoint {name}: set ESCRAG_MODELS to a folder that holds it")
    return folder


def small_config(tie=False, vocab_size=61, kv_heads=2, **raw):
    values = {"vocab_size": vocab_size, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
              "tie_word_embeddings": tie, "max_position_embeddings": 512}
    return Config(**values, head_dim=6, raw={
        **values, "model_type": "qwen2", "hidden_act": "silu", "architectures": ["Qwen2ForCausalLM"], **raw})


def waves(module, scale=0.3):
    """Fill every parameter with a sine wave of its own: weights that any machine can make again, and no two alike."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(dict(module.named_parameters()).items())):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (0.37 + 0.011 * i) + i)
            base = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_((base + scale * wave).float().view(parameter.shape))
    return module


@pytest.fixture
def wave_model():
    return waves(Qwen2(small_config())).eval()
