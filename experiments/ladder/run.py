"""The ladder on real weights, from the project's own commands (plan.md says why
each number is what it is):

    python experiments/ladder/run.py --models FOLDER --esconv FOLDER
    python experiments/ladder/run.py … --only sft,reward          # some stages
    python experiments/ladder/report.py --out runs/ladder   # docs/results.md

--models holds smol/ and qwen05/. Stop it at any time: the same command goes on
where it was. Each stage's output is in OUT/STAGE.log, its command and the wall
time of each of its starts in OUT/stages.jsonl.
"""
import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from escrag_min.data import SAMPLES, read_jsonl, read_records, split_by_dialogue, write_jsonl  # noqa: E402

SEED = 0
PAIRS_A, PAIRS_B, PAIRS_VALID = 800, 800, 300
SECOND_OPINION = 12     # contexts that the qwen05 judge sees
ROWS = [                # name, policy, exemplars at inference: the ladder, then the sweep
    ("base", "base", 0), ("base-rag", "base", 3), ("sft", "sft", 0), ("grpo", "grpo", 0), ("grpo-rag", "grpo", 3),
    ("full", "rag-grpo", 3), ("full-n0", "rag-grpo", 0),
    ("both", "sft-both", 0), ("both-rag", "sft-both", 3), ("full-both", "rag-grpo-both", 3),       # the second climb
    *((f"full-both-n{n}", "rag-grpo-both", n) for n in (0, 2, 4))]
SIDES = ("chosen", "rejected")
LADDER = [name for name, *_ in ROWS[:6]]
SECOND = ["both", "both-rag", "full-both"]      # the rungs of the second climb


def prepare(esconv, out):
    """ESConv's split and our samples as the files of the plan."""
    def fits(record):       # an over-long turn would leave no room for the rest
        return len(record["prompt"][-1]["content"]) < 400 and len(record["chosen"]) < 320
    pairs = read_records(esconv / "train.jsonl", "preference", seed=SEED)
    half_a, half_b = ([r for r in half if fits(r)] for half in split_by_dialogue(pairs, 0.5, SEED))
    rng = random.Random(SEED)
    own = read_records(SAMPLES / "preferences.jsonl", "preference")
    valid = read_records(esconv / "valid.jsonl", "preference", PAIRS_VALID, SEED)
    write_jsonl(out / "states.jsonl", [state(r) for r in half_a])
    for name, pairs in (("pairs", rng.sample(half_a, PAIRS_A) + own), ("pairs-gold", rng.sample(half_b, PAIRS_B))):
        write_jsonl(out / f"{name}.jsonl", [
            {**state(r), **{side: [{"role": "assistant", "content": r[side]}] for side in SIDES}} for r in pairs])
    for side in SIDES:
        write_jsonl(out / f"valid-{side}.jsonl", [{**state(r), "reply": r[side]} for r in valid])
    (out / "prepared").touch()


def state(record):
    return {k: record[k] for k in ("id", "dialogue_id", "prompt")}


