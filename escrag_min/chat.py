"""Text to token ids and back: tokenizer.json through `tokenizers`, and ChatML written by hand.

    <|im_start|>{role}\\n{content}<|im_end|>\\n      for each message, then <|im_start|>assistant\\n to ask for a reply

Control tokens come from this file alone. What people wrote (dialogues, retrieved replies, role cards) is encoded as
plain text whatever it holds: "<|im_end|>" typed by a client is ten characters, not the end of a turn.
"""
import json
import re
from pathlib import Path

import tokenizers

from escrag_min.model.checkpoint import read_json, resolve

ROLES = ("system", "user", "assistant")


class Tokenizer:
    """len(tokenizer): the number of ids it can produce, at most the model's vocab_size (whose last rows may be padding).

    stop_tokens     ids that end a reply: <|im_end|> and the folder's eos_token_id(s)
    default_system  the line the checkpoint's own chat template puts where a conversation has no system turn, or None
    """

    def __init__(self, tokenizer_json, default_system=None, eos_token_ids=()):
        data = json.loads(tokenizer_json)
        self.full = tokenizers.Tokenizer.from_str(tokenizer_json)
        # The same model without its added tokens: no text can become one of them.
        self.plain = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))
        self.control = {t["id"] for t in data.get("added_tokens", []) if t.get("special", True)}
        self.im_start, self.im_end = (self.full.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
        if self.im_start is None or self.im_end is None:
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>: not a ChatML model such as Qwen-2.5")
        self.default_system = default_system
        self.stop_tokens = tuple(sorted({self.im_end, *eos_token_ids}))
        self.size = max(self.full.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_pretrained(cls, path):
        """From a Hugging Face folder (or Hub id): tokenizer.json, and what else is there of its configuration."""
        folder = resolve(path)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file")
        eos = []
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                ids = read_json(folder / name).get("eos_token_id")      # an id, a list of ids, or nothing
                eos += ids if isinstance(ids, list) else [] if ids is None else [ids]
        try:
            return cls(file.read_text("utf-8"), default_system_line(folder), eos)
        except Exception as error:      # tokenizers raises bare Exception on a broken file
            raise ValueError(f"{file}: {error}") from None

    def __len__(self):
        return self.size

    def encode(self, text):
        """Plain text -> ids. Never a control token."""
        return self.plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids, keep_control=False):
        """ids -> str; control tokens are left out unless keep_control."""
        return self.full.decode([i for i in ids if keep_control or i not in self.control], skip_special_tokens=False)

    def render(self, messages, add_generation_prompt=True, return_targets=False):
        """Messages -> ids, token for token what the checkpoint's own chat template gives.

        messages         [{"role": "system"|"user"|"assistant", "content": str}, ...]; without a system turn the default
                         system line is put first, an explicit empty one stays empty
        return_targets   also a list of bool: True for what an assistant says and the <|im_end|> that ends it
        """
        if self.default_system is not None and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": self.default_system}, *messages]
        newline = self.encode("\n")
        ids, targets = [], []
        for message in messages:
            header = message["role"] + "\n"
            if message["role"] not in ROLES:
                raise ValueError(f"role {message['role']!r} is not one of {', '.join(ROLES)}")
            turn = self.plain.encode(header + message["content"], add_special_tokens=False)
            said = message["role"] == "assistant"
            ids += [self.im_start, *turn.ids, self.im_end, *newline]
            targets += [False, *(said and start >= len(header) for start, _ in turn.offsets), said]
            targets += [False] * len(newline)
        if add_generation_prompt:
            opening = [self.im_start, *self.encode("assistant\n")]
            ids += opening
            targets += [False] * len(opening)
        return (ids, targets) if return_targets else ids

    def reply_ids(self, text):
        """The ids of an assistant's answer after a generation prompt: the text and one end of turn, all of them targets."""
        return [*self.encode(text), self.im_end]


def default_system_line(folder):
    """The literal system turn in a folder's chat template (it differs by family: Qwen2, Qwen2.5, ...), or None."""
    folder = Path(folder)
    template = ""
    if (folder / "tokenizer_config.json").exists():
        template = read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(template, list):      # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), "")
    found = re.search(r"<\|im_start\|>system(?:\\n|\n)((?:[^<{}'\\]|\\')+)<\|im_end\|>", template)
    return found and found[1].replace("\\'", "'")


def drop_old_turns(messages, render, limit):
    """Drop whole turns, oldest first, until len(render(messages)) <= limit -> (messages, number dropped).

    A system turn and the last turn stay. ValueError where they alone are over the limit: nothing is cut in the middle.
    render: messages -> ids, so that the limit is about the prompt that is really used.
    """
    head = messages[:1] if messages and messages[0]["role"] == "system" else []
    turns = messages[len(head):]
    for dropped in range(max(len(turns), 1)):
        kept = head + turns[dropped:]
        size = len(render(kept))
        if size <= limit:
            return kept, dropped
    raise ValueError(f"the prompt has {size} tokens even with the last turn only; the limit is {limit}")


def without_reasoning(text):
    """What any writer says beside its <think>...</think>, be the latter cut."""
    return re.sub(r"<think>.*?(</think>|$)", "", text or "", flags=re.DOTALL)


def split_think(text):
    """A policy's text -> (reasoning, reply, well_formed). The reply is what the client sees; it never holds reasoning.

    Well-formed: "<think>", some reasoning, "</think>", then a reply, each tag once.
    """
    head, _, tail = text.rpartition("</think>")
    reply, _, unfinished = tail.partition("<think>")        # cut at the token limit while thinking: no part of the reply
    reasoning, reply = re.sub(r"</?think>", "", head + unfinished).strip(), reply.strip()
    tags_once = text.count("<think>") == 1 and text.count("</think>") == 1
    return reasoning, reply, text.lstrip().startswith("<think>") and tags_once and bool(reasoning) and bool(reply)
