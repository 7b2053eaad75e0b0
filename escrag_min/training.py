"""What the three training loops share: AdamW on float32 masters, schedule, clipping, the run's folder, save and resume.

    lr(s)  = peak · min(1, (s+1)/warmup) · (0.1 + 0.9 · (1 + cos(π·p)) / 2),   p = (s - warmup)/(steps - warmup) in [0, 1]

Weights are float32 whatever the checkpoint's dtype: at lr 1e-6 a bf16 weight never moves. On CUDA the compute is bf16.

A run is a function of its options: the batch of step s comes from (seed, s), so does its random stream. A checkpoint is
therefore weights, AdamW moments and the step's number, and a resumed run is the run that was never stopped.
"""
import contextlib
import hashlib
import json
import math
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from escrag_min.args import option
from escrag_min.checkpoint import atomic_folder, read_json, read_tensors, write_json
from escrag_min.data import read_finished, write_jsonl

KEEP_CHECKPOINTS = 2
BEFORE_STEP_1 = {"config.json", "index", "tiny", "tiny-rm", "tiny-rm-base"}     # a folder that holds no more is unused


@dataclass
class RunArgs:
    """The options that mean the same in every trainer. Each adds its own, and its own defaults where they differ."""

    model: str = option("", "folder or Hub id of a Qwen-2.5 to start from; none: a tiny random one is made")
    out: str = option("", "run folder; none: a new one under runs/")
    resume: bool = option(False, "go on with the run in --out from its newest complete checkpoint")
    limit: int | None = option(None, "use so many records of --data, drawn with the seed")
    epochs: float = option(1.0, "passes over the data (ours)")
    steps: int | None = option(None, "steps, instead of --epochs")
    lr: float = option(1e-5, "peak learning rate (ours)")
    warmup: float = option(0.05, "share of the steps with a rising learning rate (ours)")
    weight_decay: float = option(0.0, "AdamW weight decay on matrices (ours)")
    clip_norm: float = option(1.0, "gradient norm is clipped to this (ours)")
    tokens_per_batch: int = option(4096, "tokens per forward pass (micro-batch); memory, not results, depends on it")
    checkpoint_blocks: bool = option(False, "recompute activations in the backward pass: less memory, a third more time")
    save_every: int = option(100, "checkpoint every so many steps")
    seed: int = option(0, "random seed")


def default_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_dtype(device):
    """bf16 matrix products on CUDA, float32 on a CPU. Norms, log-probs, losses and rewards stay float32."""
    return torch.autocast("cuda", torch.bfloat16) if str(device).startswith("cuda") else contextlib.nullcontext()


def make_optimizer(model, lr, weight_decay=0.0, betas=(0.9, 0.95)):
    """AdamW; weight decay on matrices only, not on norms and biases."""
    parameters = list(model.parameters())
    if any(p.dtype != torch.float32 for p in parameters):
        raise ValueError("make_optimizer: training needs float32 master weights; load the model with dtype=torch.float32")
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def learning_rate(step, steps, peak, warmup):
    """Linear warmup, then a cosine down to a tenth of the peak at the last step. step counts from 0; warmup in steps, also 1.2."""
    if step < warmup:
        return peak * min(1.0, (step + 1) / warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def update(model, optimizer, lr, max_norm=1.0):
    """Clip the gradient to max_norm, take one AdamW step at lr, clear the gradient -> the norm before clipping (float).

    A gradient that is not finite changes nothing, and is said.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    else:
        print(f"step skipped: the gradient's norm is {norm}")
    optimizer.zero_grad(set_to_none=True)
    return norm


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


def step_generator(seed, step, device="cpu"):
    """The random stream of one step, so that a resumed run draws what the straight one would have drawn."""
    return torch.Generator(device).manual_seed(derived_seed(seed, "rollout", step))


# --- the run's folder: model/  checkpoints/step-NNNNNN/  metrics.jsonl  config.json  samples ---

def open_run(script, args):
    """Make args.out (or a new folder under runs/) and write config.json -> Path. A used folder needs --resume."""
    out = Path(args.out) if args.out else Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; a folder is needed")
    if out.exists() and not args.resume and {p.name for p in out.iterdir()} - BEFORE_STEP_1:
        raise ValueError(f"--out {out} is not empty; choose another folder, or add --resume to go on with that run")
    if args.resume and not (out / "config.json").exists():
        raise ValueError(f"--resume: {out} holds no run to go on with")
    out.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        write_json(out / "config.json", {
            "script": script, "options": asdict(args), "torch": torch.__version__, "python": platform.python_version(),
            "device": default_device(), "started": time.strftime("%Y-%m-%d %H:%M:%S")})
    return out


def resumable_folder(out, script, args, may_change=()):
    """A new folder with config.json, or an earlier one of the same script and options to go on with -> Path.

    may_change: options that do not touch the results.
    """
    out = Path(out) if out else Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = {k: v for k, v in asdict(args).items() if k not in ("out", *may_change)}
    if (out / "config.json").exists():
        earlier = read_json(out / "config.json")
        changed = [f"--{k}".replace("_", "-") for k in options if options[k] != earlier.get("options", {}).get(k)]
        if earlier.get("script") != script or changed:
            raise ValueError(f"--out {out} was made by {earlier.get('script')} with other options ({', '.join(changed)}); choose "
                             "another folder")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is not an empty folder; choose another")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", {"script": script, "options": options})
    return out


def log_metrics(out, metrics):
    """Append one line to metrics.jsonl; a value that is not finite becomes null, since JSON has no NaN."""
    metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def save_checkpoint(out, step, model, optimizer, tokenizer_from):
    """checkpoints/step-NNNNNN after `step` finished steps: the model in Hugging Face layout, and the AdamW moments."""
    folder = out / "checkpoints" / f"step-{step:06d}"
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary / "model", tokenizer_from)
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        write_json(temporary / "state.json", {"step": step})
    for old in sorted(folder.parent.glob("step-??????"))[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)


def load_checkpoint(out, model, optimizer):
    """Restore the newest checkpoint that is whole -> finished steps (0: there is none). Says which one it takes."""
    for folder in sorted((out / "checkpoints").glob("step-??????"), reverse=True):
        try:
            step = read_json(folder / "state.json")["step"]
            weights = dict(read_tensors(folder / "model"))
            moments = torch.load(folder / "optimizer.pt", weights_only=True)
        except Exception as error:      # torch.load raises many kinds for a truncated file
            print(f"--resume: {folder} is not complete ({str(error).splitlines()[0][:120]}); trying the one before")
            continue
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(moments)
        forget_after(out, step)
        print(f"resuming {folder}")
        return step
    print(f"--resume: {out} has no checkpoint yet; starting at step 0")
    forget_after(out, 0)
    return 0


def forget_after(out, step):
    """Cut metrics.jsonl and samples.jsonl back to the finished steps, so that the steps done again are not there twice."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (out / name).exists():
            write_jsonl(out / name, [record for record in read_finished(out / name) if record["step"] <= step])
