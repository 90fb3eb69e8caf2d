"""What the papers on ratios, clips, trust regions and aggregation state about themselves.

Everything runs in float64 on one ragged batch: interior and leading holes in the mask, a one-token
row, a fully masked row, groups of different sizes with arbitrary ids.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from losses.ops.ratios import kalman_filtered, kalman_gains
from losses.surrogates.balanced_aggregation import balanced_aggregate
from losses.surrogates.rec import red_drop
from losses.surrogates.sao import sao_value_loss, sao_value_targets
from losses.surrogates.stable_reinforce import r1_reward_score
from losses.surrogates.troll import troll_tokens

MASK = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    float,
)
ROWS, COLUMNS = MASK.shape
TOKENS = MASK.sum()
LENGTHS = np.maximum(MASK.sum(1, keepdims=True), 1)
GROUPS = np.array([7, -2, 7, 30, -2, 7, 7], np.int32)
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])


def batch(seed=0, drift=0.4, **changes):
    """Arrays of the ragged batch; log-ratios are normal with standard deviation `drift`."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.gamma(2.0, 0.6, MASK.shape) - 0.05

    def drifted():
        return np.minimum(logprobs - drift * rng.normal(size=MASK.shape), -0.01)

    arrays = {
        "logprobs": logprobs,
        "old_logprobs": drifted(),
        "sampler_logprobs": drifted(),
        "ref_logprobs": drifted(),
        "entropy": rng.gamma(2.0, 0.5, MASK.shape),
        "mask": MASK,
        "advantages": np.repeat(rng.normal(size=(ROWS, 1)), COLUMNS, 1),
        "rewards": REWARDS,
        "group_ids": GROUPS,
        "turn_ids": np.cumsum(rng.random(MASK.shape) < 0.4, 1).astype(np.int32),
    }
    return {**arrays, **changes}


def on_policy(**changes):
    arrays = batch(**changes)
    constants = ("old_logprobs", "sampler_logprobs", "ref_logprobs")
    return {**arrays, **{name: arrays["logprobs"] for name in constants}}


def with_ratio(ratio, name="old_logprobs", **changes):
    """The batch with pi / pi_old (or pi / another) as given, [B,T] or a scalar."""
    arrays = batch(**changes)
    return {**arrays, name: arrays["logprobs"] - np.log(ratio) * np.ones(MASK.shape)}


def accepted(name, arrays):
    return {k: v for k, v in arrays.items() if k in losses.entry(name).arrays}


def evaluate(name, arrays, wrt="logprobs", **hyper):
    """Loss, its gradient with respect to one array, and the metrics, in float64."""
    given = accepted(name, arrays)
    with jax.enable_x64(True):
        function = losses.get(name)

        def run(x):
            return function(**{**given, wrt: x}, **hyper)

        both = jax.value_and_grad(run, has_aux=True)
        if given["mask"].shape != MASK.shape:
            both = jax.jit(both)  # cheaper than compiling each operation for a shape of its own
        (loss, metrics), grad = both(jnp.asarray(given[wrt]))
        return float(loss), np.asarray(grad), {k: np.asarray(v) for k, v in metrics.items()}


def value(name, arrays, **hyper):
    return evaluate(name, arrays, **hyper)[0]


def gradient(name, arrays, **hyper):
    return evaluate(name, arrays, **hyper)[1]


def reshaped(name, arrays, **hyper):
    """What an advantage or credit function returns, in float64."""
    with jax.enable_x64(True):
        return np.asarray(losses.get(name)(**accepted(name, arrays), **hyper))


def ratio_of(arrays, old="old_logprobs"):
    return np.exp(arrays["logprobs"] - arrays[old])


def same(actual, expected, tolerance=1e-11):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def differs(actual, expected):
    assert np.max(np.abs(np.asarray(actual) - np.asarray(expected))) > 1e-4


def spread(columns, fill, order):
    """[B,T] arrays with columns of `fill` inserted so that old column i stands at order[i]."""
    out = np.full((columns.shape[0], max(order) + 2), fill, columns.dtype)
    out[:, order] = columns
    return out


def with_holes(arrays):
    """The batch with masked positions full of garbage inserted between the tokens."""
    order = [1, 2, 4, 5, 6, 9, 10, 12, 13]
    return {
        k: spread(v, 0 if k == "mask" else (5 if v.dtype.kind == "i" else 3.3), order)
        if v.ndim == 2
        else v
        for k, v in arrays.items()
    }, order


def doubled(arrays, rows=None):
    """Every token twice in the given rows (all by default), as further columns."""
    twice = {k: np.concatenate([v, v], 1) if v.ndim == 2 else v for k, v in arrays.items()}
    if rows is not None:
        other = np.setdiff1d(np.arange(ROWS), rows)
        twice["mask"] = twice["mask"].copy()
        twice["mask"][np.ix_(other, range(COLUMNS, 2 * COLUMNS))] = 0
    return twice


TOKEN_MEAN = MASK / TOKENS
SEQUENCE_MEAN = MASK / (ROWS * LENGTHS)
SEQUENCE_SUM = MASK / ROWS


@pytest.mark.parametrize(
    "name,weight",
    [
        ("aspo_loss", TOKEN_MEAN),
        ("cispo_loss", TOKEN_MEAN),
        ("cppo_prefix_loss", TOKEN_MEAN),
        ("decoupled_ppo_loss", TOKEN_MEAN),
        ("dispo_loss", TOKEN_MEAN),
        ("minpro_loss", TOKEN_MEAN),
        ("vespo_loss", TOKEN_MEAN),
        ("dhpo_loss", SEQUENCE_MEAN),
        ("gmpo_loss", SEQUENCE_MEAN),
        ("gspo_loss", SEQUENCE_MEAN),
        ("gspo_token_loss", SEQUENCE_MEAN),
        ("icepop_loss", SEQUENCE_MEAN),
        ("kpo_loss", SEQUENCE_MEAN),
        ("sapo_search_loss", SEQUENCE_MEAN),
        ("sapo_soft_loss", SEQUENCE_MEAN),
        ("st_ppo_loss", SEQUENCE_MEAN),
        ("luspo_loss", SEQUENCE_SUM),
    ],
)
def test_on_policy_gradient_is_that_of_reinforce(name, weight):
    """-A times the weight that the paper's aggregation gives a token."""
    arrays = on_policy()
    same(gradient(name, arrays), -arrays["advantages"] * weight)


@pytest.mark.parametrize("name", ["cispo_loss", "minpro_loss", "dispo_loss", "vespo_loss"])
def test_weighted_reinforce_is_linear_in_the_advantages(name):
    arrays = batch()
    tripled = {**arrays, "advantages": 3 * arrays["advantages"]}
    same(gradient(name, tripled), 3 * gradient(name, arrays))


def test_unknown_options_name_the_nearest():
    with pytest.raises(ValueError, match="two-sided.*one of.*two-side.*Did you mean 'two-side'"):
        value("rec_loss", batch(), clip_mode="two-sided")


# CISPO ------------------------------------------------------------------------------------------


def test_cispo_on_policy_equals_dapo():
    same(gradient("cispo_loss", on_policy()), gradient("dapo_loss", on_policy()))


def test_cispo_drops_no_token():
    grad = gradient("cispo_loss", with_ratio(np.exp(np.linspace(-9, 9, MASK.size)).reshape(7, 9)))
    assert np.all(grad[MASK > 0] != 0)


def test_cispo_without_room_is_reinforce():
    arrays = batch()
    grad = gradient("cispo_loss", arrays, clip_low=0.0, clip_high=0.0)
    same(grad, -arrays["advantages"] * TOKEN_MEAN)


def test_cispo_weight_is_constant():
    arrays = batch()
    weight = np.minimum(ratio_of(arrays), 1.2)
    grad = gradient("cispo_loss", arrays, clip_high=0.2)
    same(grad, -weight * arrays["advantages"] * TOKEN_MEAN)
    through = weight + np.where(weight < 1.2, weight * arrays["logprobs"], 0)
    differs(grad, -through * arrays["advantages"] * TOKEN_MEAN)


# Decoupled PPO ----------------------------------------------------------------------------------


def test_decoupled_ppo_with_a_faithful_sampler_is_dapo():
    arrays = batch()
    arrays["sampler_logprobs"] = arrays["old_logprobs"]
    same(gradient("decoupled_ppo_loss", arrays), gradient("dapo_loss", arrays, clip_high=0.2))


def test_decoupled_ppo_at_the_proximal_policy_is_weighted_reinforce():
    arrays = batch(drift=1.5)
    arrays["old_logprobs"] = arrays["logprobs"]
    weight = ratio_of(arrays, "sampler_logprobs")
    grad = gradient("decoupled_ppo_loss", arrays, behav_cap=None)
    same(grad, -weight * arrays["advantages"] * TOKEN_MEAN)


@pytest.mark.parametrize(
    "cap,credit,hyper", [(None, "tis", {"cap": None}), (1.5, "mis", {"low": 0.0, "high": 1.5})]
)
def test_decoupled_ppo_is_dapo_on_weighted_advantages(cap, credit, hyper):
    arrays = batch()
    weighted = {**arrays, "advantages": reshaped(credit, arrays, **hyper)}
    actual = evaluate("decoupled_ppo_loss", arrays, behav_cap=cap)
    expected = evaluate("dapo_loss", weighted, clip_high=0.2)
    same(actual[0], expected[0])
    same(actual[1], expected[1])


def test_decoupled_ppo_is_not_a_joint_clip_around_the_sampler():
    arrays = batch()
    joint = {**arrays, "old_logprobs": arrays["sampler_logprobs"]}
    differs(
        gradient("decoupled_ppo_loss", arrays, behav_cap=None),
        gradient("dapo_loss", joint, clip_high=0.2),
    )


# Dual-clip PPO ----------------------------------------------------------------------------------


def test_dual_clip_far_out_is_dapo():
    arrays = batch(drift=1.0)
    for dual_clip in (1e9, None):
        grad = gradient("dual_clip_loss", arrays, dual_clip=dual_clip)
        same(grad, gradient("dapo_loss", arrays, clip_high=0.2))


def test_dual_clip_bounds_the_loss_of_negative_tokens():
    ratios = np.exp(np.linspace(-6, 6, MASK.size)).reshape(MASK.shape)
    for row, column in np.argwhere(MASK > 0)[::5]:
        one = np.zeros_like(MASK)
        one[row, column] = 1
        arrays = with_ratio(ratios, mask=one, advantages=-0.7 * np.ones_like(MASK))
        assert 0.7 * 0.8 - 1e-12 <= value("dual_clip_loss", arrays) <= 0.7 * 3.0 + 1e-12


def test_dual_clip_stops_the_gradient_only_beyond_it():
    ratios = np.where(np.arange(COLUMNS) % 2, 3.5, 2.0) * np.ones((ROWS, 1))
    arrays = with_ratio(ratios, advantages=-np.ones_like(MASK))
    grad = gradient("dual_clip_loss", arrays)
    assert np.all(grad[(MASK > 0) & (ratios > 3)] == 0)
    assert np.all(grad[(MASK > 0) & (ratios < 3)] > 0)


def test_dual_clip_for_both_signs_is_the_same_function():
    arrays = batch(drift=1.2)
    a, r = arrays["advantages"], ratio_of(arrays)
    plain = np.maximum(-r * a, -np.clip(r, 0.8, 1.2) * a)
    expected = np.sum(MASK * np.minimum(plain, 3 * np.abs(a))) / TOKENS
    same(value("dual_clip_loss", arrays), expected)


# GSPO, GSPO-token, LUSPO, GMPO ------------------------------------------------------------------


def test_gspo_of_one_token_responses_is_grpo():
    arrays = batch(mask=np.eye(ROWS, COLUMNS))
    hyper = {"clip_low": 0.1, "clip_high": 0.3}
    same(
        gradient("gspo_loss", arrays, **hyper),
        gradient("grpo_loss", arrays, beta=0.0, **hyper),
    )


@pytest.mark.parametrize("name", ["gspo_loss", "gspo_token_loss", "luspo_loss"])
def test_sequence_ratio_ignores_how_log_ratios_lie_in_the_row(name):
    arrays = batch(drift=0.01)
    shuffled = {k: v.copy() for k, v in arrays.items()}
    drift = arrays["logprobs"] - arrays["old_logprobs"]
    for row in range(ROWS):
        at = np.flatnonzero(MASK[row])
        shuffled["old_logprobs"][row, at] = arrays["logprobs"][row, at] - drift[row, at[::-1]]
    hyper = {"clip_low": 0.003, "clip_high": 0.003}
    before, after = (evaluate(name, a, **hyper) for a in (arrays, shuffled))
    same(after[0], before[0])
    same(after[1], before[1])


