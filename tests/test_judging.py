import math

import pytest

from escrag_min.judging import (
    DEFAULT_METRICS,
    METRICS,
    average,
    bootstrap_interval,
    by_perspective,
    correlation,
    holm,
    paired_bootstrap,
    pairwise_summary,
    parse_preference,
    parse_scores,
    perspective_means,
    reply_statistics,
    settle,
    wilson_interval,
    words_of,
)


@pytest.mark.parametrize("text, score", [
    ('```json\n{"empathy": 7}\n```', 7),
    ('The reply is warm. {"empathy": 8}', 8),
    ("There are 5 reasons why I like it, so a score of 9", 9),
    ("10/10", 10),
    ("I would say 7 out of 10.", 7),
    ('<think>3</think>{"score":4}', 4),
    ('<think>{"empathy": 2}', None),                                # never came to an answer
    ("｛＂empathy＂：８｝", 8),                                       # full-width throughout
    ("Ｓｃｏｒｅ：９", 9),
    ('{"empathy": 11}', None), ('{"empathy": -1}', None), ("score: 12", None), ("11/10", None),
    ('{"empathy": "9"}', 9), ('{"empathy": "9/10"}', 9), ('{"empathy": {"score": 9, "why": "x"}}', 9), ('{"Empathy ": 6.5}', 6.5),
    ('{"empathy": true}', None), ('{"empathy": null}', None), ('{"empathy": "good"}', None), ('{"empathy": NaN}', None),
    ("", None), (None, None), ("I cannot rate this.", None), ("There are 5 reasons.", None), ("4/5", None), ("between 3 and 4", None),
    ("score of 3, no, a score of 4", None),                         # contradicts itself
    ('{"empathy": 3} On reflection: {"empathy": 5}', 5),            # the last object counts
    ("7", 7), ("**7**", 7)])
def test_one_metric_case55(text, score):
    assert parse_scores(text, ["empathy"]) == (None if score is None else {"empathy": score})


def test_several_metrics_need_all_of_them_case55():
    names = ["emotional_impact", "non_lecturing_empathy"]
    assert parse_scores('Sure: {"Emotional Impact": 7, "non-lecturing empathy": 4, "x": {}}', names) == dict(zip(names, (7, 4)))
    assert parse_scores('{"emotional_impact": 7}', names) is None
    assert parse_scores('{"emotional_impact": 7, "non_lecturing_empathy": 17}', names) is None
    assert parse_scores("score of 9", names) is None
    assert parse_scores('{"emotional_impact": 1, "non_lecturing_empathy": 5}', names, low=1, high=5) == dict(zip(names, (1, 5)))


@pytest.mark.parametrize("text, choice", [
    ('{"better": "first"}', "first"), ('Well. {"better": "Second"}', "second"), ("tie", "tie"), ('"First."', "first"),
    ('<think>{"better": "first"}</think>{"better": "tie"}', "tie"), ('{"better": "A"}', None), ("", None), (None, None),
    ("the first one, or the second", None), ("**Second**", "second"), ('{"better": "First reply"}', "first")])
def test_choices_case56(text, choice):
    assert parse_preference(text) == choice


def scores(client, counselor, judge):
    """One number a perspective, the same for each of its metrics."""
    return {m.key: {"Client": client, "Counselor": counselor, "Judge": judge}[m.perspective] for m in DEFAULT_METRICS}


def test_seven_metrics_by_default_and_two_of_ours():
    assert [m.name for m in DEFAULT_METRICS] == ["Emotional Impact", "Non-Lecturing Empathy", "Therapeutic Alliance",
                                                 "Strategic Coherence", "Theoretical Application", "Strategy-Client Fit",
                                                 "Problem Targeting"]
    assert all("(ours)" in m.definition for m in METRICS if not m.by_default) and len(METRICS) == 9


def test_metrics_by_perspective():
    assert {p: [m.name for m in metrics] for p, metrics in by_perspective(METRICS[4:6]).items()} == {
        "Client": [], "Counselor": ["Theoretical Application"], "Judge": ["Strategy-Client Fit"]}


def test_average_is_of_the_perspectives_by_hand():
    given = {**scores(6, 8, 10), "emotional_impact": 9}             # Client: (9 + 6 + 6)/3 = 7
    assert perspective_means(given) == {"Client": 7.0, "Counselor": 8.0, "Judge": 10.0}
    assert average(given) == pytest.approx(25 / 3)                  # not the mean of seven metrics, 53/7
    assert average({**given, "problem_targeting": None}) is None
    assert perspective_means({**given, "problem_targeting": None}) == {"Client": 7.0, "Counselor": 8.0}


def test_wilson_by_hand():
    # p = 0.8, n = 10, z = 1.96: centre 0.8 + 0.19207 = 0.99207, half 1.96·sqrt(0.016 + 0.0096036) = 0.31362, over 1.38415
    low, high = wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0) and wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(0, 10)[1] == pytest.approx(1.959964**2 / (10 + 1.959964**2))


