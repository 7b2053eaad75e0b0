"""What each rank of runtime/test_distributed.py does: RANK=r WORLD_SIZE=w ... python tests/ranks.py FOLDER [check ...]

Rank 0 writes FOLDER/results-w.pt: {check: what it returned}. The test compares with one process; the functions that both run
are here, too.
"""
import sys
import time
from pathlib import Path

import torch
from conftest import small_config, waves

import train_grpo
import train_rm
import train_sft
from escrag_min import sampling
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import RewardModel, score_replies
from escrag_min.runtime import distributed
from escrag_min.runtime.optimizer import make_optimizer, update
from escrag_min.runtime.runs import Run

# Six trees of very unlike size: with 5 to 9 tokens a pass, ranks come to different numbers of passes
TREES = [([5, 6, 7], [[8, 9]]), ([10], [[11, 12, 13, 14, 15, 16]]), ([1, 2, 3, 4, 5, 6], [[7]]), ([20, 21], [[22], [23]]),
         ([3], [[4, 5]]), ([9, 8], [[7, 6, 5, 4, 3]])]
PAIRS = [([5, 6, 7], [[8, 9], [9]]), ([10], [[11, 12], [13]]), ([1, 2, 3, 4], [[7], [8, 8]]), ([20, 21], [[22], [23]])]
VARIANTS = {"tied, 33 words": (True, 33), "untied, 61 words": (False, 61)}


def whole_gradient(model):
    return {name: distributed.whole(p.grad).clone() for name, p in model.named_parameters()}


def whole_weights(model):
    return {name: distributed.whole(p.detach()).clone() for name, p in distributed.parameters(model).items()}


def saved_model(folder, cls, tie, words):
    """The folder of a model with weights that any process can make again."""
    path = Path(folder) / f"{cls.__name__}-{tie}-{words}"
    if not path.exists():
        waves(cls(small_config(tie=tie, vocab_size=words))).save_pretrained(path)
    return path


def sft(folder):
    """Two steps -> (loss, gradient, its norm) of the first, weights at the end."""
    out = {}
    for name, (tie, words) in VARIANTS.items():
        model = distributed.load(Qwen2, saved_model(folder, Qwen2, tie, words))
        optimizer = make_optimizer(model, 1e-2)
        args = train_sft.Args(tokens_per_batch=9)
        first = {}
        for _ in range(2):
            loss = train_sft.batch_loss(model, distributed.share(TREES), args, "cpu", train=True)
            gradient = whole_gradient(model)
            norm, _ = update(model, optimizer, 1e-2, 1.0, loss)
            first = first or {"loss": loss, "gradient": gradient, "norm": norm}
        held_out = train_sft.batch_loss(model, distributed.share(TREES[:1]), args, "cpu")       # one tree: other ranks have none
        out[name] = {**first, "weights": whole_weights(model), "held_out": held_out}
    return out


def rm(folder):
    out = {}
    for name, (tie, words) in VARIANTS.items():
        model = distributed.load(RewardModel, saved_model(folder, RewardModel, tie, words))
        args = train_rm.Args(tokens_per_batch=8)
        loss, accuracy = train_rm.batch_loss(model, distributed.share(PAIRS), args, "cpu")
        gradient = whole_gradient(model)
        model.zero_grad()
        train_rm.standardise(model, PAIRS, args, "cpu")
        out[name] = {"loss": loss, "accuracy": accuracy, "gradient": gradient, "mean": model.mean, "std": model.std,
                     "held_out": train_rm.evaluate(model, PAIRS, args, "cpu")}
    return out


def grpo(folder):
    """One update on trees with advantages; "none left": a rank whose responses were all dropped."""
    out = {}
    for name, trees in (("all", TREES), ("none left", TREES[:2])):
        model = distributed.load(Qwen2, saved_model(folder, Qwen2, True, 33))
        mine = distributed.share(trees) if name == "all" else trees if distributed.is_main() else []
        args = train_grpo.Args(tokens_per_batch=9, max_new_tokens=8)
        advantages = [(-1.0) ** tree[0][0] * len(ids) / 3 for tree in mine for ids in tree[1]]
        loss = 0.0
        for packed, advantage, weight, real in train_grpo.micro_batches(mine, advantages, args, "cpu"):
            logp = model.log_probs(packed, 0.7, 30)
            micro_loss, stats = train_grpo.grpo_loss(logp, logp.detach() + 0.1, advantage, weight)
            distributed.backward(micro_loss)
            loss += micro_loss.item()
        out[name] = {"loss": distributed.total(loss)[0], "gradient": whole_gradient(model)}
    return out


