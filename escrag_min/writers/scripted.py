"""A scripted stand-in for every role: a deterministic program, no model. It lets build_pref.py and evaluate.py run offline in
seconds, so that their machinery can be seen and tested. What it writes is no data, and its scores mean nothing.

    client      says the lines of the built-in dialogue with the card's id, then [END]; for other cards a few stock lines
    counselor   takes its replies from the built-in pairs, a good one first
    judge       counts a few words: questions and "you" up, advice and "I" down, with a small wobble by the text's hash
"""
import hashlib
import json
import re

from escrag_min.data import SAMPLES, read_records
from escrag_min.judging import ADVICE, METRICS, words_of
from escrag_min.writers.llm import ScriptedWriter

STOCK = ("I don't really know where to start.", "It has been like this for weeks now.", "Nobody around me seems to notice.",
         "Maybe I could talk to someone at home about it. [GOALS MET]")


def wobble(*parts):
    """A number in [0, 1) that depends on nothing but the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32


def quality(reply):
    """0-10 from word counts: not a judgement."""
    words = words_of(reply)
    share = {w: sum(word == w or word.startswith(w + "'") for word in words) / max(len(words), 1) for w in ("you", "i")}
    return 5 + 12 * share["you"] - 15 * share["i"] + 1.5 * reply.rstrip().endswith("?") - 2.5 * bool(ADVICE.search(reply))


def scripted_writer():
    pairs = read_records(SAMPLES / "preferences.jsonl", "preference")
    lines = {}
    for record in pairs:
        lines.setdefault(record["dialogue_id"], []).append(record["prompt"][-1]["content"])

    def client(card, exchange):
        said = lines.get(card, list(STOCK[:-1]))
        if exchange < len(said):
            return said[exchange]
        return "I think that's enough for today. [END]" if card in lines else STOCK[-1]

    def counselor(card, exchange, candidate, step):
        pair = pairs[int(wobble(card, exchange, candidate) * len(pairs))]
        own = [p for p in pairs if p["dialogue_id"] == card]
        if candidate == 0 and exchange < len(own):
            pair = own[exchange]
        return pair[step] if step != "reply" else pair["chosen" if candidate == 0 else "rejected"]

    def judge(messages):
        text = messages[-1]["content"]
        if "Second reply:" in text:
            first, second = re.search(r"First reply:\nCounselor: (.*)\n\nSecond reply:\nCounselor: (.*)\n\nWhich one", text,
                                      re.DOTALL).groups()
            gap = quality(first) - quality(second)
            return json.dumps({"better": "tie" if abs(gap) < 0.3 else "first" if gap > 0 else "second"})
        reply = re.search(r"The reply to rate:\nCounselor: (.*)\n\nRate with", text, re.DOTALL)[1]
        asked = [m for m in METRICS if f'"{m.key}": n' in text]
        return json.dumps({m.key: round(min(10, max(0, quality(reply) + 1.5 * wobble(reply, m.key) - 0.75))) for m in asked})

    def script(request):
        card, *rest = request.key.split("/")
        if rest[-1] == "client":
            return client(card, int(rest[0]))
        if len(rest) == 3 and rest[-1] in ("stage", "state", "strategy", "reply"):
            return counselor(card, int(rest[0]), int(rest[1]), rest[2])
        return judge(request.messages)
    return ScriptedWriter(script)
