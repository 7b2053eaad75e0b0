import numpy as np
import pytest

from escrag_min.encoder import TfidfEncoder, make_encoder, unit_rows
from escrag_min.retrieval import ExemplarIndex, open_index


class Table:
    """An encoder whose vectors are given: what the index does with any of them."""

    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts):
        return np.stack([np.asarray(self.vectors[t], dtype=np.float64) for t in texts])


def exemplar(name, dialogue="d"):
    return {"id": name, "dialogue_id": dialogue, "chosen": name, "rejected": "x", "prompt": [], "strategy": "Question"}


def test_cosine_not_inner_product_case54():
    index = ExemplarIndex.build([exemplar("short"), exemplar("long")], Table({"short": [0.1, 0], "long": [0.5, 0.5], "q": [1, 0]}))
    hits, = index.search(["q"], 2)
    assert [(h.exemplar["id"], round(h.score, 4)) for h in hits] == [("short", 1.0), ("long", 0.7071)]


def test_a_reply_given_against_several_others_is_one_exemplar():
    records = [{**exemplar("I hear you."), "rejected": r} for r in ("a", "b", "c")] + [{**exemplar("I hear you."), "prompt": ["else"]}]
    assert len(ExemplarIndex.build(records, TfidfEncoder()).exemplars) == 2
    with pytest.raises(ValueError, match="x1: its chosen reply is empty but for its reasoning"):
        ExemplarIndex.build([{**exemplar("x1"), "chosen": "<think>She is sad.</think>"}], TfidfEncoder())


def test_any_array_becomes_unit_rows_case54():
    double = np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2]
    assert not double.flags.c_contiguous
    for given in (double, double.astype(np.float32), np.asfortranarray(double)):
        rows = unit_rows(given)
        assert rows.dtype == np.float32 and rows.flags.c_contiguous and rows.shape == (3, 2)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-6)
    assert unit_rows([3.0, 4.0]).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
    assert unit_rows(np.zeros((1, 3))).tolist() == [[0.0, 0.0, 0.0]]


def test_a_zero_vector_finds_nothing_and_is_no_nan_case54():
    index = ExemplarIndex.build([exemplar("I hear you."), exemplar("Tell me more.")], TfidfEncoder())
    assert index.search(["", "zzz"], 2) == [[], []]


def test_the_own_dialogue_is_excluded_and_fewer_is_fine():
    names = ["a", "b", "c", "d"]
    index = ExemplarIndex.build([exemplar(n, "own" if n in "ab" else n) for n in names],
                                Table({"a": [1, 0], "b": [1, 0.1], "c": [1, 0.2], "d": [1, 0.3], "q": [1, 0]}))
    assert [h.exemplar["id"] for h in index.search(["q"], 2)[0]] == ["a", "b"]
    found = index.search(["q", "q"], 3, exclude_dialogues=["own", None])
    assert [[h.exemplar["id"] for h in hits] for hits in found] == [["c", "d"], ["a", "b", "c"]]
    assert index.search([], 3) == [] and index.search(["q"], 0) == [[]]


def test_save_and_load(tmp_path):
    records = [exemplar("I am sorry about your dog."), exemplar("What keeps you awake?"), exemplar("Your boss was unfair.")]
    index = ExemplarIndex.build(records, TfidfEncoder())
    index.save(tmp_path / "index")
    again = open_index(tmp_path / "index")
    for text in ("dog", "boss awake", "What about your boss?"):
        assert again.search([text], 3) == index.search([text], 3)
    assert "rejected" not in again.exemplars[0]
    (tmp_path / "index/exemplars.jsonl").write_text('{"id": "x", "dialogue_id": "d"}\n')
    with pytest.raises(ValueError, match="3 vectors, exemplars.jsonl 1 records"):
        open_index(tmp_path / "index")
    with pytest.raises(ValueError, match="no exemplars"):
        ExemplarIndex.build([], TfidfEncoder())


def test_reasoning_is_neither_searched_nor_shown():
    records = [{**exemplar("x"), "chosen": "<think>dog dog dog</think>What keeps you awake?"}, exemplar("Your dog was old.")]
    index = ExemplarIndex.build(records, TfidfEncoder())
    assert [h.exemplar["chosen"] for h in index.search(["dog"], 2)[0]] == ["Your dog was old."]
    assert index.exemplars[0]["chosen"] == "What keeps you awake?"


def test_a_saved_index_has_its_own_encoder(tmp_path):
    ExemplarIndex.build([exemplar("I hear you.")], TfidfEncoder()).save(tmp_path / "index")
    with pytest.raises(ValueError, match="--encoder some/encoder: .*index is a saved index, which has its own"):
        open_index(tmp_path / "index", "some/encoder")


def test_tfidf_by_hand():
    encoder = TfidfEncoder().fit(["a b", "a c"])
    # df: a 2, b 1, c 1 of n 2; idf(a) = 1 + ln(3/3) = 1, idf(b) = 1 + ln(3/2) = 1.405465
    assert list(encoder.index) == ["a", "b", "c"]
    vector = encoder.encode(["a a b"])[0]          # (1 + ln 2)·1 = 1.693147 and 1·1.405465, over their norm 2.200473
    np.testing.assert_allclose(vector, [0.769447, 0.638711, 0.0], rtol=1e-5)


def test_unknown_encoder_is_named():
    with pytest.raises(ValueError, match="--encoder 'word2vec'"):
        make_encoder("word2vec")
