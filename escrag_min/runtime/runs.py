"""A training run and its folder: options, metrics, checkpoints, resuming, pre-emption, the best model so far.

    config.json               every option, versions, seed; and what --resume changed
    metrics.jsonl             a line a step
    checkpoints/step-NNNNNN/  after so many finished steps: weights and AdamW moments (torch.distributed.checkpoint), state.json
    checkpoints/latest        -> the newest
    best/                     with --keep-best: the model where its held-out value was best, in Hugging Face layout
    model/                    the trained model, in Hugging Face layout

A run is a function of its options: the batch of step s comes from (seed, s), and so does every random stream in it. Position in
the data, learning rate and generators therefore need no saving: they are the step's number. What a checkpoint holds beside
weights and moments is that number, the best value so far, and how many steps in a row were skipped.

A checkpoint is written beside its place, read back for its checksums, and renamed: what has the name is complete, whenever the
run is killed. --resume takes the newest whose checksums hold.
"""
import json
import math
import os
import platform
import shutil
import signal
import time
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from escrag_min.data import read_finished, write_jsonl
from escrag_min.model.checkpoint import read_json, write_json
from escrag_min.runtime.args import check, option
from escrag_min.runtime.distributed import (
    default_device,
    first,
    gather,
    is_main,
    load_state,
    parameters,
    save_pretrained,
    save_state,
    say,
    share,
    size,
)

BEFORE_STEP_1 = {"config.json", "index", "tiny", "tiny-rm", "tiny-rm-base"}     # a folder that holds no more is unused
SKIPS_IN_A_ROW = 3      # ours: steps without a finite loss and gradient before a run gives up


@dataclass
class RunArgs:
    """The options that mean the same in every trainer. Each adds its own, and its own defaults where they differ."""

    model: str = option("", "folder or Hub id of a Qwen-2.5 to start from; none: a tiny random one is made")
    out: str = option("", "run folder; none: a new one under runs/")
    resume: bool = option(False, "go on with the run in --out from its newest complete checkpoint; a new run if there is none")
    preset: str = option("", "tiny, to see it run, or defaults for the paper's hardware: sft-3b, sft-7b, rm-7b, grpo-3b, "
                         "grpo-7b, each for its script; printed with their sources; other options still win")
    plan: bool = option(False, "print the memory each rank will need, and stop")
    ranks: int | None = option(None, "for --plan: number of GPUs; none: those of --preset, or of this run")
    limit: int | None = option(None, "use so many records of --data, drawn with the seed")
    epochs: float = option(1.0, "passes over the data (ours)")
    steps: int | None = option(None, "steps, instead of --epochs")
    lr: float = option(1e-5, "peak learning rate (ours)")
    warmup: float = option(0.05, "share of the steps with a rising learning rate (ours)")
    weight_decay: float = option(0.0, "AdamW weight decay on matrices (ours)")
    clip_norm: float = option(1.0, "gradient norm is clipped to this (ours)")
    tokens_per_batch: int = option(4096, "tokens per forward pass (micro-batch) and rank; memory, not results, depends on it")
    checkpoint_blocks: bool | None = option(None, "recompute activations in the backward pass: less memory, a third more time; "
                                            "none: above 1B parameters (ours)")
    save_every: int = option(100, "checkpoint every so many steps")
    keep_last: int = option(2, "checkpoints to keep")
    keep_best: bool = option(False, "write best/, the model at its best held-out value")
    eval_every: int = option(20, "measure what is held out every so many steps")
    seed: int = option(0, "random seed")


