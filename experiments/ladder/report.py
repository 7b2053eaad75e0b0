"""The ladder's numbers, and docs/results.md from them:

    python experiments/ladder/report.py --out runs/ladder
        collect results.json from the runs, then write the tables
    python experiments/ladder/report.py
        only the tables, again from results.json

results.json holds ids and numbers, no word of ESConv; of the project's own
contexts it holds the answers too. A table stands in docs/results.md between
<!-- NAME --> and <!-- /NAME -->; the text around it is written by hand.
"""
import argparse
import json
import re
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
from run import LADDER, ROWS, SECOND, SIDES  # noqa: E402

from escrag_min.data import SAMPLES, read_jsonl, read_records  # noqa: E402
from escrag_min.encoder import TfidfEncoder  # noqa: E402
from escrag_min.evaluation.tables import against_above, markdown_table, mean, number  # noqa: E402
from escrag_min.judging import (  # noqa: E402
    bootstrap_interval, correlation, ngrams, paired_bootstrap, reply_statistics, wilson_interval, words_of)
from escrag_min.evaluation.plots import matplotlib_pyplot, plot_runs  # noqa: E402

RESULTS, DOC = HERE / "results.json", ROOT / "docs/results.md"
CURVES = ("reward", "reward_model_score", "kl", "entropy", "response_tokens", "well_formed", "truncated", "retrieval_similarity",
          "sample_tokens_per_s", "seconds_sampling", "seconds_reward", "seconds_update")
JUDGES = ("gold", "reward")
NAMES = {"base": "base", "base-rag": "+ RAG", "sft": "cold-start SFT", "grpo": "vanilla GRPO",
         "grpo-rag": "vanilla GRPO + RAG at inference", "full": "full: RAG-GRPO", "both": "cold start of both passes",
         "both-rag": "cold start of both passes + RAG", "full-both": "RAG-GRPO from there"}


# --- collect ---

def lines(path):
    return [record for record, _ in read_jsonl(path)]


def scores(folder):
    return {s["id"]: s["average"] for s in lines(folder / "scores.jsonl")}


def grams(text):
    return ngrams(words_of(text), 4)


def copied(record):
    """Share of a reply's 4-word sequences that stand in an exemplar it was shown; None without exemplars or sequences."""
    shown, own = {g for e in record["exemplars"] for g in grams(e["reply"])}, grams(record["reply"])
    return sum(g in shown for g in own) / len(own) if shown and own else None


def speaks_as_client(reply):
    """Whether a reply begins as a line of the prompt's list does: "3. Client: ..."."""
    return bool(re.match(r"\W*\d*\W*client:", reply, re.IGNORECASE))


def collect(out):
    results = {"torch": torch.__version__, "stages": {}, "rows": {}, "pairs": [], "curves": {}, "own": [], "opinion": {}}
    for start in lines(out / "stages.jsonl"):
        stage = results["stages"].setdefault(start["stage"], {"command": "", "seconds": []})
        stage["command"] = start["command"]
        stage["seconds"].append(start["seconds"])
    for name, policy, n in ROWS:
        if not all((out / f"scores-{name}-{judge}/scores.jsonl").exists() for judge in JUDGES):
            continue
        records = lines(out / f"responses-{name}.jsonl")
        by = {judge: scores(out / f"scores-{name}-{judge}") for judge in JUDGES}
        results["rows"][name] = {
            "policy": policy, "n": n, "text": reply_statistics(records) | {"commonest_opening": ""},
            "contexts": [{"id": r["id"], "dialogue_id": r["dialogue_id"], **{judge: by[judge][r["id"]] for judge in JUDGES},
                          "words": len(r["reply"].split()), "as_client": speaks_as_client(r["reply"]),
                          "well_formed": r["well_formed"], "finished": r["finished"],
                          "copied": copied(r), "similarity": r["exemplars"][0]["score"] if r["exemplars"] else None}
                         for r in records]}
    if all((out / f"valid-{side}-{judge}/scores.jsonl").exists() for side in SIDES for judge in JUDGES):
        results["pairs"] = pair_scores(out)
    for run in sorted(p.parent.name for p in out.glob("*/metrics.jsonl")):
        rows = lines(out / run / "metrics.jsonl")
        results["curves"][run] = {k: [row.get(k) for row in rows] for k in (*CURVES, "loss", "held_out_loss", "held_out_accuracy")
                                  if any(row.get(k) is not None for row in rows)}
    for name in NAMES:
        if (out / f"opinion-{name}/scores.jsonl").exists():
            results["opinion"][name] = [{"id": s["id"], "average": s["average"], "scores": s["scores"]}
                                        for s in lines(out / f"opinion-{name}/scores.jsonl")]
    answers = {name: {r["id"]: r for r in lines(out / f"own-{name}.jsonl")} for name in NAMES
               if (out / f"own-{name}.jsonl").exists()}
    for context in next(iter(answers.values()), {}).values():
        results["own"].append({"id": context["id"], "prompt": context["prompt"],
                               "answers": {name: {k: a[context["id"]][k] for k in ("reasoning", "reply", "initial", "exemplars")}
                                           for name, a in answers.items()}})
    RESULTS.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n", "utf-8")


