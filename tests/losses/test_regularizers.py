"""Properties that the papers state of themselves: losses/regularizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.baselines.dapo import dapo_loss
from losses.ops.divergences import entropy_of, kl, log_softmax
from losses.regularizers.entropy_bonus import entropy_bonus
from losses.regularizers.epo import epo_regularizer, smoothing_weight, updated_history
from losses.regularizers.kl_penalty import kl_penalty
from losses.regularizers.mtp_occ import mtp_occ_loss

B, T = 6, 9
MASK = np.ones((B, T))
MASK[0, 6:] = MASK[1, 3] = MASK[2, :2] = MASK[2, 5] = MASK[4, 4:] = MASK[5, 1:] = 0
VALID = MASK > 0
COUNTS = VALID.sum(1)
N = VALID.sum()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed, shape=(B, T), low=-2.5, high=0.0):
    return np.random.default_rng(seed).uniform(low, high, shape)


ENTROPY = draw(0, low=0.0, high=2.0)
TURNS = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1)
HISTORY = np.array([0.8, 1.1, 0.0, 0.9])  # four turns known, the fifth reads the last


def close(actual, expected, rtol=1e-9, atol=1e-12):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def value_and_grad(function, x):
    """Value and gradient of the first output."""
    value, grad = jax.value_and_grad(lambda x: function(x)[0])(jnp.asarray(x))
    return float(value), np.asarray(grad)


# ---------------------------------------------------------------------------------------------
# EPO


def epo(entropy=ENTROPY, history=HISTORY, **hyper):
    return value_and_grad(lambda h: epo_regularizer(h, history, MASK, TURNS, **hyper), entropy)


def outside(penalty, alpha=0.1, k_low=0.8, k_high=1.2):
    """P by loops."""
    out = np.zeros((B, T))
    for i, t in zip(*np.nonzero(VALID)):
        past, h = HISTORY[min(TURNS[i, t], 3)], ENTROPY[i, t]
        if past > 0 and penalty == "indicator":
            out[i, t] = 0 if k_low * past < h < k_high * past else alpha
        elif past > 0:
            gap = max(k_low * past - h, 0) + max(h - k_high * past, 0)
            out[i, t] = alpha * gap / past
    return out


@pytest.mark.parametrize("penalty", ["indicator", "hinge"])
def test_epo_equals_the_definition_by_loops(penalty):
    hyper = {"lam": 0.02, "smooth": 1.5, "weight": 0.7, "alpha": 0.3}
    value, _ = epo(penalty=penalty, **hyper)
    cost = outside(penalty, alpha=0.3)[VALID].mean()
    close(value, -0.02 * (ENTROPY[VALID].mean() - 1.5 * 0.7 * cost))


def test_epo_without_smoothing_or_inside_the_band_is_the_entropy_bonus():
    plain = -0.001 * ENTROPY[VALID].mean()
    for penalty in ("indicator", "hinge"):
        close(epo(smooth=0.0, penalty=penalty)[0], plain)
        close(epo(k_low=0.0, k_high=100.0, penalty=penalty)[0], plain)
        close(epo(history=0 * HISTORY, penalty=penalty)[0], plain)


def test_epo_indicator_has_the_gradient_of_the_bonus_alone():
    for hyper in ({}, {"smooth": 9.0, "alpha": 5.0}, {"k_low": 0.99, "k_high": 1.01}):
        close(epo(lam=0.02, **hyper)[1], -0.02 * MASK / N)


def test_epo_hinge_pushes_towards_the_band():
    lam, smooth, weight, alpha = 0.02, 4.0, 0.8, 1.0
    grad = epo(lam=lam, smooth=smooth, weight=weight, alpha=alpha, penalty="hinge")[1]
    past = HISTORY[np.minimum(TURNS, 3)]
    slope = smooth * weight * alpha / np.where(past > 0, past, 1.0)
    above = VALID & (past > 0) & (ENTROPY > 1.2 * past)
    below = VALID & (past > 0) & (ENTROPY < 0.8 * past)
    close(grad, -lam / N * MASK * (1 - slope * above + slope * below))
    assert above.any() and np.all(grad[above] > 0)  # a descent step takes it down
    assert below.any() and np.all(grad[below] < -lam / N)


def test_epo_bounds_are_strict_and_masked_positions_do_not_matter():
    history, turns = np.array([0.5]), np.zeros((B, T), int)
    for edge in (0.25, 0.75):
        hyper = {"k_low": 0.5, "k_high": 1.5, "alpha": 0.3}
        metrics = epo_regularizer(np.full((B, T), edge), history, MASK, turns, **hyper)[1]
        close(metrics["entropy_penalty"], 0.3)
        assert metrics["entropy_in_band"] == 0
    noisy = np.where(VALID, ENTROPY, np.nan)
    for penalty in ("indicator", "hinge"):
        assert epo(noisy, penalty=penalty)[0] == epo(penalty=penalty)[0]
        close(epo(lam=0.5, penalty=penalty)[0], 500 * epo(penalty=penalty)[0])
    with pytest.raises(ValueError, match="hinge"):
        epo(penalty="hing")


def test_epo_hinge_steadies_the_entropy_over_updates():
    """A policy over six actions whose noisy policy gradient throws its entropy about."""
    mask, turns, updates = jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), 200

    def late_variance(smooth, key):
        def step(state, noise):
            logits, history, reached = state
            entropy = entropy_of(log_softmax(logits))[None, None]

            def loss(x):
                h = entropy_of(log_softmax(x))[None, None]
                bonus = epo_regularizer(
                    h, history, mask, turns, lam=0.2, smooth=smooth, alpha=1.0, penalty="hinge"
                )[0]
                return bonus - jnp.sum(noise * jax.nn.softmax(x))

            logits = logits - 0.3 * jax.grad(loss)(logits)
            history, reached = updated_history(history, reached, entropy, turns, mask)
            return (logits, history, reached), entropy[0, 0]

        start = (jnp.zeros(6), jnp.zeros(1), jnp.zeros(1))
        noise = 3.0 * jax.random.normal(jax.random.key(key), (updates, 6))
        return jnp.var(jax.lax.scan(step, start, noise)[1][updates // 2 :])

    runs = jax.jit(jax.vmap(late_variance, (None, 0)))
    bonus, hinge = (runs(smooth, jnp.arange(16)).mean() for smooth in (0.0, 20.0))
    assert hinge < 0.6 * bonus


def test_epo_history_averages_the_updates_that_reached_a_turn():
    history, reached = np.zeros(3), np.zeros(3)
    seen = {k: [] for k in range(3)}
    for seed in range(4):
        entropy = draw(seed + 10, low=0.0, high=2.0)
        turns = np.minimum(TURNS, 2 if seed > 1 else 1)
        history, reached = updated_history(history, reached, entropy, turns, MASK)
        for k in range(3):
            if (VALID & (turns == k)).any():
                seen[k].append(entropy[VALID & (turns == k)].mean())
    np.testing.assert_array_equal(reached, [4, 4, 2])
    close(history, [np.mean(seen[k]) for k in range(3)])


def test_epo_schedule_of_the_smoothing_weight():
    for e in (0, 30, 75, 76, 150):
        early = 1 - 0.2 * (1 - np.exp(-2 * e / 75))
        close(smoothing_weight(e, 150), early if e <= 75 else 0.8 * np.exp(-3 * (e - 75) / 75))


# ---------------------------------------------------------------------------------------------
# MTP-OCC


OLD, OLD_MTP = draw(2), draw(3)
LOGPROBS = np.minimum(OLD + draw(4, low=-0.3, high=0.3), -1e-3)
MTP = np.minimum(OLD_MTP + draw(5, low=-0.3, high=0.3), -1e-3)
ADVANTAGES = np.repeat(np.random.default_rng(6).normal(size=(B, 1)), T, 1)
MTP_MASK = np.ones((B, T))
MTP_MASK[:, :2] = 0
BOTH = VALID & (MTP_MASK > 0)


def occ(logprobs=LOGPROBS, mtp=MTP, advantages=ADVANTAGES, mtp_mask=MTP_MASK, **hyper):
    return mtp_occ_loss(logprobs, OLD, mtp, OLD_MTP, advantages, MASK, mtp_mask, **hyper)


def coefficient(**arrays_and_hyper):
    return float(occ(**arrays_and_hyper)[1]["coef"])


def test_mtp_occ_without_scale_is_dapo():
    close(occ(coef_scale=0.0)[0], dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK)[0])
    grads = jax.grad(lambda x, y: occ(x, y, coef_scale=0.0)[0], (0, 1))(
        jnp.asarray(LOGPROBS), jnp.asarray(MTP)
    )
    plain = value_and_grad(lambda x: dapo_loss(x, OLD, ADVANTAGES, MASK), LOGPROBS)[1]
    close(grads[0], plain)
    np.testing.assert_array_equal(grads[1], 0)


def test_mtp_occ_coefficient_is_the_smoothed_clipped_quotient():
    p, q, a2 = np.exp(LOGPROBS), np.exp(MTP), ADVANTAGES**2
    top = (a2 * (1 - p) * (1 - q))[BOTH].sum()
    ratio = top / ((a2 * (1 - q) ** 2)[BOTH].sum() + 1e-8)
    close(coefficient(), 0.3 * ratio)
    close(coefficient(coef_scale=0.2, ema=0.7, prev_coef=0.4), 0.7 * 0.4 + 0.3 * 0.2 * ratio)
    assert coefficient(coef_scale=100.0) == 0.5
    assert 0 <= coefficient(coef_scale=100.0, prev_coef=0.9, ema=0.5) <= 0.9
    head = dapo_loss(MTP, OLD_MTP, ADVANTAGES, 1.0 * BOTH)[0]
    close(occ()[0], dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK)[0] + 0.3 * ratio * head)


def test_mtp_occ_without_predictions_adds_nothing():
    value, metrics = occ(mtp_mask=0 * MTP_MASK, ema=0.5, prev_coef=0.2)
    close(value, dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK)[0])
    close(metrics["coef"], 0.1)


def test_mtp_occ_coefficient_falls_as_the_main_head_grows_confident():
    close(coefficient(mtp=LOGPROBS, coef_scale=0.25), 0.25, rtol=1e-6)
    values = [coefficient(logprobs=np.full((B, T), np.log(p)), mtp=MTP) for p in (0.5, 0.7, 0.9)]
    assert values[0] > values[1] > values[2] > 0
    confident = coefficient(logprobs=0.2 * MTP, coef_scale=0.25)
    assert confident < 0.25


def test_mtp_occ_coefficient_ignores_the_scale_of_advantages():
    close(coefficient(advantages=7.0 * ADVANTAGES), coefficient(), rtol=1e-7)


def test_mtp_occ_passes_no_gradient_through_the_coefficient():
    c = coefficient()
    grads = jax.grad(lambda x, y: occ(x, y)[0], (0, 1))(jnp.asarray(LOGPROBS), jnp.asarray(MTP))
    main = value_and_grad(lambda x: dapo_loss(x, OLD, ADVANTAGES, MASK), LOGPROBS)[1]
    head = value_and_grad(lambda y: dapo_loss(y, OLD_MTP, ADVANTAGES, 1.0 * BOTH), MTP)[1]
    close(grads[0], main)
    close(grads[1], c * head)

    def leaky(x, y):
        p, q, a2 = jnp.exp(x), jnp.exp(y), ADVANTAGES**2 * BOTH
        ratio = jnp.sum(a2 * (1 - p) * (1 - q)) / (jnp.sum(a2 * (1 - q) ** 2) + 1e-8)
        return 0.3 * ratio * dapo_loss(MTP, OLD_MTP, ADVANTAGES, 1.0 * BOTH)[0]

    for extra in jax.grad(leaky, (0, 1))(jnp.asarray(LOGPROBS), jnp.asarray(MTP)):
        assert np.min(np.abs(np.asarray(extra))[BOTH]) > 1e-9


def test_mtp_occ_quotient_is_the_best_coefficient_on_a_quadratic():
    """J(x) = b.x - L |x|^2 / 2: the gain of the step eta (g + c m) against the plain one."""
    rng = np.random.default_rng(7)
    b, curvature, eta = rng.normal(size=8), 2.0, 1e-3
    head = 0.4 * curvature * eta * b + 1e-3 * rng.normal(size=8)
    best = b @ head / (curvature * eta * head @ head)

    def gain(c):
        def objective(x):
            return b @ x - curvature * x @ x / 2

        return objective(eta * (b + c * head)) - objective(eta * b)

    grid = best * np.linspace(0.0, 3.0, 3001)
    close(grid[np.argmax([gain(c) for c in grid])], best, rtol=5 * curvature * eta)
    assert gain(best) > 0 > gain(2.5 * best)


# ---------------------------------------------------------------------------------------------
# Entropy bonus


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_entropy_bonus_gradient_of_each_aggregation(aggregation):
    grad = value_and_grad(
        lambda h: entropy_bonus(h, MASK, entropy_coef=0.02, aggregation=aggregation, max_length=12),
        ENTROPY,
    )[1]
    count = {"token_mean": N, "sequence_mean": B * COUNTS[:, None], "constant": B * 12}
    close(grad, -0.02 * MASK / count[aggregation])


def test_entropy_bonus_of_uniform_and_of_deterministic_logits():
    for size in (2, 7):
        h, grad = jax.value_and_grad(lambda z: entropy_of(log_softmax(z)))(jnp.zeros(size))
        close(h, np.log(size))
        close(grad, np.zeros(size), atol=1e-15)
    sure = jnp.array([0.0, -jnp.inf, -jnp.inf])
    assert entropy_of(sure) == 0
    logits = jnp.array([1.0, -0.4, 0.2])
    p, h = jax.nn.softmax(logits), entropy_of(log_softmax(logits))
    close(jax.grad(lambda z: entropy_of(log_softmax(z)))(logits), -p * (jnp.log(p) + h))


def test_entropy_bonus_ignores_a_constant_added_to_the_logits():
    logits = draw(8, (B, T, 4))
    a, b = (entropy_bonus(entropy_of(log_softmax(x)), MASK)[0] for x in (logits, logits + 31.0))
    close(a, b)


def test_entropy_bonus_target_ends_the_push():
    mean = ENTROPY[VALID].mean()
    for target, moves in ((mean + 0.1, True), (mean - 0.1, False)):
        value, grad = value_and_grad(lambda h: entropy_bonus(h, MASK, target=target), ENTROPY)  # noqa: B023
        close(value, -0.01 * min(mean, target))
        close(grad, -0.01 * MASK / N * moves)


def test_entropy_bonus_sets_the_temperature_of_the_best_policy():
    rewards, coef = jnp.array([1.0, 0.2, -0.5]), 0.7

    def loss(logits):
        log_p = log_softmax(logits)
        bonus = entropy_bonus(entropy_of(log_p)[None, None], jnp.ones((1, 1)), entropy_coef=coef)
        return bonus[0] - jnp.sum(jnp.exp(log_p) * rewards)

    def steps(z):
        return jax.lax.fori_loop(0, 2000, lambda _, z: z - jax.grad(loss)(z), z)

    best = jax.nn.softmax(jax.jit(steps)(jnp.zeros(3)))
    close(best, jax.nn.softmax(rewards / coef), rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# KL estimators


REF = draw(9)


def penalty(logprobs=LOGPROBS, **hyper):
    return value_and_grad(lambda x: kl_penalty(x, REF, MASK, **hyper), logprobs)


@pytest.mark.parametrize("estimator,slope", [("k1", 1.0), ("k2", 0.0), ("k3", 0.0), ("abs", 0.0)])
def test_kl_penalty_at_the_reference(estimator, slope):
    value, grad = penalty(REF, estimator=estimator, kl_coef=0.3)
    assert value == 0
    close(grad, 0.3 * slope * MASK / N)


def test_kl_penalty_gradients_of_the_tokens():
    d = LOGPROBS - REF
    expected = {"k1": 1 + 0 * d, "k2": d, "k3": 1 - np.exp(-d), "abs": np.sign(d)}
    values = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}
    for estimator, slope in expected.items():
        value, grad = penalty(estimator=estimator, kl_coef=0.3)
        close(value, 0.3 * values[estimator][VALID].mean())
        close(grad, 0.3 * slope * MASK / N)
        through = penalty(estimator=estimator, kl_coef=0.3, straight_through=True)
        close(through[0], value)
        close(through[1], 0.3 * d * MASK / N)


def test_kl_penalty_estimates_what_its_gradient_claims():
    """All tokens of a small vocabulary, weighted by pi: exact expectations."""
    rng = np.random.default_rng(10)
    logits = jnp.asarray(rng.normal(size=6))
    ref = log_softmax(jnp.asarray(rng.normal(size=6)))
    p = jax.nn.softmax(logits)
    one = jnp.ones((1, 1))

    def expected(estimator):
        """Value and logit gradient of the estimator in the mean over y ~ pi, samples fixed."""

        def of_token(z, y):
            at = log_softmax(z)[y][None, None]
            return kl_penalty(at, ref[y][None, None], one, estimator=estimator)[0]

        values, grads = jax.vmap(jax.value_and_grad(of_token), (None, 0))(logits, jnp.arange(6))
        return p @ values, p @ grads

    forward = jax.value_and_grad(lambda z: kl(log_softmax(z), ref))(logits)
    backward = jax.grad(lambda z: kl(ref, log_softmax(z)))(logits)
    for estimator, gradient in (("k1", 0 * backward), ("k2", forward[1]), ("k3", backward)):
        value, grad = expected(estimator)
        close(grad, gradient)
        if estimator != "k2":
            close(value, forward[0])


def test_k3_is_positive_convex_and_close_to_k2_near_zero():
    d = np.linspace(-3, 3, 61)

    def k(x, estimator):
        one = np.ones((1, 1))
        return np.array(
            [kl_penalty([[v]], [[0.0]], one, estimator=estimator)[0] for v in np.atleast_1d(x)]
        )

    k3 = k(d, "k3")
    assert np.all(k3 >= 0) and np.all(np.diff(k3, 2) > 0)
    for small in (1e-2, 1e-3):
        assert abs(k(small, "k3") - k(small, "k2")) < small**3
