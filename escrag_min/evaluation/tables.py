"""From responses to the paper's tables (§4): judge each reply, compare two files, climb the ablation ladder.

A response is a record with "id", "dialogue_id", "prompt" and "reply" (evaluate.py respond). Judges: a writer of llm.py asked
once a perspective, or a reward model, whose single metric is its score.
"""
from escrag_min.chat import Tokenizer
from escrag_min.data import messages_of, read_jsonl, text_id
from escrag_min.evaluation.plots import NO_MATPLOTLIB, matplotlib_pyplot
from escrag_min.judging import (
    METRICS,
    PERSPECTIVES,
    SWAPPED,
    average,
    bootstrap_interval,
    by_perspective,
    holm,
    paired_bootstrap,
    pairwise_summary,
    parse_preference,
    parse_scores,
    perspective_means,
)
from escrag_min.prompts import compare_prompt, score_prompt
from escrag_min.reward import load_reward_model, score_replies
from escrag_min.writers.journal import Request, ask
from escrag_min.writers.llm import open_writer
from escrag_min.writers.scripted import scripted_writer

LADDER = (      # paper §4, the ablation's rows: name, checkpoint, exemplars at inference (None: --retrieve)
    ("base", "base", 0), ("+ RAG", "base", None), ("cold-start SFT", "sft", 0), ("vanilla GRPO", "grpo", 0),
    ("vanilla GRPO + RAG at inference", "grpo", None), ("full: RAG-GRPO", "rag_grpo", None))


class RewardJudge:
    """A reward model as judge: it knows one number."""

    def __init__(self, folder):
        self.name = f"reward model {folder}"
        self.model = load_reward_model(folder)
        self.tokenizer = Tokenizer.from_pretrained(folder)

    def scores(self, records):
        return [s[0] for s in score_replies(self.model, self.tokenizer, [(r["prompt"], [r["reply"]]) for r in records])]


def open_judge(spec, **options):
    """--judge: "scripted", "rm:FOLDER", a Qwen-2.5 folder or Hub id, or an endpoint's URL."""
    if spec == "scripted":
        print("--judge scripted: a stand-in that counts words; its scores mean nothing")
        return scripted_writer()
    if spec.startswith("rm:"):
        return RewardJudge(spec[3:])
    return open_writer(spec, **options)


def read_responses(path):
    """-> {id: record}, in the file's order. Ids become text."""
    records = {}
    for record, where in read_jsonl(path):
        missing = [k for k in ("id", "dialogue_id", "prompt", "reply") if k not in record]
        if missing:
            raise ValueError(f"{where}: a response needs {', '.join(map(repr, missing))}")
        if not isinstance(record["reply"], str):
            raise ValueError(f'{where}: "reply" must be text, found {record["reply"]!r}')
        record["prompt"] = messages_of(record["prompt"], f'{where}: "prompt"')
        record["id"], record["dialogue_id"] = (text_id(record, key, where) for key in ("id", "dialogue_id"))
        if record["id"] in records:
            raise ValueError(f"{where}: the id {record['id']!r} is there twice")
        records[record["id"]] = record
    return records


# --- judge ---

def judge(records, judge, journal, metrics, label=""):
    """Score each reply -> [{"id", "dialogue_id", "scores": {metric key: number or None}, "average", "raw"}], in order.

    label: what tells this file's calls from another's in the same journal. An empty reply is shown to no judge. A writer's score
    of it is missing, as an unread answer is; a reward model's is NO_REPLY_REWARD, as in training.
    """
    records = list(records)
    if isinstance(judge, RewardJudge):
        values = judge.scores(records)
        return [{"id": r["id"], "dialogue_id": r["dialogue_id"], "scores": {"reward": v}, "average": v, "raw": {}}
                for r, v in zip(records, values)]
    views = by_perspective(metrics)
    asked = [(r, p) for r in records for p in PERSPECTIVES if views[p] and r["reply"]]
    answers = ask(judge, [Request(f"{label}{r['id']}/{p}", score_prompt(r["prompt"], r["reply"], p, views[p]), 0.0, 200)
                          for r, p in asked], journal, "judge")
    scored = {r["id"]: {"id": r["id"], "dialogue_id": r["dialogue_id"], "raw": {},
                        "scores": dict.fromkeys(m.key for m in metrics)} for r in records}
    for (r, p), answer in zip(asked, answers):
        scored[r["id"]]["raw"][p] = answer.raw()
        scored[r["id"]]["scores"].update(parse_scores(answer.text, [m.key for m in views[p]]) or {})
    for s in scored.values():
        s["average"] = average(s["scores"], metrics)
    return list(scored.values())


