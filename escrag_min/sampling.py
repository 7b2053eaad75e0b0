"""Sampling with a key/value cache: each prompt is read once, its keys and values are handed to its samples.

    y_t ~ softmax( z_t / temperature )  over the first vocab_size entries,  z_t = W_head · h_t          (draw)

The prompts are prefilled as one pack without padding; a row that has said a stop token leaves the cache, so that what is done
costs nothing.

Each row has its own uniform numbers, drawn up front, one for each token it may come to: what it draws does not depend on
when its neighbours stop, and with a generator for each prompt not on who they are.

Temperature 0 is the argmax. top-p and top-k change the distribution that is sampled, hence are off while training: the
loss scores the policy on exactly what it was sampled from.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from escrag_min.model.decoding import packed_weights
from escrag_min.model.kvcache import KVCache
from escrag_min.packing import pack, split_into_packs

PREFILL_TOKENS = 8192       # tokens a prefill pack may hold
CPU_PREFILL_TOKENS = 1024   # on a CPU, where larger packs are slower
DRAW_BLOCK = 128            # entries whose mass is summed first
MAX_CACHE_TOKENS = 65536    # prompts · (longest prompt + samples · new tokens) held at once


@dataclass
class Completion:
    tokens: list        # sampled ids, the stop token included where there is one
    finished: bool      # a stop token was sampled (False: cut at max_new_tokens)


def draw(logits, u=None, temperature=1.0, top_p=1.0, top_k=0):
    """One token a row: float[R,V] logits and u float64[R] in [0,1) -> int64[R]. Temperature 0 needs no u.

    Inverse-CDF sampling: a uniform number falls into the cumulative distribution, first of blocks of entries, then of the
    entries of its block. Sums are float64, since a float32 sum over 150k entries loses the rare ones; far cheaper than
    torch.multinomial.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    if u is None:
        raise ValueError(f"draw: temperature {temperature} needs u, one uniform number a row")
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    if top_k and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]                          # [R,1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp_()                   # [R,V], not normalised
    if top_p < 1:       # the smallest set of likeliest tokens that holds top_p of the mass
        ordered, index = mass.double().sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p * ordered.sum(dim=-1, keepdim=True)
        mass = mass.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), 0.0)
    mass = F.pad(mass, (0, -mass.shape[-1] % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))      # [R,V/128,128]
    total = mass.sum(dim=-1, dtype=torch.float64)                                # [R,V/128]
    block, rest = _fall(total, u * total.sum(dim=-1))
    inside = mass[torch.arange(len(mass), device=mass.device), block].double()   # [R,128]
    return block * DRAW_BLOCK + _fall(inside, rest)[0]


def _fall(mass, at):
    """Where `at` falls when the masses [R,N] lie side by side -> (index [R], how far into it [R]). Never one of mass 0."""
    cdf = mass.cumsum(dim=-1)
    at = torch.minimum(at, torch.nextafter(cdf[:, -1], cdf.new_zeros(())))[:, None]
    index = torch.searchsorted(cdf, at, right=True)                              # the first whose sum is above
    before = cdf.gather(-1, index) - mass.gather(-1, index)
    return index.squeeze(-1), (at - before).clamp(min=0).squeeze(-1)      # rounding: before may be a last digit too large


def _uniforms(generator, prompts, copies, max_new_tokens, device):
    """The numbers that every draw uses: float64[prompts·copies, max_new_tokens] in [0,1), from one stream or one a prompt."""
    if not isinstance(generator, list):
        blocks = [(generator, prompts * copies)]
    elif len(generator) == prompts:
        blocks = [(g, copies) for g in generator]
    else:
        raise ValueError(f"sample: {len(generator)} generators for {prompts} prompts; give one, or one a prompt")
    return torch.cat([torch.rand(rows, max_new_tokens, dtype=torch.float64, device=g.device if g else device,
                                 generator=g).to(device) for g, rows in blocks])


class _Prefill:
    """What the packed forward pass sees as its cache: it hands each prompt's keys and values on."""

    def __init__(self, cache, spans, first):
        self.cache, self.spans, self.first = cache, spans, first

    def update(self, layer, k, v):
        self.cache.fill(layer, k, v, self.spans, self.first)
        return k, v


