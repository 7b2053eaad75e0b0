"""BERT encoders: a tiny one against a slow computation and transformers, the real MiniLM against transformers and TF-IDF."""
import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import real_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from escrag_min.data import SAMPLES, read_records
from escrag_min.encoder import TfidfEncoder, encoder_from_json, make_encoder
from escrag_min.model.bert import BertEncoder
from escrag_min.retrieval import ExemplarIndex, open_index

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "i", "hear", "you", "am", "so", "sorry", "that", "sound", "##s", "##ed", "hard", "what",
         "keep", "awake", ".", "?", ","]
CONFIG = {"model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
          "num_attention_heads": 3, "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
TEXTS = ["I hear you.", "", "That sounds so hard. What keeps you awake?", "zebra", "SORRY, sorry , I am so sorry that", "you " * 40, "?"]


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_pooling(folder, **modes):
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 12, **{f"pooling_mode_{k}": v for k, v in modes.items()}})


@pytest.fixture
def folder(tmp_path):
    """A tiny random BERT as sentence-transformers lays it out, with a tokenizer.json that pads and cuts like MiniLM's."""
    folder = tmp_path / "bert"
    write(folder / "config.json", CONFIG)
    write(folder / "modules.json", [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in (
        ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))])
    write_pooling(folder, cls_token=False, mean_tokens=True, max_tokens=False)
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_padding(length=30)
    tokenizer.enable_truncation(6)
    tokenizer.save(str(folder / "tokenizer.json"))
    h, m = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"embeddings.word_embeddings.weight": (len(WORDS), h), "embeddings.position_embeddings.weight": (16, h),
              "embeddings.token_type_embeddings.weight": (2, h), "embeddings.LayerNorm": h}
    for i in range(2):
        layer = f"encoder.layer.{i}."
        shapes |= {layer + f"attention.self.{name}": (h, h) for name in ("query", "key", "value")}
        shapes |= {layer + "attention.output.dense": (h, h), layer + "attention.output.LayerNorm": h,
                   layer + "intermediate.dense": (m, h), layer + "output.dense": (h, m), layer + "output.LayerNorm": h}
    generator = torch.Generator().manual_seed(3)
    weights = {"embeddings.position_ids": torch.arange(16)[None], "pooler.dense.weight": torch.zeros(h, h),
               "pooler.dense.bias": torch.zeros(h)}
    for name, shape in shapes.items():
        if name.endswith("weight"):
            weights[name] = torch.randn(shape, generator=generator)
        else:
            norm = isinstance(shape, int)
            weights[name + ".weight"] = norm + 0.4 * torch.randn(shape, generator=generator)
            weights[name + ".bias"] = 0.2 * torch.randn(h if norm else shape[0], generator=generator)
    save_file(weights, folder / "model.safetensors")
    return folder


def token_ids(text, limit=16):
    """Lower case, greedy longest pieces, [CLS] and [SEP] around: a WordPiece of its own, for the texts above."""
    ids = []
    for word in "".join(f" {c} " if c in ".,?" else c for c in text.lower()).split():
        pieces = []
        while word:
            prefix = "##" if pieces else ""
            size = next((n for n in range(len(word), 0, -1) if prefix + word[:n] in WORDS), 0)
            if not size:
                pieces = [WORDS.index("[UNK]")]
                break
            pieces.append(WORDS.index(prefix + word[:size]))
            word = word[size:]
        ids += pieces
    return [2, *ids[:limit - 2], 3]


