"""The benchmarks run, and the README's table is what was measured."""
import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from table import WORKLOADS, growth_table, kept, table  # noqa: E402


@pytest.mark.parametrize("name", ["G8", "Stop", "P8", "STEP", "SFT", "RM"])
def test_our_side_of_a_workload_runs_on_a_tiny_model(tiny, name):
    file, *options = WORKLOADS[name]
    command = [sys.executable, f"benchmarks/{file}", *options, "--model", str(tiny), "--runs", "1", "--only", "ours"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.strip().splitlines()[-1])
    assert line["rate"]["ours"] > 0 and line["limit"]["rate"] > 0 and line["checked"] == "not checked: no peer"


def test_the_table_has_a_row_for_each_peer():
    result = {"name": "G8", "model": "m", "unit": "tok/s", "runs": 1, "rate": {"ours": 20.0}, "peak_gb": {"ours": 1.0, "slow": 2.0},
              "limit": {"rate": 40.0}}
    assert table([result]).splitlines()[2].endswith("| m | 20 tok/s | - | - | 1.0 / - GB | 50% | 1 |")
    result["rate"] |= {"slow": 10.0, "fast": 25.0}          # fast: in a process of its own, whose memory is not measured
    fast, slow = table([result]).splitlines()[2:]
    assert fast.endswith("| 20 tok/s | fast 25 | **0.80** | 1.0 / - GB | 50% | 1 |")
    assert slow.endswith("| 20 tok/s | slow 10 | **2.00** | 1.0 / 2.0 GB | 50% | 1 |")


def test_the_readme_has_the_table_of_the_results():
    results = kept()
    assert results and all(r["checked"] and "not checked" not in r["checked"] for r in results)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert table(results) in readme and growth_table(kept(growth=True)) in readme
    assert all(r["date"] in readme and r["device"] in readme and r["torch"].split("+")[0] in readme for r in results)
