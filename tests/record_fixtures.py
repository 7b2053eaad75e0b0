"""Record what transformers computes, for tests that run without it: python tests/record_fixtures.py [Qwen2.5 folder]

fixtures/qwen2_logits.json    logits of transformers' Qwen2ForCausalLM with the weights of conftest.waves
fixtures/qwen25_chat.json     text of Qwen2.5's own chat template (needs the folder)
"""
import json
import sys
from pathlib import Path

import torch
from conftest import small_config, waves

FOLDER = Path(__file__).parent / "fixtures"
TOKENS = [3, 17, 42, 9, 9, 55, 0, 28, 31, 60, 12]
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "I can't sleep.\n\nAgain."},
     {"role": "assistant", "content": "That sounds tiring."}, {"role": "user", "content": "  yes "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
]


def reference_model(tie):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    raw = {k: v for k, v in small_config(tie).raw.items() if k not in ("model_type", "architectures")}
    return waves(Qwen2ForCausalLM(Qwen2Config(**raw))).eval()


def main():
    recorded = {"tokens": TOKENS}
    for tie in (True, False):
        with torch.no_grad():
            logits = reference_model(tie)(torch.tensor([TOKENS])).logits[0]
        recorded["tied" if tie else "untied"] = [[round(v, 6) for v in row] for row in logits.tolist()]
    (FOLDER / "qwen2_logits.json").write_text(json.dumps(recorded))
    if len(sys.argv) > 1:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        rows = [{"messages": c, "add_generation_prompt": g,
                 "text": tokenizer.apply_chat_template(c, add_generation_prompt=g, tokenize=False)}
                for c in CONVERSATIONS for g in (True, False)]
        (FOLDER / "qwen25_chat.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