def test_bootstrap_resamples_dialogues_by_hand():
    # two dialogues, means 0 and 1: a resample is {0,0}, {0,1}, {1,0} or {1,1}: means 0, 1/2, 1
    values, clusters = [0.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"]
    assert bootstrap_interval(values, clusters, level=0.9) == (0.0, 1.0)
    assert bootstrap_interval(values, clusters, level=0.4) == (0.5, 0.5)        # the middle half of all resamples is 1/2
    assert bootstrap_interval([3.0] * 4, clusters) == (3.0, 3.0)
    unequal = bootstrap_interval([0.0, 1.0, 1.0, 1.0], ["a", "b", "b", "b"], level=0.4)
    assert unequal == (0.75, 0.75)                                              # {a, b} has one zero in four


def test_paired_bootstrap_by_hand():
    result = paired_bootstrap([2.0, 3.0, None, 5.0], [1.0, 2.0, 9.0, float("nan")])
    assert (result["difference"], result["low"], result["high"]) == (1.0, 1.0, 1.0)
    assert (result["n"], result["missing"]) == (2, 2) and result["p"] == 0.5    # two of two signs: 2 / 2^2, two-sided
    assert paired_bootstrap([1.0] * 20, [0.0] * 20)["p"] == pytest.approx(2 / 10001)
    assert paired_bootstrap([1.0] * 20, [0.0] * 20, clusters=["d"] * 20)["p"] == 1.0        # one dialogue tells nothing
    even = paired_bootstrap([1.0, 0.0], [0.0, 1.0])                             # gaps +1, -1: resampled means -1, 0, 0, 1
    assert even["difference"] == 0.0 and even["p"] == 1.0
    assert paired_bootstrap([None], [1.0])["difference"] is None
    with pytest.raises(ValueError):
        paired_bootstrap([1.0], [1.0, 2.0])
    one_sided = paired_bootstrap([1.0, 1.0, 1.0, -1.0], [0.0] * 4)
    # P(mean <= 0) for 4 draws with P(-1) = 1/4: at least two of them -1: 1 - (3/4)^4 - 4·(1/4)(3/4)^3 = 0.2617
    assert one_sided["p"] == pytest.approx(2 * 0.2617, abs=0.02)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0] and holm([]) == []


def test_correlation_by_hand():
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [1, 0, 1]) == pytest.approx(0.0)
    assert correlation([1, 1], [2, 3]) is None and correlation([1], [2]) is None


def test_a_win_must_survive_the_swap_case56():
    assert settle("first", "second") == "win" and settle("second", "first") == "loss" and settle("tie", "tie") == "tie"
    assert settle("first", "first") == settle("second", "second") == settle("first", "tie") == settle("tie", "first") == "tie"
    assert settle(None, "first") is None and settle("first", None) is None


def test_a_judge_that_prefers_the_first_yields_ties_case56():
    summary = pairwise_summary([("first", "first")] * 5, [(10, 5)] * 5)
    assert (summary["wins"], summary["ties"], summary["losses"]) == (0, 5, 0)
    assert summary["flip_rate"] == 1.0 and summary["first_rate"] == 1.0 and summary["wilson"] == (0.0, 1.0)


def test_pairwise_summary_by_hand_case56():
    verdicts = [("first", "second"), ("first", "second"), ("second", "first"), ("tie", "tie"), ("first", "tie"), (None, "first")]
    lengths = [(30, 10), (25, 10), (10, 30), (20, 20), (20, 20), (99, 1)]
    summary = pairwise_summary(verdicts, lengths)
    assert [summary[k] for k in ("wins", "ties", "losses", "unread")] == [2, 2, 1, 1]
    assert summary["win_rate"] == pytest.approx(3 / 5) and summary["flip_rate"] == pytest.approx(1 / 5)
    assert summary["first_rate"] == pytest.approx(4 / 10)           # first, first, (2nd: first), first of ten read verdicts
    assert summary["wilson"] == wilson_interval(2, 3)
    x, y = [1, 1, -1, 0, 0], [20, 15, -20, 0, 0]                    # outcome against difference in words
    mx, my = sum(x) / 5, sum(y) / 5
    by_hand = (sum((a - mx) * (b - my) for a, b in zip(x, y))
               / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)))
    assert summary["length_correlation"] == pytest.approx(by_hand)


def test_reply_statistics_by_hand():
    first = [{"role": "user", "content": "x"}]
    later = first + [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}] * 2
    records = [{"reply": "You should rest. You should rest.", "prompt": first}, {"reply": "What happened then?", "prompt": first},
               {"reply": "You should try walking.", "prompt": later}, {"reply": "", "prompt": later}]
    result = reply_statistics(records)
    assert (result["n"], result["empty"], result["words"]) == (4, 1, 13 / 4)
    assert result["question_rate"] == 0.25 and result["early_advice_rate"] == 0.5
    # words: you should rest you should rest | what happened then | you should try walking: 8 different of 13
    assert result["distinct_1"] == pytest.approx(8 / 13)
    # pairs: you-should, should-rest, rest-you, (repeated 2) | 2 | you-should again, should-try, try-walking: 7 different of 10
    assert result["distinct_2"] == pytest.approx(7 / 10)
    assert result["commonest_opening"] == "you should rest" and result["commonest_opening_share"] == 0.25


def test_a_typographic_apostrophe_is_an_apostrophe():
    for text in ("I’d suggest a walk.", "Why don’t you rest?"):
        straight, curly = ([{"reply": t, "prompt": []}] for t in (text.replace("’", "'"), text))
        assert reply_statistics(curly) == reply_statistics(straight) and reply_statistics(curly)["early_advice_rate"] == 1.0
    assert words_of("I’d rest") == ["i'd", "rest"]
