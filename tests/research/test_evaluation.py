"""Evaluation against brute-force enumeration."""

import itertools

import numpy as np
import pytest

from research.evaluation import majority_at_k, mean_at_k, pass_at_k, summary


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [1] * c + [0] * (n - c)
        share = np.mean([max(subset) for subset in itertools.combinations(outcomes, k)])
        np.testing.assert_allclose(pass_at_k(n, c, k), [share], rtol=1e-12, atol=1e-15)


def test_pass_at_k_is_unbiased():
    # The expectation over n Bernoulli(p) samples is 1 - (1 - p)^k exactly, by summing over c.
    n, k, p = 6, 3, 0.3
    ways = [len(list(itertools.combinations(range(n), c))) for c in range(n + 1)]
    chance = [w * p**c * (1 - p) ** (n - c) for c, w in enumerate(ways)]
    expected = pass_at_k(n, np.arange(n + 1), k) @ chance
    np.testing.assert_allclose(expected, 1 - (1 - p) ** k, rtol=1e-12)


def test_pass_at_k_of_many_samples_is_stable():
    found = pass_at_k(100_000, [1, 50_000, 99_999], 1_000)
    np.testing.assert_allclose(found, [0.01, 1.0, 1.0], rtol=1e-9)


def test_pass_at_k_needs_samples():
    with pytest.raises(ValueError, match="pass@9 needs"):
        pass_at_k(8, 3, 9)
    with pytest.raises(ValueError, match="num_correct"):
        pass_at_k(8, 9, 2)


def test_mean_at_k():
    np.testing.assert_array_equal(mean_at_k([[1, 0, 1], [0, 0, 1]], 2), [0.5, 0.0])


def brute_majority(answers, correct, k):
    best = max(range(k), key=lambda i: (answers[:k].count(answers[i]), -answers.index(answers[i])))
    return correct[best]


def test_majority_against_brute_force():
    for answers in itertools.product("ab c".replace(" ", ""), repeat=5):
        correct = [float(a == "b") for a in answers]
        for k in range(1, 6):
            found = majority_at_k([list(answers)], [correct], k)
            assert found.tolist() == [brute_majority(answers, correct, k)], (answers, k)


def test_majority_ties_and_empty_votes():
    assert majority_at_k([["7", "8", "8", "7"]], [[0, 1, 1, 0]], 4).tolist() == [0.0]
    assert majority_at_k([["8", "7", "7", "8"]], [[1, 0, 0, 1]], 4).tolist() == [1.0]
    assert majority_at_k([["", "", "8"], ["", "", ""]], [[0, 0, 1], [1, 1, 1]], 3).tolist() == [
        1,
        0,
    ]
    with pytest.raises(ValueError, match="differ"):
        majority_at_k([["7"]], [[0, 1]], 1)


def test_summary():
    texts = ["1", "<answer>2</answer>", "2", "2", "3", "4", "4", "5"]
    correct = [[0, 1, 1, 1], [1, 0, 0, 0]]
    found = summary(texts, correct, lengths=np.arange(8), formatted=[0, 1, 0, 0, 0, 0, 0, 0])
    assert found == {
        "pass@1": 0.5, "pass@4": 1.0, "mean@4": 0.5, "majority@4": 0.5,
        "length": 3.5, "format_rate": 0.125, "prompts": 2, "samples": 4,
    }  # fmt: skip
    assert summary(["1", "2"], [[1], [0]]) == {"pass@1": 0.5, "prompts": 2, "samples": 1}
    assert "pass@2" in summary(texts, correct, ks=(2,))
    with pytest.raises(ValueError, match="3 texts; expected 8"):
        summary(texts[:3], correct)
