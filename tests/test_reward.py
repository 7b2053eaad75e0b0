import json

import pytest
import torch
from conftest import small_config, waves
from safetensors.torch import load_file, save_file

import train_rm
from escrag_min.packing import pack
from escrag_min.qwen2 import Qwen2
from escrag_min.reward import NO_REPLY_REWARD, RewardModel, bradley_terry_loss, reward_tree, score_replies

t = torch.tensor


def reward_model(seed_scale=0.3):
    return waves(RewardModel(small_config()), seed_scale).eval()


def test_loss_by_hand_case49():
    loss = bradley_terry_loss(t([10.02, 0.5, -200.0]), t([10.0, 0.0, 0.0]))
    torch.testing.assert_close(loss, t([0.6832, 0.4741, 200.0]), atol=1e-4, rtol=0)
    assert bradley_terry_loss(t([0.5]), t([0.0]), margin=1.0).item() == pytest.approx(0.9741, abs=1e-4)
    assert bradley_terry_loss(t([10.02]).bfloat16(), t([10.0]).bfloat16()).dtype == torch.float32


def test_loss_gradient():
    gap = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(gap, torch.zeros(3)).sum().backward()
    torch.testing.assert_close(gap.grad, -torch.sigmoid(-gap.detach()), atol=1e-6, rtol=0)


def test_close_scores_do_not_tie_in_bf16_compute_case49():
    model = reward_model()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(pack([([1, 2], [[3]])])).dtype == torch.float32
    # a score that bf16 cannot hold: the head multiplies in float32
    with torch.no_grad():
        model.model.norm.weight.fill_(0)
        model.model.norm.weight[0] = 1.0
        model.score.weight.fill_(0)
        model.score.weight[0, 0] = 1.001
    with torch.autocast("cpu", torch.bfloat16):
        score = model(pack([([1, 2], [[3]])]))
    assert score.item() != score.bfloat16().float().item()


def test_the_score_is_read_at_the_replys_last_token_case08():
    model, prompt, reply, pad = reward_model(), [5, 6, 9, 7], [8, 9], 9        # pad id = end of turn = 9
    alone = model(pack([(prompt, [reply])]))
    hidden = model.model(t([prompt + reply + [pad, pad]]))[0]
    torch.testing.assert_close(alone[0], hidden[5] @ model.score.weight[0], atol=1e-5, rtol=0)
    crowd = model(pack([([1, 2], [[3, 4], [5]]), (prompt, [[30, 31, 32], reply, [40]]), ([50], [[51]])]))
    assert crowd.shape == (6,)
    torch.testing.assert_close(crowd[3], alone[0], atol=1e-5, rtol=0)


