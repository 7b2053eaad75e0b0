"""Keys and values while sampling. The samples of one prompt share its keys, as a tree's branches share their trunk (packing.py):
they exist once, and a decode step reads them once for all its samples.
"""
import torch


class KVCache:
    """Keys and values of R rows of sampling. Each row goes on from one of P prompts by tokens of its own, of which all rows have
    equally many: no padding, except that shorter prompts stand right-aligned beside longer ones.

    Where prompts have several rows, a prompt's keys exist once, in a trunk. A prompt with one row is the beginning of that row.

    prompts         lengths of the P prompts, each continued by `copies` rows: R = P·copies
    capacity        new tokens a row may come to
    keys, values    per layer [R,K,capacity,D], columns < used in use; trunk_keys, trunk_values per layer [P,K,L,D], L the
                    longest prompt. With copies = 1: [R,K,L+capacity,D] and [P,K,0,D]
    """

    def __init__(self, config, prompts, copies, capacity, dtype=torch.float32, device="cpu"):
        def store(*shape):
            # zeros, not empty: a hidden column has weight 0, and 0 times what memory happens to hold may be NaN
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        heads, d, rows, longest = config.num_key_value_heads, config.head_dim, len(prompts) * copies, max(prompts)
        self.shared, self.longest, self.capacity, self.rows = copies > 1, longest, capacity, rows
        self.start = self.used = 0 if self.shared else longest
        self.keys, self.values = (store(rows, heads, self.start + capacity, d) for _ in range(2))
        self.trunk_keys, self.trunk_values = (store(len(prompts), heads, longest - self.start, d) for _ in range(2))
        self.prompts = torch.tensor(prompts, dtype=torch.long, device=device)                           # [P]
        self.prompt = torch.arange(len(prompts), device=device).repeat_interleave(copies)               # [R] whose row it is
        self._lay_out()

    def step(self):
        """Make room for one new token in every row -> its position [R,1]."""
        new = self.used - self.start
        if new == self.capacity:
            raise ValueError(f"KVCache: a row of {new + 1} tokens does not fit its capacity of {self.capacity}")
        self.used += 1
        return (self.prompts[self.prompt] + new)[:, None]

    def update(self, layer, k, v):
        """k, v [R,K,1,D] of the new tokens -> keys and values of all the rows' tokens so far, [R,K,used,D]."""
        keys, values = self.keys[layer][:self.rows, :, :self.used], self.values[layer][:self.rows, :, :self.used]
        keys[:, :, -1:] = k
        values[:, :, -1:] = v
        return keys, values

    def fill(self, layer, k, v, spans, first):
        """Prefill: tokens start..end of a packed k, v [1,K,T,D] are the prompts first, first + 1, ..."""
        keys, values = (self.trunk_keys, self.trunk_values) if self.shared else (self.keys, self.values)
        for i, (start, end) in enumerate(spans, start=first):
            columns = slice(self.longest - (end - start), self.longest)
            keys[layer][i, :, columns] = k[0, :, start:end]
            values[layer][i, :, columns] = v[0, :, start:end]

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
        """hidden: what is added to scores, -inf before a shorter prompt's first column; [P·K,1,L], or without a trunk
        [R·K,1,L+capacity] in the rows' order.

        Rows that share stand in a grid [P,G] by prompt, G the most of any: grid holds rows (0 where there is none), place [R]
        each row's slot. None where the rows stand so already.
        """
        heads, device = self.keys[0].shape[1], self.prompts.device
        self.grid = self.place = None
        if self.shared:
            counts = torch.bincount(self.prompt, minlength=len(self.prompts))
            g, order = int(counts.max()), self.prompt.argsort(stable=True)
            slot = torch.arange(len(order), device=device) - (counts.cumsum(0) - counts)[self.prompt[order]]
            place = torch.empty_like(order)
            place[order] = self.prompt[order] * g + slot
            if not torch.equal(place, torch.arange(len(self.prompts) * g, device=device)):
                self.place, self.grid = place, place.new_zeros(len(self.prompts) * g)
                self.grid[place] = torch.arange(len(order), device=device)
        lengths = self.prompts if self.shared else self.prompts[self.prompt]
        columns = torch.arange(self.longest if self.shared else self.longest + self.capacity, device=device)
        before = columns < self.longest - lengths[:, None]
        self.hidden = self.keys[0].new_zeros(before.shape).masked_fill(before, -torch.inf).repeat_interleave(heads, 0)[:, None]


def shared_attention(q, k, v, cache, layer):
    """One new token a row, against the keys of its prompt, which are read once for all its rows, and its own.

        softmax( [q·K_prompt, q·K_own] / sqrt(D) ) · [V_prompt, V_own]

    q [R,Q,1,D], k and v [R,K,S,D] the row's own -> [R,Q,1,D]. g = Q/K queries a key head, G rows a prompt in the cache's grid.
    """
    (rows, heads, _, d), (kv_heads, own) = q.shape, k.shape[1:3]
    prompts, group = len(cache.prompts), heads // kv_heads

    def to_prompts(x):      # [R·K,g,*] -> [P·K,G·g,*]
        x = x.view(rows, kv_heads, group, -1)
        x = x if cache.grid is None else x[cache.grid]
        return x.view(prompts, -1, kv_heads, group, x.shape[-1]).transpose(1, 2).reshape(prompts * kv_heads, -1, x.shape[-1])

    def to_rows(x):         # and back
        x = x.view(prompts, kv_heads, -1, group, x.shape[-1]).transpose(1, 2).reshape(-1, kv_heads, group, x.shape[-1])
        x = x if cache.place is None else x[cache.place]
        return x.reshape(rows * kv_heads, group, -1)
    q, k, v = q.view(-1, group, d) * d**-0.5, k.flatten(0, 1), v.flatten(0, 1)                      # [R·K,g,D], [R·K,S,D]
    if not cache.shared:
        scores = torch.baddbmm(cache.hidden[..., :own], q, k.mT)                                    # [R·K,g,S]
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        return torch.bmm(weights, v).view(rows, heads, 1, d)
    trunk_k, trunk_v = cache.trunk_keys[layer].flatten(0, 1), cache.trunk_values[layer].flatten(0, 1)       # [P·K,L,D]
    shared = torch.baddbmm(cache.hidden, to_prompts(q), trunk_k.mT)                                 # [P·K,G·g,L]
    scores = torch.cat([to_rows(shared), torch.bmm(q, k.mT)], dim=-1)                               # [R·K,g,L+S]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    of_prompt = to_rows(torch.bmm(to_prompts(weights[..., :-own]), trunk_v))                        # [R·K,g,D]
    return torch.baddbmm(of_prompt, weights[..., -own:], v).view(rows, heads, 1, d)
