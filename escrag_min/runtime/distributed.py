"""Many GPUs (paper C: 2 to 4 A800s). All that knows of ranks, and the only file that imports torch.distributed.

A rank is one process with one GPU (or none: gloo on a CPU), started by torchrun; there are W of them. Plain `python` is a
world of one, in which every function here does the obvious thing and nothing is sharded. The method never hears of it:

    data        each rank takes its share of a step's batch
    loss        Σ weight·term with weights that hold the *global* count, so that  gradient = Σ_ranks gradient of the rank's loss
    weights     FSDP2 (torch.distributed.fsdp.fully_shard): a parameter [n, ...] is cut into W pieces of ceil(n/W) rows; a block's
                pieces are gathered for its forward and backward pass and freed again, its gradients are summed and cut the
                same way, and AdamW updates the piece. On CUDA they are gathered in bf16, and summed in float32.
    rollouts    the whole policy is gathered once, into a plain model: nothing in the decode loop waits for anyone

FSDP gathers in each forward and backward pass, so every rank must do equally many: see `even`.
"""
import os
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from escrag_min.model.decoding import packed_weights
from escrag_min.qwen2 import Block, Qwen2
from escrag_min.runtime.args import check

TIMEOUT = timedelta(hours=4)        # of a collective: a rank may wait for another's long rollout
FILLER = [([0], [[0], [0]])]        # a pack that a rank without work computes, with weight 0


# --- the world ---

def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def is_main():
    """Rank 0: the one that prints and writes."""
    return rank() == 0


def default_device():
    """This rank's GPU, or the CPU."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


@contextmanager
def world():
    """The process group of a run, from torchrun's environment; with plain `python` nothing. Usable as a decorator of main().

    An error in one rank ends the whole run within seconds: that rank says what it is, the others leave in silence, also out
    of a collective that would never end.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    if backend == "gloo":
        _check_gloo()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    failed = f"escrag/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/failed"
    leaving = threading.Event()
    threading.Thread(target=_leave_when_another_fails, args=(store, failed, leaving), daemon=True).start()
    try:
        try:
            yield
        except SystemExit:      # one that every rank comes to, such as pre-emption or a wrong option
            total(0)
            raise
        else:
            total(0)            # nobody leaves while another still needs it
        finally:
            leaving.set()
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error, store, failed)
    dist.destroy_process_group()


def _check_gloo():
    """FSDP averages gradients. torch 2.6 and 2.7 on a CPU quietly sum them instead (2.13 does not; GPUs never did)."""
    mean = torch.empty(1)
    with warnings.catch_warnings():         # of a new name for it, which 2.6 has not
        warnings.simplefilter("ignore")
        dist.reduce_scatter_tensor(mean, torch.ones(size()), op=dist.ReduceOp.AVG)
    check(mean.item() == 1, f"several ranks on a CPU need a torch whose gloo averages: 2.13 does, {torch.__version__} does not")


def _fail(error, store, failed):
    """Say why and leave at once: an interpreter that ends in order may wait for the collectives of the others."""
    try:
        alone = store.add(failed, 1) == 1
    except RuntimeError:        # the rank that held the store has left
        alone = False
    if not alone:               # the first to fail says why; torchrun ends this one
        time.sleep(5)
        os._exit(1)
    if not isinstance(error, (ValueError, OSError)) or os.environ.get("ESCRAG_TRACEBACK"):
        traceback.print_exception(error)
    print(f"{os.path.basename(sys.argv[0])}: error: rank {rank()}: {error or type(error).__name__}", file=sys.stderr, flush=True)
    os._exit(2)


def _leave_when_another_fails(store, failed, leaving):
    while not leaving.wait(1.0):
        try:
            ended = store.check([failed])
        except Exception:       # the store is gone, and with it the run
            ended = True
        if ended and not leaving.wait(2.0):
            os._exit(1)


def say(*words):
    """print, once."""
    if is_main():
        print(*words, flush=True)


