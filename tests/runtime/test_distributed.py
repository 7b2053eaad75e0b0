"""Several ranks against one process: losses, gradients, weights, files (gloo on a CPU). What the ranks do is in ranks.py."""
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import ranks
import torch
from conftest import ROOT
from safetensors.torch import load_file

from escrag_min.qwen2 import Qwen2
from escrag_min.runtime import distributed

if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8):
    pytest.skip("several ranks on a CPU need a newer torch", allow_module_level=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank=0, size=1, port=0):
    return {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def launch(size, *command):
    """One process a rank; all must end well."""
    port = free_port()
    processes = [subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=environment(rank, size, port),
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(size)]
    ended = [p.communicate(timeout=240) for p in processes]
    assert not any(p.returncode for p in processes), "\n".join(error for _, error in ended)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "tiny").symlink_to(tiny)
    for cls in (ranks.Qwen2, ranks.RewardModel):
        for tie, words in ranks.VARIANTS.values():
            ranks.saved_model(folder, cls, tie, words)
    return folder


def results(folder, size):
    """What `size` ranks came to; one rank runs here. The run in folder/run is gone on with, three steps each time."""
    checks = ["sft", "rm", "grpo", "rollouts", "scores", "files", "resume"]
    if size == 1:
        return {name: ranks.CHECKS[name](folder) for name in checks}
    launch(size, "tests/ranks.py", folder, *checks)
    return torch.load(folder / f"results-{size}.pt", weights_only=False)


@pytest.fixture(scope="module")
def by_size(folder):
    return {size: results(folder, size) for size in (2, 1, 3)}      # in this order: a run resumed 2 -> 1 -> 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ranks.VARIANTS)
def test_sft_equals_one_process_case01_case05_case24(by_size, size, name):
    """Ranks with different numbers of tokens and passes; a head tied to an embedding of 33 rows, and an untied one."""
    one, many = by_size[1]["sft"][name], by_size[size]["sft"][name]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6) and many["held_out"] == pytest.approx(one["held_out"], rel=1e-5)
    assert isinstance(many["norm"], float) and many["norm"] == pytest.approx(one["norm"], rel=1e-5)
    assert_close(one["gradient"], many["gradient"])
    one, many = (torch.cat([w.flatten() for w in x["weights"].values()]) for x in (one, many))
    # of all together: Adam divides the gradient of a key's bias, zero but for rounding, by itself
    assert (one - many).norm() <= 1e-4 * one.norm()


def assert_close(one, many, tolerance=1e-4):
    assert one.keys() == many.keys()
    for name in one:
        assert (one[name] - many[name]).norm() <= tolerance * one[name].norm() + 1e-9, name


def test_every_row_of_a_tied_odd_vocabulary_is_updated_case24(by_size, folder):
    before = load_file(ranks.saved_model(folder, Qwen2, True, 33) / "model.safetensors")["model.embed_tokens.weight"]
    for size in (2, 3):
        after = by_size[size]["sft"]["tied, 33 words"]["weights"]["model.embed_tokens.weight"]
        assert after.shape == (33, 24) and ((before - after).abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ranks.VARIANTS)
