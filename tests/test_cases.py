"""Every public bug report that the project answers has a test that names it."""
import re

import pytest
from conftest import ROOT, SHARED


def test_every_case_has_a_test_that_names_it():
    path = SHARED / "cases.md"
    if not path.exists():
        pytest.skip(f"the list of cases is not at {path}")
    cases = {int(n) for n in re.findall(r"^(\d+)\. ", path.read_text("utf-8"), re.MULTILINE)}
    named = {int(n) for file in (ROOT / "tests").rglob("test_*.py") for n in re.findall(r"case(\d+)", file.read_text("utf-8"))}
    assert len(cases) > 40 and not cases - named, f"cases without a test: {sorted(cases - named)}"
