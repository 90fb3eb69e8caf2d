"""What the baselines state of themselves, checked in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses

GROUPS = np.array([7, 2, 7, 2, 2, 7, -3, 7, 5, 2, 5])
"""Ragged, interleaved groups: four of 7 and of 2, two of 5, one of -3."""


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
        "logprobs": old + 0.3 * rng.normal(size=shape),
        "ref_logprobs": old + 0.3 * rng.normal(size=shape),
        "entropy": rng.uniform(0.05, 2.0, shape),
        "values": rng.normal(size=shape),
        "old_values": rng.normal(size=shape),
        "token_rewards": rng.normal(size=shape),
        "rewards": rng.normal(size=shape[0]),
        "group_ids": GROUPS,
    }


def critic_batch(seed=0):
    """A batch without given advantages: the objective forms its own."""
    return {k: v for k, v in batch(seed).items() if k != "advantages"}


def on_policy(seed=0):
    b = batch(seed)
    return {**b, "logprobs": b["old_logprobs"]}


def call(name, arrays, **hyper):
    """The paper's function on the arrays of its signature, as numpy."""
    found = losses.entry(name)
    out = found.function(**{n: arrays[n] for n in found.arrays if n in arrays}, **hyper)
    return jax.tree.map(np.asarray, out)


def gradient(name, arrays, wrt="logprobs", **hyper):
    found = losses.entry(name)
    rest = {n: arrays[n] for n in found.arrays if n in arrays and n != wrt}
    loss = jax.grad(lambda x: found.function(**rest, **{wrt: x}, **hyper)[0])
    return np.asarray(loss(jnp.asarray(arrays[wrt])))


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def live(b):
    return b["mask"] > 0


# -- reinforce ------------------------------------------------------------------------------------


def test_reinforce_gradient_is_minus_the_advantage_over_the_rows():
    b = batch()
    close(gradient("reinforce", b), -b["mask"] * b["advantages"] / len(GROUPS))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_reinforce_is_on_policy_grpo_up_to_the_aggregation(aggregation):
    b = on_policy(1)
    hyper = dict(aggregation=aggregation, max_length=13)
    close(gradient("reinforce", b, **hyper), gradient("grpo", b, beta=0.0, **hyper))


def bandit_gradients(baseline):
    """Probability and policy gradient (ascent) of every sample of a three-armed bandit."""
    theta, reward = jnp.array([0.3, -0.2, 0.9]), np.array([1.0, 0.2, -0.7])
    p = np.asarray(jax.nn.softmax(theta))
    samples = []
    for arm in range(3):

        def loss(z, arm=arm):
            logprobs = jax.nn.log_softmax(z)[arm].reshape(1, 1)
            advantages = np.full((1, 1), reward[arm] - baseline)
            return losses.get("reinforce")(logprobs, advantages, np.ones((1, 1)))[0]

        samples.append(-np.asarray(jax.grad(loss)(theta)))
    exact = p * (reward - p @ reward)
    return p, np.array(samples), exact


def test_reinforce_is_unbiased_on_a_bandit_with_and_without_baseline():
    variance = []
    for baseline in (0.0, 5.0, 0.4):
        p, samples, exact = bandit_gradients(baseline)
        close(p @ samples, exact)
        variance.append(p @ ((samples - exact) ** 2).sum(1))
    assert variance[1] > variance[0] > 0 and len(set(np.round(variance, 6))) == 3


# -- gae ------------------------------------------------------------------------------------------


def gae_by_loop(b, gamma, lam):
    out = np.zeros_like(b["mask"])
    for i in range(len(GROUPS)):
        value, running = 0.0, 0.0
        for t in np.flatnonzero(live(b)[i])[::-1]:
            delta = b["token_rewards"][i, t] + gamma * value - b["values"][i, t]
            running = delta + gamma * lam * running
            value, out[i, t] = b["values"][i, t], running
    return out


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.8, 0.0)])
def test_gae_against_a_loop(gamma, lam):
    b = batch()
    close(call("gae", b, gamma=gamma, lam=lam), gae_by_loop(b, gamma, lam))