def rollouts(folder):
    """Case 42 and 22: each rank samples its own places; one that stops at once does not wait for one that never stops."""
    model = distributed.load(Qwen2, saved_model(folder, Qwen2, False, 61))
    places = distributed.share(range(2 * distributed.size()))
    generators = [train_grpo.step_generator(0, 0, place) for place in places]
    with distributed.gathered(model) as sampler:
        replies = [tuple(c.tokens) for group in sampling.sample(sampler, [[1, 2, 3]] * len(places), 4, 12, generator=generators)
                   for c in group]
        plain = not any("FSDP" in type(m).__name__ for m in sampler.modules())
        dtypes = {p.dtype for p in sampler.parameters()}
    with distributed.gathered(model) as sampler:
        stops = range(61) if distributed.is_main() else ()
        if not distributed.is_main():
            time.sleep(1.5)
        length = max(len(c.tokens) for group in sampling.sample(sampler, [[1, 2, 3]], 2, 40, stop_tokens=stops) for c in group)
        done = time.time()
    return {"replies": distributed.gather(replies), "plain": plain, "float32": dtypes == {torch.float32},
            "lengths": distributed.gather([length]), "done": distributed.gather([done])}


def scores(folder):
    """Rewards where some ranks have nothing that the reward model could read."""
    from escrag_min.chat import Tokenizer
    tiny = Path(folder) / "tiny"
    model, tokenizer = distributed.load(RewardModel, tiny), Tokenizer.from_pretrained(tiny)
    with torch.no_grad():
        for p in model.score.parameters():
            (p.to_local() if hasattr(p, "to_local") else p).fill_(0.5)
    items = [([{"role": "user", "content": "hi"}], ["", ""]), ([{"role": "user", "content": "I am sad."}], ["I hear you.", "ok"])]
    return distributed.gather(score_replies(model, tokenizer, distributed.share(items), tokens_per_batch=140))


def files(folder):
    """What each rank holds after loading, and what it writes."""
    source = saved_model(folder, Qwen2, True, 33)
    model = distributed.load(Qwen2, source)
    held = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()]
    distributed.save_pretrained(model, Path(folder) / f"written-{distributed.size()}", None)
    outside = None
    try:        # case 23
        model.logits(torch.zeros(1, 24))
    except RuntimeError as error:
        outside = str(error)
    return {"held": distributed.gather([sum(held)]), "outside": outside,
            "tied": model.lm_head.weight is model.model.embed_tokens.weight}


def resume(folder):
    """FOLDER/run as it is: three steps further, with the moments it began with."""
    args = train_sft.Args(out=str(Path(folder) / "run"), resume=True, save_every=3)
    run = Run("test", args, ("held_out_loss", min))
    model = distributed.load(Qwen2, saved_model(folder, Qwen2, True, 33))
    run.start(model, make_optimizer(model, 1e-2))
    tensors = {kind: {name: distributed.whole(t).clone() for name, t in part.items()} for kind, part in run.tensors().items()}
    end, losses = run.finished + 3, []
    for _ in run.steps(end + 1, "test"):
        losses.append(train_sft.batch_loss(model, distributed.share(TREES), train_sft.Args(), "cpu", train=True))
        _, skipped = update(model, run.optimizer, 1e-2, 1.0, losses[-1])
        run.log({"step": run.finished + 1, "loss": losses[-1], "skipped": int(skipped)}, show="loss")
        if run.finished + 1 == end:
            run.finished = end
            run.save()
            break
    after = {kind: {name: distributed.whole(t).clone() for name, t in part.items()} for kind, part in run.tensors().items()}
    return {"from": end - 3, "before": tensors, "after": after, "losses": losses}


def fail(folder):
    """Rank 1 has an error while the others wait for it."""
    if distributed.rank() == 1:
        raise ValueError("preferences.jsonl:7: no such thing")
    distributed.gather([1])


CHECKS = {f.__name__: f for f in (sft, rm, grpo, rollouts, scores, files, resume, fail)}


@distributed.world()
def main(folder, names):
    results = {name: CHECKS[name](folder) for name in names}
    if distributed.is_main():
        torch.save(results, Path(folder) / f"results-{distributed.size()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
