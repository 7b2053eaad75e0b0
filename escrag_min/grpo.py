"""GRPO (paper §3 and D): group-relative advantage, clipped objective, KL to a reference.

For one prompt q, G responses o_1..o_G with rewards r_1..r_G:

    A_i      = (r_i - mean_j r_j) / (std_j r_j + eps)                                     group_advantages
    ρ_it     = π_θ(o_it | q, o_i<t) / π_old(o_it | q, o_i<t) = exp(logp - logp_old)
    J_it     = min( ρ_it·A_i, clip(ρ_it, 1-ε_low, 1+ε_high)·A_i )                         clipped_objective
    D_it     = π_ref/π_θ - log(π_ref/π_θ) - 1            (k3 estimate of the KL, >= 0)    kl_estimate
    L        = - Σ_i Σ_t  w_it · ( J_it - β·D_it )                                        grpo_loss
    w_it     = 1/(R·|o_i|), 1/Σ_j|o_j| or 1/(R·L_max)                                     token_weights

P prompts, G responses a prompt, R = P·G responses in the optimizer step, N sampled tokens. All of it is float32.

At the first inner step logp == logp_old, so ρ = 1, J_it = A_i, and with advantages of mean zero the loss *reads* 0.0;
its gradient, Σ w·A·∇logp, is not zero. Look at the reward, not at the loss.

The paper leaves the flavour of std, eps, β and the weighting open: sample std, 1e-4, 0 and 1/(R·|o_i|) are ours.
"""
import math

import torch

MAX_LOG_RATIO = 20.0    # ρ is capped at e^20: an infinite ρ times a zero gradient would be NaN
KL_LINEAR_FROM = 10.0   # beyond this gap, k3 goes on as its tangent: finite value and gradient, and the right sign


def group_advantages(rewards, eps=1e-4, scale=True, correction=1):
    """Rewards relative to their own group (paper D).

    rewards     [P,G]; NaN marks an unscored response: it is left out of mean and std, and its advantage is 0
    eps         added to the std
    scale       False: only centre (no division by the std)
    correction  1: sample std (divide by n-1); 0: population std
    -> [P,G] float32. A group with fewer than two scored responses has nothing to compare: all 0.
    """
    if rewards.ndim != 2:
        raise ValueError(f"group_advantages: rewards must have shape [prompts, group], got {list(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError("group_advantages: a group of 1 response has no baseline; the group size must be at least 2")
    rewards = rewards.float()
    scored = ~rewards.isnan()                                                   # [P,G]
    n = scored.sum(dim=1, keepdim=True)                                         # [P,1]
    mean = rewards.nan_to_num().sum(dim=1, keepdim=True) / n.clamp(min=1)       # [P,1]
    centred = torch.where(scored & (n >= 2), rewards - mean, 0.0)               # [P,G]
    if not scale:
        return centred
    std = (centred.square().sum(dim=1, keepdim=True) / (n - correction).clamp(min=1)).sqrt()
    return centred / (std + eps)


def token_weights(lengths, how="response", max_tokens=None, total_responses=None, total_tokens=None):
    """The weight of each sampled token: the only place in GRPO that normalises.

    lengths          |o_i| in tokens of the responses at hand, int[R_here]; 0 is allowed and gets no weight
    how              "response": 1/(R·|o_i|), each response counts the same (GRPO)
                     "token":    1/Σ_j|o_j|, each token counts the same (DAPO)
                     "constant": 1/(R·L), L = max_tokens (Dr. GRPO)
    total_responses  R of the whole optimizer step, all micro-batches and ranks; None: those at hand
    total_tokens     Σ_j|o_j| of the whole step; None: those at hand
    -> float32[sum(lengths)], response after response.
    """
    lengths = torch.as_tensor(lengths)
    responses = len(lengths) if total_responses is None else total_responses
    if how == "response":
        each = 1.0 / (responses * lengths.clamp(min=1).float())
    elif how == "token":
        tokens = int(lengths.sum()) if total_tokens is None else total_tokens
        each = torch.full(lengths.shape, 1.0 / max(tokens, 1), device=lengths.device)
    elif how == "constant":
        if not max_tokens:
            raise ValueError('token_weights: how="constant" needs max_tokens, the length every response is divided by')
        each = torch.full(lengths.shape, 1.0 / (responses * max_tokens), device=lengths.device)
    else:
        raise ValueError(f'token_weights: how={how!r}; allowed: "response", "token", "constant"')
    return torch.repeat_interleave(each, lengths)


def _ratio(logp, logp_old):
    return (logp - logp_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_objective(logp, logp_old, advantage, clip_low=0.2, clip_high=0.2):
    """J_it = min(ρA, clip(ρ, 1-ε_low, 1+ε_high)A), to be maximised. All [N] -> [N].

    The min is pessimistic: a move that already went too far in the good direction earns nothing more (no gradient), one
    that went in the bad direction is corrected (gradient), whatever the sign of A; but beyond a ratio of e^20 there is none.
    """
    ratio = _ratio(logp, logp_old)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def kl_estimate(logp, logp_ref):
    """k3 estimate of KL(π_θ ‖ π_ref) at each sampled token: e^d - d - 1, d = logp_ref - logp. All [N] -> [N], >= 0.

    For d > 10 it continues along its tangent, so that value and gradient stay finite for any gap.
    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    d = logp_ref - logp
    near, beyond = d.clamp(max=KL_LINEAR_FROM), (d - KL_LINEAR_FROM).relu()
    return near.expm1() - near + math.expm1(KL_LINEAR_FROM) * beyond        # expm1: exact for the tiny gaps of a first step


def grpo_loss(logp, logp_old, advantage, weight, logp_ref=None, beta=0.0, clip_low=0.2, clip_high=0.2):
    """-Σ w·(J - β·D) over the tokens at hand.

    logp [N] carries the gradient; logp_old, advantage, weight, logp_ref [N] do not.
    -> (scalar loss, stats). stats holds *sums over tokens* (divide by the step's token count): "tokens", "ratio",
    "clip_low" and "clip_high" (tokens whose gradient the clip took), "kl" (0 without logp_ref).
    """
    if beta and logp_ref is None:
        raise ValueError(f"grpo_loss: beta={beta} needs logp_ref, the reference model's log-probabilities")
    objective = clipped_objective(logp, logp_old, advantage, clip_low, clip_high)
    kl = torch.zeros_like(logp) if logp_ref is None else kl_estimate(logp, logp_ref)
    loss = -(weight * (objective - beta * kl)).sum()
    with torch.no_grad():
        ratio = _ratio(logp, logp_old)
        stats = {
            "tokens": float(logp.numel()),
            "ratio": ratio.sum().item(),
            "clip_low": ((ratio < 1 - clip_low) & (advantage < 0)).sum().item(),
            "clip_high": ((ratio > 1 + clip_high) & (advantage > 0)).sum().item(),
            "kl": kl.sum().item(),
        }
    return loss, stats