def test_gae_limits():
    b = batch(1)
    r = b["mask"] * b["token_rewards"]
    to_go = np.cumsum(r[:, ::-1], 1)[:, ::-1]
    close(call("gae", b, lam=1.0), b["mask"] * (to_go - b["values"]))
    zero = {**b, "values": np.zeros_like(r)}
    close(call("gae", zero, lam=1.0), b["mask"] * to_go)
    exact = {**b, "values": to_go}
    close(call("gae", exact, lam=0.7), 0)


def test_gae_skips_masked_positions_bit_for_bit():
    b = batch(2)
    before = call("gae", b)
    arrays = {k: b[k] for k in ("token_rewards", "values", "mask")}
    wider = {k: np.insert(v, 3, 0 if k == "mask" else 1e3, axis=1) for k, v in arrays.items()}
    after = call("gae", wider)
    np.testing.assert_array_equal(np.delete(after, 3, 1), before)
    np.testing.assert_array_equal(after[:, 3], 0)


def test_gae_whitened():
    b = batch(3)
    a = call("gae", b, whiten=True)[live(b)]
    close([a.mean(), a.var(ddof=1)], [0, 1], 1e-7)
    outcome = np.zeros_like(b["mask"])
    for i, row in enumerate(live(b)):
        if row.any():
            outcome[i, np.flatnonzero(row)[-1]] = b["rewards"][i]
    flat = {**b, "token_rewards": outcome, "values": np.zeros_like(outcome)}
    moved = {**flat, "token_rewards": outcome + 3.0 * (outcome != 0)}
    hyper = dict(gamma=1.0, lam=1.0, whiten=True)
    close(call("gae", moved, **hyper), call("gae", flat, **hyper))


def test_gae_whitening_one_token_or_none():
    b = batch(4)
    b["mask"] = np.zeros_like(b["mask"])
    np.testing.assert_array_equal(call("gae", b, whiten=True), 0)
    b["mask"][8, 4] = 1
    out = call("gae", b, whiten=True)
    close(out, b["mask"] * (b["token_rewards"] - b["values"]))


# -- ppo ------------------------------------------------------------------------------------------


def test_ppo_on_policy_is_reinforce_with_its_advantages():
    b = critic_batch()
    b["logprobs"] = b["old_logprobs"]
    a = call("gae", {**b, "values": b["old_values"]}, whiten=True)
    expected = gradient("reinforce", {**b, "advantages": a}, aggregation="token_mean")
    close(gradient("ppo", b), expected)
    assert call("ppo", b)[1]["clip_fraction"] == 0


def test_ppo_against_a_loop():
    b = critic_batch(1)
    ratio = np.exp(b["logprobs"] - b["old_logprobs"])
    raw = gae_by_loop({**b, "values": b["old_values"]}, 1.0, 0.95)
    m, target = live(b), raw + b["old_values"]
    a = (raw - raw[m].mean()) / np.sqrt(raw[m].var(ddof=1) + 1e-8)
    policy = -np.minimum(ratio * a, np.clip(ratio, 0.9, 1.3) * a)
    near = b["old_values"] + np.clip(b["values"] - b["old_values"], -0.2, 0.2)
    value = 0.5 * np.maximum((b["values"] - target) ** 2, (near - target) ** 2)
    expected = (policy + 0.1 * value - 0.01 * b["entropy"])[m].mean()
    hyper = dict(clip_low=0.1, clip_high=0.3, entropy_coef=0.01)
    close(call("ppo", b, **hyper)[0], expected)
    plain = (policy + 0.05 * (b["values"] - target) ** 2)[m].mean()
    close(call("ppo", b, clip_low=0.1, clip_high=0.3, value_clip=None)[0], plain)


def test_ppo_without_bounds_is_the_weighted_policy_gradient():
    b = critic_batch(2)
    a = call("gae", {**b, "values": b["old_values"]}, whiten=True)
    expected = -b["mask"] * np.exp(b["logprobs"] - b["old_logprobs"]) * a / b["mask"].sum()
    close(gradient("ppo", b, clip_low=None, clip_high=None), expected)


def test_ppo_coefficients_switch_their_gradients():
    b = critic_batch(3)
    np.testing.assert_array_equal(gradient("ppo", b, wrt="values", value_coef=0.0), 0)
    np.testing.assert_array_equal(gradient("ppo", b, wrt="entropy"), 0)
    close(gradient("ppo", b, wrt="entropy", entropy_coef=0.3), -0.3 * b["mask"] / b["mask"].sum())
    assert np.any(gradient("ppo", b, wrt="values") != 0)


