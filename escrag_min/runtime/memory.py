"""What a rank needs of its GPU's memory (--plan), from the shapes alone: nothing is allocated.

P parameters, W ranks, T tokens of a forward pass (--tokens-per-batch), L layers, H hidden, I intermediate, V vocabulary, Q and K
heads of size D, e = 2 bytes (bf16) on a GPU and 4 on a CPU.

    kept between steps      weights 4P/W, AdamW moments 8P/W, frozen models (reward, reference) e·P'/W            float32 masters
    sampling                + a gathered policy e·P, keys and values 2·e·L·K·D a token, logits
    reward                  + gathered weights: the root (embedding, head) and two blocks
    update                  + gradients 4P/W and the gathered root; in the head: activations, a chunk of logits, the head's
                            gradient; in the blocks: activations, two e·I a token in SwiGLU's backward pass, two gathered
                            blocks, a block's whole gradient; at the end the root's, after its weights are let go

The peak is what is kept plus the largest phase. Activations of a block, bytes a token, counted from the code
of qwen2.py and gradients.py:

    norms 2·(e·H + 4), inputs of the projections 2·e·H + e·Q·D, attention e·(2·Q·D + 2·K·D), SwiGLU 2·e·I;
    and a trunk's keys and values once more for each of its branches after the first; e is 4 in the norms of one GPU, where
    autocast leaves what runs between the blocks in float32

With --checkpoint-blocks, the input of each layer, e·H or 4·H, is kept and one block at a time is whole.
"""
from pathlib import Path

from escrag_min.logprob import CHUNK
from escrag_min.model.checkpoint import read_config
from escrag_min.qwen2 import Config
from escrag_min.runtime.distributed import frozen_dtype
from escrag_min.sampling import MAX_CACHE_TOKENS, PREFILL_TOKENS

GB = 10**9
CONTEXT = 1.0 * GB      # ours: the CUDA context, its libraries and NCCL's buffers; not measured

# Qwen-2.5 as published: vocabulary, hidden, intermediate, layers, query heads, key heads, tied
SHAPES = {
    "0.5B": (151936, 896, 4864, 24, 14, 2, True), "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "3B": (151936, 2048, 11008, 36, 16, 2, True), "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "14B": (152064, 5120, 13824, 48, 40, 8, False), "32B": (152064, 5120, 27648, 64, 40, 8, False),
    "72B": (152064, 8192, 29568, 80, 64, 8, False)}


