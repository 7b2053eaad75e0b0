"""P8, the update of one GRPO step: a prompt of 480 tokens, 8 responses of 128, loss and gradient. Against TRL's GRPOTrainer.

Ours is a tree: the prompt once, its 8 branches after it. TRL pads to 8 sequences. Neither has a reference model (beta 0).
Checked: the gradients agree.
"""
import torch
from common import compare, flops, ids_of, options, peer
from trl_peer import gradient_difference, grpo_trainer

from escrag_min.chat import Tokenizer
from escrag_min.grpo import grpo_loss, token_weights
from escrag_min.packing import pack
from escrag_min.qwen2 import Qwen2

PROMPT, GROUP, REPLY = 480, 8, 128
ADVANTAGES = [1.2, -0.4, 0.3, -1.1, 0.8, -0.9, 0.5, -0.4]


def grpo_gradient(model, words, prompt, replies, advantages):
    """Add the gradient of GRPO's loss at its first inner step, for one prompt's replies (ids) and their advantages [G]."""
    packed = pack([(prompt, replies)])
    logp = model.log_probs(packed, vocab_size=words)
    grpo_loss(logp, logp.detach(), advantages[packed.response], token_weights(packed.lengths()))[0].backward()


def main():
    args = options(__doc__).parse_args()
    prompt, reply = PROMPT * args.scale, REPLY * args.scale
    tokenizer, model = Tokenizer.from_pretrained(args.model), Qwen2.from_pretrained(args.model)
    prompt_ids, *replies = ids_of(tokenizer, [prompt] + [reply] * GROUP)
    advantages = torch.tensor(ADVANTAGES)

    def ours():
        model.zero_grad()
        grpo_gradient(model, len(tokenizer), prompt_ids, replies, advantages)

    contenders, checked = {"ours": ours}, "not checked: no peer"
    if peer(args, "trl"):
        trainer = grpo_trainer(args.model, GROUP, reply)
        inputs = {"prompt_ids": torch.tensor([prompt_ids] * GROUP), "prompt_mask": torch.ones(GROUP, prompt, dtype=torch.long),
                  "completion_ids": torch.tensor(replies), "completion_mask": torch.ones(GROUP, reply, dtype=torch.long),
                  "advantages": advantages, "num_items_in_batch": torch.tensor(GROUP * reply)}

        def trl():
            trainer.model.zero_grad()
            trainer.model.train()
            trainer.compute_loss(trainer.model, inputs).backward()
        ours(), trl()
        contenders["trl"] = trl
        checked = f"gradients differ by {gradient_difference(model, trainer):.1e} of their norm"
    tokens = prompt + GROUP * reply
    parameters = sum(p.numel() for p in model.parameters())
    limit = ("6 FLOP a parameter and token of the tree at the measured peak", flops() / (6 * parameters * tokens) * GROUP * reply)
    compare(args, "P8 update", contenders, "tok", GROUP * reply, limit, checked)


if __name__ == "__main__":
    main()