def test_ppo_value_gradient_stops_beyond_the_window():
    one = np.ones((1, 4))
    arrays = {
        "logprobs": -one, "old_logprobs": -one, "entropy": one, "mask": one,
        "values": np.array([[0.5, -0.5, 0.1, 3.0]]), "old_values": 0 * one,
        "token_rewards": np.array([[0.0, 0, 0, 1.0]]),
    }  # fmt: skip
    grad = gradient("ppo", arrays, wrt="values", value_coef=1.0, lam=1.0)  # every target is 1
    # The first has moved towards its target too far: the clipped error is the larger one.
    close(grad, [[0.0, -1.5 / 4, -0.9 / 4, 2.0 / 4]])


def test_ppo_garbage_behind_the_mask():
    b = critic_batch(4)
    before = call("ppo", b)[0]
    dirty = {
        k: np.where(live(b), v, 1e6) if v.shape == b["mask"].shape and k != "mask" else v
        for k, v in b.items()
    }
    assert call("ppo", dirty)[0] == before


def test_ppo_clips_on_one_side_per_sign():
    def loss(ratio, advantage):
        one = np.ones((1, 1))
        return call("ppo", {
            "logprobs": np.log(ratio) * one, "old_logprobs": 0 * one, "values": 0 * one,
            "entropy": one, "old_values": 0 * one, "token_rewards": 0 * one, "mask": one,
            "advantages": advantage * one,
        })[0]  # fmt: skip

    assert loss(1.3, 1.0) == loss(1.5, 1.0)
    assert loss(1.5, -1.0) > loss(1.3, -1.0)


# -- grpo -----------------------------------------------------------------------------------------


def test_grpo_on_policy_value_and_gradient():
    b = on_policy()
    n = np.maximum(b["mask"].sum(1, keepdims=True), 1)
    loss, metrics = call("grpo", b)
    d = b["ref_logprobs"] - b["logprobs"]
    kl = b["mask"] * (np.exp(d) - d - 1)
    expected = np.mean((kl * 0.04 - b["mask"] * b["advantages"]).sum(1) / n[:, 0])
    close(loss, expected)
    close(gradient("grpo", b, beta=0.0), -b["mask"] * b["advantages"] / (len(GROUPS) * n))
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] == 0


def test_grpo_other_denominators_are_dapo_and_dr_grpo():
    b = batch(1)
    hyper = dict(clip_low=0.1, clip_high=0.3)
    token_mean = call("grpo", b, beta=0.0, aggregation="token_mean", **hyper)[0]
    assert token_mean == call("dapo", b, **hyper)[0]
    constant = call("grpo", b, beta=0.0, aggregation="constant", max_length=20)[0]
    assert constant == call("dr-grpo", b, max_length=20)[0]


def test_grpo_kl_alone_is_least_at_the_reference():
    b = batch(2)
    b["advantages"] = np.zeros_like(b["advantages"])
    at_reference = {**b, "logprobs": b["ref_logprobs"]}
    assert call("grpo", at_reference)[0] == 0
    close(gradient("grpo", at_reference), 0)
    assert call("grpo", b)[0] > 0


def test_grpo_equal_rewards_add_only_their_kl():
    b = batch(3)
    b["rewards"] = np.where(GROUPS == 7, 0.1, b["rewards"])
    a = call("grpo-advantage", b)
    grad = gradient("grpo", {**b, "advantages": a[:, None] * b["mask"]}, beta=0.0)
    np.testing.assert_array_equal(grad[GROUPS == 7], 0)
    assert np.any(grad[GROUPS == 2] != 0)


def test_grpo_repeating_the_tokens_of_a_row_changes_nothing():
    b = batch(4)
    arrays = {k: v for k, v in b.items() if v.shape == b["mask"].shape}
    doubled = {k: np.concatenate([v, v], axis=1) for k, v in arrays.items()}
    for row in range(1, len(GROUPS)):  # only the first row is longer
        doubled["mask"][row, b["mask"].shape[1] :] = 0
    close(call("grpo", doubled)[0], call("grpo", b)[0])


