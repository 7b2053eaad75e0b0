"""RM: 4 preference pairs, prompt 256 tokens, replies 64, one update. Against TRL's RewardTrainer.

Ours reads the prompt once for both replies; TRL reads 8 sequences of 320.
Checked: loss and gradient agree.
"""
import torch
from common import compare, flops, ids_of, options, peer

from escrag_min.chat import Tokenizer
from escrag_min.packing import pack
from escrag_min.reward import RewardModel, bradley_terry_loss
from escrag_min.runtime.optimizer import make_optimizer, update

PAIRS = 4


def main():
    args = options(__doc__).parse_args()
    prompt, reply = 256 * args.scale, 64 * args.scale
    tokenizer, model = Tokenizer.from_pretrained(args.model), RewardModel.from_pretrained(args.model)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    ids = ids_of(tokenizer, [prompt] * PAIRS + [reply] * 2 * PAIRS)
    trees = [(ids[i], [ids[PAIRS + 2 * i], ids[PAIRS + 2 * i + 1]]) for i in range(PAIRS)]
    optimizer = make_optimizer(model, 1e-9)

    def gradient():
        chosen, rejected = model(pack(trees)).view(-1, 2).unbind(1)
        loss = bradley_terry_loss(chosen, rejected).mean()
        loss.backward()
        return loss.item()

    def ours():
        gradient()
        update(model, optimizer, 1e-9)

    contenders, checked = {"ours": ours}, "not checked: no peer"
    if peer(args, "trl"):
        from datasets import Dataset
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from trl import RewardConfig, RewardTrainer
        from trl_peer import SETTINGS, update_contender
        theirs = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32)
        theirs.score.weight.data.copy_(model.score.weight.data)
        rows = [{"chosen_ids": p + good, "rejected_ids": p + bad} for p, (good, bad) in trees]
        auto = AutoTokenizer.from_pretrained(args.model)
        if auto.pad_token is None:
            auto.pad_token = auto.eos_token
        trainer = RewardTrainer(model=theirs, args=RewardConfig(per_device_train_batch_size=PAIRS, max_length=None, **SETTINGS),
                                train_dataset=Dataset.from_list(rows), processing_class=auto)
        contenders["trl"], checked = update_contender(trainer, rows, model, gradient)
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    limit = ("6 FLOP a body parameter and token of the trees at the measured peak", flops() / (6 * body * (prompt + 2 * reply)))
    compare(args, "RM", contenders, "pair", PAIRS, limit, checked)


if __name__ == "__main__":
    main()
