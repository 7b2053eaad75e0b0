import pytest
import torch

from escrag_min.logprob import token_logprobs
from escrag_min.packing import pack


class Head:
    """logits = hidden: the numbers of a test are the logits."""

    @staticmethod
    def logits(hidden):
        return hidden


def test_temperature_is_in_the_log_probabilities_case16():
    hidden, zero = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    assert token_logprobs(Head, hidden, zero, zero, temperature=0.5).item() == pytest.approx(-0.01815, abs=1e-5)
    assert token_logprobs(Head, hidden, zero, zero).item() == pytest.approx(-0.12693, abs=1e-5)
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(Head, hidden, zero, zero, temperature=0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_nothing_values_gradients_entropy(wave_model, chunk):
    packed = pack([([1, 2, 3], [[4, 5, 6], [7]]), ([8], [[9, 10]])])

    def run(fn):
        wave_model.zero_grad()
        hidden = wave_model(packed.tokens[None], mask=packed)[0]
        logp, entropy = fn(hidden)
        (logp * torch.arange(1, 7)).sum().backward()
        return logp.detach(), entropy, wave_model.lm_head.weight.grad.clone(), wave_model.model.embed_tokens.weight.grad.clone()

    def plain(hidden):
        full = (wave_model.logits(hidden[packed.pred]) / 0.7).log_softmax(-1)
        return full.gather(-1, packed.targets[:, None]).squeeze(-1), -(full.exp() * full).sum(-1).detach()
    ours = run(lambda h: token_logprobs(wave_model, h, packed.pred, packed.targets, 0.7, chunk, with_entropy=True))
    for a, b in zip(ours, run(plain)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert ours[0].dtype == torch.float32 and not ours[1].requires_grad


def test_padding_rows_of_the_head_are_left_out():
    hidden, zero = torch.tensor([[1.0, 0.0, 50.0]]), torch.tensor([0])
    expected = torch.tensor([1.0, 0.0]).log_softmax(-1)[0].item()
    assert token_logprobs(Head, hidden, zero, zero, vocab_size=2).item() == pytest.approx(expected)


def test_no_target_gives_an_empty_result():
    none = torch.empty(0, dtype=torch.long)
    assert token_logprobs(Head, torch.zeros(2, 3), none, none).shape == (0,)


def test_sampled_ids_are_trained_on_never_a_re_encoding_case18(tokenizer):
    merged = next(ids for ids in ([tokenizer.encode(a + b), tokenizer.encode(a) + tokenizer.encode(b)]
                                  for a in "thei" for b in "hern") if ids[0] != ids[1])
    sampled = merged[1]                                             # two tokens that BPE would write as one
    assert tokenizer.encode(tokenizer.decode(sampled)) != sampled
    assert pack([([5], [sampled])]).targets.tolist() == sampled


def test_retrieved_text_never_enters_the_loss_case51(wave_model):
    retrieved = [30, 31, 32]                                        # in the trunk, with the rest of the prompt
    packed = pack([([1, *retrieved, 2], [[3, 4]])])
    assert packed.targets.tolist() == [3, 4]
    hidden = wave_model(packed.tokens[None], mask=packed)[0]
    before = token_logprobs(wave_model, hidden, packed.pred, packed.targets)
    packed.tokens[1:4] = torch.tensor([50, 51, 52])                 # other ids as *targets*: same hidden, nothing changes
    torch.testing.assert_close(token_logprobs(wave_model, hidden, packed.pred, packed.targets), before, rtol=0, atol=0)
    gradient = torch.autograd.grad(before.sum(), wave_model.lm_head.weight)[0]
    assert gradient[[3, 4]].abs().sum(-1).min() > gradient[[30, 31, 32, 50, 51, 52]].abs().sum(-1).max()
