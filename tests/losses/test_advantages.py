"""What the papers of losses/advantages state of themselves, checked in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from losses.advantages import entropy_minimization, gdro, mssr, pair_wgrpo, pvpo, trloo
from losses.advantages.mc_grpo import mc_grpo_keep
from losses.advantages.ngrpo import ngrpo_keep
from losses.advantages.s_grpo_tspmo import s_grpo_token_mask

GROUPS = np.array([7, 2, 7, 2, 2, 7, -3, 7, 5, 2, 5])
"""Ragged, interleaved groups: four of 7 and of 2, two of 5, one of -3."""

WHOLE = np.isin(GROUPS, [7, 2, 5])


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def batch(seed=0, length=7):
    """Arrays of eleven responses: masks with holes, an empty row, a row of one token."""
    rng = np.random.default_rng(seed)
    shape = (len(GROUPS), length)
    mask = (rng.random(shape) < 0.75).astype(float)
    mask[3] = 0
    mask[8] = np.eye(length)[4]
    old = -rng.exponential(1.0, shape)
    return {
        "mask": mask,
        "advantages": rng.normal(size=shape[0])[:, None] * np.ones(shape),
        "old_logprobs": old,
        "logprobs": np.minimum(old + 0.3 * rng.normal(size=shape), -1e-3),
        "ref_logprobs": np.minimum(old + 0.3 * rng.normal(size=shape), -1e-3),
        "entropy": rng.uniform(0.05, 2.0, shape),
        "rewards": rng.integers(0, 2, shape[0]).astype(float),
        "group_ids": GROUPS,
    }


def call(name, arrays, **hyper):
    """The paper's function on the arrays of its signature, as numpy."""
    found = losses.entry(name)
    out = found.function(**{n: arrays[n] for n in found.arrays if n in arrays}, **hyper)
    return jax.tree.map(np.asarray, out)


def gradient(name, arrays, wrt="logprobs", **hyper):
    """Gradient of a loss, or of the sum of an array function, with respect to one array."""
    found = losses.entry(name)
    rest = {n: arrays[n] for n in found.arrays if n in arrays and n != wrt}

    def total(x):
        out = found.function(**rest, **{wrt: x}, **hyper)
        return out[0] if isinstance(out, tuple) else jnp.sum(out)

    return np.asarray(jax.grad(total)(jnp.asarray(arrays[wrt])))


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def grpo(rewards, groups=GROUPS, eps=1e-6, alone=0.0):
    """(r - mean) / (unbiased std + eps) by a loop; a group of one: alone times its reward."""
    out = np.zeros(len(rewards))
    for g in set(groups):
        rows = np.flatnonzero(groups == g)
        r = rewards[rows]
        if len(rows) == 1:
            out[rows] = alone * r
        elif r.max() > r.min():
            out[rows] = (r - r.mean()) / (r.std(ddof=1) + eps)
    return out


def clipped(ratio, advantages, low, high):
    return np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


# -- a3po -----------------------------------------------------------------------------------------


def a3po_by_loop(b, ratio, positive, negative):
    out = b["mask"] * b["advantages"]
    for i, row in enumerate(b["mask"]):
        live = np.flatnonzero(row)
        n = min(len(live), max(1, int(np.floor(ratio * len(live) + 1e-6)))) if len(live) else 0
        order = live[np.argsort(b["old_logprobs"][i, live], kind="stable")]
        if b["rewards"][i] == 1:
            out[i, order[:n]] *= positive
        if b["rewards"][i] == 0:
            out[i, order[len(live) - n :]] *= negative
    return out


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.7])
def test_a3po_scales_the_right_end_of_the_probability_ranking(ratio):
    b = batch()
    b["rewards"][[0, 5]] = 0.5
    b["old_logprobs"] = np.round(b["old_logprobs"])  # ties
    hyper = dict(ratio=ratio, pos_scale=3.0, neg_scale=2.5, step=100)
    close(call("a3po", b, **hyper), a3po_by_loop(b, ratio, 2.5, 2.0))


def test_a3po_is_the_identity_when_both_scales_have_decayed_to_one():
    b = batch()
    plain = b["mask"] * b["advantages"]
    close(call("a3po", b, pos_scale=1.0, neg_scale=1.0), plain)
    close(call("a3po", b, step=200), plain)
    traced = jax.jit(lambda step: call_raw("a3po", b, step=step))(jnp.asarray(10_000))
    close(traced, plain)


def call_raw(name, arrays, **hyper):
    found = losses.entry(name)
    return found.function(**{n: arrays[n] for n in found.arrays if n in arrays}, **hyper)


def test_a3po_changes_exactly_n_tokens_and_always_the_only_token():
    b = batch(1)
    changed = (call("a3po", b) != b["mask"] * b["advantages"]).sum(1)
    live = b["mask"].sum(1)
    expected = np.minimum(live, np.maximum(1, np.floor(0.2 * live + 1e-6)))
    np.testing.assert_array_equal(changed, expected)
    assert live[8] == 1 and changed[8] == 1


def test_a3po_keeps_signs_and_rows_of_other_rewards():
    b = batch(2)
    b["rewards"][::2] = 0.5
    out, plain = call("a3po", b), b["mask"] * b["advantages"]
    np.testing.assert_array_equal(np.sign(out), np.sign(plain))
    np.testing.assert_array_equal(out[::2], plain[::2])
    assert np.any(out != plain)


def test_a3po_swapping_rewards_swaps_the_end_that_is_scaled():
    b = batch(3)
    b["rewards"] = np.ones(len(GROUPS))
    right = call("a3po", b)
    b["rewards"] = np.zeros(len(GROUPS))
    wrong = call("a3po", b)
    plain = b["mask"] * b["advantages"]
    for i in np.flatnonzero(b["mask"].sum(1) > 1):
        live = np.flatnonzero(b["mask"][i])
        least, most = live[np.argsort(b["old_logprobs"][i, live])[[0, -1]]]
        assert right[i, least] == 2 * plain[i, least] and right[i, most] == plain[i, most]
        assert wrong[i, most] == 2 * plain[i, most] and wrong[i, least] == plain[i, least]


def test_a3po_ratio_one_scales_every_token():
    b = batch(4)
    close(call("a3po", b, ratio=1.0), 2 * b["mask"] * b["advantages"])


# -- ace ------------------------------------------------------------------------------------------


def test_ace_leaves_non_negative_advantages():
    b = batch()
    b["advantages"] = np.abs(b["advantages"])
    close(call("ace-error-penalty", b), b["mask"] * b["advantages"])


def ace_factor(c, **hyper):
    """f of a response of two tokens with confidence shift c (sum)."""
    arrays = {
        "advantages": -np.ones((1, 3)),
        "logprobs": np.array([[c / 2 - 1, c / 2 - 2, 9.0]]),
        "ref_logprobs": np.array([[-1.0, -2.0, 0.0]]),
        "mask": np.array([[1.0, 1.0, 0.0]]),
    }
    return -call("ace-error-penalty", arrays, **hyper)[0, 0]


def test_ace_factor_at_the_ends_and_at_zero():
    close(ace_factor(-60.0, alpha=2.0), 1.0)
    close(ace_factor(0.0, alpha=2.0), 1 + 2 * np.log(2))
    close(ace_factor(60.0, alpha=2.0), 1 + 2 * 60)
    close(ace_factor(4.0, normalize="mean"), 1 + np.log1p(np.exp(2.0)))
    close(ace_factor(60.0, c_max=5.0), 1 + np.log1p(np.exp(5.0)))
    factors = [ace_factor(c) for c in np.linspace(-30, 30, 13)]
    assert min(factors) >= 1 and np.all(np.diff(factors) > 0)


def test_ace_alpha_zero_is_the_identity_and_signs_are_kept():
    b = batch(1)
    plain = b["mask"] * b["advantages"]
    close(call("ace-error-penalty", b, alpha=0.0), plain)
    np.testing.assert_array_equal(np.sign(call("ace-error-penalty", b)), np.sign(plain))


def test_ace_shift_is_constant_and_blind_to_masked_tokens():
    b = batch(2)
    np.testing.assert_array_equal(gradient("ace-error-penalty", b), 0)
    before = call("ace-error-penalty", b)
    b["logprobs"] = np.where(b["mask"] > 0, b["logprobs"], 77.0)
    np.testing.assert_array_equal(call("ace-error-penalty", b), before)


def test_ace_rejects_an_unknown_normalisation():
    with pytest.raises(ValueError, match="'avg'.*sum, mean"):
        call("ace-error-penalty", batch(), normalize="avg")


# -- acegen-reinforce -----------------------------------------------------------------------------


def acegen_batch(seed=0):
    b = batch(seed)
    b["rewards"] = np.random.default_rng(seed + 50).uniform(0, 1, len(GROUPS))
    b["baseline_state"] = np.array([0.2, 3.0])
    return b


def test_acegen_reduces_to_reinforce():
    b = acegen_batch()
    grad = gradient("acegen-reinforce", b, alpha=1.0, sigma=0.0, top_k=1.0, baseline="none")
    close(grad, -b["mask"] * b["rewards"][:, None] / len(GROUPS))


@pytest.mark.parametrize("baseline", ["mab", "loo", "none"])
def test_acegen_against_a_loop(baseline):
    b = acegen_batch(1)
    b["rewards"][4] = b["rewards"][0] = 0.9  # a tie: the earlier row first
    alpha, sigma, penalty, k = 2.0, 0.01, 0.3, 4
    loss, metrics = call(
        "acegen-reinforce", b, alpha=alpha, sigma=sigma, top_k=0.4, baseline=baseline,
        likely_penalty=penalty,
    )  # fmt: skip
    chosen = np.argsort(-b["rewards"], kind="stable")[:k]
    ll = (b["mask"] * b["logprobs"]).sum(1)[chosen]
    prior = (b["mask"] * b["ref_logprobs"]).sum(1)[chosen]
    r = np.maximum(b["rewards"][chosen] + sigma * prior, 0) ** alpha
    state = b["baseline_state"]
    if baseline == "mab":
        mean = state[0] + (r.mean() - state[0]) * k / (state[1] + k)
        state, base = np.array([mean, state[1] + k]), mean
    else:
        others = [np.delete(r, i).mean() for i in range(k)]
        base = np.array(others) if baseline == "loo" else 0.0
    full = b["mask"].sum(1)[chosen] > 0
    expected = np.mean(-ll * (r - base)) - penalty * np.mean(1 / np.minimum(ll[full], -1e-6))
    close(loss, expected)
    close(metrics["baseline_state"], state)