@torch.no_grad()
def sample(model, prompts, samples_per_prompt=1, max_new_tokens=256, temperature=1.0, top_p=1.0, top_k=0, stop_tokens=(),
           vocab_size=None, generator=None, progress=False, max_cache_tokens=MAX_CACHE_TOKENS):
    """Complete each prompt samples_per_prompt times.

    prompts            list of token id lists, of any lengths
    vocab_size         ids that may be drawn: those below it (a checkpoint's last rows may be padding); None: all
    generator          a torch.Generator for reproducible draws, or a list of one a prompt: then a prompt's completions do
                       not depend on the other prompts
    progress           a tqdm bar over the new tokens
    max_cache_tokens   tokens whose keys are held at once: prompts · (longest prompt + samples · new tokens); more go in turns
    -> list[list[Completion]], [len(prompts)][samples_per_prompt]
    """
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"sample: temperature {temperature} must be >= 0, top_p {top_p} in (0, 1], top_k {top_k} >= 0")
    if max_new_tokens < 1 or samples_per_prompt < 1:
        raise ValueError(f"sample: max_new_tokens {max_new_tokens} and samples_per_prompt {samples_per_prompt} must be >= 1")
    longest = max(map(len, prompts), default=0) + max_new_tokens
    if longest > model.config.max_position_embeddings:
        raise ValueError(f"sample: a prompt with {max_new_tokens} new tokens needs {longest} positions; the model has "
                         f"{model.config.max_position_embeddings}")
    if not prompts:
        return []
    u = None
    if temperature > 0:
        u = _uniforms(generator, len(prompts), samples_per_prompt, max_new_tokens, model.model.norm.weight.device)
    together = max(1, max_cache_tokens // (longest - max_new_tokens + samples_per_prompt * max_new_tokens))
    completions = []
    bar = tqdm(total=max_new_tokens * -(-len(prompts) // together), desc="sampling", unit="tok", disable=not progress)
    with packed_weights(model):
        for start in range(0, len(prompts), together):
            rows = slice(start * samples_per_prompt, (start + together) * samples_per_prompt)
            completions += _sample_together(model, prompts[start:start + together], samples_per_prompt, max_new_tokens,
                                            u if u is None else u[rows], temperature, top_p, top_k, stop_tokens, vocab_size, bar)
    bar.close()
    return completions


def _prefill(model, prompts, copies, capacity):
    """-> (cache of len(prompts)·copies rows, hidden [rows,H] of each prompt's last token)"""
    weight = model.model.norm.weight
    cache = KVCache(model.config, list(map(len, prompts)), copies, capacity, weight.dtype, weight.device)
    hidden, first = [], 0
    budget = CPU_PREFILL_TOKENS if weight.device.type == "cpu" else PREFILL_TOKENS
    for trees in split_into_packs([(p, []) for p in prompts], max(budget, *map(len, prompts))):
        packed = pack(trees).to(weight.device)
        ends = torch.tensor([len(p) for p, _ in trees]).cumsum(0)
        spans = [(end - len(p), end) for (p, _), end in zip(trees, ends.tolist())]
        out = model(packed.tokens[None], mask=packed, cache=_Prefill(cache, spans, first))          # [1,T,H]
        hidden.append(out[0, ends.to(weight.device) - 1])                                           # [trees,H]
        first += len(trees)
    return cache, torch.cat(hidden).repeat_interleave(copies, dim=0)


def _sample_together(model, prompts, copies, max_new_tokens, u, temperature, top_p, top_k, stop_tokens, vocab_size, bar):
    cache, hidden = _prefill(model, prompts, copies, max_new_tokens)
    rows = len(prompts) * copies
    drawn = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=hidden.device)
    length = torch.full((rows,), max_new_tokens, device=hidden.device)
    finished = torch.zeros(rows, dtype=torch.bool, device=hidden.device)
    stops = torch.tensor(stop_tokens, dtype=torch.long, device=hidden.device)
    row = torch.arange(rows, device=hidden.device)      # which completion stands in each row of the cache
    for step in range(max_new_tokens):
        logits = model.logits(hidden)[:, :vocab_size]                            # [R,V]
        token = draw(logits, u if u is None else u[row, step], temperature, top_p, top_k)       # [R]
        drawn[row, step] = token
        bar.update()
        stopped = torch.isin(token, stops)
        if stopped.any():
            length[row[stopped]] = step + 1
            finished[row[stopped]] = True
            order = cache.keep(~stopped)
            row, token = row[order], token[order]
        if not len(row) or step + 1 == max_new_tokens:
            break
        hidden = model(token[:, None], cache=cache)[:, 0]                        # [R,1,H] -> [R,H]
    bar.update(max_new_tokens - step - 1)
    done = [Completion(tokens[:n], f) for tokens, n, f in zip(drawn.tolist(), length.tolist(), finished.tolist())]
    return [done[i:i + copies] for i in range(0, rows, copies)]
