"""The whole pipeline in miniature, on a CPU, with nothing to download: ./run demo

Everything runs through the same scripts as for real. Only the model is a toy:
1.3M random parameters that see a few hundred short texts. Its replies are word
salad; what the demo shows is that each stage works and that GRPO raises the
reward.
"""
import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from escrag_min.data import read_finished
from escrag_min.model.tiny import make_tiny_model

ROOT = Path(__file__).parent.parent
MARKER = ".demo"        # only a folder that holds it is replaced


def run(*command):
    """Run one of the project's scripts, showing the command."""
    print("\n$ python " + " ".join(map(str, command)), flush=True)
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def mean_reward(path):
    """responses.jsonl -> (mean reward, share well-formed, mean reply words)."""
    records = read_finished(path)
    return (sum(r["reward"] for r in records) / len(records), sum(r["well_formed"] for r in records) / len(records),
            sum(len(r["reply"].split()) for r in records) / len(records))


def fresh_folder(out):
    """Make the demo's folder, with its marker; an earlier demo is replaced, anything else that is there is refused."""
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"--out {out} holds something that is not an earlier demo; choose another folder")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def main():
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="demo", help="folder to write, replaced if it holds an earlier demo [demo]")
    out = Path(parser.parse_args().out).resolve()
    fresh_folder(out)
    began = time.time()
    print("Making a tiny Qwen-2.5: random weights, a tokenizer trained on the built-in samples")
    make_tiny_model(out / "tiny", hidden=128, layers=2)

    policy = ("--max-new-tokens", 110, "--max-prompt", 1024)
    run("train_sft.py", "--model", out / "tiny", "--out", out / "sft", "--steps", 150, "--batch-size", 12, "--lr", 3e-3)
    run("train_rm.py", "--model", out / "tiny", "--out", out / "rm", "--steps", 30, "--lr", 1e-3, "--eval-every", 10)
    run("evaluate.py", "respond", "--model", out / "sft/model", "--reward-model", out / "rm/model", "--out",
        out / "before.jsonl", "--batch-size", 60, "--temperature", 1, *policy)
    run("train_grpo.py", "--model", out / "sft/model", "--reward-model", out / "rm/model", "--out", out / "grpo",
        "--steps", 30, "--prompts-per-step", 8, "--group-size", 8, "--lr", 2e-4, "--tokens-per-batch", 8192, *policy)
    run("evaluate.py", "respond", "--model", out / "grpo/model", "--reward-model", out / "rm/model", "--out",
        out / "after.jsonl", "--batch-size", 60, "--temperature", 1, *policy)

    print(f"\n60 held-out contexts, one sampled response each ({time.time() - began:.0f} s in all)\n")
    print(f"{'':24}{'reward':>10}{'well-formed':>14}{'reply words':>14}")
    for name, file in (("cold-start SFT", "before.jsonl"), ("+ RAG-GRPO, 30 steps", "after.jsonl")):
        reward, formed, words = mean_reward(out / file)
        print(f"{name:24}{reward:>10.2f}{formed:>14.0%}{words:>14.1f}")
    print(f"""
reward: the reward model's score, in standard deviations of its training replies (no reply: -3.0).
Look at: {out / 'grpo/metrics.jsonl'}   {out / 'grpo/samples.jsonl'}   {out / 'after.jsonl'}
Next, on a real model (the README goes on from here):
  ./run train_sft.py --model Qwen/Qwen2.5-0.5B-Instruct --out runs/sft
  ./run train_rm.py --model Qwen/Qwen2.5-0.5B-Instruct --out runs/rm
  ./run train_grpo.py --model runs/sft/model --reward-model runs/rm/model --out runs/grpo
  ./run evaluate.py chat --model runs/grpo/model""")


if __name__ == "__main__":
    main()
