"""Every number that the walkthrough prints, computed again from those printed before it, in Python's floats; its document too.

The formulas here are written from the paper's equations, without torch and without the project's functions. They see nothing
but printed text, as a reader does, and three of these: the default walk, one with other options, and the document.
"""
import ast
import math
import operator
import os
import re
import subprocess
import sys

import pytest
import torch
import walkthrough
from conftest import ROOT, waves

import train_grpo
from escrag_min.data import SAMPLES, read_jsonl
from escrag_min.model.tiny import make_tiny_model
from escrag_min.packing import pack
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import RewardModel
from escrag_min.rollout import Response, Rollout

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")
DOC = ROOT / "docs" / "walkthrough.md"
FIRST_COLUMNS = {"word", "e", "of", "mean", "G", "n", "temperature", "Σ", "lr"}


def close(a, b, absolute=2e-5):
    """Within what is lost by printing 6 digits, also of a difference."""
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=absolute)


def value(text):
    try:
        return float(text)
    except ValueError:
        return text


def sections(text):
    """-> the nine sections of a printed walk"""
    return re.split(r"\n\n(?=\d\. )", text)


def tables(section):
    """A section's tables, in order: each a list of {column: number or text}."""
    found = []
    for block in section.split("\n\n"):
        header, *rows = [line.strip() for line in block.split("\n")]
        columns = re.split(r"\s{2,}", header)
        if columns[0] in FIRST_COLUMNS and len(columns) > 1:
            found.append([dict(zip(columns, map(value, re.split(r"\s{2,}", row, maxsplit=len(columns) - 1)))) for row in rows])
    return found


