"""The reward model (paper §3): a scalar head on Qwen-2.5, trained on preference pairs by Bradley-Terry.

    r(x, y)  = w · h_last                    h_last: hidden state of the reply's <|im_end|>             [R]
    L_BT     = -log σ( r(x, y⁺) - r(x, y⁻) - margin )                                                   [B]

x the dialogue (trunk), y a reply without its reasoning (branch): both replies of a pair share one trunk. It is saved as
Qwen2ForSequenceClassification with one label, so that transformers loads it.
"""
import torch
import torch.nn.functional as F
from torch import nn

from escrag_min.model import checkpoint
from escrag_min.packing import pack, split_into_packs
from escrag_min.prompts import fitted_ids, last_turn, reward_prompt
from escrag_min.qwen2 import Body
from escrag_min.runtime.args import check
from escrag_min.runtime.distributed import even, frozen_dtype, load

NO_REPLY_REWARD = -3.0      # ours, in standard deviations of the training replies' scores
MAX_LENGTH = 2048           # ours, for a reward model that does not say what it was trained on


def bradley_terry_loss(chosen, rejected, margin=0.0):
    """-log σ(chosen - rejected - margin), finite for any gap. Scores [B] in any float type -> float32[B], nats."""
    return F.softplus(-(chosen.float() - rejected.float() - margin))


class RewardModel(nn.Module):
    """mean, std: of its scores on its own training replies, to standardise a reward. max_length: tokens of dialogue and reply that
    it was trained on, None if unknown: longer dialogues lose their oldest turns (scored_tree). All three travel in config.json."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        statistics = config.raw.get("escrag_reward", {})
        self.mean, self.std = statistics.get("mean", 0.0), statistics.get("std", 1.0)
        self.max_length = statistics.get("max_length")

    def forward(self, packed):
        """Packed -> float32[R]: one score a branch, read at the branch's last token; nothing else in the pack matters."""
        hidden = self.model(packed.tokens[None], mask=packed)[0]             # [T,H]
        with torch.autocast(hidden.device.type, enabled=False):              # the head in float32: bf16 scores tie
            return hidden[packed.last].float() @ self.score.weight[0].float()                      # [R]

    @classmethod
    def from_pretrained(cls, path_or_hub_id, dtype=torch.float32, device="cpu", shard=None):
        """A saved reward model, or a language model whose head is new and zero. A reward model without its head is an error."""
        folder = checkpoint.resolve(path_or_hub_id)
        kinds = checkpoint.read_config(folder).raw.get("architectures") or []
        fresh = "Qwen2ForSequenceClassification" not in kinds
        return checkpoint.load(cls, folder, dtype, device, new=("score.weight",) if fresh else (),
                               ignore=("lm_head.weight",) if fresh else (), shard=shard)

    def save_pretrained(self, path, tokenizer_from=None, dtype=None, **options):
        checkpoint.save(self, path, tokenizer_from, dtype, "Qwen2ForSequenceClassification", {
            "num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0},
            "escrag_reward": {"mean": self.mean, "std": self.std, "max_length": self.max_length}}, **options)


def load_reward_model(path):
    """A trained reward model, to score with: of this process's share, frozen. A language model, whose head is new, is an error."""
    model = load(RewardModel, path, frozen_dtype())
    check("Qwen2ForSequenceClassification" in (model.config.raw.get("architectures") or []),
          f"{path}: a language model without a reward head; train one with train_rm.py")
    return model


def reward_tree(tokenizer, dialogue, replies, limit):
    """((prompt ids, [reply ids, ...]), old turns dropped): what the reward model reads in training, as a reward, in evaluation.

    limit: tokens for the whole of a prompt and its longest reply; the oldest turns are dropped to fit.
    """
    branches = [tokenizer.reply_ids(reply) for reply in replies]
    prompt, dropped = fitted_ids(tokenizer, reward_prompt, dialogue, limit - max(map(len, branches)))
    return (prompt, branches), dropped


def scored_tree(model, tokenizer, dialogue, replies):
    """reward_tree of the length that the model was trained on, the same whoever asks: GRPO, a judge, the reader."""
    positions = model.config.max_position_embeddings
    try:
        return reward_tree(tokenizer, dialogue, replies, min(model.max_length or MAX_LENGTH, positions))
    except ValueError:      # the last turn and a reply alone are longer: these two, whatever their length
        return reward_tree(tokenizer, last_turn(dialogue), replies, positions)[0], len(dialogue) - 1


@torch.no_grad()
def score_replies(model, tokenizer, items, tokens_per_batch=8192):
    """[(dialogue, [replies]), ...] -> list of lists of float: standardised scores, (r - mean) / std.

    A reply's score does not depend on its siblings: where old turns must go, each is fitted on its own. An empty reply is not
    shown to the model, which never saw one; it gets NO_REPLY_REWARD. Under torchrun each rank has items of its own, also none,
    but all must ask.
    """
    trees = []
    for dialogue, replies in items:
        if spoken := [r for r in replies if r]:
            tree, dropped = scored_tree(model, tokenizer, dialogue, spoken)
            trees += [scored_tree(model, tokenizer, dialogue, [r])[0] for r in spoken] if dropped else [tree]
    packs = even(split_into_packs(trees, max([tokens_per_batch, *(len(p) + max(map(len, b)) for p, b in trees)]), split_trees=True))
    scored = [(model(pack(trees).to(model.score.weight.device)), real) for trees, real in packs]
    raw = [score for scores, real in scored if real for score in scores.tolist()]
    scores = iter((score - model.mean) / max(model.std, 1e-6) for score in raw)
    return [[next(scores) if reply else NO_REPLY_REWARD for reply in replies] for _, replies in items]
