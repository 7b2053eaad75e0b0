"""Rollouts for people to read: of a training run (samples.jsonl) or of evaluate.py respond, in the terminal or as one web page.

A record becomes blocks first, the same for both outputs: the turns of the dialogue, the initial response, the exemplars,
the final responses.

What people and models wrote enters a block through one function and nowhere else: clean() for a terminal, safe_html() for a
page. Then none of it can move a cursor, colour a line or become markup. In the terminal it also stands right of a solid bar, so
that it cannot pass for a line of ours.
"""
import html
import math
import os
import shutil
import sys
import textwrap
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from escrag_min.chat import split_think
from escrag_min.data import in_run, read_jsonl
from escrag_min.runtime.args import check, option, positional

TEMPLATE = Path(__file__).with_name("show.html")
WHO = {"user": "client", "assistant": "counselor", "system": "system"}
COLOURS = {"head": "1", "dim": "2", "good": "32", "bad": "31", "mark": "33"}      # of a kind; on a page it is a class
NEEDED = "\n\u200c\u200d"       # invisible, but writing needs them: new line, Persian's non-joiner, joined emoji


@dataclass
class Show:
    file: str = positional("run folder of train_grpo.py, its samples.jsonl, or a responses file of respond")
    step: int | None = option(None, "only this step's")
    id: str = option("", "only this dialogue state's")
    limit: int | None = option(None, "so many, from the first")
    reasoning: bool = option(False, "the reasoning too, not only how many words it has")
    html: str = option("", "write a page to this file instead, ending in .html; one that is there is replaced")


def clean(text):
    """Control characters, escape sequences, changes of text direction and broken surrogates -> visible and inert."""
    def inert(c):
        if c in NEEDED or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return c
        return chr(0x2400 + ord(c)) if c < " " else "\ufffd"        # ␛ for an escape
    return "".join(map(inert, text.replace("\r\n", "\n").expandtabs(4)))


def safe_html(text):
    return html.escape(clean(text))


@dataclass
class Block:
    kind: str               # client, counselor, system: a turn; heading; note; card: an exemplar or a response
    label: str
    facts: list = ()        # [(words, kind)], kind a key of COLOURS
    text: str = ""
    reasoning: str = ""

    def words(self):
        return f"reasoning: {count(len(self.reasoning.split()), 'word')}"


def read_rollouts(path, safe, step=None, id="", limit=None):
    """The rollouts of a file: of one step, of one id, so many -> [(id, step or None, [Block])]. safe: clean or safe_html."""
    check(limit is None or limit >= 1, f"--limit {limit} must be at least 1")
    found = [rollout(record, where, safe) for record, where in read_jsonl(path)]
    steps = sorted({s for _, s, _ in found if s is not None})
    if step is not None:
        check(step in steps, f"--step {step}: {path} has {'the steps ' + ', '.join(map(str, steps)) if steps else 'no steps'}")
        found = [r for r in found if r[1] == step]
    if id:
        found = [r for r in found if r[0] == safe(one_line(id))]
        check(found, f"--id {id}: {path} has no such rollout" + ("" if step is None else f" at step {step}"))
    return found[:limit]


def rollout(record, where, safe):
    """A line of samples.jsonl or of a responses file -> (id, step or None, [Block])."""
    try:
        if "responses" in record:
            state, initial, responses = record["state"], record["initial"], record["responses"]
            hits = [(h["score"], h["exemplar"]["id"], h["exemplar"]["chosen"]) for h in record["exemplars"]]
        else:
            state, initial, responses = record, record.get("initial"), [record]
            initial = None if initial is None else dict(zip(("reasoning", "reply", "well_formed"), split_think(initial)))
            hits = [(h["score"], h["id"], h["reply"]) for h in record.get("exemplars", ())]
        blocks = [Block(WHO[m["role"]], WHO[m["role"]], text=safe(m["content"])) for m in state["prompt"]]
        if dropped := record.get("turns_dropped"):
            place = dropped + (blocks[0].kind == "system")
            blocks.insert(place, Block("note", "", [(f"the {count(dropped, 'turn')} above did not fit the prompt", "mark")]))
        if initial is not None:
            blocks += [heading("pass 1", "initial response"), response("draft", initial, None, safe),
                       heading("exemplars", f"{len(hits)}, with their similarity to the draft")]
            blocks += [Block("card", f"{score:.3f}", [(safe(one_line(id)), "dim")], safe(said)) for score, id, said in hits]
        rewards = [r["reward"] for r in responses if r.get("reward") is not None]
        best = max(rewards) if len(set(rewards)) > 1 else None
        blocks.append(heading("one pass" if initial is None else "pass 2", "final response" if len(responses) == 1 else
                              f"{len(responses)} final responses, best reward first"))
        ranked = sorted(enumerate(responses, 1), key=lambda nr: math.inf if nr[1].get("reward") is None else -nr[1]["reward"])
        blocks += [response(f"#{n}", r, best, safe) for n, r in ranked]
        return safe(one_line(state["id"])), None if record.get("step") is None else int(record["step"]), blocks
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: neither a rollout of a run's samples.jsonl nor a response of evaluate.py respond "
                         f"({type(error).__name__}: {error})") from None


