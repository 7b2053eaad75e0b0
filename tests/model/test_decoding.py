"""Packed weights compute what the plain ones do, and leave nothing behind."""
import pytest
import torch
from conftest import small_config, waves

from escrag_min.model.decoding import pack_weights, packed_weights
from escrag_min.qwen2 import Qwen2
from escrag_min.runtime.optimizer import make_optimizer
from escrag_min.sampling import sample

TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("tie", [True, False])
@torch.no_grad()
def test_packed_weights_give_the_same_numbers(tie):
    model = waves(Qwen2(small_config(tie=tie)))
    hidden, logits = model(TOKENS), model.logits(model(TOKENS))
    with packed_weights(model):
        assert "logits" in vars(model) and "qkv" in vars(model.model.layers[0].self_attn)
        torch.testing.assert_close(model(TOKENS), hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.logits(hidden), logits, atol=1e-5, rtol=1e-5)
        with packed_weights(model):         # nothing more to do, and nothing undone at its end
            pass
        assert "logits" in vars(model)
    assert torch.equal(model(TOKENS), hidden) and not any("forward" in vars(m) or "qkv" in vars(m) for m in model.modules())


def test_training_after_sampling_is_seen_by_the_next_sampling():
    model = waves(Qwen2(small_config()))

    def greedy():
        return sample(model, [[1, 2, 3]], 1, 8, temperature=0)[0][0].tokens
    before = greedy()
    optimizer = make_optimizer(model, 0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert greedy() != before


def test_other_dtypes_and_errors_within_leave_the_model_as_it_was():
    model = waves(Qwen2(small_config())).bfloat16()
    undo = pack_weights(model)
    assert "logits" not in vars(model)
    undo()
    model.float()
    with pytest.raises(KeyError), packed_weights(model):
        raise KeyError
    assert "logits" not in vars(model)
