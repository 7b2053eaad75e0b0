"""Human evaluation (paper §4, E): blind pairs of replies on one page, and what its annotators found.

    page    A's and B's replies to the same contexts -> HTML; for each pair and perspective a score of either reply, and which
            is better
    tally   the exports of the page -> wins of A, mean scores, Krippendorff's alpha

Order and sides are drawn with a digest of the seed and both files' text. The page shows neither ids nor names nor the seed, so
that page, exports and this code together do not tell whose reply is whose while the seed is secret (with one that is easily
guessed, the sides of a few pairs could be tried out); tally draws the same again from the same files and seed. The paper compares
scores to get preferences: "implied" here. Asking for the preference as well is ours.
"""
import base64
import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from escrag_min.evaluation.tables import left_out, number, read_responses, shared_contexts
from escrag_min.judging import DEFAULT_METRICS, PERSPECTIVES, by_perspective, krippendorff_alpha, wilson_interval
from escrag_min.model.checkpoint import read_json, write_json
from escrag_min.prompts import SPEAKER
from escrag_min.runtime.args import check, option, positional

TEMPLATE = Path(__file__).with_name("sheet.html")
SCORES = (1, 2, 3, 4, 5)        # ours: each step can be told from the next, and is a key; they often tie: hence the preference
ALLOWED = {"first": SCORES, "second": SCORES, "preference": ("first", "tie", "second")}
QUESTIONS = {
    "Client": "Put yourself in the client's place. How does each reply reach you?",
    "Counselor": "Look at each reply as someone who supervises counselors. Is it good professional work?",
    "Judge": "Step back, and side with nobody. How well does each reply fit this client and this problem?",
}
ROWS = (*PERSPECTIVES, "overall")


@dataclass
class Sheet:
    a: str = positional("responses of A")
    b: str = positional("responses of B")
    seed: int | None = option(None, "draws order and sides; tally needs the same; none: a secret one, which is printed")
    out: str = option("sheet.html", "page to write; it must not exist")


@dataclass
class Tally:
    exports: list[str] = positional("files that the page exported, one of each annotator")
    a: str = option("", "responses of A, as for the sheet")
    b: str = option("", "responses of B, as for the sheet")
    seed: int | None = option(None, "of the sheet, as it was given or printed")
    out: str = option("", "JSON file to write as well")


def sha256(*parts):
    return hashlib.sha256(json.dumps(parts).encode())