@pytest.mark.parametrize("name", ["gspo_loss", "luspo_loss"])
def test_sequence_clip_keeps_or_drops_a_whole_row(name):
    grad = gradient(name, batch(drift=0.4), clip_low=0.1, clip_high=0.1)
    live = [np.count_nonzero(g[m > 0]) for g, m in zip(grad, MASK)]
    full = MASK.sum(1)
    assert all(n in (0, f) for n, f in zip(live, full))
    assert 0 < sum(live) < full.sum()


def test_luspo_is_gspo_times_the_length():
    mask = np.zeros_like(MASK)
    mask[:, 2:6] = 1
    arrays = batch(drift=0.05, mask=mask)
    hyper = {"clip_low": 0.01, "clip_high": 0.02}
    luspo, gspo = (evaluate(n, arrays, **hyper) for n in ("luspo_loss", "gspo_loss"))
    same(luspo[0], 4 * gspo[0])
    same(luspo[1], 4 * gspo[1])


def test_luspo_term_doubles_with_a_row_s_tokens_and_gspo_s_does_not():
    arrays = batch(drift=0.02)
    alone = {**arrays, "advantages": arrays["advantages"] * (np.arange(ROWS) == 2)[:, None]}
    twice = doubled(alone, [2])
    hyper = {"clip_low": 0.5, "clip_high": 0.5}
    same(value("luspo_loss", twice, **hyper), 2 * value("luspo_loss", alone, **hyper))
    same(value("gspo_loss", twice, **hyper), value("gspo_loss", alone, **hyper))


def test_luspo_averages_token_advantages_over_the_row():
    rng = np.random.default_rng(3)
    arrays = batch(drift=0.02, advantages=rng.normal(size=MASK.shape))
    mean = np.sum(arrays["advantages"] * MASK, 1, keepdims=True) / LENGTHS
    constant = {**arrays, "advantages": mean * np.ones_like(MASK)}
    same(gradient("luspo_loss", arrays), gradient("luspo_loss", constant))


def test_gspo_token_equals_gspo_for_constant_advantages():
    arrays = batch(drift=0.3)
    hyper = {"clip_low": 0.1, "clip_high": 0.1}
    token, sequence = (evaluate(n, arrays, **hyper) for n in ("gspo_token_loss", "gspo_loss"))
    same(token[0], sequence[0])
    same(token[1], sequence[1])


def test_gspo_token_gives_each_token_its_own_credit():
    rng = np.random.default_rng(4)
    arrays = batch(drift=0.02, advantages=rng.normal(size=MASK.shape))
    log_ratio = (arrays["logprobs"] - arrays["old_logprobs"]) * MASK
    s = np.exp(log_ratio.sum(1, keepdims=True) / LENGTHS)
    grad = gradient("gspo_token_loss", arrays, clip_low=0.5, clip_high=0.5)
    same(grad, -s * arrays["advantages"] * SEQUENCE_MEAN)
    differs(grad, gradient("gspo_loss", arrays, clip_low=0.5, clip_high=0.5))


def test_gspo_token_on_policy_is_grpo_for_any_advantages():
    arrays = on_policy(advantages=np.random.default_rng(5).normal(size=MASK.shape))
    same(gradient("gspo_token_loss", arrays), gradient("grpo_loss", arrays, beta=0.0))


def test_gmpo_unclipped_is_gspo_unclipped():
    arrays = batch(drift=0.1)
    expected = value("gspo_loss", arrays, clip_low=None, clip_high=None)
    same(value("gmpo_loss", arrays, log_clip_low=9.0, log_clip_high=9.0), expected)
    log_ratio = (arrays["logprobs"] - arrays["old_logprobs"]) * MASK
    mean = np.exp(log_ratio.sum(1) / LENGTHS[:, 0])
    rows = arrays["advantages"][:, 0] * mean * (MASK.sum(1) > 0)
    same(value("gmpo_loss", arrays, log_clip_low=None, log_clip_high=None), -rows.mean())


def test_gmpo_clips_tokens_not_the_sequence():
    arrays = with_ratio(np.exp(np.random.default_rng(6).normal(size=MASK.shape)))
    s = np.exp((np.log(ratio_of(arrays)) * MASK).sum(1) / LENGTHS[:, 0])
    a = arrays["advantages"][:, 0] * (MASK.sum(1) > 0)
    late = np.where(a >= 0, np.minimum(s, np.exp(0.4)), np.maximum(s, np.exp(-0.4)))
    differs(value("gmpo_loss", arrays), -np.mean(a * late))


def test_gmpo_term_of_a_positive_row_is_bounded():
    arrays = with_ratio(np.exp(9.0), advantages=np.ones_like(MASK))
    same(value("gmpo_loss", arrays), -np.exp(0.4) * np.mean(MASK.sum(1) > 0))


def test_gmpo_clipped_tokens_have_no_gradient_and_the_others_keep_theirs():
    ratios = np.where(np.arange(COLUMNS) % 3 == 0, np.exp(0.9), 1.1) * np.ones((ROWS, 1))
    grad = gradient("gmpo_loss", with_ratio(ratios, advantages=np.ones_like(MASK)))
    assert np.all(grad[(MASK > 0) & (ratios > 2)] == 0)
    assert np.all(grad[(MASK > 0) & (ratios < 2)] < 0)


# KPO --------------------------------------------------------------------------------------------


def sequential_filter(z, q, r, p0):
    out, x, p = np.zeros_like(z), np.zeros(z.shape[0]), p0
    for t in range(z.shape[1]):
        before = p + q
        gain = before / (before + r)
        p = (1 - gain) * before
        gain = np.clip(gain, 1e-6, 1 - 1e-6)
        x = x + gain * (z[:, t] - x)
        out[:, t] = x
    return out


FILTER = jax.jit(kalman_filtered)
GAINS = jax.jit(kalman_gains, static_argnums=(0, 4))


@pytest.mark.parametrize(
    "q,r,p0",
    [(1e-6, 1.0, 0.0), (0.05, 1.0, 0.0), (0.3, 0.2, 2.0), (0.0, 1.0, 1.0), (1.0, 0.0, 0.0)],
)
def test_kpo_scan_equals_the_sequential_filter(q, r, p0):
    z = np.random.default_rng(7).normal(size=(3, 200))
    with jax.enable_x64(True):
        same(np.asarray(FILTER(z, q, r, p0)), sequential_filter(z, q, r, p0))


def test_kpo_filters_the_masked_log_ratios():
    arrays = batch()
    z = (arrays["logprobs"] - arrays["old_logprobs"]) * MASK
    ratio = np.exp(sequential_filter(z, 0.05, 1.0, 0.0))
    grad = gradient("kpo_loss", arrays, process_noise=0.05, clip_low=None, clip_high=None)
    same(grad, -ratio * arrays["advantages"] * SEQUENCE_MEAN)


def test_kpo_without_measurement_noise_is_grpo():
    mask = np.tril(np.ones_like(MASK))
    arrays = batch(mask=mask)
    grad = gradient("kpo_loss", arrays, measurement_noise=0.0, clip_low=0.2, clip_high=0.2)
    # The gain is held at 1 - 1e-6.
    same(grad, gradient("grpo_loss", arrays, beta=0.0), 1e-5)


def test_kpo_without_process_noise_stays_near_one():
    arrays = batch()
    grad = gradient("kpo_loss", arrays, process_noise=0.0)
    same(grad, -arrays["advantages"] * SEQUENCE_MEAN, 1e-4)


def test_kpo_is_causal():
    arrays = batch()
    changed = {**arrays, "old_logprobs": arrays["old_logprobs"].copy()}
    changed["old_logprobs"][:, 5] += 1.0
    hyper = {"process_noise": 0.1, "clip_low": None, "clip_high": None}
    before, after = (gradient("kpo_loss", a, **hyper) for a in (arrays, changed))
    np.testing.assert_array_equal(after[:, :5], before[:, :5])
    differs(after[:, 5:], before[:, 5:])


def test_kpo_estimate_of_a_constant_rises_towards_it():
    with jax.enable_x64(True):
        gains = np.asarray(GAINS(30, 0.05, 1.0, 0.0, np.float64))
        x = np.asarray(FILTER(jnp.full((1, 30), 0.7), 0.05, 1.0, 0.0))[0]
    same(x, 0.7 * (1 - np.cumprod(1 - gains)))
    assert np.all(np.diff(x) > 0) and x[-1] < 0.7


def test_kpo_gains_start_at_the_prior_and_grow():
    with jax.enable_x64(True):
        gains = np.asarray(GAINS(30, 0.05, 2.0, 0.5, np.float64))
        fresh = np.asarray(GAINS(30, 0.05, 2.0, 0.0, np.float64))
    same(gains[0], 0.55 / 2.55)
    assert np.all(np.diff(fresh) > 0)
    # P_t = R K_t turns one gain into the next.
    same(fresh[1:], (2 * fresh[:-1] + 0.05) / (2 * fresh[:-1] + 0.05 + 2))


# MinPRO -----------------------------------------------------------------------------------------


def minpro_weights(arrays, **hyper):
    return gradient("minpro_loss", arrays, **hyper) * TOKENS / -arrays["advantages"]


def test_minpro_of_one_token_rows_is_cispo():
    arrays = batch(mask=np.eye(ROWS, COLUMNS))
    cispo = gradient("cispo_loss", arrays, clip_low=1.0, clip_high=0.28)
    same(gradient("minpro_loss", arrays), cispo)


def test_minpro_early_small_ratio_damps_what_follows():
    arrays = batch()
    lowered = {**arrays, "old_logprobs": arrays["old_logprobs"].copy()}
    lowered["old_logprobs"][0, 3] += 15
    before, after = minpro_weights(arrays)[0], minpro_weights(lowered)[0]
    same(after[:3], before[:3])
    assert np.all(after[4:] < 1e-5)


def test_minpro_only_the_minimum_of_the_prefix_counts():
    arrays = batch()
    permuted = {**arrays, "old_logprobs": arrays["old_logprobs"].copy()}
    drift = (arrays["logprobs"] - arrays["old_logprobs"])[0, :5]
    permuted["old_logprobs"][0, :5] = arrays["logprobs"][0, :5] - drift[[3, 1, 4, 0, 2]]
    same(minpro_weights(permuted)[0, 5:], minpro_weights(arrays)[0, 5:])


def test_minpro_weight_never_exceeds_the_damped_ratio():
    arrays = batch(drift=0.8)
    ratios, weights = ratio_of(arrays), minpro_weights(arrays)
    for row, column in np.argwhere(MASK > 0):
        before = [ratios[row, j] for j in range(column) if MASK[row, j]]
        damped = min(before, default=1.0) * ratios[row, column]
        same(weights[row, column], min(damped, 1.28))


def test_minpro_weight_varies_far_less_than_the_product():
    rng = np.random.default_rng(8)
    drift = 0.2 * rng.normal(size=(400, 200))
    ones = np.ones_like(drift)
    arrays = {"logprobs": drift - 3, "old_logprobs": 0 * drift - 3, "mask": ones}
    grad = gradient("minpro_loss", {**arrays, "advantages": -ones}, clip_high=1e9)
    log_weight = np.log(grad[:, -1] * ones.size)
    assert 50 * np.var(log_weight) < np.var(drift.sum(1))


