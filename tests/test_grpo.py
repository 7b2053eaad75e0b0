import math

import pytest
import torch

from escrag_min.grpo import clipped_objective, group_advantages, grpo_loss, kl_estimate, token_weights

NAN = float("nan")
t = torch.tensor


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, t(b), atol=tolerance, rtol=0, equal_nan=True)


def test_advantages_by_hand():
    # mean 2, sample variance ((1)²+0+(1)²)/2 = 1; population variance 2/3
    close(group_advantages(t([[1.0, 2.0, 3.0]]), eps=0.0), [[-1.0, 0.0, 1.0]])
    close(group_advantages(t([[1.0, 2.0, 3.0]]), eps=0.0, correction=0), [[-math.sqrt(1.5), 0.0, math.sqrt(1.5)]])
    close(group_advantages(t([[1.0, 2.0, 3.0]]), scale=False), [[-1.0, 0.0, 1.0]])


def test_groups_are_their_own_baseline_case13():
    close(group_advantages(t([[0.0, 1.0], [10.0, 11.0]]), eps=0.0), [[-0.70711, 0.70711]] * 2)


def test_a_group_of_one_is_refused_case14():
    with pytest.raises(ValueError, match="group of 1"):
        group_advantages(t([[1.0]]))


def test_unscored_responses_are_left_out():
    close(group_advantages(t([[1.0, NAN, 3.0]]), eps=0.0), [[-0.70711, 0.0, 0.70711]])
    close(group_advantages(t([[1.0, NAN, NAN], [NAN, NAN, NAN]])), [[0.0] * 3] * 2)


def test_equal_rewards_give_zero_and_near_equal_stay_small_case45():
    close(group_advantages(t([[2.0, 2.0, 2.0, 2.0]])), [[0.0] * 4])
    assert group_advantages(t([[5.0000005, 5.0, 5.0, 5.0]])).abs().max().item() == pytest.approx(0.0048, abs=1e-4)


def test_token_weights_by_hand_case20():
    advantage = torch.repeat_interleave(t([1.0, -1.0]), t([2, 6]))
    logp = torch.zeros(8)
    for how, expected in (("response", 0.0), ("token", 0.5), ("constant", 1 / 3)):
        weight = token_weights([2, 6], how, max_tokens=6)
        assert grpo_loss(logp, logp, advantage, weight)[0].item() == pytest.approx(expected, abs=1e-6)
    close(token_weights([2, 1]), [0.25, 0.25, 0.5])
    close(token_weights([2, 0], total_responses=4), [0.125, 0.125])
    close(token_weights([1], "token", total_tokens=10), [0.1])
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights([1], "constant")
    with pytest.raises(ValueError, match="'mean'"):
        token_weights([1], "mean")


@pytest.mark.parametrize("how", ["response", "token", "constant"])
def test_micro_batches_add_up_with_global_counts_case02(how):
    lengths, advantage = [3, 1, 2], t([0.5, -1.0, 2.0])
    logp = torch.linspace(-2, -1, 6, requires_grad=True)
    old = logp.detach() + t([0.1, -0.1, 0.0, 0.3, -0.3, 0.05])

    def gradient(splits):
        loss, start = 0.0, 0
        for part in splits:
            n = sum(lengths[i] for i in part)
            here = [lengths[i] for i in part]
            weight = token_weights(here, how, 4, total_responses=3, total_tokens=6)
            a = torch.repeat_interleave(advantage[part], t(here))
            loss = loss + grpo_loss(logp[start:start + n], old[start:start + n], a, weight)[0]
            start += n
        return torch.autograd.grad(loss, logp)[0], loss.item()
    (whole, loss), (parts, loss_parts) = gradient([[0, 1, 2]]), gradient([[0], [1, 2]])
    torch.testing.assert_close(whole, parts)
    assert loss == pytest.approx(loss_parts)


@pytest.mark.parametrize("ratio, advantage, loss, has_gradient", [
    (1.5, 1.0, -1.2, False), (0.5, -1.0, 0.8, False), (1.5, -1.0, 1.5, True), (0.5, 1.0, -0.5, True)])
