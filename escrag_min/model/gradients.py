"""Gradients by hand, where autograd keeps more for the backward pass than it takes.

RMSNorm:    y = w * x r,  r = 1/sqrt(mean(x²) + eps).  With n = x r and g = dy * w,

    dx = r · (g - n · mean(g * n)),     dw = Σ dy * n                               kept: x, r; autograd: x, n, r

SwiGLU's second half:    y = W_down (SiLU(a) * b).  With h = SiLU(a) * b and dh = W_downᵀ dy,

    da = dh * b * SiLU'(a),     db = dh * SiLU(a),     dW_down = Σ dy hᵀ            kept: a, b; autograd: a, b, SiLU(a), h

tests/model/test_gradients.py holds both against autograd of the definitions.
"""
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """x [..., H] / sqrt(mean(x²) + eps) · weight [H], the mean in float32 -> [..., H] in x's dtype"""
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normed(x, weight, eps)[0]


def _normed(x, weight, eps):
    x32 = x.float()
    r = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)                               # [...,1]
    return weight * (x32 * r).to(x.dtype), r


def gated_down(gate, up, weight):
    """(SiLU(gate) * up) · weightᵀ: gate and up [..., I], weight [H,I] -> [..., H]"""
    return _GatedDown.apply(*autocast(gate, up, weight))


def autocast(*tensors):
    """The tensors as autocast would give them to a matrix product, which it does not do for a function of one's own."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, r = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        n = x.float() * r
        dw = (dy * n.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype)                     # [H]
        g = (dy * weight).float()
        dx = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(r)
        return dx.to(x.dtype), dw, None


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return (F.silu(gate) * up) @ weight.mT

    @staticmethod
    def backward(ctx, dy):
        gate, up, weight = ctx.saved_tensors
        silu = F.silu(gate)                                                                  # [...,I]
        dw = dy.flatten(0, -2).mT @ (silu * up).flatten(0, -2)                               # [H,I]
        dh = dy @ weight                                                                     # [...,I]
        dup = silu.mul_(dh)                                     # in place: these are the largest arrays there are
        return torch.ops.aten.silu_backward(dh.mul_(up), gate), dup, dw
