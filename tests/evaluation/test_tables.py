import json

import pytest

import evaluate
from escrag_min.evaluation.tables import (
    against_above,
    compare,
    judge,
    judge_table,
    ladder_rows,
    ladder_table,
    read_responses,
    summarise,
)
from escrag_min.judging import DEFAULT_METRICS, PERSPECTIVES
from escrag_min.writers.llm import ScriptedWriter

DIALOGUE = [{"role": "user", "content": "I can't sleep."}]


def responses(*replies, dialogues=None):
    return {f"r{i}": {"id": f"r{i}", "dialogue_id": (dialogues or range(len(replies)))[i], "prompt": DIALOGUE, "reply": reply}
            for i, reply in enumerate(replies)}


def judge_saying(*by_reply):
    """A scripted judge: (part of a reply, what it answers)."""
    def script(request):
        return next(answer for part, answer in by_reply if part in request.messages[-1]["content"])
    return ScriptedWriter(script)


def scored_json(value):
    return json.dumps({m.key: value for m in DEFAULT_METRICS})


def test_judging_by_hand_never_imputes_case55():
    writer = judge_saying(("good", scored_json(8)), ("poor", scored_json(4)), ("odd", "I would rather not."))
    scored = judge(responses("good", "poor", "odd", "", dialogues=["a", "a", "b", "c"]).values(), writer, None, DEFAULT_METRICS)
    assert [s["average"] for s in scored] == [8.0, 4.0, None, None]
    assert scored[2]["scores"]["problem_targeting"] is None and scored[2]["raw"]["Client"] == "I would rather not."
    assert scored[3]["raw"] == {}                                       # an empty reply is shown to nobody
    summary = summarise(scored, DEFAULT_METRICS)
    assert (summary["n"], summary["complete"], summary["failure_rate"], summary["average"]) == (4, 2, 0.5, 6.0)
    assert summary["perspectives"] == dict.fromkeys(PERSPECTIVES, 6.0) and summary["interval"] == (6.0, 6.0)   # one dialogue
    text = judge_table(summary)
    assert "2 of 4 responses have every score; 50.0% of the scores are missing" in text and "Client: Emotional Impact" in text


def test_nothing_readable_gives_a_table_without_numbers():
    summary = summarise(judge(responses("x").values(), judge_saying(("x", "?")), None, DEFAULT_METRICS), DEFAULT_METRICS)
    assert summary["average"] is None and summary["failure_rate"] == 1.0 and "  -" in judge_table(summary)


def test_compare_is_blind_and_in_both_orders_case56():
    seen = []

    def script(request):
        seen.append(request.messages[-1]["content"])
        text = request.messages[-1]["content"]
        return json.dumps({"better": "first" if text.index("good") < text.index("poor") else "second"})
    a, b = responses("good 0", "good 1", "only in a"), responses("poor 0", "poor 1")
    rows, summary = compare(a, b, ScriptedWriter(script), None)
    assert (summary["wins"], summary["ties"], summary["pairs"]) == (2, 0, 2)
    assert summary["left_out"] == "0 without a reply of A, 0 without one of B, 1 in one file only"
    assert rows[0] == {"id": "r0", "forward": "first", "backward": "second", "raw": ['{"better": "first"}', '{"better": "second"}']}
    assert seen[0].index("good 0") < seen[0].index("poor 0") and seen[1].index("poor 0") < seen[1].index("good 0")
    _, partial = compare(a, b, judge_saying(("", '{"better": "first"}')), None)         # always the first
    assert (partial["wins"], partial["ties"], partial["flip_rate"], partial["first_rate"]) == (0, 2, 1.0, 1.0)
    with pytest.raises(ValueError, match="share no context that both answer: 0 ids are in both, .* 4 in one file only"):
        compare(a, {"other": {**a["r0"], "id": "other"}}, ScriptedWriter(script), None)
    with pytest.raises(ValueError, match="1 ids are in both, 0 without a reply of A, 1 without one of B"):
        compare({"r0": a["r0"]}, {"r0": {**a["r0"], "reply": ""}}, ScriptedWriter(script), None)


