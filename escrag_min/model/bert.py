"""BERT (arXiv 1810.04805) as a sentence encoder (arXiv 1908.10084), for retrieval: MiniLM, BGE and their kin.

    x = LayerNorm(E_word[w_t] + E_position[t] + E_type[0])
    x = LayerNorm(x + W_o · Attention(W_q x + b_q, W_k x + b_k, W_v x + b_v) + b_o)      every token sees every token
    x = LayerNorm(x + W_2 · GELU(W_1 x + b_1) + b_2)                                     (both lines once a layer)
    φ = Σ_t m_t x_t / Σ_t m_t  (mean)   or   x_0  (cls),   then φ / |φ|

w_t token t of "[CLS] text [SEP]"; m_t 1 for a token of the text, 0 for padding. Pooling and length come from the folder's
sentence-transformers files; φ is normalised also where the folder does not ask for it, since retrieval compares cosines.
Prompts a folder may name for queries are not used: query and corpus are both replies. Parameter names are those of the
published checkpoints. Shapes: B texts, T tokens, H hidden, A heads, D = H/A.
"""
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

from escrag_min.model.checkpoint import fill, read_json, resolve, weight_files

POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}     # a folder's words -> ours
UNUSED = ("pooler.", "cls.", "embeddings.position_ids")     # heads of pre-training, and a buffer that is 0, 1, 2, ...


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


def read_config(folder):
    """config.json of a BERT folder -> Config. Refused, because it would be computed wrong: another model_type, activation
    or kind of positions."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    for key, allowed, default in (("model_type", "bert", None), ("hidden_act", "gelu", "gelu"),
                                  ("position_embedding_type", "absolute", "absolute")):
        if raw.get(key, default) != allowed:
            raise ValueError(f"{path}: {key} is {raw.get(key)!r}; only {allowed!r} is supported for a sentence encoder")
    for f in fields(Config):
        if f.name not in raw:
            raise ValueError(f"{path}: {f.name!r} is missing")
    return Config(**{f.name: raw[f.name] for f in fields(Config)})


def read_pooling(folder):
    """"mean" or "cls", as the folder's sentence-transformers files say; "mean" where it has none, as that library does."""
    path = folder / "modules.json"
    if not path.exists():
        return "mean"
    try:
        modules = json.loads(path.read_text("utf-8"))
        kinds = [m["type"].rpartition(".")[2] for m in modules]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: not a list of sentence-transformers modules") from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(f"{path}: modules {', '.join(kinds)} are not supported; only Transformer, Pooling, Normalize")
    path = folder / modules[1].get("path", "1_Pooling") / "config.json"
    modes = [key for key, value in read_json(path).items() if key.startswith("pooling_mode") and value]
    if len(modes) != 1 or modes[0] not in POOLING:
        raise ValueError(f"{path}: pooling {' + '.join(modes) or 'of no kind'} is not supported; only one of "
                         f"{', '.join(POOLING)}")
    return POOLING[modes[0]]


def dense_and_norm(size, config):
    return nn.ModuleDict({"dense": nn.Linear(size, config.hidden_size),
                          "LayerNorm": nn.LayerNorm(config.hidden_size, config.layer_norm_eps)})


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_attention_heads
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(c.hidden_size, c.hidden_size) for name in ("query", "key", "value")}),
            "output": dense_and_norm(c.hidden_size, c)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(c.hidden_size, c.intermediate_size)})
        self.output = dense_and_norm(c.intermediate_size, c)

    def forward(self, x, mask):
        b, t, h = x.shape
        q, k, v = (self.attention["self"][name](x).view(b, t, self.heads, h // self.heads).transpose(1, 2)   # [B,A,T,D]
                   for name in ("query", "key", "value"))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, h)      # [B,T,H]
        out = self.attention["output"]
        x = out["LayerNorm"](x + out["dense"](seen))
        return self.output["LayerNorm"](x + self.output["dense"](F.gelu(self.intermediate["dense"](x))))