# TIS, MIS, IcePop -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tis_credit", "mis_credit"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_faithful_sampler_leaves_the_advantages(name, level):
    arrays = batch()
    arrays["sampler_logprobs"] = arrays["old_logprobs"]
    same(reshaped(name, arrays, level=level), MASK * arrays["advantages"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tis_keeps_the_sign_and_the_cap(level):
    arrays = batch(drift=1.0)
    out, a = reshaped("tis_credit", arrays, level=level), arrays["advantages"]
    assert np.all(out * a >= 0) and np.all(np.abs(out) <= 2 * np.abs(a))
    assert np.any(np.isclose(np.abs(out), 2 * np.abs(a)))


def test_tis_without_a_cap_is_unbiased_for_one_token_responses():
    rng = np.random.default_rng(9)
    pi, mu = (rng.dirichlet(np.ones(5)) for _ in range(2))
    advantages = rng.normal(size=5)
    arrays = {
        "advantages": advantages[:, None],
        "old_logprobs": np.log(pi)[:, None],
        "sampler_logprobs": np.log(mu)[:, None],
        "mask": np.ones((5, 1)),
    }
    scores = np.eye(5) - pi
    weighted = reshaped("tis_credit", arrays, cap=None)[:, 0]
    same(mu * weighted @ scores, pi * advantages @ scores)


@pytest.mark.parametrize("name", ["tis_credit", "mis_credit"])
def test_one_token_rows_have_one_level(name):
    arrays = batch(mask=np.eye(ROWS, COLUMNS))
    token, sequence = (reshaped(name, arrays, level=level) for level in ("token", "sequence"))
    same(token, sequence)


@pytest.mark.parametrize("name", ["tis_credit", "mis_credit"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampler_probability_behind_the_mask_is_not_read(name, level):
    arrays = batch()
    other = {**arrays, "sampler_logprobs": np.where(MASK > 0, arrays["sampler_logprobs"], -77.0)}
    same(reshaped(name, other, level=level), reshaped(name, arrays, level=level))


def test_mis_with_open_bounds_is_importance_sampling():
    arrays = batch(drift=1.0)
    weight = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
    expected = MASK * weight * arrays["advantages"]
    same(reshaped("mis_credit", arrays, low=0.0, high=None), expected)


def test_mis_is_zero_or_keeps_the_sign_and_masks_rows_whole():
    arrays = batch(drift=0.4)
    token = reshaped("mis_credit", arrays, low=0.8, high=1.2)
    assert np.all((token == 0) | (token * arrays["advantages"] > 0))
    row = reshaped("mis_credit", batch(drift=0.1), level="sequence", low=0.8, high=1.2)
    live = [np.count_nonzero(r) for r in row]
    assert all(n in (0, f) for n, f in zip(live, MASK.sum(1)))
    assert 0 < sum(live) < TOKENS


def test_mis_keeps_a_ratio_at_its_bound():
    arrays = batch(old_logprobs=np.zeros_like(MASK), sampler_logprobs=np.zeros_like(MASK))
    same(reshaped("mis_credit", arrays, low=1.0, high=1.0), MASK * arrays["advantages"])


def test_mis_differs_from_tis_only_outside_the_band():
    arrays = batch(drift=0.8)
    ratio = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
    outside = ((ratio > 2) | (ratio < 0.5)) & (MASK > 0)
    mis, tis = reshaped("mis_credit", arrays), reshaped("tis_credit", arrays)
    np.testing.assert_array_equal(mis != tis, outside)
    assert outside.any()


def test_icepop_with_a_faithful_sampler_is_grpo():
    arrays = batch()
    arrays["sampler_logprobs"] = arrays["old_logprobs"]
    expected = evaluate("grpo_loss", arrays, beta=0.0, clip_high=0.28)
    actual = evaluate("icepop_loss", arrays)
    same(actual[0], expected[0])
    same(actual[1], expected[1])


@pytest.mark.parametrize("low,high", [(0.0, np.inf), (None, None)])
def test_icepop_with_open_bounds_weighs_by_the_whole_mismatch(low, high):
    arrays = batch(drift=1.0)
    weighted = {**arrays, "advantages": reshaped("tis_credit", arrays, cap=None)}
    grad = gradient("icepop_loss", arrays, k_low=low, k_high=high)
    same(grad, gradient("grpo_loss", weighted, beta=0.0, clip_high=0.28))


def test_icepop_differs_from_truncation_exactly_outside_the_interval():
    arrays = batch(drift=1.0)
    arrays["old_logprobs"] = arrays["logprobs"]
    k = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
    truncated = {**arrays, "advantages": reshaped("tis_credit", arrays, cap=5.0)}
    grad, other = gradient("icepop_loss", arrays), gradient("grpo_loss", truncated, beta=0.0)
    outside = ((k < 0.5) | (k > 5)) & (MASK > 0)
    np.testing.assert_array_equal(~np.isclose(grad, other, atol=1e-12), outside)
    assert outside.any()


def test_icepop_token_mean_counts_removed_tokens():
    arrays = batch(drift=1.0)
    k = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
    k = np.where((k >= 0.5) & (k <= 5), k, 0)
    r, a = ratio_of(arrays), arrays["advantages"]
    x = -k * np.minimum(r * a, np.clip(r, 0.8, 1.28) * a)
    same(value("icepop_loss", arrays, aggregation="token_mean"), np.sum(x * MASK) / TOKENS)
    same(value("icepop_loss", arrays), np.sum(x * SEQUENCE_MEAN))


@pytest.mark.parametrize("k", [0.4, 6.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_icepop_removes_a_token_outside_the_interval(k, sign):
    arrays = on_policy(advantages=sign * np.ones_like(MASK))
    arrays["sampler_logprobs"] = arrays["sampler_logprobs"].copy()
    arrays["sampler_logprobs"][0, 3] -= np.log(k)
    grad = gradient("icepop_loss", arrays)
    assert grad[0, 3] == 0
    same(grad[0, 4], -sign / (ROWS * 9))


# REINFORCE++ ------------------------------------------------------------------------------------


def test_reinforce_pp_is_white():
    out = reshaped("reinforce_pp_advantages", batch())
    same(out.sum(), 0.0)
    same((out**2).sum(), TOKENS)


def test_reinforce_pp_plain_is_the_reward_on_every_token():
    out = reshaped("reinforce_pp_advantages", batch(), whiten=False, kl_coef=0.0)
    same(out, MASK * REWARDS[:, None])


def test_reinforce_pp_undiscounted_ignores_a_constant_reward():
    arrays = batch()
    shifted = {**arrays, "rewards": REWARDS + 2}
    name = "reinforce_pp_advantages"
    same(reshaped(name, shifted), reshaped(name, arrays))
    differs(reshaped(name, shifted, gamma=0.9), reshaped(name, arrays, gamma=0.9))


def test_reinforce_pp_group_baseline_ignores_a_constant_of_one_group():
    arrays = batch()
    shifted = {**arrays, "rewards": REWARDS + 3 * (GROUPS == 7)}
    hyper = {"group_baseline": True, "kl_coef": 0.0}
    name = "reinforce_pp_advantages"
    same(reshaped(name, shifted, **hyper), reshaped(name, arrays, **hyper))


def test_reinforce_pp_ignores_the_scale_of_its_rewards():
    arrays = batch()
    scaled = {**arrays, "rewards": 4 * REWARDS}
    name = "reinforce_pp_advantages"
    same(reshaped(name, scaled, kl_coef=0.2), reshaped(name, arrays, kl_coef=0.05))


# A-LoL ------------------------------------------------------------------------------------------

PROMPT_VALUES = np.array([0.3, 0.5, -0.2, 0.6, 0.1, 0.9, 0.0])


def test_a_lol_variants_agree_at_the_start():
    arrays = on_policy(prompt_values=PROMPT_VALUES)
    expected = evaluate("alol_loss", arrays)
    assert expected[0] > 0
    for variant in ("a-lol-seq", "a-lol-ref-free"):
        actual = evaluate("alol_loss", arrays, variant=variant)
        same(actual[0], expected[0])
        same(actual[1], expected[1])


@pytest.mark.parametrize("variant", ["a-lol", "a-lol-seq", "a-lol-ref-free"])
def test_a_lol_ignores_rows_below_their_value(variant):
    values = PROMPT_VALUES.copy()
    values[0] = 1.2
    grad = gradient("alol_loss", batch(prompt_values=values), variant=variant)
    assert np.all(grad[0] == 0) and np.all(grad[5][MASK[5] > 0] < 0)


@pytest.mark.parametrize("ratio,weight", [(1e4, 1.9), (1e-4, 0.1)])
def test_a_lol_weight_freezes_and_the_gradient_flows_on(ratio, weight):
    arrays = with_ratio(ratio, "ref_logprobs", prompt_values=PROMPT_VALUES)
    gain = np.maximum(REWARDS - PROMPT_VALUES, 0)[:, None]
    same(gradient("alol_loss", arrays), -gain * weight * SEQUENCE_SUM)


def test_a_lol_kl_adds_a_constant_pull():
    arrays = batch(prompt_values=PROMPT_VALUES)
    free = gradient("alol_loss", arrays, variant="a-lol-ref-free")
    held = gradient("alol_loss", arrays, variant="a-lol-kl", beta=0.3)
    same(held, free + 0.3 * SEQUENCE_SUM)


# ASPO -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio,factor", [(0.5, 2.0), (0.1, 3.0), (0.01, 3.0)])
def test_aspo_pushes_rare_positive_tokens_more(ratio, factor):
    arrays = with_ratio(ratio, advantages=np.ones_like(MASK))
    same(gradient("aspo_loss", arrays), -factor * TOKEN_MEAN)
    same(gradient("dapo_loss", arrays), -ratio * TOKEN_MEAN)


def test_aspo_mirrors_the_two_signs():
    inside = np.random.default_rng(10).uniform(0.9, 1.1, MASK.shape)
    positive = with_ratio(inside, advantages=np.ones_like(MASK))
    negative = with_ratio(1 / inside, advantages=-np.ones_like(MASK))
    same(gradient("aspo_loss", positive), -gradient("aspo_loss", negative))


def test_aspo_wider_range_is_for_high_entropy_only():
    arrays = with_ratio(1.3, advantages=np.ones_like(MASK))
    live = gradient("aspo_loss", arrays) != 0
    for row in range(ROWS):
        at = MASK[row] > 0
        if at.any():
            limit = np.quantile(arrays["entropy"][row][at], 0.8)
            np.testing.assert_array_equal(live[row][at], arrays["entropy"][row][at] > limit)
    assert live.any()


def test_aspo_negative_tokens_are_capped_and_clipped():
    a = -np.ones_like(MASK)
    for ratio, factor in ((0.5, 0.0), (1.7, 1.7), (2.9, 2.9), (8.0, 3.0)):
        same(gradient("aspo_loss", with_ratio(ratio, advantages=a)), factor * TOKEN_MEAN)


@pytest.mark.parametrize("name", ["aspo_loss", "dhpo_loss"])
def test_entropy_only_steers(name):
    hyper = {"mixing": "entropy"} if name == "dhpo_loss" else {}
    assert np.all(gradient(name, batch(), wrt="entropy", **hyper) == 0)


# Balanced aggregation ---------------------------------------------------------------------------


def signed(signs, seed=0, **changes):
    """The batch in one group, with row advantages of the given signs and sizes."""
    arrays = batch(seed, **changes)
    arrays["advantages"] = np.array(signs, float)[:, None] * np.ones_like(MASK)
    arrays["group_ids"] = np.full(ROWS, 3, np.int32)
    return arrays


def test_balanced_aggregation_of_equal_lengths_is_both_classical_means():
    mask = np.zeros_like(MASK)
    mask[:, 1:5] = 1
    arrays = signed([0.5, -1, 2, -0.3, 1, -1, 0.1], mask=mask)
    grad = gradient("balanced_aggregation_loss", arrays)
    for aggregation in ("token_mean", "sequence_mean"):
        hyper = {"beta": 0.0, "clip_high": 0.28, "aggregation": aggregation}
        same(grad, gradient("grpo_loss", arrays, **hyper))


def test_balanced_aggregation_balances_one_winner_and_one_loser():
    mask = np.zeros_like(MASK)
    mask[0, :2] = 1
    mask[1, :8] = 1
    arrays = on_policy(mask=mask)
    arrays["advantages"] = np.array([1, -1, 0, 0, 0, 0, 0.0])[:, None] * np.ones_like(MASK)
    arrays["group_ids"] = np.array([0, 0, 1, 2, 3, 4, 5], np.int32)
    pushes = gradient("balanced_aggregation_loss", arrays).sum(1)
    same(pushes[0], -pushes[1])
    assert pushes[0] < 0
    classical = gradient("dapo_loss", arrays).sum(1)
    same(classical[1], -4 * classical[0])


def test_balanced_aggregation_weighs_all_tokens_of_a_sign_alike():
    arrays = signed([1, -1, 1, 1, -1, 1, 0])
    arrays["old_logprobs"] = arrays["logprobs"]
    positive = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    grad = gradient("balanced_aggregation_loss", arrays)
    same(grad[positive], -MASK[positive] * 4 / (ROWS * MASK[positive].sum()))


def test_balanced_aggregation_sees_groups_and_not_the_order_of_rows():
    arrays = signed([1, -1, 1, -2, -1, 1, -1])
    before = value("balanced_aggregation_loss", arrays)
    order = np.random.default_rng(11).permutation(ROWS)
    permuted = {k: v[order] for k, v in arrays.items()}
    same(value("balanced_aggregation_loss", permuted), before)
    split = {**arrays, "group_ids": np.array([3, 8, 3, 3, 8, 3, 8], np.int32)}
    differs(value("balanced_aggregation_loss", split), before)


def test_balanced_aggregation_ignores_more_of_the_same():
    arrays = signed([1, -1, 1, -1, -1, 1, 0])
    negative = (arrays["advantages"] < 0) & (MASK > 0)
    mean_term = np.mean(np.maximum(ratio_of(arrays), 0.8)[negative])
    longer = {k: v.copy() for k, v in arrays.items()}
    longer["mask"][3, 6:] = 1
    longer["old_logprobs"][3, 6:] = longer["logprobs"][3, 6:] - np.log(mean_term)
    name = "balanced_aggregation_loss"
    same(value(name, longer), value(name, arrays))


def test_balanced_aggregate_is_the_mean_over_all_groups():
    arrays = batch()
    x = arrays["logprobs"]
    with jax.enable_x64(True):
        actual = balanced_aggregate(*map(jnp.asarray, (x, MASK, arrays["advantages"], GROUPS)))
    total = 0.0
    for group in np.unique(GROUPS):
        rows = np.flatnonzero(GROUPS == group)
        for sign in (1, -1):
            chosen = [b for b in rows if sign * arrays["advantages"][b, 0] > 0 and MASK[b].any()]
            if chosen:
                mean = (x * MASK)[chosen].sum() / MASK[chosen].sum()
                total += len(chosen) / len(rows) * mean
    same(float(actual), total / 3)


# BCPG-NSA ---------------------------------------------------------------------------------------

STEP_CORRECT = (np.random.default_rng(12).random(MASK.shape) < 0.5).astype(float)


def centred_rewards():
    return np.array([r - REWARDS[GROUPS == g].mean() for r, g in zip(REWARDS, GROUPS)])[:, None]


def test_bcpg_without_labels_or_at_beta_one_is_the_constrained_gradient():
    arrays = batch(step_correct=STEP_CORRECT)
    plain = gradient("bcpg_nsa_loss", arrays, beta=1.0)
    unlabelled = {**arrays, "step_correct": 0 * STEP_CORRECT}
    same(gradient("bcpg_nsa_loss", unlabelled), plain)
    same(gradient("bcpg_nsa_loss", arrays, beta=1.0, tau=0.0), -centred_rewards() * SEQUENCE_MEAN)


def test_bcpg_behaviour_term_pulls_all_tokens_of_a_row_alike():
    arrays = batch(step_correct=STEP_CORRECT)
    pull = gradient("bcpg_nsa_loss", arrays, tau=0.2) - gradient("bcpg_nsa_loss", arrays, tau=0.0)
    drift = np.sum((arrays["logprobs"] - arrays["ref_logprobs"]) * MASK, 1, keepdims=True)
    same(pull, 0.2 * drift * SEQUENCE_MEAN)
    at_home = on_policy(step_correct=STEP_CORRECT)
    same(gradient("bcpg_nsa_loss", at_home, tau=0.2), gradient("bcpg_nsa_loss", at_home, tau=0.0))


def test_bcpg_labels_count_in_wrong_responses_only():
    arrays = on_policy(step_correct=STEP_CORRECT)
    plain = gradient("bcpg_nsa_loss", arrays, beta=1.0)
    spared = gradient("bcpg_nsa_loss", arrays, beta=0.5)
    wrong = REWARDS <= 0.5
    same(spared[~wrong], plain[~wrong])
    same(spared[wrong], np.where(STEP_CORRECT > 0, 0.5, 1.0)[wrong] * plain[wrong])


def test_bcpg_negative_beta_raises_correct_steps():
    arrays = on_policy(step_correct=STEP_CORRECT)
    grad = gradient("bcpg_nsa_loss", arrays, beta=-0.5)
    labelled = (STEP_CORRECT * MASK > 0) & (REWARDS <= 0.5)[:, None] & (centred_rewards() < 0)
    assert labelled.any() and np.all(grad[labelled] < 0)


def test_bcpg_reward_at_the_threshold_is_wrong():
    arrays = on_policy(step_correct=np.ones_like(MASK), rewards=np.where(REWARDS > 0, 0.9, 0.5))
    halved, plain = (gradient("bcpg_nsa_loss", arrays, beta=b, tau=0.0) for b in (0.5, 1.0))
    wrong = REWARDS == 0
    same(halved[wrong], 0.5 * plain[wrong])


# ConSPO -----------------------------------------------------------------------------------------


def scored(scores, rewards):
    """One group of one-token responses with the given scores, the other rows masked."""
    n = len(scores)
    arrays = batch(mask=np.eye(ROWS, COLUMNS) * (np.arange(ROWS) < n)[:, None])
    arrays["logprobs"][np.arange(n), np.arange(n)] = scores
    arrays["rewards"] = np.append(rewards, np.zeros(ROWS - n))
    arrays["group_ids"] = np.zeros(ROWS, np.int32)
    return arrays


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_conspo_pushes_of_a_group_balance(margin):
    push = gradient("conspo_loss", batch(), margin=margin, tau=0.5).sum(1)
    for group in np.unique(GROUPS):
        same(push[GROUPS == group].sum(), 0.0)
    assert np.abs(push).sum() > 0.1


def test_conspo_of_one_pair_is_a_softplus():
    arrays = scored([-0.4, -0.9], [1, 0])
    same(value("conspo_loss", arrays, tau=0.3), np.log1p(np.exp((-0.9 + 0.4) / 0.3)))


def test_conspo_margin_keeps_the_pressure_up():
    pair = scored([-0.4, -0.9], [1, 0])
    small, large = (evaluate("conspo_loss", pair, margin=m) for m in (0.0, 0.5))
    assert large[0] > small[0] and large[1][0, 0] < small[1][0, 0] < 0
    apart = scored([-0.4, -0.4 - 0.5 - 0.5], [1, 0])
    assert abs(gradient("conspo_loss", apart, margin=0.5)[0, 0]) < 0.01 / 0.1


def test_conspo_pushes_the_badly_placed_most():
    negatives = gradient("conspo_loss", scored([-1, -0.5, -0.8], [1, 0, 0])).sum(1)
    assert negatives[1] > negatives[2] > 0
    positives = gradient("conspo_loss", scored([-1, -1.1, -0.9], [1, 1, 0])).sum(1)
    assert positives[1] < positives[0] < 0


def test_conspo_ignores_repetition():
    arrays = batch()
    same(value("conspo_loss", doubled(arrays)), value("conspo_loss", arrays))


def test_conspo_without_a_usable_group_is_zero():
    loss, grad, _ = evaluate("conspo_loss", batch(rewards=np.ones(ROWS)))
    assert loss == 0 and np.all(grad == 0)


# CPPO (prefix) ----------------------------------------------------------------------------------


def test_cppo_with_a_wide_limit_is_importance_weighted():
    arrays = batch(drift=1.0)
    expected = -ratio_of(arrays, "sampler_logprobs") * arrays["advantages"] * TOKEN_MEAN
    same(gradient("cppo_prefix_loss", arrays, delta=float(COLUMNS)), expected)


def kept_tokens(arrays, **hyper):
    return gradient("cppo_prefix_loss", arrays, **hyper) != 0


def test_cppo_uniform_weights_and_ample_budget_are_a_uniform_rule():
    arrays = batch(drift=1.0)
    ratio = ratio_of(arrays, "sampler_logprobs")
    change = np.abs(np.exp(arrays["logprobs"]) - np.exp(arrays["sampler_logprobs"]))
    expected = (arrays["advantages"] * (ratio - 1) <= 0) | (change <= 0.15)
    kept = kept_tokens(arrays, w_min=1.0, delta_b=50.0)
    np.testing.assert_array_equal(kept, expected & (MASK > 0))
    assert not expected[MASK > 0].all()


def test_cppo_keeps_what_the_sequential_rule_keeps():
    arrays = batch(drift=0.7)
    hyper = {"delta": 0.06, "w_min": 0.5, "delta_b": 0.03, "quantile": 0.7, "budget_scale": 0.4}
    ratio = ratio_of(arrays, "sampler_logprobs")
    expected = np.zeros(MASK.shape, bool)
    for row in range(ROWS):
        at = np.flatnonzero(MASK[row])
        if not len(at):
            continue
        change = np.abs(np.exp(arrays["logprobs"]) - np.exp(arrays["sampler_logprobs"]))[row, at]
        weights = 1 - 0.5 * np.arange(len(at)) / max(len(at) - 1, 1)
        budget = np.clip(0.4 * np.quantile(change, 0.7), 0.03, 0.06)
        spent = used = 0.0
        for t, column in enumerate(at):
            away = arrays["advantages"][row, column] * (ratio[row, column] - 1) > 0
            limit = min(0.06, 0.06 + budget * used - spent)
            expected[row, column] = not away or weights[t] * change[t] <= limit
            spent, used = spent + weights[t] * change[t], used + weights[t]
    kept = kept_tokens(arrays, **hyper)
    np.testing.assert_array_equal(kept, expected)
    assert 5 < expected.sum() < TOKENS - 5


@pytest.mark.parametrize("column,limit", [(0, 0.15), (8, 0.15 / 0.8)])
def test_cppo_limit_widens_with_the_position(column, limit):
    for change, kept in ((limit - 1e-6, True), (limit + 1e-6, False)):
        sampler = np.full(MASK.shape, np.log(0.3))
        logprobs = sampler.copy()
        logprobs[0, column] = np.log(0.3 + change)
        arrays = batch(logprobs=logprobs, sampler_logprobs=sampler, advantages=np.ones_like(MASK))
        assert kept_tokens(arrays)[0, column] == kept


def test_cppo_drifted_prefix_drops_every_later_move_away():
    sampler = np.full(MASK.shape, np.log(0.3))
    moved = np.array([0.8, 0.8, 0.8, 0.31, 0.31, 0.29, 0.31, 0.31, 0.31]) * np.ones((ROWS, 1))
    arrays = batch(logprobs=np.log(moved), sampler_logprobs=sampler, advantages=np.ones_like(MASK))
    np.testing.assert_array_equal(kept_tokens(arrays)[0], np.arange(9) == 5)


def test_cppo_and_sao_do_not_see_masked_positions_between_tokens():
    arrays = batch(drift=0.7, old_values=np.random.default_rng(13).normal(size=MASK.shape))
    holed, order = with_holes(arrays)
    for name in ("cppo_prefix_loss", "sao_loss"):
        same(gradient(name, holed)[:, order], gradient(name, arrays))


# DHPO -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["ratio", "loss"])
def test_dhpo_ends_at_grpo_and_gspo(combine):
    arrays = batch()
    windows = {"clip_seq_low": 0.1, "clip_seq_high": 0.2, "combine": combine}
    same(
        gradient("dhpo_loss", arrays, alpha=1.0, **windows),
        gradient("grpo_loss", arrays, beta=0.0, clip_high=0.28),
    )
    same(
        gradient("dhpo_loss", arrays, alpha=0.0, **windows),
        gradient("gspo_loss", arrays, clip_low=0.1, clip_high=0.2),
    )


@pytest.mark.parametrize("towards", ["token", "sequence"])
def test_dhpo_on_policy_mixing_moves_gradient_within_the_row(towards):
    arrays = on_policy()
    loss, grad, _ = evaluate("dhpo_loss", arrays, mixing="entropy", high_entropy_to=towards)
    same(loss, -np.mean(arrays["advantages"][:, 0] * (MASK.sum(1) > 0)))
    h = np.where(MASK > 0, arrays["entropy"], np.nan)
    for row in range(ROWS):
        at = MASK[row] > 0
        if at.sum() < 2:
            continue
        low, high = h[row][at].min(), h[row][at].max()
        w = (h[row][at] - low) / (high - low)
        w = w if towards == "token" else 1 - w
        share = (w + 1 - w.mean()) / (ROWS * at.sum())
        same(grad[row][at], -arrays["advantages"][row, 0] * share)
    same(grad.sum(1), gradient("dhpo_loss", arrays).sum(1))


def test_dhpo_of_constant_entropy_is_the_even_average():
    arrays = batch(entropy=np.full(MASK.shape, 0.7))
    for towards in ("token", "sequence"):
        grad = gradient("dhpo_loss", arrays, mixing="entropy", high_entropy_to=towards)
        same(grad, gradient("dhpo_loss", arrays, alpha=0.5))


@pytest.mark.parametrize("combine", ["ratio", "loss"])
@pytest.mark.parametrize("mixing", ["average", "entropy"])
def test_dhpo_value_row_by_row(combine, mixing):
    arrays = batch(drift=0.8)
    hyper = {"clip_seq_low": 0.05, "clip_seq_high": 0.1, "combine": combine, "mixing": mixing}
    total = 0.0
    for row in range(ROWS - 1):
        at = MASK[row] > 0
        d = (arrays["logprobs"] - arrays["old_logprobs"])[row, at]
        r, s, a = np.exp(d), np.exp(d.mean()), arrays["advantages"][row, 0]
        rc, sc = np.clip(r, 0.8, 1.28), np.clip(s, 0.95, 1.1)
        h = arrays["entropy"][row, at]
        w = 0.3 * np.ones_like(r)
        if mixing == "entropy":
            w = (h - h.min()) / np.ptp(h) if len(h) > 1 else np.array([0.5])
        if combine == "ratio":
            x = np.minimum((w * r + (1 - w) * s) * a, (w * rc + (1 - w) * sc) * a)
        else:
            x = w * np.minimum(r * a, rc * a) + (1 - w) * min(s * a, sc * a)
        total += x.mean()
    same(value("dhpo_loss", arrays, alpha=0.3, **hyper), -total / ROWS)


def test_dhpo_clips_an_outlier_before_it_is_mixed():
    ratios = np.ones_like(MASK)
    ratios[0, 4] = 50.0
    mask = MASK * (np.arange(ROWS) == 0)[:, None]
    arrays = with_ratio(ratios, mask=mask, advantages=np.ones_like(MASK))
    bound = 0.5 * 1.28 + 0.5 * 1.0004
    loss = value("dhpo_loss", arrays) * ROWS
    rest = 0.5 + 0.5 * 1.0004
    assert -loss * 9 <= bound + 8 * rest + 1e-9


# DISPO ------------------------------------------------------------------------------------------


def test_dispo_with_open_windows_is_importance_weighted_reinforce():
    arrays = batch(drift=1.0)
    wide = {"clip_pos_low": 1, "clip_neg_low": 1, "clip_pos_high": 1e9, "clip_neg_high": 1e9}
    expected = -ratio_of(arrays) * arrays["advantages"] * TOKEN_MEAN
    same(gradient("dispo_loss", arrays, **wide), expected)
    same(gradient("dispo_loss", arrays, **dict.fromkeys(wide)), expected)


def test_dispo_with_one_window_is_cispo():
    arrays = batch(drift=1.0)
    window = {"clip_pos_low": 0.3, "clip_neg_low": 0.3, "clip_pos_high": 0.6, "clip_neg_high": 0.6}
    cispo = gradient("cispo_loss", arrays, clip_low=0.3, clip_high=0.6)
    same(gradient("dispo_loss", arrays, **window), cispo)


@pytest.mark.parametrize("moved,kept", [("neg", True), ("pos", False)])
def test_dispo_windows_are_separate(moved, kept):
    arrays = batch(drift=1.0)
    before = gradient("dispo_loss", arrays)
    after = gradient(
        "dispo_loss", arrays, **{f"clip_{moved}_low": 0.05, f"clip_{moved}_high": 0.05}
    )
    untouched = (arrays["advantages"][:, 0] > 0) == kept
    np.testing.assert_array_equal(after[untouched], before[untouched])
    differs(after[~untouched], before[~untouched])


def test_dispo_default_weights_are_bounded():
    ratios = np.exp(np.linspace(-12, 12, MASK.size)).reshape(MASK.shape)
    for sign, low, high in ((1, 0.8, 11.0), (-1, 0.0, 101.0)):
        arrays = with_ratio(ratios, advantages=sign * np.ones_like(MASK))
        weights = (gradient("dispo_loss", arrays) * -sign * TOKENS)[MASK > 0]
        same([weights.min(), weights.max()], [max(low, ratios[MASK > 0].min()), high])


def test_dispo_logs_the_share_of_each_regime():
    arrays = batch(drift=1.5)
    hyper = {"clip_pos_high": 1.0, "clip_neg_low": 0.5, "clip_neg_high": 1.0}
    metrics = evaluate("dispo_loss", arrays, **hyper)[2]
    r, positive = ratio_of(arrays), arrays["advantages"] > 0
    expected = {
        "pos_low": positive & (r < 0.8),
        "pos_high": positive & (r > 2),
        "neg_low": ~positive & (r < 0.5),
        "neg_high": ~positive & (r > 2),
    }
    for name, hit in expected.items():
        same(metrics[f"clip_fraction_{name}"], np.sum(hit * MASK) / TOKENS)
        assert hit.any()


# DRPO -------------------------------------------------------------------------------------------


def drpo_shares(arrays, **hyper):
    """omega of each response, 0 for wrong ones: minus the push on its score, times G."""
    push = gradient("drpo_length_loss", arrays, beta=0.0, **hyper).sum(1)
    return -3 * push * (REWARDS > 0.5)


def test_drpo_without_length_preference_weighs_correct_ones_alike():
    shares = drpo_shares(batch(), lam=np.inf)
    same(shares[[0, 5]], [0.5, 0.5])
    mask = np.zeros_like(MASK)
    mask[:, 3:7] = 1
    same(drpo_shares(batch(mask=mask), lam=0.1), drpo_shares(batch(mask=mask), lam=np.inf))


def test_drpo_pushes_of_a_group_balance():
    push = gradient("drpo_length_loss", batch(), beta=0.0).sum(1)
    for group in np.unique(GROUPS):
        same(push[GROUPS == group].sum(), 0.0)
    assert np.abs(push).sum() > 0.1


def test_drpo_shorter_correct_answer_gains_from_the_other_correct_ones():
    arrays = batch()
    shorter = {**arrays, "mask": MASK.copy()}
    shorter["mask"][0, 6:] = 0
    hyper = {"max_length": 20}
    before, after = (drpo_shares(a, **hyper) for a in (arrays, shorter))
    assert after[0] > before[0] and after[5] < before[5]
    grads = [gradient("drpo_length_loss", a, beta=0.0, **hyper) for a in (arrays, shorter)]
    wrong = REWARDS < 0.5
    same(grads[1][wrong], grads[0][wrong])


def test_drpo_hinge_is_silent_until_its_threshold():
    still = on_policy()
    hyper = {"beta": 1e3, "delta": 1e-4}
    same(
        gradient("drpo_length_loss", still, **hyper),
        gradient("drpo_length_loss", still, beta=0.0),
    )
    for drift, active in ((0.999e-4, False), (2e-4, True), (-1.0, False)):
        arrays = {**still, "old_logprobs": still["logprobs"] + drift}
        hinge = evaluate("drpo_length_loss", arrays, **hyper)[2]["hinge"]
        same(hinge, 500 * 1e-8 if active else 0.0)


def test_drpo_never_pushes_a_correct_answer_down():
    arrays = batch()
    grad = gradient("drpo_length_loss", arrays, beta=0.0, lam=0.05)
    assert not np.any(grad[REWARDS > 0.5] > 0)
    penalised = {**arrays, "rewards": REWARDS - 1.2 * MASK.sum(1) / COLUMNS}
    penalised["group_ids"] = np.zeros(ROWS, np.int32)
    assert np.any(reshaped("grpo_advantage", penalised)[REWARDS > 0.5] < 0)


@pytest.mark.parametrize("name", ["drpo_length_loss", "wapo_loss"])
def test_a_given_limit_makes_padding_irrelevant(name):
    arrays = batch()
    grown = {
        k: np.pad(np.where(MASK > 0, v, np.nan) if k != "mask" and v.dtype.kind == "f" else v,
                  ((0, 0), (0, 3)))
        if v.ndim == 2
        else v
        for k, v in arrays.items()
    }  # fmt: skip
    grad = gradient(name, grown, max_length=20)
    same(grad[:, :COLUMNS], gradient(name, arrays, max_length=20))
    assert np.all(grad[:, COLUMNS:] == 0)


# Invalid action masking -------------------------------------------------------------------------


def masked_actions(seed=0, vocabulary=5):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*MASK.shape, vocabulary))
    valid = rng.random(logits.shape) < 0.6
    tokens = rng.integers(0, vocabulary, MASK.shape).astype(np.int32)
    np.put_along_axis(valid, tokens[..., None], True, -1)
    valid[MASK == 0] = False
    old = np.log(rng.uniform(0.2, 0.6, MASK.shape))
    arrays = batch(seed)
    return {
        **arrays,
        "logits": logits,
        "valid_tokens": valid,
        "tokens": tokens,
        "old_logprobs": old,
    }


def test_masked_policy_leaves_forbidden_logits_alone():
    arrays = masked_actions()
    grad = gradient("masked_policy_loss", arrays, wrt="logits")
    assert np.all(grad[~arrays["valid_tokens"]] == 0)
    assert np.any(grad != 0)
    same(grad.sum(-1), 0.0)


def test_masked_policy_with_everything_allowed_is_ppo_with_entropy():
    arrays = masked_actions()
    arrays["valid_tokens"] = np.ones_like(arrays["valid_tokens"])
    log_p = arrays["logits"] - np.log(np.exp(arrays["logits"]).sum(-1, keepdims=True))
    arrays["logprobs"] = np.take_along_axis(log_p, arrays["tokens"][..., None], -1)[..., 0]
    entropy = -np.sum(np.exp(log_p) * log_p, -1)
    expected = value("dapo_loss", arrays, clip_high=0.2) - 0.01 * np.sum(entropy * MASK) / TOKENS
    same(value("masked_policy_loss", arrays, wrt="logits"), expected)
    same(value("masked_policy_loss", arrays, wrt="logits", variant="naive"), expected)


def test_naive_masking_does_not_start_at_ratio_one():
    arrays = masked_actions()
    allowed = np.where(arrays["valid_tokens"] | (MASK == 0)[..., None], arrays["logits"], -np.inf)
    log_p = allowed - np.log(np.exp(allowed).sum(-1, keepdims=True))
    arrays["old_logprobs"] = np.take_along_axis(log_p, arrays["tokens"][..., None], -1)[..., 0]
    masked = evaluate("masked_policy_loss", arrays, wrt="logits")
    naive = evaluate("masked_policy_loss", arrays, wrt="logits", variant="naive")
    same(masked[2]["approx_kl"], 0.0)
    assert naive[2]["approx_kl"] > 0.01
    assert np.any(naive[1][(MASK > 0)[..., None] & ~arrays["valid_tokens"]] != 0)


def test_a_single_allowed_token_has_no_gradient():
    arrays = masked_actions()
    only = np.zeros_like(arrays["valid_tokens"])
    np.put_along_axis(only, arrays["tokens"][..., None], True, -1)
    arrays |= {"valid_tokens": only, "old_logprobs": np.zeros_like(MASK)}
    loss, grad, _ = evaluate("masked_policy_loss", arrays, wrt="logits")
    same(loss, -np.sum(arrays["advantages"] * MASK) / TOKENS)
    assert np.all(grad == 0)


# LOOP -------------------------------------------------------------------------------------------


def leave_one_out():
    out = []
    for b, group in enumerate(GROUPS):
        others = [REWARDS[j] for j in range(ROWS) if GROUPS[j] == group and j != b]
        out.append(REWARDS[b] - (np.mean(others) if others else 0))
    return np.array(out)[:, None]


def test_loop_first_update_is_rloo_over_the_length():
    same(gradient("loop_loss", on_policy()), -leave_one_out() * SEQUENCE_MEAN)


def test_loop_without_clip_is_importance_weighted_rloo():
    arrays = batch(drift=1.0)
    grad = gradient("loop_loss", arrays, clip_low=None, clip_high=None)
    same(grad, -ratio_of(arrays) * leave_one_out() * SEQUENCE_MEAN)


def test_loop_baseline_is_fair_and_equivariant():
    push = gradient("loop_loss", on_policy(mask=np.eye(ROWS, COLUMNS))).sum(1)
    for group in (7, -2):
        same(push[GROUPS == group].sum(), 0.0)
    shifted = gradient("loop_loss", batch(rewards=REWARDS + 5 * (GROUPS == 7)))
    same(shifted, gradient("loop_loss", batch()))
    same(gradient("loop_loss", batch(rewards=2 * REWARDS)), 2 * gradient("loop_loss", batch()))
    equal = gradient("loop_loss", batch(rewards=np.where(GROUPS == 7, 0.3, REWARDS)))
    assert np.all(equal[GROUPS == 7] == 0)


def test_loop_variance_falls_with_the_group():
    prompts, samples = 4, 960
    pi = np.array([0.5, 0.3, 0.2])
    scores, payoff = np.eye(3) - pi, np.array([1.0, 2.0, 0.5])
    rng = np.random.default_rng(14)
    variances = []
    for k in (1, 2, 4):
        draws = samples // (prompts * k)
        actions = rng.choice(3, p=pi, size=samples)
        ones = np.ones((len(actions), 1))
        arrays = {"logprobs": -ones, "old_logprobs": -ones, "mask": ones}
        arrays |= {"rewards": payoff[actions]}
        arrays["group_ids"] = np.repeat(np.arange(draws * prompts), k).astype(np.int32)
        weights = -draws * gradient("loop_loss", arrays)
        estimates = (weights * scores[actions]).reshape(draws, -1, 3).sum(1)
        same(estimates.mean(0), pi * payoff @ scores, 0.15)
        variances.append(estimates.var(0).sum())
    assert variances[0] > 1.5 * variances[1] > 1.5**2 * variances[2]


# MiniRL -----------------------------------------------------------------------------------------


def test_minirl_on_policy_is_the_summed_group_gradient():
    same(gradient("minirl_loss", on_policy()), -centred_rewards() * SEQUENCE_SUM)
    per_token = gradient("minirl_loss", on_policy(), length_normalize=True)
    same(per_token, -centred_rewards() * SEQUENCE_MEAN)


@pytest.mark.parametrize("cap", [5.0, 1.3, None])
def test_minirl_weight_multiplies_the_gradient(cap):
    arrays = batch(drift=0.8)
    faithful = {**arrays, "sampler_logprobs": arrays["old_logprobs"]}
    k = np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"])
    k = k if cap is None else np.minimum(k, cap)
    grad = gradient("minirl_loss", arrays, is_cap=cap)
    same(grad, k * gradient("minirl_loss", faithful))
    differs(grad, gradient("minirl_loss", faithful))


def test_minirl_mask_is_one_sided():
    rising = centred_rewards() > 0
    for ratio, live in ((0.5, True), (1.5, False)):
        grad = gradient("minirl_loss", with_ratio(ratio))
        chosen = (MASK > 0) & rising
        assert np.all((grad[chosen] != 0) == live)
        falling = (MASK > 0) & (centred_rewards() < 0)
        assert np.all((grad[falling] != 0) != live)


def test_minirl_counts_every_token():
    arrays = batch()
    same(value("minirl_loss", doubled(arrays)), 2 * value("minirl_loss", arrays))


def test_minirl_dropped_tokens_add_nothing_to_the_value():
    arrays = with_ratio(1.5, rewards=np.array([1.0, 0, 0, 0, 0, 1, 0]))
    arrays["sampler_logprobs"] = arrays["old_logprobs"]
    gain = np.array([0.5, 0, -0.5, 0, 0, 0.5, -0.5])
    rows = MASK.sum(1) * 1.5 * gain * (gain < 0)
    same(value("minirl_loss", arrays), -rows.mean())


# REC --------------------------------------------------------------------------------------------


def rec_gain():
    alone = np.array([np.sum(GROUPS == g) == 1 for g in GROUPS])[:, None]
    return np.where(alone, REWARDS[:, None], centred_rewards())


def test_rec_plain_is_reinforce_with_the_group_mean():
    same(gradient("rec_loss", on_policy(), clip_mode="none"), -rec_gain() * TOKEN_MEAN)


def test_rec_one_side_weighted_is_grpo_s_gradient():
    arrays = batch(drift=0.6)
    grpo = {**arrays, "advantages": rec_gain() * np.ones_like(MASK)}
    grad = gradient("rec_loss", arrays, weight="importance_sampling")
    same(grad, gradient("dapo_loss", grpo, clip_high=0.2))


def test_rec_forward_kl_is_a_shift_of_the_advantage():
    arrays = on_policy()
    grad = gradient("rec_loss", arrays, regularizer="forward-kl", tau=0.3)
    same(grad, -(rec_gain() + 0.3) * TOKEN_MEAN)


def test_rec_k2_is_silent_on_policy_and_pulls_off_it():
    same(gradient("rec_loss", on_policy(), regularizer="k2"), gradient("rec_loss", on_policy()))
    arrays = batch(rewards=np.where(GROUPS == 30, 0.0, 1.0))
    drift = arrays["logprobs"] - arrays["old_logprobs"]
    same(gradient("rec_loss", arrays, regularizer="k2", tau=0.3), 0.6 * drift * TOKEN_MEAN)


def test_rec_ring_keeps_far_tokens_that_return():
    gain = rec_gain()
    for ratio, sign in ((0.3, 1), (3.5, -1)):
        arrays = with_ratio(ratio)
        ring = gradient("rec_loss", arrays, clip_mode="ring")
        chosen = (MASK > 0) & (sign * gain > 0)
        assert np.all(ring[chosen] != 0)
        assert np.all(ring[(MASK > 0) & (sign * gain < 0)] == 0)
        assert np.all(gradient("rec_loss", arrays, clip_mode="two-side") == 0)
    assert np.all(gradient("rec_loss", with_ratio(0.6), clip_mode="ring") == 0)


def test_rec_hot_advantage_weight_is_none():
    arrays = batch()
    hot = gradient("rec_loss", arrays, weight="advantage", temperature=np.inf)
    same(hot, gradient("rec_loss", arrays))
    warm = gradient("rec_loss", on_policy(), weight="advantage", temperature=0.7)
    same(warm, -np.exp(rec_gain() / 0.7) * rec_gain() * TOKEN_MEAN)


def test_rec_std_is_the_population_s():
    scales = [np.std(REWARDS[GROUPS == g]) if np.sum(GROUPS == g) > 1 else 1.0 for g in GROUPS]
    expected = rec_gain() / (np.array(scales)[:, None] + 1e-6)
    same(gradient("rec_loss", on_policy(), std_normalize=True), -expected * TOKEN_MEAN)


def test_red_drop_evens_the_counts():
    rewards = np.array([1, 0, 0, 0, 0, 0.1, 1, 1, 0, 0.5, 0.5])
    groups = np.array([4, 4, 4, 4, 4, 4, 9, 9, 9, 1, 1], np.int32)
    seen = set()
    for seed in range(12):
        keep, gain = map(np.asarray, red_drop(rewards, groups, jax.random.key(seed)))
        assert keep[0] == 1 and keep[groups == 4].sum() == 2 and np.all(keep[groups != 4] == 1)
        kept = (groups == 4) & (keep > 0)
        mean = rewards[kept].mean()
        np.testing.assert_allclose(gain[groups == 4], np.where(kept, rewards - mean, 0)[:6], 1e-6)
        assert np.all(gain[groups == 1] == 0)
        seen.add(tuple(keep))
    assert len(seen) > 2


# RGRA -------------------------------------------------------------------------------------------


def test_rgra_without_kl_is_grpo_at_ratio_one():
    arrays = batch(drift=1.0)
    first = on_policy()
    advantages = reshaped("grpo_advantage", arrays, eps=1e-4)[:, None] * np.ones_like(MASK)
    expected = gradient("grpo_loss", {**first, "advantages": advantages}, beta=0.0)
    same(gradient("rgra_loss", arrays, beta=0.0), expected)


def test_rgra_ignores_the_scale_of_a_group():
    arrays = batch(rewards=REWARDS * np.where(GROUPS == 7, 5.0, 1.0))
    same(gradient("rgra_loss", arrays, eps=0.0), gradient("rgra_loss", batch(), eps=0.0))
    unscaled = gradient("rgra_loss", arrays, beta=0.0, scale=False)
    same(unscaled[GROUPS == 7], -5 * (centred_rewards() * SEQUENCE_MEAN)[GROUPS == 7])


def test_rgra_kl_vanishes_at_the_reference():
    loss, grad, metrics = evaluate("rgra_loss", on_policy(), beta=0.5)
    bare = evaluate("rgra_loss", on_policy(), beta=0.0)
    same(loss, bare[0])
    same(grad, bare[1])
    same(metrics["kl"], 0.0)


def test_rgra_positive_only_lowers_no_token():
    arrays = batch()
    positive = gradient("rgra_loss", arrays, beta=0.0, positive_only=True)
    whole = gradient("rgra_loss", arrays, beta=0.0)
    assert np.all(positive <= 0) and np.any(positive < 0)
    for group in (7, -2):
        assert np.any(whole[GROUPS == group] > 0)


def test_rgra_raw_reward_takes_the_reward_as_it_is():
    grad = gradient("rgra_loss", batch(), beta=0.0, raw_reward=True)
    same(grad, -REWARDS[:, None] * SEQUENCE_MEAN)


# SAO --------------------------------------------------------------------------------------------

OLD_VALUES = np.random.default_rng(15).normal(size=MASK.shape)


def sao_advantages(**hyper):
    return -TOKENS * gradient("sao_loss", on_policy(old_values=OLD_VALUES), **hyper)


def test_sao_without_a_critic_is_reinforce():
    arrays = on_policy(old_values=0 * MASK)
    same(gradient("sao_loss", arrays, lam=1.0), -REWARDS[:, None] * TOKEN_MEAN)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("ratio", [0.69, 6.01])
def test_sao_removes_both_sides_for_both_signs(sign, ratio):
    ratios = np.where(np.arange(COLUMNS) == 2, ratio, 1.0) * np.ones((ROWS, 1))
    arrays = with_ratio(ratios, "sampler_logprobs", rewards=np.full(ROWS, sign))
    grad = gradient("sao_loss", {**arrays, "old_values": 0 * MASK})
    assert np.all(grad[:, 2] == 0)
    assert np.all(grad[(MASK > 0) & (ratios == 1)] != 0)


def test_sao_full_and_empty_traces():
    same(sao_advantages(lam=1.0), MASK * (REWARDS[:, None] - OLD_VALUES))
    expected = np.zeros_like(MASK)
    for row in range(ROWS):
        at = np.flatnonzero(MASK[row])
        after = np.append(0.9 * OLD_VALUES[row, at[1:]], REWARDS[row])[-len(at) :]
        expected[row, at] = after - OLD_VALUES[row, at] if len(at) else 0
    same(sao_advantages(lam=0.0, gamma=0.9), expected)


def test_sao_trace_grows_with_the_length():
    adaptive = sao_advantages()
    for row in range(ROWS):
        lam = max(0.0, 1 - 1 / (1.5 * LENGTHS[row, 0]))
        same(adaptive[row], sao_advantages(lam=lam)[row])
    same(adaptive[4, 0], REWARDS[4] - OLD_VALUES[4, 0])


def test_sao_value_targets_are_the_discounted_outcome():
    targets = np.asarray(sao_value_targets(MASK, REWARDS, gamma=0.5))
    np.testing.assert_allclose(targets[1], [1 * 0, 0, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(targets[3], [0, 0.125, 0.25, 0.5, 1, 0, 0, 0, 0])
    loss, _ = sao_value_loss(targets + 0.2, MASK, REWARDS, gamma=0.5)
    np.testing.assert_allclose(loss, 0.02, rtol=1e-5)
    composed = losses.paper("sao", regularizers=[sao_value_loss])
    assert {"values", "old_values", "sampler_logprobs"} <= set(composed.needs)


# SAPO (search) ----------------------------------------------------------------------------------


def test_sapo_search_without_penalty_is_grpo():
    arrays = batch()
    grpo = gradient("grpo_loss", arrays, beta=0.0)
    same(gradient("sapo_search_loss", arrays, beta=0.0), grpo)
    same(gradient("sapo_search_loss", arrays, tau=0.0), grpo)


def test_sapo_search_pulls_a_forgotten_good_token_back():
    arrays = with_ratio(0.01, advantages=np.ones_like(MASK))
    grad = gradient("sapo_search_loss", arrays, clip_low=None)
    same(grad, -(0.1 * 99 + 0.01) * SEQUENCE_MEAN)
    same(gradient("sapo_search_loss", arrays, beta=0.0, clip_low=None), -0.01 * SEQUENCE_MEAN)


def test_sapo_search_threshold_is_strict_and_may_be_open():
    arrays = with_ratio(np.where(np.arange(COLUMNS) % 2, 0.6, 1.7) * np.ones((ROWS, 1)))
    bare = gradient("sapo_search_loss", arrays, beta=0.0)
    everywhere = gradient("sapo_search_loss", arrays, tau=np.inf) - bare
    positive = (arrays["advantages"] > 0) & (MASK > 0)
    np.testing.assert_array_equal(everywhere != 0, positive)
    ratio = ratio_of(arrays)
    same(everywhere, 0.1 * (1 - 1 / ratio) * SEQUENCE_MEAN * (arrays["advantages"] > 0))
    at_home = on_policy(advantages=np.ones_like(MASK))
    same(evaluate("sapo_search_loss", at_home, tau=1.0)[2]["penalised_fraction"], 0.0)


def test_sapo_search_penalty_lowers_no_token():
    arrays = batch(drift=1.0)
    penalty = gradient("sapo_search_loss", arrays) - gradient("sapo_search_loss", arrays, beta=0.0)
    assert np.all(penalty <= 0) and np.any(penalty < 0)
    assert np.all(penalty[arrays["advantages"] <= 0] == 0)


# SAPO (soft) ------------------------------------------------------------------------------------


def soft_weight(ratio, sign, **hyper):
    arrays = with_ratio(ratio, advantages=sign * np.ones_like(MASK))
    return (gradient("sapo_soft_loss", arrays, **hyper) / (-sign * SEQUENCE_MEAN + (MASK == 0)))[0]


def test_sapo_soft_weight_is_the_gate_s_slope_times_the_ratio():
    ratios = np.exp(np.linspace(-2, 2, COLUMNS)) * np.ones((ROWS, 1))
    for sign, tau in ((1, 1.0), (-1, 1.05)):
        p = 1 / (1 + np.exp(-tau * (ratios[0] - 1)))
        same(soft_weight(ratios, sign), 4 * p * (1 - p) * ratios[0])


def test_sapo_soft_drops_nothing_and_is_symmetric_up_to_the_ratio():
    gap = np.linspace(0.05, 0.9, COLUMNS) * np.ones((ROWS, 1))
    above, below = soft_weight(1 + gap, 1), soft_weight(1 - gap, 1)
    assert np.all(above > 0) and np.all(below > 0)
    same(above / (1 + gap[0]), below / (1 - gap[0]))


def test_sapo_soft_at_low_sharpness_is_unclipped():
    ratios = np.exp(np.linspace(-1, 1, COLUMNS)) * np.ones((ROWS, 1))
    same(soft_weight(ratios, 1, tau_pos=1e-4), ratios[0], 1e-6)


def test_sapo_soft_at_high_sharpness_lives_at_ratio_one():
    ratios = (1 + np.linspace(-0.4, 0.4, COLUMNS)) * np.ones((ROWS, 1))
    weight = soft_weight(ratios, 1, tau_pos=200.0)
    same(weight[4], 1.0)
    assert np.all(np.delete(weight, 4) < 1e-6)


def test_sapo_soft_fades_negative_tokens_faster():
    for ratio in (0.5, 1.5):
        assert np.all(soft_weight(ratio, -1) < soft_weight(ratio, 1))
    assert np.all(gradient("sapo_soft_loss", batch(advantages=0 * MASK)) == 0)


# ST-PPO -----------------------------------------------------------------------------------------


def test_st_ppo_without_its_changes_is_grpo():
    arrays = batch(drift=0.8)
    off = {"turn_level": False, "bias_correction": False}
    expected = gradient("grpo_loss", arrays, beta=0.0)
    same(gradient("st_ppo_loss", arrays, **off), expected)
    alone = {**arrays, "turn_ids": np.arange(MASK.size).reshape(MASK.shape).astype(np.int32) - 30}
    same(gradient("st_ppo_loss", alone, bias_correction=False), expected)


def test_st_ppo_with_one_turn_takes_the_sequence_ratio():
    arrays = batch(turn_ids=np.full(MASK.shape, 11, np.int32))
    window = {"clip_low": 0.2, "clip_high": 0.2}
    same(
        gradient("st_ppo_loss", arrays, bias_correction=False, **window),
        gradient("gspo_loss", arrays, **window),
    )


def test_st_ppo_on_policy_spreads_credit_over_the_turn():
    rng = np.random.default_rng(16)
    arrays = on_policy(advantages=rng.normal(size=MASK.shape))
    arrays["turn_ids"] = rng.integers(-5, 100, MASK.shape).astype(np.int32) // 30
    grad = gradient("st_ppo_loss", arrays)
    for row, column in np.argwhere(MASK > 0):
        turn = (arrays["turn_ids"][row] == arrays["turn_ids"][row, column]) & (MASK[row] > 0)
        mean = arrays["advantages"][row][turn].mean()
        same(grad[row, column], -mean * SEQUENCE_MEAN[row, column])


@pytest.mark.parametrize("turn_level", [True, False])
@pytest.mark.parametrize("scope", ["response", "batch"])
def test_st_ppo_scales_by_the_clipping_bias(turn_level, scope):
    arrays = batch(drift=0.9)
    hyper = {"turn_level": turn_level, "scope": scope}
    plain = gradient("st_ppo_loss", arrays, bias_correction=False, **hyper)
    scaled = gradient("st_ppo_loss", arrays, **hyper)
    drift = arrays["logprobs"] - arrays["old_logprobs"]
    w, a = np.zeros_like(MASK), arrays["advantages"]
    for row, column in np.argwhere(MASK > 0):
        turn = (arrays["turn_ids"][row] == arrays["turn_ids"][row, column]) & (MASK[row] > 0)
        mean = drift[row][turn].mean() if turn_level else drift[row, column]
        w[row, column] = np.exp(mean)
    clipped = ((a > 0) & (w > 1.2)) | ((a < 0) & (w < 0.8))
    norms = np.sqrt(np.sum((MASK * clipped * w * a) ** 2, 1, keepdims=True))
    norms = norms if scope == "response" else np.sqrt(np.sum(norms**2))
    assert np.any(norms > 1) and np.all(scaled * plain >= 0)
    same(scaled, plain / np.maximum(norms, 1))


def test_st_ppo_bounds_the_influence_of_a_clipped_row():
    arrays = batch(drift=0.9, advantages=3 * np.ones_like(MASK))
    twice = {**arrays, "advantages": arrays["advantages"].copy()}
    twice["advantages"][0] *= 2
    before, after = gradient("st_ppo_loss", arrays), gradient("st_ppo_loss", twice)
    norm = evaluate("st_ppo_loss", arrays)[2]["bias_norm_max"]
    assert norm > 1 and np.any(before[0] != 0)
    same(after, before)


# StableReinforce --------------------------------------------------------------------------------


def test_stable_reinforce_in_calm_water_is_clipped_whitened_ppo():
    arrays = batch()
    a = arrays["advantages"]
    mean = np.sum(a * MASK) / TOKENS
    z = (a - mean) / np.sqrt(np.sum((a - mean) ** 2 * MASK) / TOKENS)
    assert np.all(np.abs(z[MASK > 0]) < 3)
    grad = gradient("stable_reinforce_loss", arrays)
    same(grad, gradient("grpo_loss", {**arrays, "advantages": z}, beta=0.0))


def test_stable_reinforce_filters_a_lone_giant():
    advantages = np.zeros_like(MASK)
    advantages[0, 4] = 100.0
    arrays = on_policy(advantages=advantages)
    n = TOKENS
    unfiltered = gradient("stable_reinforce_loss", arrays, filter_sigma=None)
    same(unfiltered[0, 4], -np.sqrt(n - 1) * SEQUENCE_MEAN[0, 4])
    filtered = gradient("stable_reinforce_loss", arrays)
    assert filtered[0, 4] == 0
    others = (MASK > 0) & (advantages == 0)
    same(filtered[others], unfiltered[others])


def test_stable_reinforce_bounds_a_wild_negative_token():
    arrays = batch(drift=0.0, advantages=np.random.default_rng(17).normal(size=MASK.shape))
    wild = {**arrays, "old_logprobs": arrays["old_logprobs"].copy()}
    row, column = np.argwhere((MASK > 0) & (arrays["advantages"] < -0.5))[0]
    wild["old_logprobs"][row, column] -= 9.0
    a = arrays["advantages"]
    mean = np.sum(a * MASK) / TOKENS
    z = (a - mean) / np.sqrt(np.sum((a - mean) ** 2 * MASK) / TOKENS)
    loss, grad, _ = evaluate("stable_reinforce_loss", wild)
    assert grad[row, column] == 0
    added = loss - value("stable_reinforce_loss", arrays)
    same(added, (1e3 - 1) * -z[row, column] * SEQUENCE_MEAN[row, column], 1e-9)


def test_stable_reinforce_ignores_shift_and_scale():
    arrays = batch()
    moved = {**arrays, "advantages": 2.5 * arrays["advantages"] - 4}
    same(gradient("stable_reinforce_loss", moved), gradient("stable_reinforce_loss", arrays))
    flat = gradient("stable_reinforce_loss", batch(advantages=np.full(MASK.shape, 0.3)))
    assert np.all(flat == 0)


def test_r1_reward_score():
    scores = [r1_reward_score(1, 1, c) for c in (-1, 0, 1)] + [r1_reward_score(1, 0, 1)]
    assert scores == [1.0, 1.5, 2.0, 0.5]


# SWE-DAPO ---------------------------------------------------------------------------------------

EPISODE_TURNS = np.minimum(np.cumsum(MASK, 1), 6).astype(np.int32)


def test_swe_dapo_of_short_episodes_is_dapo_on_live_groups():
    arrays = batch(turn_ids=EPISODE_TURNS)
    advantages = reshaped("grpo_advantage", arrays)[:, None] * np.ones_like(MASK)
    live = MASK * (GROUPS != 30)[:, None]
    expected = evaluate("dapo_loss", {**arrays, "advantages": advantages, "mask": live})
    actual = evaluate("swe_dapo_loss", arrays)
    same(actual[0], expected[0])
    same(actual[1], expected[1])


def test_swe_dapo_does_not_read_observations():
    arrays = batch(turn_ids=EPISODE_TURNS)
    other = {**arrays, "logprobs": np.where(MASK > 0, arrays["logprobs"], -40.0)}
    other["turn_ids"] = np.where(MASK > 0, EPISODE_TURNS, 500).astype(np.int32)
    hyper = {"turn_threshold": 2, "max_turns": 5}
    same(gradient("swe_dapo_loss", other, **hyper), gradient("swe_dapo_loss", arrays, **hyper))


def test_swe_dapo_prefers_the_shorter_success():
    mask = np.ones_like(MASK)
    turns = np.zeros(MASK.shape, np.int32)
    turns[1, -1] = 39
    arrays = on_policy(
        mask=mask, turn_ids=turns, rewards=np.ones(ROWS), group_ids=np.zeros(ROWS, np.int32)
    )
    push = gradient("swe_dapo_loss", arrays).sum(1)
    assert push[1] > 0 and np.all(np.delete(push, 1) < 0)
    turns[1, -1] = 19
    loss, grad, metrics = evaluate("swe_dapo_loss", arrays)
    assert loss == 0 and np.all(grad == 0) and metrics["kept_fraction"] == 0


def test_swe_dapo_rejects_an_empty_range_of_turns():
    with pytest.raises(ValueError, match="max_turns must exceed turn_threshold; got 20 and 20"):
        value("swe_dapo_loss", batch(), max_turns=20)


# TOPR -------------------------------------------------------------------------------------------

SIGNED = 2 * REWARDS - 1


def test_topr_on_policy_is_reinforce():
    same(gradient("topr_loss", on_policy(rewards=SIGNED)), -SIGNED[:, None] * SEQUENCE_SUM)


def test_topr_tapers_wrong_answers_only_downwards():
    for shift, weight in ((0.2, 1.0), (0.0, 1.0), (-0.2, None)):
        grad = gradient("topr_loss", with_ratio(np.exp(shift), rewards=-np.ones(ROWS)))
        rho = np.exp(shift * MASK.sum(1, keepdims=True)) if weight is None else weight
        same(grad, rho * SEQUENCE_SUM)


def test_topr_right_answers_ignore_the_data_policy():
    grad = gradient("topr_loss", batch(drift=2.0, rewards=SIGNED))
    same(grad[SIGNED > 0], -SEQUENCE_SUM[SIGNED > 0])


def test_topr_lets_an_abandoned_wrong_answer_go():
    arrays = with_ratio(np.exp(-3.0), rewards=-np.ones(ROWS))
    naive = gradient("topr_loss", arrays, neg_bounds=(1.0, 1.0))
    assert np.all(np.abs(gradient("topr_loss", arrays)[0]) < 1e-8)
    same(naive, SEQUENCE_SUM)


def test_topr_baseline_moves_the_effective_share():
    p, c = np.mean(SIGNED > 0), 0.4
    push = -gradient("topr_loss", on_policy(mask=np.eye(ROWS, COLUMNS), rewards=SIGNED), baseline=c)
    up, down = push.clip(min=0).sum(), -push.clip(max=0).sum()
    same(up / (up + down), p * (1 - c) / (1 + (1 - 2 * p) * c))


# TROLL ------------------------------------------------------------------------------------------


def distributions(seed=0, drift=1.0, vocabulary=6, **changes):
    rng = np.random.default_rng(seed)
    old = 1.5 * rng.normal(size=(*MASK.shape, vocabulary))
    return {
        "logits": old + drift * rng.normal(size=old.shape),
        "old_logits": old,
        "tokens": rng.integers(0, vocabulary, MASK.shape).astype(np.int32),
        "mask": MASK,
        "advantages": rng.normal(size=MASK.shape),
        **changes,
    }


def log_softmax(x):
    return (
        x
        - np.log(np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


def kl(log_p, log_q):
    return np.sum(np.exp(log_p) * (log_p - log_q), -1)


def troll_path(arrays, bound):
    """beta and log p_beta of every position by a plain bisection."""
    lp, lq = log_softmax(arrays["logits"]), log_softmax(arrays["old_logits"])
    low, high = np.zeros(MASK.shape), np.ones(MASK.shape)
    for _ in range(100):
        mid = (low + high) / 2
        inside = kl(log_softmax(lq + mid[..., None] * (lp - lq)), lq) <= bound
        low, high = np.where(inside, mid, low), np.where(inside, high, mid)
    beta = np.where(kl(lp, lq) <= bound, 1.0, low)
    return beta, log_softmax(lq + beta[..., None] * (lp - lq)), lp, lq


def test_troll_with_a_wide_ball_is_the_unclipped_ratio():
    arrays = distributions()
    for bound in (np.inf, None, 100.0):
        loss, _, metrics = evaluate("troll_loss", arrays, wrt="logits", kl_bound=bound)
        lp, lq = log_softmax(arrays["logits"]), log_softmax(arrays["old_logits"])
        at = arrays["tokens"][..., None]
        ratio = np.exp(np.take_along_axis(lp - lq, at, -1))[..., 0]
        same(loss, -np.sum(arrays["advantages"] * ratio * MASK) / TOKENS)
        assert metrics["projection_kl"] == 0


def test_troll_projection_lies_on_the_ball():
    arrays = distributions()
    beta, projected, lp, lq = troll_path(arrays, 0.05)
    assert 0 < np.sum(beta == 1) < beta.size
    with jax.enable_x64(True):
        # The ratio at every token of the vocabulary is the projection itself.
        ratios = np.stack(
            [
                troll_tokens(*map(jnp.asarray, (arrays["logits"], arrays["old_logits"], np.full(
                    MASK.shape, v, np.int32))))["projected_ratio"]
                for v in range(6)
            ],
            -1,
        )  # fmt: skip
    ours = np.log(ratios) + lq
    distance = kl(ours, lq)
    assert np.all(distance <= 0.05 + 1e-9)
    same(distance[beta < 1], 0.05, 1e-9)
    same(ours, projected, 1e-9)


def test_troll_gradient_matches_finite_differences():
    arrays = distributions(drift=1.5)
    grad = gradient("troll_loss", arrays, wrt="logits", alpha=0.0)
    beta = troll_path(arrays, 0.05)[0]
    rng = np.random.default_rng(18)
    for _ in range(4):
        step = 1e-5 * rng.normal(size=grad.shape) * (MASK * (beta < 1))[..., None]
        up, down = (
            value("troll_loss", {**arrays, "logits": arrays["logits"] + s}, wrt="logits", alpha=0.0)
            for s in (step, -step)
        )
        same((up - down) / 2, np.sum(grad * step), 1e-11)
        assert abs(up - down) > 1e-7


def test_troll_regression_acts_at_projected_positions_only():
    arrays = distributions()
    beta, projected, lp, lq = troll_path(arrays, 0.05)
    pull = gradient("troll_loss", arrays, wrt="logits") - gradient(
        "troll_loss", arrays, wrt="logits", alpha=0.0
    )
    p = np.exp(lp)
    gap = lp - projected
    expected = p * (gap - np.sum(p * gap, -1, keepdims=True)) * TOKEN_MEAN[..., None]
    same(pull, np.where(beta[..., None] < 1, expected, 0), 1e-9)


def test_troll_in_a_vanishing_ball_stays_at_the_old_policy():
    arrays = distributions()
    loss = value("troll_loss", arrays, wrt="logits", kl_bound=1e-14)
    lp, lq = log_softmax(arrays["logits"]), log_softmax(arrays["old_logits"])
    expected = np.sum((kl(lp, lq) - arrays["advantages"]) * MASK) / TOKENS
    same(loss, expected, 1e-6)
    grad = gradient("troll_loss", arrays, wrt="logits", kl_bound=1e-14, alpha=0.0)
    assert np.max(np.abs(grad)) < 1e-6


@pytest.mark.parametrize("scale", [60.0, 1e4, np.inf])
def test_troll_is_finite_at_one_hot_old_policies(scale):
    arrays = distributions(drift=1.0)
    one_hot = np.eye(6)[arrays["tokens"]]
    with np.errstate(invalid="ignore"):
        old = np.where(one_hot > 0, 0.0, -scale)
    for logits in (arrays["logits"], np.where(one_hot > 0, 0.0, -50.0)):
        given = {**arrays, "old_logits": old, "logits": logits}
        single = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in given.items()}
        for case in (given, single):
            loss, grad, metrics = evaluate("troll_loss", case, wrt="logits")
            assert np.isfinite(loss) and np.all(np.isfinite(grad))
            assert all(np.isfinite(v) for v in metrics.values())


# TS-GRPO ----------------------------------------------------------------------------------------

ANSWER = np.zeros_like(MASK)
ANSWER[:, 4:] = 1


def test_ts_grpo_ends_at_grpo_and_gspo():
    arrays = batch()
    window = {"clip_seq_low": 0.1, "clip_seq_high": 0.2}
    plan = {**arrays, "answer_mask": 0 * MASK}
    same(gradient("ts_grpo_loss", plan, **window), gradient("grpo_loss", arrays, beta=0.0))
    answer = {**arrays, "answer_mask": MASK}
    same(
        gradient("ts_grpo_loss", answer, **window),
        gradient("gspo_loss", arrays, clip_low=0.1, clip_high=0.2),
    )


def test_ts_grpo_on_policy_shares_the_answer_s_advantage():
    advantages = np.random.default_rng(19).normal(size=MASK.shape)
    arrays = on_policy(answer_mask=ANSWER, advantages=advantages)
    grad = gradient("ts_grpo_loss", arrays, answer_weight=0.7)
    span = MASK * ANSWER
    mean = np.sum(advantages * span, 1, keepdims=True) / np.maximum(span.sum(1, keepdims=True), 1)
    expected = -np.where(span > 0, 0.7 * mean, advantages) * SEQUENCE_MEAN
    same(grad, expected)


def test_ts_grpo_spans_do_not_leak():
    arrays = batch(drift=0.05, answer_mask=ANSWER)
    window = {"clip_seq_low": 0.9, "clip_seq_high": 9.0}
    before = gradient("ts_grpo_loss", arrays, **window)
    for column in (1, 6):
        moved = {**arrays, "logprobs": arrays["logprobs"].copy()}
        moved["logprobs"][0, column] += 0.05
        changed = gradient("ts_grpo_loss", moved, **window) != before
        expected = np.arange(COLUMNS) >= 4 if column == 6 else np.arange(COLUMNS) == 1
        np.testing.assert_array_equal(changed[0], expected)
        assert not changed[1:].any()


def test_ts_grpo_one_outlier_hardly_moves_a_long_answer():
    ones = np.ones((1, 50))
    logprobs = -2 * ones
    old = logprobs.copy()
    old[0, 20] -= np.log(10)
    arrays = {"logprobs": logprobs, "old_logprobs": old, "mask": ones, "advantages": ones}
    sequence = {"clip_seq_low": 0.1, "clip_seq_high": 0.1}
    loss, grad, _ = evaluate("ts_grpo_loss", {**arrays, "answer_mask": ones}, **sequence)
    same(loss, -(10 ** (1 / 50)))
    assert np.all(grad < 0)
    token = gradient("ts_grpo_loss", {**arrays, "answer_mask": 0 * ones})
    np.testing.assert_array_equal(token[0] == 0, np.arange(50) == 20)


# VESPO ------------------------------------------------------------------------------------------


def vespo_weight(log_w, sign, **hyper):
    """phi at a sequence ratio, on one-token rows."""
    column = np.asarray(log_w, float)[:, None]
    ones = np.ones_like(column)
    arrays = {"logprobs": -2 * ones, "old_logprobs": -2 - column, "mask": ones}
    grad = gradient("vespo_loss", {**arrays, "advantages": sign * ones}, **hyper)
    return -sign * len(column) * grad[:, 0]


@pytest.mark.parametrize("sign,k,lam", [(1, 2.0, 3.0), (-1, 3.0, 2.0)])
def test_vespo_kernel_peaks_at_k_over_lambda(sign, k, lam):
    w = np.linspace(0.02, 8, 400)
    phi = vespo_weight(np.log(w), sign)
    same(phi, w**k * np.exp(lam * (1 - w)))
    assert abs(w[np.argmax(phi)] - k / lam) < 0.03
    assert phi[0] < 0.02 and phi[-1] < 0.002


def test_vespo_tolerates_larger_ratios_on_negative_rows():
    above = np.log(np.linspace(1.05, 1.5, 10))
    assert np.all(vespo_weight(above, 1) < 1)
    assert np.all(vespo_weight(above, -1) > 1)


def test_vespo_takes_the_whole_sequence_s_ratio_as_a_constant():
    arrays = batch(drift=0.3)
    log_w = np.sum((arrays["logprobs"] - arrays["old_logprobs"]) * MASK, 1, keepdims=True)
    a = arrays["advantages"]
    k, lam = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
    phi = np.exp(lam + k * log_w - lam * np.exp(log_w))
    grad = gradient("vespo_loss", arrays | {"sampler_logprobs": None})
    same(grad, -phi * a * TOKEN_MEAN)
    mean = log_w / LENGTHS
    short = np.exp(lam + k * mean - lam * np.exp(mean))
    differs(grad, -short * a * TOKEN_MEAN)
    log_omega = arrays["old_logprobs"] - arrays["sampler_logprobs"]
    for cap in (None, 1.1):
        omega = log_omega if cap is None else np.minimum(log_omega, np.log(cap))
        whole = log_w + np.sum(omega * MASK, 1, keepdims=True)
        phi = np.exp(lam + k * whole - lam * np.exp(whole))
        same(gradient("vespo_loss", arrays, is_cap=cap), -phi * a * TOKEN_MEAN)


def test_vespo_sign_is_that_of_the_first_valid_token():
    advantages = np.random.default_rng(20).normal(size=MASK.shape)
    arrays = batch(drift=0.3, advantages=advantages, sampler_logprobs=None)
    log_w = np.sum((arrays["logprobs"] - arrays["old_logprobs"]) * MASK, 1)
    grad = gradient("vespo_loss", arrays)
    for row in range(ROWS - 1):
        first = advantages[row, np.flatnonzero(MASK[row])[0]]
        k, lam = (2.0, 3.0) if first >= 0 else (3.0, 2.0)
        phi = np.exp(lam + k * log_w[row] - lam * np.exp(log_w[row]))
        same(grad[row], -phi * advantages[row] * TOKEN_MEAN[row])


# WAPO -------------------------------------------------------------------------------------------


def test_wapo_on_policy_raises_winners_and_lowers_no_token():
    grad = gradient("wapo_loss", on_policy(), max_length=12)
    sizes = np.array([np.sum(GROUPS == g) for g in GROUPS])[:, None]
    gain = np.maximum(centred_rewards(), 0)
    same(grad, -gain * MASK / (sizes * 12 * 2))
    assert np.all(grad <= 0)


def test_wapo_few_winners_have_little_influence():
    rewards = np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0.0])
    groups = np.repeat([0, 1], 8).astype(np.int32)
    ones = np.ones((16, 3))
    arrays = {"logprobs": -ones, "sampler_logprobs": -ones, "mask": ones}
    push = -gradient("wapo_loss", {**arrays, "rewards": rewards, "group_ids": groups}).sum(1)
    unit = 8 * 2  # group size and the two groups
    same(push[0] * unit, 7 / 8)
    same(push[8] * unit, 4 / 8)
    same(push[8:].sum() * unit, 16 / 8)


def test_wapo_normaliser_is_constant():
    arrays = batch()
    same(2 * value("wapo_loss", arrays, max_length=40), value("wapo_loss", arrays, max_length=20))
    same(value("wapo_loss", arrays), value("wapo_loss", arrays, max_length=COLUMNS))


def test_wapo_wide_clip_is_the_positive_part_of_importance_sampling():
    arrays = batch(drift=2.0)
    sizes = np.array([np.sum(GROUPS == g) for g in GROUPS])[:, None]
    ratio = ratio_of(arrays, "sampler_logprobs")
    gain = np.maximum(centred_rewards(), 0)
    expected = -ratio * gain * MASK / (sizes * COLUMNS * 2)
    same(gradient("wapo_loss", arrays, clip_high=np.inf), expected)
    same(gradient("wapo_loss", arrays, clip_high=1.0), np.where(ratio <= 2, expected, 0))


def test_wapo_does_not_read_the_losers():
    arrays = batch()
    other = {**arrays, "logprobs": np.where(centred_rewards() > 0, arrays["logprobs"], -9.0)}
    assert value("wapo_loss", other) == value("wapo_loss", arrays)


def test_wapo_without_a_winner_is_zero():
    loss, grad, _ = evaluate("wapo_loss", batch(rewards=np.full(ROWS, 0.1)))
    assert loss == 0 and np.all(grad == 0)


# DFT --------------------------------------------------------------------------------------------


def test_dft_gradient_is_the_probability():
    arrays = batch()
    p = np.exp(arrays["logprobs"])
    same(gradient("dft_loss", arrays), -p * TOKEN_MEAN)
    differs(gradient("dft_loss", arrays), -(p * arrays["logprobs"] + p) * TOKEN_MEAN)


def test_dft_vanishes_at_both_ends_in_the_logits():
    def push(logit):
        pi = np.exp(log_softmax(np.array([logit, 0.0, 0.5])))
        arrays = batch(logprobs=np.full(MASK.shape, np.log(pi[0])))
        return np.abs(TOKENS * gradient("dft_loss", arrays)[0, 0] * (np.eye(3)[0] - pi)).max()

    assert push(-15.0) < 1e-6 and push(15.0) < 1e-6 and push(0.7) > 0.1


def test_dft_of_certain_tokens_has_sft_s_gradient_and_a_bounded_value():
    certain = batch(logprobs=np.zeros_like(MASK))
    same(gradient("dft_loss", certain), gradient("sft_loss", certain))
    assert 0 < value("dft_loss", batch(logprobs=np.full(MASK.shape, -1.0))) <= np.exp(-1) + 1e-12


def test_dft_gradient_is_that_of_raising_the_summed_probability():
    arrays = batch()

    def summed(logprobs):
        return -jnp.sum(jnp.exp(logprobs) * MASK) / TOKENS

    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(summed)(jnp.asarray(arrays["logprobs"])))
    same(gradient("dft_loss", arrays), expected)
