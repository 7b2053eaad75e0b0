"""ESC-Preference (paper §3): simulated client-counselor dialogues, candidates by three reasoning stages, scores from three
perspectives, stage-wise selection.

    for each exchange, all dialogues together:
        the client of the role card says a line                                            client
        K candidates: stage -> state -> strategy -> reply                                  propose
        each candidate is scored by Client, Counselor and Judge                            score
        the best one is what the counselor says                                            select

Every call to a writer goes through a journal (journal.py): the build is a function of the journal, so a killed run that is
started again asks only what is missing and makes the same dialogues. preference.py turns them into pairs.
"""
import re

from escrag_min.chat import without_reasoning
from escrag_min.data import STAGES, STRATEGIES, is_esconv, read_esconv, read_jsonl, text_id
from escrag_min.judging import DEFAULT_METRICS, PERSPECTIVES, average, by_perspective, parse_scores
from escrag_min.preference import similarity
from escrag_min.prompts import STEPS, candidate_prompt, client_prompt, one_line, score_prompt
from escrag_min.runtime.args import check
from escrag_min.runtime.optimizer import derived_seed
from escrag_min.safety import HELP_TEXT, crisis_signal
from escrag_min.writers.journal import Request, ask

REQUIRED = ("id", "emotion_type", "problem_type", "situation", "initial_intensity")


def read_cards(path):
    """Role cards from a JSON-lines file of ours, or out of an ESConv file (those with a situation and an intensity).

    A card with "risk" is not played; of ESConv's these are the ones whose situation holds a crisis signal.
    """
    if is_esconv(path):
        dialogues = read_esconv(path)
        raw = [({**{k: d[k] for k in REQUIRED[1:]}, "id": d["dialogue_id"], "risk": crisis_signal(d["situation"]) is not None},
                f"{path}: {d['dialogue_id']}") for d in dialogues if d["situation"] and d["initial_intensity"]]
        if len(raw) < len(dialogues):
            print(f"{path}: {len(dialogues) - len(raw)} of {len(dialogues)} dialogues lack a situation or intensity: no role card")
    else:
        raw = read_jsonl(path)
    seen = set()
    for card, where in raw:
        missing = [k for k in REQUIRED if not card.get(k)]
        if missing:
            raise ValueError(f"{where}: a role card needs {', '.join(map(repr, missing))}")
        if card["initial_intensity"] not in (1, 2, 3, 4, 5):
            raise ValueError(f"{where}: initial_intensity is {card['initial_intensity']!r}; allowed: 1 to 5")
        card["id"] = text_id(card, "id", where)
        check("/" not in card["id"], f"{where}: the id {card['id']!r} may hold no /")
        if card["id"] in seen:
            raise ValueError(f"{where}: the id {card['id']!r} is there twice")
        seen.add(card["id"])
    return [card for card, _ in raw]


# --- one exchange, for all dialogues that still go on ---

def start(card):
    return {"id": card["id"], "card": card, "messages": [], "exchanges": [], "ended": "risk card" if card.get("risk") else None}


def request(args, dialogue, name, messages, temperature, max_tokens):
    key = f"{dialogue['id']}/{len(dialogue['exchanges'])}/{name}"
    return Request(key, messages, temperature, max_tokens, derived_seed(args.seed, key))


def client(dialogues, writer, journal, args):
    """Each client says a line; what it says, or how often it said so, may end the dialogue."""
    answers = ask(writer, [request(args, d, "client", client_prompt(d["card"], d["messages"]), args.client_temperature, 60)
                           for d in dialogues], journal, "client")
    for d, answer in zip(dialogues, answers):
        if answer.text is None:
            d["ended"] = f"client failed: {answer.error}"
            continue
        text = without_reasoning(answer.text)
        token = re.search(r"\[(GOALS MET|END)\]", text)
        line = client_line(text)
        said = [m["content"] for m in d["messages"] if m["role"] == "user"]
        if token:
            d["ended"] = "goals met" if token[1] == "GOALS MET" else "client ended"
        elif not line:
            d["ended"] = "client said nothing"
        elif any(similarity(line, old) > 0.9 for old in said):
            d["ended"] = "repetition"
        if line:
            d["messages"].append({"role": "user", "content": line})
        if crisis_signal(line):
            d["ended"] = "risk"
            d["messages"].append({"role": "assistant", "content": HELP_TEXT})


def client_line(text):
    """What the client says: the first line that says something, without a label, quotes and control words."""
    text = re.sub(r"\[(?:GOALS MET|END)\]", "", text)
    line = next((part.strip() for part in text.split("\n") if part.strip()), "")
    return re.sub(r"^(?:client|you|me)\s*:\s*", "", line, flags=re.IGNORECASE).strip().strip('"“”').strip()