def blocks(text):
    """The fenced blocks of a document that hold the script's output."""
    return re.findall(r"^```text\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)


def skip_where_other_tokens_are_sampled(default):
    document = Printed("\n\n".join(blocks(DOC.read_text("utf-8"))))
    if [row["target"] for row in document.targets] != [row["target"] for row in default["pack"]["rows"]]:
        pytest.skip("on this machine the tiny model samples other tokens than those of docs/walkthrough.md")


class Printed:
    """A printed walk, read back."""

    def __init__(self, text):
        self.text = text
        self.sections = sections(text)
        t = [None, *map(tables, self.sections)]
        self.words, self.exemplars = t[3]
        self.drawn, = t[4]
        (self.reward,), self.scores = t[5]
        (self.group,), self.advantages = t[6]
        self.targets, self.mask = t[7]
        (self.options,), (self.logits,), self.first, (self.first_sums,) = t[8]
        (self.adamw,), self.second, (self.second_sums,) = t[9]
        trunk, lengths = re.search(r"trunk = (\d+), lengths = \[(.*)]", self.sections[6]).groups()
        self.trunk, self.lengths = int(trunk), [int(n) for n in lengths.split(", ")]
        self.of = [i for i, length in enumerate(self.lengths) for _ in range(length)]       # response of each token


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in one order, so that two walks are the same to the last digit; and the model is too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def default():
    return walkthrough.walk(walkthrough.Args())


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """Nothing at its default; a reward model with a tokenizer of its own, whose mean and std were measured by nobody."""
    folder = tmp_path_factory.mktemp("walk")
    rm = RewardModel.from_pretrained(tiny)
    with torch.no_grad():
        rm.score.weight.normal_(0.0, 3.0, generator=torch.Generator().manual_seed(5))
    rm.mean, rm.std = -4.0, 2.5
    rm.save_pretrained(folder / "rm", tiny)
    policy = make_tiny_model(folder / "policy", seed=3, hidden=32, layers=2)
    return walkthrough.walk(walkthrough.Args(
        model=str(policy), reward_model=str(folder / "rm"), data=str(SAMPLES / "contexts.jsonl"), state=2, group_size=5,
        retrieve=2, max_new_tokens=9, temperature=0.6, beta=0.3, lr=3e-3, seed=8))


@pytest.fixture(scope="module", params=["default", "other"])
def data(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["default", "other", "document"])
def printed(request):
    if request.param == "document":
        return Printed("\n\n".join(blocks(DOC.read_text("utf-8"))))
    return Printed(walkthrough.tell(request.getfixturevalue(request.param)))


# --- the text is the data ---

def test_the_tables_are_the_data(data):
    printed = Printed(walkthrough.tell(data))
    same = [(printed.words, data["retrieval"]["words"]), (printed.exemplars, data["retrieval"]["exemplars"]),
            (printed.drawn, data["drawn"]), ([printed.reward], [data["reward"]]), (printed.scores, data["reward"]["rows"]),
            ([printed.group], [data["group"]]), (printed.advantages, data["group"]["rows"]),
            (printed.targets, data["pack"]["rows"]), (printed.mask, data["pack"]["mask"]),
            ([printed.options], [data["options"]]), ([printed.logits], [data["logits"]]),
            (printed.first, data["first"]["rows"]), ([printed.first_sums], [data["first"]["sums"]]),
            ([printed.adamw], [data["adamw"]]), (printed.second, data["second"]["rows"]),
            ([printed.second_sums], [data["second"]["sums"]])]
    for shown, known in same:
        assert len(shown) == len(known) > 0
        for shown_row, known_row in zip(shown, known):
            for column, cell in shown_row.items():
                known_cell = known_row[column]
                if isinstance(known_cell, (bool, str)):
                    assert str(cell) == str(value(str(known_cell)))
                else:
                    assert math.isclose(cell, known_cell, rel_tol=6e-6, abs_tol=1e-12)      # 6 significant digits
    assert [printed.trunk, printed.lengths] == [data["pack"]["trunk"], data["pack"]["lengths"]]


def test_the_text_fits_a_page_and_names_what_exists(printed):
    assert [s.split(". ")[0] for s in printed.sections] == list("123456789")
    assert all(len(line) <= 100 for line in printed.text.split("\n"))
    for section in printed.sections:
        where = section.split("\n")[0].partition(" | ")[2]
        for file, names in re.findall(r"(\w+\.py): ([^;]+)", where):
            source = next(p for p in (ROOT / file, *(ROOT / "escrag_min").rglob(file)) if p.exists()).read_text("utf-8")
            for name in names.split(", "):
                assert re.search(rf"^\s*(def|class) {name.split('.')[-1]}\b", source, re.MULTILINE), f"{file}: {name}"


# --- each number from those before it ---

def test_prompts_are_their_pieces(printed):
    pieces = [[int(n) for n in re.findall(r"^  (\d+) tokens: <\|im_start\|>", s, re.MULTILINE)] for s in printed.sections]
    lengths = [int(re.search(r"length = (\d+)", printed.sections[i])[1]) for i in (0, 3)]
    assert sum(pieces[0]) == lengths[0] and len(pieces[0]) == 3
    system, _, opening = pieces[0]              # the final prompt has the same system turn and the same opening
    assert system + sum(pieces[3]) + opening == lengths[1] == printed.trunk


def test_similarity_is_the_inner_product_of_words(printed):
    corpus = int(re.search(r"corpus = (\d+)", printed.text)[1])
    replies = [record["chosen"][0]["content"].lower() for record, _ in read_jsonl(SAMPLES / "preferences.jsonl")]
    query = re.search(r"query: (.*?)\n\n", printed.sections[2], re.DOTALL)[1].lower()
    assert len(replies) == corpus
    for row in printed.words:
        def word(text, w=row["word"]):
            return len(re.findall(rf"(?<![^\W_]){re.escape(str(w))}(?![^\W_])(?!['’][^\W_])", text))
        assert row["tf"] == word(query) and row["df"] == sum(word(r) > 0 for r in replies) > 0
        assert close(row["idf"], 1 + math.log((1 + corpus) / (1 + row["df"])))
        assert close(row["v"], (1 + math.log(row["tf"])) * row["idf"])
    norm = math.sqrt(sum(row["v"] ** 2 for row in printed.words))
    assert all(close(row["φ(y0)"], row["v"] / norm) for row in printed.words)
    for e in printed.exemplars:
        assert close(e["similarity"], sum(row["φ(y0)"] * row[f"φ({e['e']})"] for row in printed.words)) and e["similarity"] > 0
    assert printed.exemplars == sorted(printed.exemplars, key=lambda e: -e["similarity"])


def test_first_tokens_are_drawn_from_the_distribution_that_scores_them(printed):
    for i, draw in enumerate(printed.drawn):
        n = sum(printed.lengths[:i])
        assert draw["token"] == printed.targets[n]["target"]
        assert math.isclose(draw["p(y)"], math.exp(printed.first[n]["logp"]), rel_tol=1e-4)
        assert draw["F(y-1)"] - 1e-6 <= draw["u"] <= draw["F(y-1)"] + draw["p(y)"] + 1e-6 and 0 <= draw["u"] < 1


def test_log_probability_from_logits(printed):
    z = printed.logits
    assert close(z["lse"], z["z_max"] + math.log(z["sum"])) and z["sum"] >= 1 and z["z_y"] <= z["z_max"]
    assert close(printed.first[int(z["n"])]["logp"], z["z_y"] - z["lse"])


def test_rewards(printed):
    for row in printed.scores:
        assert close(row["score"], (row["w·h"] - printed.reward["mean"]) / printed.reward["std"], 1e-4)
        assert close(row["r"], row["score"] - row["penalty"])


def test_advantages(printed):
    r = [row["r"] for row in printed.scores]
    mean = sum(r) / len(r)
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
    assert printed.group["G"] == len(r) and printed.group["eps"] == 1e-4
    assert close(printed.group["mean"], mean) and close(printed.group["std"], std)
    for row, x in zip(printed.advantages, r):
        assert close(row["A"], (x - mean) / (std + 1e-4), 1e-4)


def test_the_pack_and_its_mask(printed):
    n, index, branch = 0, printed.trunk, [0] * printed.trunk
    for b, length in enumerate(printed.lengths, start=1):
        for t in range(length):
            row = printed.targets[n]
            assert [row[k] for k in ("n", "of", "index", "position", "pred")] == [
                n, f"y{b}", index, printed.trunk + t, index - 1 if t else printed.trunk - 1]
            n, index = n + 1, index + 1
        branch += [b] * length
    assert len(printed.targets) == n == printed.first_sums["tokens"]
    shown = [int(row["q"]) for row in printed.mask]
    assert {branch[q] for q in shown} == set(range(min(4, len(printed.lengths)) + 1))
    for row, q in zip(printed.mask, shown):
        assert row == {"of": f"y{branch[q]}" if branch[q] else "trunk", "q": q,
                       **{str(k): "#" if k <= q and branch[k] in (0, branch[q]) else "." for k in shown}}


def test_the_targets_are_the_sampled_tokens(data):
    rows, sampled = data["pack"]["rows"], [s["tokens"] for s in data["responses"]]
    assert [row["target"] for row in rows] == [token for tokens in sampled for token in tokens]
    assert data["pack"]["lengths"] == list(map(len, sampled))


def expected(logp, old, ref, A, w, low, high, beta):
    """The columns of one token, from the paper's equations."""
    ratio = math.exp(logp - old)
    J = min(ratio * A, min(max(ratio, 1 - low), 1 + high) * A)
    clipped = (A > 0 and ratio > 1 + high) or (A < 0 and ratio < 1 - low)
    d = ref - logp
    D = math.exp(d) - d - 1
    grad = -w * ((0.0 if clipped else ratio * A) - beta * (1 - math.exp(d)))
    return {"ratio": ratio, "J": J, "D": D, "loss": -w * (J - beta * D), "grad": grad, "clip": str(clipped)}


def settings(printed):
    o = printed.options
    return o["clip_low"], o["clip_high"], o["beta"]


def test_weights_and_advantages_of_tokens(printed):
    G = len(printed.lengths)
    for row, i in zip(printed.first, printed.of):
        assert close(row["w"], 1 / (G * printed.lengths[i]), 1e-9) and row["A"] == printed.advantages[i]["A"]
    assert close(sum(row["w"] for row in printed.first), 1.0)


def test_the_first_inner_step(printed):
    for row in printed.first:
        for column, x in expected(*[row["logp"]] * 3, row["A"], row["w"], *settings(printed)).items():
            if column != "clip":
                assert close(row[column], x), column
    sums = printed.first_sums
    assert sums["ratio"] == sums["tokens"] == len(printed.first)
    assert sums["kl"] == sums["clip_low"] == sums["clip_high"] == 0
    assert abs(sums["loss"]) < 1e-5 and abs(sum(row["A"] for row in printed.advantages)) < 1e-4     # one because of the other,
    assert max(abs(row["grad"]) for row in printed.first) > 1e-3                                    # and yet it moves


def test_the_adamw_step(printed):
    a = printed.adamw
    g = a["gradient"] * min(1, a["clip_norm"] / a["norm"])
    assert a["gradient"] != 0 and math.isclose(a["after"], a["before"] - a["lr"] * g / (abs(g) + 1e-8), abs_tol=2e-6)


def test_the_second_inner_step(printed):
    near = 0
    for row, before in zip(printed.second, printed.first):
        assert row["old"] == before["logp"]
        want = expected(row["logp"], row["old"], row["old"], before["A"], before["w"], *settings(printed))
        if min(abs(want["ratio"] - edge) for edge in (1 - settings(printed)[0], 1 + settings(printed)[1])) < 1e-4:
            near += 1       # at the clip's edge the printed digits do not tell the side
            continue
        assert row["clip"] == want.pop("clip")
        for column, x in want.items():
            assert close(row[column], x), (row["n"], column)
    assert near < 3
    sums = printed.second_sums
    for name, column in (("loss", "loss"), ("ratio", "ratio"), ("kl", "D")):
        assert close(sums[name], sum(row[column] for row in printed.second), 1e-3 if name != "loss" else 2e-5)
    A = [row["A"] for row in printed.first]
    assert sums["clip_low"] == sum(row["clip"] == "True" and a < 0 for row, a in zip(printed.second, A))
    assert sums["clip_high"] == sum(row["clip"] == "True" and a > 0 for row, a in zip(printed.second, A))


def test_the_default_walk_shows_what_it_is_about(default):
    """One response ended by itself, two words in one exemplar, and tokens clipped and not, for either sign of A."""
    skip_where_other_tokens_are_sampled(default)
    assert sorted(s["finished"] for s in default["responses"]) == [False, False, True]
    assert sum(row["φ(e1)"] > 0 for row in default["retrieval"]["words"]) == 2
    clipped = {(row["A"] > 0, row["clip"]) for row in default["second"]["rows"]}
    assert clipped == {(good, c) for good in (True, False) for c in (True, False)}


# --- what the walks do not come to ---

def test_an_inner_step_far_from_old_and_reference_in_all_four_corners(tiny, tokenizer, model):
    """A gradient step moves tokens the way their advantage asks; here old and ref are anything."""
    packed = pack([([5, 6, 7], [[8, 9, 10, 11, 12, 2], [13, 14, 15, 16, 17, 2]])])
    options = train_grpo.Args(beta=0.2, clip_low=0.1, clip_high=0.3, temperature=0.7)
    reference = waves(Qwen2.from_pretrained(tiny), 0.05)
    A, w = torch.tensor([1.5] * 6 + [-0.5] * 6), torch.linspace(0.05, 0.1, 12)
    old = model.log_probs(packed, 0.7, len(tokenizer)).detach() - torch.linspace(-0.6, 0.5, 6).repeat(2)
    step, same = walkthrough.inner_step(model, reference, packed, A, w, old, options, tokenizer)
    assert same is old
    corners = set()
    for row in step["rows"]:
        want = expected(*(row[k] for k in ("logp", "old", "ref", "A", "w")), 0.1, 0.3, 0.2)
        assert str(row["clip"]) == want.pop("clip")
        assert all(close(row[column], x) for column, x in want.items()) and abs(row["ref"] - row["old"]) > 1e-3
        corners.add((row["A"] > 0, row["ratio"] < 0.9, row["ratio"] > 1.3))
    assert len(corners) == 6        # below, within and above, for either sign
    rows, sums = step["rows"], step["sums"]
    assert close(sums["loss"], sum(row["loss"] for row in rows)) and close(sums["kl"], sum(row["D"] for row in rows))
    assert sums["clip_low"] == sum(row["clip"] and row["A"] < 0 for row in rows)
    assert sums["clip_high"] == sum(row["clip"] and row["A"] > 0 for row in rows)


def test_a_reply_that_is_missing_or_well_formed(tiny, tokenizer):
    """No reply: the floor and the penalty. A well-formed response: no penalty, and only its reply is scored."""
    rm, options = RewardModel.from_pretrained(tiny), train_grpo.Args()
    with torch.no_grad():
        rm.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    rm.mean, rm.std = 1.5, 0.5
    said = [Response([5, 2], True, "<think>a", "a", "", False), Response([6, 2], True, "<think>a</think>yes", "a", "yes", True),
            Response([7, 2], True, "yes", "", "yes", False)]
    rollout = Rollout({"prompt": [{"role": "user", "content": "Hello."}]}, 0, None, [], [], [1], said, 0)
    rewards, _ = train_grpo.score([rollout], rm, tokenizer, options)
    none, good, plain = walkthrough.reward_data(rm, tokenizer, rollout, rewards, options)["rows"]
    assert (none["w·h"], none["score"], none["penalty"], none["r"]) == ("no reply", -3.0, 0.5, -3.5)
    assert good["penalty"] == 0.0 and close(good["score"], (good["w·h"] - 1.5) / 0.5) and close(good["r"], good["score"])
    assert close(plain["w·h"], good["w·h"]) and close(plain["r"], good["r"] - 0.5)


@pytest.mark.parametrize("option, message", [({"retrieve": 0}, "--retrieve 0"), ({"state": 342}, "--state 342: .* 0 to 341"),
                                             ({"group_size": 1}, "--group-size 1")])
def test_bad_options_are_refused_in_one_sentence(option, message):
    with pytest.raises(ValueError, match=message):
        walkthrough.walk(walkthrough.Args(**option))


def test_the_command_prints_the_same_again(default):
    """From a fresh process: the output is the text alone, and the same for the same seed."""
    result = subprocess.run([sys.executable, "docs/walkthrough.py"], cwd=ROOT, capture_output=True, text=True,
                            timeout=300, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.stdout == walkthrough.tell(default) + "\n"


# --- docs/walkthrough.md ---

def test_the_document_has_the_headings_equations_and_columns_of_the_output(default):
    shown, printed = blocks(DOC.read_text("utf-8")), sections(walkthrough.tell(default))
    assert [s.split("\n\n")[0] for s in shown] == [s.split("\n\n")[0] for s in printed]
    for a, b in zip(shown, printed):        # the mask's columns are indices, which depend on what was sampled
        columns = [[list(t[0]) for t in tables(section) if "q" not in t[0]] for section in (a, b)]
        assert columns[0] == columns[1]


def test_the_document_has_the_output(default):
    """Exactly its words, and its numbers within 0.5%.

    Not digit for digit: float32 sums differ a little between CPUs and versions of torch, and AdamW's first step, in which each
    weight moves by the whole lr however small its gradient, enlarges that. A draw could also fall the other way (once in 10^5
    tokens or so), or another version of tokenizers merge other words; all that comes after is another dialogue then. The
    document is not wrong in that case, and the comparison is left out. On any machine its headings, equations and columns must
    be those of the output (above), and its numbers must follow from each other (`printed`, "document").
    """
    skip_where_other_tokens_are_sampled(default)
    shown, printed = "\n\n".join(blocks(DOC.read_text("utf-8"))), walkthrough.tell(default)
    assert [" ".join(NUMBER.sub("#", line).split()) for line in shown.split("\n")] == \
           [" ".join(NUMBER.sub("#", line).split()) for line in printed.split("\n")]
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        assert math.isclose(float(a), float(b), rel_tol=5e-3, abs_tol=5e-5), (a, b)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.Pow: operator.pow}
FUNCTIONS = {"exp": math.exp, "log": math.log, "sqrt": math.sqrt, "min": min, "abs": abs}


def compute(node):
    """The value of an arithmetic expression."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -compute(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
    return FUNCTIONS[node.func.id](*map(compute, node.args))


def by_hand(text):
    """The computations of a text, `… = result`: code spans with digits on both sides."""
    spans = re.findall(r"`([^`\n]*\d[^`\n]*) = (-?\d[\d.e-]*)`", text)
    return [(expression, ast.parse(expression.replace("·", "*").replace("²", "**2"), mode="eval").body, result)
            for expression, result in spans]


def test_the_computations_by_hand_in_the_document():
    """Each is right to the digits it is written with, and made of numbers that stand in an output above it."""
    parts = re.split(r"^(```text\n.*?\n```)$", DOC.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    above, count = "", 0
    for number, (output, prose) in enumerate(zip(parts[1::2], parts[2::2]), start=1):
        above += output
        known = {abs(float(x)) for x in NUMBER.findall(above)} | set(range(10))
        found = by_hand(prose)
        assert found or number == 2, f"section {number} computes nothing by hand"
        for expression, tree, result in found:
            unit = 10.0 ** -len(result.partition(".")[2])
            assert abs(compute(tree) - float(result)) <= unit, f"{expression} is {compute(tree)}, not {result}"
            used = {abs(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            assert used <= known, f"{expression}: {used - known} stand in no output above"
            known.add(abs(float(result)))
            count += 1
    assert count >= 12
