"""Cold start (paper §3): teach the policy to reason in three stages, then reply.

    for each step:
        batch of demonstrations -> packs of (prompt, [reasoned reply])
        log-probs -> Σ w·nll -> AdamW

The prompt is that of pass 1; with --retrieve n each demonstration comes a
second time, as the answer to the final prompt of pass 2.

    python train_sft.py --model Qwen/Qwen2.5-3B-Instruct \\
        --data demonstrations.jsonl --out runs/sft
    torchrun --nproc_per_node=2 train_sft.py --preset sft-3b --out runs/sft
"""
import math
import time
from dataclasses import dataclass

import torch

from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records, split_by_dialogue
from escrag_min.model.tiny import model_or_tiny
from escrag_min.packing import pack, split_into_packs
from escrag_min.prompts import fitted_ids, policy_prompt
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.rollout import first_pass
from escrag_min.runtime.args import about, check, option, run_script
from escrag_min.runtime.distributed import (
    backward,
    compute_dtype,
    default_device,
    even,
    first,
    gather,
    gathered,
    load,
    main_first,
    say,
    share,
    total,
    world,
)
from escrag_min.runtime.memory import checkpointed
from escrag_min.runtime.optimizer import (
    batch_indices,
    check_batch,
    check_positions,
    check_trees,
    learning_rate,
    make_optimizer,
    step_generator,
    update,
)
from escrag_min.runtime.presets import parse_run
from escrag_min.runtime.runs import Run, RunArgs
from escrag_min.sft import sft_loss, sft_weights


@dataclass
class Args(RunArgs):
    data: str = option(str(SAMPLES / "demonstrations.jsonl"), "demonstrations (prompt-completion JSONL) or an ESConv file")
    limit: int | None = option(None, "use so many demonstrations, drawn with the seed; the paper has 500")
    epochs: float = option(3.0, "passes over the data (ours)")
    batch_size: int = option(16, "demonstrations per optimizer step (ours)")
    max_length: int = option(2048, "tokens of prompt and reply; the oldest turns of a longer prompt are dropped")
    held_out: float = option(0.05, "share of the dialogues kept for validation (of pass 1); 0: none")
    retrieve: int = option(0, "teach pass 2 too: each demonstration again, as the answer to a final prompt with a draft of the "
                           "starting policy and n exemplars (ours: 0; a small model does not follow that prompt untaught)")
    exemplars: str = option(str(SAMPLES / "preferences.jsonl"), "for --retrieve, as in train_grpo.py")
    encoder: str = option("tfidf", "for --retrieve, as in train_grpo.py")
    max_new_tokens: int = option(256, "for --retrieve: tokens a draft may have")


def demonstration_tree(tokenizer, record, max_length):
    """A demonstration as ((prompt ids, [reply ids]), old turns dropped): pass 1's prompt, the reasoned reply, its end of turn."""
    reply = tokenizer.reply_ids(record["completion"])
    check(len(reply) < max_length, f"{record['id']}: the completion alone has {len(reply)} tokens, --max-length is {max_length}")
    with about(f"{record['id']}, --max-length {max_length}"):
        prompt, dropped = fitted_ids(tokenizer, policy_prompt, record["prompt"], max_length - len(reply))
    return (prompt, [reply]), dropped


def final_trees(records, model, tokenizer, index, args):
    """The demonstrations as (final prompt ids, [reply ids]): what train_grpo.py's pass 2 asks, answered.

    The draft in a prompt is sampled from the model as it is; exemplars are never of the own dialogue. Each rank drafts its share.
    """
    replies = [tokenizer.reply_ids(r["completion"]) for r in records]
    room = args.max_length - max(map(len, replies))
    streams = [step_generator(args.seed, 0, place) for place in share(range(len(records)))]
    with gathered(model) as sampler, about(f"--retrieve: --max-length {args.max_length} less the longest completion is {room}"):
        rollouts = first_pass(sampler, tokenizer, share(records), index, args.retrieve, max_new_tokens=args.max_new_tokens,
                              prompt_limit=room, generator=streams, progress=True)
    found = gather([(r.prompt, r.turns_dropped, len(r.exemplars)) for r in rollouts])
    say(f"final prompts: {sum(n for _, _, n in found) / len(found):.2f} exemplars on average (--retrieve {args.retrieve}), "
        f"{sum(dropped for _, dropped, _ in found)} old turns dropped to fit --max-length")
    return [(prompt, [reply]) for (prompt, _, _), reply in zip(found, replies)]


