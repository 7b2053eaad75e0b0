"""Retrieval-augmented GRPO (paper §3 and D, Algorithm 1).

    for each step:
        x_1..x_P                    dialogue states
        y₀ -> exemplars -> y_1..y_G two-pass rollout    rollout.py
        r_i                         reward model        score
        A_i = (r_i - mean) / std    within x's group    grpo.group_advantages
        μ times: -Σ w·(min(ρA, clip(ρ)A) - β·KL), AdamW grpo.grpo_loss

    python train_grpo.py --model runs/sft/model \\
        --reward-model runs/rm/model --exemplars preferences.jsonl
    torchrun --nproc_per_node=2 train_grpo.py --preset grpo-3b \\
        --model runs/sft/model --reward-model runs/rm/model --out runs/grpo

Where we fix what the paper leaves open (README, "the paper says / we chose"):
  1. one initial response serves the group, so that all G final responses
     answer one prompt (--initial rollout: one each)
  2. the reward model sees the reply without its reasoning; its score is
     standardised with its own training statistics
  3. a small penalty for a broken format; a response without any reply gets a
     fixed low reward (and the penalty)
  4. no KL term by default; no reference model is loaded then
  5. logp_old comes from the trainer's own forward pass, at the sampling
     temperature
"""
import json
import math
import time
from dataclasses import dataclass

import torch

from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records, split_by_dialogue
from escrag_min.grpo import group_advantages, grpo_loss, token_weights
from escrag_min.model.tiny import model_or_tiny, tiny_reward_model
from escrag_min.packing import pack, split_into_packs
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import load_reward_model, score_replies
from escrag_min.rollout import shortest_prompt, two_pass_rollout
from escrag_min.runtime.args import check, option, run_script
from escrag_min.runtime.distributed import (
    backward,
    compute_dtype,
    default_device,
    even,
    first,
    frozen_dtype,
    gather,
    gathered,
    is_main,
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
    learning_rate,
    make_optimizer,
    step_generator,
    update,
)
from escrag_min.runtime.presets import parse_run
from escrag_min.runtime.runs import Run, RunArgs


@dataclass
class Args(RunArgs):
    model: str = option("", "policy to start from: folder or Hub id, after cold start; none: a tiny random one is made")
    reward_model: str = option("", "reward model folder (train_rm.py); none: a tiny random one is made")
    data: str = option(str(SAMPLES / "preferences.jsonl"), "dialogue states: any JSONL with \"prompt\", or an ESConv file")
    exemplars: str = option(str(SAMPLES / "preferences.jsonl"), "preference file whose chosen replies are retrieved, an "
                            "ESConv file, or a saved index folder")
    encoder: str = option("tfidf", "for retrieval: tfidf, or a sentence encoder's folder or Hub id such as "
                          "sentence-transformers/all-MiniLM-L6-v2 (ours; the paper names none)")
    prompts_per_step: int = option(8, "dialogue states per step (ours)")
    group_size: int = option(8, "G, final responses per state (ours)")
    retrieve: int = option(3, "n, exemplars in the final prompt (paper §4: 3); 0: vanilla GRPO, one pass")
    initial: str = option("group", "one initial response per group or per rollout (ours: group)", ("group", "rollout"))
    train_initial: bool = option(False, "with --initial rollout: the initial response gets its final response's gradient too")
    max_new_tokens: int = option(256, "tokens a response may have (ours)")
    max_prompt: int = option(2048, "tokens a prompt may have; the oldest turns are dropped to fit (ours)")
    temperature: float = option(1.0, "sampling temperature, the same in the log-probs (ours)")
    inner_steps: int = option(1, "μ, updates per batch of rollouts (ours)")
    beta: float = option(0.0, "weight of the KL to the starting policy (ours: 0)")
    clip_low: float = option(0.2, "ε_low (ours)")
    clip_high: float = option(0.2, "ε_high (ours)")
    weighting: str = option("response", "weight of a token: response 1/(R·length) (GRPO), token 1/(sum of lengths) (DAPO), "
                            "constant 1/(R·max-new-tokens) (Dr. GRPO) (ours: response)", ("response", "token", "constant"))
    scale_advantage: bool = option(True, "divide by the group's std (GRPO), or only centre (Dr. GRPO) (ours: divide)")
    format_penalty: float = option(0.5, "taken off the reward where the reasoning format is broken (ours)")
    truncated: str = option("keep", "responses cut at --max-new-tokens: keep, or drop from group and loss (ours)",
                            ("keep", "drop"))
    lr: float = option(1e-6, "peak learning rate (ours)")
    save_every: int = option(20, "checkpoint every so many steps")
    held_out: float = option(0.0, "share of the dialogues kept to measure the reward of greedy responses; 0: none")
    stop_kl: float = option(0.0, "stop where the mean KL of the last 10 steps is above this; 0: never (needs --beta)")
    stop_reward: float = option(0.0, "stop where the mean reward of the last 10 steps is this much below its best; 0: never")
    sample_every: int = option(10, "write the step's rollouts to samples.jsonl every so many steps; 0: never")


