"""SFT: 8 ragged sequences of 64 to 512 tokens, loss on the completion (the second half), one update.

Against TRL's SFTTrainer, once with its batch of 8, padded, and once with 8 batches of one whose gradients accumulate.
Checked: loss and gradient agree.
"""
import torch
from common import compare, flops, ids_of, options, peer

from escrag_min.chat import Tokenizer
from escrag_min.packing import pack, split_into_packs
from escrag_min.qwen2 import Qwen2
from escrag_min.sft import sft_loss, sft_weights
from escrag_min.runtime.optimizer import make_optimizer, update


def main():
    args = options(__doc__).parse_args()
    tokenizer, model = Tokenizer.from_pretrained(args.model), Qwen2.from_pretrained(args.model)
    sequences = ids_of(tokenizer, [64 * (i + 1) * args.scale for i in range(8)])
    trees = [(ids[:len(ids) // 2], [ids[len(ids) // 2:]]) for ids in sequences]
    targets = sum(len(branches[0]) for _, branches in trees)
    optimizer = make_optimizer(model, 1e-9)

    def gradient():
        loss = 0.0
        for micro in split_into_packs(trees, 1024 * args.scale):
            packed = pack(micro)
            part = sft_loss(model.log_probs(packed), sft_weights(len(packed.targets), targets, "cpu"))
            part.backward()
            loss += part.item()
        return loss

    def ours():
        gradient()
        update(model, optimizer, 1e-9)

    contenders, checked = {"ours": ours}, "not checked: no peer"
    forms = {name: rows for name, rows in {"trl-padded": 8, "trl-one-by-one": 1}.items() if peer(args, "trl", name)}
    if forms:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import SFTConfig, SFTTrainer
        from trl_peer import SETTINGS, update_contender
        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        rows = [{"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2:]} for ids in sequences]
        trainer = SFTTrainer(model=theirs, args=SFTConfig(max_length=None, **SETTINGS), train_dataset=Dataset.from_list(rows),
                             processing_class=AutoTokenizer.from_pretrained(args.model))
        for name, at_once in forms.items():
            contenders[name], checked = update_contender(trainer, rows, model, gradient, at_once, targets)
    tokens, parameters = sum(map(len, sequences)), sum(p.numel() for p in model.parameters())
    limit = ("6 FLOP a parameter and token at the measured peak", flops() / (6 * parameters))
    compare(args, "SFT", contenders, "tok", tokens, limit, checked)


if __name__ == "__main__":
    main()
