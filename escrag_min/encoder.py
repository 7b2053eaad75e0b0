"""Text -> unit vector, for retrieval. Here: TF-IDF, which needs no download. In bert.py: BERT-family sentence encoders.

    v_w = (1 + log tf_w) · (1 + log((1 + n) / (1 + df_w))),   then v / |v|

tf_w how often word w is in the text, df_w how many of the n corpus texts hold it. A text without a known word is the zero
vector: similar to nothing, and no NaN. An encoder is anything with encode(texts) -> float32[n, dim] of unit (or zero) rows,
to_json() and, where it learns from the corpus, fit(texts) -> itself; the paper names no encoder, so the default is ours.
"""
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from escrag_min.model.bert import BertEncoder
from escrag_min.model.checkpoint import resolve


class TfidfEncoder:
    def __init__(self, vocabulary=(), idf=(), max_words=4096):
        self.index = {word: i for i, word in enumerate(vocabulary)}
        self.idf = np.asarray(idf, dtype=np.float32)
        self.max_words = max_words

    @staticmethod
    def words(text):
        return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower().replace("’", "'"))

    def fit(self, texts):
        """Take the max_words most frequent words of the corpus."""
        df = Counter(word for text in texts for word in set(self.words(text)))
        vocabulary = sorted(df, key=lambda w: (-df[w], w))[:self.max_words]
        self.__init__(vocabulary, [1 + math.log((1 + len(texts)) / (1 + df[w])) for w in vocabulary], self.max_words)
        return self

    def encode(self, texts):
        """list of n texts -> float32[n, words], rows of length 1, or 0 where no word is known"""
        vectors = np.zeros((len(texts), len(self.index)), dtype=np.float32)
        for row, text in zip(vectors, texts):
            for word, count in Counter(self.words(text)).items():
                if word in self.index:
                    i = self.index[word]
                    row[i] = (1 + math.log(count)) * self.idf[i]
        return unit_rows(vectors)

    def to_json(self):
        return {"kind": "tfidf", "vocabulary": list(self.index), "idf": self.idf.tolist(), "max_words": self.max_words}


def unit_rows(vectors):
    """Rows of any float array [n,d], or one vector [d] -> contiguous float32[n,d] of length 1; zero rows stay zero."""
    vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(norm > 0, norm, 1.0), dtype=np.float32)


def make_encoder(name):
    """The --encoder option -> a new encoder: "tfidf", or a folder or Hub id of a BERT-family sentence encoder."""
    if name == "tfidf":
        return TfidfEncoder()
    try:
        folder = resolve(name)
    except FileNotFoundError as error:
        raise ValueError(f"--encoder {name!r}: neither 'tfidf' nor a sentence encoder of the BERT family ({error})") from None
    return BertEncoder.from_pretrained(folder)


def encoder_from_json(value):
    """The encoder whose to_json() this is; of a BERT only folder and fingerprint were saved, so the folder must be as it was."""
    kind = value.get("kind")
    if kind == "tfidf":
        return TfidfEncoder(value["vocabulary"], value["idf"], value["max_words"])
    if kind != "bert":
        raise ValueError(f"encoder of kind {kind!r}; only 'tfidf' and 'bert' are known")
    folder = value["folder"]
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: the encoder this index was built with is gone; put it back, or build the index again")
    encoder = BertEncoder.from_pretrained(folder)
    if encoder.fingerprint != value["fingerprint"]:
        raise ValueError(f"{folder}: its weights, tokenizer or settings have changed since this index was built with it; "
                         "build the index again")
    return encoder
