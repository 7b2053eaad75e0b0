"""ESC-Preference (paper §3): from role cards to scored dialogues, preference
pairs and cold-start demonstrations.

    python build_pref.py --writer Qwen/Qwen2.5-7B-Instruct --out runs/pref
    python build_pref.py --writer https://host/v1 --api-model NAME \\
        --out runs/pref                                # key in $OPENAI_API_KEY

Without --writer a scripted stand-in plays every role: it shows the machinery,
its dialogues are no data. Kill it anywhere and run the same command again,
with its --out: every finished call is in journal.jsonl and is not asked again.
"""
import json
from dataclasses import dataclass

from escrag_min.data import SAMPLES, write_jsonl
from escrag_min.model.checkpoint import write_json
from escrag_min.preference import RULES, collect
from escrag_min.roleplay import build, read_cards
from escrag_min.runtime.args import check, option, parse, run_script
from escrag_min.runtime.runs import resumable_folder
from escrag_min.writers.journal import Journal
from escrag_min.writers.llm import open_writer
from escrag_min.writers.scripted import scripted_writer


@dataclass
class Args:
    cards: str = option(str(SAMPLES / "situations.jsonl"), "role cards (JSONL), or an ESConv file")
    limit: int | None = option(None, "use the first so many cards; with the scripted stand-in: 12 where nothing is said")
    out: str = option("", "folder to write; none: a new one under runs/. The same folder again goes on where it stopped")
    writer: str = option("", "who plays the roles: a Qwen-2.5 folder or Hub id, or the base URL of an OpenAI-compatible "
                             "endpoint; none: a scripted stand-in")
    judge: str = option("", "who scores; none: the same as --writer")
    api_model: str = option("", "model name at an endpoint")
    judge_api_model: str = option("", "model name at the judge's endpoint; none: --api-model")
    key_env: str = option("OPENAI_API_KEY", "environment variable that holds the endpoint's key")
    workers: int = option(8, "calls to an endpoint at the same time")
    candidates: int = option(4, "K, counselor replies per state (ours)")
    max_exchanges: int = option(8, "exchanges per dialogue at most (ours)")
    temperature: float = option(1.0, "of the candidates, which should differ (ours)")
    client_temperature: float = option(0.8, "of the client (ours)")
    max_new_tokens: int = option(160, "tokens per step of a candidate (ours)")
    rule: str = option("perspective", "dominance rule (ours)", RULES)
    margin: float = option(0.5, "least gap of the averages in a pair (ours)")
    max_similarity: float = option(0.8, "replies more alike than this are near-duplicates (ours)")
    max_length_ratio: float = option(1.5, "of the words of a pair's replies (ours)")
    demonstration_score: float = option(6.0, "a best candidate with at least this average becomes a demonstration (ours)")
    seed: int = option(0, "random seed")


FILTERS = ("limit", "rule", "margin", "max_similarity", "max_length_ratio", "demonstration_score")     # no call depends on them


def open_writers(args):
    """-> {"client", "counselor", "judge"}"""
    if not args.writer:
        print("no --writer: a scripted stand-in plays client, counselor and judge; its dialogues are no data")
        stand_in = scripted_writer()
        return {"client": stand_in, "counselor": stand_in, "judge": stand_in}
    writer = open_writer(args.writer, model=args.api_model, key_env=args.key_env, workers=args.workers)
    judge = writer if not args.judge else open_writer(args.judge, model=args.judge_api_model or args.api_model,
                                                      key_env=args.key_env, workers=args.workers)
    return {"client": writer, "counselor": writer, "judge": judge}


def main(argv=None):
    args = parse(Args, __doc__, argv)
    check(args.candidates >= 2, f"--candidates {args.candidates}: a pair needs at least 2")
    check(args.limit is None or args.limit >= 1, f"--limit {args.limit} must be at least 1")
    check(args.rule != "margin" or args.margin > 0, f"--margin {args.margin}: with --rule margin it must be above 0")
    check(args.max_exchanges >= 1, f"--max-exchanges {args.max_exchanges} must be at least 1")
    check(not args.judge or args.writer, f"--judge {args.judge} needs --writer: without one a scripted stand-in plays every role")
    cards = read_cards(args.cards)
    used = cards[:args.limit or (None if args.writer else 12)]
    if len(used) < len(cards):
        print(f"{len(used)} of {len(cards)} role cards are used")
    out = resumable_folder(args.out, "build_pref", args, ("workers", "key_env", *FILTERS))
    writers = open_writers(args)
    dialogues = build(used, writers, Journal(out / "journal.jsonl"), args)
    preferences, cold_start, report = collect(dialogues, args)
    report["writers"] = {role: writer.name for role, writer in writers.items()}
    write_jsonl(out / "dialogues.jsonl", dialogues)
    write_jsonl(out / "preference.jsonl", preferences)
    write_jsonl(out / "cold_start.jsonl", cold_start)
    write_json(out / "report.json", report)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    print(f"wrote {out}: {len(preferences)} pairs, {len(cold_start)} demonstrations, {len(dialogues)} dialogues")
    if report["pairs"]:
        print(f"next: python train_rm.py --data {out / 'preference.jsonl'}")


if __name__ == "__main__":
    run_script(main)
