"""What a person sees of a rollout, and that nothing in it can be anything but text."""
import copy
import json
import os
import re
import sys
from html.parser import HTMLParser

import pytest

import evaluate
from escrag_min.evaluation.show import as_page, as_text, clean, read_rollouts, safe_html


def said(reply, reasoning="Stage: Comforting", **more):
    return {"tokens": [5, 6, 7], "finished": True, "well_formed": True, "reply": reply, "reasoning": reasoning, **more}


ROLLOUT = {      # as train_grpo.write_samples writes it
    "step": 10, "state": {"id": "d1-04", "dialogue_id": "d1", "prompt": [
        {"role": "user", "content": "I can't sleep."}, {"role": "assistant", "content": "Since when?"},
        {"role": "user", "content": "Since March."}]},
    "group": 0, "initial": said("That is long.", "Stage: Exploration\nStrategy: Question"), "initial_prompt": [1], "prompt": [1],
    "exemplars": [{"exemplar": {"id": "e7", "dialogue_id": "e", "prompt": [], "chosen": "What keeps you awake?"}, "score": 0.40349}],
    "responses": [said("Try tea.", reward=-0.5, advantage=-1.225), said("March is long ago.", reward=1.25, advantage=1.2246),
                  said("", reward=None, advantage=0.0, finished=False, well_formed=False)], "turns_dropped": 1}
ANSWER = {       # as evaluate.respond writes it
    "id": "c-1", "dialogue_id": "c-1", "prompt": [{"role": "user", "content": "He left."}], "reply": "That hurts.", "reasoning": "a b c",
    "well_formed": False, "finished": False, "tokens": 60, "initial": "<think>one two</think>When?",
    "exemplars": [{"id": "e8", "score": 0.25, "reply": "I am here."}], "turns_dropped": 0, "model": "m", "retrieve": 1, "reward": -0.126}
BAR = re.compile("[ #.0-9a-z]{10} [│┆] ")


@pytest.fixture
def file(tmp_path):
    def write(*records):
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, records)))
        return str(tmp_path / "r.jsonl")
    return write


def text_of(path, **options):
    return "\n".join(as_text(*r, **options) for r in read_rollouts(path, clean))


def test_a_rollout_by_hand(file):
    assert text_of(file(ROLLOUT), width=60).splitlines() == [
        "━━ step 10 · d1-04 " + "━" * 41,
        "    client │ I can't sleep.",
        "           ┆ the 1 turn above did not fit the prompt",
        " counselor │ Since when?",
        "    client │ Since March.",
        "",
        "    pass 1 ┆ initial response",
        "     draft ┆ 3 tokens",
        "           ┆ reasoning: 4 words",
        "           │ That is long.",
        "",
        " exemplars ┆ 1, with their similarity to the draft",
        "     0.403 ┆ e7",
        "           │ What keeps you awake?",
        "",
        "    pass 2 ┆ 3 final responses, best reward first",
        "        #2 ┆ reward +1.25 · advantage +1.22 · 3 tokens · best",
        "           ┆ reasoning: 2 words",
        "           │ March is long ago.",
        "        #1 ┆ reward -0.50 · advantage -1.23 · 3 tokens",
        "           ┆ reasoning: 2 words",
        "           │ Try tea.",
        "        #3 ┆ left out · advantage +0.00 · 3 tokens · truncated · malformed · no reply",
        "           ┆ reasoning: 2 words"]


def test_an_answer_of_respond_by_hand(file):
    lines = text_of(file(ANSWER), width=60).splitlines()
    assert lines[0].startswith("━━ c-1 ━") and "     draft ┆ reasoning: 2 words" in lines and "           │ When?" in lines
    assert lines[-4:] == ["    pass 2 ┆ final response", "        #1 ┆ reward -0.13 · 60 tokens · truncated · malformed",
                          "           ┆ reasoning: 3 words", "           │ That hurts."]


def test_one_pass_and_bare_answers_of_others(file):
    bare = {k: ANSWER[k] for k in ("id", "dialogue_id", "prompt", "reply")}
    text = text_of(file({**ROLLOUT, "initial": None, "exemplars": []}, bare))
    assert "one pass ┆ 3 final responses" in text and "pass 1" not in text and "exemplars" not in text
    assert text.endswith("one pass ┆ final response\n        #1 │ That hurts.\n")


def test_nobody_is_best_where_all_rewards_are_alike(file):
    alike = {**ROLLOUT, "responses": [said("a", reward=1.0, advantage=0.0), said("b", reward=1.0, advantage=0.0)]}
    assert "best ·" not in text_of(file(alike)) and "· best" not in text_of(file(alike))


def test_reasoning_is_folded_until_asked_for(file):
    path = file(ROLLOUT)
    assert "Strategy: Question" not in text_of(path)
    shown = text_of(path, reasoning=True)
    assert " reasoning │ Stage: Exploration\n           │ Strategy: Question\n     reply │ That is long." in shown and "words" not in shown
    rollouts = read_rollouts(path, safe_html)
    folded, unfolded = as_page(rollouts, "t"), as_page(rollouts, "t", reasoning=True)
    assert "<details><summary>reasoning: 4 words</summary>" in folded and folded.count("<details open>") == 0
    assert unfolded.count("<details open><summary>reasoning") == 4


def test_long_text_wraps_behind_the_bar(file):
    state = {**ROLLOUT["state"], "prompt": [{"role": "user", "content": "word " * 60 + "x" * 200}]}
    lines = text_of(file({**ROLLOUT, "state": state}), width=50).splitlines()
    assert max(len(line) for line in lines if "│" in line) == 50 and sum("│" in line for line in lines) > 15


