"""docs/results.md says what experiments/ladder/results.json holds."""
import json
import sys

from conftest import ROOT


def test_every_table_of_the_page_comes_from_the_results_file(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "experiments/ladder"), *sys.path])
    import report
    results, page = json.loads(report.RESULTS.read_text("utf-8")), report.DOC.read_text("utf-8")
    assert all(page.count(f"<!-- {name} -->") == page.count(f"<!-- /{name} -->") == 1 for name in report.TABLES)
    assert report.with_tables(page, results) == page
    results["rows"]["base"]["contexts"][0]["gold"] += 50
    assert report.with_tables(page, results) != page
