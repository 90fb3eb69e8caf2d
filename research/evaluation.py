"""Evaluation: pass@k, mean@k and majority@k of several samples per held-out prompt.

A sample is correct or not: the caller decides (a reward of at least 1, say).
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from research.answers import extract_answer


def pass_at_k(num_samples, num_correct, k: int) -> np.ndarray:
    """Unbiased estimate of the chance that at least one of k samples is correct.

        1 - C(n - c, k) / C(n, k)  =  1 - prod_{i=n-c+1..n} (1 - k / i)

    The product form has no large numbers, and is exactly 1 where n - c < k.

    Args:
      num_samples: n, samples drawn for each prompt, [P] or a scalar.
      num_correct: c, how many of them are correct, [P] or a scalar.
      k: at most n.

    Returns:
      The estimate for each prompt, [P] float64.

    Raises:
      ValueError: k is less than 1 or more than n, or c is not in 0..n.

    Reference: Chen et al. 2021, arXiv 2107.03374.
    """
    n, c = np.broadcast_arrays(np.atleast_1d(num_samples), np.atleast_1d(num_correct))
    if k < 1 or np.any(n < k):
        raise ValueError(f"pass@{k} needs 1 <= k <= samples; there are {n.min()} samples.")
    if np.any((c < 0) | (c > n)):
        raise ValueError(f"num_correct must lie in 0..num_samples; got {c} of {n}.")

    def estimate(n, c):
        if n - c < k:
            return 1.0
        return 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64))

    return np.array([estimate(int(n_), int(c_)) for n_, c_ in zip(n, c)])


def mean_at_k(correct, k: int) -> np.ndarray:
    """Share of correct ones among the first k samples, [P] float64 (correct: [P, n])."""
    correct = _samples(correct, k)
    return correct[:, :k].mean(axis=1, dtype=np.float64)


def majority_at_k(answers: Sequence[Sequence[str]], correct, k: int) -> np.ndarray:
    """Whether the commonest answer among the first k samples is correct.

    Of equally common answers the one given first wins. A sample without an answer (an empty one)
    has no vote; a prompt without a vote counts as wrong.

    Args:
      answers: extracted answers, P rows of n.
      correct: [P, n] of 0 and 1.
      k: at most n.

    Returns:
      [P] float64 of 0 and 1.

    Raises:
      ValueError: k is less than 1 or more than n, or the shapes differ.
    """
    correct = _samples(correct, k)
    shape = len(answers), {len(row) for row in answers}
    if shape != (correct.shape[0], {correct.shape[1]}):
        raise ValueError(f"answers and correct differ: {shape} and {correct.shape}.")
    result = np.zeros(len(answers), np.float64)
    for row, given in enumerate(answers):
        votes = Counter(answer for answer in given[:k] if answer)
        if votes:  # most_common keeps the order of first appearance among equals
            winner = votes.most_common(1)[0][0]
            result[row] = correct[row, list(given).index(winner)]
    return result


def _samples(correct, k: int) -> np.ndarray:
    correct = np.asarray(correct)
    if correct.ndim != 2 or not 1 <= k <= correct.shape[1]:
        raise ValueError(f"Expected correct [P, n] and 1 <= k <= n; got {correct.shape}, k={k}.")
    return correct


def summary(
    texts: Sequence[str],
    correct,
    *,
    lengths=None,
    formatted=None,
    ks: Sequence[int] | None = None,
) -> dict[str, float]:
    """Summarises n samples for each of P prompts.

    Args:
      texts: P * n responses, those to one prompt next to each other; votes are counted over the
        answers extracted from them.
      correct: [P, n] of 0 and 1.
      lengths: P * n response lengths in tokens, of any shape; None leaves out `length`.
      formatted: P * n of 0 and 1, whether a response keeps to the format (the `format` reward);
        None leaves out `format_rate`.
      ks: by default 1 and n.

    Returns:
      pass@k, mean@k and majority@k averaged over prompts, length, format_rate, and the counts
      `prompts` and `samples`. pass@1 uses all n samples; mean@1 and majority@1, the first sample
      alone, are left out.

    Raises:
      ValueError: shapes differ, or a k is more than n.
    """
    correct = _samples(correct, 1)
    prompts, samples = correct.shape
    for name, array in {"texts": texts, "lengths": lengths, "formatted": formatted}.items():
        if array is not None and np.size(array) != correct.size:
            raise ValueError(
                f"{np.size(array)} {name}; expected {correct.size}, as correct is {correct.shape}."
            )
    answers = [extract_answer(text) for text in texts]
    answers = [answers[row * samples : (row + 1) * samples] for row in range(prompts)]
    result = {}
    for k in sorted(set(ks or (1, samples))):
        result[f"pass@{k}"] = float(pass_at_k(samples, correct.sum(axis=1), k).mean())
        if k > 1:
            result[f"mean@{k}"] = float(mean_at_k(correct, k).mean())
            result[f"majority@{k}"] = float(majority_at_k(answers, correct, k).mean())
    for name, array in {"length": lengths, "format_rate": formatted}.items():
        if array is not None:
            result[name] = float(np.mean(array))
    return {**result, "prompts": prompts, "samples": samples}
