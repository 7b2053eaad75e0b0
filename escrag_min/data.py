"""Records and their files: JSON lines in TRL's conversational formats, and ESConv as published.

    dialogue state   {"prompt": [messages]}                                          GRPO, evaluation
    demonstration    {"prompt": [messages], "completion": [one assistant message]}   cold start
    preference pair  {"prompt": [messages], "chosen": [...], "rejected": [...]}      reward model, exemplars

messages are {"role": "user"|"assistant"|"system", "content": str}; user = client, assistant = counselor. Other keys (id,
dialogue_id, emotion_type, problem_type, situation, stage, state, strategy, ...) ride beside. In memory completion, chosen
and rejected are plain strings. Whatever cannot be used is an error that names file and line (of a JSON list: the index). No
record is skipped but those flagged as risk, and how many these are is printed.
"""
import json
import os
import random
import re
from pathlib import Path

from escrag_min.runtime.args import check
from escrag_min.safety import crisis_signal

SAMPLES = Path(__file__).parent / "samples"
REPLIES = {"prompt": (), "demonstration": ("completion",), "preference": ("chosen", "rejected")}

# ESConv names eight strategies; the three stages of helping they usually belong to are ours (after Hill's exploration,
# comforting, action), since ESConv annotates no stage.
STAGE_OF_STRATEGY = {
    "Question": "Exploration", "Restatement or Paraphrasing": "Exploration",
    "Reflection of feelings": "Comforting", "Self-disclosure": "Comforting", "Affirmation and Reassurance": "Comforting",
    "Providing Suggestions": "Action", "Information": "Action", "Others": "Exploration",
}
STRATEGIES = tuple(STAGE_OF_STRATEGY)
STAGES = tuple(dict.fromkeys(STAGE_OF_STRATEGY.values()))       # each once, in the order of helping


