"""Keys and values while sampling. The samples of one prompt share its keys, as a tree's branches share their trunk (packing.py):
they exist once, and a decode step reads them once for all its samples.
"""
import torch


class KVCache:
    """Keys and values of R rows of sampling. Each row goes on from one of P prompts, whose keys its rows share, by tokens of its
    own, of which all rows have equally many: no padding, except that shorter prompts stand beside longer ones.

    prompts         lengths of the P prompts, each continued by `copies` rows: R = P·copies
    capacity        own tokens a row may come to
    keys, values    per layer [R,K,capacity,D], columns < used in use; trunk_keys, trunk_values per layer [P,K,L,D]
    """

    def __init__(self, config, prompts, copies, capacity, dtype=torch.float32, device="cpu"):
        def store(*shape):
            # zeros, not empty: a hidden column has weight 0, and 0 times what memory happens to hold may be NaN
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        heads, d, rows = config.num_key_value_heads, config.head_dim, len(prompts) * copies
        self.keys, self.values = store(rows, heads, capacity, d), store(rows, heads, capacity, d)
        self.capacity, self.rows, self.used = capacity, rows, 0
        self.prompts = torch.tensor(prompts, dtype=torch.long, device=device)                           # [P]
        self.trunk_keys, self.trunk_values = (store(len(prompts), heads, max(prompts), d) for _ in range(2))
        self.prompt = torch.arange(len(prompts), device=device).repeat_interleave(copies)               # [R] whose row it is
        self._lay_out()

    def step(self):
        """Make room for one new token in every row -> its position [R,1]."""
        if self.used == self.capacity:
            raise ValueError(f"KVCache: a row of {self.used + 1} tokens does not fit its capacity of {self.capacity}")
        self.used += 1
        return (self.prompts[self.prompt] + self.used - 1)[:, None]

    def update(self, layer, k, v):
        """k, v [R,K,1,D] of the new tokens -> keys and values of all own tokens so far, [R,K,used,D]."""
        keys, values = self.keys[layer][:self.rows], self.values[layer][:self.rows]
        keys[:, :, self.used - 1:self.used] = k
        values[:, :, self.used - 1:self.used] = v
        return keys[:, :, :self.used], values[:, :, :self.used]

    def fill(self, layer, k, v, spans, first):
        """Prefill: tokens start..end of a packed k, v [1,K,T,D] are the prompts first, first + 1, ..."""
        for i, (start, end) in enumerate(spans, start=first):
            self.trunk_keys[layer][i, :, :end - start] = k[0, :, start:end]
            self.trunk_values[layer][i, :, :end - start] = v[0, :, start:end]

    def keep(self, alive):
        """Drop the rows whose alive bool[R] is False, and prompts without rows. A row from the end moves into each hole: one row's
        copy, not all.

        -> int64[R']: which old row now stands in each row.
        """
        n = int(alive.sum())
        order = torch.arange(len(alive), device=alive.device)
        holes = order[:n][~alive[:n]]
        order[holes] = order[n:][alive[n:]]
        order = order[:n]
        for store in (*self.keys, *self.values):
            store[holes, :, :self.used] = store[order[holes], :, :self.used]
        self.rows = n
        if n:
            going_on, self.prompt = self.prompt[order].unique(return_inverse=True)
            if len(going_on) < len(self.prompts):
                self.prompts = self.prompts[going_on]
                for trunks in (self.trunk_keys, self.trunk_values):
                    trunks[:] = [store[going_on] for store in trunks]
            self._lay_out()
        return order

    def _lay_out(self):
        """Stand the rows in a grid [P,G] by prompt, G the most of any: grid holds rows (0 where there is none), place [R] each
        row's slot. None where the rows stand so already. hidden bool[P,1,1,L]: columns beyond a prompt's end."""
        counts = torch.bincount(self.prompt, minlength=len(self.prompts))
        g, order = int(counts.max()), self.prompt.argsort(stable=True)
        slot = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt[order]]
        self.place = torch.empty_like(order)
        self.place[order] = self.prompt[order] * g + slot
        self.grid = torch.zeros(len(self.prompts) * g, dtype=torch.long, device=order.device)
        self.grid[self.place] = torch.arange(len(order), device=order.device)
        if torch.equal(self.place, torch.arange(len(self.prompts) * g, device=order.device)):
            self.grid = self.place = None
        columns = torch.arange(self.trunk_keys[0].shape[2], device=order.device)
        self.hidden = (columns >= self.prompts[:, None])[:, None, None]
        self.hidden = self.hidden if self.hidden.any() else None


def shared_attention(q, k, v, cache, layer):
    """One new token a row, against the keys of its prompt, which are read once for all its rows, and its own.

        softmax( [q·K_prompt, q·K_own] / sqrt(D) ) · [V_prompt, V_own]

    q [R,Q,1,D], k and v [R,K,S,D] the row's own -> [R,Q,1,D]. g = Q/K queries a key head, G rows a prompt in the cache's grid.
    """
    trunk_k, trunk_v = cache.trunk_keys[layer], cache.trunk_values[layer]                           # [P,K,L,D]
    (rows, heads, _, d), (prompts, kv_heads, length, _) = q.shape, trunk_k.shape
    group = heads // kv_heads

    def to_prompts(x):      # [R,K,g,*] -> [P,K,G·g,*]
        x = x if cache.grid is None else x[cache.grid]
        return x.view(prompts, -1, kv_heads, group, x.shape[-1]).transpose(1, 2).reshape(prompts, kv_heads, -1, x.shape[-1])

    def to_rows(x):         # and back
        x = x.view(prompts, kv_heads, -1, group, x.shape[-1]).transpose(1, 2).reshape(-1, kv_heads, group, x.shape[-1])
        return x if cache.place is None else x[cache.place]
    q = q.view(rows, kv_heads, group, d) * d**-0.5
    shared = to_prompts(q) @ trunk_k.mT                                                             # [P,K,G·g,L]
    if cache.hidden is not None:
        shared.masked_fill_(cache.hidden, -torch.inf)
    scores = torch.cat([to_rows(shared), q @ k.mT], dim=-1)                                         # [R,K,g,L+S]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    out = to_rows(to_prompts(weights[..., :length]) @ trunk_v) + weights[..., length:] @ v          # [R,K,g,D]
    return out.reshape(rows, heads, 1, d)