class Bert(nn.Module):
    """Token ids to final hidden states: BERT without the heads of its pre-training."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(config.vocab_size, config.hidden_size),
            "position_embeddings": nn.Embedding(config.max_position_embeddings, config.hidden_size),
            "token_type_embeddings": nn.Embedding(config.type_vocab_size, config.hidden_size),
            "LayerNorm": nn.LayerNorm(config.hidden_size, config.layer_norm_eps)})
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))})

    def forward(self, tokens, mask):
        """tokens int64[B,T], mask bool[B,T] (False = padding) -> hidden [B,T,H]; rows of padding mean nothing."""
        e = self.embeddings
        x = e["word_embeddings"](tokens) + e["position_embeddings"].weight[:tokens.shape[1]] \
            + e["token_type_embeddings"].weight[0]
        x = e["LayerNorm"](x)                                                    # [B,T,H]
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])                                    # mask [B,1,1,T]: which keys may be seen
        return x


def load_bert(folder, config):
    """Bert with a folder's weights, in float32. Missing, unexpected and misshapen weights are an error that names them."""
    with torch.device("meta"):
        model = Bert(config)
    fill(model, folder, "cpu", ignore=lambda name: name.startswith(UNUSED),
         rename=lambda name: name.removeprefix("bert."))
    return model.eval().requires_grad_(False)


def load_tokenizer(folder, max_length):
    """tokenizer.json, set to cut at max_length tokens ([CLS] and [SEP] counted and kept) and to leave padding to us.

    A file may come with settings of its own: MiniLM's pads everything to 128 and cuts there.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:      # tokenizers raises bare Exception on a broken file
        raise ValueError(f"{path}: {error}") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    if not tokenizer.encode("").ids:        # an empty text would have nothing to attend to, and cls pooling no [CLS]
        raise ValueError(f"{path}: its post-processor puts no [CLS] and [SEP] around a text")
    return tokenizer


class BertEncoder:
    """Texts to unit vectors. max_length: tokens a text is cut to, [CLS] and [SEP] included; pooling: "mean" or "cls".

    fingerprint: SHA-256 over every byte of the weights and tokenizer.json, and over the settings that were read. It takes
    less time than loading and, unlike sizes and dates, misses no retraining and survives a copy.
    """

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        config, self.pooling = read_config(self.folder), read_pooling(self.folder)
        path = self.folder / "sentence_bert_config.json"
        settings = read_json(path) if path.exists() else {}
        self.dim = config.hidden_size
        self.max_length = min(settings.get("max_seq_length") or config.max_position_embeddings, config.max_position_embeddings)
        self.lower = bool(settings.get("do_lower_case"))        # before the tokenizer, which may lower case itself
        self.tokenizer = load_tokenizer(self.folder, self.max_length)
        self.model = load_bert(self.folder, config)
        read = hashlib.sha256(json.dumps([asdict(config), self.pooling, self.max_length, self.lower]).encode())
        for file in (self.folder / "tokenizer.json", *weight_files(self.folder)):
            with open(file, "rb") as stream:
                while block := stream.read(1 << 20):
                    read.update(block)
        self.fingerprint = read.hexdigest()

    @classmethod
    def from_pretrained(cls, path_or_hub_id):
        """A folder or Hub id, such as sentence-transformers/all-MiniLM-L6-v2 or BAAI/bge-small-en-v1.5 -> BertEncoder.

        ValueError where it is no BERT, a weight is missing or unexpected, or its pooling is neither mean nor cls.
        """
        return cls(resolve(path_or_hub_id))

    @torch.no_grad()
    def encode(self, texts, batch_size=64):
        """list of n texts -> float32[n,dim], rows of length 1.

        Batches are made of texts of like length, so that little is padded; what a text is batched with does not change its
        vector by more than float32 rounding. Always float32, also inside autocast: the index must not depend on who asks.
        """
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        ids = [e.ids for e in self.tokenizer.encode_batch([t.lower() if self.lower else t for t in texts])]
        order = sorted(range(len(texts)), key=lambda i: len(ids[i]), reverse=True)
        for start in range(0, len(texts), batch_size):
            rows = order[start:start + batch_size]
            lengths = torch.tensor([len(ids[i]) for i in rows])
            tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)                    # [B,T]
            for row, i in zip(tokens, rows):
                row[:len(ids[i])] = torch.tensor(ids[i])
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]                                  # [B,T]
            with torch.autocast("cpu", enabled=False):
                hidden = self.model(tokens, mask)                                                    # [B,T,H]
            if self.pooling == "mean":
                pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)               # [B,H]
            else:
                pooled = hidden[:, 0]
            vectors[rows] = F.normalize(pooled, dim=-1).numpy()
        return vectors

    def to_json(self):
        return {"kind": "bert", "folder": str(self.folder), "fingerprint": self.fingerprint}
