"""Human evaluation: the page is blind and shows any text as text; tally unblinds, by hand; a real browser fills it in."""
import json
import re
import time
from html.parser import HTMLParser
from math import nan
from urllib.parse import quote

import numpy as np
import pytest
from browser import Browser, chromedriver, needs_chromium

import evaluate
from escrag_min.evaluation import sheet
from escrag_min.evaluation.tables import read_responses
from escrag_min.judging import DEFAULT_METRICS, PERSPECTIVES, krippendorff_alpha, wilson_interval

HOSTILE = "</script><img src=x onerror=\"window.hacked=1\"><!--\u2028\u2029'\"&lt; \ud800\\u003c {{data}} " + "x" * 400


def write(path, model, replies):
    """A responses file: {id: reply}; every context is a conversation of its own."""
    path.write_text("\n".join(json.dumps({
        "id": k, "dialogue_id": k, "model": model, "reply": reply,
        "prompt": [{"role": "user", "content": f"This is client {k[-1]}."}, {"role": "assistant", "content": "Go on."},
                   {"role": "user", "content": HOSTILE if k == "context-1" else "I can't sleep."}]})
        for k, reply in replies.items()))
    return path


@pytest.fixture
def files(tmp_path):
    """Two responses files that share 4 contexts."""
    ids = [f"context-{i}" for i in range(4)]
    ours, theirs = {k: f"Ours on {k[-1]}: {HOSTILE}" for k in ids}, {k: f"Theirs on {k[-1]}." for k in ids}
    return (write(tmp_path / "ours.jsonl", "runs/grpo/model", {**ours, "only-ours": "x"}),
            write(tmp_path / "theirs.jsonl", "Qwen/base", {**theirs, "empty": ""}))


@pytest.fixture
def drawn(files):
    return sheet.draw_pairs(*map(read_responses, files), 0)


@pytest.fixture
def html(files):
    return sheet.page(*map(read_responses, files), 0)[0]


def rating(pair, a=None, b=None, better=None):
    """What the page stores of one pair and perspective, from scores of A and B and "a", "b" or "tie"."""
    first, second = ("a", "b") if pair["a_first"] else ("b", "a")
    values = {"first": {"a": a, "b": b}[first], "second": {"a": a, "b": b}[second],
              "preference": {first: "first", second: "second", "tie": "tie", None: None}[better]}
    return {k: v for k, v in values.items() if v is not None}


def save(path, name, annotator, ratings):
    path.write_text(json.dumps({"sheet": name, "annotator": annotator, "ratings": ratings}))
    return str(path)


def test_pairs_are_drawn_from_the_seed_and_both_files(files, drawn):
    a, b = map(read_responses, files)
    name, pairs = drawn
    assert drawn == sheet.draw_pairs(a, b, 0)
    assert [p["id"] for p in pairs] == ["p001", "p002", "p003", "p004"] and sum(p["a_first"] for p in pairs) == 2
    assert {p["context"] for p in pairs} == {f"context-{i}" for i in range(4)}
    others = [sheet.draw_pairs(a, b, seed) for seed in range(1, 30)]
    assert len({n for n, _ in others}) == 29 and len({tuple(p["context"] for p in q) for _, q in others}) > 10
    assert len({tuple(p["a_first"] for p in q) for _, q in others}) > 3
    edited = {**a, "context-0": {**a["context-0"], "reply": "other"}}
    assert name not in {sheet.draw_pairs(b, a, 0)[0], sheet.draw_pairs(edited, b, 0)[0]}
    edited["context-0"]["prompt"] = [{"role": "user", "content": "other"}]
    with pytest.raises(ValueError, match="different conversations under the id 'context-0'"):
        sheet.draw_pairs(edited, b, 0)
    with pytest.raises(ValueError, match="share no context"):
        sheet.draw_pairs(a, {}, 0)
    with pytest.raises(ValueError, match="must be a list of messages, found \"text\""):
        sheet.page({"x": {"prompt": "text", "reply": "r"}}, {"x": {"prompt": "text", "reply": "s"}}, 0)


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.scripts, self.found, self.loaded = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.loaded += [v for k, v in attributes if k in ("src", "href", "onerror")]

    def handle_data(self, data):
        if self.found[-1:] == ["script"]:
            self.scripts.append(data)