def test_ladder_rows_are_the_papers():
    rows = ladder_rows({"base": "B", "sft": "S", "grpo": "G", "rag_grpo": "R"}, 3, [0, 2])
    assert rows == [("base", "B", 0), ("+ RAG", "B", 3), ("cold-start SFT", "S", 0), ("vanilla GRPO", "G", 0),
                    ("vanilla GRPO + RAG at inference", "G", 3), ("full: RAG-GRPO", "R", 3), ("full, n=0", "R", 0), ("full, n=2", "R", 2)]
    assert [r[0] for r in ladder_rows({"base": "", "sft": "S", "grpo": "", "rag_grpo": ""}, 3, [2])] == ["cold-start SFT"]


def test_each_row_against_the_one_above_by_hand():
    def scored(*values):
        return [{"id": i, "dialogue_id": i, "average": v} for i, v in enumerate(values)]
    first, second, third = against_above(["a", "b", "c"], {"a": scored(1.0, 2.0), "b": scored(3.0, 4.0), "c": scored(4.0, None)})
    assert first is None and (second["difference"], second["low"], second["high"]) == (2.0, 2.0, 2.0)
    assert (third["difference"], third["n"], third["missing"]) == (1.0, 1, 1)
    assert second["p_holm"] == pytest.approx(2 * second["p"])                           # two comparisons, Holm
    row = {"name": "a", "n_exemplars": 3, "against_above": second, "summary": {"average": 3.5, "interval": (3.0, 4.0), "complete": 2, "n": 5},
           "text": {"words": 12.4, "question_rate": 0.5, "early_advice_rate": None, "distinct_2": 0.9}}
    markdown = ladder_table([row], markdown=True)
    assert "| a | 3 | 2/5 | 3.50 | [3.00, 4.00] | +2.00 | [2.00, 2.00] | 2 | 1.000 | 12 | 0.50 | - | 0.90 |" in markdown
    assert "+2.00" in ladder_table([row])


def test_response_files_are_checked(tmp_path):
    def write(*records):
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, records)))
        return tmp_path / "r.jsonl"
    good = responses("x")["r0"]
    assert list(read_responses(write(good))) == ["r0"]
    with pytest.raises(ValueError, match="r.jsonl:1: a response needs 'reply'"):
        read_responses(write({k: v for k, v in good.items() if k != "reply"}))
    with pytest.raises(ValueError, match="r.jsonl:2: the id 'r0' is there twice"):
        read_responses(write(good, good))
    for key, value, words in (("reply", None, '"reply" must be text, found None'), ("id", ["x"], '"id" must be a string'),
                              ("prompt", "hello", '"prompt" must be a non-empty list of messages')):
        with pytest.raises(ValueError, match=f"r.jsonl:1: {words}"):
            read_responses(write({**good, key: value}))


SHORT = ("--limit", "4", "--max-new-tokens", "8", "--max-prompt", "1500")


def test_judge_compare_and_ladder_run_offline_and_resume(tiny, tiny_reward, tmp_path, capsys):
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in responses("You waited long?", "I know. You should rest.").values()))
    evaluate.main(["judge", "--responses", str(file), "--out", str(tmp_path / "judged"), "--all-metrics"])
    assert "average" in capsys.readouterr().out
    assert len((tmp_path / "judged/scores.jsonl").read_text().splitlines()) == 2
    evaluate.main(["compare", "--a", str(file), "--b", str(file), "--judge", f"rm:{tiny_reward}", "--out", str(tmp_path / "compared")])
    assert "A wins 0, ties 2, B wins 0" in capsys.readouterr().out
    ladder = ["ladder", "--base", str(tiny), "--rag-grpo", str(tiny), "--sweep", "0,2", "--out", str(tmp_path / "ladder"), *SHORT]
    evaluate.main(ladder)
    first = capsys.readouterr().out
    assert "rows of sft, grpo are left out" in first and "full: RAG-GRPO" in first and "full, n=2" in first
    before = {f.name: f.read_bytes() for f in (tmp_path / "ladder").iterdir()}
    (tmp_path / "ladder/ladder.json").unlink()
    evaluate.main(ladder)                                               # nothing is answered or judged again
    assert "responses," not in capsys.readouterr().out
    assert {f.name: f.read_bytes() for f in (tmp_path / "ladder").iterdir()} == before
    table = json.loads((tmp_path / "ladder/ladder.json").read_text())
    assert [r["n_exemplars"] for r in table["rows"]] == [0, 3, 3, 0, 2]
    with pytest.raises(ValueError, match="--sweep '0;2'"):
        evaluate.main(["ladder", "--base", str(tiny), "--sweep", "0;2"])
