"""All benchmarks, one after another, and their table:

    ./run bench --model FOLDER      run, keep the JSON lines in
                                    benchmarks/results/, print the table
    ./run bench --model FOLDER --workloads G8,RM --runs 3
    ./run bench --model FOLDER --growth
                                    ours alone at 1, 2 and 4 times the size
    ./run bench --print             the tables of what is kept, as the README
                                    has them
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCALES = (1, 2, 4)
WORKLOADS = {
    "G8": ("generate.py", "--workload", "G8"), "G64": ("generate.py", "--workload", "G64"),
    "R16": ("generate.py", "--workload", "R16"), "Stop": ("generate.py", "--workload", "Stop"),
    "P8": ("update.py",), "STEP": ("step.py",), "SFT": ("sft.py",), "RM": ("reward.py",), "LP": ("logprob.py",)}
WHAT = {
    "G8": "8 samples of a 256-token prompt, 128 new tokens", "G64": "8 prompts (64-512) x 8 samples, 128 new tokens",
    "R16": "16 prompts (64-512), 128 new tokens", "Stop": "G64 with natural ends", "P8": "GRPO update: prompt 480, 8 x 128 tokens",
    "STEP": "whole GRPO step, ours with n=3: prompt 612, 8 x 128",
    "SFT": "8 ragged sequences (64-512), one update", "RM": "4 pairs, prompt 256, replies 64, one update",
    "LP": "log-probs, 3072 tokens, 151,936 words, with gradient"}


def run(name, model, runs, *more):
    """Run one workload -> its result."""
    file, *options = WORKLOADS[name]
    command = [sys.executable, str(HERE / file), *options, "--model", model, "--runs", str(runs), *more]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {"name": name, **json.loads(out.strip().splitlines()[-1])}


def run_growth(name, model, runs):
    """Ours alone at each size -> a result whose "seconds" are by scale."""
    results = [run(name, model, runs, "--only", "ours", "--scale", str(scale)) for scale in SCALES]
    return {**results[0], "seconds": {str(scale): r["seconds"]["ours"] for scale, r in zip(SCALES, results)}}


def keep(result, what=""):
    """The result in a file of its own, under its workload and model."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result['name']}-{result['model']}{what}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def kept(growth=False):
    """What has been measured, in the table's order."""
    results = [json.loads(path.read_text()) for path in RESULTS.glob("*.json") if path.stem.endswith("-growth") == growth]
    return sorted(results, key=lambda r: (r["model"] != "smol", r["model"], list(WORKLOADS).index(r["name"])))


def table(results):
    """Markdown: a row a workload and peer, the fastest first."""
    lines = ["| workload | model | ours | peer | ratio | memory, ours / peer | of the limit | runs |",
             "|---|---|---|---|---|---|---|---|"]
    for r in results:
        ours, unit, peak = r["rate"]["ours"], r["unit"], r["peak_gb"]
        for rate, peer in sorted(((rate, n) for n, rate in r["rate"].items() if n != "ours"), reverse=True) or [(None, None)]:
            against = f"{peer} {rate:.3g} | **{ours / rate:.2f}**" if peer else "- | -"
            memory = f"{peak['ours']:.1f} / {f'{peak[peer]:.1f}' if peer in peak else '-'} GB"
            lines.append(f"| {r['name']}: {WHAT[r['name']]} | {r['model']} | {ours:.3g} {unit} | {against} | {memory} | "
                         f"{ours / r['limit']['rate']:.0%} | {r['runs']} |")
    return "\n".join(lines)


def growth_table(results):
    """Markdown: time at each size, relative to the time at size 1 and to the size. 1: it grows as the work does."""
    names = " | ".join(f"{r['name']} {r['model']}" for r in results)
    lines = [f"| time / size | {names} |", "|---" * (len(results) + 1) + "|"]
    for scale in map(str, SCALES[1:]):
        lines.append(f"| {scale}× | " + " | ".join(
            f"{r['seconds'][scale] / r['seconds']['1'] / int(scale):.2f}" for r in results) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="./run bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Qwen-2.5 folder")
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender, whose median counts [5]")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, separated by commas [all]")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM: another peer of G8, G64 and R16")
    parser.add_argument("--growth", action="store_true", help="measure ours alone, at 1, 2 and 4 times the size")
    parser.add_argument("--print", action="store_true", help="only print the tables of what is kept")
    args = parser.parse_args()
    chosen = args.workloads.split(",")
    if not args.print:
        if not args.model or set(chosen) - set(WORKLOADS):
            sys.exit(f"./run bench: name a --model folder, and --workloads of {', '.join(WORKLOADS)}")
        for name in chosen:
            if args.growth:
                print(growth_table([keep(run_growth(name, args.model, args.runs), "-growth")]), flush=True)
            else:
                more = ("--vllm", args.vllm) if args.vllm and WORKLOADS[name][0] == "generate.py" else ()
                print("\n".join(table([keep(run(name, args.model, args.runs, *more))]).splitlines()[2:]), flush=True)
    print(table(kept()))
    if growth := kept(growth=True):
        print("\n" + growth_table(growth))


if __name__ == "__main__":
    main()
