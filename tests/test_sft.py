import pytest
import torch
from conftest import small_config, waves

from escrag_min.logprob import token_logprobs
from escrag_min.packing import pack
from escrag_min.qwen2 import Qwen2
from escrag_min.sft import sft_loss, sft_weights


def test_by_hand():
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss = sft_loss(logp, sft_weights(3, 3))
    loss.backward()
    assert loss.item() == pytest.approx(2.0)
    assert logp.grad.tolist() == pytest.approx([-1 / 3] * 3)


def test_micro_batches_add_up_to_the_global_mean_case02():
    a, b = torch.tensor([-4.0], requires_grad=True), torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    step = sft_loss(a, sft_weights(1, 4)) + sft_loss(b, sft_weights(3, 4))
    step.backward()
    assert step.item() == pytest.approx(1.75)                       # a mean of means would say 2.5
    assert torch.cat([a.grad, b.grad]).tolist() == pytest.approx([-0.25] * 4)


def test_two_and_six_tokens_have_the_gradient_of_eight_case01():
    w = torch.tensor([0.3, -0.2], requires_grad=True)
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]] + [[float(i), 1.0] for i in range(6)])

    def gradient(parts, totals):
        loss = sum(sft_loss(torch.nn.functional.logsigmoid(p @ w), sft_weights(len(p), n)) for p, n in zip(parts, totals))
        return torch.autograd.grad(loss, w)[0]
    one = gradient([x], [8])
    torch.testing.assert_close(gradient([x[:2], x[2:]], [8, 8]), one)
    assert not torch.allclose(gradient([x[:2], x[2:]], [2, 6]) / 2, one)        # the local mean is another gradient


def test_shapes_and_an_empty_step_are_errors():
    with pytest.raises(ValueError, match="shape"):
        sft_loss(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="no response token"):
        sft_weights(0, 0)


@pytest.mark.parity
def test_loss_and_gradient_equal_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = waves(Qwen2(small_config(tie=True)))
    model.save_pretrained(tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    prompt, reply = [1, 2, 3, 4], [5, 6, 7]
    expected = theirs(torch.tensor([prompt + reply]), labels=torch.tensor([[-100] * 4 + reply])).loss
    packed = pack([(prompt, [reply])])
    logp = token_logprobs(model, model(packed.tokens[None], mask=packed)[0], packed.pred, packed.targets)
    loss = sft_loss(logp, sft_weights(3, 3))
    loss.backward(), expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)
