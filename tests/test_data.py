import json
from collections import Counter

import pytest

from escrag_min.chat import split_think
from escrag_min.data import (
    SAMPLES,
    esconv_records,
    read_esconv,
    read_finished,
    read_jsonl,
    read_records,
    split_by_dialogue,
    write_jsonl,
)

HI = [{"role": "user", "content": "hi"}]


def test_byte_order_mark_crlf_and_blank_line_case59(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xe2\x80\xa8"}\r\n')      # U+2028 inside a string is no line end
    assert [r for r, _ in read_jsonl(file)] == [{"a": 1}, {"a": "\u2028"}]
    assert read_jsonl(file)[1][1] == f"{file}:3"


@pytest.mark.parametrize("content, words", [
    ('{"a": 1}\n{"a": \n', "bad.jsonl:2: not a JSON object"), ("[1]\n", "bad.jsonl:1: expected a JSON object, found list"),
    ("\n\n", "holds no records"), ("", "holds no records")])
def test_bad_lines_name_file_and_line_case59(tmp_path, content, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_jsonl(file)
    with pytest.raises(FileNotFoundError, match="none.jsonl: no such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_what_a_killed_run_wrote_is_read_up_to_any_byte_of_its_last_line(tmp_path):
    file = tmp_path / "a.jsonl"
    assert read_finished(file) == []
    write_jsonl(file, [{"a": "“é”\u2028"}, {"a": "“é”"}])
    whole = file.read_bytes()
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        assert read_finished(file) == [{"a": "“é”\u2028"}, {"a": "“é”"}][:whole[:size].count(b"\n")]


def write(tmp_path, *records):
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in records))
    return file


@pytest.mark.parametrize("record, kind, words", [
    ({"text": "x"}, "prompt", "needs \"prompt\"; this one has 'text'"), ({"prompt": "hi"}, "prompt", "non-empty list"),
    ({"prompt": [{"role": "human", "content": "x"}]}, "prompt", "must hold"),
    ({"prompt": HI + [{"role": "assistant", "content": "x"}]}, "prompt", "must end with a user"),
    ({"prompt": HI, "completion": [{"role": "assistant", "content": " "}]}, "demonstration", "one assistant message with text"),
    ({"prompt": HI, "completion": HI}, "demonstration", "one assistant message"),
    ({"prompt": HI, "chosen": [{"role": "assistant", "content": "x"}]}, "preference", 'needs "rejected"')])
def test_unusable_records_are_named(tmp_path, record, kind, words):
    with pytest.raises(ValueError, match="records.jsonl:1.*" + words):
        read_records(write(tmp_path, record), kind)


def test_trl_formats_explicit_and_implicit_prompt(tmp_path):
    yes, no = ([{"role": "assistant", "content": c}] for c in ("yes", "no"))
    explicit, implicit = {"prompt": HI, "chosen": yes, "rejected": no}, {"chosen": HI + yes, "rejected": HI + no}
    first, second = read_records(write(tmp_path, explicit, implicit), "preference")
    for record in (first, second):
        assert (record["prompt"], record["chosen"], record["rejected"]) == (HI, "yes", "no")
    assert first["dialogue_id"] != second["dialogue_id"]
    assert len(read_records(tmp_path / "records.jsonl", "preference", limit=1)) == 1


def test_a_dialogue_id_is_text_or_made_so(tmp_path):
    named, numbered, without, unnamed = ({"prompt": HI, "id": 7, "dialogue_id": d} for d in ("d", 12, None, None))
    unnamed["id"] = None
    records = read_records(write(tmp_path, named, numbered, without, unnamed), "prompt")
    file = tmp_path / "records.jsonl"
    assert [r["dialogue_id"] for r in records] == ["d", "12", "7", f"{file.resolve()}:4"] and records[3]["id"] == f"{file}:4"
    for wrong in (1.5, True, ["d"], {}):
        with pytest.raises(ValueError, match='records.jsonl:2: "dialogue_id" must be a string, found'):
            read_records(write(tmp_path, named, {**named, "dialogue_id": wrong}), "prompt")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_named(limit):
    with pytest.raises(ValueError, match=f"--limit {limit} must be at least 1"):
        read_records(SAMPLES / "contexts.jsonl", "prompt", limit)


def test_what_reading_says_is_said_once_under_torchrun(capsys, monkeypatch, tmp_path):
    file = write(tmp_path, {"prompt": HI, "risk": True}, {"prompt": HI})
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert len(read_records(file, "prompt")) == 1 and capsys.readouterr().out.count("flagged as risk") == times


def test_flagged_records_are_left_out_and_counted(tmp_path, capsys):
    file = write(tmp_path, {"prompt": HI, "risk": True}, {"prompt": HI, "risk": False}, {"prompt": HI})
    assert len(read_records(file, "prompt")) == 2 and "1 of 3 records are flagged as risk" in capsys.readouterr().out
    assert len(read_records(file, "prompt", flagged=True)) == 3
    with pytest.raises(ValueError, match="every record is flagged"):
        read_records(SAMPLES / "crisis.jsonl", "demonstration")


def test_whole_dialogues_are_held_out():
    records = [{"dialogue_id": f"d{i // 3}"} for i in range(30)]
    train, held_out = split_by_dialogue(records, 0.2)
    assert len({r["dialogue_id"] for r in held_out}) == 2
    assert not {r["dialogue_id"] for r in train} & {r["dialogue_id"] for r in held_out} and len(train) + len(held_out) == 30
    assert split_by_dialogue(records, 0.2) == (train, held_out)
    with pytest.raises(ValueError, match="at least 2 dialogues"):
        split_by_dialogue(records[:3], 0.2)
    for share in (0, 1, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"--held-out {share} must be between 0 and 1"):
            split_by_dialogue(records, share)


def dialogue(*turns, **more):
    return {"emotion_type": "sadness", "problem_type": "a move", "situation": "s", "dialog": list(turns), **more}


PAPER = dialogue({"speaker": "seeker", "content": "a", "annotation": {}}, {"speaker": "seeker", "content": "b", "annotation": {}},
                 {"speaker": "supporter", "content": "c", "annotation": {"strategy": "Question"}},
                 {"speaker": "supporter", "content": "d", "annotation": {"strategy": "Information"}},
                 survey_score={"seeker": {"initial_emotion_intensity": "4", "final_emotion_intensity": "2"}})
SPLIT = dialogue({"speaker": "usr", "text": "a"}, {"speaker": "usr", "text": "b"}, {"speaker": "sys", "text": "c", "strategy": "Question"},
                 {"speaker": "sys", "text": "d", "strategy": "Information"}, survey_score={"seeker": {"initial_emotion_intensity": "4"}})


@pytest.mark.parametrize("as_list", [True, False])
def test_esconv_turns_are_merged_in_both_shapes_case58(tmp_path, as_list):
    file = tmp_path / "e.json"
    file.write_text(json.dumps([PAPER, SPLIT]) if as_list else "\n".join(map(json.dumps, (PAPER, SPLIT))))
    first, second = read_esconv(file)
    assert first["messages"] == second["messages"] == [
        {"role": "user", "content": "a b", "strategies": []},
        {"role": "assistant", "content": "c d", "strategies": ["Question", "Information"]}]
    assert (first["initial_intensity"], first["final_intensity"]) == (4, 2)
    assert (second["initial_intensity"], second["final_intensity"]) == (4, None)
    record, = esconv_records([first], "demonstration")
    assert split_think(record["completion"]) == (
        "Stage: Exploration\nState: The client feels sadness about a move.\nStrategy: Question, Information", "c d", True)


def test_esconv_unknown_role_is_an_error_case58(tmp_path):
    file = tmp_path / "e.jsonl"
    file.write_text(json.dumps(SPLIT) + "\n" + json.dumps(dialogue({"speaker": "robot", "text": "a"})))
    with pytest.raises(ValueError, match="e.jsonl:2: unknown speaker 'robot'"):
        read_esconv(file)


@pytest.mark.parametrize("found, words", [
    (["a"], "e.json: dialogue 1: expected a JSON object, found list"),
    (dialogue("hi"), "e.json: dialogue 1, turn 0: expected a JSON object, found str"),
    (dialogue({"speaker": "usr", "text": "a"}, {"speaker": "sys", "text": " "}), "e.json: dialogue 1, turn 1: has no text"),
    ({**SPLIT, "survey_score": {"seeker": {"final_emotion_intensity": "low"}}},
     "e.json: dialogue 1: final_emotion_intensity is 'low'; allowed: a whole number"),
    ({**SPLIT, "survey_score": {"seeker": {"initial_emotion_intensity": 2.5}}}, "dialogue 1: initial_emotion_intensity is 2.5")])
def test_esconv_errors_name_file_and_index(tmp_path, found, words):
    file = tmp_path / "e.json"
    file.write_text(json.dumps([SPLIT, found]))
    with pytest.raises(ValueError, match=words):
        read_esconv(file)


def test_the_published_split_case58(esconv):
    dialogues = {name: read_esconv(esconv / f"{name}.jsonl") for name in ("train", "valid", "test")}
    assert [len(d) for d in dialogues.values()] == [910, 195, 195]
    every = sum(dialogues.values(), [])
    assert sum(d["final_intensity"] is None for d in every) == 150
    assert sum(d["messages"][0]["role"] == "assistant" for d in every) == 683
    for d in every:
        assert all(a["role"] != b["role"] for a, b in zip(d["messages"], d["messages"][1:]))
    pairs = read_records(esconv / "test.jsonl", "preference")
    assert pairs == read_records(esconv / "test.jsonl", "preference")
    lengths = [(len(r["chosen"]), len(r["rejected"])) for r in pairs]
    assert sum(a > b for a, b in lengths) == pytest.approx(sum(a < b for a, b in lengths), rel=0.1)
    assert sum(abs(a - b) for a, b in lengths) / sum(a for a, _ in lengths) < 0.05


def test_pairs_from_esconv_reject_another_dialogues_reply(tmp_path):
    file = tmp_path / "e.jsonl"
    file.write_text(json.dumps(SPLIT) + "\n" + json.dumps(dialogue({"speaker": "usr", "text": "x"}, {"speaker": "sys", "text": "yz"})))
    first, second = read_records(file, "preference")
    assert (first["chosen"], first["rejected"], second["chosen"], second["rejected"]) == ("c d", "yz", "yz", "c d")


def test_pairs_from_esconv_look_further_where_all_of_like_length_are_the_own_dialogues(tmp_path):
    def talk(reply):
        return dialogue(*(turn for i in range(60) for turn in ({"speaker": "usr", "text": "x"},
                                                               {"speaker": "sys", "text": f"{reply} {i:02d}"})))
    file = tmp_path / "e.jsonl"
    file.write_text(json.dumps(talk("hm")) + "\n" + json.dumps(talk("a longer reply")))
    pairs = read_records(file, "preference")
    assert len(pairs) == 120 and all(r["chosen"][:2] != r["rejected"][:2] for r in pairs)
    file.write_text(json.dumps(talk("hm")))
    with pytest.raises(ValueError, match="esconv-e-0000-01: pairs from ESConv need different replies from at least 2 dialogues"):
        read_records(file, "preference")


# --- the built-in samples ---

def test_samples_have_enough_of_everything_and_no_overlap():
    situations = [r for r, _ in read_jsonl(SAMPLES / "situations.jsonl")]
    demonstrations = read_records(SAMPLES / "demonstrations.jsonl", "demonstration")
    pairs = read_records(SAMPLES / "preferences.jsonl", "preference")
    contexts = read_records(SAMPLES / "contexts.jsonl", "prompt")
    assert len(situations) >= 60 and len(demonstrations) >= 150 and len(pairs) >= 300 and len(contexts) >= 60
    assert len({s["problem_type"] for s in situations}) >= 10
    assert all({"id", "emotion_type", "problem_type", "situation", "initial_intensity"} <= s.keys()
               and 1 <= s["initial_intensity"] <= 5 for s in situations)
    assert not {c["situation"] for c in contexts} & {p["situation"] for p in pairs + demonstrations}
    flagged = {s["id"] for s in situations if s["risk"]}
    assert flagged and not flagged & {r["dialogue_id"] for r in pairs + demonstrations + contexts}
    for records in (situations, demonstrations, pairs, contexts):
        assert len({r["id"] for r in records}) == len(records)


def test_samples_alternate_speakers_and_are_well_formed():
    for name, kind in (("demonstrations", "demonstration"), ("preferences", "preference"), ("contexts", "prompt")):
        for record in read_records(SAMPLES / f"{name}.jsonl", kind):
            roles = [m["role"] for m in record["prompt"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], record["id"]
    for record in read_records(SAMPLES / "demonstrations.jsonl", "demonstration"):
        reasoning, _, well_formed = split_think(record["completion"])
        assert well_formed and [line.split(":")[0] for line in reasoning.split("\n")] == ["Stage", "State", "Strategy"]


def test_sample_pairs_are_matched_in_length_and_fail_in_different_ways():
    pairs = read_records(SAMPLES / "preferences.jsonl", "preference")
    words = [(len(r["chosen"].split()), len(r["rejected"].split())) for r in pairs]
    assert all(max(a, b) <= 1.2 * min(a, b) for a, b in words)
    assert 0.4 <= sum(a > b for a, b in words) / len(words) <= 0.6
    ends = [[r[k].rstrip('"’”').endswith("?") for r in pairs] for k in ("chosen", "rejected")]
    assert abs(sum(ends[0]) - sum(ends[1])) < 0.05 * len(pairs)          # a question mark tells nothing
    failures = Counter(r["failure"] for r in pairs)
    assert len(failures) == 7 and min(failures.values()) >= 20
    for key in ("chosen", "rejected"):
        assert len({r[key] for r in pairs}) == len(pairs)