def test_acegen_rows_outside_the_top_k_are_not_used():
    b = acegen_batch(2)
    best = np.argsort(-b["rewards"], kind="stable")[:3]
    rest = np.setdiff1d(np.arange(len(GROUPS)), best)
    grad = gradient("acegen-reinforce", b, top_k=0.3)
    np.testing.assert_array_equal(grad[rest], 0)
    assert np.all(np.abs(grad[best][b["mask"][best] > 0]) > 0)
    state = call("acegen-reinforce", b, top_k=0.3)[1]["baseline_state"]
    b["rewards"][rest] *= 0.5
    close(call("acegen-reinforce", b, top_k=0.3)[1]["baseline_state"], state)


def test_acegen_first_baseline_is_almost_the_batch_mean():
    b = acegen_batch(3)
    b["baseline_state"] = np.array([0.0, 0.001])
    metrics = call("acegen-reinforce", b, alpha=1.0, sigma=0.0, top_k=0.5)[1]
    mean = np.sort(b["rewards"])[-5:].mean()
    close(metrics["baseline_state"], [mean * 5 / 5.001, 5.001])


def test_acegen_improbable_strings_have_no_gradient_without_baseline():
    b = acegen_batch(4)
    grad = gradient("acegen-reinforce", b, sigma=100.0, top_k=1.0, baseline="none")
    improbable = (b["mask"] * b["ref_logprobs"]).sum(1) * 100 < -1
    np.testing.assert_array_equal(grad[improbable], 0)
    assert improbable.sum() == len(GROUPS) - 1  # the row without tokens


def test_acegen_constants_and_sharpening():
    b = acegen_batch(5)
    for name in ("ref_logprobs", "rewards", "baseline_state"):
        np.testing.assert_array_equal(gradient("acegen-reinforce", b, wrt=name), 0)

    def shaped(alpha):
        hyper = dict(alpha=alpha, sigma=0.0, top_k=1.0, baseline="none")
        return -gradient("acegen-reinforce", b, **hyper).min(1) * len(GROUPS)

    close(shaped(3.0)[0] / shaped(3.0)[1], (shaped(1.0)[0] / shaped(1.0)[1]) ** 3)


# -- ar-lopti -------------------------------------------------------------------------------------


def test_ar_lopti_without_reweighting_is_the_identity():
    b = batch()
    close(call("ar-lopti", b, alpha=0.0), b["mask"] * b["advantages"])


@pytest.mark.parametrize("eta", [0.3, -0.3, 0.9])
def test_ar_lopti_stages_are_disjoint_and_add_up(eta):
    b = batch(1)
    low, high, both = (call("ar-lopti", b, eta=eta, stage=s) for s in ("low", "high", "all"))
    close(low + high, both)
    np.testing.assert_array_equal((low != 0) & (high != 0), False)
    below = (np.exp(b["old_logprobs"]) < abs(eta)) & (b["mask"] > 0)
    np.testing.assert_array_equal(low != 0, below)


def test_ar_lopti_extreme_thresholds_empty_one_stage():
    b = batch(2)
    np.testing.assert_array_equal(call("ar-lopti", b, eta=1.1, stage="high"), 0)
    np.testing.assert_array_equal(call("ar-lopti", b, eta=0.0, stage="low"), 0)


def test_ar_lopti_factor_rises_with_the_probability():
    p = np.array([[0.0, 0.05, 0.4, 0.95, 1.0]])
    arrays = {
        "advantages": -2 * np.ones((1, 5)),
        "old_logprobs": np.log(np.maximum(p, 1e-300)),
        "mask": np.ones((1, 5)),
    }
    factor = call("ar-lopti", arrays)[0] / -2
    close(factor, 0.7 + 0.3 * p[0])
    assert np.all(np.diff(factor) > 0) and factor[0] == pytest.approx(0.7) and factor[-1] == 1
    close(factor[1] / factor[3], (0.7 + 0.3 * 0.05) / (0.7 + 0.3 * 0.95))


def test_the_gradient_of_a_softmax_grows_as_its_token_gets_unlikely():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=6) * 2)
    jacobian = np.asarray(jax.jacobian(jax.nn.log_softmax)(logits))
    assert np.all(np.linalg.norm(jacobian, axis=1) >= 1 - np.asarray(jax.nn.softmax(logits)))


# -- bnpo -----------------------------------------------------------------------------------------


def bnpo_by_loop(rewards, groups, max_weight=1e6):
    from math import lgamma

    ids = sorted(set(groups))
    p = np.array([rewards[groups == g].mean() if (groups == g).sum() > 1 else 0.0 for g in ids])
    m, v = (p.mean(), p.var(ddof=1)) if len(ids) > 1 else (0.0, 1.0)
    s = m * (1 - m) / v - 1
    a, b = max(1, 1 + s * m / 3), max(1, 1 + s * (1 - m) / 3)
    out = np.zeros(len(rewards))
    for g, p_g in zip(ids, p):
        with np.errstate(divide="ignore"):
            log_density = lgamma(a + b) - lgamma(a) - lgamma(b)
            log_density += (a - 1) * np.log(p_g) if a > 1 else 0.0
            log_density += (b - 1) * np.log1p(-p_g) if b > 1 else 0.0
        weight = min(np.exp(-log_density), max_weight) if np.isfinite(log_density) else max_weight
        rows = groups == g
        out[rows] = weight * (rewards[rows] - p_g)
    return out


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_bnpo_against_a_loop(seed):
    rewards = np.random.default_rng(seed).uniform(0, 1, len(GROUPS))
    rewards[WHOLE] = np.round(rewards[WHOLE], 1)
    close(call("bnpo", {"rewards": rewards, "group_ids": GROUPS}), bnpo_by_loop(rewards, GROUPS))
    scaled = {"rewards": 4 * rewards - 1, "group_ids": GROUPS}
    out = call("bnpo", scaled, min_value=-1.0, max_value=3.0)
    close(out, bnpo_by_loop(rewards, GROUPS))


def test_bnpo_of_one_group_is_reinforce_with_a_baseline():
    r = np.array([1.0, 0, 0, 1, 1])
    out = call("bnpo", {"rewards": r, "group_ids": np.full(5, 9)})
    close(out, r - r.mean())


def test_bnpo_uniform_success_rates_fit_beta_four_thirds():
    p, n = np.array([0.0, 0.5, 1.0]), 4  # mean 1/2
    spread = np.sqrt(1 / 12 / p.var(ddof=1))
    rates = 0.5 + (p - 0.5) * spread  # variance 1/12
    rewards = np.concatenate([[q - 0.1, q + 0.1, q, q] for q in rates])
    groups = np.repeat(np.arange(3), n)
    out = call("bnpo", {"rewards": rewards, "group_ids": groups})
    a = 4 / 3
    from math import gamma

    weight = gamma(a) ** 2 / gamma(2 * a) * (rates * (1 - rates)) ** -(a - 1)
    close(out, np.repeat(weight, n) * (rewards - np.repeat(rates, n)))


def test_bnpo_very_spread_rates_have_weight_one():
    rewards = np.array([1.0, 1, 1, 0, 0, 0, 1, 0.8])
    groups = np.array([0, 0, 1, 2, 2, 2, 1, 0])  # rates 0.93, 1, 0: v > m (1 - m)
    out = call("bnpo", {"rewards": rewards, "group_ids": groups})
    mean = np.array([rewards[groups == g].mean() for g in groups])
    close(out, rewards - mean)


def test_bnpo_without_spread_has_weight_one_and_equal_groups_are_silent():
    rewards, groups = np.array([1.0, 0, 0, 1, 1, 0]), np.array([0, 0, 1, 1, 2, 2])
    close(call("bnpo", {"rewards": rewards, "group_ids": groups}), rewards - 0.5)
    rewards = np.array([1.0, 1, 0, 0, 1, 0, 0.3, 0.3])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    out = call("bnpo", {"rewards": rewards, "group_ids": groups})
    np.testing.assert_array_equal(out[[0, 1, 2, 3, 6, 7]], 0)
    assert np.all(out[4:6] != 0)


def test_bnpo_sums_to_zero_and_weighs_dense_difficulties_less():
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(6), 5)
    rates = np.array([0.5, 0.55, 0.45, 0.5, 0.6, 0.05])  # the last far from where most lie
    rewards = np.clip(rates[groups] + 0.04 * rng.normal(size=30), 0, 1)
    out = call("bnpo", {"rewards": rewards, "group_ids": groups})
    close(np.array([out[groups == g].sum() for g in range(6)]), 0, 1e-8)
    means = np.array([rewards[groups == g].mean() for g in range(6)])[groups]
    np.testing.assert_array_equal(np.sign(out), np.sign(rewards - means))
    weight = (out / (rewards - means)).reshape(6, 5)[:, 0]
    assert weight[5] > weight[:5].max()


# -- capo-curriculum ------------------------------------------------------------------------------


def token_advantages(seed=0):
    b = batch(seed)
    b["advantages"] = np.random.default_rng(seed + 9).normal(size=b["mask"].shape)
    return b


def test_capo_past_the_switch_is_the_identity():
    b = token_advantages()
    plain = b["mask"] * b["advantages"]
    close(call("capo-curriculum", b, step=20, total_steps=100), plain)
    close(call("capo-curriculum", b, switch=0.0), plain)
    assert np.any(call("capo-curriculum", b, step=19, total_steps=100) != plain)


def test_capo_imitation_keeps_whole_rows_by_their_mean():
    b = token_advantages(1)
    plain = b["mask"] * b["advantages"]
    accepted = plain.sum(1) >= 0
    out = call("capo-curriculum", b, switch=1.0, step=99, total_steps=100)
    close(out, plain * accepted[:, None])
    assert np.any(out < 0) and np.any((plain > 0) & (out == 0))
    traced = jax.jit(lambda s: call_raw("capo-curriculum", b, step=s, total_steps=100))
    close(traced(jnp.asarray(3)), out)
    close(traced(jnp.asarray(20)), plain)


def test_capo_phase_one_loses_gradient_at_the_upper_clip_only():
    b = batch(2)
    b["advantages"] = call("capo-curriculum", b)
    b["logprobs"] = b["old_logprobs"] + 0.5 * np.random.default_rng(1).normal(size=b["mask"].shape)
    grad = gradient("dapo", b)
    kept = (b["advantages"] > 0) & (b["mask"] > 0)
    above = np.exp(b["logprobs"] - b["old_logprobs"]) > 1.28
    np.testing.assert_array_equal(grad != 0, kept & ~above)


def test_capo_padding_does_not_enter_the_mean():
    b = token_advantages(3)
    before = call("capo-curriculum", b)
    b["advantages"] = np.where(b["mask"] > 0, b["advantages"], -1e6)
    np.testing.assert_array_equal(call("capo-curriculum", b), before)


# -- entropy-minimization -------------------------------------------------------------------------


