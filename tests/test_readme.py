"""What the README says is there is there, and its commands and those of docs/ run."""
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from escrag_min.data import SAMPLES
from escrag_min.evaluation.sheet import draw_pairs
from escrag_min.evaluation.tables import read_responses

README = (ROOT / "README.md").read_text("utf-8")
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = ("README.md", "docs/evaluation.md", "docs/running.md")      # whose commands run, in this order
TINY = {     # what makes a command of a page small enough for a test
    "train_sft.py": "--steps 1 --limit 8 --batch-size 2 --tokens-per-batch 1024 --max-length 1024",
    "train_rm.py": "--steps 1 --limit 8 --batch-size 2 --tokens-per-batch 1024 --max-length 1024",
    "train_grpo.py": "--steps 1 --limit 4 --prompts-per-step 1 --group-size 2 --max-new-tokens 4 --max-prompt 1000 --tokens-per-batch 1024",
    "build_pref.py": "--limit 12", "respond": "--limit 4 --max-new-tokens 12 --temperature 1", "ladder": "--limit 2 --max-new-tokens 4"}
ELSEWHERE = ("./run demo", "./run test", "./run bench", "torchrun", "--writer", "escrag_min.model.export")        # in tests of their own


def commands():
    """Indented lines of the pages that run something: continued lines joined, comments off."""
    text = re.sub(r" *\\\n *", " ", "\n".join((ROOT / page).read_text("utf-8") for page in PAGES))
    found = [line.strip().split("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    return [c for c in found if c.startswith(("./run ", "python "))]


def table_rows():
    start = README.index("| paper | equation")
    lines = README[start:README.index("\n\n", start)].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def defined(path):
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[1][:40])
def test_a_row_of_the_map_points_at_code_and_at_a_test_that_uses_it(row):
    _, _, code, tests = row
    text = "".join((ROOT / test).read_text("utf-8") for test in re.findall("`(.*?)`", tests))
    for cell in re.findall("`(.*?)`", code):
        path, names = cell.split(": ")
        for name in names.split(", "):
            assert name in defined(path), f"{path} has no {name}"
            assert re.search(rf"\b{name}\b", text), f"{tests} does not use {name}"


def test_the_map_has_every_module_that_says_it_implements_a_section():
    code = " ".join(row[2] for row in table_rows())
    of_the_paper = {p.name for p in (ROOT / "escrag_min").rglob("*.py") if re.match(r'"""[^"]{0,120}\(paper', p.read_text("utf-8"))}
    of_the_paper -= {"llm.py", "distributed.py", "presets.py", "safety.py", "walkthrough.py"}       # they hold no equation
    assert len(of_the_paper) > 8
    assert [name for name in of_the_paper if f"/{name}" not in code] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_and_named_files_exist(doc):
    text = doc.read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    files = re.findall(r"`((?:escrag_min|tests|docs|benchmarks|experiments)/[\w./-]+)`", text)
    missing = [f for f in links if not (doc.parent / f).exists()] + [f for f in files if not (ROOT / f).exists()]
    assert missing == []


def test_the_picture_names_what_there_is():
    picture = (ROOT / "docs/method.svg").read_text("utf-8")
    known = {p.stem for p in [*ROOT.glob("*.py"), *(ROOT / "escrag_min").rglob("*.py")]}
    names = set().union(*(defined(p.relative_to(ROOT)) for p in [*ROOT.glob("*.py"), *(ROOT / "escrag_min").rglob("*.py")]))
    said = re.findall(r'class="code"[^>]*>([^<]*)<', picture)
    assert len(said) > 12
    for words in said:
        for word in re.findall(r"[\w.]+", words):
            parts = word.removesuffix(".py").split(".")
            assert all(part in known | names for part in parts), word


def annotate(folder):
    """What two annotators of the sheet would export."""
    sheet, _ = draw_pairs(*(read_responses(folder / f"{name}.jsonl") for name in ("ours", "theirs")), seed=31337)
    for name in ("ana", "ben"):
        ratings = {"p001": {"Client": {"first": 4, "second": 2, "preference": "first"}}}
        (folder / f"ratings-{name}.json").write_text(json.dumps({"sheet": sheet, "annotator": name, "ratings": ratings}))


def test_the_commands_run_in_the_order_of_the_page(tiny, tmp_path):
    """One after another in one folder, as a reader would, made small: what one writes, the next ones read."""
    shutil.copy(SAMPLES / "preferences.jsonl", tmp_path)
    env = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    run = [c for c in commands() if not any(word in c for word in ELSEWHERE)]
    assert len(run) > 12
    for command in run:
        if " plot " in command and importlib.util.find_spec("matplotlib") is None:
            continue
        if " tally " in command:
            annotate(tmp_path)
        script = next((name for name in TINY if f" {name} " in command), None)
        small = re.sub(r"Qwen/[\w.-]+", str(tiny), command) + " " + (TINY[script] if script and "--plan" not in command else "")
        small = re.sub(r"(?<=\s)(rm:)?(runs/|[\w-]+\.(?:jsonl?|html))", rf"\1{tmp_path}/\2", small)
        words = [str(ROOT / "run") if word == "./run" else sys.executable if word == "python" else word for word in small.split()]
        result = subprocess.run(words, cwd=ROOT, env=env, input="I can't sleep.\n\n", capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    assert (tmp_path / "runs/ladder/ladder.md").exists() and (tmp_path / "runs/grpo/samples.jsonl").exists()
