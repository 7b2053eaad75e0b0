"""What the three training loops compute alike: AdamW on float32 masters, schedule, clipping, which data and which random stream.

    lr(s)  = peak · min(1, (s+1)/warmup) · (0.1 + 0.9 · (1 + cos(π·p)) / 2),   p = (s - warmup)/(steps - warmup) in [0, 1]

Weights are float32 whatever the checkpoint's dtype: at lr 1e-6 a bf16 weight never moves. On CUDA the compute is bf16.
The batch of step s comes from (seed, s), and so does each random stream: nothing of it needs to be saved (runs.py).
"""
import hashlib
import math

import torch

from escrag_min.packing import tree_size
from escrag_min.runtime.args import check
from escrag_min.runtime.distributed import clip_gradient, say, size


def check_trees(records, trees, tokens_per_batch):
    """A record whose tree does not fit a micro-batch is an error now, not in the middle of a run."""
    for record, tree in zip(records, trees):
        check(tree_size(tree) <= tokens_per_batch, f"{record['id']}: {tree_size(tree)} tokens with its prompt; --tokens-per-batch "
                                                   f"is {tokens_per_batch}")


def check_positions(option, length, model):
    positions = model.config.max_position_embeddings
    check(length <= positions, f"{option} is {length}; the model has {positions} positions")


def make_optimizer(model, lr, weight_decay=0.0):
    """AdamW; weight decay on matrices only, not on norms and biases."""
    parameters = list(model.parameters())
    if any(p.dtype != torch.float32 for p in parameters):
        raise ValueError("make_optimizer: training needs float32 master weights; load the model with dtype=torch.float32")
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step, steps, peak, warmup):
    """Linear warmup, then a cosine that comes down to a tenth of the peak where step == steps.

    step counts from 0; warmup in steps, also 1.2.
    """
    if step < warmup:
        return peak * min(1.0, (step + 1) / warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def update(model, optimizer, lr, max_norm=1.0, loss=0.0):
    """Clip the gradient to max_norm, take one AdamW step at lr, clear the gradient -> (norm before clipping, skipped).

    A gradient or loss that is not finite changes nothing, and is said.
    """
    norm = clip_gradient(model, max_norm)
    skipped = not (math.isfinite(norm) and math.isfinite(loss))
    if skipped:
        say(f"step skipped: the loss is {loss}, the gradient's norm {norm}")
    else:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, skipped


def derived_seed(*parts):
    """A 63-bit seed from numbers and names, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def batch_indices(n, batch, step, seed):
    """Which of n records step `step` uses: consecutive pieces of one shuffle an epoch, batches running across epochs."""
    indices = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(position, n)
        if not indices or place == 0:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(derived_seed(seed, "epoch", epoch))).tolist()
        indices.append(order[place])
    return indices


def step_generator(seed, step, place):
    """The random stream of one place in the batch of one step, whichever rank has it, and however often the run was resumed."""
    return torch.Generator().manual_seed(derived_seed(seed, "rollout", step, place))


def check_batch(option, value, what):
    """A step's batch must be a multiple of the ranks; option and what name it: "--batch-size", "pairs"."""
    check(value >= 1, f"{option} {value} must be at least 1")
    ranks = size()
    below = max(1, value // ranks) * ranks
    check(value % ranks == 0, f"{option} {value} counts {what} and must be a multiple of the {ranks} ranks, such as {below} or "
                              f"{below + ranks}")
