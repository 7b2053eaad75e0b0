"""The reward model (paper §3): a scalar head on Qwen-2.5, by Bradley-Terry on
preference pairs.

    for each step:
        batch of pairs -> packs of (dialogue, [chosen, rejected])
        two scores -> -log σ(r⁺ - r⁻) -> AdamW

    python train_rm.py --model Qwen/Qwen2.5-7B-Instruct \\
        --data preferences.jsonl --out runs/rm
    torchrun --nproc_per_node=2 train_rm.py --preset rm-7b --out runs/rm
"""
import math
import time
from dataclasses import dataclass

import torch

from escrag_min.chat import Tokenizer, split_think
from escrag_min.data import SAMPLES, read_records, split_by_dialogue
from escrag_min.model.tiny import model_or_tiny
from escrag_min.packing import pack, split_into_packs
from escrag_min.reward import RewardModel, bradley_terry_loss, reward_tree
from escrag_min.runtime.args import about, check, option, run_script
from escrag_min.runtime.distributed import (
    backward,
    compute_dtype,
    default_device,
    even,
    first,
    gather,
    load,
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
    update,
)
from escrag_min.runtime.presets import parse_run
from escrag_min.runtime.runs import Run, RunArgs

PAIRS_SCORED = 256      # ours


@dataclass
class Args(RunArgs):
    data: str = option(str(SAMPLES / "preferences.jsonl"), "preference pairs (TRL JSONL); or an ESConv file: human replies "
                       "against replies of like length from other dialogues")
    epochs: float = option(2.0, "passes over the data (ours)")
    batch_size: int = option(16, "pairs per optimizer step (ours)")
    margin: float = option(0.0, "a chosen reply must score this much more (ours)")
    max_length: int = option(2048, "tokens of dialogue and reply; the oldest turns of a longer dialogue are dropped")
    held_out: float = option(0.1, "share of the dialogues kept to measure accuracy (ours)")


def pair_tree(tokenizer, record, max_length):
    """A pair as ((dialogue ids, [chosen ids, rejected ids]), old turns dropped): the replies as the client would see them."""
    replies = [split_think(record[key])[1] for key in ("chosen", "rejected")]
    check(all(replies), f"{record['id']}: a reply is empty but for its reasoning; the reward model needs two to compare")
    with about(f"{record['id']}, --max-length {max_length}"):
        return reward_tree(tokenizer, record["prompt"], replies, max_length)


def usable_pairs(trees):
    """Without the pairs whose two replies are the same ids: nothing can be learned from them -> (trees, number dropped)."""
    kept = [tree for tree in trees if tree[1][0] != tree[1][1]]
    return kept, len(trees) - len(kept)


def pair_scores(model, micro, device):
    """A micro-batch of B pairs -> (chosen [B], rejected [B])"""
    with compute_dtype(device):
        scores = model(pack(micro).to(device))                  # [2B], chosen and rejected in turn
    return scores.view(-1, 2).unbind(dim=1)


@torch.no_grad()
def all_scores(model, trees, args, device):
    """Pairs -> (chosen [n], rejected [n]) on the CPU; under torchrun each rank scores its share."""
    pairs = []
    for micro, real in even(split_into_packs(share(trees), args.tokens_per_batch)):
        scores = torch.stack(pair_scores(model, micro, device), dim=1)              # [B,2]
        pairs += scores.tolist() if real else []
    return torch.tensor(gather(pairs)).unbind(dim=1)


def evaluate(model, trees, args, device):
    """Held-out pairs -> accuracy (a tie is not correct); that of "the longer reply wins" (in tokens; equal lengths count half, as
    for a coin), which a reward model must beat to know more than length; loss in nats."""
    chosen, rejected = all_scores(model, trees, args, device)
    longer = sum((len(good) > len(bad)) + (len(good) == len(bad)) / 2 for _, (good, bad) in trees) / len(trees)
    return {"held_out_accuracy": (chosen > rejected).float().mean().item(), "longer_wins_accuracy": longer,
            "held_out_loss": bradley_terry_loss(chosen, rejected).mean().item()}


