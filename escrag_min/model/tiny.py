"""A tiny Qwen-2.5 made on the spot: random weights, a byte-level BPE trained on the built-in samples. For demo, tests, and
scripts started without --model. It is a real checkpoint folder in every respect, but it has never seen a language.
"""
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from escrag_min.data import SAMPLES, read_jsonl
from escrag_min.model.checkpoint import atomic_folder, write_json
from escrag_min.prompts import POLICY_SYSTEM, REWARD_SYSTEM, policy_prompt
from escrag_min.qwen2 import Config, Qwen2
from escrag_min.reward import RewardModel

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")       # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# How text is cut before merging: contractions, words, single digits, punctuation, whitespace (as Qwen-2.5's tokenizer does)
PRE_SPLIT = (r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def sample_texts():
    """Every text of the built-in samples once, and the prompts around them.

    Once: a reply that also stands in later prompts would get shorter codes than the rejected one beside it.
    """
    texts = [POLICY_SYSTEM, REWARD_SYSTEM, policy_prompt([], "", [{"prompt": [], "chosen": ""}])[1]["content"]]
    for name, keys in (("demonstrations", ("prompt", "completion")), ("preferences", ("prompt", "chosen", "rejected"))):
        for record, _ in read_jsonl(SAMPLES / f"{name}.jsonl"):
            texts += [m["content"].rpartition("</think>\n")[part] for key in keys for m in record[key] for part in (0, 2)]
    return list(dict.fromkeys(texts))


def make_tiny_model(folder, seed=0, hidden=128, layers=4, heads=4, kv_heads=2, words=6144, tie=True):
    """Write a tiny model folder -> its Path.

    words: vocabulary size of the tokenizer. Large enough that a common word is one token, as in a real one: with far fewer,
    rejected replies, whose words are a little longer, are told by their length.
    """
    folder = Path(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(sample_texts(), trainers.BpeTrainer(
        vocab_size=words, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in CONTROL]))
    size = tokenizer.get_vocab_size()
    raw = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": hidden,
           "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
           "num_key_value_heads": kv_heads, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
           "tie_word_embeddings": tie, "vocab_size": size, "use_sliding_window": False, "torch_dtype": "float32",
           "bos_token_id": 0, "eos_token_id": 2}
    model = random_model(Config(
        vocab_size=size, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden // heads, tie_word_embeddings=tie, max_position_embeddings=4096, raw=raw),
        seed)
    with atomic_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save(str(part / "tokenizer.json"))
        write_json(part / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                                                    "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE})
        write_json(part / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0})
    return folder


def random_model(config, seed=0, std=0.02):
    """Qwen2 with normal(0, std) matrices, zero biases and norms of one."""
    model = Qwen2(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, std, generator=generator)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    return model.eval()


def model_or_tiny(path, out):
    """The path given, or a tiny model made under out, and then one line that says so."""
    if path:
        return path
    folder = Path(out) / "tiny"
    print(f"no --model: making a tiny random model in {folder}; name a real one, --model Qwen/Qwen2.5-0.5B-Instruct or a folder")
    return folder if folder.exists() else make_tiny_model(folder)


def tiny_reward_model(out):
    """A tiny random reward model under out, with one line that says so: its rewards mean nothing, they only exercise the loop."""
    print(f"no --reward-model: making a tiny random one in {Path(out) / 'tiny-rm'}, whose scores mean nothing; train one with "
          "train_rm.py")
    folder = Path(out) / "tiny-rm"
    if not folder.exists():
        base = make_tiny_model(Path(out) / "tiny-rm-base", seed=1)
        model = RewardModel.from_pretrained(base)
        with torch.no_grad():
            model.score.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(folder, base)
    return folder