def read_text(path):
    """A file's text, without a byte-order mark. What stands in the way is named."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; a JSON-lines file is expected") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None


def read_jsonl(path):
    """-> list of (object, "file:line"). A byte-order mark, CRLF and blank lines are fine."""
    path, records = Path(path), []
    text = read_text(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not a JSON object ({error.msg} at column {error.colno})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
        records.append((record, where))
    if not records:
        raise ValueError(f"{path}: holds no records")
    return records


def in_run(path, name):
    """A file, or the file of that name in a run folder."""
    return Path(path) / name if Path(path).is_dir() else Path(path)


def read_finished(path):
    """What a killed run wrote: its whole lines as objects, without a last line that was cut, be it inside a character."""
    content = Path(path).read_bytes() if Path(path).exists() else b""
    whole = content[:content.rfind(b"\n") + 1].decode("utf-8")
    return [json.loads(line) for line in whole.split("\n")[:-1]]


def write_jsonl(path, records, append=False):
    with open(path, "a" if append else "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def messages_of(value, where):
    """A list of messages, checked -> without other keys"""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a non-empty list of messages")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system") \
                or not isinstance(message.get("content"), str):
            raise ValueError(f'{where} must hold {{"role": "user"|"assistant"|"system", "content": text}}, found '
                             f"{json.dumps(message, ensure_ascii=False)[:80]}")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _reply(value, where):
    messages = messages_of(value, where)
    if len(messages) != 1 or messages[0]["role"] != "assistant" or not messages[0]["content"].strip():
        raise ValueError(f"{where} must be exactly one assistant message with text")
    return messages[0]["content"]


def _record(raw, where, kind):
    if kind == "preference" and "prompt" not in raw and all(isinstance(raw.get(k), list) for k in REPLIES[kind]):
        same = 0        # TRL's implicit prompt: both lists hold the whole conversation
        while same < min(len(raw["chosen"]), len(raw["rejected"])) and raw["chosen"][same] == raw["rejected"][same]:
            same += 1
        raw = {**raw, "prompt": raw["chosen"][:same], "chosen": raw["chosen"][same:], "rejected": raw["rejected"][same:]}
    for key in ("prompt", *REPLIES[kind]):
        if key not in raw:
            raise ValueError(f'{where}: a {kind} record needs "{key}"; this one has {", ".join(map(repr, raw))}')
    record = {**raw, "prompt": messages_of(raw["prompt"], f'{where}: "prompt"')}
    if record["prompt"][-1]["role"] != "user":
        raise ValueError(f'{where}: "prompt" must end with a user (client) message')
    for key in REPLIES[kind]:
        record[key] = _reply(raw[key], f'{where}: "{key}"')
    if record.get("id") is None:
        record["id"] = where
        if record.get("dialogue_id") is None:       # a file's own, however its path is written
            record["dialogue_id"] = str(Path(where).resolve())
    record["id"] = text_id(record, "id", where)
    record["dialogue_id"] = text_id(record, "id" if record.get("dialogue_id") is None else "dialogue_id", where)
    return record


def text_id(record, key, where):
    """An id as text: 7 in one file and "7" in another are the same."""
    if type(record[key]) not in (str, int):
        raise ValueError(f'{where}: "{key}" must be a string, found {json.dumps(record[key])[:80]}')
    return str(record[key])


def read_records(path, kind, limit=None, seed=0, flagged=False):
    """Records of one kind ("prompt", "demonstration", "preference") from a JSON-lines file, or made from an ESConv file.

    Any record with a "prompt" serves as a dialogue state. limit: so many, drawn at random with the seed; None: all.
    flagged: also those with a true "risk" (ESConv: where safety.py finds a crisis signal); else they are left out, and counted.
    """
    check(limit is None or limit >= 1, f"--limit {limit} must be at least 1")
    path = Path(path)
    if is_esconv(path):
        records = esconv_records(read_esconv(path), kind, seed)
    else:
        records = [_record(raw, where, kind) for raw, where in read_jsonl(path)]
    if not flagged:
        safe = [r for r in records if not r.get("risk")]
        if len(safe) < len(records) and os.environ.get("RANK", "0") == "0":     # under torchrun, rank 0 says it
            print(f"{path}: {len(records) - len(safe)} of {len(records)} records are flagged as risk and left out")
        if not safe:
            raise ValueError(f"{path}: every record is flagged as risk")
        records = safe
    if limit is not None and limit < len(records):
        keep = sorted(random.Random(seed).sample(range(len(records)), limit))
        records = [records[i] for i in keep]
    return records


def split_by_dialogue(records, held_out, seed=0):
    """-> (train, held-out) with whole dialogues on one side; held_out is the share of dialogues, at least one of them."""
    check(0 < held_out < 1, f"--held-out {held_out} must be between 0 and 1")
    dialogues = sorted({r["dialogue_id"] for r in records})
    if len(dialogues) < 2:
        raise ValueError(f"a held-out split needs at least 2 dialogues; these {len(records)} records come from one")
    chosen = set(random.Random(seed).sample(dialogues, min(max(1, round(held_out * len(dialogues))), len(dialogues) - 1)))
    return [r for r in records if r["dialogue_id"] not in chosen], [r for r in records if r["dialogue_id"] in chosen]


# --- ESConv (Liu et al., ACL 2021), by path: its licence is CC BY-NC, none of it is part of this project ---

SPEAKERS = {"seeker": "user", "usr": "user", "supporter": "assistant", "sys": "assistant"}


def is_esconv(path):
    """Whether a file is ESConv's own JSON (a list) or JSON lines, told by its first record."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            head = file.read(4096).lstrip()
    except (OSError, UnicodeDecodeError):
        return False        # read_jsonl says it better
    return head.startswith("[") or re.search(r'"dialog"\s*:', head.split("\n")[0]) is not None


