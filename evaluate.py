"""Responses of a checkpoint, their scores, and a talk with it (paper §4, D at
inference: the same two passes, no update).

    python evaluate.py respond --model runs/grpo/model --data contexts.jsonl \\
        --out ours.jsonl
    python evaluate.py judge   --responses ours.jsonl --judge JUDGE \\
        --out runs/judged
    python evaluate.py compare --a ours.jsonl --b theirs.jsonl --judge JUDGE \\
        --out runs/compared
    python evaluate.py ladder  --base M0 --sft M1 --grpo M2 --rag-grpo M3 \\
        --judge JUDGE --out runs/ladder
    python evaluate.py chat    --model runs/grpo/model

    human evaluation: the page for annotators, and what they found
    python evaluate.py sheet   ours.jsonl theirs.jsonl --out sheet.html
    python evaluate.py tally   ratings-*.json --a ours.jsonl --b theirs.jsonl \\
        --seed N                                    # as sheet printed it

    rollouts to read (--html for a page); metrics of runs, one over the other
    python evaluate.py show    runs/grpo --step 10
    python evaluate.py plot    runs/grpo runs/grpo0 --out plot.png

JUDGE: a Qwen-2.5 folder or Hub id, an OpenAI-compatible endpoint's URL (with
--api-model; key in $OPENAI_API_KEY), rm:FOLDER for a reward model, or
scripted, a stand-in that only counts words. A killed run goes on when the same
command is given again, with its --out.
"""
import argparse
import hashlib
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_finished, read_records, write_jsonl
from escrag_min.evaluation import plots, sheet, show, tables
from escrag_min.evaluation.tables import (
    against_above,
    compare_table,
    judge_table,
    ladder_rows,
    ladder_table,
    open_judge,
    plot_ladder,
    read_responses,
    summarise,
)
from escrag_min.judging import DEFAULT_METRICS, METRICS, reply_statistics
from escrag_min.model.checkpoint import write_json
from escrag_min.model.decoding import pack_weights
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import load_reward_model, score_replies
from escrag_min.rollout import two_pass_rollout
from escrag_min.runtime.args import about, add_options, check, option, run_script
from escrag_min.runtime.distributed import frozen_dtype, load
from escrag_min.runtime.optimizer import check_positions, derived_seed
from escrag_min.runtime.runs import resumable_folder
from escrag_min.safety import HELP_TEXT, NOTICE, crisis_signal
from escrag_min.writers.journal import Journal


@dataclass
class Policy:
    model: str = option("", "policy: folder or Hub id")
    retrieve: int = option(3, "n, exemplars in the final prompt (paper §4: 3); 0: one pass")
    exemplars: str = option(str(SAMPLES / "preferences.jsonl"), "preference file whose chosen replies are retrieved, an "
                            "ESConv file, or a saved index folder")
    encoder: str = option("tfidf", "for retrieval: tfidf, or a sentence encoder's folder or Hub id (ours)")
    max_new_tokens: int = option(256, "tokens a response may have")
    max_prompt: int = option(2048, "tokens a prompt may have; the oldest turns are dropped to fit")
    temperature: float = option(0.0, "0: the likeliest token each time (ours, for reproducible tables)")
    seed: int = option(0, "random seed: of a temperature above 0, and of --limit")


@dataclass
class Respond(Policy):
    data: str = option(str(SAMPLES / "contexts.jsonl"), "contexts to answer: any JSONL with \"prompt\", or an ESConv file")
    limit: int | None = option(None, "answer so many, drawn with the seed")
    batch_size: int = option(16, "contexts answered together")
    reward_model: str = option("", "also score each reply with this reward model")
    out: str = option("responses.jsonl", "file to write; it must not exist")


ALL_METRICS = "also the two metrics that are ours, Safety and Naturalness; a reward model has one number only"


@dataclass
class Judging:
    judge: str = option("scripted", "who judges: folder or Hub id, endpoint URL, rm:FOLDER, or scripted (a stand-in)")
    api_model: str = option("", "model name at an endpoint")
    key_env: str = option("OPENAI_API_KEY", "environment variable that holds the endpoint's key")
    workers: int = option(8, "calls to an endpoint at the same time")
    out: str = option("", "folder to write; none: a new one under runs/")


