"""The scripts as a user starts them, on tiny models: they run, resume, and say what is wrong in one sentence."""
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
import walkthrough
from conftest import ROOT
from safetensors.torch import load_file

import build_pref
import evaluate
import train_grpo
import train_rm
import train_sft
from escrag_min.data import read_records
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import RewardModel
from escrag_min.rollout import Response, Rollout
from escrag_min.runtime.args import run_script

SMALL = ("--batch-size", "4", "--tokens-per-batch", "2048", "--max-length", "1024")
GRPO = ("--prompts-per-step", "2", "--group-size", "3", "--max-new-tokens", "12", "--max-prompt", "1500", "--limit", "20")


def start(*command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{k: v for k, v in row.items() if "seconds" not in k and "per_s" not in k} for row in rows]


def test_sft_learns_and_writes_a_model(tiny, tmp_path):
    train_sft.main(["--model", str(tiny), "--out", str(tmp_path / "run"), "--steps", "6", "--lr", "1e-2", *SMALL])
    rows = metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert "held_out_loss" in rows[-1]
    Qwen2.from_pretrained(tmp_path / "run/model")
    assert json.loads((tmp_path / "run/config.json").read_text())["options"]["lr"] == 1e-2


def test_sft_teaches_both_passes(tiny, tmp_path, tokenizer):
    """With --retrieve each demonstration stands in two trees with the same reply: pass 1's prompt, and pass 2's."""
    args = train_sft.Args(retrieve=2, max_new_tokens=6, max_length=1500)
    records = read_records(args.data, "demonstration", 3)
    index = open_index(args.exemplars)

    def trees_of(args):
        return train_sft.final_trees(records, Qwen2.from_pretrained(tiny), tokenizer, index, args)
    trees = trees_of(args)
    assert trees == trees_of(args)     # the seed decides
    for record, (prompt, branches) in zip(records, trees):
        text = tokenizer.decode(prompt)
        assert record["prompt"][-1]["content"] in text and "Your first draft of a reply" in text
        assert branches == train_sft.demonstration_tree(tokenizer, record, 1500)[0][1]
    with pytest.raises(ValueError, match="--retrieve: --max-length 300 less the longest completion is"):
        trees_of(train_sft.Args(retrieve=2, max_new_tokens=6, max_length=300))
    train_sft.main(["--model", str(tiny), "--out", str(tmp_path / "run"), "--steps", "2", "--retrieve", "2", "--max-new-tokens", "6",
                    "--limit", "8", "--batch-size", "4", "--tokens-per-batch", "2048", "--max-length", "1500"])
    assert len(metrics(tmp_path / "run")) == 2 and (tmp_path / "run/index/meta.json").exists()


def test_rm_learns_and_standardises(tiny, tmp_path, capsys):
    train_rm.main(["--model", str(tiny), "--out", str(tmp_path / "run"), "--steps", "12", "--lr", "3e-3", "--limit", "120", *SMALL])
    assert "held-out accuracy" in capsys.readouterr().out
    assert metrics(tmp_path / "run")[-1]["loss"] < 0.7
    assert RewardModel.from_pretrained(tmp_path / "run/model").std != 1.0


@pytest.mark.parametrize("options", [
    (), ("--retrieve", "0"), ("--initial", "rollout", "--train-initial"), ("--beta", "0.1", "--inner-steps", "2"),
    ("--truncated", "drop", "--weighting", "constant", "--no-scale-advantage")])
def test_grpo_runs_in_every_variant(tiny, tmp_path, options):
    train_grpo.main(["--model", str(tiny), "--out", str(tmp_path / "run"), "--steps", "2", *GRPO, *options])
    rows, samples = metrics(tmp_path / "run"), (tmp_path / "run/samples.jsonl").read_text().splitlines()
    assert len(rows) == 2 and (rows[0]["ratio"] is None or rows[0]["ratio"] == pytest.approx(1.0, abs=0.1))
    first = json.loads(samples[0])
    assert len(first["prompt"]) > 10 and {"reward", "advantage", "tokens", "reply"} <= first["responses"][0].keys()
    if "--beta" in options:
        assert rows[0]["kl"] >= 0
    if "drop" in options:           # nearly every response of a tiny model is cut: counted, and little is left to learn from
        assert rows[0]["truncated"] > 0.5


@pytest.mark.parametrize("script, options", [
    (train_sft, ("--limit", "22", "--lr", "1e-3", *SMALL)), (train_rm, ("--limit", "22", *SMALL)), (train_grpo, ("--lr", "1e-3", *GRPO[:-1], "5"))])
