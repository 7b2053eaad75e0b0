"""Qwen-2.5 (arXiv 2412.15115), the policy and the body of the reward model: a decoder with RMSNorm, rotary positions,
grouped-query attention with q/k/v bias, and SwiGLU. Parameter names are those of the published checkpoints.

    x = x + W_o · Attention(rotary(W_q n + b_q), rotary(W_k n + b_k), W_v n + b_v),   n = RMSNorm(x)
    x = x + W_down · (SiLU(W_gate n) * W_up n),                                       n = RMSNorm(x)

Shapes: B rows, T tokens, H hidden, Q query heads, K key/value heads, D = head dimension, S keys, V vocabulary.
Query head q reads key head q // (Q/K): with Q=4, K=2 the order is [0, 0, 1, 1].

`forward` ends at the hidden states; `logits` turns those one wants into scores. What a token may attend to is one of:
mask None (causal), a bool[T,T], or a Packed (packing.py: prompts with branches, attention tree by tree); while sampling, what
a KVCache holds (kvcache.py).
"""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from escrag_min.logprob import token_logprobs
from escrag_min.model.gradients import autocast, gated_down, rms_norm
from escrag_min.model.kvcache import shared_attention
from escrag_min.packing import Packed


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    raw: dict = field(default_factory=dict, repr=False)     # config.json as it was read, to be written back


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, the mean in float32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rotary_table(positions, head_dim, theta):
    """int[...] positions -> (cos, sin) float32[..., D]; sin with a minus in the first half, as `rotate` wants it.

    In float32 whatever the model's dtype: bf16 has no position 257.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)          # [D/2]
    angle = positions[..., None].float() * inverse                                                              # [...,D/2]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)                                        # [...,D]


def rotate(x, cos, sin):
    """Rotary embedding by halves: dimension i turns with dimension j = i + D/2. x [B,heads,T,D], cos and sin [B,1,T,D].

        x_i' = x_i·cos - x_j·sin,   x_j' = x_j·cos + x_i·sin
    """
    x32 = x.float()
    return torch.addcmul(x32 * cos, x32.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def grouped_attention(q, k, v, mask=None, causal=False):
    """q [B,Q,T,D], k and v [B,K,S,D] -> [B,Q,T,D]. Keys are shared by a group's queries as a view, not copied.

    mask: bool, broadcastable to [B,1,T,S]; True = may attend.
    """
    b, heads, t, d = q.shape
    kv_heads, s = k.shape[1:3]
    group = heads // kv_heads
    if t == 1:      # the group's queries stand where several tokens would, against one set of keys
        out = F.scaled_dot_product_attention(q.view(b, kv_heads, group, d), k, v, attn_mask=mask)
        return out.reshape(b, heads, t, d)
    if group > 1:
        k = k[:, :, None].expand(b, kv_heads, group, s, d)
        v = v[:, :, None].expand(b, kv_heads, group, s, d)
        if b == 1:  # [1,K,g,S,D] -> [K,g,S,D]: stride 0 over the group
            out = F.scaled_dot_product_attention(q.view(kv_heads, group, t, d), k[0], v[0], attn_mask=mask, is_causal=causal)
            return out.reshape(b, heads, t, d)
        k, v = k.reshape(b, heads, s, d), v.reshape(b, heads, s, d)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def tree_attention(q, k, v, packed):
    """Attention of one packed sequence, tree by tree: q [1,Q,T,D], k and v [1,K,T,D] -> [1,Q,T,D].

    The trunk and its first branch are one causal sequence; each other branch attends to trunk + itself, the last rows of a
    causal square.
    """
    out, start = [], 0
    for trunk, branches in packed.shapes:
        end = start + trunk + sum(branches[:1])
        out.append(grouped_attention(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], causal=True))
        tk, tv = k[:, :, start:start + trunk], v[:, :, start:start + trunk]
        for length in branches[1:]:
            rows = slice(end, end + length)
            keys, values = torch.cat([tk, k[:, :, rows]], dim=2), torch.cat([tv, v[:, :, rows]], dim=2)
            mask = torch.ones(length, trunk + length, dtype=torch.bool, device=q.device).tril(trunk)
            out.append(grouped_attention(q[:, :, rows], keys, values, mask=mask))
            end += length
        start = end
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=False)

    def qkv(self, x):
        x, = autocast(x)        # once, where each projection would do it again, and keep its copy
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x, cos, sin, mask, cache, layer):
        b, t, _ = x.shape
        q, k, v = self.qkv(x)
        q = q.view(b, t, self.heads, self.head_dim).transpose(1, 2)                      # [B,Q,T,D]
        k = k.view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)                   # [B,K,T,D]
        v = v.view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)                   # [B,K,T,D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(layer, k, v)                                             # [B,K,S,D]
        if isinstance(mask, Packed):
            out = tree_attention(q, k, v, mask)
        elif cache is not None:
            out = shared_attention(q, k, v, cache, layer)
        else:
            out = grouped_attention(q, k, v, mask=mask, causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))                        # [B,T,H]


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def gate_up(self, x):
        x, = autocast(x)
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x):
        gate, up = self.gate_up(x)
        if torch.is_grad_enabled():         # the same, with less kept for the backward pass
            return gated_down(gate, up, self.down_proj.weight)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, cos, sin, mask, cache, layer):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Token ids to final hidden states; what Qwen2 and the reward model share (the `model.` of a checkpoint)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpoint_blocks = False      # recompute each block in the backward pass: memory for time

    def forward(self, tokens, positions=None, mask=None, cache=None):
        """tokens int64[B,T] -> hidden [B,T,H]. A packed sequence is B=1 with mask=Packed, whose positions are its own;
        with a cache alone it is one new token a row, T=1."""
        if isinstance(mask, Packed):
            if tokens.shape != (1, len(mask.tokens)):
                raise ValueError(f"forward: a pack of {len(mask.tokens)} tokens needs tokens of shape "
                                 f"[1, {len(mask.tokens)}], got {list(tokens.shape)}")
            positions = mask.positions if positions is None else positions
        elif cache is not None:
            positions = cache.step()
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary_table(positions.expand(tokens.shape), self.config.head_dim, self.config.rope_theta)
        cos, sin = cos[:, None], sin[:, None]                                             # [B,1,T,D]
        x = self.embed_tokens(tokens)                                                     # [B,T,H]
        for layer, block in enumerate(self.layers):
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, cache, layer, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, cache, layer)
        return self.norm(x)


class Qwen2(nn.Module):
    """The language model: body and head. The head's weight is the embedding's where config.tie_word_embeddings."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, positions=None, mask=None, cache=None):
        """tokens int64[B,T] -> hidden [B,T,H]; see Body.forward."""
        return self.model(tokens, positions, mask, cache)

    def logits(self, hidden):
        """hidden [..., H] -> [..., V]"""
        return self.lm_head(hidden)

    def log_probs(self, packed, temperature=1.0, vocab_size=None, with_entropy=False):
        """Packed -> float32[N], log-probability of each target (see logprob.token_logprobs): what SFT and GRPO train on."""
        hidden = self.model(packed.tokens[None], mask=packed)[0]                          # [T,H]
        return token_logprobs(self, hidden, packed.pred, packed.targets, temperature, vocab_size=vocab_size,
                              with_entropy=with_entropy)

    @classmethod
    def from_pretrained(cls, path_or_hub_id, dtype=torch.float32, device="cpu", shard=None):
        """A Hugging Face folder or Hub id of any Qwen-2.5 -> Qwen2. Missing or unexpected weights are an error."""
        from escrag_min.model.checkpoint import load
        return load(cls, path_or_hub_id, dtype, device, shard=shard)

    def save_pretrained(self, path, tokenizer_from=None, dtype=None, **options):
        """Write a Hugging Face folder (see checkpoint.save)."""
        from escrag_min.model.checkpoint import save
        save(self, path, tokenizer_from, dtype, **options)