def one_line(text):
    return " ".join(str(text).split())


def count(n, noun):
    return f"{n} {noun}" + "s" * (n != 1)


def heading(label, words):
    return Block("heading", label, [(words, "head")])


def response(label, raw, best, safe):
    """best: the highest reward of a group that has several."""
    reward, advantage, tokens, reasoning = (raw.get(k) for k in ("reward", "advantage", "tokens", "reasoning"))
    facts = [(f"reward {reward:+.2f}", "head")] if reward is not None else [("left out", "mark")] if "reward" in raw else []
    if advantage is not None:
        facts.append((f"advantage {advantage:+.2f}", "good" if advantage > 0 else "bad" if advantage < 0 else "dim"))
    if tokens is not None:
        facts.append((count(len(tokens) if isinstance(tokens, list) else int(tokens), "token"), "dim"))
    marks = (("best", "good", best is not None and reward == best), ("truncated", "mark", not raw.get("finished", True)),
             ("malformed", "mark", not raw.get("well_formed", True)), ("no reply", "bad", not raw["reply"]))
    facts += [(words, kind) for words, kind, holds in marks if holds]
    return Block("card", label, facts, safe(raw["reply"]), safe(reasoning or ""))


def as_text(id, step, blocks, width=100, colour=False, reasoning=False):
    """A rollout for the terminal. reasoning: in full, not as a count of its words."""
    def paint(words, kind):
        return f"\033[{COLOURS[kind]}m{words}\033[0m" if colour else words

    def ours(label, facts):
        lines.append(paint(f"{label:>10} ┆ ", "dim") + " · ".join(paint(*fact) for fact in facts))

    def theirs(label, text):
        wrapped = [part for line in text.split("\n") for part in textwrap.wrap(line, width - 13) or [""]]
        lines.extend(paint(f"{'' if i else label:>10} │ ", "dim") + part for i, part in enumerate(wrapped))

    lines = [paint(f"━━ {'' if step is None else f'step {step} · '}{id} ".ljust(width, "━"), "head")]
    for b in blocks:
        label = b.label
        if b.kind == "heading":
            lines.append("")
        if b.facts:
            ours(label, b.facts)
            label = ""
        if b.reasoning and reasoning:
            theirs("reasoning", b.reasoning)
            label = "reply"
        elif b.reasoning:
            ours(label, [(b.words(), "dim")])
            label = ""
        if b.text:
            theirs(label, b.text)
    return "\n".join(lines) + "\n"


def as_page(rollouts, title, reasoning=False):
    """Rollouts read with safe_html -> a page that needs no other file and no network. reasoning: unfolded."""
    body = "\n".join(rollout_html(*r, reasoning, " open" if i == 0 else "") for i, r in enumerate(rollouts))
    page = TEMPLATE.read_text("utf-8").replace("{{title}}", safe_html(str(title)))
    return page.replace("{{count}}", count(len(rollouts), "rollout")).replace("{{rollouts}}", body)


def rollout_html(id, step, blocks, reasoning, is_open):
    chip = "" if step is None else f'<span class="chip">step {step}</span> '
    last = [b.text for b in blocks if b.kind == "client"][-1:]
    return (f'<details class="rollout"{is_open}><summary>{chip}<b>{id}</b> <span class="last">{"".join(last)}</span></summary>'
            f'<div class="body">{"".join(block_html(b, reasoning) for b in blocks)}</div></details>')


def block_html(b, reasoning):
    best = " best" if ("best", "good") in b.facts else ""
    facts = "".join(f' <span class="{kind}">{words}</span>' for words, kind in b.facts)
    thought = f'<summary>{b.words()}</summary><p dir="auto">{b.reasoning}</p>'
    folded = f'<details{" open" if reasoning else ""}>{thought}</details>' if b.reasoning else ""
    said = f'<p dir="auto">{b.text}</p>' if b.text else ""
    return f'<div class="{b.kind}{best}"><header><b>{b.label}</b>{facts}</header>{folded}{said}</div>\n'


def show_rollouts(args):
    """Rollouts to read: both passes, exemplars with similarity, rewards and advantages of the group, best reward first."""
    path, chosen = in_run(args.file, "samples.jsonl"), (args.step, args.id, args.limit)
    if args.html:
        out = Path(args.html)
        check(out.suffix == ".html", f"--html {out} must end in .html")
        rollouts = read_rollouts(path, safe_html, *chosen)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(as_page(rollouts, path, args.reasoning), "utf-8")
        print(f"wrote {out}: {count(len(rollouts), 'rollout')}")
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
    text = "\n".join(as_text(*rollout, width, colour, args.reasoning) for rollout in read_rollouts(path, clean, *chosen))
    try:
        print(text, flush=True)
    except BrokenPipeError:         # its reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