def first(function):
    """Rank 0 calls it, all get what it returned or raised: for what happens once, such as making a folder."""
    if size() == 1:
        return function()
    answer = [None, None]
    if is_main():
        try:
            answer[0] = function()
        except (ValueError, OSError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        raise answer[1]
    return answer[0]


def main_first(function):
    """Rank 0 calls it before the others do, and each has its own result: where the first call leaves a file for the rest."""
    mine = []
    first(lambda: mine.append(function()))
    return mine[0] if is_main() else function()


def total(*values):
    """Sums over ranks of numbers -> list of float (float64 in between). Integers up to 2^53 are exact."""
    if size() == 1:
        return [float(v) for v in values]
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def gather(items):
    """A list from each rank -> one list, rank after rank: the order that `share` cut."""
    if size() == 1:
        return list(items)
    lists = [None] * size()
    dist.all_gather_object(lists, list(items))
    return [item for part in lists for item in part]


def share(items):
    """This rank's consecutive part of a list; parts differ by one at most."""
    return items[len(items) * rank() // size():len(items) * (rank() + 1) // size()]


def even(packs):
    """[(pack, True), ...], and (FILLER, False) up to as many as the rank with the most has: equally many passes for all.

    A filler counts nothing: multiply its loss by 0, and leave its numbers out.
    """
    most = max(gather([len(packs)]))
    return [(pack, True) for pack in packs] + [(FILLER, False)] * (most - len(packs))


# --- the model ---

def shard(model):
    """Cut a model's parameters over the ranks (in place; the optimizer comes after) -> read, for checkpoint.load.

    One group a block, one for the rest: an embedding and the head tied to it are one parameter of one group. A sharded weight
    may be touched in the model's own forward passes only, `forward` and `log_probs`.
    """
    device = torch.device(default_device())
    mesh = init_device_mesh(device.type, (size(),))
    kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if device.type == "cuda" else {}
    policy = MixedPrecisionPolicy(**kinds, cast_forward_inputs=False)       # False: rotary tables stay float32
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hasattr(model, "log_probs"):
        register_fsdp_forward_method(model, "log_probs")

    def read(parameter, view):
        """This rank's rows of a tensor (or of a view on a file, of which no more is read) as the model's parameter."""
        n = parameter.shape[0]
        each = -(-n // size())
        rows = view[min(n, each * rank()):min(n, each * (rank() + 1))].to(device, parameter.dtype, copy=True)
        return DTensor.from_local(rows, parameter.device_mesh, [Shard(0)], run_check=False, shape=parameter.shape,
                                  stride=parameter.stride())
    return read


def load(cls, path_or_hub_id, dtype=torch.float32):
    """cls.from_pretrained on this rank's device; in a world of several, each rank reads only its own rows."""
    return cls.from_pretrained(path_or_hub_id, dtype, default_device(), shard=shard if size() > 1 else None)


def compute_dtype(device):
    """Context of a training pass: bf16 matrix products on CUDA, float32 on a CPU. Log-probs, losses and rewards stay float32."""
    return torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda")


def frozen_dtype():
    """Of weights that are only read (sampling, judging, rewards): bf16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def parameters(model):
    """{name: parameter}, each a rank's piece where sharded; what a pass without gradients left gathered is freed first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def whole(tensor):
    """A sharded tensor in full (all ranks must ask); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(loss):
    """loss.backward(), such that gradients are *sums* over ranks: FSDP divides by W, and the weights in the loss already have."""
    (loss * size()).backward()


def clip_gradient(model, max_norm):
    """Scale the gradient to max_norm where it is larger -> its norm before, over all ranks (float)."""
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)).item()


@contextmanager
def gathered(policy):
    """The policy as one plain Qwen2 for sampling: whole weights, bf16 on CUDA, nothing shared with other ranks, gone at the end.

    On a CPU in a world of one it is the policy itself. On any CPU its weights are packed (decoding.py).
    """
    if size() == 1 and frozen_dtype() == torch.float32:
        with packed_weights(policy):
            yield policy
        return
    with torch.device("meta"):
        plain = Qwen2(policy.config)
    weights = {name: whole(p.detach().to(frozen_dtype())) for name, p in parameters(policy).items()}
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    del weights
    with packed_weights(plain):
        yield plain.eval().requires_grad_(False)


# --- files ---

def save_pretrained(model, path, tokenizer_from):
    """model.save_pretrained by rank 0, which gathers one shard of the folder at a time."""
    parameters(model)
    model.save_pretrained(path if is_main() else None, tokenizer_from, whole=whole)
    total(0)        # nobody goes on before it is written


def save_state(tensors, folder):
    """{name: tensor or {...}} into a new folder, each rank its pieces, flushed to disk. OSError in all ranks, or in none."""
    _checkpoint(dcp.save, tensors, folder)


def load_state(tensors, folder):
    """Fill the tensors in place from what save_state wrote, also on another number of ranks. OSError in all, or in none."""
    _checkpoint(dcp.load, tensors, folder)


def _checkpoint(function, tensors, folder):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(tensors, checkpoint_id=folder)
    except dcp.CheckpointException as error:        # {rank: (exception, traceback)}
        where, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {where}: {reason}") from None