def pair_scores(out):
    """The validation pairs: both models' scores, lengths, and similarity of each reply to the dialogue."""
    by = {(judge, side): scores(out / f"valid-{side}-{judge}") for judge in JUDGES for side in SIDES}
    sides = [lines(out / f"valid-{side}.jsonl") for side in SIDES]
    encoder = TfidfEncoder().fit([e["chosen"] for e in read_records(SAMPLES / "preferences.jsonl", "preference")])
    pairs = []
    for records in zip(*sides):
        dialogue = " ".join(m["content"] for m in records[0]["prompt"])
        vectors = encoder.encode([dialogue, *(r["reply"] for r in records)])
        pairs.append({"id": records[0]["id"], "dialogue_id": records[0]["dialogue_id"],
                      **{judge: [by[judge, side][r["id"]] for side, r in zip(SIDES, records)] for judge in JUDGES},
                      "words": [len(r["reply"].split()) for r in records], "tfidf": (vectors[1:] @ vectors[0]).tolist()})
    return pairs


# --- tables ---

def interval(low, high, form=".2f"):
    return f"[{number(low, form)}, {number(high, form)}]"


def pair_table(results):
    """Accuracy on the validation pairs; equal scores count half for the two rules, not at all for a reward model."""
    rows = []
    if not results["pairs"]:
        return "(not measured yet)"
    for name, what in (("reward", "training reward model"), ("gold", "gold reward model"), ("words", "the longer reply wins"),
                       ("tfidf", "the reply more similar to the dialogue (TF-IDF) wins")):
        ties = 0.5 if name in ("words", "tfidf") else 0.0
        right = sum(1 if good > bad else ties * (good == bad) for good, bad in (p[name] for p in results["pairs"]))
        n = len(results["pairs"])
        rows.append([what, f"{right / n:.3f}", interval(*wilson_interval(right, n), ".3f"), str(n)])
    return markdown_table(["", "accuracy", "95% (Wilson)", "pairs"], rows)


def row_numbers(row):
    """What a row of responses looks like, beside its rewards."""
    contexts, text = row["contexts"], row["text"]
    return [number(mean(c["reward"] for c in contexts)), f"{text['words']:.0f}", number(text["question_rate"]),
            number(text["early_advice_rate"]), number(text["distinct_2"]), f"{mean(c['well_formed'] for c in contexts):.2f}",
            number(mean(c["copied"] for c in contexts)), number(mean(c["as_client"] for c in contexts)),
            str(sum(c["words"] == 0 for c in contexts))]


LOOKS = ["training reward", "words", "questions", "early advice", "distinct-2", "well-formed", "copied",
         "speaks as client", "empty"]


def gold(row):
    values, dialogues = zip(*((c["gold"], c["dialogue_id"]) for c in row["contexts"]))
    return f"{mean(values):.2f}", interval(*bootstrap_interval(values, dialogues))


def ladder_table(results, ladder=LADDER):
    """The rows, each against the one above: gold reward, paired bootstrap by dialogue, Holm over the gaps."""
    names = [name for name in ladder if name in results["rows"]]
    scored = {name: [{**c, "average": c["gold"]} for c in results["rows"][name]["contexts"]] for name in names}
    rows = []
    for name, gap in zip(names, against_above(names, scored)):
        row, gap = results["rows"][name], gap or {}
        rows.append([NAMES[name], str(row["n"]), *gold(row), number(gap.get("difference"), "+.2f"),
                     interval(gap["low"], gap["high"]) if gap else "-", number(gap.get("p_holm"), ".3f"), *row_numbers(row)])
    return markdown_table(["", "n", "gold reward", "95%", "vs above", "95%", "p (Holm)", *LOOKS], rows)


def second_table(results):
    return ladder_table(results, ["base", *SECOND])


def sweep_table(results):
    rows = [results["rows"][name] for name, policy, _ in ROWS if policy.startswith("rag-grpo") and name in results["rows"]]
    return markdown_table(["policy", "n", "gold reward", "95%", *LOOKS],
                          [[row["policy"], str(row["n"]), *gold(row), *row_numbers(row)]
                           for row in sorted(rows, key=lambda r: (r["policy"], r["n"]))])