def test_the_page_is_blind_and_text_cannot_become_markup(html, drawn):
    tags = Tags(html)
    assert tags.found.count("script") == 2 and "img" not in tags.found and not tags.loaded      # nothing comes from elsewhere
    data = json.loads(tags.scripts[0])
    assert not set(tags.scripts[0]) & set("<>&\u2028\u2029") and html.isascii()
    for name in ("ours.jsonl", "theirs.jsonl", "runs/grpo", "Qwen", "context-0", "a_first", "seed"):
        assert name not in html
    assert data["sheet"] == drawn[0] and len(data["pairs"]) == 4
    for shown, pair in zip(data["pairs"], drawn[1]):
        i = pair["context"][-1]
        replies = [f"Ours on {i}: {HOSTILE}", f"Theirs on {i}."]
        assert shown["replies"] == (replies if pair["a_first"] else replies[::-1]) and shown["id"] == pair["id"]
        assert shown["turns"] == [["Client", f"This is client {i}."], ["Counselor", "Go on."],
                                  ["Client", HOSTILE if i == "1" else "I can't sleep."]]
    assert [v["name"] for v in data["perspectives"]] == list(PERSPECTIVES)
    assert [m["definition"] for v in data["perspectives"] for m in v["metrics"]] == [m.definition for m in DEFAULT_METRICS]


def test_alpha_by_hand():
    # values 1 1 1 2: D_e = 2·3/(4·3) = 1/2; the second unit differs twice, D_o = 2/4
    assert krippendorff_alpha([[1, 1], [1, 2]], "nominal") == pytest.approx(0)
    # interval: D_o = 2·1/4, D_e = 2·(1 + 4 + 4 + 1 + 1)/(4·3) over 1 2 | 3 3
    assert krippendorff_alpha([[1, 2], [3, 3]], "interval") == pytest.approx(1 - (2 / 4) / (22 / 12))
    # a unit of three counts by 1/(m - 1) = 1/2: 1 1 2 | 2 2, D_o = 4/2/5, D_e = 2·2·3/(5·4)
    assert krippendorff_alpha([[1, 1, 2], [2, 2, nan], [nan, 1, nan]], "nominal") == pytest.approx(1 - (2 / 5) / (12 / 20))
    assert krippendorff_alpha([[1, 1], [2, 2]], "nominal") == 1
    assert krippendorff_alpha([[1, 2], [2, 1]], "nominal") == pytest.approx(1 - 1 / (8 / 12))
    for undefined in ([], [[nan, 1], [2, nan]], [[3, 3], [3, 3]], [[1], [2]]):
        assert krippendorff_alpha(undefined, "interval") is None


def test_alpha_as_published():
    """Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): examples A (binary) and C (four observers, gaps)."""
    meg, owen = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert krippendorff_alpha(np.transpose([meg, owen]), "nominal") == pytest.approx(1 - 19 * 4 / (14 * 6))        # 0.095
    observers = np.transpose([[1, 2, 3, 3, 2, 1, 4, 1, 2, nan, nan, nan], [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nan, 3],
                              [nan, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nan], [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nan]])
    # 40 pairable values: 9 ones, 13 twos, 10 threes, 5 fours, 3 fives; coincidences on the diagonal 7 + 10 + 8 + 4 + 3
    by_chance = 9 * 8 + 13 * 12 + 10 * 9 + 5 * 4 + 3 * 2
    assert krippendorff_alpha(observers, "nominal") == pytest.approx((39 * 32 - by_chance) / (39 * 40 - by_chance))
    assert round(krippendorff_alpha(observers, "nominal"), 3) == 0.743
    assert round(krippendorff_alpha(observers, "interval"), 3) == 0.849


def two_annotators(pairs):
    """Ana rates pairs 1-3, Bo 1-2 and of pair 3 only one score; nobody rates pair 4."""
    ana = {"p001": dict.fromkeys(PERSPECTIVES, rating(pairs[0], 5, 3, "a")),
           "p002": {**dict.fromkeys(PERSPECTIVES, rating(pairs[1], 4, 4, "tie")), "Client": rating(pairs[1], 4, 2, "b")},
           "p003": dict.fromkeys(PERSPECTIVES, rating(pairs[2], 1, 2, "b"))}
    bo = {"p001": dict.fromkeys(PERSPECTIVES, rating(pairs[0], 4, 3, "a")),
          "p002": dict.fromkeys(PERSPECTIVES, rating(pairs[1], 3, 2, "a")), "p003": {"Judge": rating(pairs[2], a=2)}}
    return {"Ana": ana, "Bo": bo}


