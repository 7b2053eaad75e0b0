"""ESC-Preference (paper §3): dominance-based filtering of scored candidates, and what is written.

    a dominates b  iff  a >= b in all three perspective means, a > b in one, and mean(a) - mean(b) >= margin      dominates
    pair           =    chosen: the non-dominated candidate of the highest mean; rejected: the one it dominates by the
                        largest gap; at most one pair a state                                                     select_pair

Which rule the paper uses is not known to us; rule and margin are ours, with other readings as options. The dialogues come
from roleplay.py.
"""
import difflib
from collections import Counter

from escrag_min.data import reasoned_reply
from escrag_min.judging import DEFAULT_METRICS, average, by_perspective, parse_scores, perspective_means

RULES = ("perspective", "metric", "strict", "margin")


def dominates(a, b, rule="perspective", margin=0.5, metrics=DEFAULT_METRICS):
    """Whether scores a dominate scores b. Scores: {metric key: number}, complete.

    rule  "perspective": a >= b in every perspective mean, a > b in one          (default)
          "metric":      the same of every metric
          "strict":      a > b in every perspective mean
          "margin":      average(a) > average(b), and nothing else beyond the margin
    and in each: average(a) - average(b) >= margin.
    """
    if rule not in RULES:
        raise ValueError(f"dominates: rule {rule!r}; allowed: {', '.join(RULES)}")
    if rule == "metric":
        pairs = [(a[m.key], b[m.key]) for m in metrics]
    else:
        means_a, means_b = perspective_means(a, metrics), perspective_means(b, metrics)
        pairs = [(means_a[p], means_b[p]) for p in means_a]
    gap = average(a, metrics) - average(b, metrics)
    if gap < margin - 1e-9:
        return False
    if rule == "margin":
        return gap > 0
    if rule == "strict":
        return all(x > y for x, y in pairs)
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def similarity(a, b):
    """Of two texts, by their words: 1 the same, 0 nothing in common (difflib ratio)."""
    return difflib.SequenceMatcher(None, a.lower().split(), b.lower().split(), autojunk=False).ratio()


def select_pair(candidates, rule="perspective", margin=0.5, max_similarity=0.8, max_length_ratio=1.5, metrics=DEFAULT_METRICS,
                discarded=None):
    """Candidates of one state -> (chosen, rejected) or None.

    candidates         dicts with "reply" and "scores" ({metric key: number}, or None where unread)
    max_similarity     two replies more alike than this are near-duplicates
    max_length_ratio   of their words; a pair beyond it would teach length
    discarded          a Counter that learns why a candidate or the state was discarded
    """
    discarded = Counter() if discarded is None else discarded
    scored = [c for c in candidates if c["scores"] is not None]
    discarded["candidate: scores unread"] += len(candidates) - len(scored)
    if len(scored) < 2:
        discarded["state: fewer than two scored candidates"] += 1
        return None

    def beats(a, b):
        return dominates(a["scores"], b["scores"], rule, margin, metrics)
    undominated = [c for c in scored if not any(beats(other, c) for other in scored)]
    chosen = max(undominated, key=lambda c: average(c["scores"], metrics))      # there is one: dominance has no cycle
    rejected = []
    for candidate in scored:
        if not beats(chosen, candidate):
            continue
        words = sorted(len(c["reply"].split()) for c in (chosen, candidate))
        if similarity(chosen["reply"], candidate["reply"]) > max_similarity:
            discarded["candidate: near-duplicate of the chosen"] += 1
        elif words[1] > max_length_ratio * max(words[0], 1):
            discarded["candidate: length ratio"] += 1
        else:
            rejected.append(candidate)
    if not rejected:
        discarded["state: nothing dominated"] += 1
        return None
    return chosen, min(rejected, key=lambda c: average(c["scores"], metrics))


def collect(dialogues, args):
    """Scored dialogues -> (preference records, cold-start records, report)."""
    preferences, cold_start, discarded, ended = [], [], Counter(), Counter(d["ended"].split(":")[0] for d in dialogues)
    for d in dialogues:
        if d["ended"] in ("risk", "risk card"):     # the flagged state never came to candidates
            discarded[f"dialogue: {d['ended']}"] += 1
        about = {k: d["card"][k] for k in ("emotion_type", "problem_type", "situation")}
        for number, exchange in enumerate(d["exchanges"]):
            where = {"id": f"{d['id']}-{number + 1}", "dialogue_id": d["id"], **about}
            discarded["candidate: failed"] += sum(c["failed"] is not None for c in exchange["candidates"])
            standing = [c for c in exchange["candidates"] if c["failed"] is None]
            best = next((c for c in standing if c["number"] == exchange["best"]), None)
            if best and average(best["scores"]) >= args.demonstration_score:
                cold_start.append({**where, **notes(best), "prompt": exchange["prompt"],
                                   "completion": as_message(reasoned_reply(best, best["reply"]))})
            pair = select_pair(standing, args.rule, args.margin, args.max_similarity, args.max_length_ratio, discarded=discarded)
            if pair:
                chosen, rejected = pair
                preferences.append({**where, **notes(chosen), "prompt": exchange["prompt"], "chosen": as_message(chosen["reply"]),
                                    "rejected": as_message(rejected["reply"]),
                                    "scores": {"chosen": chosen["scores"], "rejected": rejected["scores"]}})
    return preferences, cold_start, report(dialogues, preferences, cold_start, discarded, ended)


def as_message(text):
    return [{"role": "assistant", "content": text}]


def notes(candidate):
    return {k: candidate[k] for k in ("stage", "state", "strategy")}


def report(dialogues, preferences, cold_start, discarded, ended):
    """What was kept, what was discarded and why, and whether the pairs would teach length."""
    candidates = [c for d in dialogues for e in d["exchanges"] for c in e["candidates"]]
    answers = [text for c in candidates for text in c["raw"].values()]
    keys = {p: [m.key for m in metrics] for p, metrics in by_perspective(DEFAULT_METRICS).items()}
    read = sum(parse_scores(text, keys[p]) is not None for c in candidates for p, text in c["raw"].items())
    scored = [c["scores"] for c in candidates if c["scores"]]
    words = [tuple(len(r[k][0]["content"].split()) for k in ("chosen", "rejected")) for r in preferences]
    return {
        "dialogues": len(dialogues), "states": sum(len(d["exchanges"]) for d in dialogues), "candidates": len(candidates),
        "pairs": len(preferences), "demonstrations": len(cold_start), "ended": dict(ended),
        "discarded": {k: v for k, v in sorted(discarded.items()) if v},
        "judge_answers": len(answers), "judge_answers_read": read / len(answers) if answers else None,
        "score_means": {m.key: sum(s[m.key] for s in scored) / len(scored) for m in DEFAULT_METRICS} if scored else {},
        "words_chosen": sum(a for a, _ in words) / len(words) if words else None,
        "words_rejected": sum(b for _, b in words) / len(words) if words else None,
        "chosen_longer": sum(a > b for a, b in words) / len(words) if words else None,
        "strategies": dict(Counter(r["strategy"] for r in preferences)), "stages": dict(Counter(r["stage"] for r in preferences)),
    }