def batch_loss(model, trees, args, device, train=False):
    """Mean nll per response token over the trees of all ranks, micro-batch by micro-batch (sum with global weights) -> float, nats.

    trees: this rank's. train: with gradient.
    """
    total_tokens, loss = int(total(sum(len(branches[0]) for _, branches in trees))[0]), 0.0
    for micro, real in even(split_into_packs(trees, args.tokens_per_batch)):
        packed = pack(micro).to(device)
        with torch.set_grad_enabled(train), compute_dtype(device):
            logp = model.log_probs(packed)                                      # [N]
        micro_loss = sft_loss(logp, real * sft_weights(len(logp), total_tokens, device))
        if train:
            backward(micro_loss)
        loss += micro_loss.item()
    return total(loss)[0]


@world()
def main(argv=None):
    args = parse_run("train_sft", Args, __doc__, argv)
    if args is None:        # --plan
        return
    check_batch("--batch-size", args.batch_size, "demonstrations")
    check(args.retrieve >= 0, f"--retrieve {args.retrieve} must be 0 or more")
    check(not args.retrieve or args.max_length <= args.tokens_per_batch,
          f"--retrieve: final prompts may have --max-length {args.max_length} tokens; --tokens-per-batch {args.tokens_per_batch} "
          "must be at least that")
    check(not args.keep_best or args.held_out, "--keep-best needs --held-out above 0: without it nothing is measured")
    device = default_device()
    records = read_records(args.data, "demonstration", args.limit, args.seed)
    run = Run("train_sft", args, held_out=("held_out_loss", min))
    index = main_first(lambda: open_index(args.exemplars, args.encoder, run.out / "index")) if args.retrieve else None
    args.model = first(lambda: str(model_or_tiny(args.model, run.out)))
    tokenizer = Tokenizer.from_pretrained(args.model)
    train, held_out = split_by_dialogue(records, args.held_out, args.seed) if args.held_out else (records, [])
    fitted = [demonstration_tree(tokenizer, r, args.max_length) for r in train + held_out]
    turns_dropped = sum(dropped for _, dropped in fitted)
    check_trees(train + held_out, [tree for tree, _ in fitted], args.tokens_per_batch)
    trees, held_out_trees = ([tree for tree, _ in part] for part in (fitted[:len(train)], fitted[len(train):]))
    model = load(Qwen2, args.model).train()
    check_positions("--max-length", args.max_length, model)
    model.model.checkpoint_blocks = checkpointed(args, model.config)
    if args.retrieve:       # before --resume gives the model other weights: the same drafts each time
        second = final_trees(train, model, tokenizer, index, args)
        check_trees(train, second, args.tokens_per_batch)
        trees += second
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    steps = args.steps or math.ceil(args.epochs * len(trees) / args.batch_size)
    run.start(model, optimizer)
    twice = " (twice: once as pass 2)" if args.retrieve else ""
    say(f"{len(train)} demonstrations{twice}, {len(held_out)} held out, {turns_dropped} old turns dropped to fit "
        f"--max-length; {steps} steps on {device}, writing {run.out}")

    for step in run.steps(steps, "sft"):
        began = time.time()
        batch = [trees[i] for i in batch_indices(len(trees), args.batch_size, step, args.seed)]
        loss = batch_loss(model, share(batch), args, device, train=True)
        lr = learning_rate(step, steps, args.lr, args.warmup * steps)
        norm, skipped = update(model, optimizer, lr, args.clip_norm, loss)
        metrics = {"step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm, "skipped": int(skipped),
                   "response_tokens": sum(len(b[0]) for _, b in batch), "seconds": time.time() - began}
        if held_out_trees and ((step + 1) % args.eval_every == 0 or step + 1 == steps):
            metrics["held_out_loss"] = batch_loss(model, share(held_out_trees), args, device)
            if run.improves(metrics) and args.keep_best:
                run.save_best()
        run.log(metrics, show="loss")
    run.end()
    say(f"saved {run.out / 'model'}")


if __name__ == "__main__":
    run_script(main)