def read_esconv(path):
    """-> list of {"dialogue_id", "emotion_type", "problem_type", "situation", "initial_intensity", "final_intensity",
    "messages": [{"role", "content", "strategies"}]}.

    Consecutive turns of one speaker are merged and keep all their strategies. Intensities are int 1-5, or None where the
    survey has none. Both published shapes: content + annotation with seeker/supporter, text + speaker usr/sys + strategy.
    A turn without text is an error.
    """
    path = Path(path)
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            raw = [(d, f"{path}: dialogue {i}") for i, d in enumerate(json.loads(text))]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
    else:
        raw = read_jsonl(path)
    dialogues = []
    for number, (d, where) in enumerate(raw):
        messages = []
        for i, turn in enumerate(_item(d, where).get("dialog") or ()):
            speaker = _item(turn, f"{where}, turn {i}").get("speaker")
            check(speaker in SPEAKERS, f"{where}: unknown speaker {speaker!r}; allowed: {', '.join(SPEAKERS)}")
            role, content = SPEAKERS[speaker], turn.get("text") or turn.get("content")
            check(isinstance(content, str) and content.strip(), f"{where}, turn {i}: has no text")
            content = content.strip()
            strategy = turn.get("strategy") or (turn.get("annotation") or {}).get("strategy")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += " " + content
            else:
                messages.append({"role": role, "content": content, "strategies": []})
            if strategy and role == "assistant" and strategy not in messages[-1]["strategies"]:
                messages[-1]["strategies"].append(strategy)
        if not messages:
            raise ValueError(f'{where}: has no "dialog" turns; a file that is one JSON list is read as ESConv, other records are '
                             "JSON lines")
        seeker = (d.get("survey_score") or {}).get("seeker") or {}
        dialogues.append({
            "dialogue_id": f"esconv-{path.stem}-{number:04d}", "emotion_type": d.get("emotion_type"),
            "problem_type": d.get("problem_type"), "situation": (d.get("situation") or "").strip(),
            "initial_intensity": _intensity(seeker, "initial_emotion_intensity", where),
            "final_intensity": _intensity(seeker, "final_emotion_intensity", where), "messages": messages})
    return dialogues


def _item(value, where):
    check(isinstance(value, dict), f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _intensity(seeker, key, where):
    """4 or "4" -> 4; missing or empty -> None"""
    value = seeker.get(key)
    check(not value or str(value).isdecimal(), f"{where}: {key} is {value!r}; allowed: a whole number")
    return int(value) if value else None


def esconv_records(dialogues, kind, seed=0):
    """ESConv dialogues -> records of one kind: one for each counselor turn that answers a client (an opening greeting does not).

    demonstration: the reasoning states what ESConv annotates (emotion, problem, strategy) and a stage derived from the
    strategy. preference: chosen is the human supporter's reply, rejected a reply of like length from *another* dialogue,
    a stand-in for judged pairs: it teaches fit to the dialogue, not quality of counseling.
    """
    records = []
    for d in dialogues:
        about = {k: v for k, v in d.items() if k != "messages"}
        for i, turn in enumerate(d["messages"]):
            if turn["role"] != "assistant" or i == 0:
                continue
            strategies = turn["strategies"] or ["Others"]
            record = {**about, "id": f"{d['dialogue_id']}-{i:02d}", "strategy": ", ".join(strategies),
                      "stage": STAGE_OF_STRATEGY.get(strategies[0], "Exploration"),
                      "prompt": [{"role": m["role"], "content": m["content"]} for m in d["messages"][:i]]}
            record["risk"] = any(crisis_signal(m["content"]) for m in record["prompt"] if m["role"] == "user")
            record["state"] = f"The client feels {d['emotion_type']} about {d['problem_type']}."
            if kind == "demonstration":
                record["completion"] = reasoned_reply(record, turn["content"])
            if kind == "preference":
                record["chosen"] = turn["content"]
            records.append(record)
    if kind == "preference":
        _reject_by_length(records, random.Random(seed))
    return records


def reasoned_reply(record, reply):
    """The policy's format: three lines of reasoning, then what the client sees."""
    return f"<think>Stage: {record['stage']}\nState: {record['state']}\nStrategy: {record['strategy']}</think>\n{reply}"


def _reject_by_length(records, rng, window=20):
    """Give each record a rejected reply: among the nearest in length, one drawn from another dialogue.

    Where the `window` nearest to either side are all of its own dialogue, twice as many are looked at, and so on.
    """
    order = sorted(range(len(records)), key=lambda i: (len(records[i]["chosen"]), i))
    for rank, i in enumerate(order):
        near, width = [], window
        while not near:
            near = [records[j] for j in order[max(0, rank - width):rank + width + 1]
                    if records[j]["dialogue_id"] != records[i]["dialogue_id"] and records[j]["chosen"] != records[i]["chosen"]]
            check(near or width < len(order),
                  f"{records[i]['id']}: pairs from ESConv need different replies from at least 2 dialogues")
            width *= 2
        records[i]["rejected"] = rng.choice(near)["chosen"]