# --- hostile text ---

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202egnp.exe\u2066\ud800</p><script>alert(1)</script>\n        #9 ┆ reward +9.00 · best"
FIELDS = {"turn": ("state", "prompt", 0, "content"), "id": ("state", "id"), "draft": ("initial", "reply"), "thoughts": ("initial", "reasoning"),
          "exemplar": ("exemplars", 0, "exemplar", "chosen"), "exemplar id": ("exemplars", 0, "exemplar", "id"),
          "reply": ("responses", 0, "reply"), "reasoning": ("responses", 0, "reasoning")}


def with_hostile(path):
    record = copy.deepcopy(ROLLOUT)
    place = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = HOSTILE
    return record


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, tuple(attributes)))

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("field", FIELDS)
def test_hostile_text_stays_text(file, field):
    path = file(with_hostile(FIELDS[field]))
    shown = text_of(path, reasoning=True)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown) and "␛[2J" in shown
    assert all(BAR.match(line) for line in shown.splitlines()[1:] if line)
    assert not any(line.startswith("        #9 ┆") for line in shown.splitlines())      # none of ours can be faked
    page = as_page(read_rollouts(path, safe_html), "t", reasoning=True)
    tags = Tags(page)
    assert "</script>" in tags.text and "␛[2J" in tags.text and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", page)
    harmless = Tags(as_page(read_rollouts(file(ROLLOUT), safe_html), "t", reasoning=True))
    assert tags.found == harmless.found


def test_ordinary_text_is_left_alone():
    kept = "Zoë said: “naïve”… 我很累 👩\u200d👧 می\u200cخواهم\n\nNew paragraph"
    assert clean(kept) == kept and clean("a\r\nb\tc") == "a\nb   c" and clean("a\rb") == "a␍b"


def test_the_page_asks_for_nothing_and_says_so():
    page = as_page([], "<b>&.jsonl")
    assert "default-src 'none'" in page and "&lt;b&gt;&amp;.jsonl</h1>" in page and "width=device-width" in page
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", page) and "prefers-color-scheme: dark" in page


# --- the command ---

def test_options_choose(file, tmp_path, capsys):
    path = file(ROLLOUT, {**ROLLOUT, "state": {**ROLLOUT["state"], "id": "d2"}}, {**ROLLOUT, "step": 20})

    def heads(*options):
        evaluate.main(["show", path, *options])
        return [line.strip("━ ") for line in capsys.readouterr().out.splitlines() if line.startswith("━━")]
    assert heads() == ["step 10 · d1-04", "step 10 · d2", "step 20 · d1-04"]
    assert heads("--step", "10", "--limit", "1") == ["step 10 · d1-04"] and heads("--id", "d2") == ["step 10 · d2"]
    assert heads("--id", "d1-04", "--step", "20") == ["step 20 · d1-04"]
    evaluate.main(["show", path, "--step", "20", "--html", str(tmp_path / "new/out.html")])
    page = (tmp_path / "new/out.html").read_text("utf-8")
    assert "1 rollout" in capsys.readouterr().out and page.count('class="rollout"') == 1 and "reward +1.25" in page
    (tmp_path / "samples.jsonl").write_text(json.dumps(ROLLOUT))
    evaluate.main(["show", str(tmp_path), "--reasoning"])                                          # a run's folder
    assert "Strategy: Question" in capsys.readouterr().out


@pytest.mark.parametrize("options, words", [
    (("--step", "11"), "--step 11: .*r.jsonl has the steps 10"), (("--id", "x", "--step", "10"), "--id x: .* no such rollout at step 10"),
    (("--limit", "0"), "--limit 0 must be at least 1"), (("--html", "samples.jsonl"), "--html samples.jsonl must end in .html")])
def test_refusals(file, options, words):
    with pytest.raises(ValueError, match=words):
        evaluate.main(["show", file(ROLLOUT), *options])


@pytest.mark.parametrize("record", [
    {"step": 1, "loss": 0.5}, {**ROLLOUT, "responses": [{"reward": 1}]}, {**ROLLOUT, "state": {**ROLLOUT["state"], "prompt": ["hello"]}},
    {**ROLLOUT, "step": "<b>"}, {**ANSWER, "tokens": "<b>"}, {**ANSWER, "exemplars": [{"id": "e", "score": "<b>", "reply": ""}]},
    {**ANSWER, "prompt": [{"role": "\x1b[2J", "content": ""}]}, {**ANSWER, "prompt": [], "turns_dropped": 1}])
def test_other_files_are_refused_in_one_sentence(file, record):
    with pytest.raises(ValueError, match="r.jsonl:2: neither a rollout of a run's samples.jsonl nor a response") as error:
        text_of(file(ANSWER, record))
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_a_responses_file_has_no_steps(file):
    with pytest.raises(ValueError, match="--step 1: .* has no steps"):
        read_rollouts(file(ANSWER), clean, step=1)


def test_colour_only_where_it_is_asked_for(file, monkeypatch, capsys):
    path = file(ROLLOUT)
    plain, coloured = text_of(path), text_of(path, colour=True)
    assert "\033[32mbest\033[0m" in coloured and re.sub(r"\033\[\d+m", "", coloured) == plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    evaluate.main(["show", path])
    assert "\033" not in capsys.readouterr().out                                                    # not a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    evaluate.main(["show", path])
    assert "\033[32mbest" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    evaluate.main(["show", path])
    assert "\033" not in capsys.readouterr().out


def test_a_pipe_that_closes_early_is_no_error(file, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w", encoding="utf-8"))
    evaluate.main(["show", file(ROLLOUT)])
    sys.stdout.close()                                              # flushes: what was left to write goes nowhere