def test_tally_by_hand(drawn):
    found = sheet.tally(two_annotators(drawn[1]), *drawn)
    assert found["missing"] == {"Ana": 9, "Bo": 17} and found["asked"] == 72 and found["pairs"] == 4
    # Client: pair 1 both A; pair 2 Ana B, Bo A: a tie; pair 3 Ana B
    client = found["stated"]["Client"]
    assert (client["wins"], client["ties"], client["losses"], client["unrated"], client["win_rate"]) == (1, 1, 1, 1, 0.5)
    assert client["wilson"] == wilson_interval(1, 2)
    # two units of two values, (1, 1) and (-1, 1): n = 4, D_o = 2/4, D_e = 2·3/12
    assert client["alpha"] == pytest.approx(0)
    # Judge: pair 2 is a tie and an A: A
    assert [found["stated"]["Judge"][k] for k in ("wins", "ties", "losses")] == [2, 0, 1]
    # overall: pair 1 A, A; pair 2 Ana B (B, tie, tie), Bo A: a tie; pair 3 Ana B
    assert [found["stated"]["overall"][k] for k in ("wins", "ties", "losses", "unrated")] == [1, 1, 1, 1]
    # by scores, pair 2: Client 4 > 2 and 3 > 2; overall Ana 4 > 10/3
    assert [found["implied"]["Client"][k] for k in ("wins", "ties", "losses")] == [2, 0, 1]
    assert [found["implied"]["overall"][k] for k in ("wins", "ties", "losses")] == [2, 0, 1]
    assert found["scores"]["Client"]["a"] == (5 + 4 + 1 + 4 + 3) / 5
    assert found["scores"]["Client"]["b"] == (3 + 2 + 2 + 3 + 2) / 5
    assert found["scores"]["Judge"]["a"] == (5 + 4 + 1 + 4 + 3 + 2) / 6      # Bo's lone score counts here and nowhere else
    assert found["scores"]["overall"]["b"] == pytest.approx((3 + 10 / 3 + 2 + 3 + 2) / 5)
    # Client's replies rated twice: (5, 4) (3, 3) (4, 3) (2, 2)
    values = [5, 4, 3, 3, 4, 3, 2, 2]
    expected = sum((x - y) ** 2 for x in values for y in values) / (8 * 7)
    assert found["scores"]["Client"]["alpha"] == pytest.approx(1 - (4 / 8) / expected)
    text = sheet.tally_table(found)
    assert "4 pairs, 2 annotators; 26 of 72 answers are missing, and not filled in (Ana: 9, Bo: 17)" in text


def test_a_single_annotator_has_no_agreement(drawn):
    found = sheet.tally({"Ana": two_annotators(drawn[1])["Ana"]}, *drawn)
    assert found["stated"]["Client"]["alpha"] is None and found["scores"]["overall"]["alpha"] is None
    assert [line.split()[-1] for line in sheet.tally_table(found).splitlines() if line.startswith("overall")] == ["-"] * 3
    empty = sheet.tally({"Ana": {}}, *drawn)
    assert empty["scores"]["Judge"]["a"] is None and empty["stated"]["Judge"]["win_rate"] is None and sheet.tally_table(empty)


