"""The gradients written by hand: numbers on paper, autograd of the definitions, and that they keep less."""
import pytest
import torch
import torch.nn.functional as F

from escrag_min.model.gradients import gated_down, rms_norm


def test_rms_norm_by_hand():
    # x = (3, 4): mean of squares 12.5, r = 1/sqrt(12.5). dy = (1, 0), w = (2, 1): g = (2, 0), n = (3r, 4r)
    # dx = r (g - n mean(g n)) = r ((2, 0) - (3r, 4r) · 3r) = r (2 - 9/12.5, -12/12.5) = r (1.28, -0.96)
    # dw = dy n = (3r, 0)
    r = 12.5**-0.5
    x, w = torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([2.0, 1.0], requires_grad=True)
    y = rms_norm(x[None], w, 0.0)
    assert y[0].tolist() == pytest.approx([6 * r, 4 * r])
    y[0, 0].backward()
    assert x.grad.tolist() == pytest.approx([1.28 * r, -0.96 * r])
    assert w.grad.tolist() == pytest.approx([3 * r, 0.0])


def test_gated_down_by_hand():
    # gate 0: SiLU(0) = 0, SiLU'(0) = 1/2. up 3, weight 5: y = 0, d gate = 5·3·1/2, d up = 5·0, d weight = 0
    gate, up, w = (torch.tensor([[v]], requires_grad=True) for v in (0.0, 3.0, 5.0))
    y = gated_down(gate, up, w)
    y.backward()
    assert (y.item(), gate.grad.item(), up.grad.item(), w.grad.item()) == (0.0, 7.5, 0.0, 0.0)


def definitions(x, weight, gate, up, down):
    x32 = x.float()
    n = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return weight * n, F.linear(F.silu(gate) * up, down)


def by_hand(x, weight, gate, up, down):
    return rms_norm(x, weight, 1e-6), gated_down(gate, up, down)


def gradients(function, dtype):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in
               ((2, 5, 6), (6,), (2, 5, 8), (2, 5, 8), (6, 8))]
    outputs = function(*tensors)
    sum((y.float() * torch.randn(y.shape, generator=g)).sum() for y in outputs).backward()
    return [*outputs, *(t.grad for t in tensors)]


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_they_are_those_of_the_definitions(dtype, off):
    for one, other in zip(gradients(by_hand, dtype), gradients(definitions, dtype)):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=off, atol=off)


def test_inside_autocast():
    def run(function):
        tensors = [torch.linspace(-1, 1, n).view(2, -1).requires_grad_() for n in (8, 8, 12)]
        with torch.autocast("cpu", torch.bfloat16):
            y = function(tensors[0], tensors[1], tensors[2].view(3, 4))
        y.float().sum().backward()
        return [y, *(t.grad for t in tensors)]
    for one, other in zip(run(gated_down), run(lambda a, b, w: F.linear(F.silu(a) * b, w))):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def test_they_keep_their_inputs_and_nothing_of_their_size():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    gate, up, down = (torch.randn(3, n, requires_grad=True) for n in (7, 7, 7))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
        gated_down(gate, up, down)
    inputs = {t.data_ptr() for t in (x, weight, gate, up, down)}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in inputs] == [(3, 1)]         # r
