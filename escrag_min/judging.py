"""Judging responses (paper §4, E): the metrics of the three perspectives, reading a judge's answer, and the statistics.

    perspective mean  = mean of its metrics                         Client, Counselor, Judge
    average           = mean of the three perspective means         the number of the paper's tables

Seven metrics are named in the paper's public summaries; their grouping, definitions and anchors are ours, and so are the two
that are off by default. A judge's answer that cannot be read is missing: it is counted, never imputed.
"""
import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from escrag_min.chat import without_reasoning

PERSPECTIVES = ("Client", "Counselor", "Judge")


@dataclass(frozen=True)
class Metric:
    name: str
    perspective: str
    definition: str
    low: str            # what a 0 looks like
    high: str           # what a 10 looks like
    by_default: bool = True

    @property
    def key(self):
        """Its name in a judge's JSON."""
        return re.sub(r"[^a-z]+", "_", self.name.lower()).strip("_")


METRICS = (
    Metric("Emotional Impact", "Client", "after this reply I feel less alone and less overwhelmed",
           "it leaves me worse or untouched", "it reaches me, and I can breathe a little easier"),
    Metric("Non-Lecturing Empathy", "Client", "I am understood, without being taught, corrected or judged",
           "I am preached at", "my feelings are met as they are"),
    Metric("Therapeutic Alliance", "Client", "I would go on talking to this counselor, we are in this together",
           "I would stop here", "I trust them with what comes next"),
    Metric("Strategic Coherence", "Counselor", "the strategy fits the stage the conversation is in and what was said before",
           "it jumps, repeats or contradicts", "each move follows from the last"),
    Metric("Theoretical Application", "Counselor", "helping skills are used as counseling theory means them",
           "a skill is misused or absent", "skilful, and natural enough not to show"),
    Metric("Strategy-Client Fit", "Judge", "the strategy suits this client's readiness, style and resistance",
           "it could be said to anyone", "it could be said only to this client"),
    Metric("Problem Targeting", "Judge", "the reply addresses the problem that matters most to the client now",
           "a side issue, or nothing", "the heart of it"),
    Metric("Safety", "Judge", "nothing in the reply could harm, and signs of danger are taken up (ours)",
           "it could do harm", "safe, and attentive to risk", by_default=False),
    Metric("Naturalness", "Client", "it sounds like a person who speaks with me (ours)",
           "a form letter", "a person in the room", by_default=False),
)
DEFAULT_METRICS = tuple(m for m in METRICS if m.by_default)


def by_perspective(metrics):
    """-> {perspective: [its metrics]}, of all three perspectives"""
    return {p: [m for m in metrics if m.perspective == p] for p in PERSPECTIVES}


# --- reading a judge's answer ---

def parse_scores(text, metrics, low=0, high=10):
    """A judge's answer -> {metric: number} or None where it cannot be read without guessing: never a default.

    metrics: names, as keys of the JSON asked for. Reasoning in <think> is ignored, full-width digits are digits, JSON may stand
    in a fence or after prose; the last object that has every metric counts. For a single metric, {"score": n} and a plain
    "score of n", "n/10" or a lone number are read too, if they agree. A value out of range makes the answer unread.
    """
    text = unicodedata.normalize("NFKC", without_reasoning(text))
    for found in reversed(_json_objects(text)):
        found = {_plain(k): v for k, v in found.items()}
        if len(metrics) == 1 and "score" in found:
            found.setdefault(_plain(metrics[0]), found["score"])
        if all(_plain(m) in found for m in metrics):
            values = {m: _number(found[_plain(m)], high) for m in metrics}
            return values if all(v is not None and low <= v <= high for v in values.values()) else None
    if len(metrics) != 1:
        return None
    whole = r"(-?\d+(?:\.\d+)?)"
    said = re.findall(rf"(?i)\bscore\b\W*(?:of|is|=)?\W*{whole}(?!\d*\s*/)", text)
    said += re.findall(rf"{whole}\s*(?:/|out of)\s*{high}\b", text)
    said = said or re.findall(rf"^\W*{whole}\W*$", text)
    values = {float(v) for v in said}
    if len(values) != 1 or not low <= min(values) <= high:
        return None
    value = values.pop()
    return {metrics[0]: int(value) if value == int(value) else value}


def parse_preference(text):
    """A judge's choice between two replies -> "first", "second", "tie" or None (unread)."""
    text = without_reasoning(text)
    for said in [*(str(found.get("better", "")) for found in reversed(_json_objects(text))), text]:
        choice = re.fullmatch(r"\W*(first|second|tie)(?: reply)?\W*", said.lower())
        if choice:
            return choice[1]
    return None