def check_args(args):
    check(args.group_size >= 2, f"--group-size {args.group_size}: a group of one has no baseline; at least 2")
    check(args.temperature > 0, f"--temperature {args.temperature}: training scores the sampling distribution, and there is "
                                "none at 0; it must be above 0 (0 is for evaluate.py)")
    check_batch("--prompts-per-step", args.prompts_per_step, "prompts (not replies)")
    check(args.max_new_tokens >= 1, f"--max-new-tokens {args.max_new_tokens} must be at least 1")
    check(args.beta >= 0 and args.clip_low >= 0 and args.clip_high >= 0,
          f"--beta {args.beta}, --clip-low {args.clip_low}, --clip-high {args.clip_high} must not be negative")
    check(args.inner_steps >= 1, f"--inner-steps {args.inner_steps} must be at least 1")
    check(not args.keep_best or args.held_out, "--keep-best needs --held-out above 0: without it nothing is measured")
    check(not args.stop_kl or args.beta, "--stop-kl needs --beta above 0: without it no KL is measured")
    check(args.retrieve >= 0, f"--retrieve {args.retrieve} must be 0 or more")
    check(not args.train_initial or args.initial == "rollout" and args.retrieve > 0,
          "--train-initial needs --initial rollout and --retrieve above 0: a shared initial response has no reward of its own")
    check(args.max_prompt + args.max_new_tokens <= args.tokens_per_batch,
          f"--tokens-per-batch {args.tokens_per_batch} must hold --max-prompt {args.max_prompt} + --max-new-tokens "
          f"{args.max_new_tokens} = {args.max_prompt + args.max_new_tokens}")


def check_states(states, tokenizer, args):
    """Every state must fit now: not in the middle of a long run."""
    for state in states:
        need = shortest_prompt(tokenizer, state, args.retrieve, args.max_new_tokens)
        check(need <= args.max_prompt, f"{state['id']}: its prompt needs {need} tokens even with the last turn only"
                                       f"{' and a draft' if args.retrieve else ''}; --max-prompt is {args.max_prompt}")


def score(rollouts, reward_model, tokenizer, args, truncated=None):
    """Reward of every final response (paper D; penalty and floor are ours) -> (rewards, raw scores of the replies), lists.

    NaN in rewards: left out, by truncated="drop" [--truncated].
    """
    drop = (truncated or args.truncated) == "drop"
    scores = score_replies(reward_model, tokenizer, [(r.state["prompt"], [s.reply for s in r.responses]) for r in rollouts],
                           args.tokens_per_batch)
    rewards, raw = [], []
    for rollout, values in zip(rollouts, scores):
        for response, value in zip(rollout.responses, values):
            if response.reply:
                raw.append(value)
            if not response.well_formed:
                value -= args.format_penalty
            rewards.append(float("nan") if drop and not response.finished else value)
    return rewards, raw


def training_trees(rollouts, advantages, args):
    """Rollouts and their advantages [P,G] -> (trees [(prompt ids, [response ids])], advantage of each response in order).

    Responses left out by --truncated drop are in neither. One tree a prompt, whose G branches share the trunk.
    """
    trees, kept, advantage = [], [], iter(advantages.flatten().tolist())
    for rollout in rollouts:
        values = [(s.tokens, next(advantage)) for s in rollout.responses]
        values = [v for v, s in zip(values, rollout.responses) if args.truncated == "keep" or s.finished]
        if values:
            trees.append((rollout.prompt, [tokens for tokens, _ in values]))
            kept += [a for _, a in values]
        if values and args.train_initial and (args.truncated == "keep" or rollout.initial.finished):
            # its final response's advantage: it led there
            trees.append((rollout.initial_prompt, [rollout.initial.tokens]))
            kept.append(values[0][1])
    return trees, kept


def micro_batches(trees, advantages, args, device):
    """This rank's trees -> [(Packed, advantage [N], weight [N], real), ...], equally many on every rank.

    The weights hold the counts of the whole step, so that losses add up over micro-batches and ranks; a filler's are 0.
    """
    lengths = [len(ids) for _, branches in trees for ids in branches]
    responses, tokens = (int(n) for n in total(len(lengths), sum(lengths)))
    values, batches = iter(advantages), []
    for micro, real in even(split_into_packs(trees, args.tokens_per_batch, split_trees=True)):  # keeps the order of the responses
        packed = pack(micro)
        advantage = torch.tensor([next(values) if real else 0.0 for _ in packed.last])[packed.response]            # [R] -> [N]
        weight = real * token_weights(packed.lengths(), args.weighting, args.max_new_tokens, max(responses, 1), tokens)
        batches.append((packed.to(device), advantage.to(device), weight.to(device), real))
    return batches


