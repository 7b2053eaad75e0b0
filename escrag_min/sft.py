"""Cold start (paper §3): masked negative log-likelihood.

    L_SFT = - Σ_n  w_n · log π_θ(y_n | prompt, y_<n)

    y_n     the n-th response token of the optimizer step, over all demonstrations    [N]
    w_n     its weight; 1 / (number of response tokens in the whole step) gives the usual token mean

The weights hold the *global* count, so that micro-batches and ranks simply add up: sum, never mean of means.
Prompt tokens have no n, hence no term. The end-of-turn token is a response token like any other.
"""
import torch


def sft_loss(logp, weight):
    """logp float32[N], weight float32[N] (no gradient) -> scalar: -Σ w·logp, in nats."""
    if logp.shape != weight.shape:
        raise ValueError(f"sft_loss: logp has shape {list(logp.shape)}, weight {list(weight.shape)}; they must be equal")
    return -(weight * logp).sum()


def sft_weights(n_tokens, total_tokens, device=None):
    """float32[n_tokens], each 1/total_tokens; total_tokens counts the response tokens of the whole optimizer step."""
    if total_tokens < 1:
        raise ValueError("sft_weights: total_tokens is 0: the step has no response token to learn from")
    return torch.full((n_tokens,), 1.0 / total_tokens, device=device)