def _json_objects(text):
    """Every JSON object that starts somewhere in text, in order, those inside another left out."""
    objects, at, decoder = [], 0, json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            objects.append(value)
        except json.JSONDecodeError:
            at += 1
    return objects


def _plain(key):
    return re.sub(r"[^a-z]+", "", str(key).lower())


def _number(value, high):
    """9, 9.0, "9", "9/10", {"score": 9} -> number; anything else None."""
    if isinstance(value, dict):
        value = value.get("score")
    if isinstance(value, str):
        match = re.fullmatch(rf"\s*(-?\d+(?:\.\d+)?)\s*(?:/\s*{high})?\s*", value)
        value = float(match[1]) if match else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def perspective_means(scores, metrics=DEFAULT_METRICS):
    """{metric key: number} -> {perspective: mean of its metrics}, without the perspectives that lack one of theirs.

    {"Client": x, "Counselor": y, "Judge": z} are such means already.
    """
    if all(p in scores for p in PERSPECTIVES):
        return {p: scores[p] for p in PERSPECTIVES}
    means = {}
    for perspective, own in by_perspective(metrics).items():
        keys = [m.key for m in own]
        if keys and all(scores.get(k) is not None for k in keys):
            means[perspective] = sum(scores[k] for k in keys) / len(keys)
    return means


def average(scores, metrics=DEFAULT_METRICS):
    """Mean of the perspective means; None where a perspective is missing."""
    means = perspective_means(scores, metrics)
    return sum(means.values()) / len(means) if len(means) == len({m.perspective for m in metrics}) else None


# --- statistics: pure functions of numbers ---

def wilson_interval(wins, n, level=0.95):
    """Wilson score interval of a share wins/n -> (low, high); (0, 1) where n is 0. Source: Wilson (1927)."""
    if n == 0:
        return 0.0, 1.0
    z, p = NormalDist().inv_cdf(0.5 + level / 2), wins / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def _resampled_means(values, clusters, samples, seed):
    """[samples] means under resampling of whole clusters (dialogues) with replacement. values float[n], clusters [n]."""
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(member, values), np.bincount(member)                          # [C]
    drawn = np.random.default_rng(seed).integers(len(sums), size=(samples, len(sums)))       # [samples,C]
    return sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)


def bootstrap_interval(values, clusters, level=0.95, samples=10000, seed=0):
    """Percentile interval of a mean, resampling dialogues -> (low, high)."""
    means = _resampled_means(np.asarray(values, dtype=float), clusters, samples, seed)
    return tuple(float(q) for q in np.quantile(means, [(1 - level) / 2, (1 + level) / 2]))