def test_commands_go_from_two_files_to_a_table(files, drawn, tmp_path, capsys):
    a, b = map(str, files)
    page = tmp_path / "new/sheet.html"
    evaluate.main(["sheet", a, b, "--out", str(tmp_path / "other.html")])
    secret = re.search(r"--seed (\d+) for tally", capsys.readouterr().out)[1]
    assert int(secret) > 2**40
    evaluate.main(["sheet", a, b, "--seed", "0", "--out", str(page)])
    said = capsys.readouterr().out
    assert f"sheet {drawn[0]}, 4 pairs (left out: " in said and "--seed 0 for tally" in said and page.stat().st_size > 10000
    with pytest.raises(ValueError, match="sheet.html exists"):
        evaluate.main(["sheet", a, b, "--out", str(page)])
    exports = [save(tmp_path / f"{k}.json", drawn[0], f" {k} ", v) for k, v in two_annotators(drawn[1]).items()]
    evaluate.main(["tally", *exports, "--a", a, "--b", b, "--seed", "0", "--out", str(tmp_path / "found/tally.json")])
    assert "Ana: 9, Bo: 17" in capsys.readouterr().out
    assert json.loads((tmp_path / "found/tally.json").read_text())["stated"]["Client"]["wins"] == 1
    with pytest.raises(ValueError, match="--a and --b"):
        evaluate.main(["tally", *exports])
    with pytest.raises(ValueError, match="--seed: give the number that sheet printed"):
        evaluate.main(["tally", *exports, "--a", a, "--b", b])
    for wrong in (["--a", b, "--b", a, "--seed", "0"], ["--a", a, "--b", b, "--seed", "1"]):
        with pytest.raises(ValueError, match=r"Ana.json: belongs to sheet '\w+'; these two files, in this order and with"):
            evaluate.main(["tally", *exports, *wrong])
    again = save(tmp_path / "again.json", drawn[0], "aNA", {})
    with pytest.raises(ValueError, match="again.json: annotator 'aNA' is in .*Ana.json already"):
        evaluate.main(["tally", *exports, again, "--a", a, "--b", b, "--seed", "0"])


@pytest.mark.parametrize("content, words", [
    ("{", "not valid JSON"), ("[]", "expected a JSON object, found list"), ("{}", "no export of a sheet"),
    ({"annotator": "  "}, "no export of a sheet"), ({"ratings": [1]}, "no export of a sheet"),
    ({"sheet": None}, "belongs to sheet None"),
    ({"ratings": {"p005": {}}}, "unknown pair 'p005'; the sheet has 4"),
    ({"ratings": {"p001": {"Friend": {}}}}, "p001: expected ratings by Client, Counselor, Judge"),
    ({"ratings": {"p001": []}}, "p001: expected ratings by"),
    ({"ratings": {"p001": {"Judge": 3}}}, "p001: Judge: expected first, second, preference, found 3"),
    *(({"ratings": {"p001": {"Judge": {"first": bad}}}}, f"p001: Judge: first is {json.dumps(bad)}; allowed: 1, 2, 3, 4, 5")
      for bad in (0, 6, -1, 2.5, 4.0, True, "3", None, nan, [3])),
    ({"ratings": {"p001": {"Judge": {"preference": "a"}}}}, "preference is \"a\"; allowed: first, tie, second")])
def test_a_bad_export_is_refused_in_a_sentence_that_names_it(drawn, tmp_path, content, words):
    path = tmp_path / "export.json"
    good = {"sheet": drawn[0], "annotator": "Ana", "ratings": {}}
    path.write_text(content if isinstance(content, str) else json.dumps({**good, **content}))
    with pytest.raises(ValueError) as error:
        sheet.read_export(path, *drawn)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="none.json: no such file"):
        sheet.read_export(tmp_path / "none.json", *drawn)


# --- the page in a browser ---

@pytest.fixture
def new_browser(tmp_path):
    """-> a function that opens a browser with an empty profile."""
    opened = []
    with chromedriver() as driver:
        def new():
            opened.append(Browser(driver, tmp_path / f"browser-{len(opened)}"))
            return opened[-1]
        yield new
        for browser in opened:
            browser.close()


@pytest.fixture
def page(html, tmp_path):
    path = tmp_path / "sheet.html"
    path.write_text(html, "utf-8")
    return path.as_uri()


def text(browser, css):
    return browser.run("document.querySelector(arguments[0]).innerText", css)


def tab_to(browser, css):
    for _ in range(40):
        if browser.run("document.activeElement.matches(arguments[0])", css):
            return
        browser.press("Tab")
    raise AssertionError(f"Tab never reaches {css}")


def downloaded(browser):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if found := [f for f in browser.downloads.glob("*.json") if f.stat().st_size]:      # an empty one holds the name
            return found[0]
        time.sleep(0.05)
    raise AssertionError("nothing was downloaded")