def em_batch(seed=0):
    b = batch(seed)
    b["old_entropy"] = b["entropy"]
    return b


@pytest.mark.parametrize("level,norm", [*itertools.product(["token", "sequence"], [False, True])])
def test_em_rl_against_a_loop(level, norm):
    b = em_batch()
    source = b["old_logprobs"] if level == "sequence" else -b["old_entropy"]
    n = b["mask"].sum(1)
    r = (b["mask"] * source).sum(1) / (np.maximum(n, 1) if norm else 1)
    expected = np.zeros_like(r)
    for i, j in enumerate(GROUPS):
        others = [k for k in np.flatnonzero((GROUPS == j) & (n > 0)) if k != i]
        if others and n[i]:
            expected[i] = r[i] - np.mean(r[others])
    out = call("entropy-minimization", b, level=level, length_norm=norm)
    close(out, expected[:, None] * b["mask"])
    per_row = out.sum(1) / np.maximum(n, 1)
    close([per_row[GROUPS == g].sum() for g in (7, 2, 5, -3)], 0)


def test_em_rl_ignores_a_constant_per_group():
    b = em_batch(1)
    b["mask"] = np.ones_like(b["mask"])
    before = call("entropy-minimization", b)
    b["old_entropy"] = b["old_entropy"] + (GROUPS == 7)[:, None] * 0.3
    close(call("entropy-minimization", b), before)


def test_em_rl_levels_agree_in_expectation_over_responses():
    rng = np.random.default_rng(2)
    first = rng.dirichlet(np.ones(3))
    second = rng.dirichlet(np.ones(3), size=3)

    def h(p):
        return -np.sum(p * np.log(p))

    mean = {"token": 0.0, "sequence": 0.0}
    for a, c in itertools.product(range(3), range(3)):
        arrays = {
            "old_entropy": np.array([[h(first), h(second[a])], [0.0, 0.0]]),
            "old_logprobs": np.array([[np.log(first[a]), np.log(second[a, c])], [0.0, 0.0]]),
            "group_ids": np.array([0, 0]),
            "mask": np.ones((2, 2)),
        }
        for level in mean:
            out = call("entropy-minimization", arrays, level=level)[0, 0]
            mean[level] += first[a] * second[a, c] * out
    close(mean["token"], mean["sequence"])


def test_em_ft_gradient_on_logits():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(1, 2, 5)))
    logits = logits.at[0, 1].set(0.0)

    def loss(z):
        log_p = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return entropy_minimization.em_ft_loss(entropy, jnp.ones((1, 2)))[0]

    p = np.asarray(jax.nn.softmax(logits))
    h = -np.sum(p * np.log(p), -1, keepdims=True)
    grad = np.asarray(jax.grad(loss)(logits))
    close(grad, -p * (np.log(p) + h) / 2)
    close(grad[0, 1], 0.0)
    value, metrics = entropy_minimization.em_ft_loss(jnp.ones((2, 2)), jnp.zeros((2, 2)))
    assert value == 0 and metrics["entropy"] == 0


def test_em_inf_is_more_certain_and_keeps_the_choice():
    rng = np.random.default_rng(4)
    logits = jnp.asarray(np.concatenate([rng.normal(size=(4, 8)), 9 * np.eye(8)[:2]]))

    def entropy(z):
        log_p = np.asarray(jax.nn.log_softmax(z))
        return -np.sum(np.exp(log_p) * log_p, -1)

    out = entropy_minimization.em_inf_logits(logits)
    assert np.all(entropy(logits)[:4] > 0.3) and np.all(entropy(logits)[4:] < 0.3)
    assert np.all(entropy(out)[:4] < entropy(logits)[:4])
    np.testing.assert_array_equal(np.argmax(out, -1), np.argmax(logits, -1))
    np.testing.assert_array_equal(out[4:], logits[4:])
    np.testing.assert_array_equal(entropy_minimization.em_inf_logits(logits, steps=0), logits)
    each = jnp.stack([entropy_minimization.em_inf_logits(z) for z in logits])
    close(out, each)
    # The first Adam step moves every logit by the rate, so it is no common scale.
    step = np.asarray(entropy_minimization.em_inf_logits(logits, steps=1) - logits)[:4]
    close(np.abs(step), 0.1, 1e-5)


# -- gd2po ----------------------------------------------------------------------------------------


def gd2po_batch(seed=0, components=3):
    b = batch(seed)
    rng = np.random.default_rng(seed + 20)
    b["reward_components"] = np.round(rng.normal(size=(len(GROUPS), components)), 1)
    return b


def gd2po_parts(b, variant, tau):
    x, n_live = b["reward_components"], b["mask"].sum(1)
    n = np.stack([grpo(c, alone=1 / (1 + 1e-6)) for c in x.T], 1)
    s = n * n_live[:, None]
    drop = (s > 1e-8).any(1) & (s < -1e-8).any(1)
    if variant == "snr":
        drop &= np.abs(s.sum(1) / (np.abs(s).sum(1) + 1e-8)) < np.clip(tau, 0, 1)
    keep = (~drop).astype(float)
    rho = np.array([keep[GROUPS == g].mean() for g in GROUPS])
    return keep, rho, b["mask"] * (keep * rho * n.sum(1))[:, None]


@pytest.mark.parametrize("variant,tau", [("hard", 0.8), ("snr", 0.8), ("snr", 0.3)])
def test_gd2po_against_a_loop(variant, tau):
    b = gd2po_batch()
    keep, _, x = gd2po_parts(b, variant, tau)
    close(call("gd2po", b, variant=variant, tau=tau, whiten=False), x)
    w = (b["mask"] * keep[:, None]) > 0
    expected = np.where(w, (x - x[w].mean()) / np.sqrt(x[w].var(ddof=1) + 1e-8), 0)
    out = call("gd2po", b, variant=variant, tau=tau)
    close(out, expected)
    close([out[w].sum(), out[w].var(ddof=1)], [0, 1], 1e-6)


def test_gd2po_of_one_component_is_whitened_grpo():
    b = gd2po_batch(1, components=1)
    x = b["mask"] * grpo(b["reward_components"][:, 0], alone=1 / (1 + 1e-6))[:, None]
    w = b["mask"] > 0
    expected = np.where(w, (x - x[w].mean()) / np.sqrt(x[w].var(ddof=1) + 1e-8), 0)
    close(call("gd2po", b), expected)


def test_gd2po_hard_drops_a_superset_of_snr():
    b = gd2po_batch(2)
    plain = {"whiten": False}
    hard = call("gd2po", b, **plain).any(1)
    snr = call("gd2po", b, variant="snr", tau=0.4, **plain).any(1)
    assert np.all(snr[hard]) and snr.sum() > hard.sum()
    nothing = call("gd2po", b, variant="snr", tau=0.0, **plain)
    n = sum(grpo(c, alone=1 / (1 + 1e-6)) for c in b["reward_components"].T)
    close(nothing, b["mask"] * n[:, None])  # GDPO
    close(call("gd2po", b, variant="snr", tau=1.0), call("gd2po", b))


def test_gd2po_constant_components_cause_no_conflict():
    b = gd2po_batch(3, components=1)
    before = call("gd2po", b)
    constant = np.array([{7: 0.1, 2: 0.7, 5: -0.3, -3: 0.0}[g] for g in GROUPS])
    b["reward_components"] = np.concatenate([b["reward_components"], constant[:, None]], 1)
    close(call("gd2po", b), before)


def test_gd2po_a_group_in_which_all_conflict_is_silent():
    b = gd2po_batch(4, components=2)
    r = b["reward_components"]
    r[:, 1] = np.where(GROUPS == 7, -r[:, 0], r[:, 0])
    b["mask"][GROUPS == 7, 0] = 1
    out = call("gd2po", b, whiten=False)
    np.testing.assert_array_equal(out[GROUPS == 7], 0)
    assert np.any(out[GROUPS == 2] != 0)


def test_gd2po_scale_of_a_component_does_not_matter():
    b = gd2po_batch(5)
    before = call("gd2po", b, variant="snr", tau=0.3)
    b["reward_components"][:, 1] *= 50
    several = b["group_ids"] != -3  # a group of one keeps its value, and so its scale
    b["mask"][~several] = 0
    after = call("gd2po", b, variant="snr", tau=0.3)
    b["reward_components"][:, 1] /= 50
    close(after, call("gd2po", b, variant="snr", tau=0.3), 1e-4)
    assert before.shape == after.shape


def test_gd2po_fewer_than_two_kept_tokens_give_zero():
    b = gd2po_batch(6)
    b["mask"] = np.zeros_like(b["mask"])
    b["mask"][6, 2] = 1
    np.testing.assert_array_equal(call("gd2po", b), 0)


# -- gdro -----------------------------------------------------------------------------------------


def gdro_batch(seed=0):
    b = batch(seed)
    b["class_ids"] = np.random.default_rng(seed).choice([0, 1, 3], len(GROUPS))
    b["class_scores"] = np.array([0.4, -0.2, 9.0, 1.1])
    return b


def gdro_weights(b, **hyper):
    ones = {**b, "advantages": np.ones_like(b["mask"]), "mask": np.ones_like(b["mask"])}
    return call("gdro", ones, **hyper)[:, 0]


@pytest.mark.parametrize("hyper", [{}, {"gamma": 0.3, "eta": 2.0}, {"max_weight": 1.2}])
def test_gdro_against_a_loop(hyper):
    b = gdro_batch()
    eta, gamma, cap = (
        hyper.get(k, d) for k, d in (("eta", 0.65), ("gamma", 0.01), ("max_weight", 15.0))
    )
    used = sorted(set(b["class_ids"]))
    z = sum(np.exp(eta * b["class_scores"][c]) for c in used)
    w = {
        c: min((1 - gamma) * np.exp(eta * b["class_scores"][c]) / z + gamma / len(used), cap)
        for c in used
    }
    v = np.array([w[c] for c in b["class_ids"]])
    v = np.minimum(v * len(v) / v.sum(), cap)
    close(call("gdro", b, **hyper), b["mask"] * b["advantages"] * v[:, None])


def test_gdro_equal_scores_or_no_rate_change_nothing():
    b = gdro_batch(1)
    plain = b["mask"] * b["advantages"]
    close(call("gdro", {**b, "class_scores": np.full(4, 0.7)}), plain)
    close(call("gdro", b, eta=0.0), plain)
    close(call("gdro", b, gamma=1.0), plain)
    close(call("gdro", {**b, "class_ids": np.full(len(GROUPS), 2)}), plain)


def test_gdro_raising_a_score_raises_its_weight_and_lowers_the_others():
    b = gdro_batch(2)
    before = gdro_weights(b, gamma=0.0)
    b["class_scores"][1] += 0.5
    after = gdro_weights(b, gamma=0.0)
    raised = b["class_ids"] == 1
    assert np.all(after[raised] > before[raised]) and np.all(after[~raised] < before[~raised])


