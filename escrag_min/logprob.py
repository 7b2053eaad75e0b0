"""Log-probabilities of response tokens, in chunks: never a [T, V] tensor of the whole batch.

    logp_n = z_n[y_n] - lse_n,     lse_n = logsumexp_v z_n[v],     z_n = W_head · h[pred_n] / temperature       (float32)

and, with p_n = softmax(z_n) and g_n the gradient that arrives at logp_n,

    dz_n = g_n · (onehot(y_n) - p_n) / temperature,     dh_n = dz_n · W_head,     dW_head = Σ_n dz_nᵀ · h_n

The backward pass makes a chunk's z again from its lse and turns it into dz in place, so that memory holds one [chunk, V]
whatever N is, and time is that of one more product. The temperature is part of the policy: sampled at 0.7, scored at 0.7.
"""
import torch

from escrag_min.model.gradients import autocast

CHUNK = 512     # targets whose logits exist at once


def token_logprobs(model, hidden, pred, targets, temperature=1.0, chunk=CHUNK, vocab_size=None, with_entropy=False):
    """log π(targets[n] | everything before it), in nats.

    model       has .lm_head.weight [V,H], or else .logits(hidden[..., H]) -> [..., V], which is then differentiated whole
    hidden      [T,H] of one packed sequence
    pred        int64[N] index into hidden of the predictor of each target; targets int64[N]
    temperature > 0 (0 has no log-probabilities: ValueError)
    vocab_size  score over the first so many rows of the head, those a tokenizer can produce; None: all. Use what
                sampling used.
    -> float32[N], or with_entropy: (float32[N], float32[N] entropy of each distribution, without gradient)
    """
    if temperature <= 0:
        raise ValueError(f"token_logprobs: temperature {temperature} has no log-probabilities; it must be above 0")
    h = hidden[pred]                                                         # [N,H]
    if hasattr(model, "lm_head"):
        h, weight = autocast(h, model.lm_head.weight)
        logp, entropy = _TokenLogProbs.apply(h, weight, targets, temperature, chunk, vocab_size, with_entropy)
    else:
        logp, entropy = plain_logprobs(model.logits(h)[:, :vocab_size].float() / temperature, targets)
    return (logp, entropy) if with_entropy else logp


def plain_logprobs(z, targets):
    """The definition: z float32[N,V] -> (log-probabilities [N], entropies [N])."""
    logp = z.log_softmax(dim=-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.detach().exp() * logp.detach()).sum(dim=-1)


class _TokenLogProbs(torch.autograd.Function):
    """h [N,H], weight [V,H] -> (logp [N], entropy [N] or [0])"""

    @staticmethod
    def forward(ctx, h, weight, targets, temperature, chunk, vocab_size, with_entropy):
        head = weight[:vocab_size]
        logp, lse, entropy = [], [], []
        for x, y in zip(h.split(chunk), targets.split(chunk)):
            z = _scores(x, head, temperature)                                # [n,V]
            lse.append(z.logsumexp(dim=-1))                                  # [n]
            logp.append(z.gather(-1, y[:, None]).squeeze(-1) - lse[-1])
            if with_entropy:        # lse - Σ_v p_v z_v
                entropy.append(lse[-1] - torch.einsum("nv,nv->n", (z - lse[-1][:, None]).exp_(), z))
        none = h.new_empty(0, dtype=torch.float32)
        logp, lse, entropy = (torch.cat([none, *parts]) for parts in (logp, lse, entropy))
        ctx.save_for_backward(h, weight, targets, lse)
        ctx.settings = temperature, chunk, vocab_size
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, g, _):
        h, weight, targets, lse = ctx.saved_tensors
        temperature, chunk, vocab_size = ctx.settings
        head = weight[:vocab_size]
        dh, dw = torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(h), chunk):
            part = slice(start, start + chunk)
            x, y, scale = h[part], targets[part, None], (g[part, None] / temperature)
            dz = _scores(x, head, temperature).sub_(lse[part, None]).exp_().mul_(-scale).scatter_add_(-1, y, scale)     # [n,V]
            dz = dz.to(h.dtype)
            dh[part] = dz @ head
            if dz.dtype == torch.float32:
                dw[:vocab_size].addmm_(dz.mT, x)
            else:       # sum in float32
                dw[:vocab_size] += dz.mT @ x
        return dh, dw.to(weight.dtype), None, None, None, None, None


def _scores(x, head, temperature):
    z = (x @ head.mT).float()                                                # [n,V]
    return z if temperature == 1 else z.div_(temperature)
