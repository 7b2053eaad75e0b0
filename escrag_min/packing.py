"""A prompt with branches: how every batch is laid out (design: "one idea that carries the whole code").

Each loss of the paper compares several responses to one dialogue: SFT one, Bradley-Terry two, GRPO G. A *tree* is a prompt
(the trunk) followed by its responses (the branches); a pack is several trees in one flat sequence, without padding:

    tokens     t t t t  a a a  b b    t t  a a       T tokens of all trees
    positions  0 1 2 3  4 5 6  4 5    0 1  2 3       a branch goes on where its trunk ends
    tree       0 0 0 0  0 0 0  0 0    1 1  1 1
    branch     0 0 0 0  1 1 1  2 2    0 0  1 1       0 = trunk

    token q may attend to token k  iff  tree[k] == tree[q]  and  k <= q  and  branch[k] in (0, branch[q])

so a branch computes exactly what it would compute alone, while the trunk is computed once. Linear layers run over the
whole pack; attention runs tree by tree (qwen2.tree_attention), so its cost never grows with the square of the pack.
"""
from dataclasses import dataclass, field

import torch


@dataclass
class Packed:
    """T tokens, N targets (branch tokens), R branches (responses). All int64."""

    tokens: torch.Tensor      # [T]
    positions: torch.Tensor   # [T]
    tree: torch.Tensor        # [T]
    branch: torch.Tensor      # [T]
    pred: torch.Tensor        # [N] index of the token whose hidden state predicts target n: its predecessor
    targets: torch.Tensor     # [N] the branch tokens themselves, in order
    response: torch.Tensor    # [N] which of the R branches target n belongs to
    last: torch.Tensor        # [R] index of the last token of each branch
    shapes: list = field(default_factory=list)   # per tree (trunk length, [branch lengths]), for slicing

    def mask(self):
        """bool[T,T]: mask[q,k] is True where token q may attend to token k. For tests and readers."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        same_tree = self.tree[:, None] == self.tree[None, :]
        past = index[None, :] <= index[:, None]
        reachable = (self.branch[None, :] == 0) | (self.branch[None, :] == self.branch[:, None])
        return same_tree & past & reachable

    def lengths(self):
        """int64[R]: the number of tokens of each branch."""
        return torch.bincount(self.response, minlength=len(self.last))

    def to(self, device):
        moved = {k: v.to(device) for k, v in vars(self).items() if k != "shapes"}
        return Packed(shapes=self.shapes, **moved)


def pack(trees):
    """[(prompt_ids, [branch_ids, ...]), ...] -> Packed. A tree may have no branch; an empty prompt or branch is an error."""
    tokens, positions, tree, branch, pred, response, last, shapes = [], [], [], [], [], [], [], []
    for t, (prompt, branches) in enumerate(trees):
        if not prompt:
            raise ValueError(f"pack: the prompt of tree {t} is empty")
        trunk_end = len(tokens) + len(prompt) - 1
        tokens += prompt
        positions += range(len(prompt))
        tree += [t] * len(prompt)
        branch += [0] * len(prompt)
        for b, ids in enumerate(branches, start=1):
            if not ids:
                raise ValueError(f"pack: response {b - 1} of tree {t} is empty; it needs at least its end-of-turn token")
            start = len(tokens)
            pred += [trunk_end, *range(start, start + len(ids) - 1)]
            response += [len(last)] * len(ids)
            tokens += ids
            positions += range(len(prompt), len(prompt) + len(ids))
            tree += [t] * len(ids)
            branch += [b] * len(ids)
            last.append(len(tokens) - 1)
        shapes.append((len(prompt), [len(ids) for ids in branches]))
    ints = {"tokens": tokens, "positions": positions, "tree": tree, "branch": branch, "pred": pred,
            "response": response, "last": last}
    tensors = {name: torch.tensor(values, dtype=torch.long) for name, values in ints.items()}
    targets = tensors["tokens"][tensors["branch"] > 0]      # branch tokens, in order
    return Packed(targets=targets, shapes=shapes, **tensors)


def tree_size(tree):
    """Tokens of a (prompt_ids, [branch_ids, ...]) tree."""
    return len(tree[0]) + sum(map(len, tree[1]))


def split_into_packs(trees, budget, split_trees=False):
    """Consecutive trees into lists of at most `budget` tokens each, for one `pack` a list.

    split_trees: a tree over the budget is cut into several that repeat its trunk. A loss that sums over responses
    (SFT, GRPO) does not notice; Bradley-Terry, which needs both branches together, must not be split.
    A tree that cannot fit is an error: no token is ever dropped.
    """
    packs, room = [], 0
    for tree in trees:
        for piece in _pieces(tree, budget) if split_trees else [tree]:
            size = tree_size(piece)
            if size > budget:
                raise ValueError(f"--tokens-per-batch {budget} is too small: one prompt with its response(s) has "
                                 f"{size} tokens")
            if size > room:
                packs.append([])
                room = budget
            packs[-1].append(piece)
            room -= size
    return packs


def _pieces(tree, budget):
    """The tree, or several with the same trunk and some of the branches each, none over the budget if possible."""
    if tree_size(tree) <= budget:
        return [tree]
    prompt, pieces, room = tree[0], [], 0
    for ids in tree[1]:
        if len(ids) > room:
            pieces.append((prompt, []))
            room = budget - len(prompt)
        pieces[-1][1].append(ids)
        room -= len(ids)
    return pieces or [tree]
