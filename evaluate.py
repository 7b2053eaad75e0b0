"""Responses of a checkpoint, and a talk with it (paper D at inference: the same two passes, no update).

    python evaluate.py respond --model runs/grpo/model --data contexts.jsonl --out responses.jsonl
    python evaluate.py chat    --model runs/grpo/model
"""
import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from escrag_min.args import add_options, check, option, run_script
from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records, write_jsonl
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import RewardModel, score_replies
from escrag_min.rollout import two_pass_rollout
from escrag_min.safety import HELP_TEXT, NOTICE, crisis_signal
from escrag_min.training import compute_dtype, default_device


@dataclass
class Policy:
    model: str = option("", "policy: folder or Hub id")
    retrieve: int = option(3, "n, exemplars in the final prompt (paper §4: 3); 0: one pass")
    exemplars: str = option(str(SAMPLES / "preferences.jsonl"), "preference file whose chosen replies are retrieved, an "
                            "ESConv file, or a saved index folder")
    encoder: str = option("tfidf", "encoder for retrieval (ours)")
    max_new_tokens: int = option(256, "tokens a response may have")
    max_prompt: int = option(2048, "tokens a prompt may have; the oldest turns are dropped to fit")
    temperature: float = option(0.0, "0: the likeliest token each time (ours, for reproducible tables)")
    seed: int = option(0, "random seed, where the temperature is above 0")


@dataclass
class Respond(Policy):
    data: str = option(str(SAMPLES / "contexts.jsonl"), "contexts to answer: any JSONL with \"prompt\", or an ESConv file")
    limit: int | None = option(None, "answer so many, drawn with the seed")
    batch_size: int = option(16, "contexts answered together")
    reward_model: str = option("", "also score each reply with this reward model")
    out: str = option("responses.jsonl", "file to write; it must not exist")


ANSWERS = ("completion", "chosen", "rejected", "stage", "state", "strategy")     # a record's own answer: not the model's


class Responder:
    """A loaded checkpoint with its exemplars: dialogue states in, two-pass rollouts of one response out."""

    def __init__(self, args):
        check(args.model, "--model: name a checkpoint folder or Hub id")
        self.args, self.device = args, default_device()
        self.tokenizer = Tokenizer.from_pretrained(args.model)
        self.model = Qwen2.from_pretrained(args.model, torch.float32, self.device)
        self.index = open_index(args.exemplars, args.encoder) if args.retrieve else None
        self.generator = torch.Generator(self.device).manual_seed(args.seed)

    def __call__(self, states, progress=False):
        a = self.args
        with compute_dtype(self.device):
            return two_pass_rollout(self.model, self.tokenizer, states, self.index, 1, a.retrieve, a.max_new_tokens,
                                    a.temperature, "group", a.max_prompt, self.generator, progress)


def respond(args):
    """One JSON line a context: both passes, exemplars with similarity, and the reply."""
    out = Path(args.out)
    check(not out.exists(), f"--out {out} exists; choose another name")
    states = read_records(args.data, "prompt", args.limit, args.seed)
    responder = Responder(args)
    records = []
    for start in range(0, len(states), args.batch_size):
        batch = states[start:start + args.batch_size]
        for state, rollout in zip(batch, responder(batch, progress=True)):
            final = rollout.responses[0]
            records.append({
                **{k: v for k, v in state.items() if k not in ANSWERS},
                "reply": final.reply, "reasoning": final.reasoning, "well_formed": final.well_formed,
                "finished": final.finished, "tokens": len(final.tokens), "initial": rollout.initial and rollout.initial.text,
                "exemplars": [{"id": h.exemplar["id"], "score": round(h.score, 4), "reply": h.exemplar["chosen"]}
                              for h in rollout.exemplars],
                "model": args.model, "retrieve": args.retrieve})
        print(f"{len(records)} of {len(states)} answered", file=sys.stderr)
    if args.reward_model:
        scores = score_replies(RewardModel.from_pretrained(args.reward_model, torch.float32, responder.device),
                               Tokenizer.from_pretrained(args.reward_model), [(r["prompt"], [r["reply"]]) for r in records])
        for record, (value,) in zip(records, scores):
            record["reward"] = value
    temporary = out.with_name(out.name + ".part")
    write_jsonl(temporary, records)
    temporary.rename(out)
    rewards = [r["reward"] for r in records if "reward" in r]
    print(f"wrote {out}: {len(records)} responses, {sum(r['well_formed'] for r in records)} well-formed, "
          f"{sum(not r['reply'] for r in records)} without a reply"
          + (f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""))


def chat(args):
    """A talk in the terminal. Crisis signals get fixed help text; the model is not asked then."""
    responder = Responder(args)
    print(f"{NOTICE}\nWrite as the client; an empty line or Ctrl-D ends.\n")
    dialogue = []
    while True:
        try:
            said = input("you> ").strip()
        except EOFError:
            said = ""
        if not said:
            break
        if crisis_signal(said):
            print(f"\n{HELP_TEXT}\n")
            continue
        dialogue.append({"role": "user", "content": said})
        final = responder([{"prompt": dialogue, "id": "chat", "dialogue_id": "chat"}])[0].responses[0]
        reply = final.reply or "(no reply: the model never finished its reasoning)"
        print(f"\ncounselor> {reply}\n")
        dialogue.append({"role": "assistant", "content": reply})


COMMANDS = {"respond": (Respond, respond, "answer a file of contexts -> JSONL with both passes and exemplars"),
            "chat": (Policy, chat, "talk to a checkpoint in the terminal")}


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