@dataclass
class Judge(Judging):
    responses: str = option("responses.jsonl", "file of evaluate.py respond")
    all_metrics: bool = option(False, ALL_METRICS)


@dataclass
class Compare(Judging):
    a: str = option("", "responses of A")
    b: str = option("", "responses of B")


@dataclass
class Ladder(Judging):
    base: str = option("", "the untrained policy; rows without a checkpoint are left out")
    sft: str = option("", "after cold-start SFT")
    grpo: str = option("", "after vanilla GRPO (train_grpo.py --retrieve 0)")
    rag_grpo: str = option("", "after retrieval-augmented GRPO")
    all_metrics: bool = option(False, ALL_METRICS)
    sweep: str = option("0,2,3,4", "numbers of exemplars to try with --rag-grpo (paper §4: 2, 3, 4)")
    data: str = option(str(SAMPLES / "contexts.jsonl"), "held-out contexts")
    limit: int | None = option(None, "so many of them, drawn with the seed (paper §4: 100 of ESConv's test split)")
    exemplars: str = option(str(SAMPLES / "preferences.jsonl"), "as in respond")
    encoder: str = option("tfidf", "as in respond")
    retrieve: int = option(3, "n, exemplars in the rows with retrieval (paper §4: 3)")
    max_new_tokens: int = option(256, "tokens a response may have")
    max_prompt: int = option(2048, "tokens a prompt may have")
    temperature: float = option(0.0, "as in respond")
    batch_size: int = option(16, "contexts answered together")
    seed: int = option(0, "random seed")


ANSWERS = ("completion", "chosen", "rejected", "stage", "state", "strategy")     # a record's own answer: not the model's


class Responder:
    """A loaded checkpoint with its exemplars: dialogue states in, two-pass rollouts of one response out."""

    def __init__(self, args):
        check(args.model, "--model: name a checkpoint folder or Hub id")
        check(args.retrieve >= 0, f"--retrieve {args.retrieve} must be 0 or more")
        check(args.max_new_tokens >= 1, f"--max-new-tokens {args.max_new_tokens} must be at least 1")
        check(args.temperature >= 0, f"--temperature {args.temperature} must be 0 or more")
        self.args = args
        self.tokenizer = Tokenizer.from_pretrained(args.model)
        self.model = load(Qwen2, args.model, frozen_dtype())
        check_positions("--max-prompt + --max-new-tokens", args.max_prompt + args.max_new_tokens, self.model)
        pack_weights(self.model)
        self.index = open_index(args.exemplars, args.encoder) if args.retrieve else None

    def __call__(self, states, progress=False):
        a = self.args       # a random stream of its own for each state: what else is in the batch does not matter
        generators = [torch.Generator().manual_seed(derived_seed(a.seed, s["id"], len(s["prompt"]))) for s in states]
        with about(f"--max-prompt {a.max_prompt}"):
            return two_pass_rollout(self.model, self.tokenizer, states, self.index, 1, a.retrieve, a.max_new_tokens,
                                    a.temperature, "group", a.max_prompt, generators, progress)


def response_record(rollout, args):
    final = rollout.responses[0]
    return {"reply": final.reply, "reasoning": final.reasoning, "well_formed": final.well_formed, "finished": final.finished,
            "tokens": len(final.tokens), "initial": rollout.initial and rollout.initial.text,
            "exemplars": [{"id": h.exemplar["id"], "score": round(h.score, 4), "reply": h.exemplar["chosen"]}
                          for h in rollout.exemplars],
            "turns_dropped": rollout.turns_dropped, "made_by": settings(args)}


def settings(args):
    """What a response depends on beside its context."""
    return {f.name: getattr(args, f.name) for f in fields(Policy)}