# -- grpo-advantage -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_grpo_advantage_against_a_loop(scale):
    b = batch()
    expected, r = np.zeros(len(GROUPS)), b["rewards"]
    for g in set(GROUPS):
        rows = GROUPS == g
        spread = r[rows].std(ddof=1) if rows.sum() > 1 else 0.0
        denominator = {"group": spread + 1e-6, "none": 1.0, "batch": r.std(ddof=1) + 1e-6}[scale]
        expected[rows] = (r[rows] - r[rows].mean()) / denominator
    out = call("grpo-advantage", b, scale=scale)
    close(out, expected)
    for g in set(GROUPS):
        close(out[GROUPS == g].sum(), 0)
        if scale == "group" and (GROUPS == g).sum() > 1:
            close(out[GROUPS == g].std(ddof=1), 1.0, 1e-5)


def test_grpo_advantage_invariances():
    b = batch(1)
    shifted = {**b, "rewards": b["rewards"] + 2.0 * (GROUPS == 2)}
    for scale in ("group", "none"):
        close(call("grpo-advantage", shifted, scale=scale), call("grpo-advantage", b, scale=scale))
    scaled = {**b, "rewards": 9 * b["rewards"]}
    close(call("grpo-advantage", scaled), call("grpo-advantage", b), 1e-5)
    order = np.random.default_rng(1).permutation(len(GROUPS))
    moved = {"rewards": b["rewards"][order], "group_ids": GROUPS[order]}
    close(call("grpo-advantage", moved), call("grpo-advantage", b)[order])
    equal = {**b, "rewards": np.full(len(GROUPS), 0.1)}
    for scale in ("group", "none", "batch"):
        np.testing.assert_array_equal(call("grpo-advantage", equal, scale=scale), 0)


@pytest.mark.parametrize("n,k", [(8, 1), (8, 3), (5, 4)])
def test_grpo_advantage_of_binary_rewards(n, k):
    arrays = {"rewards": np.r_[np.ones(k), np.zeros(n - k)], "group_ids": np.zeros(n, int)}
    out = call("grpo-advantage", arrays, eps=0.0)
    factor = np.sqrt((n - 1) / n)
    close(out[:k], factor * np.sqrt((n - k) / k))
    close(out[k:], -factor * np.sqrt(k / (n - k)))


def test_grpo_advantage_rejects_an_unknown_scale():
    with pytest.raises(ValueError, match="'rows'"):
        call("grpo-advantage", batch(), scale="rows")


# -- dapo -----------------------------------------------------------------------------------------


def test_dapo_of_equal_lengths_is_grpo():
    b = batch()
    b["mask"] = np.ones_like(b["mask"])
    b["mask"][:, 2] = 0
    close(call("dapo", b, clip_high=0.2)[0], call("grpo", b, beta=0.0)[0])


def test_dapo_on_policy_gradient_and_no_token():
    b = on_policy(1)
    close(gradient("dapo", b), -b["mask"] * b["advantages"] / b["mask"].sum())
    empty = {**b, "mask": np.zeros_like(b["mask"])}
    assert call("dapo", empty)[0] == 0
    np.testing.assert_array_equal(gradient("dapo", empty), 0)


def test_dapo_clip_higher_keeps_rising_tokens():
    b = batch(2)
    ratio = np.exp(b["logprobs"] - b["old_logprobs"])
    between = live(b) & (b["advantages"] > 0) & (ratio > 1.2) & (ratio < 1.28)
    assert between.any()
    assert np.all(gradient("dapo", b)[between] != 0)
    assert np.all(gradient("dapo", b, clip_high=0.2)[between] == 0)


def test_dapo_of_two_halves_is_not_their_mean():
    b = batch(3)
    rows = {k: v for k, v in b.items() if v.shape == b["mask"].shape}
    first, second = ({k: v[s] for k, v in rows.items()} for s in (slice(0, 6), slice(6, 11)))
    counts = np.array([first["mask"].sum(), second["mask"].sum()])
    parts = np.array([call("dapo", first)[0], call("dapo", second)[0]])
    assert counts[0] != counts[1]
    assert abs(parts.mean() - call("dapo", b)[0]) > 1e-4
    close(parts @ counts / counts.sum(), call("dapo", b)[0])


