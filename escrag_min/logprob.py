"""Log-probabilities of response tokens, in chunks: never a [T, V] tensor of the whole batch.

    logp_n = z_n[y_n] - logsumexp_v z_n[v],     z_n = W_head · h[pred_n] / temperature       (float32)

A chunk's logits are recomputed in the backward pass, so that memory holds one chunk of [chunk, V] whatever N is.
The temperature is part of the policy: sampled at 0.7, scored at 0.7.
"""
import torch
from torch.utils.checkpoint import checkpoint


def token_logprobs(model, hidden, pred, targets, temperature=1.0, chunk=256, vocab_size=None, with_entropy=False):
    """log π(targets[n] | everything before it), in nats.

    model       has .logits(hidden[..., H]) -> [..., V]
    hidden      [T,H] of one packed sequence
    pred        int64[N] index into hidden of the predictor of each target; targets int64[N]
    temperature > 0 (0 has no log-probabilities: ValueError)
    vocab_size  score over the first so many rows of the head, those a tokenizer can produce; None: all. Use what
                sampling used.
    -> float32[N], or with_entropy: (float32[N], float32[N] entropy of each distribution, without gradient)
    """
    if temperature <= 0:
        raise ValueError(f"token_logprobs: temperature {temperature} has no log-probabilities; it must be above 0")

    def score(h, y):
        z = model.logits(h)[:, :vocab_size].float() / temperature            # [n,V]
        lse = z.logsumexp(dim=-1)                                            # [n]
        logp = z.gather(-1, y[:, None]).squeeze(-1) - lse                    # [n]
        if not with_entropy:
            return logp, logp.new_empty(0)
        with torch.no_grad():
            p = (z - lse[:, None]).exp()                                     # [n,V]
            return logp, lse - (p * z).sum(dim=-1)

    scored = [hidden.new_empty(0, dtype=torch.float32)], [hidden.new_empty(0, dtype=torch.float32)]
    for start in range(0, len(pred), chunk):
        h, y = hidden[pred[start:start + chunk]], targets[start:start + chunk]
        parts = checkpoint(score, h, y, use_reentrant=False) if torch.is_grad_enabled() else score(h, y)
        for whole, part in zip(scored, parts):
            whole.append(part)
    logp, entropy = map(torch.cat, scored)
    return (logp, entropy) if with_entropy else logp