def check_health(rows, args):
    """--stop-kl and --stop-reward: an error where the last 10 steps show a run that has gone astray."""
    def recent(name, end):
        values = [row[name] for row in rows[end - 10:end] if row[name] is not None]
        return sum(values) / len(values) if values else None
    if len(rows) < 10:
        return
    if args.stop_kl:
        kl = recent("kl", len(rows))
        check(kl is None or kl <= args.stop_kl, f"stopped: the mean KL of the last 10 steps is {kl}, --stop-kl is {args.stop_kl}")
    if args.stop_reward:
        means = [m for m in (recent("reward", end) for end in range(10, len(rows) + 1)) if m is not None]
        check(not means or means[-1] >= max(means) - args.stop_reward,
              f"stopped: the mean reward of the last 10 steps is {means and means[-1]}, its best was {max(means, default=None)}, "
              f"--stop-reward is {args.stop_reward}")


@world()
def main(argv=None):
    args = parse_run("train_grpo", Args, __doc__, argv)
    if args is None:        # --plan
        return
    check_args(args)
    device = default_device()
    states = read_records(args.data, "prompt", args.limit, args.seed)
    states, held_out = split_by_dialogue(states, args.held_out, args.seed) if args.held_out else (states, [])
    run = Run("train_grpo", args, held_out=("held_out_reward", max))
    index = main_first(lambda: open_index(args.exemplars, args.encoder, run.out / "index")) if args.retrieve else None
    args.model = first(lambda: str(model_or_tiny(args.model, run.out)))
    args.reward_model = first(lambda: str(args.reward_model or tiny_reward_model(run.out)))
    tokenizer, reward_tokenizer = Tokenizer.from_pretrained(args.model), Tokenizer.from_pretrained(args.reward_model)
    check_states(states + held_out, tokenizer, args)
    policy = load(Qwen2, args.model)
    policy.model.checkpoint_blocks = checkpointed(args, policy.config)
    check_positions("--max-prompt + --max-new-tokens", args.max_prompt + args.max_new_tokens, policy)
    reference = load(Qwen2, args.model, frozen_dtype()) if args.beta else None
    reward_model = load_reward_model(args.reward_model)
    optimizer = make_optimizer(policy, args.lr, args.weight_decay)
    steps = args.steps or math.ceil(args.epochs * len(states) / args.prompts_per_step)
    run.start(policy, optimizer)
    say(f"{len(states)} states, {len(held_out)} held out, {len(index.exemplars) if index else 0} exemplars, {steps} steps of "
        f"{args.prompts_per_step} x {args.group_size} responses on {device}, writing {run.out}")

    def log_probs(model, packed, **options):
        with compute_dtype(device):
            return model.log_probs(packed, args.temperature, len(tokenizer), **options)                  # [N]

    def rollout(states, group_size, temperature, initial, generators=None, interruptible=False):
        with gathered(policy) as sampler:       # whole weights: ranks sample on their own, and need not end together
            def work():
                return two_pass_rollout(sampler, tokenizer, states, index, group_size, args.retrieve, args.max_new_tokens,
                                        temperature, initial, args.max_prompt, generators)
            return run.unless_stopped(work) if interruptible else work()

    for step in run.steps(steps, "grpo"):
        began = time.time()
        batch = [states[i] for i in batch_indices(len(states), args.prompts_per_step, step, args.seed)]
        places = share(range(len(batch)))
        streams = [step_generator(args.seed, step, place) for place in places]
        rollouts = rollout(share(batch), args.group_size, args.temperature, args.initial, streams, interruptible=True)
        run.stop_if_asked()
        for r in rollouts:
            r.group = places[r.group]
        sampled = time.time()
        rewards, raw = score(rollouts, reward_model, reward_tokenizer, args)
        advantages = group_advantages(torch.tensor(rewards).view(-1, args.group_size), scale=args.scale_advantage)   # [P,G]
        rewarded = time.time()

        batches = micro_batches(*training_trees(rollouts, advantages, args), args, device)
        lr = learning_rate(step, steps, args.lr, args.warmup * steps)
        old, ref, norm, skipped = [None] * len(batches), [None] * len(batches), 0.0, False
        totals = dict.fromkeys(("loss", "entropy", "tokens", "ratio", "clip_low", "clip_high", "kl"), 0.0)
        for inner in range(args.inner_steps):
            inner_loss = 0.0
            for i, (packed, advantage, weight, real) in enumerate(batches):
                if inner == 0:      # before any update of this step: exactly π_old
                    run.stop_if_asked()
                    logp, entropy = log_probs(policy, packed, with_entropy=True)                         # [N] each
                    old[i] = logp.detach()
                    totals["entropy"] += real * entropy.sum().item()
                    if reference:
                        with torch.no_grad():
                            ref[i] = log_probs(reference, packed)                                        # [N]
                else:
                    logp = log_probs(policy, packed)                                                     # [N]
                loss, stats = grpo_loss(logp, old[i], advantage, weight, ref[i], args.beta, args.clip_low, args.clip_high)
                backward(loss)
                inner_loss += loss.item()
                totals = {k: totals[k] + real * stats.get(k, 0.0) for k in totals}
            totals["loss"] += inner_loss / args.inner_steps
            if batches:
                norm, bad = update(policy, optimizer, lr, args.clip_norm, total(inner_loss)[0])
                skipped = skipped or bad
        totals = dict(zip(totals, total(*totals.values())))
        updated = time.time()

        rollouts, rewards, raw, advantages = gather(rollouts), gather(rewards), gather(raw), gather(advantages.flatten().tolist())
        metrics = {"step": step + 1, "loss": totals["loss"], "lr": lr, "grad_norm": norm, "skipped": int(skipped),
                   **step_metrics(rollouts, rewards, raw, totals, args),
                   "sample_tokens_per_s": sampled_tokens(rollouts) / (sampled - began),
                   "update_tokens_per_s": totals["tokens"] / (updated - rewarded),
                   "seconds_sampling": sampled - began, "seconds_reward": rewarded - sampled, "seconds_update": updated - rewarded}
        if held_out and ((step + 1) % args.eval_every == 0 or step + 1 == steps):
            answers = rollout(share(held_out), 1, 0.0, "group")        # greedy, as at inference
            metrics["held_out_reward"] = mean(gather(score(answers, reward_model, reward_tokenizer, args, "keep")[0]))
            if run.improves(metrics) and args.keep_best:
                run.save_best()
        run.log(metrics, show="reward")
        if is_main() and args.sample_every and ((step + 1) % args.sample_every == 0 or step == 0):
            write_samples(run.out, step + 1, rollouts, rewards, advantages)
        check_health(run.rows, args)
    run.end()
    say(f"saved {run.out / 'model'}")


