"""What every benchmark shares: side-by-side timing, peak memory, the machine's own limits, one JSON line.

Contenders run in turns in one process, after a warm-up each; a figure is the median of their runs, and what counts is the
ratio. Peak memory is what a run adds to the process, sampled every 50 ms.
"""
import argparse
import ctypes
import datetime
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from escrag_min.data import SAMPLES, read_jsonl  # noqa: E402

GB = 10**9


def options(doc, workloads=()):
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Qwen-2.5 folder")
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender [5]")
    parser.add_argument("--only", default="", help="contenders, separated by commas [all that are installed]")
    parser.add_argument("--scale", type=int, default=1, help="size of the workload, to see how cost grows [1]")
    if workloads:
        parser.add_argument("--workload", default=workloads[0], choices=workloads)
    return parser


def compare(args, name, contenders, unit, work, limit=None, checked="", elsewhere=()):
    """Run {name: function -> amount of work done, or None} in turns and print a JSON line.

    unit      what is counted, "tok" or "pair"; work: how many a run does where the function does not say
    limit     (what, amount a second) that the machine could do at best
    checked   how it was seen that the contenders compute the same
    elsewhere {contender in a process of its own: its version}; its memory is not measured
    """
    chosen = {n: f for n, f in contenders.items() if wanted(args, n)}
    rates, seconds, peaks = ({n: [] for n in chosen} for _ in range(3))
    for run in range(-1, args.runs):        # -1: warm-up
        for n, function in chosen.items():
            done, took, peak = measured(function)
            if run >= 0:
                rates[n].append((done or work) / took)
                seconds[n].append(took)
                peaks[n].append(peak)
    result = {
        "workload": name, "model": Path(args.model).name, "scale": args.scale, "unit": f"{unit}/s", "runs": args.runs,
        "rate": {n: round(statistics.median(r), 3) for n, r in rates.items()},
        "seconds": {n: round(statistics.median(s), 3) for n, s in seconds.items()},
        "spread": {n: round((max(s) - min(s)) / statistics.median(s), 3) for n, s in seconds.items()},
        "peak_gb": {n: round(statistics.median(p) / GB, 2) for n, p in peaks.items() if n not in elsewhere},
        "limit": limit and {"what": limit[0], "rate": round(limit[1], 1)}, "checked": checked,
        **machine(), **dict(elsewhere)}
    print(json.dumps(result), flush=True)
    return result


def measured(function):
    """-> (what it returned, seconds, bytes it added to the process at its peak)"""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak, over = resident(), [0], threading.Event()

    def watch():
        while not over.wait(0.05):
            peak[0] = max(peak[0], resident())
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    done = function()
    took = time.perf_counter() - began
    over.set()
    watcher.join()
    return done, took, max(0, peak[0] - before)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine():
    """What the figures were measured on."""
    versions = {"torch": torch.__version__}
    for name in ("transformers", "trl"):
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {"device": device, "python": platform.python_version(), **versions, "date": datetime.date.today().isoformat()}


def bandwidth():
    """Bytes a second that a matrix can be read at, best of 5: the limit of a decode step."""
    weights = torch.randn(64 * 2**20)
    return max(weights.nbytes / _seconds(weights.sum) for _ in range(5))


def flops():
    """Multiply-adds times two a second of a large float32 matrix product, best of 5."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return max(2 * 2048**3 / _seconds(lambda: a @ b) for _ in range(5))


def _seconds(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def sample_text():
    """All the prose of the built-in samples, to make prompts of any length."""
    return "\n".join(m["content"] for record, _ in read_jsonl(SAMPLES / "preferences.jsonl")
                     for key in ("prompt", "chosen") for m in record[key])


def ids_of(tokenizer, lengths):
    """Prompts of these many tokens each, of running text, no two alike."""
    ids, prompts, start = tokenizer.encode(sample_text()), [], 0
    for length in lengths:      # from the beginning again where the samples end
        prompts.append([ids[i % len(ids)] for i in range(start, start + length)])
        start += length
    return prompts


def wanted(args, name):
    """Whether --only leaves a contender in."""
    return not args.only or name in args.only.split(",")


def peer(args, package, name=None):
    """Whether a contender (named as its package, if not otherwise) is wanted and its package installed."""
    return wanted(args, name or package) and importlib.util.find_spec(package) is not None