def test_saving_and_loading_a_head_case48(tmp_path):
    model = reward_model()
    model.mean, model.std, model.max_length = 1.5, 2.0, 300
    model.save_pretrained(tmp_path / "rm")
    config = json.loads((tmp_path / "rm/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and config["num_labels"] == 1
    again = RewardModel.from_pretrained(tmp_path / "rm")
    packed = pack([([1, 2], [[3], [4]])])
    assert again(packed).shape == (2,)
    torch.testing.assert_close(again(packed), model(packed), atol=0, rtol=0)
    assert (again.mean, again.std, again.max_length) == (1.5, 2.0, 300)
    weights = load_file(tmp_path / "rm/model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "rm/model.safetensors")
    with pytest.raises(ValueError, match="score.weight is missing"):
        RewardModel.from_pretrained(tmp_path / "rm")


def test_a_base_model_may_miss_only_the_head_case48(tmp_path):
    for tie in (True, False):
        base = waves(Qwen2(small_config(tie)))
        base.save_pretrained(tmp_path / f"base{tie}")
        model = RewardModel.from_pretrained(tmp_path / f"base{tie}")
        assert (model.score.weight == 0).all()
        torch.testing.assert_close(model.model(t([[1, 2]])), base(t([[1, 2]])), atol=0, rtol=0)
    weights = load_file(tmp_path / "baseFalse/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "baseFalse/model.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight is missing"):
        RewardModel.from_pretrained(tmp_path / "baseFalse")


@pytest.mark.parity
def test_transformers_reads_our_reward_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = reward_model()
    model.save_pretrained(tmp_path / "rm")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    ids = [1, 2, 3, 4]
    torch.testing.assert_close(theirs(t([ids])).logits[0], model(pack([(ids[:2], [ids[2:]])])), atol=1e-5, rtol=0)


DIALOGUE = [{"role": "user", "content": "I can't sleep."}]


def test_the_same_ids_in_training_reward_and_evaluation_case47(tokenizer, tiny, monkeypatch):
    seen = []
    model = RewardModel.from_pretrained(tiny)
    monkeypatch.setattr(RewardModel, "forward", lambda self, packed: seen.append(packed.tokens.tolist()) or torch.zeros(len(packed.last)))
    score_replies(model, tokenizer, [(DIALOGUE, ["Since when?"])])                      # GRPO's reward, and evaluation
    record = {"id": "x", "prompt": DIALOGUE, "chosen": "<think>Stage: x</think>\nSince when?", "rejected": "Oh."}
    (prompt, (chosen, _)), _ = train_rm.pair_tree(tokenizer, record, 2048)                 # training: reasoning is not seen
    assert seen == [prompt + chosen]


def test_a_reward_is_asked_for_no_more_than_was_trained_on(tokenizer, tiny, monkeypatch):
    model, seen = RewardModel.from_pretrained(tiny), []
    monkeypatch.setattr(RewardModel, "forward", lambda self, packed: seen.append(len(packed.tokens)) or torch.zeros(len(packed.last)))
    dialogue = [{"role": r, "content": "word " * 20} for r in ("user", "assistant")] * 3 + DIALOGUE
    for model.max_length in (None, 150, 20):        # 20: not even the last turn fits; then it alone
        score_replies(model, tokenizer, [(dialogue, ["Since when?"])])
    score_replies(model, tokenizer, [(DIALOGUE, ["Since when?"])])
    assert seen[1] <= 150 < seen[0] and seen[2] == seen[3] <= seen[1]


def test_a_replys_score_does_not_depend_on_its_siblings(tokenizer, tiny, monkeypatch):
    model, seen = RewardModel.from_pretrained(tiny), []
    monkeypatch.setattr(RewardModel, "forward", lambda self, packed: seen.append(packed.tokens.tolist()) or torch.zeros(len(packed.last)))
    dialogue, model.max_length = [{"role": r, "content": "word " * 20} for r in ("user", "assistant")] * 3 + DIALOGUE, 150
    for replies in (["Since when?"], ["Long. " * 30], ["Since when?", "Long. " * 30]):
        score_replies(model, tokenizer, [(dialogue, replies)])
    assert seen[2] == seen[0] + seen[1] and len(seen[0]) <= 150


def test_an_empty_reply_gets_the_fixed_reward(tokenizer, tiny):
    model = RewardModel.from_pretrained(tiny)
    model.mean, model.std = -1.0, 2.0
    scores = score_replies(model, tokenizer, [(DIALOGUE, ["", "Since when?"]), (DIALOGUE, [""])])
    assert scores == [[NO_REPLY_REWARD, 0.5], [NO_REPLY_REWARD]]                        # head of zeros: (0 - -1) / 2


def test_identical_replies_are_dropped_and_counted_case50(tokenizer):
    same = train_rm.pair_tree(tokenizer, {"id": "x", "prompt": DIALOGUE, "chosen": "<think>a</think>Yes.", "rejected": "Yes."}, 2048)[0]
    other = train_rm.pair_tree(tokenizer, {"id": "x", "prompt": DIALOGUE, "chosen": "Yes.", "rejected": "No."}, 2048)[0]
    assert train_rm.usable_pairs([same, other]) == ([other], 1)


def test_a_tie_is_not_correct_case49(tokenizer, tiny):
    trees = [train_rm.pair_tree(tokenizer, {"id": "x", "prompt": DIALOGUE, "chosen": "Yes, I see.", "rejected": "No."}, 2048)[0]]
    result = train_rm.evaluate(RewardModel.from_pretrained(tiny), trees, train_rm.Args(), "cpu")       # a head of zeros
    assert result == {"held_out_accuracy": 0.0, "longer_wins_accuracy": 1.0, "held_out_loss": pytest.approx(0.6931, abs=1e-4)}


def test_old_turns_are_dropped_to_fit_case12(tokenizer):
    dialogue = [{"role": r, "content": "word " * 20} for r in ("user", "assistant")] * 3 + DIALOGUE
    (prompt, (reply,)), dropped = reward_tree(tokenizer, dialogue, ["Since when?"], 150)
    assert 0 < dropped <= 6 and len(prompt) + len(reply) <= 150
    assert "I can't sleep." in tokenizer.decode(prompt)
    with pytest.raises(ValueError, match="even with the last turn only"):
        reward_tree(tokenizer, dialogue, ["Since when?"], 40)