def against(results, here, other, judge="gold", answered=False):
    """Gap between two rows by a judge; answered: over the contexts to which both have a reply."""
    a, b = ({c["id"]: c for c in results["rows"][name]["contexts"]} for name in (here, other))
    ids = [i for i in a if not answered or a[i]["words"] and b[i]["words"]]
    return paired_bootstrap([a[i][judge] for i in ids], [b[i][judge] for i in ids], [a[i]["dialogue_id"] for i in ids])


def hypothesis_table(results):
    rows = []
    for what, here, other in (("H1: RAG-GRPO - cold start", "full", "sft"), ("vanilla GRPO - cold start", "grpo", "sft"),
                              ("H3: RAG-GRPO - vanilla GRPO + RAG", "full", "grpo-rag"),
                              ("H1 again: RAG-GRPO - its cold start, n = 0", "full-both", "both"),
                              ("RAG-GRPO - its cold start, both n = 3", "full-both", "both-rag"),
                              ("RAG-GRPO - its cold start, both n = 0", "full-both-n0", "both"),
                              ("RAG-GRPO of the second climb - vanilla GRPO", "full-both", "grpo")):
        if {here, other} <= set(results["rows"]):
            for judge in JUDGES:
                for answered in (False, True):
                    gap = against(results, here, other, judge, answered)
                    rows.append([what, judge, "that both answer" if answered else "all", str(gap["n"]),
                                 number(gap["difference"], "+.2f"), interval(gap["low"], gap["high"]), number(gap["p"], ".3f")])
    return markdown_table(["", "by", "contexts", "n", "difference", "95%", "p"], rows)


def opinion_table(results):
    """qwen05 as judge on the first contexts of each row: what it could be read on, and whether it agrees with the gold reward."""
    rows = []
    judged = {name: [{**s, "gold": c["gold"]} for s in found for c in results["rows"][name]["contexts"] if c["id"] == s["id"]]
              for name, found in results["opinion"].items()}
    for name, found in [*judged.items(), ("all rows together", sum(judged.values(), []))] if judged else []:
        read = [s for s in found if s["average"] is not None]
        numbers = [v for s in found for v in s["scores"].values()]
        rows.append([NAMES.get(name, name), number(mean(s["average"] for s in found)), f"{len(read)} of {len(found)}",
                     f"{mean(v is not None for v in numbers):.0%}",
                     number(correlation([s["average"] for s in read], [s["gold"] for s in read]) if read else None)])
    return markdown_table(["", "average (0-10)", "complete", "scores read", "correlation with gold"], rows)


def curve_table(results):
    """Means of the first and the last ten steps of each GRPO run."""
    rows = []
    for run, curve in results["curves"].items():
        if "reward" in curve:
            rows += [[run, str(len(curve["reward"])), when, *(number(mean(curve.get(k, [])[part])) for k in CURVES[:8])]
                     for when, part in (("first 10", slice(10)), ("last 10", slice(-10, None)))]
    return markdown_table(["run", "steps", "mean of", *(k.replace("_", " ") for k in CURVES[:8])], rows)


def cost_table(results):
    rows = [[name, f"{sum(stage['seconds']) / 60:.0f} min", str(len(stage["seconds"])), f"`{stage['command']}`"]
            for name, stage in results["stages"].items()]
    return markdown_table(["stage", "wall time", "starts", "command"], rows)


def answers(results):
    """The project's own contexts, answered by every row."""
    parts = []
    for context in results["own"]:
        parts += [f"**{context['id']}**", *(f"> {'client' if m['role'] == 'user' else 'counselor'}: {m['content']}  "
                                            for m in context["prompt"]), ""]
        for name, a in context["answers"].items():
            reply = " ".join(a["reply"].split()) or "(no reply)"
            parts.append(f"- {NAMES[name]}: {reply}")
        parts.append("")
    return "\n".join(parts).strip()


TABLES = {"pairs": pair_table, "ladder": ladder_table, "second": second_table, "hypotheses": hypothesis_table,
          "sweep": sweep_table, "curves": curve_table, "opinion": opinion_table, "cost": cost_table, "answers": answers}


def with_tables(text, results):
    """The page with every block between <!-- NAME --> and <!-- /NAME --> made anew."""
    for name, make in TABLES.items():
        block = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(lambda found: f"{found[1]}{make(results)}\n{found[2]}", text)
    return text


def plot(results):
    """Reward of the GRPO runs, one over the other."""
    runs = {run: [{"step": i, "reward": r} for i, r in enumerate(curve["reward"], start=1)]
            for run, curve in results["curves"].items() if "reward" in curve}
    if runs and matplotlib_pyplot():
        plot_runs(runs, DOC.parent / "results-reward.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the runs' folder, to collect from")
    args = parser.parse_args()
    if args.out:
        collect(args.out)
    results = json.loads(RESULTS.read_text("utf-8"))
    DOC.write_text(with_tables(DOC.read_text("utf-8"), results), "utf-8")
    plot(results)


if __name__ == "__main__":
    main()