def test_gdro_mean_weight_is_one_below_the_cap():
    b = gdro_batch(3)
    close(gdro_weights(b).mean(), 1.0)
    top = gdro_weights(b).max()
    assert gdro_weights(b, max_weight=0.9 * top).mean() < 1


def test_gdro_update_normalises_by_the_share_of_the_class():
    scores, seen = np.array([0.5, 0.2, 0.3]), np.array([1.0, 0.0, 1.0])
    row_losses, ids = np.array([0.1, 0.3, 0.8, 0.6, 0.4]), np.array([0, 0, 1, 0, 1])
    new, met = gdro.gdro_update(scores, seen, row_losses, ids, beta=0.12)
    x0, x1 = row_losses[[0, 1, 3]].mean() / 0.6, row_losses[[2, 4]].mean() / 0.4
    close(new, [0.88 * 0.5 + 0.12 * x0, x1, 0.3])
    close(met, [1, 1, 1])


def test_gdro_weight_follows_the_highest_loss_and_releases_it():
    ids = np.arange(12) % 3
    b = {**batch(), "class_ids": np.arange(len(GROUPS)) % 3}
    scores, seen = jnp.zeros(3), jnp.zeros(3)

    def play(losses_of_classes, rounds):
        nonlocal scores, seen
        for _ in range(rounds):
            scores, seen = gdro.gdro_update(scores, seen, losses_of_classes[ids], ids)
        return gdro_weights({**b, "class_scores": np.asarray(scores)}, eta=2.0)[:3]

    high = play(np.array([0.1, 0.2, 0.9]), 30)
    assert np.argmax(high) == 2
    released = play(np.array([0.1, 0.5, 0.2]), 60)
    assert np.argmax(released) == 1 and released[2] < high[2]


def test_gdro_classes_move_beyond_the_hysteresis_only():
    accuracy = np.array([0.0, 0.39, 0.4, 0.42, 0.44, 0.75, 1.0])
    first = np.asarray(gdro.difficulty_class(accuracy))
    np.testing.assert_array_equal(first, [0, 0, 1, 1, 1, 2, 2])
    for previous, expected in ((0, [0, 0, 0, 0, 1, 1, 2]), (2, [0, 1, 1, 1, 1, 2, 2])):
        out = gdro.difficulty_class(accuracy, np.full(7, previous))
        np.testing.assert_array_equal(out, expected)


# -- gem-rebn -------------------------------------------------------------------------------------


def turn_batch(seed=0, turns=3):
    b = batch(seed)
    rng = np.random.default_rng(seed + 30)
    b["turn_ids"] = np.sort(rng.integers(0, turns, b["mask"].shape), axis=1)
    b["turn_ids"] = np.where(b["mask"] > 0, b["turn_ids"], 99)
    b["turn_rewards"] = rng.normal(size=(len(GROUPS), turns))
    return b


def returns_by_loop(rewards, gamma):
    g = rewards.copy()
    for k in range(rewards.shape[1] - 2, -1, -1):
        g[:, k] += gamma * g[:, k + 1]
    return g


def valid_turns(b):
    k = b["turn_rewards"].shape[1]
    return np.stack([((b["turn_ids"] == i) & (b["mask"] > 0)).any(1) for i in range(k)], 1)


def turns_to_tokens(per_turn, b):
    index = np.clip(b["turn_ids"], 0, per_turn.shape[1] - 1)
    return b["mask"] * np.take_along_axis(per_turn, index, 1)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_rebn_against_a_loop(gamma):
    b = turn_batch()
    g, valid = returns_by_loop(b["turn_rewards"], gamma), valid_turns(b)
    z = (g - g[valid].mean()) / (g[valid].std() + 1e-9)
    out = call("gem-rebn", b, gamma=gamma)
    close(out, turns_to_tokens(z, b))
    close([z[valid].mean(), z[valid].std()], [0, 1], 1e-7)
    close(call("gem-rebn", b, gamma=gamma, normalize=False), turns_to_tokens(g, b))


def test_rebn_counts_every_turn_once_whatever_its_length():
    b = turn_batch(1)
    doubled = {k: np.repeat(b[k], 2, axis=1) for k in ("turn_ids", "mask")}
    close(call("gem-rebn", {**b, **doubled}), np.repeat(call("gem-rebn", b), 2, axis=1))


def test_rebn_of_one_turn_is_the_whitened_outcome():
    b = turn_batch(2, turns=1)
    live = b["mask"].any(1)
    r = b["turn_rewards"][:, 0]
    z = (r - r[live].mean()) / (r[live].std() + 1e-9)
    close(call("gem-rebn", b, gamma=0.3), b["mask"] * z[:, None])


def test_rebn_final_rewards():
    b = turn_batch(3)
    b["turn_rewards"][:, :2] = 0
    shared = call("gem-rebn", b)
    for row, live in zip(shared, b["mask"] > 0):
        close(row[live], row[live][:1].repeat(live.sum()))
    plain = call("gem-rebn", {**b, "turn_rewards": np.array([[0, 0, 1.0]] * len(GROUPS))},
                 gamma=0.9, normalize=False)  # fmt: skip
    for row, live in zip(plain, b["mask"] > 0):
        assert np.all(np.diff(row[live]) >= 0)  # later turns of a solved episode weigh more
    short = np.array([[0, 1.0, 0]] * len(GROUPS))
    first = (b["turn_ids"] == 0) & (b["mask"] > 0)
    shorter = call("gem-rebn", {**b, "turn_rewards": short}, gamma=0.9, normalize=False)
    assert np.all(shorter[first] > plain[first])


def test_rebn_scale_flat_and_empty():
    b = turn_batch(4)
    scaled = {**b, "turn_rewards": 7 * b["turn_rewards"]}
    close(call("gem-rebn", scaled), call("gem-rebn", b), 1e-6)
    flat = {**b, "turn_rewards": np.array([[0, 0, 0.3]] * len(GROUPS))}
    np.testing.assert_array_equal(call("gem-rebn", flat), 0)
    empty = {**b, "mask": np.zeros_like(b["mask"])}
    np.testing.assert_array_equal(call("gem-rebn", empty), 0)


# -- lightningrl ----------------------------------------------------------------------------------


def lightning_batch(seed=0):
    b = batch(seed)
    rng = np.random.default_rng(seed + 40)
    b["correct"] = rng.integers(0, 2, len(GROUPS)).astype(float)
    b["correct"][GROUPS == 2] = 0  # a group without a right response
    b["correct"][0] = b["correct"][8] = 1
    b["tpf"] = np.round(rng.uniform(1, 4, len(GROUPS)), 2)
    return b


def z_scores(x):
    out = np.zeros(len(x))
    for g in set(GROUPS):
        rows = GROUPS == g
        if x[rows].max() > x[rows].min():
            out[rows] = (x[rows] - x[rows].mean()) / x[rows].std()
    return out


def lightning_advantages(b, threshold=0.01):
    r = z_scores(b["correct"]) + z_scores(b["tpf"])
    keep = np.array(
        [
            b["correct"][GROUPS == g].max() > 0 and np.ptp(b["tpf"][GROUPS == g]) >= threshold
            for g in GROUPS
        ]
    )
    a = (r - r[keep].mean()) / max(r[keep].std(ddof=1), 1e-8)
    return np.where(keep, a, 0), keep


def test_lightningrl_against_a_loop():
    b = lightning_batch()
    a, keep = lightning_advantages(b)
    assert keep.sum() == 6 and abs(a.sum()) < 1e-9
    ratio = np.exp(np.clip(b["logprobs"] - b["old_logprobs"], -10, 10))
    term = -clipped(ratio, a[:, None], 0.2, 0.2)
    kept = b["mask"] * keep[:, None]
    rows = kept.any(1)
    policy = np.mean((kept * term).sum(1)[rows] / kept.sum(1)[rows])
    d = b["logprobs"] - b["ref_logprobs"]
    kl = (kept * (np.exp(-d) - 1 + d)).sum() / kept.sum()
    right = kept * b["correct"][:, None]
    nll = -(right * b["logprobs"]).sum() / right.sum()  # weighted by tokens, not by responses
    loss, metrics = call("lightningrl", b)
    close(loss, policy + 0.01 * kl + 0.1 * nll)
    close(metrics["kept_fraction"], 6 / 11)


def test_lightningrl_of_constant_speed_is_whitened_grpo_on_correctness():
    b = lightning_batch(1)
    b["tpf"] = np.full(len(GROUPS), 2.0)
    hyper = dict(kl_coef=0.0, nll_coef=0.0, tpf_threshold=0.0)
    z = z_scores(b["correct"])
    keep = np.array([b["correct"][GROUPS == g].max() > 0 for g in GROUPS])
    a = np.where(keep, (z - z[keep].mean()) / z[keep].std(ddof=1), 0)
    full = {**b, "logprobs": b["old_logprobs"]}
    rows = (b["mask"] * keep[:, None]).any(1)
    grad = gradient("lightningrl", full, **hyper)
    per_row = -a / (np.maximum(b["mask"].sum(1), 1) * rows.sum())
    close(grad, b["mask"] * per_row[:, None])


def test_lightningrl_does_not_see_the_unit_of_speed():
    b = lightning_batch(2)
    close(call("lightningrl", {**b, "tpf": 10 * b["tpf"]})[0], call("lightningrl", b)[0])


def test_lightningrl_wrong_rows_have_no_likelihood_and_dropped_rows_no_gradient():
    b = lightning_batch(3)
    _, keep = lightning_advantages(b)
    np.testing.assert_array_equal(gradient("lightningrl", b)[~keep], 0)
    nll = gradient("lightningrl", b, nll_coef=1.0) - gradient("lightningrl", b, nll_coef=0.0)
    right = b["mask"] * (keep * b["correct"])[:, None]
    close(nll, -right / right.sum())


def test_lightningrl_all_right_differ_by_speed_only():
    b = lightning_batch(4)
    b["correct"] = np.ones(len(GROUPS))
    b["logprobs"] = b["old_logprobs"]
    grad = gradient("lightningrl", b, kl_coef=0.0, nll_coef=0.0)
    a, _ = lightning_advantages(b)
    close(np.sign(grad), -np.sign(a)[:, None] * b["mask"])
    fastest = [np.flatnonzero(GROUPS == g)[np.argmax(b["tpf"][GROUPS == g])] for g in (7, 2)]
    assert np.all(a[fastest] > 0)


def test_lightningrl_nothing_kept_is_zero():
    b = lightning_batch(5)
    b["correct"] = np.zeros(len(GROUPS))
    assert call("lightningrl", b)[0] == 0
    np.testing.assert_array_equal(gradient("lightningrl", b), 0)