def stages(models, esconv, out, rehearse):
    """[(stage, the file that shows it is done, command)], in order."""
    few = ["--steps", 2] if rehearse else []

    def reward(name, pairs, seed):
        return (name, f"{name}/model/config.json",
                ["train_rm.py", "--model", models / "smol", "--data", out / pairs, "--epochs", 1, "--batch-size", 16, "--lr", 1e-4,
                 "--max-length", 224, "--held-out", 0.05, "--eval-every", 20, "--save-every", 10, "--tokens-per-batch", 2048,
                 "--seed", seed, "--out", out / name, "--resume", *few])

    def sft(name, model, epochs, lr, *more):
        return (name, f"{name}/model/config.json",
                ["train_sft.py", "--model", model, "--data", SAMPLES / "demonstrations.jsonl", "--epochs", epochs,
                 "--batch-size", 8, "--lr", lr, "--tokens-per-batch", 1024, "--save-every", 10, "--seed", SEED,
                 "--out", out / name, "--resume", *more, *few])

    def grpo(name, start, n, steps, *more):
        return (name, f"{name}/model/config.json",
                ["train_grpo.py", "--model", out / start / "model", "--reward-model", out / "reward/model", "--data",
                 out / "states.jsonl", "--retrieve", n, "--steps", steps, "--prompts-per-step", 1, "--group-size", 6,
                 "--max-new-tokens", 96, "--max-prompt", 640, "--tokens-per-batch", 1600, "--lr", 1e-5, "--beta", 0.02,
                 "--stop-reward", 1.0, "--save-every", 5, "--seed", SEED, "--out", out / name, "--resume", *more, *few])

    def judge(name, responses, judge):
        return (name, f"{name}/summary.json",
                ["evaluate.py", "judge", "--responses", out / responses, "--judge", judge, "--out", out / name])

    def respond(name, policy, n, *data):
        model = models / "smol" if policy == "base" else out / policy / "model"
        return (name, f"{name}.jsonl",
                ["evaluate.py", "respond", "--model", model, "--retrieve", n, *data, "--seed", SEED, "--max-new-tokens", 96,
                 "--max-prompt", 1024, "--batch-size", 20, "--out", out / f"{name}.jsonl"])
    judges = {name: f"rm:{out / name / 'model'}" for name in ("reward", "gold")}
    contexts = ("--data", esconv / "test.jsonl", "--limit", 4 if rehearse else 100)
    rows = [sft("sft", models / "smol", 2, 5e-5),
            reward("reward", "pairs.jsonl", 1),
            grpo("rag-grpo", "sft", 3, 150),
            reward("gold", "pairs-gold.jsonl", 2),
            grpo("grpo", "sft", 0, 175),
            grpo("rag-grpo-format", "sft", 3, 45, "--format-penalty", 2.0),
            sft("sft-both", out / "sft/model", 1, 5e-5, "--retrieve", 3, "--max-new-tokens", 96, "--max-length", 768),
            grpo("rag-grpo-both", "sft-both", 3, 150)]
    rows += [judge(f"valid-{side}-{name}", f"valid-{side}.jsonl", rm) for side in SIDES for name, rm in judges.items()]
    for name, policy, n in ROWS:
        rows.append(respond(f"responses-{name}", policy, n, *contexts))
        rows += [judge(f"scores-{name}-{by}", f"responses-{name}.jsonl", rm) for by, rm in judges.items()]
    rows += [respond(f"own-{name}", policy, n, "--limit", 5) for name, policy, n in ROWS if name in LADDER + SECOND]
    rows += [sft("qwen-sft", models / "qwen05", 1, 2e-5, "--limit", 64),
             grpo("qwen-rag-grpo", "qwen-sft", 3, 30)]
    rows += [judge(f"opinion-{name}", f"some-{name}.jsonl", models / "qwen05") for name in [*LADDER, "full-both"]]
    return [(name, out / done, [str(word) for word in command]) for name, done, command in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with smol/ and qwen05/")
    parser.add_argument("--esconv", type=Path, required=True, help="folder with ESConv's train.jsonl, valid.jsonl, test.jsonl")
    parser.add_argument("--out", type=Path, help="[runs/ladder, or runs/ladder-rehearsal]")
    parser.add_argument("--only", default="", help="stages, separated by commas [all]")
    parser.add_argument("--rehearse", action="store_true", help="two steps and four contexts everywhere: does all of it run?")
    args = parser.parse_args()
    out = args.out or ROOT / ("runs/ladder-rehearsal" if args.rehearse else "runs/ladder")
    models, esconv, out = (path.resolve() for path in (args.models, args.esconv, out))
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "prepared").exists():
        prepare(esconv, out)
    for name, done, command in stages(models, esconv, out, args.rehearse):
        if done.exists() or args.only and name not in args.only.split(","):
            continue
        if name.startswith("opinion-"):
            row = name.removeprefix("opinion-")
            some = [record for record, _ in read_jsonl(out / f"responses-{row}.jsonl")][:SECOND_OPINION]
            write_jsonl(out / f"some-{row}.jsonl", some)
        shown = " ".join(command)
        for folder, short in ((out, "runs/ladder"), (models, "MODELS"), (esconv, "ESCONV"), (ROOT, ".")):
            shown = shown.replace(str(folder), short)
        print(f"{time.strftime('%H:%M')} {name}: {shown}", flush=True)
        began = time.time()
        try:
            with open(out / f"{name}.log", "a", encoding="utf-8") as log:
                code = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=log, stderr=log).returncode
        finally:
            with open(out / "stages.jsonl", "a", encoding="utf-8") as history:      # two runners may work side by side
                history.write(json.dumps({"stage": name, "command": shown, "seconds": round(time.time() - began)}) + "\n")
        if code:
            sys.exit(f"{name} ended with status {code}; see {out / f'{name}.log'}")


if __name__ == "__main__":
    main()