def published(size):
    """Config of a published Qwen-2.5 by its size, such as "3B"."""
    vocabulary, hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[size]
    return Config(vocabulary, hidden, intermediate, layers, heads, kv_heads, hidden // heads, tie_word_embeddings=tied)


def block_parameters(c):
    """Weights of one decoder block."""
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = c.hidden_size * (queries + 2 * keys) + queries + 2 * keys + queries * c.hidden_size
    return attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size


def root_parameters(c, reward=False):
    """Weights outside the blocks: embedding, last norm, and the head where it is not the embedding (a reward head: H)."""
    head = c.hidden_size if reward else 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    return c.vocab_size * c.hidden_size + c.hidden_size + head


def parameters(c, reward=False):
    return c.num_hidden_layers * block_parameters(c) + root_parameters(c, reward)


def checkpointed(args, config):
    """Whether blocks are recomputed in the backward pass: --checkpoint-blocks, or else by size."""
    return parameters(config) > GB if args.checkpoint_blocks is None else args.checkpoint_blocks


def block_activations(c, tokens, e, branched=0, residual=None):
    """Bytes that a block keeps for its backward pass. branched: trunk tokens that stand once more in the keys of a branch
    after the first. residual: bytes of a number between blocks, where it is not e (autocast: 4)."""
    h, q, k = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    norms = 2 * ((residual or e) * h + 4)
    a_token = norms + 2 * e * h + e * q + e * (2 * q + 2 * k) + 2 * e * c.intermediate_size
    return tokens * a_token + branched * 2 * e * k


def activations(c, tokens, e, checkpoint_blocks, branched=0, residual=None):
    """Bytes kept between forward and backward pass of a pack."""
    block = block_activations(c, tokens, e, branched, residual)
    if checkpoint_blocks:
        return c.num_hidden_layers * tokens * c.hidden_size * (residual or e) + block
    return c.num_hidden_layers * block


def plan_items(script, args, ranks, config, reward_config=None, e=2):
    """-> {phase: [(what, bytes), ...]} a rank; the phase "kept" adds to each of the others."""
    reward = script == "train_rm"
    n, w = parameters(config, reward), ranks
    kept = [("weights, float32", 4 * n / w), ("AdamW moments, float32", 8 * n / w), ("CUDA context", CONTEXT if e == 2 else 0)]
    root, block = root_parameters(config, reward), block_parameters(config)
    tokens, head = args.tokens_per_batch, 0 if reward else config.vocab_size * config.hidden_size
    base = [("gradients, float32", 4 * n / w)]
    if w > 1:
        base.append(("gathered root", e * root))
    elif e < 4:
        base.append(("weights in bf16", e * n))
    acts = ("activations", activations(config, tokens, e, checkpointed(args, config), branched=tokens, residual=4 if w == 1 else e))
    swiglu = ("SwiGLU's backward pass", 2 * e * config.intermediate_size * tokens)
    phases = {"kept": kept, "update, in the blocks": [*base, acts, swiglu, ("the head's gradient", e * head)]}
    if w > 1:           # a whole gradient exists as it was computed, and in float32 to be summed
        phases["update, in the blocks"] += [("gathered blocks, two", 2 * e * block), ("a block's whole gradient", (e + 4) * block)]
        phases["update, end of the backward pass"] = [base[0], ("the first block's gradient, being summed", 4 * block),
                                                      ("the root's whole gradient", (e + 4) * root)]
    if not reward:
        phases["update, in the head"] = [*base, acts, ("a chunk of logits", CHUNK * config.vocab_size * (2 * 4 + e)),
                                         ("the head's gradient, summed in float32", (4 + e * (e < 4)) * head)]
    if script == "train_grpo":
        m = parameters(reward_config, reward=True)
        kept.append(("reward model, frozen", e * m / w))
        if args.beta:
            kept.append(("reference, frozen", e * n / w))
        prompts, length = -(-args.prompts_per_step // w), (args.max_prompt, args.max_new_tokens)
        phases["sampling"] = sampling_items(config, e, w, prompts, args.group_size, *length)
        if args.initial == "rollout":       # each of the G has a prompt of its own
            phases["sampling, pass 2"] = sampling_items(config, e, w, prompts * args.group_size, 1, *length)
        if args.held_out:                   # as many as are held at once
            phases["sampling of what is held out"] = sampling_items(config, e, w, MAX_CACHE_TOKENS, 1, *length)
        phases["reward"] = [
            ("gathered weights", e * (root_parameters(reward_config, True) + 2 * block_parameters(reward_config)) if w > 1 else 0),
            ("a forward pass", tokens * (4 * reward_config.hidden_size * 4 + 3 * reward_config.intermediate_size * e))]
    if script == "train_sft" and args.retrieve:         # before the first step; as many as are held at once
        phases["sampling of drafts"] = sampling_items(config, e, w, MAX_CACHE_TOKENS, 1, args.max_length, args.max_new_tokens)
    return phases


def sampling_items(c, e, ranks, prompts, copies, max_prompt, new_tokens):
    """[(what, bytes)] of a rank that samples `copies` completions of each of its prompts; more than fit its cache go in turns."""
    n, a_prompt = parameters(c), max_prompt + copies * new_tokens
    prompts = min(prompts, max(1, MAX_CACHE_TOKENS // a_prompt))
    a_token = 2 * e * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    return [("gathered policy", e * n if ranks > 1 or e == 2 else 0), ("packed weights", e * n if e == 4 else 0),
            ("keys and values", prompts * a_prompt * a_token),
            ("logits and probabilities", prompts * copies * c.vocab_size * (e + 3 * 8)),
            ("prefill", max(PREFILL_TOKENS, max_prompt) * (4 * c.hidden_size * 4 + 3 * c.intermediate_size * e))]


def totals(phases):
    """-> {phase: bytes with what is kept}"""
    kept = sum(size for _, size in phases["kept"])
    return {name: kept + sum(size for _, size in items) for name, items in phases.items() if name != "kept"}


def plan(script, args, ranks, size="", reward_size=""):
    """The memory plan as text. The shapes come from --model and --reward-model, or from the preset where those are not here."""
    config, where = _shape(args.model, size, "--model")
    reward_config = None
    if script == "train_grpo":
        reward_config, reward_where = _shape(args.reward_model, reward_size, "--reward-model")
        where += f"; reward model: {reward_where}"
    e = 2 if size or args.ranks else frozen_dtype().itemsize        # --preset and --ranks ask about GPUs
    phases = plan_items(script, args, ranks, config, reward_config, e)
    lines = [f"memory in GB of each of {ranks} rank{'s' if ranks > 1 else ''}, {'bf16 on a GPU' if e == 2 else 'float32 on a CPU'}",
             f"{parameters(config, script == 'train_rm') / GB:.2f}B parameters: {where}"]
    for name, items in phases.items():
        lines.append(f"  {name}" + ("" if name == "kept" else ", beside what is kept"))
        lines += [f"    {what:40}{size / GB:8.1f}" for what, size in items if size]
    peaks = totals(phases)
    worst = max(peaks, key=peaks.get)
    return "\n".join([*lines, f"  peak, in {worst}:{peaks[worst] / GB:{38 - len(worst)}.1f}"])


def _shape(path, size, option):
    """Config of a model folder, or of a published Qwen-2.5 by its name or size; nothing is downloaded -> (Config, where from)."""
    if path and Path(path).is_dir():
        return read_config(path), path
    size = next((s for s in SHAPES if f"Qwen2.5-{s}" in path), size)
    if not size:
        raise ValueError(f"--plan: {option} {path or '(none)'} is not a folder here; name one, a published Qwen2.5, or a "
                         "--preset")
    return published(size), f"Qwen2.5-{size} as published"