# -- mc-grpo --------------------------------------------------------------------------------------


def rewards_of_groups(seed=0, values=None):
    rng = np.random.default_rng(seed)
    if values is None:
        return rng.normal(size=len(GROUPS))
    return rng.choice(values, len(GROUPS)).astype(float)


def lower_median(x):
    return np.sort(x)[(len(x) - 1) // 2]


@pytest.mark.parametrize("values", [None, (0.0, 1.0), (0.0, 0.5, 1.0)])
def test_mc_grpo_against_a_loop(values):
    r = rewards_of_groups(1, values)
    expected, keep = np.zeros(len(r)), np.ones(len(r))
    for g in set(GROUPS):
        rows = np.flatnonzero(GROUPS == g)
        med = lower_median(r[rows])
        mad = lower_median(np.abs(r[rows] - med))
        expected[rows] = (r[rows] - med) / (mad + 1e-3)
        keep[rows[np.flatnonzero(r[rows] == med)[0]]] = 0
    arrays = {"rewards": r, "group_ids": GROUPS}
    out = call("mc-grpo", arrays)
    close(out, expected)
    np.testing.assert_array_equal(mc_grpo_keep(r, GROUPS), keep)
    np.testing.assert_array_equal(out[keep == 0], 0)
    assert keep.sum() == len(r) - len(set(GROUPS))
    balance = np.ones(len(r))
    for g in set(GROUPS):
        active = (np.abs(expected[GROUPS == g]) > 1e-6).sum()
        balance[GROUPS == g] = (GROUPS == g).sum() / active if active else 1.0
    close(call("mc-grpo", arrays, rebalance=True), expected * balance)
    close(call("mc-grpo", arrays, max_abs=0.5), np.clip(expected, -0.5, 0.5))


def test_mc_grpo_affine_invariance_and_halves():
    r = rewards_of_groups(2)
    shifted = r + 3.0 * (GROUPS == 7)
    arrays = {"rewards": r, "group_ids": GROUPS}
    close(call("mc-grpo", {**arrays, "rewards": shifted}), call("mc-grpo", arrays), 1e-8)
    odd = {k: v[GROUPS != 5] for k, v in arrays.items()}  # a pair has mad = 0
    scaled = call("mc-grpo", {**odd, "rewards": 5 * odd["rewards"]}, eps=1e-12)
    close(scaled, call("mc-grpo", odd, eps=1e-12), 1e-8)
    out = call("mc-grpo", arrays)
    for g in set(GROUPS):
        half = (GROUPS == g).sum() // 2
        assert (out[GROUPS == g] > 0).sum() <= half and (out[GROUPS == g] < 0).sum() <= half


def test_mc_grpo_binary_minorities_get_a_thousand():
    arrays = {"rewards": np.array([1.0, 0, 0, 0, 0]), "group_ids": np.zeros(5, int)}
    close(call("mc-grpo", arrays), [1000, 0, 0, 0, 0])
    close(call("mc-grpo", {**arrays, "rewards": 1 - arrays["rewards"]}), [-1000, 0, 0, 0, 0])


def test_mc_grpo_is_robust_to_the_largest_reward():
    def of(rewards):
        return call("mc-grpo", {"rewards": np.array(rewards), "group_ids": np.zeros(3, int)})

    close(of([0.0, 1.0, 50.0])[:2], of([0.0, 1.0, 5.0])[:2])
    close(of([0.0, 10.0, 11.0]), [-10 / 1.001, 0, 1 / 1.001])
    close(of([0.0, 10.0, 15.0]), [-10 / 5.001, 0, 5 / 5.001])


def test_mc_grpo_composition_leaves_the_pivot_out_of_the_loss():
    b = batch(3)
    loss, _ = losses.paper("mc-grpo", objective="dapo")(**b)
    keep = np.asarray(mc_grpo_keep(b["rewards"], GROUPS))
    a = call("mc-grpo", b)
    trained = {**b, "mask": b["mask"] * keep[:, None], "advantages": a[:, None] * b["mask"]}
    close(loss, call("dapo", trained)[0])


# -- mssr -----------------------------------------------------------------------------------------


def test_mssr_identities():
    b = batch()
    plain = b["mask"] * b["advantages"]
    close(call("mssr", {**b, "entropy": np.zeros_like(b["entropy"])}), plain)
    close(call("mssr", b, lam=0.0), plain)
    close(call("mssr", b, gamma=1e15), plain)


def test_mssr_bonus_is_bounded_and_keeps_the_sign():
    b = batch(1)
    b["advantages"][2] = 0
    plain = b["mask"] * b["advantages"]
    psi = call("mssr", b) - plain
    assert np.all(psi >= 0) and np.all(psi <= np.abs(plain) / 2 + 1e-12)
    close(psi, b["mask"] * np.minimum(np.abs(b["advantages"]) / 2, 0.4 * b["entropy"]))
    out = np.abs(call("mssr", b))
    assert np.all(out >= np.abs(plain) / 2 - 1e-12) and np.all(out <= 1.5 * np.abs(plain) + 1e-12)
    np.testing.assert_array_equal(np.sign(call("mssr", b)), np.sign(plain))


def test_mssr_entropy_is_constant():
    np.testing.assert_array_equal(gradient("mssr", batch(2), wrt="entropy"), 0)


def test_mssr_baseline_follows_the_prompt():
    state = jnp.ones((3, 2))
    np.testing.assert_array_equal(mssr.beta_estimate(state), 0.5)
    for _ in range(200):
        state = mssr.beta_update(state, jnp.ones(1), jnp.array([1]), 0.9)
    close(np.asarray(mssr.beta_estimate(state)), [0.5, 1.0, 0.5], 1e-6)
    outcomes = [1.0, 0.0, 0.0, 1.0, 1.0]
    state = jnp.ones((1, 2))
    for r in outcomes:
        state = mssr.beta_update(state, jnp.array([r]), jnp.array([0]), 1.0)
    close(mssr.beta_estimate(state), [(1 + sum(outcomes)) / (2 + len(outcomes))])


def test_mssr_drift_forgets_faster():
    eta = [float(mssr.beta_forgetting(kl)) for kl in (0.0, 0.005, 0.01, 1.0)]
    close(eta, [0.96, (0.96 + 0.875) / 2, 0.875, 0.875])


def test_mssr_advantage_is_standardised_over_the_batch():
    r, v = np.array([1.0, 0, 1, 0]), np.array([0.9, 0.5, 0.2, 0.1])
    d = r - v
    out = np.asarray(mssr.mssr_advantage(r, v))
    close(out, (d - d.mean()) / (d.std(ddof=1) + 1e-6))


# -- ngrpo ----------------------------------------------------------------------------------------


def ngrpo_advantages(rewards, groups=GROUPS, **hyper):
    """Advantages read off the gradient at ratio 1 of one token per response."""
    one = np.full((len(rewards), 1), -1.0)
    arrays = {"logprobs": one, "old_logprobs": one, "mask": np.ones_like(one),
              "rewards": rewards, "group_ids": groups}  # fmt: skip
    return -gradient("ngrpo", arrays, **hyper)[:, 0] * len(rewards)


@pytest.mark.parametrize("n_virtual", [0, 1, 3])
def test_ngrpo_against_a_loop(n_virtual):
    r = rewards_of_groups(0, (0.0, 0.5, 1.0))
    expected = np.zeros(len(r))
    for g in set(GROUPS):
        rows = np.flatnonzero(GROUPS == g)
        x = np.concatenate([r[rows], np.ones(n_virtual)])
        if len(rows) == 1:
            expected[rows] = r[rows] / (1 + 1e-6)
        elif x.max() > x.min():
            expected[rows] = (r[rows] - x.mean()) / (x.std(ddof=1) + 1e-6)
    close(ngrpo_advantages(r, n_virtual=n_virtual), expected)


def test_ngrpo_homogeneous_groups():
    n = 8
    wrong = ngrpo_advantages(np.zeros(n), np.zeros(n, int))
    close(wrong, np.full(n, -1 / 3), 1e-5)
    np.testing.assert_array_equal(ngrpo_advantages(np.ones(n), np.zeros(n, int)), 0)
    np.testing.assert_array_equal(ngrpo_keep(np.r_[np.ones(3), 0.0, 1.0], [4, 4, 4, 9, 9]),
                                  [0, 0, 0, 1, 1])  # fmt: skip


def test_ngrpo_mean_advantage_is_negative_unless_all_are_right():
    r = rewards_of_groups(3, (0.0, 0.4, 1.0))
    r[GROUPS == 5] = 1.0
    a = ngrpo_advantages(r)
    assert a[GROUPS == 5].sum() == 0
    assert a[GROUPS == 7].sum() < 0 and a[GROUPS == 2].sum() < 0


def test_ngrpo_without_virtual_rewards_is_grpo():
    b = batch(1)
    b["advantages"] = grpo(b["rewards"], alone=1 / (1 + 1e-6))[:, None] * b["mask"]
    hyper = dict(clip_low=0.2, clip_high=0.2)
    expected = call("grpo", b, beta=0.0, aggregation="token_mean", **hyper)[0]
    close(call("ngrpo", b, n_virtual=0, **hyper)[0], expected)


def test_ngrpo_clips_each_sign_on_its_own_side():
    ratio = np.array([0.83, 0.85, 1.3, 0.7, 1.23, 1.25])
    rewards = np.array([0.0, 0, 0, 1, 1, 1])
    arrays = {"logprobs": np.log(ratio)[:, None], "old_logprobs": np.zeros((6, 1)),
              "mask": np.ones((6, 1)), "rewards": rewards,
              "group_ids": np.zeros(6, int)}  # fmt: skip
    alive = gradient("ngrpo", arrays)[:, 0] != 0
    np.testing.assert_array_equal(alive, [False, True, True, True, True, False])


def test_ngrpo_more_virtual_rewards_push_further_down():
    r, groups = np.array([1.0, 0, 1, 0, 0]), np.zeros(5, int)
    steps = [ngrpo_advantages(r, groups, n_virtual=v) for v in (0, 1, 2, 4)]
    assert np.all(np.diff(np.stack(steps), axis=0) < 0)


# -- pair-wgrpo -----------------------------------------------------------------------------------


def pairs_of_eight():
    return {
        "group_ids": np.repeat([0, 1], 8),
        "pair_ids": np.zeros(16, int),
        "pair_role": np.repeat([1, -1], 8),
        "rewards": np.r_[1.0, np.zeros(7), 0.0, np.ones(7)],
    }


def test_pair_wgrpo_only_rare_events_count():
    out = call("pair-wgrpo", pairs_of_eight())
    z = np.r_[1.0, np.zeros(7), -1.0, np.zeros(7)]
    close(out, z / (z.std(ddof=1) + 1e-6))
    assert 2.6 < out[0] < 2.8 and out[8] == -out[0]
    np.testing.assert_array_equal(out[[1, 7, 9, 15]], 0)


def test_pair_wgrpo_signs_sums_and_rarity():
    rng = np.random.default_rng(0)
    arrays = pairs_of_eight()
    arrays["pair_ids"] = np.tile([5, 5, 9, 9], 4)
    arrays["pair_role"] = np.tile([1, -1, 1, -1], 4)
    arrays["rewards"] = rng.integers(0, 2, 16).astype(float)
    out = call("pair-wgrpo", arrays, w_pos=1.5, w_neg=0.5)
    for pair in (5, 9):
        rows = arrays["pair_ids"] == pair
        close(out[rows].sum(), 0)
        hit = rows & (arrays["pair_role"] == 1) & (arrays["rewards"] == 1)
        miss = rows & (arrays["pair_role"] == -1) & (arrays["rewards"] == 0)
        assert np.all(out[hit] >= out[rows].max() - 1e-12)
        assert np.all(out[miss] <= out[rows].min() + 1e-12)
    rarer, common = pairs_of_eight(), pairs_of_eight()
    common["rewards"][1:4] = 1
    assert call("pair-wgrpo", rarer)[0] > call("pair-wgrpo", common)[0]


def test_pair_wgrpo_one_sided_and_empty_pairs():
    arrays = pairs_of_eight()
    arrays["rewards"][0] = 0
    out = call("pair-wgrpo", arrays)
    others = np.delete(out, 8)
    assert np.all(others > 0) and np.all(others < 0.3) and out[8] < -3
    arrays["rewards"][8] = 1
    np.testing.assert_array_equal(call("pair-wgrpo", arrays), 0)


def test_pair_wgrpo_symmetry_of_the_roles():
    arrays = pairs_of_eight()
    arrays["rewards"][2] = 1
    before = call("pair-wgrpo", arrays)
    swapped = {**arrays, "pair_role": -arrays["pair_role"], "rewards": 1 - arrays["rewards"]}
    close(call("pair-wgrpo", swapped), -before)
    positive = call("pair-wgrpo", arrays, w_neg=0.0)
    flipped = {**arrays, "rewards": np.r_[arrays["rewards"][:8], np.zeros(8)]}
    close(call("pair-wgrpo", flipped, w_neg=0.0), positive)


def test_select_pairs_takes_the_extremes_inside_the_bands():
    rate = np.array([0.0, 0.3, 0.1, 1.0, 0.7, 0.95, 0.1, 0.5])
    np.testing.assert_array_equal(
        pair_wgrpo.select_pairs(rate, n_pairs=4), [[2, 5], [6, 4], [-1, -1], [-1, -1]]
    )
    np.testing.assert_array_equal(pair_wgrpo.select_pairs([0.0, 1.0, 0.9], n_pairs=1), [[-1, -1]])
    np.testing.assert_array_equal(pair_wgrpo.select_pairs([0.2, 0.9], n_pairs=3)[0], [0, 1])


# -- pvpo -----------------------------------------------------------------------------------------


def reference_rollouts(seed=0):
    rng = np.random.default_rng(seed)
    return {"ref_rewards": rng.uniform(size=9), "ref_group_ids": rng.choice([7, 2, 40], 9)}


def test_pvpo_against_a_loop():
    arrays = {"rewards": rewards_of_groups(0), "group_ids": GROUPS, **reference_rollouts()}
    value = []
    for g in GROUPS:
        stored = arrays["ref_rewards"][arrays["ref_group_ids"] == g]
        value.append(stored.mean() if len(stored) else arrays["rewards"][GROUPS == g].mean())
    close(call("pvpo", arrays), arrays["rewards"] - value)


def test_pvpo_on_its_own_rewards_is_mean_centred():
    r = rewards_of_groups(1)
    arrays = {"rewards": r, "group_ids": GROUPS, "ref_rewards": r, "ref_group_ids": GROUPS}
    close(call("pvpo", arrays), call("grpo-advantage", arrays, scale="none"))


def test_pvpo_of_one_response_does_not_depend_on_the_others():
    arrays = {"rewards": rewards_of_groups(2), "group_ids": GROUPS, **reference_rollouts(2)}
    before = call("pvpo", arrays)
    arrays["rewards"] = arrays["rewards"] + np.eye(len(GROUPS))[0]
    after = call("pvpo", arrays)
    close(after[1:], before[1:])
    close(after[0], before[0] + 1)


def test_pvpo_homogeneous_groups_have_a_signal():
    arrays = {"rewards": np.where(GROUPS == 7, 1.0, 0.0), "group_ids": GROUPS,
              "ref_rewards": np.array([1.0, 0, 1, 0]),
              "ref_group_ids": np.array([7, 7, 2, 2])}  # fmt: skip
    out = call("pvpo", arrays)
    close(out[GROUPS == 7], 0.5)
    close(out[GROUPS == 2], -0.5)
    shifted = {**arrays, "rewards": arrays["rewards"] + 3, "ref_rewards": arrays["ref_rewards"] + 3}
    close(call("pvpo", shifted), out)


def test_pvpo_filter():
    accuracy = np.array([1.0, 0.5, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(pvpo.pvpo_filter(accuracy), [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(
        pvpo.pvpo_filter(accuracy, np.array([1, 0, 1, 0, 0])), [0, 1, 1, 0, 0]
    )


# -- qae ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "lower"])
@pytest.mark.parametrize("quantile", [0.4, 0.5, 0.75, 1 / 3])
def test_qae_against_numpy(method, quantile):
    r = rewards_of_groups(4, (0.0, 0.3, 1.0))
    expected = np.zeros(len(r))
    for g in set(GROUPS):
        rows = GROUPS == g
        if rows.sum() == 1:
            expected[rows] = r[rows] / (1 + 1e-6)
        else:
            b = np.quantile(r[rows], quantile, method=method)
            expected[rows] = (r[rows] - b) / (r[rows].std(ddof=1) + 1e-6)
    close(call("qae", {"rewards": r, "group_ids": GROUPS}, quantile=quantile, method=method),
          expected)  # fmt: skip


@pytest.mark.parametrize("quantile", [0.4, 0.3, 0.7])
def test_qae_is_a_gate_on_binary_rewards(quantile):
    n, groups = 11, np.zeros(11, int)
    for failures in range(1, n):
        r = np.r_[np.zeros(failures), np.ones(n - failures)]
        out = call("qae", {"rewards": r, "group_ids": groups}, quantile=quantile)
        place = round(quantile * (n - 1), 9)
        if place <= failures - 1:
            np.testing.assert_array_equal(out[:failures], 0)
            assert np.all(out[failures:] > 0)
        elif place >= failures:
            np.testing.assert_array_equal(out[failures:], 0)
            assert np.all(out[:failures] < 0)
        else:
            assert np.all(out != 0)


def test_qae_fractional_quantile_spares_nobody():
    r = np.array([-1.0, -1, 1, 1, 1])
    out = call("qae", {"rewards": r, "group_ids": np.zeros(5, int)})
    close(out, (r - 0.2) / (r.std(ddof=1) + 1e-6))
    lower = call("qae", {"rewards": r, "group_ids": np.zeros(5, int)}, method="lower")
    close(lower, (r + 1) / (r.std(ddof=1) + 1e-6))


def test_qae_median_mean_and_affine_invariance():
    r, groups = np.array([3.0, -1, 4, 0.5, 9]), np.zeros(5, int)
    arrays = {"rewards": r, "group_ids": groups}
    close(call("qae", arrays, quantile=0.5), (r - 3) / (r.std(ddof=1) + 1e-6))
    for outside in (0.0, 1.0, -0.2):
        close(call("qae", arrays, quantile=outside), grpo(r, groups))
    close(call("qae", {**arrays, "rewards": 40 * r + 2}), call("qae", arrays), 1e-6)
    np.testing.assert_array_equal(call("qae", {**arrays, "rewards": np.full(5, 0.1)}), 0)


# -- reinforce-rej --------------------------------------------------------------------------------


def test_reinforce_rej_rejects_uniform_groups():
    b = batch()
    b["rewards"] = np.ones(len(GROUPS))
    b["mask"][6] = 0  # the group of one
    for is_clip in (True, False):
        loss, metrics = call("reinforce-rej", b, is_clip=is_clip)
        assert loss == 0
        np.testing.assert_array_equal(gradient("reinforce-rej", b, is_clip=is_clip), 0)
        assert metrics["rejected_right_fraction"] == 0.75
        assert metrics["rejected_wrong_fraction"] == 0


def test_reinforce_rej_raft_keeps_positive_rewards_only():
    b = batch(1)
    b["rewards"] = np.where(b["rewards"] > 0, 1.0, -1.0)
    grad = gradient("reinforce-rej", b, mode="raft", clip_low=None, clip_high=None)
    np.testing.assert_array_equal(grad != 0, (b["mask"] > 0) & (b["rewards"] > 0)[:, None])


@pytest.mark.parametrize("is_clip", [True, False])
def test_reinforce_rej_on_policy_gradient_is_the_raw_reward(is_clip):
    b = batch(2)
    b["rewards"] = rewards_of_groups(2)
    b["logprobs"] = b["old_logprobs"]
    expected = -b["rewards"][:, None] * b["mask"] / b["mask"].sum()
    close(gradient("reinforce-rej", b, is_clip=is_clip), expected)
    moved = {**b, "rewards": b["rewards"] + 1}
    assert np.any(gradient("reinforce-rej", moved, is_clip=is_clip) != expected)


def test_reinforce_rej_zero_one_rewards_learn_from_right_answers_only():
    b = batch(3)
    b["rewards"] = np.array([1.0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1])
    b["logprobs"] = b["old_logprobs"]
    moved = np.abs(gradient("reinforce-rej", b)).sum(1) > 0
    live, same = b["mask"].any(1), np.ptp(b["rewards"][GROUPS == 5]) == 0
    right = (b["rewards"] == 1) & live & ~((GROUPS == 5) & same)
    np.testing.assert_array_equal(moved, right)
    signed = gradient("reinforce-rej", {**b, "rewards": 2 * b["rewards"] - 1})
    assert np.any(signed > 0)  # wrong ones are pushed down too


def test_reinforce_rej_dual_clip_binds_where_negative_and_far_above():
    ratio = np.array([2.9, 3.1, 3.1, 0.7])
    arrays = {"logprobs": np.log(ratio)[:, None], "old_logprobs": np.zeros((4, 1)),
              "mask": np.ones((4, 1)), "rewards": np.array([-1.0, -1, 1, -1]),
              "group_ids": np.zeros(4, int)}  # fmt: skip
    grad = gradient("reinforce-rej", arrays)[:, 0]
    close(grad, [2.9 / 4, 0, 0, 0])  # the third is above 1 + clip_high, the fourth below
    close(call("reinforce-rej", arrays)[0], (2.9 + 3.0 - 1.2 + 0.8) / 4)
    close(gradient("reinforce-rej", arrays, dual_clip=None)[1, 0], 3.1 / 4)
    close(call("reinforce-rej", arrays)[1]["clip_fraction"], 0.5)


def test_reinforce_rej_counts_rejected_groups():
    r = np.where(GROUPS == 7, 1.0, np.where(GROUPS == 2, -1.0, np.arange(len(GROUPS)) % 4))
    b = {**batch(4), "rewards": r}
    for mode in ("reinforce_rej", "raft"):
        metrics = call("reinforce-rej", b, mode=mode)[1]
        assert metrics["rejected_right_fraction"] == metrics["rejected_wrong_fraction"] == 0.25


# -- rl-zvp ---------------------------------------------------------------------------------------


def test_rl_zvp_of_mixed_groups_is_grpo():
    b = batch()
    b["rewards"] = rewards_of_groups(0)
    b["mask"][6] = 0  # the group of one has no variance
    expected = b["mask"] * grpo(b["rewards"])[:, None]
    close(call("rl-zvp", b), expected)
    close(call("rl-zvp", {**b, "entropy": 5 + b["entropy"]}), expected)


def test_rl_zvp_right_and_wrong_groups():
    b = batch(1)
    b["rewards"] = np.where(GROUPS == 7, 1.0, 0.0)
    out, h = call("rl-zvp", b), b["entropy"]
    right = GROUPS == 7
    close(out[right], 0.1 * (b["mask"] * h)[right])
    live = b["mask"] > 0
    top = np.where(live, h, -np.inf).max(1, keepdims=True)
    wrong = ~right & live.any(1)
    close(out[wrong], np.where(live, -0.1 * (top - h), 0)[wrong])
    assert np.all(out[wrong] <= 0)
    for row, lives, values in zip(out[wrong], live[wrong], h[wrong]):
        assert np.flatnonzero(lives)[np.argmin(row[lives])] in np.flatnonzero(
            lives & (values == values[lives].min())
        )
        assert row[lives].max() == 0
    assert out[8].sum() == 0  # a wrong response of one token
    silent = call("rl-zvp", {**b, "entropy": 0 * h})
    np.testing.assert_array_equal(silent, 0)


def test_rl_zvp_alpha_zero_constants_and_padding():
    b = batch(2)
    b["rewards"][GROUPS == 2] = 0
    close(call("rl-zvp", b, alpha=0.0), b["mask"] * grpo(b["rewards"])[:, None])
    np.testing.assert_array_equal(gradient("rl-zvp", b, wrt="entropy"), 0)
    before = call("rl-zvp", b)
    wrong = GROUPS == 2
    raised = {**b, "entropy": b["entropy"] + 0.7 * wrong[:, None]}
    close(call("rl-zvp", raised), before)
    padded = {**b, "entropy": np.where(b["mask"] > 0, b["entropy"], 99.0)}
    np.testing.assert_array_equal(call("rl-zvp", padded), before)


# -- s-grpo-noise ---------------------------------------------------------------------------------


def noise_weight(k, n, p):
    """w of a group with k of n successes, read off the advantage."""
    r = np.r_[np.ones(k), np.zeros(n - k)]
    out = call("s-grpo-noise", {"rewards": r, "group_ids": np.zeros(n, int)}, p=p)
    if 0 < k < n:
        return (out / ((r - r.mean()) / (r.std(ddof=1) + 1e-8)))[0]
    return out[0]


def test_s_grpo_noise_without_noise_is_grpo():
    r = rewards_of_groups(1, (0.0, 1.0))
    close(call("s-grpo-noise", {"rewards": r, "group_ids": GROUPS}, p=0.0), grpo(r), 1e-6)


def test_s_grpo_noise_weights():
    close(noise_weight(1, 8, 0.1), 0.8 * np.sqrt(0.03125 * 0.96875) / np.sqrt(0.125 * 0.875), 1e-5)
    close(noise_weight(1, 8, 0.1), 0.42, 5e-3)
    close(noise_weight(4, 8, 0.1), 0.8, 1e-6)
    assert noise_weight(0, 8, 0.1) == noise_weight(8, 8, 0.1) == 0
    weights = np.array([noise_weight(k, 8, 0.1) for k in range(1, 8)])
    close(weights, weights[::-1])
    assert np.all(np.diff(weights[:4]) > 0) and np.all(weights <= 0.8 + 1e-9)
    assert noise_weight(1, 8, 0.13) == noise_weight(7, 8, 0.13) == 0


def test_s_grpo_noise_sums_to_zero_and_keeps_signs():
    r = rewards_of_groups(5)
    out = call("s-grpo-noise", {"rewards": r, "group_ids": GROUPS})
    for g in set(GROUPS):
        close(out[GROUPS == g].sum(), 0)
    mixed = out != 0
    assert mixed.any()
    np.testing.assert_array_equal(np.sign(out[mixed]), np.sign(grpo(r))[mixed])


@pytest.mark.parametrize("p", [0.5, -0.1])
def test_s_grpo_noise_rejects_impossible_noise(p):
    with pytest.raises(ValueError, match="0 <= p < 0.5"):
        call("s-grpo-noise", {"rewards": np.zeros(2), "group_ids": np.zeros(2, int)}, p=p)


# -- s-grpo-tspmo ---------------------------------------------------------------------------------


def tree_batch(seed=0):
    b = batch(seed)
    rng = np.random.default_rng(seed + 60)
    b["tokens"] = rng.integers(0, 2, b["mask"].shape)
    b["rewards"] = rng.normal(size=len(GROUPS))
    return b


def tree(b):
    """(group, prefix, token) -> rows and positions; (group, prefix) -> rows."""
    pairs, prefixes = {}, {}
    for i, t in zip(*np.nonzero(b["mask"])):
        prefix = (GROUPS[i], tuple(b["tokens"][i, :t]))
        prefixes.setdefault(prefix, []).append(i)
        pairs.setdefault((*prefix, b["tokens"][i, t]), []).append((i, t))
    return pairs, prefixes


def test_tspmo_against_a_prefix_tree():
    b = tree_batch()
    pairs, prefixes = tree(b)
    assert any(len(v) > 1 for v in pairs.values())
    value, grad = {}, np.zeros_like(b["mask"])
    groups = {g for g, _, _ in pairs}
    size = {g: sum(k[0] == g for k in pairs) for g in groups}
    balance = dict.fromkeys(prefixes, 0.0)
    for (g, prefix, _), places in pairs.items():
        rows = [i for i, _ in places]
        a = b["rewards"][rows].mean() - b["rewards"][prefixes[g, prefix]].mean()
        balance[g, prefix] += len(rows) * a
        pi = np.exp([b["logprobs"][i, t] for i, t in places])
        value[g] = value.get(g, 0.0) + a * pi.mean() / size[g]
        for (i, t), own in zip(places, pi):
            grad[i, t] = -a * own / (len(places) * size[g] * len(groups))
    close(list(balance.values()), 0)
    close(call("s-grpo-tspmo", b)[0], -np.mean(list(value.values())))
    close(gradient("s-grpo-tspmo", b), grad)


def test_tspmo_is_silent_after_the_last_branching_and_on_equal_rewards():
    b = tree_batch(1)
    pairs, prefixes = tree(b)
    grad = gradient("s-grpo-tspmo", b)
    for (g, prefix, _), places in pairs.items():
        if len(prefixes[g, prefix]) == 1:
            (i, t), = places  # fmt: skip
            assert grad[i, t] == 0
    b["rewards"] = np.full(len(GROUPS), 0.3)
    assert call("s-grpo-tspmo", b)[0] == 0
    np.testing.assert_array_equal(gradient("s-grpo-tspmo", b), 0)


def test_tspmo_different_first_tokens_give_the_centred_outcome():
    r = np.array([1.0, 0.2, -0.5])
    arrays = {"tokens": np.array([[1, 5], [2, 5], [3, 5]]), "mask": np.ones((3, 2)),
              "logprobs": np.full((3, 2), -0.7), "rewards": r,
              "group_ids": np.zeros(3, int)}  # fmt: skip
    grad = gradient("s-grpo-tspmo", arrays)
    close(grad[:, 0], -(r - r.mean()) * np.exp(-0.7) / 6)
    np.testing.assert_array_equal(grad[:, 1], 0)
    apart = {**arrays, "tokens": np.full((3, 2), 5), "group_ids": np.array([0, 1, 2])}
    np.testing.assert_array_equal(gradient("s-grpo-tspmo", apart), 0)


def test_tspmo_ignores_tokens_of_the_padding():
    b = tree_batch(2)
    b["mask"][:, 5:] = 0
    before = call("s-grpo-tspmo", b)[0]
    b["tokens"][:, 5:] = 77
    close(call("s-grpo-tspmo", b)[0], before)


def test_s_grpo_token_mask():
    b = batch(5)
    uniforms = np.random.default_rng(0).random(b["mask"].shape)
    everything = s_grpo_token_mask(b["mask"], uniforms, cutoff=0, prob=1.0, max_tokens=7)
    np.testing.assert_array_equal(everything, b["mask"])
    chosen = np.asarray(s_grpo_token_mask(b["mask"], uniforms, cutoff=2, prob=0.4, max_tokens=3))
    for row, live, u in zip(chosen, b["mask"], uniforms):
        places = np.flatnonzero(live)
        wanted = [t for k, t in enumerate(places) if k < 2 or u[t] < 0.4][:3]
        np.testing.assert_array_equal(np.flatnonzero(row), wanted)


# -- setpo ----------------------------------------------------------------------------------------


def kernel(seed=0):
    x = np.abs(np.random.default_rng(seed).normal(size=(len(GROUPS), 4)))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return np.minimum(x @ x.T, 1.0)


def diversity(rows, k):
    if len(rows) < 2:
        return 0.0
    s = [sum(k[i, j] for j in rows if j != i) for i in rows]
    return -np.mean(np.log1p(s))


@pytest.mark.parametrize("correct_only", [False, True])
def test_setpo_against_a_loop_over_subsets(correct_only):
    r, k = rewards_of_groups(0, (0.0, 1.0)), kernel()
    expected = grpo(r, alone=1 / (1 + 1e-6))
    for i, g in enumerate(GROUPS):
        rows = np.flatnonzero(GROUPS == g)
        if not correct_only or r[i] == r[rows].max():
            rest = [j for j in rows if j != i]
            expected[i] += 0.5 * (diversity(rows, k) - diversity(rest, k))
    arrays = {"rewards": r, "group_ids": GROUPS, "similarity": k}
    close(call("setpo", arrays, correct_only=correct_only), expected)


def test_setpo_without_weight_or_similarity_is_grpo():
    r = rewards_of_groups(1)
    arrays = {"rewards": r, "group_ids": GROUPS, "similarity": kernel(1)}
    plain = grpo(r, alone=1 / (1 + 1e-6))
    close(call("setpo", arrays, lam=0.0), plain)
    close(call("setpo", {**arrays, "similarity": np.eye(len(GROUPS))}), plain)
    across = np.where(GROUPS[:, None] == GROUPS, arrays["similarity"], 0.123)
    close(call("setpo", {**arrays, "similarity": across}), call("setpo", arrays))


def test_setpo_copies_pay_and_strangers_are_paid():
    n = 5
    k = np.ones((n, n))
    k[-1, :-1] = k[:-1, -1] = 0
    arrays = {"rewards": np.ones(n), "group_ids": np.zeros(n, int), "similarity": k}
    out = call("setpo", arrays, lam=1.0)
    close(out[-1], np.log(n - 1) / n)
    assert np.all(out[:-1] < 0) and np.ptp(out[:-1]) < 1e-12
    same = call("setpo", {**arrays, "similarity": np.ones((n, n))}, lam=1.0)
    close(same, -np.log(n) + np.log(n - 1))


# -- tiar -----------------------------------------------------------------------------------------


def test_tiar_against_a_loop():
    r = rewards_of_groups(0, (-1.0, 0.0, 1.0, 0.5))
    expected = grpo(r, alone=1 / (1 + 1e-6))
    for i, g in enumerate(GROUPS):
        right, wrong = (r[GROUPS == g] == 1).sum(), (r[GROUPS == g] == -1).sum()
        if r[i] == 0 and right + wrong:
            expected[i] += 0.3 * (1 - 2 * right / (right + wrong))
    assert (r == 0).any()
    close(call("tiar", {"rewards": r, "group_ids": GROUPS}), expected)


def tiar_of(rewards, **hyper):
    return call("tiar", {"rewards": np.array(rewards, float),
                         "group_ids": np.zeros(len(rewards), int)}, **hyper)  # fmt: skip


def test_tiar_moves_abstentions_by_difficulty():
    def move(rewards):
        return tiar_of(rewards)[0] - tiar_of(rewards, lam=0.0)[0]

    close([move([0, 1, -1]), move([0, -1, -1]), move([0, 1, 1])], [0.0, 0.3, -0.3])
    np.testing.assert_array_equal(tiar_of([0, 0, 0]), 0)
    assert tiar_of([0, 1, 1, -1])[0] < tiar_of([0, 1, -1, -1])[0] < tiar_of([0, -1, -1, -1])[0]


def test_tiar_attempts_do_not_depend_on_lam_and_near_zero_is_no_abstention():
    r = rewards_of_groups(2, (-1.0, 0.0, 1.0))
    arrays = {"rewards": r, "group_ids": GROUPS}
    for lam in (0.0, 0.3, 1.0):
        out = call("tiar", arrays, lam=lam)
        close(out[r != 0], grpo(r, alone=1 / (1 + 1e-6))[r != 0])
    near = np.array([1e-9, -1, -1, 1])
    close(tiar_of(near), grpo(near, np.zeros(4)))


# -- trloo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_trloo_against_a_loop(gamma):
    b = turn_batch()
    g, valid = returns_by_loop(b["turn_rewards"], gamma), valid_turns(b)
    a = np.zeros_like(g)
    for i, k in zip(*np.nonzero(valid)):
        others = [j for j in np.flatnonzero((GROUPS == GROUPS[i]) & valid[:, k]) if j != i]
        a[i, k] = g[i, k] - (np.mean(g[others, k]) if others else 0.0)
    close(call("trloo", b, gamma=gamma), turns_to_tokens(a, b))
    for grp, k in itertools.product(set(GROUPS), range(3)):
        rows = (GROUPS == grp) & valid[:, k]
        if rows.sum() > 1:
            close(a[rows, k].sum(), 0)


def test_trloo_of_one_turn_is_rloo():
    b = turn_batch(1, turns=1)
    b["mask"][:, 0] = 1
    b["turn_ids"] = np.zeros_like(b["turn_ids"])
    r = b["turn_rewards"][:, 0]
    rloo = call("rloo", {"rewards": r, "group_ids": GROUPS})
    close(call("trloo", b), b["mask"] * rloo[:, None])
    centred = call("grpo-advantage", {"rewards": r, "group_ids": GROUPS}, scale="none")
    n = np.array([(GROUPS == g).sum() for g in GROUPS])
    close(rloo[n > 1], (n / np.maximum(n - 1, 1) * centred)[n > 1])


def test_trloo_ignores_a_constant_on_a_column_of_a_group():
    b = turn_batch(2)
    b["mask"][:, :] = 1
    b["turn_ids"] = np.tile(np.array([0, 0, 1, 1, 2, 2, 2]), (len(GROUPS), 1))
    before = call("trloo", b, gamma=0.5)
    b["turn_rewards"] = b["turn_rewards"] + np.array([0, 0, 2.0])
    after = call("trloo", b, gamma=0.5)
    several = GROUPS != -3
    close(after[several], before[several])
    alone = after[~several][0] - before[~several][0]
    close(alone, [0.5, 0.5, 1, 1, 2, 2, 2])


def test_trloo_a_response_that_stopped_moves_no_later_baseline():
    b = turn_batch(3)
    stopped = 0
    b["turn_ids"][stopped] = 0
    before = call("trloo", b)
    b["turn_rewards"][stopped, 1:] += 5
    after = call("trloo", b)
    later = b["turn_ids"] > 0
    np.testing.assert_array_equal(after[later], before[later])
    assert np.any(after[0] != before[0])  # it still flows into its own return


def test_trloo_equal_returns_are_silent():
    b = turn_batch(4)
    b["turn_rewards"] = np.tile([0.1, 0.2, 0.3], (len(GROUPS), 1))
    out = call("trloo", {**b, "turn_rewards": b["turn_rewards"]})
    valid = valid_turns(b)
    for i, g in enumerate(GROUPS):
        for k in range(3):
            if ((GROUPS == g) & valid[:, k]).sum() > 1:
                np.testing.assert_array_equal(out[i][b["turn_ids"][i] == k], 0)


def test_trloo_profiling_functions():
    keep = trloo.profiling_keep_prob(np.array([1, 1, 1, 0]), np.array([0.35, 0.9, 0.1, 0.0]))
    close(keep, [0.5, 1, 0, 1])
    reward = trloo.profiling_reward(
        np.array([1.0, 1, 0, 1]), np.array([2.0, 9.0, 0.4, 2.0]),
        np.array([0.5, 1.0, 0.8, 1.0]), np.array([1, 1, 1, 0]),
    )  # fmt: skip
    close(reward, [0.5 + 1.0 + 0.25, 0.5 + 1.5 + 0.5, 0.2, 0.0])


# -- w-reinforce ----------------------------------------------------------------------------------


def test_w_reinforce_modes_against_a_loop():
    b = batch()
    b["rewards"][0] = 0.4  # neither right nor wrong
    ratio, r = np.exp(b["logprobs"] - b["old_logprobs"]), b["rewards"]
    for mode in ("weighted", "psr", "nsr"):
        a = {"weighted": np.where(r == 1, 0.1, np.where(r == 0, -1.0, r)),
             "psr": np.ones_like(r), "nsr": -np.ones_like(r)}[mode]  # fmt: skip
        kept = {"weighted": r > -1, "psr": r == 1, "nsr": r == 0}[mode]
        m = b["mask"] * kept[:, None]
        expected = -(m * clipped(ratio, a[:, None], 0.2, 0.2)).sum() / m.sum()
        close(call("w-reinforce", b, mode=mode)[0], expected)


def test_w_reinforce_full_weight_is_plus_and_minus_one():
    b = batch(1)
    b["advantages"] = (2 * b["rewards"] - 1)[:, None] * b["mask"]
    expected = call("dapo", b, clip_low=0.2, clip_high=0.2)[0]
    close(call("w-reinforce", b, lam=1.0)[0], expected)


def test_w_reinforce_without_positive_weight_points_as_nsr():
    b = batch(2)
    wrong = (b["mask"] * (b["rewards"] == 0)[:, None]).sum()
    scaled = gradient("w-reinforce", b, mode="nsr") * wrong / b["mask"].sum()
    close(gradient("w-reinforce", b, lam=0.0), scaled)


def test_w_reinforce_on_policy_gradients_and_clip_sides():
    b = batch(3)
    b["logprobs"] = b["old_logprobs"]
    wrong = b["mask"] * (b["rewards"] == 0)[:, None]
    close(gradient("w-reinforce", b, mode="nsr"), wrong / wrong.sum())
    ratio = np.array([0.7, 0.9, 1.1, 1.3])
    arrays = {"logprobs": np.log(ratio)[:, None], "old_logprobs": np.zeros((4, 1)),
              "mask": np.ones((4, 1))}  # fmt: skip
    alive = {
        mode: gradient("w-reinforce", {**arrays, "rewards": np.full(4, r)}, mode=mode)[:, 0] != 0
        for mode, r in (("psr", 1.0), ("nsr", 0.0))
    }
    np.testing.assert_array_equal(alive["psr"], [True, True, True, False])
    np.testing.assert_array_equal(alive["nsr"], [False, True, True, True])


@pytest.mark.parametrize("mode,rewards", [("psr", 0.0), ("nsr", 1.0)])
def test_w_reinforce_nothing_left_is_zero(mode, rewards):
    b = batch(4)
    b["rewards"] = np.full(len(GROUPS), rewards)
    assert call("w-reinforce", b, mode=mode)[0] == 0
    np.testing.assert_array_equal(gradient("w-reinforce", b, mode=mode), 0)


def test_w_reinforce_a_negative_step_spreads_in_proportion():
    logits = jnp.asarray(np.random.default_rng(6).normal(size=5))
    p, token = np.asarray(jax.nn.softmax(logits)), 2

    def loss(z):
        logprobs = jax.nn.log_softmax(z)[token].reshape(1, 1)
        old = jax.lax.stop_gradient(logprobs)
        return losses.get("w-reinforce")(logprobs, old, np.ones((1, 1)), np.zeros(1), mode="nsr")[0]

    step = -np.asarray(jax.grad(loss)(logits))
    assert step[token] < 0
    others = np.delete(np.arange(5), token)
    close(step[others] / p[others], (step[others] / p[others])[0].repeat(4))
    assert np.all(step[others] > 0)
