import json

import pytest
import torch
from conftest import ROOT, real_model, small_config, waves

from escrag_min.model.kvcache import KVCache
from escrag_min.packing import pack
from escrag_min.qwen2 import Body, Qwen2, RMSNorm, grouped_attention, rotary_table, rotate
from escrag_min.sampling import _prefill

TOKENS = torch.tensor([[3, 17, 42, 9, 9, 55, 0, 28, 31, 60, 12]])


@pytest.mark.parametrize("tie", [True, False])
def test_logits_equal_the_recorded_transformers(tie):
    recorded = json.loads((ROOT / "tests/fixtures/qwen2_logits.json").read_text())
    model = waves(Qwen2(small_config(tie)))
    logits = model.logits(model(torch.tensor([recorded["tokens"]])))[0]
    torch.testing.assert_close(logits, torch.tensor(recorded["tied" if tie else "untied"]), atol=1e-5, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("tie", [True, False])
def test_logits_equal_transformers(tie, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = waves(Qwen2(small_config(tie)))
    model.save_pretrained(tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    torch.testing.assert_close(model.logits(model(TOKENS)), theirs(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parity
def test_real_qwen05_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = real_model("qwen05")
    tokens = torch.tensor([[151644, 872, 198, 40, 2666, 7484, 13, 151645, 198]])
    with torch.no_grad():
        ours = Qwen2.from_pretrained(folder)
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(ours.logits(ours(tokens)), expected, atol=1e-4, rtol=0)
        ours.save_pretrained(tmp_path / "saved", folder, dtype=torch.bfloat16)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(again, expected, atol=0, rtol=0)        # the source was bf16: nothing is lost


def test_cached_decoding_equals_uncached(wave_model):
    whole = wave_model(TOKENS)
    cache, last = _prefill(wave_model, [TOKENS[0, :4].tolist()], 1, 7)
    parts = [last[None]] + [wave_model(TOKENS[:, i:i + 1], cache=cache) for i in range(4, 11)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, 3:], atol=1e-5, rtol=0)
    small = KVCache(wave_model.config, prompts=[1], copies=1, capacity=2)
    with pytest.raises(ValueError, match="3 tokens does not fit its capacity of 2"):
        for _ in range(3):
            wave_model(TOKENS[:1, :1], cache=small)


def test_rows_share_the_keys_of_their_prompt_and_leave(wave_model):
    """Prompts of 4, 2 and 6 tokens with two rows each; rows leave until groups are uneven and a prompt has none left."""
    prompts = [[3, 17, 42, 9], [5, 6], [8, 8, 8, 1, 2, 7]]
    cache, _ = _prefill(wave_model, prompts, 2, 8)
    rows = [p + [] for p in prompts for _ in range(2)]
    assert cache.trunk_keys[0].shape[0] == 3 and cache.keys[0].shape[:1] == (6,)
    everyone, gone = [True] * 6, ([True, True, False, True, True, False], [True, True, True, False], [True, False, True], [False, False])
    for step, alive in enumerate((everyone, *gone)):
        order = cache.keep(torch.tensor(alive)).tolist()
        rows = [rows[i] for i in order]
        if not rows:
            break
        new = torch.arange(len(rows)) + 10 * step
        hidden = wave_model(new[:, None], cache=cache)[:, 0]
        rows = [r + [t] for r, t in zip(rows, new.tolist())]
        torch.testing.assert_close(hidden, torch.stack([wave_model(torch.tensor([r]))[0, -1] for r in rows]), atol=1e-5, rtol=0)
    assert len(cache.prompts) == 2 and cache.rows == 0          # the second prompt's keys left with its last row


def test_a_prompt_with_one_row_is_its_beginning(wave_model):
    """Four prompts of 4, 1, 6 and 2 tokens, one row each; the first leaves, and the last moves into its place."""
    rows = [[3, 17, 42, 9], [5], [8, 8, 8, 1, 2, 7], [6, 4]]
    cache, _ = _prefill(wave_model, rows, 1, 3)
    assert cache.trunk_keys[0].shape[2] == 0 and cache.keys[0].shape == (4, 2, 6 + 3, 6)
    for alive in ([True] * 4, [False, True, True, True], [True, False, True]):
        rows = [rows[i] + [40 + i] for i in cache.keep(torch.tensor(alive)).tolist()]
        hidden = wave_model(torch.tensor([r[-1:] for r in rows]), cache=cache)[:, 0]
        torch.testing.assert_close(hidden, torch.stack([wave_model(torch.tensor([r]))[0, -1] for r in rows]), atol=1e-5, rtol=0)
    assert cache.prompts[cache.prompt].tolist() == [2, 6]


def test_rotary_positions_survive_in_bf16_models_case33():
    positions = torch.tensor([256, 257, 259, 511])
    cos, sin = rotary_table(positions, 8, 1e6)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(torch.atan2(sin[:, 4], cos[:, 4]), torch.remainder(positions + torch.pi, 2 * torch.pi) - torch.pi,
                               atol=1e-3, rtol=0)                # dimension 0 turns by one radian a position
    model = waves(Qwen2(small_config())).to(torch.bfloat16)
    at = [model(TOKENS[:, :2], torch.tensor([0, p])) for p in (256, 257)]
    assert not torch.equal(*at)


def test_attention_biases_matter_and_o_proj_has_none_case34(wave_model):
    before = wave_model(TOKENS)
    attention = wave_model.model.layers[0].self_attn
    assert attention.o_proj.bias is None
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        saved = projection.bias.detach().clone()
        projection.bias.data.fill_(1.0)
        assert not torch.allclose(wave_model(TOKENS), before, atol=1e-4)
        projection.bias.data.copy_(saved)


def test_query_heads_share_keys_in_order_case35():
    q = torch.randn(1, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 1, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    order = [0, 0, 1, 1]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, order], v[:, order], is_causal=True)
    torch.testing.assert_close(grouped_attention(q, k, v, causal=True), expected)
    two = grouped_attention(q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1), causal=True)
    torch.testing.assert_close(two, expected.repeat(2, 1, 1, 1))
    last = grouped_attention(q[:, :, -1:], k, v, mask=torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(last, expected[:, :, -1:])


def test_rotary_by_halves_case35():
    cos, sin = rotary_table(torch.tensor([1]), 4, 1e6)
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), cos, sin)     # dimension 0 turns with dimension 2
    torch.testing.assert_close(turned, torch.tensor([[0.5403023, 0.0, 0.8414710, 0.0]]))


def test_rms_norm_by_hand():
    norm = RMSNorm(2, 0.0)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5 ** 0.5)


