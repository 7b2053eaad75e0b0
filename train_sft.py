"""Cold start (paper §3): teach the policy to reason in three stages, then reply.

    for each step:  batch of demonstrations -> packs of (prompt, [reasoned reply]) -> log-probs -> Σ w·nll -> AdamW

    python train_sft.py --model Qwen/Qwen2.5-3B-Instruct --data demonstrations.jsonl --out runs/sft
"""
import math
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from escrag_min.args import check, option, parse, run_script
from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records, split_by_dialogue
from escrag_min.logprob import token_logprobs
from escrag_min.packing import pack, split_into_packs
from escrag_min.prompts import fitted_ids, policy_prompt
from escrag_min.qwen2 import Qwen2
from escrag_min.sft import sft_loss, sft_weights
from escrag_min.tiny import model_or_tiny
from escrag_min.training import (RunArgs, batch_indices, compute_dtype, default_device, learning_rate, load_checkpoint,
                                 log_metrics, make_optimizer, open_run, save_checkpoint, update)


@dataclass
class Args(RunArgs):
    data: str = option(str(SAMPLES / "demonstrations.jsonl"), "demonstrations (prompt-completion JSONL) or an ESConv file")
    limit: int | None = option(None, "use so many demonstrations, drawn with the seed; the paper has 500")
    epochs: float = option(3.0, "passes over the data (ours)")
    batch_size: int = option(16, "demonstrations per optimizer step (ours)")
    max_length: int = option(2048, "tokens of prompt and reply; the oldest turns of a longer prompt are dropped")
    held_out: float = option(0.05, "share of the dialogues kept for validation; 0: none")
    eval_every: int = option(20, "validate every so many steps")


def demonstration_tree(tokenizer, record, max_length):
    """A demonstration as ((prompt ids, [reply ids]), old turns dropped): pass 1's prompt, the reasoned reply, its end of turn."""
    reply = tokenizer.reply_ids(record["completion"])
    check(len(reply) < max_length, f"{record['id']}: the completion alone has {len(reply)} tokens, --max-length is {max_length}")
    prompt, dropped = fitted_ids(tokenizer, policy_prompt, record["prompt"], max_length - len(reply))
    return (prompt, [reply]), dropped


def batch_loss(model, trees, args, device, backward=False):
    """Mean nll per response token over all trees, micro-batch by micro-batch (sum with global weights) -> float, nats."""
    total_tokens, total = sum(len(branches[0]) for _, branches in trees), 0.0
    for micro in split_into_packs(trees, args.tokens_per_batch):
        packed = pack(micro).to(device)
        with compute_dtype(device):
            hidden = model(packed.tokens[None], mask=packed)[0]                     # [T,H]
            logp = token_logprobs(model, hidden, packed.pred, packed.targets)       # [N]
        loss = sft_loss(logp, sft_weights(len(logp), total_tokens, device))
        if backward:
            loss.backward()
        total += loss.item()
    return total


def main(argv=None):
    args = parse(Args, __doc__, argv)
    check(args.batch_size > 0, f"--batch-size {args.batch_size} must be at least 1")
    device = default_device()
    records = read_records(args.data, "demonstration", args.limit, args.seed)
    out = open_run("train_sft", args)
    args.model = str(model_or_tiny(args.model, out))
    tokenizer = Tokenizer.from_pretrained(args.model)
    train, held_out = split_by_dialogue(records, args.held_out, args.seed) if args.held_out else (records, [])
    fitted = [demonstration_tree(tokenizer, r, args.max_length) for r in train + held_out]
    turns_dropped = sum(dropped for _, dropped in fitted)
    trees, held_out_trees = ([tree for tree, _ in part] for part in (fitted[:len(train)], fitted[len(train):]))
    model = Qwen2.from_pretrained(args.model, torch.float32, device).train()
    model.model.checkpoint_blocks = args.checkpoint_blocks
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    steps = args.steps or math.ceil(args.epochs * len(trees) / args.batch_size)
    first = load_checkpoint(out, model, optimizer) if args.resume else 0
    print(f"{len(train)} demonstrations, {len(held_out)} held out, {turns_dropped} old turns dropped to fit "
          f"--max-length; {steps} steps on {device}, writing {out}")

    bar = tqdm(range(first, steps), initial=first, total=steps, desc="sft")
    for step in bar:
        began = time.time()
        batch = [trees[i] for i in batch_indices(len(trees), args.batch_size, step, args.seed)]
        loss = batch_loss(model, batch, args, device, backward=True)
        lr = learning_rate(step, steps, args.lr, args.warmup * steps)
        norm = update(model, optimizer, lr, args.clip_norm)
        metrics = {"step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm,
                   "response_tokens": sum(len(b[0]) for _, b in batch), "seconds": time.time() - began}
        if held_out_trees and ((step + 1) % args.eval_every == 0 or step + 1 == steps):
            with torch.no_grad():
                metrics["held_out_loss"] = batch_loss(model, held_out_trees, args, device)
        log_metrics(out, metrics)
        bar.set_postfix(loss=f"{loss:.3f}")
        if (step + 1) % args.save_every == 0 and step + 1 < steps:
            save_checkpoint(out, step + 1, model, optimizer, args.model)
    model.save_pretrained(out / "model", args.model)
    print(f"saved {out / 'model'}")


if __name__ == "__main__":
    run_script(main)