def propose(dialogues, writer, journal, args):
    """K candidates for each dialogue, each in four steps; the steps of all candidates of all dialogues go together."""
    drafts = {id(d): [{"number": k, "notes": {}, "failed": None} for k in range(args.candidates)] for d in dialogues}
    for name, _ in STEPS:
        going = [(d, c) for d in dialogues for c in drafts[id(d)] if not c["failed"]]
        answers = ask(writer, [request(args, d, f"{c['number']}/{name}", candidate_prompt(d["messages"], c["notes"]),
                                       args.temperature, args.max_new_tokens) for d, c in going], journal, name)
        for (_, c), answer in zip(going, answers):
            text = without_reasoning(answer.text)
            text = one_line(text) if name != "reply" else spoken(text)
            c["notes"][name] = text
            c["failed"] = failure(name, text, answer)
    return [[as_candidate(c) for c in drafts[id(d)]] for d in dialogues]


def failure(name, text, answer):
    """Why a candidate goes no further than this step, or None."""
    if not text:
        return f"no {name}: {answer.error or 'empty'}"
    if name == "stage" and named(text, STAGES) is None:
        return "no stage named"
    return "reply: cut at --max-new-tokens" if name == "reply" and answer.cut else None


def as_candidate(draft):
    notes = draft["notes"]
    return {"number": draft["number"], "failed": draft["failed"], "stage": named(notes.get("stage", ""), STAGES),
            "context": notes.get("stage", ""), "state": notes.get("state", ""),
            "strategy": named(notes.get("strategy", ""), STRATEGIES) or "Others", "reply": notes.get("reply", ""),
            "scores": None, "raw": {}}


def named(text, names):
    """The one of names that is mentioned first, as a whole word (or its plural), or None."""
    found = {name: re.search(rf"(?<![a-z]){name}s?(?![a-z])", text, re.IGNORECASE) for name in names}
    return min((name for name in names if found[name]), key=lambda name: found[name].start(), default=None)


def spoken(text):
    """A reply as said: one paragraph, without a label or enclosing quotes."""
    text = re.sub(r"^(?:counselor|therapist|reply)\s*:\s*", "", one_line(text), flags=re.IGNORECASE)
    return text[1:-1].strip() if len(text) > 1 and text[0] in '"“' and text[-1] in '"”' else text


def score(dialogues, candidates, writer, journal, args):
    """Fill each candidate's scores (None where any perspective could not be read) and the judges' own words."""
    asked = [(d, c, p) for d, group in zip(dialogues, candidates) for c in group if not c["failed"] for p in PERSPECTIVES]
    by_view = by_perspective(DEFAULT_METRICS)
    requests = [request(args, d, f"{c['number']}/score/{p}", score_prompt(d["messages"], c["reply"], p, by_view[p]), 0.0, 200)
                for d, c, p in asked]
    answers = ask(writer, requests, journal, "score")
    parsed = {}
    for (_, c, p), answer in zip(asked, answers):
        c["raw"][p] = answer.raw()
        parsed.setdefault(id(c), []).append(parse_scores(answer.text, [m.key for m in by_view[p]]))
    for group in candidates:
        for c in group:
            if id(c) in parsed and all(parsed[id(c)]):
                c["scores"] = {key: value for scores in parsed[id(c)] for key, value in scores.items()}


def select(dialogues, candidates):
    """Stage-wise selection: each dialogue goes on with its best candidate, and keeps them all."""
    for d, group in zip(dialogues, candidates):
        scored = [c for c in group if c["scores"]]
        best = max(scored, key=lambda c: average(c["scores"]), default=None)
        before = [m["content"] for m in d["messages"] if m["role"] == "assistant"]
        d["exchanges"].append({"prompt": list(d["messages"]), "candidates": group, "best": best and best["number"]})
        if best is None:
            d["ended"] = "no candidate was scored"
        elif any(similarity(best["reply"], old) > 0.9 for old in before):
            d["ended"] = "repetition"
        else:
            d["messages"].append({"role": "assistant", "content": best["reply"]})


def build(cards, writers, journal, args):
    """Role cards -> scored dialogues. writers: {"client", "counselor", "judge"}; args: see build_pref.py."""
    dialogues = [start(card) for card in cards]
    for exchange in range(args.max_exchanges):
        going = [d for d in dialogues if not d["ended"]]
        if not going:
            break
        print(f"exchange {exchange + 1}: {len(going)} dialogues go on")
        client(going, writers["client"], journal, args)
        going = [d for d in going if not d["ended"]]
        candidates = propose(going, writers["counselor"], journal, args)
        score(going, candidates, writers["judge"], journal, args)
        select(going, candidates)
    for d in dialogues:
        d["ended"] = d["ended"] or f"{args.max_exchanges} exchanges"
    return dialogues
