import pytest
import torch
from conftest import real_model

from escrag_min.chat import Tokenizer
from escrag_min.qwen2 import Qwen2
from escrag_min.sampling import draw, sample

PROMPTS = [[3, 17, 42, 9], [5], [8, 8, 8, 1, 2, 7, 9, 30, 31], [40, 41]]


def greedy_without_cache(model, prompt, n, stops=()):
    ids = list(prompt)
    for _ in range(n):
        with torch.no_grad():
            ids.append(model.logits(model(torch.tensor([ids]))[0, -1]).argmax().item())
        if ids[-1] in stops:
            break
    return ids[len(prompt):]


def test_ragged_greedy_batch_equals_one_at_a_time(wave_model):
    together = sample(wave_model, PROMPTS, max_new_tokens=12, temperature=0)
    assert [c[0].tokens for c in together] == [greedy_without_cache(wave_model, p, 12) for p in PROMPTS]
    assert not any(c[0].finished for c in together)


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_sampling_stops_on_any_stop_token_which_stays_case37(wave_model, stops):
    free = [greedy_without_cache(wave_model, p, 12) for p in PROMPTS]
    stop_tokens = [ids[3 * i] for i, ids in enumerate(free)][:stops]
    drawn = sample(wave_model, PROMPTS, max_new_tokens=12, temperature=0, stop_tokens=stop_tokens)
    for completion, prompt in zip(drawn, PROMPTS):
        expected = greedy_without_cache(wave_model, prompt, 12, stop_tokens)
        assert completion[0].tokens == expected
        assert completion[0].finished == (expected[-1] in stop_tokens)


def test_finished_is_about_the_completion_only_case09(wave_model):
    stop = 42                                                   # the prompt holds the stop token, as any chat prompt does
    completion = sample(wave_model, [[stop, 3, stop]], max_new_tokens=3, temperature=0, stop_tokens=[stop])[0][0]
    assert completion.tokens == greedy_without_cache(wave_model, [stop, 3, stop], 3, [stop])
    assert completion.finished == (stop in completion.tokens)
    assert not sample(wave_model, [[stop, 3, stop]], max_new_tokens=3, temperature=0, stop_tokens=[99])[0][0].finished


def test_temperature_zero_is_argmax_case16():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.9]])
    assert draw(logits, temperature=0).tolist() == [1, 0]
    assert draw(logits, torch.tensor([0.5, 0.5]).double(), temperature=1e-4).tolist() == [1, 0]
    with pytest.raises(ValueError, match="temperature 1.0 needs u"):
        draw(logits)


@pytest.mark.parametrize("kind, expected", [
    ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]), ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),
    ({"top_k": 2}, [0.625, 0.375, 0, 0]), ({"top_p": 0.6}, [0.625, 0.375, 0, 0]), ({"top_p": 0.5}, [1, 0, 0, 0]),
    ({"top_p": 0.001}, [1, 0, 0, 0])])
def test_draws_follow_the_distribution(kind, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(40000, 1)
    drawn = draw(logits, torch.rand(40000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), **kind)
    share = torch.bincount(drawn, minlength=4) / 40000
    torch.testing.assert_close(share, torch.tensor(expected, dtype=torch.float32), atol=0.01, rtol=0)
    assert (share[torch.tensor(expected) == 0] == 0).all()


def test_a_token_of_no_mass_is_never_drawn_at_either_end():
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 2] = 0.0
    assert draw(logits, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [2, 2]


def test_padding_rows_of_the_vocabulary_are_never_sampled(wave_model):
    with torch.no_grad():
        wave_model.lm_head.weight[50:] = 100 * wave_model.lm_head.weight[:1]
    generator = torch.Generator().manual_seed(0)
    for temperature in (0, 1.0):
        drawn = sample(wave_model, PROMPTS, 4, 10, temperature, vocab_size=50, generator=generator)
        assert max(t for group in drawn for c in group for t in c.tokens) < 50


def test_a_generator_makes_it_reproducible_and_samples_differ(wave_model):
    def run(seed):
        drawn = sample(wave_model, PROMPTS, 4, 10, generator=torch.Generator().manual_seed(seed))
        return [tuple(c.tokens) for group in drawn for c in group]
    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) == 16


def test_a_generator_a_prompt_makes_it_independent_of_the_batch(wave_model):
    def run(which, **options):
        generators = [torch.Generator().manual_seed(i) for i in which]
        return sample(wave_model, [PROMPTS[i] for i in which], 2, 10, generator=generators, **options)
    whole = run([0, 1, 2, 3], stop_tokens=range(0, 61, 5))                  # rows leave the cache at different steps
    assert len({len(c.tokens) for group in whole for c in group}) > 2
    assert [run([i], stop_tokens=range(0, 61, 5))[0] for i in range(4)] == whole
    assert run([2, 0], stop_tokens=range(0, 61, 5)) == [whole[2], whole[0]]
    with pytest.raises(ValueError, match="1 generators for 4 prompts"):
        sample(wave_model, PROMPTS, generator=[torch.Generator()])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_prompts_over_the_cache_budget_go_in_turns(wave_model, temperature):
    def run(**options):
        return sample(wave_model, PROMPTS, 2, 6, temperature, generator=torch.Generator().manual_seed(0), **options)
    assert run(max_cache_tokens=40) == run()
    assert sample(wave_model, [], max_new_tokens=6) == []


def test_it_samples_in_bf16(wave_model):
    drawn = sample(wave_model.bfloat16(), PROMPTS, 2, 5, generator=torch.Generator().manual_seed(0))       # what training does on CUDA
    assert all(len(c.tokens) == 5 for group in drawn for c in group)


@pytest.mark.parametrize("bad, words", [
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 600}, "needs 609 positions; the model has 512")])
def test_bad_options_are_named(wave_model, bad, words):
    with pytest.raises(ValueError, match=words):
        sample(wave_model, PROMPTS, **bad)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["smol"])
def test_greedy_equals_transformers_generate(name):
    transformers = pytest.importorskip("transformers")
    folder = real_model(name)
    tokenizer, ours = Tokenizer.from_pretrained(folder), Qwen2.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer.render([{"role": "user", "content": c}]) for c in ("I feel alone since I moved.", "hi")]
    drawn = sample(ours, prompts, max_new_tokens=24, temperature=0, stop_tokens=tokenizer.stop_tokens)
    for prompt, completion in zip(prompts, drawn):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False,
                                   eos_token_id=list(tokenizer.stop_tokens), pad_token_id=0)[0, len(prompt):]
        assert completion[0].tokens == expected.tolist()
