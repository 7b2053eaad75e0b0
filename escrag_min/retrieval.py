"""The exemplar index (paper §3, D): preferred replies, found by similarity to the initial response.

    exemplars(y₀) = the k preferred replies e with the largest  φ(y₀) · φ(e)

φ an encoder of unit vectors, so the inner product is the cosine. Exact search (FAISS IndexFlatIP): no approximation to
explain. Replies from the dialogue being answered are excluded: they would hand the policy the answer.
"""
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import faiss

from escrag_min.checkpoint import atomic_folder, read_json
from escrag_min.data import read_jsonl, read_records, write_jsonl
from escrag_min.encoder import encoder_from_json, make_encoder, unit_rows


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
        replies = [e["chosen"] for e in exemplars]
        if hasattr(encoder, "fit"):
            encoder.fit(replies)
        vectors = unit_rows(encoder.encode(replies))
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        kept = [{k: e[k] for k in ("id", "dialogue_id", "prompt", "chosen", "strategy") if k in e} for e in exemplars]
        return cls(kept, encoder, index)

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

    @classmethod
    def load(cls, path):
        path = Path(path)
        exemplars = [record for record, _ in read_jsonl(path / "exemplars.jsonl")]
        index = faiss.read_index(str(path / "index.faiss"))
        if index.ntotal != len(exemplars):
            raise ValueError(f"{path}: index.faiss holds {index.ntotal} vectors, exemplars.jsonl {len(exemplars)} records")
        return cls(exemplars, encoder_from_json(read_json(path / "encoder.json")), index)


def open_index(path, encoder="tfidf"):
    """The --exemplars and --encoder options: a saved index folder, or an index built over a file of preference records."""
    if Path(path).is_dir():
        return ExemplarIndex.load(path)
    return ExemplarIndex.build(read_records(path, "preference"), make_encoder(encoder))