def respond(args):
    """One JSON line a context: both passes, exemplars with similarity, and the reply."""
    out = Path(args.out)
    check(not out.exists(), f"--out {out} exists; choose another name")
    check(args.batch_size >= 1, f"--batch-size {args.batch_size} must be at least 1")
    states = read_records(args.data, "prompt", args.limit, args.seed, flagged=True)
    part = out.with_name(out.name + ".part")        # what a killed run had answered, to go on with
    records = read_finished(part)
    check(len({s["id"] for s in states}) == len(states), f"{args.data}: two contexts have the same id")
    same = all(r["made_by"] == settings(args) for r in records)
    check(same and [r["id"] for r in records] == [s["id"] for s in states[:len(records)]],
          f"{part} holds answers of another command; remove it, or choose another --out")
    responder, reward_model = Responder(args), args.reward_model and load_reward_model(args.reward_model)
    part.parent.mkdir(parents=True, exist_ok=True)
    finished = out.with_name(out.name + ".new")
    write_jsonl(finished, records)      # without a last line that was cut
    finished.replace(part)
    for start in range(len(records), len(states), args.batch_size):
        batch = states[start:start + args.batch_size]
        answers = [{**{k: v for k, v in state.items() if k not in ANSWERS}, **response_record(rollout, args)}
                   for state, rollout in zip(batch, responder(batch, progress=True))]
        write_jsonl(part, answers, append=True)
        records += answers
        print(f"{len(records)} of {len(states)} answered", file=sys.stderr)
    if args.reward_model:
        scores = score_replies(reward_model, Tokenizer.from_pretrained(args.reward_model),
                               [(r["prompt"], [r["reply"]]) for r in records])
        for record, (value,) in zip(records, scores):
            record["reward"] = value
    write_jsonl(finished, records)
    finished.rename(out)
    part.unlink()
    rewards = [r["reward"] for r in records if "reward" in r]
    print(f"wrote {out}: {len(records)} responses, {sum(r['well_formed'] for r in records)} well-formed, "
          f"{sum(not r['reply'] for r in records)} without a reply"
          + (f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""))


def chat(args):
    """A talk in the terminal. Crisis signals get fixed help text; the model is not asked then."""
    responder = Responder(args)
    print(f"{NOTICE}\nWrite as the client; an empty line, Ctrl-D or Ctrl-C ends.\n")
    dialogue = []
    while True:
        try:
            said = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            said = ""
        if not said:
            break
        if crisis_signal(said):
            print(f"\n{HELP_TEXT}\n")
            continue
        dialogue.append({"role": "user", "content": said})
        final = responder([{"prompt": dialogue, "id": "chat", "dialogue_id": "chat"}])[0].responses[0]
        if not final.reply:     # nobody said anything: it is not part of the dialogue, nor is what it would have answered
            dialogue.pop()
            print("\n(no reply: the model never finished its reasoning; say it again, or otherwise)\n")
            continue
        print(f"\ncounselor> {final.reply}\n")
        dialogue.append({"role": "assistant", "content": final.reply})


def start_judging(args, script):
    """-> (folder, judge, journal, metrics)"""
    out = resumable_folder(args.out, script, args, ("workers", "key_env"))
    options = {"model": args.api_model, "key_env": args.key_env, "workers": args.workers}
    metrics = METRICS if getattr(args, "all_metrics", False) else DEFAULT_METRICS
    return out, open_judge(args.judge, **options), Journal(out / "journal.jsonl"), metrics


def judge_file(args):
    """Score a responses file: raw scores and a table like the paper's Table 1."""
    records = read_responses(args.responses)
    out, judge, journal, metrics = start_judging(args, "judge")
    scored = tables.judge(records.values(), judge, journal, metrics)
    write_jsonl(out / "scores.jsonl", scored)
    summary = {"judge": judge.name, **summarise(scored, metrics), "text": reply_statistics(list(records.values()))}
    write_json(out / "summary.json", summary)
    print(judge_table(summary) + f"\njudge: {judge.name}; wrote {out}")