def mean(values):
    """Of the numbers among them, NaN left out; None where there is none."""
    values = [v for v in values if v == v]
    return sum(values) / len(values) if values else None


def sampled_tokens(rollouts):
    return sum(len(s.tokens) for r in rollouts for s in (r.responses + [r.initial] if r.initial else r.responses))


def step_metrics(rollouts, rewards, raw, totals, args):
    """What one looks at to see whether a run is healthy. Shares are of the final responses or of the tokens in the loss."""
    responses = [s for r in rollouts for s in r.responses]
    rewards = torch.tensor(rewards).view(-1, args.group_size)                                   # [P,G]
    scored = rewards[~rewards.isnan()]
    spread = [g[~g.isnan()] for g in rewards]
    similarity = [h.score for r in rollouts for h in r.exemplars]

    def share_of(flags):
        return sum(flags) / len(responses)

    def per_token(name):
        return totals[name] / totals["tokens"] if totals["tokens"] else None
    return {
        "reward": scored.mean().item() if len(scored) else None,             # what GRPO optimises: standardised, penalised
        "reward_std": scored.std(correction=0).item() if len(scored) else None,
        "reward_model_score": mean(raw),                                    # standardised, of the replies alone
        "zero_std_groups": sum(len(g) < 2 or g.std().item() < 1e-6 for g in spread) / len(spread),
        "kl": per_token("kl") if args.beta else None,
        "ratio": per_token("ratio"),
        "clip_share_low": per_token("clip_low"), "clip_share_high": per_token("clip_high"),
        "entropy": per_token("entropy") and per_token("entropy") * args.inner_steps,        # measured in the first inner step only
        "response_tokens": sum(len(s.tokens) for s in responses) / len(responses),
        "reply_words": sum(len(s.reply.split()) for s in responses) / len(responses),
        "truncated": share_of(not s.finished for s in responses),
        "well_formed": share_of(s.well_formed for s in responses),
        "no_reply": share_of(not s.reply for s in responses),
        "retrieval_similarity": mean(similarity),
        "exemplars": len(similarity) / len(rollouts),
        "turns_dropped": sum(r.turns_dropped for r in rollouts) / len(rollouts),
    }


def write_samples(out, step, rollouts, rewards, advantages):
    """Append the step's rollouts to samples.jsonl, each response with its reward and advantage (reward null: left out)."""
    values = iter(zip(rewards, advantages))
    with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
        for rollout in rollouts:
            record = {"step": step, **rollout.record()}
            for response in record["responses"]:
                reward, response["advantage"] = next(values)
                response["reward"] = None if reward != reward else reward
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(main)
