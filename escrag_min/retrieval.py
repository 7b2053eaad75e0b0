"""The exemplar index (paper §3, D): preferred replies, found by similarity to the initial response.

    exemplars(y₀) = the k preferred replies e with the largest  φ(y₀) · φ(e)

φ an encoder of unit vectors, so the inner product is the cosine. Exact search (FAISS IndexFlatIP): no approximation to
explain. Replies from the dialogue being answered are excluded: they would hand the policy the answer.

A saved index holds index.faiss, exemplars.jsonl, encoder.json, and meta.json: what it was built from, as fingerprints.
"""
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import faiss

from escrag_min.chat import split_think
from escrag_min.data import read_jsonl, read_records, write_jsonl
from escrag_min.encoder import encoder_from_json, make_encoder, unit_rows
from escrag_min.model.checkpoint import atomic_folder, read_json, write_json
from escrag_min.runtime.args import check
from escrag_min.runtime.distributed import say


@dataclass
class Hit:
    exemplar: dict      # {"id", "dialogue_id", "prompt", "chosen", "strategy"}
    score: float        # cosine similarity to the query


class ExemplarIndex:
    """exemplars: preference records, of which "chosen" is indexed; "prompt" and "strategy" travel along."""

    def __init__(self, exemplars, encoder, index):
        self.exemplars, self.encoder, self.index = exemplars, encoder, index
        self.per_dialogue = Counter(e["dialogue_id"] for e in exemplars)

    @classmethod
    def build(cls, exemplars, encoder):
        """Fit the encoder on the replies and index them."""
        if not exemplars:
            raise ValueError("ExemplarIndex.build: no exemplars")
        exemplars = kept(exemplars)
        vectors = unit_rows(fitted(encoder, exemplars).encode([e["chosen"] for e in exemplars]))
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(exemplars, encoder, index)

    def search(self, texts, k, exclude_dialogues=None):
        """The k nearest exemplars of each text, best first; fewer where the corpus has fewer that share anything.

        exclude_dialogues: a dialogue_id (or None) for each text, whose exemplars are left out.
        """
        if not texts or k < 1:
            return [[] for _ in texts]
        excluded = exclude_dialogues or [None] * len(texts)
        wanted = min(k + max(self.per_dialogue[d] for d in excluded), len(self.exemplars))
        scores, rows = self.index.search(unit_rows(self.encoder.encode(texts)), wanted)      # [texts,wanted] each
        hits = []
        for row_scores, row, dialogue in zip(scores, rows, excluded):
            found = [Hit(self.exemplars[i], float(s)) for s, i in zip(row_scores, row)
                     if i >= 0 and s > 0 and (dialogue is None or self.exemplars[i]["dialogue_id"] != dialogue)]
            hits.append(found[:k])
        return hits

    def save(self, path):
        with atomic_folder(path) as folder:
            faiss.write_index(self.index, str(folder / "index.faiss"))
            write_jsonl(folder / "exemplars.jsonl", self.exemplars)
            (folder / "encoder.json").write_text(json.dumps(self.encoder.to_json()), "utf-8")
            write_json(folder / "meta.json", fingerprints(self.exemplars, self.encoder))

    @classmethod
    def load(cls, path, encoder=None):
        """encoder: the one the index was built with, where it is at hand; None: made again from encoder.json."""
        path = Path(path)
        exemplars = [record for record, _ in read_jsonl(path / "exemplars.jsonl")]
        index = faiss.read_index(str(path / "index.faiss"))
        if index.ntotal != len(exemplars):
            raise ValueError(f"{path}: index.faiss holds {index.ntotal} vectors, exemplars.jsonl {len(exemplars)} records")
        return cls(exemplars, encoder or encoder_from_json(read_json(path / "encoder.json")), index)


def kept(exemplars):
    """What an index keeps of preference records: the chosen reply as a client would see it, without any reasoning. A reply that
    stands there several times, against several rejected ones, is kept once."""
    found = {}
    for e in exemplars:
        reply = split_think(e["chosen"])[1]
        check(reply, f"{e['id']}: its chosen reply is empty but for its reasoning; an exemplar needs one")
        found.setdefault((json.dumps(e["prompt"]), reply), {
            **{k: e[k] for k in ("id", "dialogue_id", "prompt", "strategy") if k in e}, "chosen": reply})
    return list(found.values())


def fitted(encoder, exemplars):
    """The encoder, after it has seen the replies where it learns from them."""
    return encoder.fit([e["chosen"] for e in exemplars]) if hasattr(encoder, "fit") else encoder


def fingerprints(exemplars, encoder):
    """-> {"corpus", "encoder"}: SHA-256 of an index's exemplars (kept), and of its (fitted) encoder's JSON."""
    return {name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            for name, value in (("corpus", exemplars), ("encoder", encoder.to_json()))}


def open_index(path, encoder="tfidf", cache=None):
    """The --exemplars and --encoder options: a saved index folder, or an index built over a file of preference records.

    cache: a folder where the built index is saved, and found again while the same exemplars and encoder are asked for;
    an index of others that stands there is replaced.
    """
    if Path(path).is_dir():
        check(encoder == "tfidf", f"--encoder {encoder}: {path} is a saved index, which has its own")
        return ExemplarIndex.load(path)
    records, encoder = read_records(path, "preference"), make_encoder(encoder)
    exemplars = kept(records)
    if len(exemplars) < len(records):
        say(f"{path}: {len(records)} records hold {len(exemplars)} different exemplars")
    meta = Path(cache or "") / "meta.json"
    if cache and meta.exists() and read_json(meta) == fingerprints(exemplars, fitted(encoder, exemplars)):
        return ExemplarIndex.load(cache, encoder)
    index = ExemplarIndex.build(exemplars, encoder)
    if cache:
        index.save(cache)
    return index
