"""Which numbers of a run are drawn, what their average is, and that a picture comes out."""
import builtins
import json
import math
from types import SimpleNamespace

import pytest

import evaluate
from escrag_min.evaluation.plots import draw, moving_average, panels, plot_runs
from escrag_min.evaluation.tables import plot_ladder

GRPO = [{"step": s, "loss": 1e-8, "reward": s / 2, "reward_model_score": 1.0, "kl": None, "entropy": 1.5, "response_tokens": 40 + s,
         "reply_words": 20, "clip_share_low": 0.0, "clip_share_high": 0.1, "well_formed": 1.0, "truncated": 0.0, "grad_norm": 2.0,
         "held_out_reward": None} for s in (1, 2, 3)]
RM = [{"step": 1, "loss": 0.7, "accuracy": 0.5, "grad_norm": 1.0}, {"step": 2, "loss": 0.6, "accuracy": 0.5, "grad_norm": None},
      {"step": 3, "loss": 0.5, "accuracy": 1.0, "grad_norm": 1.0, "held_out_loss": 0.6, "held_out_accuracy": 0.75,
       "longer_wins_accuracy": 0.5}]
SFT = [{"step": 1, "loss": 3.0, "grad_norm": 1.0, "response_tokens": 900}]


def test_panels_are_those_of_the_run_that_hold_a_number():
    assert {title: list(series) for title, series in panels(GRPO).items()} == {
        "reward": ["reward", "reward_model_score"], "length of a response": ["response_tokens", "reply_words"],
        "share of clipped tokens": ["clip_share_low", "clip_share_high"], "entropy, nats": ["entropy"],
        "share of responses": ["well_formed", "truncated"], "gradient norm": ["grad_norm"]}      # no loss, and no KL: it is null
    assert list(panels([{**row, "kl": 0.1} for row in GRPO]))[1] == "KL to the starting policy, nats"
    assert {title: list(series) for title, series in panels(RM).items()} == {
        "loss, nats": ["loss", "held_out_loss"], "accuracy": ["accuracy", "held_out_accuracy", "longer_wins_accuracy"],
        "gradient norm": ["grad_norm"]}
    assert list(panels(SFT)) == ["loss, nats", "gradient norm"]     # its response_tokens are of a whole batch


def test_missing_null_and_not_finite_are_gaps():
    rows = [{"step": 1, "loss": 1.0}, {"step": 2}, {"step": 3, "loss": None}, {"step": 4, "loss": math.nan}, {"step": 5, "loss": "x"}]
    assert panels(rows) == {"loss, nats": {"loss": [1.0, None, None, None, None]}}


def test_moving_average_by_hand():
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_average([1.0, None, 5.0, 9.0], 3) == [1.0, None, 3.0, 7.0]       # of the numbers there are; a gap stays one
    assert moving_average([2.0, 4.0], 1) == [2.0, 4.0]


def test_what_is_drawn():
    lines = []
    axes = SimpleNamespace(plot=lambda x, y, **look: lines.append((list(x), list(y), look["linewidth"])))
    draw(axes, [1, 2, 3], "loss", [1.0, None, 3.0], 2, {})
    (_, thin, narrow), (_, thick, wide) = lines
    assert thin[0] == thick[0] == 1.0 and math.isnan(thin[1]) and math.isnan(thick[1]) and (thin[2], thick[2]) == (3.0, 3.0)
    assert narrow < wide
    draw(axes, [1, 2, 3], "held_out_loss", [None, 2.0, 4.0], 2, {})
    assert lines[2][:2] == ([2, 3], [2.0, 4.0]) and len(lines) == 3                 # measured now and then: its points, joined


def written(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_bad_files_and_options_are_refused(tmp_path):
    run = written(tmp_path / "run", SFT)
    for name, text, words in (("cut", '{"step": 1}\n{"step": 2, "lo', "cut.jsonl:2: not a JSON object"), ("empty", "\n", "holds no records"),
                              ("other", '{"id": "a"}\n', 'other.jsonl:1: has no "step"')):
        (tmp_path / f"{name}.jsonl").write_text(text)
        with pytest.raises(ValueError, match=words):
            evaluate.main(["plot", run, str(tmp_path / f"{name}.jsonl")])
    with pytest.raises(FileNotFoundError, match="metrics.jsonl: no such file"):
        evaluate.main(["plot", str(tmp_path)])
    with pytest.raises(ValueError, match="--out plot.txt must end in .png"):
        evaluate.main(["plot", run, "--out", "plot.txt"])
    with pytest.raises(ValueError, match="--window 0"):
        evaluate.main(["plot", run, "--window", "0"])


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="^no plot: pip install matplotlib to get one$"):
        evaluate.main(["plot", written(tmp_path / "run", SFT), "--out", str(tmp_path / "p.png")])
    assert plot_ladder([], tmp_path / "l.png") == "\nno plot: pip install matplotlib to get one" and not list(tmp_path.glob("*.png"))


def test_a_picture_of_one_run_and_of_several(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install matplotlib")
    runs = [written(tmp_path / name, rows) for name, rows in (("grpo", GRPO), ("rm$", RM), ("sft", SFT))]
    for i, chosen in enumerate((runs, [f"{runs[1]}/metrics.jsonl"])):
        out = tmp_path / f"new/{i}.png"
        evaluate.main(["plot", *chosen, "--out", str(out)])
        assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and f"wrote {out}: " in capsys.readouterr().out
    assert plot_runs({"a": SFT, "b": SFT}, tmp_path / "two.png") == ["loss, nats", "gradient norm"]
    with pytest.raises(ValueError, match="a: the metrics hold no number to plot"):
        plot_runs({"a": [{"step": 1}]}, tmp_path / "none.png")


def test_the_ladder_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install matplotlib")
    row = {"name": "base", "summary": {"average": 7.0, "interval": (6.5, 7.5)}}
    assert plot_ladder([row, {"name": "none", "summary": {"average": None}}], tmp_path / "l.png") == f"\nplot: {tmp_path / 'l.png'}"
    assert (tmp_path / "l.png").stat().st_size > 1000
