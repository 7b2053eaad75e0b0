import pytest

from escrag_min.data import SAMPLES, read_records
from escrag_min.safety import crisis_signal


@pytest.mark.parametrize("text", [
    "I want to die.", "I keep thinking about killing myself", "Sometimes I don’t want to be here anymore.", "it's not worth living",
    "They'd be better off without me.", "I'd be easier if I just wasn't there in the morning", "I've been self-harming again",
    "he said he's going to kill me tonight", "I wish I was dead", "there's no point in going on",
    "I keep cutting myself", "I cut myself a lot lately", "I cut myself a few times", "He will kill me if I leave him",
    "he's going to kill me when he finds out", "He’ll kill me if I tell anyone", "they're gonna kill me",
    "i wanna die", "I'd be better off dead.", "I want to be dead", "I want to end it", "I have no reason to be alive",
    "I just want it all to end", "I've been cutting again"])
def test_crisis_signals(text):
    assert crisis_signal(text)


@pytest.mark.parametrize("text", [
    "This job is killing me.", "My mum will kill me if I fail.", "I was dying of embarrassment.", "I'm dead tired.",
    "I could die laughing", "I cut myself some slack", "I want to diet", "He died last year and I miss him.", "My back is killing me",
    "I never wake up on time.", "I cut myself a slice of bread", "I’m cutting myself off from sugar",
    "I want to end it with him.", "I've been cutting back on sugar", "I want it to be over, this exam"])
def test_idioms_are_no_signal(text):
    assert crisis_signal(text) is None


def test_every_crisis_dialogue_of_the_samples_is_flagged():
    said = {}
    for record in read_records(SAMPLES / "crisis.jsonl", "prompt", flagged=True):
        said[record["dialogue_id"]] = [m["content"] for m in record["prompt"] if m["role"] == "user"]
    assert len(said) == 6 and all(any(map(crisis_signal, lines)) for lines in said.values())


def test_sample_contexts_and_pairs_raise_no_flag():
    for name, kind in (("contexts", "prompt"), ("preferences", "preference")):
        flagged = [(r["id"], crisis_signal(m["content"])) for r in read_records(SAMPLES / f"{name}.jsonl", kind)
                   for m in r["prompt"] if m["role"] == "user" and crisis_signal(m["content"])]
        assert flagged == []
