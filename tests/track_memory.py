"""Torch's own FSDP memory tracker on a training pass that allocates nothing:

    PYTHONPATH=. python tests/track_memory.py train_rm 7B RANKS TOKENS LAYERS

Prints {"tracked": bytes, "planned": bytes} of the update's peak, as JSON. The tracker is private to torch and not in every version.
"""
import functools
import json
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_rm
import train_sft
from escrag_min.packing import Packed, pack
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import RewardModel
from escrag_min.runtime import distributed, memory


def main(script, size, ranks, tokens, layers):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = distributed.init_device_mesh("cpu", (ranks,))
    distributed.init_device_mesh = lambda *shape: mesh
    distributed.MixedPrecisionPolicy = functools.partial(          # as on a GPU
        MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = memory.published(size)
    config.num_hidden_layers = layers
    reward = script == "train_rm"
    pairs, group = [([1] * (tokens // 8), [[1] * (tokens // 16)] * 2)] * 4, [([1] * (tokens // 4), [[1] * (tokens // 32)] * 8)] * 2
    trees = pairs if reward else group
    packed = pack(trees)
    log_probs = Qwen2.log_probs
    del Qwen2.log_probs                     # the tracker follows `forward` only
    Qwen2.forward = lambda self, packed: log_probs(self, packed, 1.0, config.vocab_size)
    mode = FakeTensorMode()
    with mode:
        model = (RewardModel if reward else Qwen2)(config)
        distributed.shard(model)
        if not reward:
            model.tie_weights()
        model.model.checkpoint_blocks = True
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][name] = DTensor.from_local(torch.zeros_like(p.to_local()), p.device_mesh, p.placements,
                                                              run_check=False, shape=p.shape, stride=p.stride())
        fake = Packed(shapes=packed.shapes, **{k: mode.from_tensor(v) for k, v in vars(packed).items() if k != "shapes"})
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(())
        with tracker:
            for _ in range(2):              # the second micro-batch finds the gradients of the first
                tracker.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(fake)
                distributed.backward(out.sum())
    peak = tracker.get_tracker_snapshot("peak")
    args = (train_rm if reward else train_sft).Args(tokens_per_batch=len(packed.tokens), checkpoint_blocks=True)
    planned = max(memory.totals(memory.plan_items(script, args, ranks, config)).values()) - memory.CONTEXT
    print(json.dumps({"tracked": sum(device["Total"] for device in peak.values()), "planned": planned}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