def summarise(scored, metrics):
    """Judged responses -> means per metric and perspective, their average, its interval by dialogue, and what is missing.

    Every mean is over the responses that have the number; "complete" says how many have all of them.
    """
    if scored and "reward" in scored[0]["scores"]:
        by_metric, by_view = {"reward": mean(s["scores"]["reward"] for s in scored)}, {}
    else:
        by_metric = {m.key: mean(s["scores"][m.key] for s in scored) for m in metrics}
        means = [perspective_means(s["scores"], metrics) for s in scored]
        by_view = {p: mean(m.get(p) for m in means) for p in PERSPECTIVES}
    complete = [s for s in scored if s["average"] is not None]
    interval = (None, None)
    if complete:
        interval = bootstrap_interval([s["average"] for s in complete], [s["dialogue_id"] for s in complete])
    numbers = [v for s in scored for v in s["scores"].values()]
    return {"n": len(scored), "complete": len(complete), "failure_rate": sum(v is None for v in numbers) / max(len(numbers), 1),
            "metrics": by_metric, "perspectives": by_view, "average": mean(s["average"] for s in scored), "interval": interval}


def judge_table(summary):
    """A summary as text."""
    names = {m.key: f"{m.perspective}: {m.name}" for m in METRICS}
    lines = [f"{names.get(k, k):40}{number(v):>8}" for k, v in summary["metrics"].items()]
    lines += [f"{'mean ' + p:40}{number(v):>8}" for p, v in summary["perspectives"].items()]
    low, high = summary["interval"]
    lines.append(f"{'average':40}{number(summary['average']):>8}   95% interval by dialogue [{number(low)}, {number(high)}]")
    lines.append(f"{summary['complete']} of {summary['n']} responses have every score; {summary['failure_rate']:.1%} of the scores "
                 "are missing")
    return "\n".join(lines)


def mean(values):
    """Of those that are not missing; None where all are."""
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def markdown_table(head, rows):
    """A Markdown table of strings."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def number(value, form=".2f"):
    return "-" if value is None else format(value, form)


# --- compare ---

def shared_contexts(a, b):
    """Ids that both {id: record} answer, in a's order. Under one id both must hold the same conversation."""
    shared = [k for k in a if k in b and a[k]["reply"] and b[k]["reply"]]
    if not shared:
        raise ValueError("the two response files share no context that both answer: "
                         f"{len(a.keys() & b.keys())} ids are in both, {left_out(a, b)}")
    for k in shared:
        if a[k]["prompt"] != b[k]["prompt"]:
            raise ValueError(f"the two response files hold different conversations under the id {k!r}")
    return shared


def left_out(a, b):
    """What shared_contexts leaves out of two {id: record}, in words."""
    silent = [sum(k in other and not r["reply"] for k, r in side.items()) for side, other in ((a, b), (b, a))]
    return f"{silent[0]} without a reply of A, {silent[1]} without one of B, {len(a.keys() ^ b.keys())} in one file only"


def compare(a, b, judge, journal):
    """Two {id: record} of the same contexts, blind and in both orders -> (rows, summary).

    Contexts that only one of them answers are left out, and counted.
    """
    shared = shared_contexts(a, b)
    if isinstance(judge, RewardJudge):
        first, second = (judge.scores([side[k] for k in shared]) for side in (a, b))
        better = ["first" if x > y else "second" if y > x else "tie" for x, y in zip(first, second)]
        verdicts, raw = [(v, SWAPPED[v]) for v in better], [{}] * len(shared)
    else:
        requests = [Request(f"{k}/{order}", compare_prompt(a[k]["prompt"], *(pair if order == "ab" else pair[::-1])), 0.0, 60)
                    for k in shared for pair in [(a[k]["reply"], b[k]["reply"])] for order in ("ab", "ba")]
        answers = ask(judge, requests, journal, "compare")
        raw = [{"raw": [forward.raw(), backward.raw()]} for forward, backward in zip(answers[::2], answers[1::2])]
        read = [parse_preference(answer.text) for answer in answers]
        verdicts = list(zip(read[::2], read[1::2]))
    lengths = [(len(a[k]["reply"].split()), len(b[k]["reply"].split())) for k in shared]
    summary = pairwise_summary(verdicts, lengths)
    summary["pairs"] = len(shared)
    summary["left_out"] = left_out(a, b)
    rows = [{"id": k, "forward": f, "backward": w, **kept} for k, (f, w), kept in zip(shared, verdicts, raw)]
    return rows, summary


