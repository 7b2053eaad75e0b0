"""STEP: a whole GRPO step for one dialogue: rollouts, reward, update. Against TRL's GRPOTrainer with a reward model.

Ours has two passes: an initial response (128 tokens), 3 exemplars by TF-IDF, 8 final responses of 128 tokens. TRL has one pass,
and gets our final prompt. Nothing stops early.
Checked: on what TRL sampled and scored, our gradient is TRL's.
"""
import torch
from common import compare, flops, options, peer
from trl_peer import gradient_difference, grpo_trainer, updater
from update import grpo_gradient

from escrag_min.chat import Tokenizer
from escrag_min.data import SAMPLES, read_records
from escrag_min.grpo import group_advantages
from escrag_min.qwen2 import Qwen2
from escrag_min.retrieval import open_index
from escrag_min.reward import RewardModel, score_replies
from escrag_min.rollout import two_pass_rollout
from escrag_min.runtime.optimizer import make_optimizer, update

GROUP, REPLY = 8, 128


def main():
    args = options(__doc__).parse_args()
    reply = REPLY * args.scale
    tokenizer, model = Tokenizer.from_pretrained(args.model), Qwen2.from_pretrained(args.model)
    tokenizer.stop_tokens = []
    reward_model = RewardModel.from_pretrained(args.model)
    with torch.no_grad():
        reward_model.score.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    index = open_index(SAMPLES / "preferences.jsonl")
    state = min(read_records(SAMPLES / "preferences.jsonl", "prompt"), key=lambda r: len(str(r["prompt"])))
    optimizer = make_optimizer(model, 1e-9)

    def ours():
        rollout, = two_pass_rollout(model, tokenizer, [state], index, GROUP, 3, reply, generator=torch.Generator().manual_seed(0))
        scores = score_replies(reward_model, tokenizer, [(state["prompt"], [r.text for r in rollout.responses])])
        grpo_gradient(model, len(tokenizer), rollout.prompt, [r.tokens for r in rollout.responses],
                      group_advantages(torch.tensor(scores))[0])
        update(model, optimizer, 1e-9)
        return rollout.prompt

    prompt = ours()
    contenders, checked = {"ours": lambda: ours() and None}, "not checked: no peer"
    if peer(args, "trl"):
        from transformers import AutoModelForSequenceClassification
        scorer = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32)
        scorer.score.weight.data.copy_(reward_model.score.weight.data)
        trainer = grpo_trainer(args.model, GROUP, reply, scorer, generation_kwargs={"min_new_tokens": reply})
        step = updater(trainer)
        rows = [{"prompt": tokenizer.decode(prompt, keep_control=True)}] * GROUP

        def backward():
            trainer.model.train()
            inputs = trainer._generate_and_score_completions(rows)
            trainer.compute_loss(trainer.model, inputs).backward()
            return inputs

        def trl():
            backward()
            step()
        inputs = backward()
        assert inputs["completion_mask"].sum() == GROUP * reply
        grpo_gradient(model, len(tokenizer), inputs["prompt_ids"][0].tolist(), inputs["completion_ids"].tolist(),
                      inputs["advantages"])
        checked = f"gradients on the same rollouts differ by {gradient_difference(model, trainer):.1e} of their norm; " \
                  f"prompts of {len(prompt)} and {inputs['prompt_ids'].shape[1]} tokens"
        model.zero_grad(), trainer.model.zero_grad()
        contenders["trl"] = trl
    parameters = sum(p.numel() for p in model.parameters())
    limit = ("the update alone: 6 FLOP a parameter and token of the tree at the measured peak",
             flops() / (6 * parameters * (len(prompt) + GROUP * reply)) * GROUP * reply)
    compare(args, "GRPO step", contenders, "tok", GROUP * reply, limit, checked)


if __name__ == "__main__":
    main()