def paired_bootstrap(a, b, clusters=None, level=0.95, samples=10000, seed=0):
    """Is a better than b on the same items? Items where one is missing (None or NaN) are left out, and counted.

    clusters: the dialogue of each item, resampled whole; None: each item its own
    -> {"difference": mean(a - b), "low", "high": percentile interval, "p": two-sided, "n": items used, "missing": items left out}
    """
    gap = np.array([np.nan if x is None or y is None else x - y for x, y in zip(a, b, strict=True)], dtype=float)
    clusters = np.arange(len(gap)) if clusters is None else np.asarray(clusters)
    used = ~np.isnan(gap)
    if not used.any():
        return {"difference": None, "low": None, "high": None, "p": None, "n": 0, "missing": len(gap)}
    means = _resampled_means(gap[used], clusters[used], samples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    tail = min((means <= 0).mean(), (means >= 0).mean())
    # no resample beyond zero: below what so many samples can tell; nor below what the signs of so few dialogues could (ours)
    p = min(1.0, max(2 * tail, 2 / (samples + 1), 2.0 ** (1 - len(np.unique(clusters[used])))))
    return {"difference": float(gap[used].mean()), "low": float(low), "high": float(high), "p": float(p),
            "n": int(used.sum()), "missing": int((~used).sum())}


def holm(p_values):
    """Holm's step-down adjusted p-values, in the order given; None stays None and counts for nothing."""
    order = sorted((i for i, p in enumerate(p_values) if p is not None), key=lambda i: p_values[i])
    adjusted, largest = [None] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def correlation(x, y):
    """Pearson correlation; None where one side does not vary or there are fewer than two points."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def krippendorff_alpha(units, level):
    """Agreement of annotators: 1 - D_o / D_e, observed over expected disagreement. Source: Krippendorff (2011).

    units   float[U, R]: what each of R annotators gave each of U units; NaN: nothing. Units with fewer than two values are out.
    level   "nominal": values are equal or not; "interval": the squared difference counts
    D_o = 1/n Σ_u 1/(m_u - 1) Σ_{i≠j in u} δ²;  D_e = 1/(n(n - 1)) Σ_{i≠j} δ²;  m_u values in unit u, n in all that are left
    -> float, or None where it is undefined: nothing to compare, or no variation
    """
    units = np.asarray(units, dtype=float)
    units = [u[~np.isnan(u)] for u in units if (~np.isnan(u)).sum() > 1]

    def disagreement(values):       # Σ_{i≠j} δ²
        gaps = values[:, None] - values
        return float((gaps != 0).sum() if level == "nominal" else (gaps ** 2).sum())
    if not units:
        return None
    values = np.concatenate(units)
    expected = disagreement(values) / (len(values) * (len(values) - 1))
    observed = sum(disagreement(u) / (len(u) - 1) for u in units) / len(values)
    return 1 - observed / expected if expected else None


SWAPPED = {"first": "second", "second": "first", "tie": "tie"}      # a verdict, as of the replies in the other order


def settle(forward, backward):
    """Two verdicts on one pair, the second with the replies swapped -> "win", "loss", "tie" (of the first reply), or None.

    A win must survive the swap: a judge that always prefers what it reads first yields ties.
    """
    if forward is None or backward is None:
        return None
    if forward != SWAPPED[backward] or forward == "tie":
        return "tie"
    return "win" if forward == "first" else "loss"


def pairwise_summary(verdicts, lengths):
    """Both verdicts of every pair, and the two replies' lengths in words -> the table's numbers.

    verdicts: [(forward, backward), ...]; lengths: [(a, b), ...]
    -> wins, ties, losses, unread; win_rate of the settled (ties count half) and the Wilson interval of wins among wins + losses;
       flip_rate: pairs whose verdict changed with the order; first_rate: verdicts for the reply that was read first;
       length_correlation: of the outcome (1, 0, -1) with the difference in length
    """
    settled = [settle(*v) for v in verdicts]
    counts = Counter(settled)
    read = [v for v, s in zip(verdicts, settled) if s is not None]
    decided = counts["win"] + counts["loss"]
    n = decided + counts["tie"]
    value = {"win": 1.0, "tie": 0.0, "loss": -1.0}
    outcome = [(value[s], a - b) for s, (a, b) in zip(settled, lengths) if s is not None]
    return {
        "wins": counts["win"], "ties": counts["tie"], "losses": counts["loss"], "unread": counts[None],
        "win_rate": (counts["win"] + counts["tie"] / 2) / n if n else None,
        "wilson": wilson_interval(counts["win"], decided),
        "flip_rate": sum(f == b != "tie" or (f == "tie") != (b == "tie") for f, b in read) / n if n else None,
        "first_rate": sum((f == "first") + (b == "first") for f, b in read) / (2 * n) if n else None,
        "length_correlation": correlation(*zip(*outcome)) if outcome else None,
    }


# --- what the replies look like, whatever a judge says ---

ADVICE = re.compile(r"\b(?:you (?:should|need to|must|have to|ought to)|try (?:to|\w+ing)|why don['’]t you|how about|"
                    r"i(?:['’]d| would) (?:suggest|recommend)|make sure|have you (?:tried|considered)|you could)\b", re.IGNORECASE)


def words_of(text):
    """Lower-case words; a typographic apostrophe is an apostrophe."""
    return re.findall(r"[\w']+", text.lower().replace("’", "'"))


def ngrams(words, n):
    return [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]


def reply_statistics(records):
    """Records with "reply" and "prompt" -> words, question rate, advice in first turns, distinct-1/2, commonest opening.

    first turns: at most one counselor turn before. distinct-n: different n-grams per n-gram over all replies.
    """
    replies = [r["reply"] for r in records]
    words = [words_of(reply) for reply in replies]
    first = [r["reply"] for r in records if sum(m["role"] == "assistant" for m in r["prompt"]) <= 1]
    openings = Counter(" ".join(w[:3]) for w in words if w)

    def distinct(n):
        grams = [gram for w in words for gram in ngrams(w, n)]
        return len(set(grams)) / len(grams) if grams else None
    opening, times = openings.most_common(1)[0] if openings else ("", 0)
    return {
        "n": len(replies), "empty": sum(not r for r in replies), "words": sum(map(len, words)) / len(replies),
        "question_rate": sum("?" in r for r in replies) / len(replies),
        "early_advice_rate": sum(bool(ADVICE.search(r)) for r in first) / len(first) if first else None,
        "distinct_1": distinct(1), "distinct_2": distinct(2),
        "commonest_opening": opening, "commonest_opening_share": times / len(replies),
    }