class Run:
    """One run of a trainer. script: its name; held_out: (name in the metrics, which is better: min or max)."""

    def __init__(self, script, args, held_out):
        for name in ("save_every", "keep_last", "eval_every", "steps"):
            value = getattr(args, name)
            check(value is None or value >= 1, f"--{name.replace('_', '-')} {value} must be at least 1")
        for name in ("epochs", "lr", "clip_norm"):
            check(getattr(args, name) > 0, f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
        check(args.weight_decay >= 0, f"--weight-decay {args.weight_decay} must not be negative")
        check(0 <= args.warmup < 1, f"--warmup {args.warmup} is a share of the steps: from 0 to below 1")
        self.args, (self.held_out, self.better) = args, held_out
        self.out = first(lambda: open_run(script, args))
        check((self.out / "config.json").exists(), f"--out {self.out}: not the folder that rank 0 sees; all nodes must share it")
        self.finished, self.saved, self.skipped, self.best, self.signal = 0, None, 0, None, None
        self.rows = []          # the metrics of all finished steps
        self.interruptible = False

    def start(self, model, optimizer):
        """Take over what is to be saved; with --resume, restore it from the newest complete checkpoint."""
        self.model, self.optimizer = model, optimizer
        if not self.args.resume:
            return
        for folder in first(lambda: complete_checkpoints(self.out)):
            state = verified(folder)
            if state:
                tensors = self.tensors()
                load_state(tensors, folder)
                for moments in self.optimizer.state.values():
                    moments["step"].fill_(state["updates"])
                self.finished = self.saved = state["step"]
                self.skipped, self.best = state["skipped"], state["best"]
                if self.args.keep_best and not first(lambda: (self.out / "best").exists()):
                    self.best = None        # measured so far, but not kept
                say(f"resuming {folder}" + (f", written by {state['ranks']} ranks" if state["ranks"] != size() else ""))
                break
        else:
            say(f"--resume: {self.out} has no checkpoint yet; starting at step 0")
        self.rows = first(lambda: forget_after(self.out, self.finished))

    def steps(self, n, name):
        """Yield the numbers of the steps still to do; between them, save when it is time and stop when asked to."""
        with self._listening():
            self.bar = tqdm(range(self.finished, n), initial=self.finished, total=n, desc=name, disable=not is_main())
            for step in self.bar:
                yield step
                self.finished = step + 1
                if self.finished == n or self.finished % self.args.save_every == 0 and not self.skipped:
                    self.save()
                self.stop_if_asked()

    def log(self, metrics, show):
        """Append a line to metrics.jsonl (rank 0). A value that is not finite becomes null, since JSON has no NaN.

        Raises ValueError where the last SKIPS_IN_A_ROW steps were all skipped.
        """
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self.rows.append(metrics)
        if is_main():
            with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
        self.bar.set_postfix({show: metrics[show]})
        self.skipped = self.skipped + 1 if metrics["skipped"] else 0
        check(self.skipped < SKIPS_IN_A_ROW, f"{self.skipped} steps in a row had no finite loss and gradient; the last good "
                                             f"checkpoint is {self.newest()}; a lower --lr may help")

    def improves(self, metrics):
        """Whether this step's held-out value is the best so far; it then is."""
        value = metrics.get(self.held_out)
        if value is None or not math.isfinite(value) or \
                self.best and self.better(value, self.best[self.held_out]) == self.best[self.held_out]:
            return False
        self.best = {"step": metrics["step"], self.held_out: value}
        return True

    def save_best(self):
        """best/. A full disk is said, and leaves the earlier one as it is; it ends a run of several ranks, which write together."""
        try:
            save_pretrained(self.model, self.out / "best", self.args.model)
        except OSError as error:
            if size() > 1:
                raise
            say(f"{self.out / 'best'} could not be written ({error})")

    def end(self):
        """Write model/."""
        save_pretrained(self.model, self.out / "model", self.args.model)

    # --- checkpoints ---

    def tensors(self):
        """{"model", "exp_avg", "exp_avg_sq"}: {name: tensor}, the tensors that train, each rank's own pieces."""
        weights, state = parameters(self.model), self.optimizer.state
        for p in weights.values():
            if not state[p]:        # before the first update
                state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p),
                            "exp_avg_sq": torch.zeros_like(p)}
        return {"model": {name: p.detach() for name, p in weights.items()},
                **{key: {name: state[p][key].detach() for name, p in weights.items()} for key in ("exp_avg", "exp_avg_sq")}}

    def save(self):
        """checkpoints/step-NNNNNN of the finished steps. A full disk is said, and leaves the earlier ones as they are."""
        if self.saved == self.finished:
            return
        folder = self.out / "checkpoints" / f"step-{self.finished:06d}"
        part = folder.with_name(folder.name + ".part")
        try:
            first(lambda: shutil.rmtree(part, ignore_errors=True))
            tensors = self.tensors()
            save_state(tensors, part)
            state = {"step": self.finished, "updates": int(next(iter(self.optimizer.state.values()))["step"].item()),
                     "best": self.best, "skipped": self.skipped, "ranks": size(), "files": checksums(part)}
            first(lambda: complete(part, folder, state, self.args.keep_last))
            self.saved = self.finished
        except OSError as error:
            first(lambda: shutil.rmtree(part, ignore_errors=True))
            say(f"{folder} could not be written ({error}); the last complete checkpoint is {self.newest()}")

    def newest(self):
        return next(iter(complete_checkpoints(self.out)), "none")

    # --- being stopped ---

    @contextmanager
    def _listening(self):
        """Within: the first SIGTERM (pre-emption) or SIGINT (Ctrl-C) is remembered, to stop where nothing is lost."""
        def hear(number, frame):
            again, self.signal = self.signal, self.signal or number
            if again and number == signal.SIGINT and size() == 1:       # torchrun hands each Ctrl-C on a second time
                raise KeyboardInterrupt
            if not again and self.interruptible:
                raise Interrupted
        before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def unless_stopped(self, function):
        """function(), but a signal ends it at once -> None; stop_if_asked must follow. For long work that no other rank waits
        for and that can be done again."""
        try:
            self.interruptible = True
            return None if self.signal else function()
        except Interrupted:
            return None
        finally:
            self.interruptible = False

    def stop_if_asked(self):
        """Where any rank got a signal: save the finished steps and end the run, all ranks at the same point.

        What the current step has done so far is lost, and done again on --resume: no weight may have changed in it.
        """
        number = max(gather([self.signal or 0]))
        if number:
            if self.finished:
                self.save()
            say(f"\nstopped by {signal.Signals(number).name} after {self.finished} finished steps; last complete checkpoint: "
                f"{self.newest()}; go on with --resume")
            raise SystemExit(128 + number)