# -- dr-grpo --------------------------------------------------------------------------------------


def test_dr_grpo_gradient_does_not_depend_on_the_length():
    b = on_policy()
    expected = -b["mask"] * b["advantages"] / (len(GROUPS) * 50)
    close(gradient("dr-grpo", b, max_length=50), expected)


def test_dr_grpo_is_dapo_over_another_denominator():
    b = batch(1)
    factor = b["mask"].sum() / (len(GROUPS) * 50)
    close(call("dr-grpo", b, max_length=50)[0], call("dapo", b, clip_high=0.2)[0] * factor)


def test_dr_grpo_scales_with_the_rewards():
    b = batch(2)

    def loss(scale, factor):
        arrays = {**b, "rewards": factor * b["rewards"]}
        a = call("grpo-advantage", arrays, scale=scale)[:, None] * b["mask"]
        return call("dr-grpo", {**b, "advantages": a})[0]

    close(loss("none", 3.0), 3 * loss("none", 1.0))
    close(loss("group", 3.0), loss("group", 1.0), 1e-5)


def test_dr_grpo_equal_rewards_have_no_gradient():
    b = batch(3)
    b["rewards"] = np.full(len(GROUPS), 0.1)
    grad = jax.grad(
        lambda x: losses.paper("dr-grpo")(
            **{**{k: b[k] for k in ("rewards", "group_ids", "mask", "old_logprobs")}, "logprobs": x}
        )[0]
    )(jnp.asarray(b["logprobs"]))
    np.testing.assert_array_equal(grad, 0)


# -- rloo -----------------------------------------------------------------------------------------


def test_rloo_against_a_loop_and_its_sums():
    b = batch()
    expected = b["rewards"].copy()
    for i, g in enumerate(GROUPS):
        others = [b["rewards"][j] for j in np.flatnonzero(GROUPS == g) if j != i]
        expected[i] -= np.mean(others) if others else 0.0
    out = call("rloo", b)
    close(out, expected)
    for g in (7, 2, 5):
        close(out[GROUPS == g].sum(), 0)
    first, second = np.flatnonzero(GROUPS == 5)
    close(out[first], b["rewards"][first] - b["rewards"][second])
    close(out[GROUPS == -3], b["rewards"][GROUPS == -3])


def test_rloo_is_a_multiple_of_the_centred_reward():
    b = batch(1)
    n = np.array([(GROUPS == g).sum() for g in GROUPS])
    several = n > 1
    centred = call("grpo-advantage", b, scale="none")
    close(call("rloo", b)[several], (n / np.maximum(n - 1, 1) * centred)[several])


def test_rloo_is_linear_and_ignores_a_constant():
    b, c = batch(2), batch(3)
    mixed = {**b, "rewards": 2 * b["rewards"] - 5 * c["rewards"]}
    close(call("rloo", mixed), 2 * call("rloo", b) - 5 * call("rloo", c))
    shifted = {**b, "rewards": b["rewards"] + 4.0}
    several = GROUPS != -3
    close(call("rloo", shifted)[several], call("rloo", b)[several])


@pytest.mark.parametrize("n", [2, 3])
def test_rloo_is_unbiased_on_a_bandit(n):
    p, reward = np.array([0.3, 0.7]), np.array([1.0, -0.4])
    score = np.eye(2) - p  # gradient of log p with respect to the logits, by arm
    exact = p * (reward - p @ reward)
    mean = {"rloo": 0.0, "group mean": 0.0}
    for arms in itertools.product(range(2), repeat=n):
        arms = np.array(arms)
        arrays = {"rewards": reward[arms], "group_ids": np.zeros(n, int)}
        weight = np.prod(p[arms]) / n
        mean["rloo"] += weight * call("rloo", arrays) @ score[arms]
        mean["group mean"] += weight * call("grpo-advantage", arrays, scale="none") @ score[arms]
    close(mean["rloo"], exact)
    close(mean["group mean"], (n - 1) / n * exact)


# -- remax ----------------------------------------------------------------------------------------


def test_remax_rows_like_the_greedy_response_have_no_advantage():
    r = np.array([1.0, 0.0, 0.5])
    out = call("remax", {"rewards": r, "greedy_rewards": np.array([1.0, 1.0, 0.0])})
    close(out, [0.0, -1.0, 0.5])
    np.testing.assert_array_equal(call("remax", {"rewards": r, "greedy_rewards": r}), 0)


