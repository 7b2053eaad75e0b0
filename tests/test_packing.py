import pytest
import torch
from conftest import small_config, waves

from escrag_min.packing import pack, split_into_packs, tree_size
from escrag_min.qwen2 import Qwen2

TREES = [([5, 6, 7], [[8, 9], [10]]), ([11], [[12, 13, 14]]), ([20, 21], [])]


def test_layout_by_hand():
    p = pack(TREES)
    assert p.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20, 21]
    assert p.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 1]
    assert p.tree.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert p.branch.tolist() == [0, 0, 0, 1, 1, 2, 0, 1, 1, 1, 0, 0]
    assert p.targets.tolist() == [8, 9, 10, 12, 13, 14]
    assert p.pred.tolist() == [2, 3, 2, 6, 7, 8]
    assert p.response.tolist() == [0, 0, 1, 2, 2, 2]
    assert p.last.tolist() == [4, 5, 9]
    assert p.lengths().tolist() == [2, 1, 3]


def test_mask_by_hand():
    mask = pack([([5, 6], [[7, 8], [9]])]).mask().int().tolist()
    assert mask == [[1, 0, 0, 0, 0],
                    [1, 1, 0, 0, 0],
                    [1, 1, 1, 0, 0],
                    [1, 1, 1, 1, 0],
                    [1, 1, 0, 0, 1]]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_packed_tree_equals_each_branch_alone_logits_and_gradients(kv_heads):
    model = waves(Qwen2(small_config(kv_heads=kv_heads)))
    packed = pack(TREES)

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    hidden = model(packed.tokens[None], mask=packed)[0]
    together = model.logits(hidden[packed.pred]).log_softmax(-1).gather(-1, packed.targets[:, None]).squeeze(-1)
    alone, sequences = [], [(p, b) for p, branches in TREES for b in branches]
    for prompt, branch in sequences:
        h = model(torch.tensor([prompt + branch]))[0]
        logp = model.logits(h).log_softmax(-1)
        alone.append(logp[range(len(prompt) - 1, len(prompt) + len(branch) - 1), branch])
    alone = torch.cat(alone)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    weight = torch.linspace(-1, 1, len(alone))
    ours, theirs = gradient((together * weight).sum()), gradient((alone * weight).sum())
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_sliced_attention_equals_the_dense_mask(wave_model):
    packed = pack(TREES)
    sliced = wave_model(packed.tokens[None], mask=packed)
    dense = wave_model(packed.tokens[None], packed.positions, packed.mask())
    torch.testing.assert_close(sliced, dense, atol=1e-5, rtol=0)


def test_empty_prompt_or_response_is_an_error():
    with pytest.raises(ValueError, match="prompt of tree 0 is empty"):
        pack([([], [[1]])])
    with pytest.raises(ValueError, match="response 1 of tree 0 is empty"):
        pack([([1], [[2], []])])


def test_split_into_packs_keeps_order_and_budget_case12():
    trees = [([1] * 4, [[2] * 3]), ([1] * 2, [[2]]), ([1] * 6, [[2] * 4])]
    assert [[tree_size(t) for t in p] for p in split_into_packs(trees, 10)] == [[7, 3], [10]]
    with pytest.raises(ValueError, match="--tokens-per-batch 9 is too small: one prompt with its response.s. has 10 tokens"):
        split_into_packs(trees, 9)


def test_a_large_tree_is_cut_into_trees_of_the_same_trunk():
    tree = ([1, 2], [[3], [4, 5], [6, 7, 8], [9]])
    packs = split_into_packs([tree], 5, split_trees=True)
    assert packs == [[([1, 2], [[3], [4, 5]])], [([1, 2], [[6, 7, 8]])], [([1, 2], [[9]])]]
    with pytest.raises(ValueError, match="4 is too small"):
        split_into_packs([tree], 4, split_trees=True)