class Interrupted(BaseException):
    """A signal arrived in Run.unless_stopped. No library's `except Exception` may swallow it."""


# --- folders ---

def default_out(out, script):
    return Path(out) if out else Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def open_run(script, args):
    """Make args.out (or a new folder under runs/) and write config.json -> Path. A used folder needs --resume."""
    out = default_out(args.out, script)
    check(not out.exists() or out.is_dir(), f"--out {out} is a file; a folder is needed")
    used = {p.name for p in out.iterdir()} - BEFORE_STEP_1 if out.exists() else set()
    config = out / "config.json"
    check(not used or args.resume, f"--out {out} is not empty; choose another folder, or add --resume to go on with that run")
    check(not used or config.exists(), f"--resume: {out} holds no run to go on with")
    options = asdict(args)
    if args.resume and config.exists():
        earlier = read_json(config)
        check(earlier.get("script") == script, f"--resume: {out} is a run of {earlier.get('script')}, not of {script}")
        before = latest_options(earlier)
        changed = {k: v for k, v in options.items() if v != before.get(k) and k not in ("resume", "out")}
        for name, value in changed.items():
            print(f"--{name.replace('_', '-')} was {before.get(name)}, is {value}")
        if changed:
            again = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "options": changed}
            write_json(config, {**earlier, "resumed": [*earlier.get("resumed", []), again]})
        return out
    out.mkdir(parents=True, exist_ok=True)
    write_json(config, {"script": script, "options": options, "torch": torch.__version__, "python": platform.python_version(),
                        "device": default_device(), "ranks": size(), "started": time.strftime("%Y-%m-%d %H:%M:%S")})
    return out


def latest_options(config):
    """A run's config.json -> its options, as the last --resume left them."""
    return {**config["options"], **{k: v for change in config.get("resumed", []) for k, v in change["options"].items()}}