def test_the_four_corners_case46(ratio, advantage, loss, has_gradient):
    logp = t([math.log(ratio)], requires_grad=True)
    value, stats = grpo_loss(logp, t([0.0]), t([advantage]), t([1.0]))
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert logp.grad.item() == pytest.approx(-ratio * advantage if has_gradient else 0.0, abs=1e-6)
    assert stats["clip_low"] + stats["clip_high"] == (0 if has_gradient else 1)


def test_asymmetric_clip():
    close(clipped_objective(t([math.log(1.25)] * 2), torch.zeros(2), t([1.0, 1.0]), 0.2, 0.28), [1.25, 1.25])
    close(clipped_objective(t([math.log(1.5)]), torch.zeros(1), t([1.0]), 0.2, 0.28), [1.28])
    close(clipped_objective(t([math.log(0.5)]), torch.zeros(1), t([-1.0]), 0.3, 0.2), [-0.7])


def test_the_loss_reads_zero_and_the_gradient_does_not_case19():
    logp = t([-1.0, -2.0], requires_grad=True)
    loss, _ = grpo_loss(logp, logp.detach(), t([1.0, -1.0]), token_weights([1, 1]))
    loss.backward()
    assert loss.item() == 0.0
    close(logp.grad, [-0.5, 0.5])


def test_any_ratio_leaves_value_and_gradient_finite():
    for gap in (-500.0, -30.0, 30.0, 500.0):
        for advantage in (1.0, -1.0):
            logp = t([gap], requires_grad=True)
            value = clipped_objective(logp, t([0.0]), t([advantage]))
            value.sum().backward()
            assert value.isfinite().all() and logp.grad.isfinite().all()


def test_kl_by_hand():
    close(kl_estimate(t([0.0, -1.0, -1.0]), t([0.0, -2.0, 0.0])), [0.0, math.exp(-1), math.e - 2])


def test_kl_is_finite_and_points_the_right_way_for_any_gap():
    for gap in (-1000.0, -50.0, -1.0, 1.0, 9.0, 11.0, 50.0, 1000.0):        # gap = logp_ref - logp
        logp = t([0.0], requires_grad=True)
        kl = kl_estimate(logp, t([gap]))
        kl.sum().backward()
        assert kl.isfinite().all() and kl.item() >= 0
        assert logp.grad.isfinite().all() and logp.grad.item() * gap < 0      # descending moves logp towards logp_ref
    below, above = kl_estimate(t([0.0, 0.0]), t([10.0 - 1e-3, 10.0 + 1e-3]))
    assert (above - below).item() == pytest.approx(2e-3 * math.exp(10), rel=0.05)       # no step where the tangent begins


def test_kl_in_the_loss_by_hand():
    logp = t([-1.0], requires_grad=True)
    loss, stats = grpo_loss(logp, t([-1.0]), t([2.0]), t([0.5]), t([0.0]), beta=0.1)
    kl = math.e - 2
    assert loss.item() == pytest.approx(-0.5 * (2.0 - 0.1 * kl), abs=1e-6)
    assert stats["kl"] == pytest.approx(kl, abs=1e-6)
    loss.backward()
    assert logp.grad.item() == pytest.approx(-0.5 * (2.0 - 0.1 * (1 - math.e)), abs=1e-5)   # dKL/dlogp = 1 - e^d
    with pytest.raises(ValueError, match="logp_ref"):
        grpo_loss(logp, t([-1.0]), t([2.0]), t([0.5]), beta=0.1)


def test_gradient_of_the_whole_loss_is_right():
    g = torch.Generator().manual_seed(0)
    logp, old, ref, advantage = (torch.randn(12, generator=g, dtype=torch.float64) * 0.3 for _ in range(4))
    logp.requires_grad_(True)
    weight = token_weights([5, 7]).double()
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, old, advantage, weight, ref, 0.2)[0], logp)