def test_reward_model_equals_one_process(by_size, size, name):
    one, many = by_size[1]["rm"][name], by_size[size]["rm"][name]
    assert_close(one["gradient"], many["gradient"])
    for key in ("loss", "accuracy", "mean", "std"):
        assert many[key] == pytest.approx(one[key], rel=1e-5), key
    assert many["held_out"] == pytest.approx(one["held_out"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["all", "none left"])
def test_grpo_equals_one_process(by_size, size, name):
    one, many = by_size[1]["grpo"][name], by_size[size]["grpo"][name]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert_close(one["gradient"], many["gradient"])


@pytest.mark.parametrize("size", [2, 3])
def test_rollouts_are_of_the_place_not_of_the_rank_and_wait_for_nobody_case22_case42(by_size, size):
    one, many = by_size[1]["rollouts"], by_size[size]["rollouts"]
    assert len(many["replies"]) == len(set(many["replies"])) == 8 * size        # all distinct, on every rank
    assert many["replies"][:8] == one["replies"]                                # and the same whoever draws them
    assert many["plain"] and many["float32"]
    assert many["lengths"] == [1] + [40] * (size - 1)
    assert many["done"][0] < min(many["done"][1:]) - 1.0


@pytest.mark.parametrize("size", [2, 3])
def test_rewards_where_a_rank_has_nothing_to_read(by_size, size):
    one, many = by_size[1]["scores"], by_size[size]["scores"]
    assert many[0] == one[0] == [-3.0, -3.0] and many[1] == pytest.approx(one[1], rel=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_holds_its_rows_and_the_folder_is_written_whole_case23_case29(by_size, folder, size):
    source = load_file(ranks.saved_model(folder, Qwen2, True, 33) / "model.safetensors")
    total, files = sum(w.numel() for w in source.values()), by_size[size]["files"]
    assert sum(files["held"]) == total and max(files["held"]) < 1.2 * total / size
    assert files["tied"] and "DTensor" in files["outside"]
    written = load_file(folder / f"written-{size}" / "model.safetensors")
    assert written.keys() == source.keys() and all(torch.equal(written[n], source[n]) for n in source)


def test_a_run_goes_on_with_another_number_of_ranks(by_size):
    """Two ranks, then one, then three: every weight and moment arrives, and the loss goes on from where it was."""
    two, one, three = (by_size[size]["resume"] for size in (2, 1, 3))
    assert [r["from"] for r in (two, one, three)] == [0, 3, 6]
    for before, after in ((two, one), (one, three)):
        for kind, tensors in before["after"].items():
            assert all(torch.equal(t, after["before"][kind][name]) for name, t in tensors.items()), kind
    losses = two["losses"] + one["losses"] + three["losses"]
    assert losses == sorted(losses, reverse=True) and len(losses) == 9


def test_an_error_in_one_rank_ends_all_with_its_message(tmp_path):
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}",
               "tests/ranks.py", str(tmp_path), "fail"]
    result = subprocess.run(command, cwd=ROOT, env=without_ranks(), capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and time.time() - began < 60
    assert result.stderr.count("error: rank 1: preferences.jsonl:7: no such thing") == 1
    assert 'ranks.py", line' not in result.stderr        # no traceback of ours


def without_ranks():
    return {k: v for k, v in environment().items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


GRPO = ("train_grpo.py", "--preset", "tiny", "--steps", "8", "--save-every", "2")


def test_two_ranks_killed_and_resumed_equal_two_undisturbed(tiny, tmp_path):
    """SIGKILL to every rank at random moments; then one SIGTERM; what is left at the end is exactly the undisturbed run."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = (*GRPO, "--model", tiny, "--held-out", "0.05", "--eval-every", "3", "--keep-best")      # one state: one rank has none
    launch(2, *command, "--out", straight)
    rng = random.Random(0)
    for sent in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        port, done = free_port(), steps(killed)
        processes = [subprocess.Popen([sys.executable, *map(str, command), "--out", str(killed), "--resume"], cwd=ROOT,
                                      env=environment(rank, 2, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                     for rank in range(2)]
        deadline = time.time() + 120
        while steps(killed) <= done and time.time() < deadline and processes[0].poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.5)
        for process in processes:
            process.send_signal(sent)
        texts = [p.communicate(timeout=60) for p in processes]
        if sent == signal.SIGTERM and processes[0].returncode != 0:
            assert {p.returncode for p in processes} == {128 + signal.SIGTERM} and "stopped by SIGTERM" in texts[0][0]
    launch(2, *command, "--out", killed, "--resume")
    for part in ("model", "best"):
        ours, theirs = (load_file(out / part / "model.safetensors") for out in (killed, straight))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [[{k: v for k, v in json.loads(line).items() if "seconds" not in k and "per_s" not in k}
             for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (killed, straight)]
    assert rows[0] == rows[1] and len(rows[0]) == 8


def steps(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_one_process_needs_no_group(tmp_path):
    assert (distributed.size(), distributed.rank(), distributed.is_main()) == (1, 0, True)
    assert distributed.share([1, 2, 3]) == distributed.gather([1, 2, 3]) == [1, 2, 3] and distributed.total(1, 2.5) == [1.0, 2.5]
    assert distributed.even([1, 2]) == [(1, True), (2, True)] and distributed.first(lambda: 7) == 7
