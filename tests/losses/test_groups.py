"""Statistics per group against numpy loops over ragged, interleaved groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.ops import groups

IDS = np.array([40, -2, 40, 7, -2, 40, 0, 7, 40, -2, 40, 3, 3])
"""Groups of 5, 3, 2, 2 and one of 1, in no order."""

VALID = np.array([1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0], float)
"""Leaves a group of one and a group of two without members."""


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def values(seed=0):
    """Values with ties, and one group of equal ones whose mean is not exact."""
    x = np.round(np.random.default_rng(seed).normal(size=len(IDS)), 1)
    x[IDS == -2] = 0.1
    return x


def by_loop(x, statistic, valid=None, empty=0.0):
    """A statistic of the (valid) members of each row's group."""
    keep = np.ones(len(IDS)) if valid is None else valid
    members = [x[(IDS == g) & (keep > 0)] for g in IDS]
    return np.array([statistic(m) if len(m) else empty for m in members])


def std(m, ddof=1):
    return np.sqrt(((m - m.mean()) ** 2).sum() / max(len(m) - ddof, 1)) * (np.ptp(m) > 0)


STATISTICS = {
    "group_sum": (groups.group_sum, np.sum, 0.0),
    "group_mean": (groups.group_mean, np.mean, 0.0),
    "group_max": (groups.group_max, np.max, -np.inf),
    "group_min": (groups.group_min, np.min, np.inf),
    "group_std": (groups.group_std, std, 0.0),
    "group_median": (groups.group_median, np.median, 0.0),
    "all_equal": (groups.all_equal, lambda m: np.ptp(m) == 0, True),
}


@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "valid"])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_against_a_loop(name, valid):
    function, statistic, empty = STATISTICS[name]
    x = values()
    out = np.asarray(function(x, IDS, valid=valid))
    np.testing.assert_allclose(out, by_loop(x, statistic, valid, empty), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ddof", [0, 1])
def test_spread_is_exactly_zero_where_all_are_equal(ddof):
    x = values(1)
    np.testing.assert_allclose(
        groups.group_std(x, IDS, ddof=ddof), by_loop(x, lambda m: std(m, ddof)), rtol=1e-12
    )
    for out in (groups.group_std(x, IDS), groups.centred(x, IDS), groups.standardised(x, IDS)):
        np.testing.assert_array_equal(np.asarray(out)[IDS == -2], 0)
        np.testing.assert_array_equal(np.asarray(out)[IDS == 0], 0)


def test_single_precision_rounding_is_not_blown_up():
    x = np.full(7, 0.1, np.float32)
    out = groups.standardised(jnp.asarray(x), jnp.zeros(7, jnp.int32), eps=1e-12)
    np.testing.assert_array_equal(out, 0)


def test_sizes_and_numbers_of_groups():
    np.testing.assert_array_equal(groups.group_size(IDS), by_loop(values(), len))
    np.testing.assert_array_equal(groups.group_size(IDS, VALID), by_loop(values(), len, VALID))
    assert groups.number_of_groups(IDS) == len(set(IDS))
    first = np.array([list(IDS).index(g) for g in IDS])
    np.testing.assert_array_equal(groups.group_index(IDS), first)
    np.testing.assert_array_equal(groups.first_in_group(IDS), first == np.arange(len(IDS)))


@pytest.mark.parametrize("eps,ddof", [(1e-6, 1), (0.3, 0)])
def test_standard_scores(eps, ddof):
    x = values(2)
    mean, spread = by_loop(x, np.mean), by_loop(x, lambda m: std(m, ddof))
    expected = np.where(spread > 0, (x - mean) / (spread + eps), 0)
    np.testing.assert_allclose(groups.standardised(x, IDS, eps=eps, ddof=ddof), expected, 1e-10)


def test_a_group_of_one_keeps_its_value_in_the_raw_convention():
    x = values(3)
    out = np.asarray(groups.standardised_or_raw(x, IDS, eps=1e-3))
    expected = np.where(IDS == 0, x / 1.001, groups.standardised(x, IDS, eps=1e-3))
    np.testing.assert_allclose(out, expected, rtol=1e-12)


@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "valid"])
def test_leave_one_out_mean_against_a_loop(valid):
    x = values(4)
    keep = np.ones(len(IDS)) if valid is None else valid
    expected = np.zeros(len(x))
    for i, g in enumerate(IDS):
        others = [x[j] for j in np.flatnonzero((IDS == g) & (keep > 0)) if j != i]
        expected[i] = np.mean(others) if others else 0
    np.testing.assert_allclose(groups.leave_one_out_mean(x, IDS, valid), expected, rtol=1e-12)


@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "valid"])
def test_rank_counts_strictly_smaller_members(valid):
    x = values(5)
    keep = np.ones(len(IDS)) if valid is None else valid
    expected = [(x[(IDS == g) & (keep > 0)] < v).sum() for g, v in zip(IDS, x)]
    np.testing.assert_array_equal(groups.group_rank(x, IDS, valid), expected)


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "valid"])
def test_quantile_against_numpy(quantile, valid):
    x = values(6)
    expected = by_loop(x, lambda m: np.quantile(m, quantile), valid)
    np.testing.assert_allclose(
        groups.group_quantile(x, IDS, quantile, valid), expected, rtol=1e-12, atol=1e-15
    )


def test_quantile_at_a_whole_position_is_that_member_in_single_precision():
    x = jnp.asarray(np.random.default_rng(7).permutation(np.linspace(0.1, 0.9, 11)), jnp.float32)
    for q in np.arange(11) / 10:
        out = groups.group_quantile(x, jnp.zeros(11, jnp.int32), float(q))
        np.testing.assert_array_equal(out, jnp.sort(x)[round(10 * q)])


def test_order_statistics_against_a_loop():
    x = values(8)
    for place in (lambda n: 0, lambda n: n - 1, lambda n: (n - 1) // 2):
        index = np.array([place((IDS == g).sum()) for g in IDS])
        expected = by_loop(x, lambda m: np.sort(m)[place(len(m))])  # noqa: B023
        np.testing.assert_array_equal(groups.order_statistic(x, IDS, index), expected)


def test_columns_and_logsumexp_against_a_loop():
    x = np.random.default_rng(9).normal(size=(len(IDS), 3))
    total = np.stack([by_loop(c, np.sum) for c in x.T], 1)
    top = np.stack([by_loop(c, np.max) for c in x.T], 1)
    np.testing.assert_allclose(groups.column_sum(x, IDS), total, rtol=1e-12)
    np.testing.assert_array_equal(groups.column_max(x, IDS), top)
    for valid in (None, VALID):
        expected = by_loop(x[:, 0], lambda m: np.log(np.exp(m).sum()), valid)
        np.testing.assert_allclose(
            groups.group_logsumexp(x[:, 0], IDS, valid), expected, rtol=1e-12, atol=1e-12
        )


def test_statistics_follow_a_permutation_and_ignore_the_labels():
    x, order = values(10), np.random.default_rng(10).permutation(len(IDS))
    before = np.asarray(groups.standardised(x, IDS))
    after = groups.standardised(x[order], 5 - 3 * IDS[order])
    np.testing.assert_allclose(after, before[order], rtol=1e-12)