def test_six_steps_equal_three_and_three_case25(tiny, tmp_path, script, options):
    """Across an epoch boundary (about 20 records in batches of 4; 5 states in batches of 2)."""
    common = ["--model", str(tiny), "--save-every", "3", *options]
    script.main([*common, "--steps", "6", "--out", str(tmp_path / "straight")])
    stopped = tmp_path / "stopped"
    script.main([*common, "--steps", "6", "--out", str(stopped)])
    for gone in ("model",):         # as if it had been killed after its checkpoint at step 3, in the middle of step 5
        for file in (stopped / gone).iterdir():
            file.unlink()
    script.main([*common, "--steps", "6", "--out", str(stopped), "--resume"])
    assert without_times(metrics(stopped)) == without_times(metrics(tmp_path / "straight"))
    ours, theirs = (load_file(f / "model/model.safetensors") for f in (stopped, tmp_path / "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_saves_and_goes_on(tiny, tmp_path, number):
    command = [sys.executable, "train_sft.py", "--model", str(tiny), "--steps", "20", "--limit", "30", *SMALL, "--out"]
    out = tmp_path / "run"
    process = subprocess.Popen([*command, str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))   # a CI may ignore it
    deadline = time.time() + 120
    while not (out / "metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and f"stopped by {number.name}" in said and "--resume" in said
    assert not (out / "model").exists()
    done = len(metrics(out))
    assert json.loads((out / f"checkpoints/step-{done:06d}/state.json").read_text())["step"] == done < 20
    assert start(*command[1:], str(out), "--resume").returncode == 0
    train_sft.main([*command[2:], str(tmp_path / "straight")])
    assert without_times(metrics(out)) == without_times(metrics(tmp_path / "straight"))


def test_respond_writes_both_passes(tiny, tiny_reward, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    command = ["respond", "--model", str(tiny), "--out", str(out), "--limit", "3", "--max-new-tokens", "8", "--max-prompt", "1500",
               "--reward-model", str(tiny_reward)]
    evaluate.main(command)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 3 and all({"id", "prompt", "reply", "initial", "exemplars", "reward"} <= r.keys() for r in records)
    assert "3 responses" in capsys.readouterr().out
    with pytest.raises(ValueError, match="exists; choose another name"):
        evaluate.main(command)
    out.rename(tmp_path / "r.jsonl.part")               # as if killed: only the same settings go on with it
    with pytest.raises(ValueError, match="holds answers of another command"):
        evaluate.main([*command, "--temperature", "0.5"])
    evaluate.main(command)
    assert [json.loads(line) for line in out.read_text().splitlines()] == records


def test_a_reply_that_never_came_is_not_part_of_the_talk(tiny, monkeypatch, capsys):
    said, asked = iter(["I can't sleep.", "Are you there?", ""]), []

    class Mute:
        def __init__(self, args):
            pass

        def __call__(self, states):
            asked.append([dict(m) for m in states[0]["prompt"]])
            return [Rollout(states[0], 0, None, [], [], [1], [Response([5], False, "<think>", "", "", False)], 0)]
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr(evaluate, "Responder", Mute)
    evaluate.main(["chat", "--model", str(tiny)])
    assert asked == [[{"role": "user", "content": "I can't sleep."}], [{"role": "user", "content": "Are you there?"}]]
    assert "no reply" in capsys.readouterr().out


def test_chat_answers_and_points_to_help(tiny, monkeypatch, capsys):
    said = iter(["I can't sleep.", "I want to die.", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    evaluate.main(["chat", "--model", str(tiny), "--retrieve", "0", "--max-new-tokens", "8", "--temperature", "1"])
    out = capsys.readouterr().out
    assert out.count("counselor>") == 1 and "emergency number" in out.split("counselor>")[1] and "Research software" in out


def bad_file(tmp_path, text):
    (tmp_path / "bad.jsonl").write_text(text)
    return tmp_path / "bad.jsonl"


@pytest.mark.parametrize("command, words", [
    (("train_sft.py", "--model", "no/such/model"), "no/such/model: no such model folder"),
    (("train_sft.py", "--data", "none.jsonl"), "none.jsonl: no such file"),
    (("train_sft.py", "--data", "BAD"), "bad.jsonl:2: not a JSON object"),
    (("train_rm.py", "--data", "EMPTY"), "empty.jsonl: holds no records"),
    (("train_rm.py", "--model", "TINY", "--data", "PAIR", "--max-length", "60"), "pair-1, --max-length 60: the prompt has"),
    (("train_sft.py", "--model", "TINY", "--data", "DEMO", "--max-length", "60"), "demo-1, --max-length 60: the prompt has"),
    (("train_rm.py", "--model", "TINY", "--data", "PAIR", "--tokens-per-batch", "100"), "pair-1: 511 tokens"),
    (("train_sft.py", "--model", "TINY", "--data", "DEMO", "--tokens-per-batch", "100"), "demo-1: "),
    (("train_rm.py", "--model", "TINY", "--data", "MUTE"), "mute-1: a reply is empty but for its reasoning"),
    (("train_grpo.py", "--model", "TINY", "--reward-model", "TINY"), "a language model without a reward head; train one with train_rm.py"),
    (("train_grpo.py", "--keep-best"), "--keep-best needs --held-out"),
    (("train_rm.py", "--eval-every", "0"), "--eval-every 0 must be at least 1"),
    (("train_sft.py", "--steps", "0"), "--steps 0 must be at least 1"),
    (("evaluate.py", "respond", "--model", "TINY", "--batch-size", "0"), "--batch-size 0 must be at least 1"),
    (("evaluate.py", "respond", "--model", "TINY", "--data", "PAIR", "--max-prompt", "60", "--retrieve", "0"), "--max-prompt 60: pair-1, prompts of at most 60 tokens: the prompt has"),
    (("train_rm.py", "--learning-rate", "1"), "unrecognized arguments: --learning-rate"),
    (("train_grpo.py", "--group-size", "1"), "--group-size 1"),
    (("train_grpo.py", "--temperature", "0"), "--temperature 0.0"),
    (("train_grpo.py", "--model", "LLAMA"), "model_type is 'llama'"),
    (("train_grpo.py", "--data", "LONG", "--max-prompt", "64", "--max-new-tokens", "8"), "even with the last turn only and a draft; --max-prompt is 64"),
    (("train_grpo.py", "--tokens-per-batch", "100"), "--tokens-per-batch 100 must hold"),
    (("train_grpo.py", "--out", "USED"), "is not empty; choose another folder, or add --resume"),
    (("train_grpo.py", "--stop-kl", "1"), "--stop-kl needs --beta"),
    (("train_sft.py", "--preset", "grpo-3b"), "--preset grpo-3b: train_sft.py has tiny, sft-3b, sft-7b"),
    (("train_grpo.py", "--preset", "grpo-3b"), "--preset grpo-3b: name the policy to start from with --model"),
    (("train_sft.py", "--save-every", "0"), "--save-every 0 must be at least 1"),
    (("train_sft.py", "--clip-norm", "0"), "--clip-norm 0.0 must be above 0"),
    (("train_sft.py", "--epochs", "0"), "--epochs 0.0 must be above 0"),
    (("train_grpo.py", "--beta", "-1"), "--beta -1.0, --clip-low 0.2, --clip-high 0.2 must not be negative"),
    (("train_grpo.py", "--max-new-tokens", "0"), "--max-new-tokens 0 must be at least 1"),
    (("train_sft.py", "--model", "TINY", "--max-length", "100000"), "--max-length is 100000; the model has"),
    (("train_sft.py", "--retrieve", "2", "--tokens-per-batch", "500"), "--tokens-per-batch 500 must be at least that"),
    (("train_grpo.py", "--train-initial"), "--train-initial needs --initial rollout"),
    (("evaluate.py", "respond"), "--model: name a checkpoint"),
    (("evaluate.py", "chat", "--model", "TINY", "--encoder", "word2vec"), "--encoder 'word2vec'"),
])
def test_bad_input_is_one_sentence_case12_case14_case16(tiny, tmp_path, monkeypatch, capsys, command, words):
    (tmp_path / "bad.jsonl").write_text('{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "word " * 200}]}))
    said = {"prompt": [{"role": "user", "content": "word " * 200}]}
    pair = {"chosen": [{"role": "assistant", "content": "y"}], "rejected": [{"role": "assistant", "content": "n"}]}
    mute = {**pair, "rejected": [{"role": "assistant", "content": "<think>She is sad.</think>"}]}
    for name, record in (("pair", {**said, **pair}), ("demo", {**said, "completion": pair["chosen"]}), ("mute", {**said, **mute})):
        lines = [json.dumps({"id": f"{name}-{i}", "dialogue_id": str(i), **record}) for i in (1, 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llama" / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    names = {"BAD": "bad.jsonl", "EMPTY": "empty.jsonl", "LONG": "long.jsonl", "LLAMA": "llama", "USED": "used", "PAIR": "pair.jsonl",
             "DEMO": "demo.jsonl", "MUTE": "mute.jsonl"}
    command = [str(tmp_path / names[c]) if c in names else str(tiny) if c == "TINY" else c for c in command]
    if (command[0].startswith("train") or "respond" in command) and "--out" not in command:
        command += ["--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        run_script({"train_sft.py": train_sft, "train_rm.py": train_rm, "train_grpo.py": train_grpo, "evaluate.py": evaluate}[
            command[0]].main)
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and words in message and command[0] in message


@pytest.mark.parametrize("script, command", [
    (train_sft, ()), (train_rm, ()), (train_grpo, ()), (build_pref, ()), (walkthrough, ()), (evaluate, ()),
    *((evaluate, (name,)) for name in ("respond", "judge", "compare", "ladder", "chat", "sheet", "tally", "show", "plot"))])
def test_help_fits_80_columns_and_says_what_is_the_papers(script, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        script.main([*command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and [line for line in text.splitlines() if len(line) > 80] == []
    assert command or "paper" in text


def test_a_script_ends_with_one_sentence_and_status_2(tmp_path):
    result = start("train_sft.py", "--data", "none.jsonl", "--out", tmp_path / "run")
    assert result.returncode == 2 and result.stderr == "train_sft.py: error: none.jsonl: no such file\n"


def test_scripts_stand_alone_without_a_model(tmp_path):
    result = start("train_grpo.py", "--steps", "1", "--out", tmp_path / "run", *GRPO)
    assert result.returncode == 0, result.stderr
    assert "no --model: making a tiny random model" in result.stdout and "no --reward-model" in result.stdout
