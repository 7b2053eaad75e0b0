"""One dialogue state followed through Algorithm 1 (paper §3 and D), with every
number on the way.

    ./run docs/walkthrough.py               # a tiny random model: a few seconds
    ./run docs/walkthrough.py --model FOLDER --reward-model FOLDER \\
        --max-new-tokens 80 --state 12

What no model computes follows by hand from the numbers before it, as
docs/walkthrough.md shows. `walk` computes with the functions that train_grpo.py
calls, on a CPU in float32, and returns plain data; `tell` prints it. Unlike a
training run (ours): one state, few and short responses, β above 0, and a
learning rate so large that the second inner step is clipped.
"""
import contextlib
import math
import re
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_grpo
import train_rm
from escrag_min.runtime.args import check, option, parse, run_script
from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records
from escrag_min.grpo import clipped_objective, group_advantages, grpo_loss, kl_estimate
from escrag_min.packing import pack
from escrag_min.runtime.distributed import backward
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import RewardModel, score_replies, scored_tree
from escrag_min.rollout import draft_text, two_pass_rollout
from escrag_min.model.tiny import model_or_tiny, tiny_reward_model
from escrag_min.runtime.optimizer import make_optimizer, step_generator, update


@dataclass
class Args:
    model: str = option("", "policy: folder or Hub id; none: a tiny random one")
    reward_model: str = option("", "reward model folder (train_rm.py); none: a tiny random one")
    data: str = option(str(SAMPLES / "preferences.jsonl"), "dialogue states: any JSONL with \"prompt\", or an ESConv file")
    state: int = option(0, "which record of --data, counted from 0")
    group_size: int = option(3, "G, final responses")
    retrieve: int = option(3, "n, exemplars in the final prompt (paper §4: 3)")
    max_new_tokens: int = option(12, "tokens a response may have")
    temperature: float = option(1.0, "sampling temperature, the same in the log-probs")
    beta: float = option(0.04, "weight of the KL to the starting policy")
    lr: float = option(3e-4, "learning rate of the AdamW step")
    seed: int = option(320, "random seed of the sampling; with 320, a response ends early and an exemplar shares two words")