def draw_pairs(a, b, seed):
    """{id: record} of A and B -> (the sheet's id, [{"id": "p001", "context": id, "a_first": bool}] in the page's order).

    A stands first in half of the pairs. Drawn by hash and not by `random`, whose shuffle may differ between Python versions.
    """
    shared = shared_contexts(a, b)
    digest = sha256(seed, [[k, a[k]["prompt"], a[k]["reply"], b[k]["reply"]] for k in shared]).hexdigest()

    def drawn(what):
        return sorted(shared, key=lambda k: sha256(digest, what, k).digest())
    a_first = set(drawn("side")[:len(shared) // 2])
    pairs = [{"id": f"p{i:03d}", "context": k, "a_first": k in a_first} for i, k in enumerate(drawn("order"), start=1)]
    return digest[:12], pairs


def turns(prompt):
    try:
        return [[SPEAKER[m["role"]], m["content"].strip()] for m in prompt]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f'a response\'s "prompt" must be a list of messages, found {json.dumps(prompt)[:80]}') from None


def page(a, b, seed):
    """-> (HTML, the sheet's id, its number of pairs). Text goes in as JSON in which nothing can end or begin a tag."""
    sheet, pairs = draw_pairs(a, b, seed)
    shown = []
    for pair in pairs:
        first, second = (a, b) if pair["a_first"] else (b, a)
        k = pair["context"]
        shown.append({"id": pair["id"], "turns": turns(a[k]["prompt"]), "replies": [first[k]["reply"], second[k]["reply"]]})
    views = [{"name": p, "question": QUESTIONS[p], "metrics": [
        {"name": m.name, "definition": m.definition, "low": m.low, "high": m.high} for m in metrics]}
        for p, metrics in by_perspective(DEFAULT_METRICS).items()]
    data = json.dumps({"sheet": sheet, "scores": SCORES, "perspectives": views, "pairs": shown})    # ASCII: U+2028 is escaped
    data = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", data)
    html = TEMPLATE.read_text("utf-8")
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]      # only the page's own style and script run
    for tag in ("style", "script"):
        inline = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        policy.append(f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'")
    return html.replace("{{policy}}", "; ".join(policy)).replace("{{data}}", data), sheet, len(pairs)


# --- tally ---

def read_export(path, sheet, pairs):
    """A file the page exported -> (annotator, {pair id: {perspective: {"first", "second", "preference"}}})."""
    export = read_json(path)
    name, ratings = export.get("annotator"), export.get("ratings")
    check(isinstance(name, str) and name.strip() and isinstance(ratings, dict),
          f"{path}: no export of a sheet: it needs \"sheet\", \"annotator\" and \"ratings\"")
    check(export.get("sheet") == sheet, f"{path}: belongs to sheet {export.get('sheet')!r}; these two files, in this order and "
                                        f"with this --seed, make sheet {sheet!r}")
    known = {p["id"] for p in pairs}
    for pair, views in ratings.items():
        check(pair in known, f"{path}: unknown pair {pair!r}; the sheet has {len(known)}")
        check(isinstance(views, dict) and views.keys() <= set(PERSPECTIVES),
              f"{path}: {pair}: expected ratings by {', '.join(PERSPECTIVES)}, found {json.dumps(views)[:80]}")
        for view, rating in views.items():
            check(isinstance(rating, dict) and rating.keys() <= ALLOWED.keys(),
                  f"{path}: {pair}: {view}: expected {', '.join(ALLOWED)}, found {json.dumps(rating)[:80]}")
            for field, value in rating.items():
                check(type(value) in (int, str) and value in ALLOWED[field],
                      f"{path}: {pair}: {view}: {field} is {json.dumps(value)}; allowed: {', '.join(map(str, ALLOWED[field]))}")
    return " ".join(name.split()), ratings


def unblind(exports, pairs):
    """Ratings of R annotators -> (scores[R, pairs, 3 perspectives, A and B], stated[R, pairs, 3]); NaN: not rated.

    stated: 1 where A was found better, 0 for a tie, -1 where B was.
    """
    shape = len(exports), len(pairs), len(PERSPECTIVES)
    scores, stated = np.full((*shape, 2), np.nan), np.full(shape, np.nan)
    for r, ratings in enumerate(exports):
        for i, pair in enumerate(pairs):
            a, b = ("first", "second") if pair["a_first"] else ("second", "first")
            for v, view in enumerate(PERSPECTIVES):
                rating = ratings.get(pair["id"], {}).get(view, {})
                scores[r, i, v] = rating.get(a, np.nan), rating.get(b, np.nan)
                stated[r, i, v] = {a: 1, "tie": 0, b: -1, None: np.nan}[rating.get("preference")]
    return scores, stated


def outcomes(found):
    """float[R, pairs] of 1 (A), 0 (tie), -1 (B) or NaN -> counts of pairs, their win rate and Wilson interval, and alpha.

    A pair goes to the side that more of its annotators found better (ours): several ratings of one pair are not independent,
    and counting each would make the interval too narrow.
    """
    rated = ~np.isnan(found).all(axis=0)
    verdict = np.sign(np.nansum(found, axis=0))[rated]
    wins, ties, losses = (int((verdict == v).sum()) for v in (1, 0, -1))
    return {"wins": wins, "ties": ties, "losses": losses, "unrated": int((~rated).sum()),
            "win_rate": (wins + ties / 2) / len(verdict) if len(verdict) else None,
            "wilson": wilson_interval(wins, wins + losses), "alpha": krippendorff_alpha(found.T, "nominal")}


def tally(exports, sheet, pairs):
    """exports: {annotator: ratings} -> the table's numbers, for each perspective and overall.

    Overall, for one annotator and pair: the side that more perspectives prefer, the mean of the scores; missing where one is.
    """
    scores, stated = unblind(exports.values(), pairs)
    missing = np.isnan(scores).sum(axis=(1, 2, 3)) + np.isnan(stated).sum(axis=(1, 2))
    scores = np.concatenate([scores, scores.mean(axis=2, keepdims=True)], axis=2)
    stated = np.concatenate([stated, np.sign(stated.sum(axis=2, keepdims=True))], axis=2)
    implied = np.sign(scores[..., 0] - scores[..., 1])
    summary = {"sheet": sheet, "pairs": len(pairs), "asked": len(exports) * len(pairs) * len(PERSPECTIVES) * len(ALLOWED),
               "missing": dict(zip(exports, missing.tolist())), "stated": {}, "implied": {}, "scores": {}}
    for v, row in enumerate(ROWS):
        summary["stated"][row], summary["implied"][row] = outcomes(stated[:, :, v]), outcomes(implied[:, :, v])
        means = [float(np.nanmean(s)) if not np.isnan(s).all() else None for s in (scores[:, :, v, 0], scores[:, :, v, 1])]
        replies = scores[:, :, v].reshape(len(exports), -1)                                 # [R, pairs x (A and B)]
        summary["scores"][row] = {"a": means[0], "b": means[1], "alpha": krippendorff_alpha(replies.T, "interval")}
    return summary


def tally_table(summary):
    """A summary as text."""
    def block(title, key):
        yield (f"\n{title:32}{'A wins':>8}{'ties':>6}{'B wins':>8}{'unrated':>9}{'win rate':>10}{'95% of decided':>16}"
               f"{'alpha':>8}")
        for row, s in summary[key].items():
            yield (f"{row:32}{s['wins']:>8}{s['ties']:>6}{s['losses']:>8}{s['unrated']:>9}{number(s['win_rate']):>10}"
                   f"{'[{:.2f}, {:.2f}]'.format(*s['wilson']):>16}{number(s['alpha']):>8}")
    missing = summary["missing"]
    by_name = ", ".join(f"{k}: {v}" for k, v in missing.items())
    lines = [f"sheet {summary['sheet']}: {summary['pairs']} pairs, {len(missing)} annotators; {sum(missing.values())} of "
             f"{summary['asked']} answers are missing, and not filled in ({by_name})",
             *block("preference, as stated", "stated"), *block("preference, by comparing scores", "implied"),
             f"\n{'scores, 1 to 5':32}{'mean A':>8}{'mean B':>14}{'alpha':>8}"]
    lines += [f"{row:32}{number(s['a']):>8}{number(s['b']):>14}{number(s['alpha']):>8}" for row, s in summary["scores"].items()]
    return "\n".join(lines)


# --- evaluate.py sheet and tally ---

def write_sheet(args):
    """A page on which annotators rate A's and B's replies blind (paper, appendix E)."""
    out = Path(args.out)
    check(not out.exists(), f"--out {out} exists; choose another name")
    check(Path(args.a).resolve() != Path(args.b).resolve(), f"{args.a}: A and B are the same file")
    a, b = read_responses(args.a), read_responses(args.b)
    seed = secrets.randbits(62) if args.seed is None else args.seed
    html, name, pairs = page(a, b, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, "utf-8")
    print(f"wrote {out}: sheet {name}, {pairs} pairs (left out: {left_out(a, b)}); give each annotator "
          f"a copy, and keep both files and --seed {seed} for tally")


def tally_exports(args):
    """Unblind the annotators' exports: wins of A, mean scores, agreement."""
    check(args.a and args.b, "--a and --b: name the two responses files of the sheet")
    check(args.seed is not None, "--seed: give the number that sheet printed")
    name, pairs = draw_pairs(read_responses(args.a), read_responses(args.b), args.seed)
    exports, files = {}, {}
    for file in args.exports:
        annotator, ratings = read_export(file, name, pairs)
        same = annotator.casefold()
        check(same not in files, f"{file}: annotator {annotator!r} is in {files.get(same)} already; give one export of each")
        exports[annotator], files[same] = ratings, file
    summary = tally(exports, name, pairs)
    print(tally_table(summary))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, summary)
        print(f"\nwrote {args.out}")
