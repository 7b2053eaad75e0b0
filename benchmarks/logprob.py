"""LP: log-probabilities of 8 x 384 tokens with a head of 151,936 words, forward and backward. Against the full table of logits,
and against chunks of it that are recomputed in the backward pass (what most trainers do).

The hidden states are random, of the model's width. Checked: values and gradients agree.
"""
import torch
from common import compare, flops, options
from torch.utils.checkpoint import checkpoint

from escrag_min.model.checkpoint import read_config
from escrag_min.logprob import token_logprobs

WORDS = 151936


class Head(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lm_head = torch.nn.Linear(width, WORDS, bias=False)


def main():
    args = options(__doc__).parse_args()
    width, n = read_config(args.model).hidden_size, 8 * 384 * args.scale
    head = Head(width)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, width, generator=generator, requires_grad=True)
    targets, pred = torch.randint(WORDS, (n,), generator=generator), torch.arange(n)

    def select(h, y):
        return head.lm_head(h).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)

    results = []

    def clear():
        results[2:] = []
        head.lm_head.weight.grad = hidden.grad = None

    def ours():
        clear()
        logp = token_logprobs(head, hidden, pred, targets)
        logp.mean().backward()
        results.append(logp.detach())

    def full():
        clear()
        logp = select(hidden, targets)
        logp.mean().backward()
        results.append(logp.detach())

    def recomputed():
        clear()
        logp = torch.cat([checkpoint(select, h, y, use_reentrant=False) for h, y in zip(hidden.split(256), targets.split(256))])
        logp.mean().backward()
        results.append(logp.detach())
    checked = "not checked: no peer"
    if not args.only:
        ours()
        mine = (head.lm_head.weight.grad, hidden.grad)
        full()
        theirs = (head.lm_head.weight.grad, hidden.grad)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        for a, b in zip(mine, theirs):
            assert (a - b).norm() < 1e-4 * b.norm()
        del mine, theirs
        clear()
        checked = "log-probabilities and gradients agree"
    limit = ("6 FLOP a weight of the head and token at the measured peak", flops() / (6 * WORDS * width))
    compare(args, "LP", {"ours": ours, "full": full, "recomputed": recomputed}, "tok", n, limit, checked)


if __name__ == "__main__":
    main()