def walk(args):
    """Args -> the numbers of the nine sections as plain data: dicts and lists of int, float, str and bool, named as printed."""
    check(args.retrieve > 0, f"--retrieve {args.retrieve}: the two passes shown here need at least 1 exemplar")
    options = train_grpo.Args(**{k: v for k, v in asdict(args).items() if k != "state"})
    options.tokens_per_batch = options.max_prompt + args.group_size * args.max_new_tokens       # one pack
    train_grpo.check_args(options)
    states = read_records(args.data, "prompt")
    check(0 <= args.state < len(states), f"--state {args.state}: {args.data} has the states 0 to {len(states) - 1}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):       # notes are not output
        model, scorer = model_or_tiny(args.model, folder), args.reward_model or tiny_reward_model(folder)
        tokenizer, rm_tokenizer = Tokenizer.from_pretrained(model), Tokenizer.from_pretrained(scorer)
        policy, reference, rm = Qwen2.from_pretrained(model), Qwen2.from_pretrained(model), RewardModel.from_pretrained(scorer)
        if not args.reward_model:       # its mean and std, as train_rm.py measures them, over a few sample pairs
            pairs = read_records(SAMPLES / "preferences.jsonl", "preference")[:24]
            train_rm.standardise(rm, [train_rm.pair_tree(rm_tokenizer, p, 2048)[0] for p in pairs], train_rm.Args(), "cpu")
    train_grpo.check_states([states[args.state]], tokenizer, options)
    index = open_index(options.exemplars, options.encoder)

    rollout, = two_pass_rollout(policy, tokenizer, [states[args.state]], index, args.group_size, args.retrieve,
                                args.max_new_tokens, args.temperature, generator=[step_generator(args.seed, 0, 0)])
    rewards, _ = train_grpo.score([rollout], rm, rm_tokenizer, options)
    r, eps = torch.tensor([rewards]), 1e-4                                                              # [1,G]
    trees, advantages = train_grpo.training_trees([rollout], group_advantages(r, eps), options)
    (packed, advantage, weight, _), = train_grpo.micro_batches(trees, advantages, options, "cpu")       # [N] each
    z = policy.logits(policy(packed.tokens[None], mask=packed)[0, packed.pred[0]])[:len(tokenizer)].double() / args.temperature
    y, m, p, stream = packed.targets[0], z.max(), z.softmax(0), step_generator(args.seed, 0, 0)         # u: as `sample` drew it
    logits = {"n": 0, "z_y": z[y].item(), "z_max": m.item(), "sum": (z - m).exp().sum().item(), "lse": z.logsumexp(0).item()}
    _, u = (torch.rand(n, args.max_new_tokens, dtype=torch.float64, generator=stream) for n in (1, args.group_size))

    optimizer, norm_weight = make_optimizer(policy, args.lr), policy.model.norm.weight      # [H]: we follow its first number
    first, old = inner_step(policy, reference, packed, advantage, weight, None, options, tokenizer)
    before, gradient = norm_weight[0].item(), norm_weight.grad[0].item()
    norm, _ = update(policy, optimizer, args.lr, options.clip_norm)
    second, _ = inner_step(policy, reference, packed, advantage, weight, old, options, tokenizer)
    return {"options": asdict(options), "prompt": prompt_data(tokenizer, rollout.initial_prompt),
            "initial": asdict(rollout.initial), "retrieval": retrieval_data(index, rollout),
            "final": prompt_data(tokenizer, rollout.prompt), "responses": [asdict(s) for s in rollout.responses],
            "drawn": [{"of": f"y{i + 1}", "token": y, "F(y-1)": p[:y].sum().item(), "u": u[i, 0].item(), "p(y)": p[y].item()}
                      for i, y in enumerate(s.tokens[0] for s in rollout.responses)],
            "reward": reward_data(rm, rm_tokenizer, rollout, rewards, options),
            "group": {"G": args.group_size, "mean": r.mean().item(), "std": r.std().item(), "eps": eps,
                      "rows": [{"of": f"y{i}", "A": A} for i, A in enumerate(advantages, start=1)]},
            "pack": pack_data(tokenizer, packed), "logits": logits, "first": first, "second": second,
            "adamw": {"lr": args.lr, "clip_norm": options.clip_norm, "norm": norm, "before": before, "gradient": gradient,
                      "after": norm_weight[0].item()}}


def prompt_data(tokenizer, ids):
    """A prompt, cut before each <|im_start|>."""
    cuts = [i for i, token in enumerate(ids) if token == tokenizer.im_start]
    return {"length": len(ids), "pieces": [f"{end - start} tokens: {tokenizer.decode(ids[start:end], keep_control=True)}"
                                           for start, end in zip(cuts, [*cuts[1:], len(ids)])]}


def retrieval_data(index, rollout):
    """The exemplars, and the unit vectors where y0 has a word that the corpus knows."""
    encoder, query, words = index.encoder, draft_text(rollout.initial), []
    hits = {f"e{j}": h for j, h in enumerate(rollout.exemplars, start=1)}
    vectors = encoder.encode([query, *(h.exemplar["chosen"] for h in hits.values())])                   # [1+n,words]
    for word in dict.fromkeys(w for w in encoder.words(query) if w in encoder.index):
        i, tf = encoder.index[word], encoder.words(query).count(word)
        df, idf = sum(word in encoder.words(e["chosen"]) for e in index.exemplars), encoder.idf[i].item()
        words.append({"word": word, "tf": tf, "df": df, "idf": idf, "v": (1 + math.log(tf)) * idf,
                      **{f"φ({name})": v.item() for name, v in zip(["y0", *hits], vectors[:, i])}})
    return {"corpus": len(index.exemplars), "query": query, "words": words, "exemplars": [
        {"e": e, "id": h.exemplar["id"], "similarity": h.score, "text": h.exemplar["chosen"]} for e, h in hits.items()]}


def reward_data(rm, tokenizer, rollout, rewards, options):
    """Each response's way from w·h to r. The reward model never sees an empty reply."""
    dialogue, said = rollout.state["prompt"], rollout.responses
    scores, = score_replies(rm, tokenizer, [(dialogue, [s.reply for s in said])])
    trees = [scored_tree(rm, tokenizer, dialogue, [s.reply])[0] for s in said]
    return {"mean": rm.mean, "std": rm.std, "rows": [
        {"of": f"y{i + 1}", "w·h": rm(pack([trees[i]])).item() if s.reply else "no reply", "score": scores[i],
         "penalty": 0.0 if s.well_formed else options.format_penalty, "r": rewards[i]} for i, s in enumerate(said)]}


def pack_data(tokenizer, packed):
    """The targets, and the mask of the trunk's last two tokens and the first three of each branch (of four at most)."""
    (trunk, lengths), = packed.shapes
    own = (packed.branch > 0).nonzero().flatten().tolist()                                              # [N]
    shown = [trunk - 2, trunk - 1, *(i for i in own if packed.positions[i] < trunk + 3 and packed.branch[i] <= 4)]
    mask, of = packed.mask().tolist(), [f"y{b}" if b else "trunk" for b in packed.branch.tolist()]
    targets = zip(own, packed.positions[own].tolist(), packed.pred.tolist(), packed.targets.tolist())
    return {"trunk": trunk, "lengths": lengths,
            "rows": [{"n": n, "of": of[i], "index": i, "position": at, "pred": pred, "target": y,
                      "text": repr(tokenizer.decode([y], keep_control=True))} for n, (i, at, pred, y) in enumerate(targets)],
            "mask": [{"of": of[q], "q": q, **{str(k): "#" if mask[q][k] else "." for k in shown}} for q in shown]}


def inner_step(policy, reference, packed, advantage, weight, old, options, tokenizer):
    """One turn of train_grpo.py's inner loop, with its gradient -> (each token's numbers and their sums, logp_old [N])."""
    logp = policy.log_probs(packed, options.temperature, len(tokenizer))                                # [N]
    old = logp.detach() if old is None else old
    with torch.no_grad():
        ref = reference.log_probs(packed, options.temperature, len(tokenizer))                          # [N]
    loss, stats = grpo_loss(logp, old, advantage, weight, ref, options.beta, options.clip_low, options.clip_high)
    logp.retain_grad()
    backward(loss)
    J, D = clipped_objective(logp, old, advantage, options.clip_low, options.clip_high), kl_estimate(logp, ref)
    ratio = (logp - old).exp()
    columns = {"logp": logp, "old": old, "ref": ref, "ratio": ratio, "A": advantage, "w": weight, "J": J, "D": D,
               "loss": -weight * (J - options.beta * D), "grad": logp.grad, "clip": J < ratio * advantage}
    rows = [{"n": n, **dict(zip(columns, values))} for n, values in enumerate(zip(*(c.tolist() for c in columns.values())))]
    return {"rows": rows, "sums": {"Σ": "over n", "loss": loss.item(), **stats}}, old


SECTIONS = """\
1. The dialogue state x and its prompt | prompts.py: policy_prompt; chat.py: Tokenizer.render
prompt = <|im_start|>system … <|im_end|> <|im_start|>user … <|im_end|> <|im_start|>assistant
2. The initial response y0 | rollout.py: two_pass_rollout; sampling.py: sample
y0 ~ π( · | x )
3. The exemplars that y0 finds | retrieval.py: ExemplarIndex.search; encoder.py: TfidfEncoder
e1 … en = the n replies e of the corpus with the largest similarity φ(y0) · φ(e)
φ = v / |v|,   v_w = (1 + log tf_w) · idf_w,   idf_w = 1 + log((1 + corpus) / (1 + df_w))
4. The final responses y1 … yG | rollout.py: final_prompt; sampling.py: draw
y_i ~ π( · | x, y0, e1 … en ),   token by token, y where  F(y-1) <= u < F(y-1) + p(y),  u uniform
5. The rewards r | reward.py: RewardModel, score_replies; train_grpo.py: score
score = (w·h - mean) / std,   r = score - penalty
6. The advantages A | grpo.py: group_advantages
mean = Σ r_i / G,   std = sqrt( Σ (r_i - mean)² / (G - 1) ),   A_i = (r_i - mean) / (std + eps)
7. The pack: one prompt, G branches | packing.py: pack, Packed.mask
query q sees key k   iff   k <= q  and  k is in the trunk or in the branch of q
8. The first inner step | logprob.py: token_logprobs; grpo.py: token_weights, grpo_loss
logp = z_y - lse,  lse = z_max + log(sum),  sum = Σ_v exp(z_v - z_max),  z = W·h[pred] / temperature
ratio = exp(logp - old),   J = min( ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A )
w = 1 / (G · length),   d = ref - logp,   D = exp(d) - d - 1,   loss = Σ -w·(J - beta·D)
grad = d loss / d logp = -w·( ratio·A - beta·(1 - exp(d)) ),   without the ratio·A where clipped
9. One AdamW step, and the second inner step | optimizer.py: update; grpo.py: grpo_loss
g = gradient · min(1, clip_norm / norm),   after = before - lr · g / (|g| + 1e-8)
old = ref = logp of section 8, and everything else as there"""


def tell(data):
    """What walk returned -> the text that is printed: at most 100 columns, numbers with 6 significant digits."""
    prompt, found, final, packed = (data[k] for k in ("prompt", "retrieval", "final", "pack"))
    said = [wrapped(f"y{i}, {len(s['tokens'])} tokens{'' if s['finished'] else ', cut there'}: {s['text']!r}")
            for i, s in enumerate([data["initial"], *data["responses"]])]
    bodies = [
        [f"length = {prompt['length']}", *map(wrapped, prompt["pieces"])],
        said[:1],
        [f"corpus = {found['corpus']}", wrapped("query: " + found["query"]), table(found["words"]),
         table(found["exemplars"], "e id similarity"), *(wrapped(f"{e['e']}: {e['text']}") for e in found["exemplars"])],
        [f"length = {final['length']}", *(wrapped(p) for p in final["pieces"] if p not in prompt["pieces"]), *said[1:],
         table(data["drawn"])],
        [table([data["reward"]], "mean std"), table(data["reward"]["rows"])],
        [table([data["group"]], "G mean std eps"), table(data["group"]["rows"])],
        [f"trunk = {packed['trunk']}, lengths = {packed['lengths']}", table(packed["rows"]), table(packed["mask"])],
        [table([data["options"]], "temperature clip_low clip_high beta"), table([data["logits"]]),
         table(data["first"]["rows"], "n logp ratio A w J D loss grad"), table([data["first"]["sums"]])],
        [table([data["adamw"]]), table(data["second"]["rows"], "n logp old ratio J D loss grad clip"),
         table([data["second"]["sums"]])]]
    return "\n\n".join("\n\n".join([head, *body]) for head, body in zip(re.split(r"\n(?=\d\. )", SECTIONS), bodies))


def table(rows, names=None):
    columns = names.split() if names else list(rows[0]) if rows else []
    lines = [columns] + [[f"{row[c]:.6g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def wrapped(text):
    return "\n".join(textwrap.fill(line, 96, initial_indent="  ", subsequent_indent="  ") for line in text.strip().split("\n"))


def main(argv=None):
    print(tell(walk(parse(Args, __doc__, argv))))


if __name__ == "__main__":
    run_script(main)