def compare_files(args):
    """A against B, blind and in both orders."""
    check(args.a and args.b, "--a and --b: name two responses files")
    a, b = read_responses(args.a), read_responses(args.b)
    out, judge, journal, _ = start_judging(args, "compare")
    rows, summary = tables.compare(a, b, judge, journal)
    write_jsonl(out / "verdicts.jsonl", rows)
    write_json(out / "summary.json", {"judge": judge.name, **summary})
    print(compare_table(summary) + f"\njudge: {judge.name}; wrote {out}")


def climb_ladder(args):
    """The rows of the paper's ablation and the sweep over n: respond, judge, each row against the one above."""
    checkpoints = {name: getattr(args, name) for name in ("base", "sft", "grpo", "rag_grpo")}
    check(any(checkpoints.values()), "--base, --sft, --grpo, --rag-grpo: name at least one checkpoint")
    check(re.fullmatch(r"(\d+(,\d+)*)?", args.sweep), f"--sweep {args.sweep!r}: numbers with commas between, such as 0,2,3,4")
    rows = ladder_rows(checkpoints, args.retrieve, [int(n) for n in args.sweep.split(",") if n])
    left_out = [name.replace("_", "-") for name, folder in checkpoints.items() if not folder]
    if left_out:
        print(f"rows of {', '.join(left_out)} are left out: no checkpoint was named")
    out, judge, journal, metrics = start_judging(args, "ladder")
    table, scored = [], {}
    for name, folder, n in rows:
        digest = hashlib.sha256(folder.encode()).hexdigest()[:6]        # two paths may look alike without their other characters
        file = out / f"responses-{re.sub('[^a-z0-9]+', '-', folder.lower()).strip('-')}-{digest}-n{n}.jsonl"
        if not file.exists():       # two rows of the same checkpoint and n share a file
            shared = {k: getattr(args, k) for k in ("data", "limit", "exemplars", "encoder", "max_new_tokens", "max_prompt",
                                                    "temperature", "batch_size", "seed")}
            respond(Respond(model=folder, retrieve=n, out=str(file), **shared))
        records = read_responses(file)
        scored[name] = tables.judge(records.values(), judge, journal, metrics, f"{file.stem}/")
        table.append({"name": name, "n_exemplars": n, "checkpoint": folder, "summary": summarise(scored[name], metrics),
                      "text": reply_statistics(list(records.values()))})
    ladder = [r for r in table if not r["name"].startswith("full, n=")]
    for row, gap in zip(ladder, against_above([r["name"] for r in ladder], scored)):
        row["against_above"] = gap
    for row in table[len(ladder):]:
        row["against_above"] = None
    write_json(out / "ladder.json", {"judge": judge.name, "rows": table})
    (out / "ladder.md").write_text(ladder_table(table, markdown=True) + "\n", "utf-8")
    print(ladder_table(table) + f"\njudge: {judge.name}; wrote {out}" + plot_ladder(table, out / "ladder.png"))


COMMANDS = {"respond": (Respond, respond, "answer a file of contexts -> JSONL with both passes and exemplars"),
            "judge": (Judge, judge_file, "score a responses file from the three perspectives"),
            "compare": (Compare, compare_files, "two responses files, blind and in both orders"),
            "ladder": (Ladder, climb_ladder, "the rows of the paper's ablation, and the sweep over n exemplars"),
            "chat": (Policy, chat, "talk to a checkpoint in the terminal"),
            "sheet": (sheet.Sheet, sheet.write_sheet, "a page for human evaluation: blind pairs of two responses files"),
            "tally": (sheet.Tally, sheet.tally_exports, "what the annotators of a sheet found, unblinded"),
            "show": (show.Show, show.show_rollouts, "read rollouts of a run or a responses file, in the terminal or as a page"),
            "plot": (plots.Plot, plots.plot_metrics, "metrics of runs -> one picture")}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (options, _, text) in COMMANDS.items():
        add_options(commands.add_parser(name, help=text, description=text, allow_abbrev=False), options)
    values = vars(parser.parse_args(argv))
    options, run, _ = COMMANDS[values.pop("command")]
    run(options(**values))


if __name__ == "__main__":
    run_script(main)