def standardise(model, trees, args, device):
    """Give the model mean and std of its scores on training replies: its rewards are in those units. Of PAIRS_SCORED pairs at
    most, evenly spaced, which know a std to 3%."""
    scores = torch.cat(all_scores(model, trees[::-(-len(trees) // PAIRS_SCORED)], args, device))
    model.mean, model.std = scores.mean().item(), scores.std().item()


def batch_loss(model, trees, args, device):
    """Mean Bradley-Terry loss over the pairs of all ranks, with its gradient -> (loss in nats, accuracy). trees: this rank's."""
    pairs, loss, correct = int(total(len(trees))[0]), 0.0, 0
    for micro, real in even(split_into_packs(trees, args.tokens_per_batch)):
        chosen, rejected = pair_scores(model, micro, device)                                    # [B] each
        micro_loss = real * bradley_terry_loss(chosen, rejected, args.margin).sum() / pairs     # global count
        backward(micro_loss)
        loss += micro_loss.item()
        correct += real * (chosen > rejected).sum().item()
    loss, correct = total(loss, correct)
    return loss, correct / pairs


@world()
def main(argv=None):
    args = parse_run("train_rm", Args, __doc__, argv)
    if args is None:        # --plan
        return
    check_batch("--batch-size", args.batch_size, "pairs")
    device = default_device()
    records = read_records(args.data, "preference", args.limit, args.seed)
    run = Run("train_rm", args, held_out=("held_out_accuracy", max))
    args.model = first(lambda: str(model_or_tiny(args.model, run.out)))
    tokenizer = Tokenizer.from_pretrained(args.model)
    parts = split_by_dialogue(records, args.held_out, args.seed)
    train, held_out = ([pair_tree(tokenizer, r, args.max_length) for r in part] for part in parts)
    for part, fitted in zip(parts, (train, held_out)):
        check_trees(part, [tree for tree, _ in fitted], args.tokens_per_batch)
    turns_dropped = sum(dropped for _, dropped in train + held_out)
    (train, same), (held_out, same_too) = (usable_pairs([tree for tree, _ in part]) for part in (train, held_out))
    check(train and held_out, f"{args.data}: no pair is left to train on or to measure with")
    model = load(RewardModel, args.model).train()
    check_positions("--max-length", args.max_length, model)
    model.model.checkpoint_blocks = checkpointed(args, model.config)
    model.max_length = args.max_length
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    steps = args.steps or math.ceil(args.epochs * len(train) / args.batch_size)
    run.start(model, optimizer)
    say(f"{len(train)} pairs, {len(held_out)} held out, {same + same_too} dropped (both replies the same), "
        f"{turns_dropped} old turns dropped to fit --max-length; {steps} steps on {device}, writing {run.out}")

    result = None
    for step in run.steps(steps, "rm"):
        began = time.time()
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        loss, accuracy = batch_loss(model, share(batch), args, device)
        lr = learning_rate(step, steps, args.lr, args.warmup * steps)
        norm, skipped = update(model, optimizer, lr, args.clip_norm, loss)
        metrics = {"step": step + 1, "loss": loss, "accuracy": accuracy, "lr": lr, "grad_norm": norm, "skipped": int(skipped),
                   "seconds": time.time() - began}
        if (step + 1) % args.eval_every == 0 or step + 1 == steps:
            result = evaluate(model, held_out, args, device)
            metrics.update(result)
            if run.improves(metrics) and args.keep_best:
                standardise(model, train, args, device)
                run.save_best()
        run.log(metrics, show="loss")
    result = result or evaluate(model, held_out, args, device)      # none where --resume found nothing left to do
    standardise(model, train, args, device)
    run.end()
    say(f"held-out accuracy {result['held_out_accuracy']:.3f} on {len(held_out)} pairs "
        f"(the longer reply wins: {result['longer_wins_accuracy']:.3f}); saved {run.out / 'model'}")


if __name__ == "__main__":
    run_script(main)