@needs_chromium
def test_rate_by_keyboard_reload_export_and_import_elsewhere(page, drawn, tmp_path, new_browser):
    first = new_browser()
    first.open(page)
    tab_to(first, "#name")
    first.press("Ana Ö/.", "Enter")
    assert text(first, "#where") == "Pair 1 of 4" and "0 of 4 finished" in text(first, "#said")
    tab_to(first, "[name=Client-first]")
    first.press("Right", "Right", "Tab", "2", "3")                          # arrows choose 3; a digit goes on by itself
    assert first.run("document.activeElement.name") == "Counselor-first"
    assert first.run("getComputedStyle(document.activeElement.nextSibling).outlineStyle") == "solid"    # focus is seen
    first.press("154", "Delete", "1", "441")
    assert text(first, "#said") == "This pair is finished. 1 of 4 finished."
    assert first.run("document.activeElement.id") == "next"
    first.press("Enter", "5")                                               # no question in focus: the first one open
    first.open(page)
    assert text(first, "#where") == "Pair 2 of 4" and text(first, "#said") == "You rate as Ana Ö/.. 1 of 4 finished."
    assert first.run("document.querySelector('[name=Client-first]:checked').value") == "5"
    tab_to(first, "#export")
    first.press("Enter")
    file = downloaded(first)
    assert file.name == f"ratings-{drawn[0]}-Ana-Ö-.json"
    annotator, ratings = sheet.read_export(file, *drawn)
    assert annotator == "Ana Ö/." and ratings == {
        "p001": {"Client": {"first": 3, "second": 2, "preference": "second"},
                 "Counselor": {"first": 1, "second": 5, "preference": "first"},
                 "Judge": {"first": 4, "second": 4, "preference": "first"}}, "p002": {"Client": {"first": 5}}}
    tab_to(first, "#pause")
    first.press("Enter")
    assert first.run("document.getElementById('work').hidden && document.activeElement.id") == "begin"

    second = new_browser()
    second.open(page)
    for content, problem in (("{", "it is not a whole JSON file"), ("{}", "it is no export of such a page"),
                             ('{"annotator": "x", "sheet": "0"}', "it belongs to another sheet")):
        (tmp_path / "bad.json").write_text(content)
        second.choose_file("#import", tmp_path / "bad.json")
        wait_for(second, "!document.getElementById('problem').hidden")
        assert text(second, "#problem") == f"bad.json was not imported: {problem}."
    second.choose_file("#import", file)
    wait_for(second, "!document.getElementById('work').hidden")
    assert text(second, "#where") == "Pair 2 of 4" and "1 of 4 finished" in text(second, "#said")
    second.press("1" * 8, "Enter", "1" * 9, "Enter", "1" * 9, "Enter")
    assert text(second, "#said") == "All pairs are finished, thank you. Please export your ratings. 4 of 4 finished."
    assert second.run("document.activeElement.id") == "export"
    second.press("Enter")
    assert sum(len(v) for views in sheet.read_export(downloaded(second), *drawn)[1].values() for v in views.values()) == 36


def wait_for(browser, condition):
    deadline = time.monotonic() + 10
    while not browser.run(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


@needs_chromium
def test_hostile_text_is_text_on_a_phone_and_a_page_without_storage_says_so(page, html, drawn, new_browser):
    browser = new_browser()
    browser.size(360, 740, mobile=True)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") == 360
    browser.run("begin('Bo')")
    index = next(i for i, pair in enumerate(drawn[1]) if pair["context"] == "context-1")
    browser.run("show(arguments[0])", index)
    assert browser.run("document.documentElement.scrollWidth") == 360
    side = "first" if drawn[1][index]["a_first"] else "second"
    shown = HOSTILE.replace("\ud800", "\ufffd")             # half a character has no text of its own
    assert browser.run("document.getElementById(arguments[0]).textContent.toWellFormed()", side) == f"Ours on 1: {shown}"
    assert browser.run("document.querySelector('.turn:last-child p').textContent.toWellFormed()") == shown
    assert browser.run("[document.images.length, document.scripts.length, window.hacked]") == [0, 2, None]
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')")     # even then
    time.sleep(0.2)
    assert browser.run("window.hacked") is None
    assert browser.run("document.getElementById('unstored').hidden")

    browser.open("data:text/html;charset=utf-8," + quote(html))             # a place without storage
    browser.press("Tab", "Bo", "Enter")
    assert "does not let the page keep your progress" in text(browser, "#unstored")
    browser.press("1" * 9)
    assert "1 of 4 finished" in text(browser, "#said")
    browser.run("pause()")
    browser.press("Enter")                                                  # kept for as long as the page is open
    assert "1 of 4 finished" in text(browser, "#said")
    tab_to(browser, "#export")
    browser.press("Enter")
    assert list(sheet.read_export(downloaded(browser), *drawn)[1]) == ["p001"]