def compare_table(summary):
    low, high = summary["wilson"]
    return (f"A wins {summary['wins']}, ties {summary['ties']}, B wins {summary['losses']}, unread {summary['unread']} "
            f"(of {summary['pairs']} pairs; left out: {summary['left_out']})\n"
            f"A's win rate, ties half: {number(summary['win_rate'])}; wins among decided: 95% interval [{low:.2f}, {high:.2f}]\n"
            f"verdict changed with the order: {number(summary['flip_rate'])}; for the reply read first: "
            f"{number(summary['first_rate'])}; correlation with length: {number(summary['length_correlation'])}")


# --- ladder ---

def ladder_rows(checkpoints, retrieve, sweep):
    """-> [(name, checkpoint folder, n)], the ladder's rows with a checkpoint, then the sweep over n on the full model."""
    rows = [(name, checkpoints[which], retrieve if n is None else n) for name, which, n in LADDER if checkpoints[which]]
    if checkpoints["rag_grpo"]:
        rows += [(f"full, n={n}", checkpoints["rag_grpo"], n) for n in sweep]
    return rows


def against_above(names, scored):
    """Each row against the row above it, on the same contexts: paired bootstrap by dialogue, Holm over all of them."""
    results = [None]
    for above, here in zip(names, names[1:]):
        old, new = ({s["id"]: s for s in scored[name]} for name in (above, here))
        shared = [k for k in new if k in old]
        results.append(paired_bootstrap([new[k]["average"] for k in shared], [old[k]["average"] for k in shared],
                                        [new[k]["dialogue_id"] for k in shared]))
    for result, adjusted in zip(results[1:], holm([r["p"] for r in results[1:]])):
        result["p_holm"] = adjusted
    return results


def ladder_table(rows, markdown=False):
    """rows: [{"name", "n_exemplars", "summary", "text", "against_above"}] -> text or Markdown.

    scored: responses that have every score, of all; an average and a gap ("on": so many contexts) are of those alone.
    """
    head = ["", "exemplars", "scored", "average", "95%", "vs above", "95%", "on", "p (Holm)", "words", "questions", "early advice",
            "distinct-2"]
    lines = []
    for r in rows:
        gap, text = r["against_above"] or {}, r["text"]
        lines.append([
            r["name"], str(r["n_exemplars"]), f"{r['summary']['complete']}/{r['summary']['n']}", number(r["summary"]["average"]),
            "[{}, {}]".format(*map(number, r["summary"]["interval"])), number(gap.get("difference"), "+.2f"),
            f"[{number(gap.get('low'))}, {number(gap.get('high'))}]" if gap else "-", number(gap.get("n"), "d"),
            number(gap.get("p_holm"), ".3f"),
            number(text["words"], ".0f"), number(text["question_rate"]), number(text["early_advice_rate"]),
            number(text["distinct_2"])])
    if markdown:
        return markdown_table(head, lines)
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths)))
                     for line in [head, *lines])


def plot_ladder(table, path):
    """A bar a row with its interval, where matplotlib is installed -> a line about it."""
    pyplot = matplotlib_pyplot()
    if pyplot is None:
        return f"\n{NO_MATPLOTLIB}"
    rows = [r for r in table if r["summary"]["average"] is not None]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.5))
    for y, row in enumerate(rows):
        mean, (low, high) = row["summary"]["average"], row["summary"]["interval"]
        axes.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color="C0", capsize=3)
    axes.set(yticks=range(len(rows)), yticklabels=[r["name"] for r in rows], xlabel="average (95% interval by dialogue)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return f"\nplot: {path}"