def test_remax_is_unbiased_on_a_bandit_and_silent_on_a_certain_policy():
    reward = np.array([1.0, -0.4, 0.3])
    for p in (np.array([0.2, 0.5, 0.3]), np.array([0.0, 1.0, 0.0])):
        greedy = np.full(3, reward[p.argmax()])
        a = call("remax", {"rewards": reward, "greedy_rewards": greedy})
        mean = (p * a) @ (np.eye(3) - p)
        close(mean, p * (reward - p @ reward))
    close(mean, 0)


# -- sft ------------------------------------------------------------------------------------------


def test_sft_gradient_and_reinforce_with_advantages_of_one():
    b = batch()
    close(gradient("sft", b), -b["mask"] / b["mask"].sum())
    b["advantages"] = np.ones_like(b["mask"])
    close(call("sft", b)[0], call("reinforce", b, aggregation="token_mean")[0])


def test_sft_of_a_uniform_model_is_log_v():
    b = batch(1)
    b["logprobs"] = np.full_like(b["mask"], -np.log(32))
    loss, metrics = call("sft", b)
    close([loss, metrics["perplexity"]], [np.log(32), 32])
    assert call("sft", {**b, "mask": np.zeros_like(b["mask"])})[0] == 0


# -- soft-overlong --------------------------------------------------------------------------------


def overlong(lengths, rewards=None, **hyper):
    lengths = np.asarray(lengths)
    rewards = np.zeros(len(lengths)) if rewards is None else np.asarray(rewards, float)
    hyper = {"max_length": 100, "cache": 20, **hyper}
    return call("soft-overlong", {"rewards": rewards, "lengths": lengths}, **hyper)


def test_soft_overlong_ramp():
    penalty = overlong(np.arange(131))
    assert np.all(penalty <= 0) and np.all(np.diff(penalty) <= 0)
    np.testing.assert_array_equal(penalty[:81], 0)
    close(penalty[[81, 90, 100, 101, 130]], [-0.05, -0.5, -1, -1, -1])
    close(np.diff(penalty).min(), -0.05)  # continuous: no step larger than the ramp's


def test_soft_overlong_acts_on_right_and_wrong_alike():
    rewards = np.array([1.0, -1.0, 0.3])
    close(overlong([100, 100, 90], rewards), [0.0, -2.0, -0.2])
    np.testing.assert_array_equal(overlong([80, 3, 79], rewards), rewards)
    close(overlong([100, 90, 50], rewards, factor=0.5), rewards - [0.5, 0.25, 0])


def test_soft_overlong_widest_and_no_ramp():
    close(overlong([0, 25, 100], cache=100), [0, -0.25, -1])
    close(overlong([99, 100, 101], cache=0), [0, 0, -1])


# -- dynamic-sampling -----------------------------------------------------------------------------


def test_dynamic_sampling_keeps_the_groups_with_an_advantage():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(5):
        arrays = {"rewards": rng.integers(0, 2, len(GROUPS)).astype(float), "group_ids": GROUPS}
        keep, a = call("dynamic-sampling", arrays), call("grpo-advantage", arrays)
        for g in set(GROUPS):
            rows = GROUPS == g
            assert np.all(keep[rows] == float(np.any(a[rows] != 0)))
            seen.add((rows.sum() > 1, keep[rows][0]))
    assert seen == {(True, 1.0), (True, 0.0), (False, 0.0)}


def test_dynamic_sampling_composition_has_a_signal_in_every_kept_group():
    b = batch(1)
    b["rewards"] = np.where(GROUPS == 7, 1.0, np.arange(len(GROUPS)) % 2)
    composed = losses.paper("dynamic-sampling")
    loss, metrics = composed(**b)
    keep = call("dynamic-sampling", b)
    assert np.all(keep[GROUPS == 7] == 0) and keep.any()
    close(metrics["kept_fraction"], keep.mean())
    a = call("grpo-advantage", b)[:, None] * b["mask"]
    expected = call("dapo", {**b, "advantages": a, "mask": b["mask"] * keep[:, None]})[0]
    close(loss, expected)