def test_checkpointed_blocks_change_nothing(wave_model):
    def gradient():
        wave_model.zero_grad()
        wave_model(TOKENS).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in wave_model.model.parameters()])
    plain = gradient()
    wave_model.model.checkpoint_blocks = True
    torch.testing.assert_close(gradient(), plain)


def test_a_pack_needs_its_own_tokens(wave_model):
    with pytest.raises(ValueError, match=r"\[1, 2\], got \[1, 11\]"):
        wave_model(TOKENS, mask=pack([([1], [[2]])]))


@pytest.mark.parametrize("size, hidden, layers, heads, kv, inner, tie, billions", [
    ("0.5B", 896, 24, 14, 2, 4864, True, 0.494), ("1.5B", 1536, 28, 12, 2, 8960, True, 1.544),
    ("3B", 2048, 36, 16, 2, 11008, True, 3.086), ("7B", 3584, 28, 28, 4, 18944, False, 7.616),
    ("14B", 5120, 48, 40, 8, 13824, False, 14.770), ("32B", 5120, 64, 40, 8, 27648, False, 32.764),
    ("72B", 8192, 80, 64, 8, 29568, False, 72.706)])
def test_every_published_size_has_its_published_number_of_parameters(size, hidden, layers, heads, kv, inner, tie, billions):
    vocabulary = 151936 if hidden < 3584 else 152064
    config = small_config(tie)
    config.vocab_size, config.hidden_size, config.num_hidden_layers = vocabulary, hidden, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv, hidden // heads
    config.intermediate_size = inner
    with torch.device("meta"):
        model = Qwen2(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert isinstance(model.model, Body)