def slow_hidden(folder, ids):
    """The hidden state of each token of one text, one token and one head at a time, in float64."""
    w = {name: t.double().numpy() for name, t in load_file(folder / "model.safetensors").items()}

    def norm(x, name):
        x = x - x.mean()
        return x / math.sqrt((x * x).mean() + 1e-12) * w[name + ".weight"] + w[name + ".bias"]

    def dense(x, name):
        return w[name + ".weight"] @ x + w[name + ".bias"]

    def gelu(x):
        return np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])

    xs = [norm(w["embeddings.word_embeddings.weight"][t] + w["embeddings.position_embeddings.weight"][p]
               + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm") for p, t in enumerate(ids)]
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = ([dense(x, layer + f"attention.self.{name}").reshape(3, 4) for x in xs] for name in ("query", "key", "value"))
        after = []
        for t, x in enumerate(xs):
            seen = []
            for head in range(3):
                score = np.exp([q[t][head] @ key[head] / math.sqrt(4) for key in k])
                seen.append(sum(s * value[head] for s, value in zip(score / score.sum(), v)))
            y = norm(x + dense(np.concatenate(seen), layer + "attention.output.dense"), layer + "attention.output.LayerNorm")
            after.append(norm(y + dense(gelu(dense(y, layer + "intermediate.dense")), layer + "output.dense"),
                              layer + "output.LayerNorm"))
        xs = after
    return np.stack(xs)


def unit(x):
    return x / np.linalg.norm(x)


def test_mean_pooling_equals_a_slow_computation(folder):
    vectors = BertEncoder.from_pretrained(folder).encode(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 12)
    expected = np.stack([unit(slow_hidden(folder, token_ids(t)).mean(0)) for t in TEXTS])
    np.testing.assert_allclose(vectors, expected, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert np.abs(vectors[0] - vectors[2]).max() > 0.01


def test_cls_pooling_equals_a_slow_computation(folder):
    write_pooling(folder, cls_token=True, mean_tokens=False)
    vectors = BertEncoder.from_pretrained(folder).encode(TEXTS)
    np.testing.assert_allclose(vectors, np.stack([unit(slow_hidden(folder, token_ids(t))[0]) for t in TEXTS]), atol=2e-6)


def test_a_folder_without_sentence_transformers_files_is_mean_pooled(folder):
    expected = BertEncoder.from_pretrained(folder).encode(TEXTS)
    (folder / "modules.json").unlink()
    np.testing.assert_array_equal(BertEncoder.from_pretrained(folder).encode(TEXTS), expected)


def transformers_vectors(folder, texts, limit, pooling="mean"):
    """The same by transformers' BertModel and tokenizer, one text at a time, without padding."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    vectors = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=limit, padding=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(ids).last_hidden_state[0]
        vectors.append(unit((hidden.mean(0) if pooling == "mean" else hidden[0]).numpy()))
    return np.stack(vectors)


@pytest.mark.parity
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_tiny_bert_equals_transformers(folder, pooling):
    write_pooling(folder, cls_token=pooling == "cls", mean_tokens=pooling == "mean")
    vectors = BertEncoder.from_pretrained(folder).encode(TEXTS)
    np.testing.assert_allclose(vectors, transformers_vectors(folder, TEXTS, 16, pooling), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_does_not_leak(folder, pooling):
    write_pooling(folder, cls_token=pooling == "cls", mean_tokens=pooling == "mean")
    encoder = BertEncoder.from_pretrained(folder)
    together = encoder.encode(TEXTS)
    np.testing.assert_allclose(np.concatenate([encoder.encode([t]) for t in TEXTS]), together, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=2), together, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(TEXTS[::-1])[::-1], together, atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(TEXTS), together)
    with torch.no_grad():       # poisoned: [PAD]'s own embedding must not matter
        encoder.model.embeddings["word_embeddings"].weight[0] = 1e4
    np.testing.assert_allclose(encoder.encode(TEXTS), together, atol=1e-6)
    assert encoder.encode([]).shape == (0, 12)


def test_inside_autocast_vectors_are_the_same(folder):
    encoder = BertEncoder.from_pretrained(folder)
    with torch.autocast("cpu", torch.bfloat16):
        vectors = encoder.encode(TEXTS)
    np.testing.assert_array_equal(vectors, encoder.encode(TEXTS))


@pytest.mark.parametrize("settings, limit", [
    (None, 16), ({"max_seq_length": 7}, 7), ({"max_seq_length": None}, 16), ({"max_seq_length": 512}, 16)])
def test_texts_are_cut_to_the_folders_length(folder, settings, limit):
    """What is cut keeps its [SEP]; the file's own limit of 6 is not used."""
    if settings:
        write(folder / "sentence_bert_config.json", settings)
    encoder = BertEncoder.from_pretrained(folder)
    assert encoder.max_length == limit
    text = "I hear you, so that sounds hard, what keeps you awake? I am sorry"
    assert encoder.tokenizer.encode(text).ids == token_ids(text, limit)
    np.testing.assert_allclose(encoder.encode([text])[0], unit(slow_hidden(folder, token_ids(text, limit)).mean(0)), atol=2e-6)


def test_do_lower_case_comes_before_the_tokenizer(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    write(folder / "tokenizer.json", {**data, "normalizer": None})
    cased = BertEncoder.from_pretrained(folder)
    assert np.abs(np.subtract(*cased.encode(["SORRY", "sorry"]))).max() > 0.01
    write(folder / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    np.testing.assert_allclose(*BertEncoder.from_pretrained(folder).encode(["SORRY", "sorry"]), atol=1e-6)


@pytest.mark.parametrize("dtype, prefix", [(torch.float32, "bert."), (torch.float16, "")])
def test_other_names_and_dtypes_of_a_checkpoint(folder, dtype, prefix):
    expected = BertEncoder.from_pretrained(folder).encode(TEXTS)
    weights = load_file(folder / "model.safetensors")
    save_file({**{prefix + k: t if k.endswith("ids") else t.to(dtype) for k, t in weights.items()},
               "cls.predictions.bias": torch.zeros(3)}, folder / "model.safetensors")
    again = BertEncoder.from_pretrained(folder)
    assert all(p.dtype == torch.float32 for p in again.model.parameters())
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_missing_unexpected_and_misshapen_weights_are_named(folder):
    whole = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.attention.self.key.bias"
    for weights, words in (
            ({k: t for k, t in whole.items() if k != name}, f"{name} is missing"),
            ({**whole, "encoder.layer.2.output.dense.bias": torch.zeros(12)}, "unexpected weight encoder.layer.2.output.dense.bias"),
            ({**whole, name: torch.zeros(5)}, r"key.bias has shape \[5\], config.json implies \[12\]")):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            BertEncoder.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors: no such file"):
        BertEncoder.from_pretrained(folder)


@pytest.mark.parametrize("change, words", [
    ({"model_type": "qwen2"}, "model_type is 'qwen2'; only 'bert'"), ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ({"hidden_size": None}, "'hidden_size' is missing")])
def test_what_would_be_computed_wrong_is_refused(folder, change, words):
    write(folder / "config.json", {k: v for k, v in {**CONFIG, **change}.items() if v is not None})
    with pytest.raises(ValueError, match=words):
        BertEncoder.from_pretrained(folder)


@pytest.mark.parametrize("modes, words", [
    ({"max_tokens": True}, "pooling pooling_mode_max_tokens is not supported"),
    ({"mean_tokens": True, "cls_token": True}, r"pooling pooling_mode_mean_tokens \+ pooling_mode_cls_token"),
    ({"mean_tokens": False}, "pooling of no kind")])
def test_other_pooling_is_refused(folder, modes, words):
    write_pooling(folder, **modes)
    with pytest.raises(ValueError, match=words):
        BertEncoder.from_pretrained(folder)


@pytest.mark.parametrize("modules, words", [
    ([{"type": "m.Transformer"}, {"type": "m.Pooling"}, {"type": "m.Dense"}], "modules Transformer, Pooling, Dense are not supported"),
    ([{"type": "m.Transformer"}], "modules Transformer are not supported"), ({"type": "m.Pooling"}, "not a list of"),
    ([{"kind": 1}], "not a list of")])
def test_other_modules_are_refused(folder, modules, words):
    write(folder / "modules.json", modules)
    with pytest.raises(ValueError, match=f"modules.json: {words}"):
        BertEncoder.from_pretrained(folder)


def test_tokenizers_that_cannot_serve_are_named(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    write(folder / "tokenizer.json", {**data, "post_processor": None})
    with pytest.raises(ValueError, match=r"tokenizer.json: its post-processor puts no \[CLS\]"):
        BertEncoder.from_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: "):
        BertEncoder.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file"):
        BertEncoder.from_pretrained(folder)


def change_weights(folder):
    """One number in the middle of the file: neither its size nor its ends change."""
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.dense.weight"][3, 3] += 1
    save_file(weights, folder / "model.safetensors")


def change_tokenizer(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"awake"', '"aware"'))


CHANGES = [change_weights, change_tokenizer, lambda folder: write_pooling(folder, cls_token=True)]


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_follows_what_changes_vectors(folder, tmp_path, change):
    encoder = make_encoder(str(folder))
    saved = encoder.to_json()
    assert saved["kind"] == "bert" and saved["folder"] == str(folder.resolve())
    np.testing.assert_array_equal(encoder_from_json(json.loads(json.dumps(saved))).encode(TEXTS), encoder.encode(TEXTS))
    shutil.copytree(folder, tmp_path / "copy")
    assert make_encoder(tmp_path / "copy").fingerprint == saved["fingerprint"]
    change(folder)
    with pytest.raises(ValueError, match=f"{folder}: its weights, tokenizer or settings have changed"):
        encoder_from_json(saved)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=f"{folder}: the encoder this index was built with is gone"):
        encoder_from_json(saved)
    with pytest.raises(ValueError, match="encoder of kind 'glove'"):
        encoder_from_json({"kind": "glove"})


@pytest.fixture
def corpus(tmp_path):
    """A file of four preference records, and a function that writes it with one reply changed."""
    replies = ["I hear you.", "That sounds hard.", "What keeps you awake?", "I am so sorry."]

    def write_corpus(*texts):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({
            "id": f"r{i}", "dialogue_id": f"d{i}", "prompt": [{"role": "user", "content": "so hard"}],
            "chosen": [{"role": "assistant", "content": text}], "rejected": [{"role": "assistant", "content": "?"}]}) + "\n"
            for i, text in enumerate(texts or replies)))
        return tmp_path / "pairs.jsonl"
    return write_corpus


@pytest.fixture
def encoded(monkeypatch):
    """Counts the texts each encoder is given."""
    counts = []
    for cls in (BertEncoder, TfidfEncoder):
        def counting(self, texts, real=cls.encode):
            counts.append(len(texts))
            return real(self, texts)
        monkeypatch.setattr(cls, "encode", counting)
    return counts


@pytest.mark.parametrize("kind", ["bert", "tfidf"])
def test_a_cached_index_is_reused_while_corpus_and_encoder_are_the_same(folder, corpus, encoded, tmp_path, kind):
    encoder, cache = str(folder) if kind == "bert" else "tfidf", tmp_path / "run/index"
    first = open_index(corpus(), encoder, cache)
    assert encoded == [4] and set(json.loads((cache / "meta.json").read_text())) == {"corpus", "encoder"}
    query = ["that sounds hard, what keeps you"]
    hits = first.search(query, 3)
    del encoded[:]
    assert open_index(corpus(), encoder, cache).search(query, 3) == hits and encoded == [1]
    assert open_index(cache).search(query, 3) == hits == ExemplarIndex.load(cache).search(query, 3)      # stands alone
    del encoded[:]
    changed = open_index(corpus("I hear you.", "That sounds hard.", "Sorry.", "I am so sorry."), encoder, cache)
    assert encoded == [4] and changed.exemplars[2]["chosen"] == "Sorry."
    assert open_index(cache).exemplars == changed.exemplars and [p.name for p in cache.parent.iterdir()] == ["index"]
    del encoded[:]
    open_index(corpus(), encoder)
    assert encoded == [4]       # without a cache nothing is looked up


def test_a_typographic_apostrophe_is_an_apostrophe():
    assert TfidfEncoder.words("Don’t you?") == TfidfEncoder.words("don't you") == ["don't", "you"]


def test_a_cached_index_is_rebuilt_for_another_encoder(folder, corpus, encoded, tmp_path):
    cache = tmp_path / "index"
    for change in (lambda folder: None, *CHANGES):
        change(folder)
        open_index(corpus(), str(folder), cache)
        open_index(corpus(), str(folder), cache)
    assert encoded == [4] * 4
    open_index(corpus(), "tfidf", cache)
    assert encoded == [4] * 5 and isinstance(open_index(cache).encoder, TfidfEncoder)
    (cache / "meta.json").unlink()      # an index saved before there were fingerprints: loads, but is not taken on trust
    assert len(open_index(cache).exemplars) == 4
    open_index(corpus(), "tfidf", cache)
    assert encoded == [4] * 6


def test_an_index_over_a_bert_names_its_folder_when_it_is_gone(folder, corpus, tmp_path):
    open_index(corpus(), str(folder), tmp_path / "index")
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=f"{folder}: the encoder this index was built with is gone"):
        open_index(tmp_path / "index")
    with pytest.raises(ValueError, match=f"--encoder '{folder}': neither 'tfidf' nor"):
        open_index(corpus(), str(folder), tmp_path / "index")


@pytest.fixture(scope="module")
def replies():
    return read_records(SAMPLES / "preferences.jsonl", "preference")


@pytest.mark.parity
def test_real_minilm_equals_transformers(replies):
    folder = real_model("minilm")
    texts = [r["chosen"] for r in replies[::7]] + [" ".join(r["chosen"] for r in replies[:20])]      # the last one is cut
    assert len(texts) == 50
    encoder = BertEncoder.from_pretrained(folder)
    assert (encoder.pooling, encoder.max_length, encoder.dim) == ("mean", 256, 384)
    difference = np.abs(encoder.encode(texts) - transformers_vectors(folder, texts, 256)).max()
    print(f"MiniLM, {len(texts)} texts: largest difference to transformers {difference:.1e}")
    assert difference < 1e-5


def shared_problems(index, replies, k):
    """Share of the k nearest exemplars from other dialogues that are about the same problem."""
    problem = {r["id"]: r["problem_type"] for r in replies}
    hits = index.search([r["chosen"] for r in replies], k, [r["dialogue_id"] for r in replies])
    return np.mean([problem[hit.exemplar["id"]] == r["problem_type"] for r, found in zip(replies, hits) for hit in found])


def test_real_minilm_finds_the_same_problem_more_often(replies):
    """A reply names its client's problem only in passing, so the shares are small: MiniLM catches some of it, shared words none.

    k=3 is the paper's n. TF-IDF is not asked to beat chance: it does not.
    """
    minilm = ExemplarIndex.build(replies, make_encoder(real_model("minilm")))
    tfidf = ExemplarIndex.build(replies, make_encoder("tfidf"))
    others = [[o for o in replies if o["dialogue_id"] != r["dialogue_id"]] for r in replies]
    chance = np.mean([np.mean([o["problem_type"] == r["problem_type"] for o in other]) for r, other in zip(replies, others)])
    for k in (1, 3):
        ours, words = shared_problems(minilm, replies, k), shared_problems(tfidf, replies, k)
        print(f"same problem among the {k} nearest: MiniLM {ours:.3f}, TF-IDF {words:.3f}, chance {chance:.3f}")
        assert ours > words and ours > chance