def resumable_folder(out, script, args, may_change=()):
    """A new folder with config.json, or an earlier one of the same script and options to go on with -> Path.

    may_change: options that do not touch the results.
    """
    out = default_out(out, script)
    options = {k: v for k, v in asdict(args).items() if k not in ("out", *may_change)}
    used = out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {"config.json"})
    if used and (out / "config.json").exists():
        earlier = read_json(out / "config.json")
        changed = [f"--{k}".replace("_", "-") for k in options if options[k] != earlier.get("options", {}).get(k)]
        if earlier.get("script") != script or changed:
            raise ValueError(f"--out {out} was made by {earlier.get('script')} with other options ({', '.join(changed)}); choose "
                             "another folder")
    elif used:
        raise ValueError(f"--out {out} is not an empty folder; choose another")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", {"script": script, "options": options})
    if not args.out:
        print(f"writing {out}; to go on with it, should it be stopped, give --out {out}")
    return out


def complete_checkpoints(out):
    """Folders of checkpoints, newest first."""
    found = [p for p in (out / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def checksums(folder):
    """{file name: [bytes, CRC-32]}; each rank reads its share of the files."""
    def checksum(path):
        crc = 0
        try:
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    crc = zlib.crc32(block, crc)
            return [path.stat().st_size, crc]
        except OSError as error:        # raised below, by all ranks together
            return str(error)
    files = sorted(p for p in folder.iterdir() if p.name != "state.json")
    sums = dict(gather([(p.name, checksum(p)) for p in share(files)]))
    broken = [found for found in sums.values() if isinstance(found, str)]
    if broken:
        raise OSError(broken[0])
    return sums


def verified(folder):
    """state.json of a checkpoint whose files are all as they were written, or None, said with the reason."""
    try:
        state = first(lambda: read_json(folder / "state.json"))
        files = checksums(folder)
        wrong = [name for name in state["files"].keys() | files.keys() if files.get(name) != state["files"].get(name)]
        reason = f"{wrong[0]} is not as it was written" if wrong else None
    except (ValueError, KeyError, FileNotFoundError) as error:      # another OSError is no damage: the disk may answer again
        reason = error
    if reason:
        first(lambda: set_aside(folder))
        say(f"--resume: {folder} is not complete ({reason}) and is now called {folder.name}.damaged; trying the one before")
        return None
    return state


def set_aside(folder):
    """A damaged checkpoint loses its name: it is none of the newest that are kept."""
    aside = folder.with_name(folder.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)


def complete(part, folder, state, keep_last):
    """Give a checkpoint its name, point `latest` to it, and remove all but the newest keep_last, and the damaged."""
    write_json(part / "state.json", state)
    os.rename(part, folder)
    link = folder.with_name("latest.part")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, folder.with_name("latest"))
    for old in [*complete_checkpoints(folder.parent.parent)[keep_last:], *folder.parent.glob("*.damaged")]:
        remove(old)


def remove(folder):
    """Take the name away first: a folder that is half gone has none."""
    gone = folder.with_name(folder.name + ".gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def forget_after(out, step):
    """Cut metrics.jsonl and samples.jsonl back to the finished steps, so that steps done again are not there twice, and remove
    what a killed run left half written -> the metrics that are left."""
    for stepped_aside in out.glob("best.tmp-*/best"):       # killed while best/ was being replaced
        if not (out / "best").exists():
            os.rename(stepped_aside, out / "best")
    for rest in [*out.glob("*.tmp-*"), *(out / "checkpoints").glob("*.part"), *(out / "checkpoints").glob("*.gone")]:
        shutil.rmtree(rest, ignore_errors=True)
    kept = {name: [r for r in read_finished(out / name) if r["step"] <= step] for name in ("samples.jsonl", "metrics.jsonl")}
    for name, records in kept.items():
        if (out / name).exists():
            part = out / f"{name}.part"
            write_jsonl(part, records)
            os.replace(part, out / name)
    return kept["metrics.jsonl"]
