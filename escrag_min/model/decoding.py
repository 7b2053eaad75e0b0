"""Faster products for sampling on a CPU, the same numbers.

A decode step reads every weight for a handful of rows, so it is as fast as the weights can be read. A plain F.linear reads
[N,H] weights at 5 to 12 GB/s for 8 rows; oneDNN, given them in blocks of its own choosing (made once), at 11 to 18, and better
the larger they are: query, key and value stand in one matrix, gate and up in another. The copy takes as much memory again as
the weights.
"""
from contextlib import contextmanager

import torch

from escrag_min.qwen2 import MLP, Attention, Qwen2


def pack_weights(model):
    """From now on a float32 model on a CPU computes with a copy of its weights in oneDNN's layout, without gradients; the
    weights must not change -> a function that undoes it.

    For a model that has its copy already, and elsewhere (a GPU, another dtype, a torch without oneDNN), nothing happens.
    """
    weight, replaced = model.model.norm.weight, []      # (module, name of the method that a copy takes the place of)
    able = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if able and weight.device.type == "cpu" and weight.dtype == torch.float32 and "logits" not in vars(model):
        for module in model.modules():
            if isinstance(module, Attention):
                replaced += [(module, "qkv", packed(module.q_proj, module.k_proj, module.v_proj)),
                             (module.o_proj, "forward", packed(module.o_proj))]
            elif isinstance(module, MLP):
                replaced += [(module, "gate_up", packed(module.gate_proj, module.up_proj)),
                             (module.down_proj, "forward", packed(module.down_proj))]
            elif isinstance(module, Qwen2):
                replaced.append((module, "logits", packed(module.lm_head)))
    for module, name, product in replaced:
        vars(module)[name] = product

    def undo():
        for module, name, _ in replaced:
            del vars(module)[name]
    return undo


@contextmanager
def packed_weights(model):
    """pack_weights for the length of a block."""
    undo = pack_weights(model)
    try:
        yield model
    finally:
        undo()


def packed(*layers):
    """Linear layers with the same input, side by side -> a function x [..., H] -> [..., N]; a tuple of those if several."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    sizes = [layer.out_features for layer in layers]
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8)      # 8 rows: a hint

    def product(x):
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y if len(layers) == 1 else y.split(sizes, dim=-1)
    return product
