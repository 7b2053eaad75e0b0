"""Pictures of training runs, where matplotlib is installed; nothing else needs it.

A run's panels are those of its kind (GRPO, or SFT and the reward model) that hold a number. Thin: each step. Thick: the mean of
the last `window` steps, as --stop-kl and --stop-reward see a run. A missing or null value leaves a gap in both.
"""
import math
from dataclasses import dataclass
from pathlib import Path

from escrag_min.data import in_run, read_jsonl
from escrag_min.runtime.args import check, option, positional

NO_MATPLOTLIB = "no plot: pip install matplotlib to get one"
GRPO = {
    "reward": ("reward", "reward_model_score", "held_out_reward"), "KL to the starting policy, nats": ("kl",),
    "length of a response": ("response_tokens", "reply_words"), "entropy, nats": ("entropy",),
    "share of clipped tokens": ("clip_share_low", "clip_share_high"), "share of responses": ("well_formed", "truncated"),
    "gradient norm": ("grad_norm",)}
SUPERVISED = {      # SFT and the reward model
    "loss, nats": ("loss", "held_out_loss"), "accuracy": ("accuracy", "held_out_accuracy", "longer_wins_accuracy"),
    "gradient norm": ("grad_norm",)}
NOW_AND_THEN = ("held_out_loss", "held_out_accuracy", "longer_wins_accuracy", "held_out_reward")    # points, not every step
STYLES = ("-", "--", ":")


@dataclass
class Plot:
    runs: list[str] = positional("run folders or their metrics.jsonl, of any trainer")
    window: int = option(10, "steps in the moving average (ours)")
    out: str = option("plot.png", "picture to write, ending in .png, .pdf or .svg; one that is there is replaced")


def matplotlib_pyplot():
    """matplotlib.pyplot, drawing to files only; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def read_metrics(path):
    """The rows of a run's metrics.jsonl. ValueError where a line has no step, as in a file of another kind."""
    rows = []
    for row, where in read_jsonl(path):
        check(isinstance(row.get("step"), int), f"{where}: has no \"step\"; the metrics.jsonl of a training run is needed")
        rows.append(row)
    return rows


def moving_average(values, window):
    """Mean of the numbers among the last `window` values, at each of them; None where the value itself is missing."""
    means = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - window + 1):i + 1] if v is not None]
        means.append(None if value is None else sum(near) / len(near))
    return means


def panels(rows):
    """A run's rows -> {title: {key: [value or None, one a row]}}, without what holds no number."""
    kind = GRPO if any("reward" in row for row in rows) else SUPERVISED
    numbers = {key: [finite(row.get(key)) for row in rows] for keys in kind.values() for key in keys}
    found = {title: {key: numbers[key] for key in keys if set(numbers[key]) != {None}} for title, keys in kind.items()}
    return {title: series for title, series in found.items() if series}


def finite(value):
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def draw(axes, steps, key, values, window, look):
    """One series: thin and thick lines, or joined points where it is measured now and then."""
    if key in NOW_AND_THEN:
        points = [(s, v) for s, v in zip(steps, values) if v is not None]
        axes.plot(*zip(*points), marker="o", markersize=4, linewidth=1, **look)
        return
    for line, thickness in ((values, {"linewidth": 0.7, "alpha": 0.4}),
                            (moving_average(values, window), {"linewidth": 1.8, "marker": ".", "markersize": 3})):
        axes.plot(steps, [math.nan if v is None else v for v in line], **look, **thickness)


def plot_runs(runs, path, window=10):
    """{name: rows of its metrics} -> an image file with the panels that they have -> their titles.

    Of one run, the colour tells the key; of several, the colour tells the run and the dashes the key.
    """
    pyplot = matplotlib_pyplot()
    check(pyplot, NO_MATPLOTLIB)
    found = {name: panels(rows) for name, rows in runs.items()}
    titles = list(dict.fromkeys(title for by_title in found.values() for title in by_title))
    check(titles, f"{', '.join(runs)}: the metrics hold no number to plot")
    width = min(3, len(titles))
    height = math.ceil(len(titles) / width)
    figure, grid = pyplot.subplots(height, width, figsize=(4.6 * width, 3.1 * height), squeeze=False, layout="constrained")
    for axes in grid.flat[len(titles):]:
        axes.remove()
    for title, axes in zip(titles, grid.flat):
        keys = list(dict.fromkeys(key for by_title in found.values() for key in by_title.get(title, ())))
        looks = {key: {"linestyle": STYLES[k]} if len(runs) > 1 else {"color": f"C{k}"} for k, key in enumerate(keys)}
        for r, (name, rows) in enumerate(runs.items()):
            for key, values in found[name].get(title, {}).items():
                draw(axes, [row["step"] for row in rows], key, values, window, {"color": f"C{r}", **looks[key]})
        if len(keys) > 1:
            handles = [pyplot.Line2D([], [], **{"color": "0.3", **looks[key]}) for key in keys]
            axes.legend(handles, keys, fontsize=8, frameon=False)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        if title.startswith("share"):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.legend([pyplot.Line2D([], [], color=f"C{r}") for r in range(len(runs))], [n.replace("$", r"\$") for n in runs],
                      loc="outside upper left", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return titles


def plot_metrics(args):
    """metrics.jsonl of runs as one picture: each step thin, their moving average thick."""
    out = Path(args.out)
    check(out.suffix in (".png", ".pdf", ".svg"), f"--out {out} must end in .png, .pdf or .svg")
    check(args.window >= 1, f"--window {args.window} must be at least 1")
    files = [in_run(run, "metrics.jsonl") for run in args.runs]
    runs = {str(f.parent if f.name == "metrics.jsonl" else f): read_metrics(f) for f in files}
    out.parent.mkdir(parents=True, exist_ok=True)
    titles = plot_runs(runs, out, args.window)
    print(f"wrote {out}: {'; '.join(titles)}")
