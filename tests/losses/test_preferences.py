"""What the preference papers state of themselves: reductions, signs, minima, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses

B, T, V = 6, 9, 5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def log_sigmoid(x):
    return -np.logaddexp(0, -np.asarray(x, float))


def sigmoid(x):
    return np.exp(log_sigmoid(x))


def batch(seed=0, masked_row=False):
    """Six responses with interior masks and a one-token row, as three pairs in mixed order."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((B, T)) < 0.7).astype(float)
    mask[:, 0] = 1
    mask[4] = np.arange(T) == 3
    if masked_row:
        mask[2] = 0
    ref = -rng.exponential(1.0, (B, T))
    return {
        "logprobs": ref + 0.5 * rng.normal(size=(B, T)),
        "ref_logprobs": ref,
        "teacher_logprobs": ref + 0.7 * rng.normal(size=(B, T)),
        "reward_logprobs": ref + 0.7 * rng.normal(size=(B, T)),
        "better_logprobs": -rng.exponential(1.0, (B, T)),
        "worse_logprobs": -rng.exponential(1.0, (B, T)),
        "mask": mask,
        "chosen": np.array([0, 5, 2], np.int32),
        "rejected": np.array([1, 3, 4], np.int32),
        "preferred": np.array([1.0, 0, 1, 0, 0, 1]),
        "group_ids": np.array([9, 9, -4, 70, -4, 70], np.int32),
        "desirable": np.array([1.0, 0, 1, 0, 0, 1]),
        "kl_log_ratios": rng.normal(size=B) + 0.8,
    }


def arguments(name, arrays):
    """The arrays that a paper takes; flags per row where it does not take indices of pairs."""
    found = losses.entry(name)
    out = {k: v for k, v in arrays.items() if k in found.arrays}
    if "group_ids" in found.arrays:
        out["relevant" if name == "ddro" else "chosen"] = arrays["preferred"]
    return out


def run(name, arrays, **hyper):
    return float(losses.get(name)(**arguments(name, arrays), **hyper)[0])


def value_and_grad(name, arrays, **hyper):
    given = arguments(name, arrays)

    def loss(x):
        return losses.get(name)(**{**given, "logprobs": x}, **hyper)[0]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(given["logprobs"]))
    return float(value), np.asarray(grad)


def same(x, y, tolerance=1e-10):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def ratios(a):
    return ((a["logprobs"] - a["ref_logprobs"]) * a["mask"]).sum(-1)


def dpo_margin(a, beta=0.1):
    h = beta * ratios(a)
    return h[a["chosen"]] - h[a["rejected"]]


INDEXED = ("dpo", "ipo", "simpo", "orpo")
TABLED = ("ddro", "tgdpo", "t-reg")


@pytest.mark.parametrize("name", INDEXED)
def test_permuting_rows_together_with_the_indices(name):
    a = batch()
    order = np.random.default_rng(1).permutation(B)
    inverse = np.argsort(order)
    moved = {k: v[order] if len(v) == B else v for k, v in a.items()}
    moved["chosen"], moved["rejected"] = (inverse[a[k]].astype(np.int32) for k in
                                          ("chosen", "rejected"))  # fmt: skip
    value, grad = value_and_grad(name, a)
    other, other_grad = value_and_grad(name, moved)
    same(other, value)
    same(other_grad, grad[order])


@pytest.mark.parametrize("name", INDEXED)
def test_without_a_pair_the_loss_is_zero(name):
    a = {**batch(), "chosen": [], "rejected": []}
    value, grad = value_and_grad(name, a)
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", (*INDEXED, "kto"))
def test_nothing_valid_gives_a_finite_loss_without_gradient(name):
    a = batch()
    a["mask"][:] = 0
    value, grad = value_and_grad(name, a)
    assert np.isfinite(value)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", INDEXED)
def test_a_row_of_several_pairs_gets_the_sum_of_their_gradients(name):
    a = {**batch(), "chosen": np.array([0, 0], np.int32), "rejected": np.array([1, 3], np.int32)}
    one, two = ({**a, "chosen": a["chosen"][i:][:1], "rejected": a["rejected"][i:][:1]}
                for i in (0, 1))  # fmt: skip
    gradients = [value_and_grad(name, x)[1] for x in (a, one, two)]
    same(gradients[0], (gradients[1] + gradients[2]) / 2)


@pytest.mark.parametrize("name", TABLED)
def test_rows_without_partner_or_tokens_form_no_pair(name):
    a = batch(masked_row=True)
    value, grad = value_and_grad(name, a)
    assert value != 0
    np.testing.assert_array_equal(grad[[2, 4]], 0)  # the masked row's partner has none left
    kept = {k: v[[0, 1, 3, 5]] if len(v) == B else v for k, v in a.items()}
    same(run(name, kept), value)
    alone = {**a, "group_ids": np.arange(B, dtype=np.int32)}
    value, grad = value_and_grad(name, alone)
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


# --- dpo -----------------------------------------------------------------------------------------


def test_dpo_at_the_reference():
    a = batch()
    a["logprobs"] = a["ref_logprobs"]
    value, grad = value_and_grad("dpo", a)
    same(value, np.log(2))
    signs = np.array([1, -1, 1, -1, -1, 1])[:, None]
    same(grad, -0.1 / 6 * signs * a["mask"])


def test_dpo_value_gradient_and_smoothing():
    a = batch()
    z = dpo_margin(a)
    value, grad = value_and_grad("dpo", a)
    same(value, -log_sigmoid(z).mean())
    expected = np.zeros((B, T))
    for p in range(3):
        push = 0.1 * sigmoid(-z[p]) / 3
        expected[a["chosen"][p]] -= push * a["mask"][a["chosen"][p]]
        expected[a["rejected"][p]] += push * a["mask"][a["rejected"][p]]
    same(grad, expected)
    smooth = -(0.8 * log_sigmoid(z) + 0.2 * log_sigmoid(-z)).mean()
    same(run("dpo", a, label_smoothing=0.2), smooth)


def test_dpo_swapping_the_sides_negates_the_margin():
    a = batch()
    swapped = {**a, "chosen": a["rejected"], "rejected": a["chosen"]}
    same(run("dpo", swapped), -log_sigmoid(-dpo_margin(a)).mean())
    metrics = losses.get("dpo")(**arguments("dpo", a))[1]
    same(float(metrics["preference_margin"]), dpo_margin(a).mean())
    same(float(metrics["preference_accuracy"]), (dpo_margin(a) > 0).mean())


def test_dpo_ignores_a_constant_on_both_sums():
    a = batch()
    moved = {**a, "logprobs": a["logprobs"] + 2.0 / a["mask"].sum(-1, keepdims=True)}
    same(run("dpo", moved), run("dpo", a))


def test_dpo_with_a_small_beta_follows_the_likelihoods():
    a = batch()
    _, grad = value_and_grad("dpo", a, beta=1e-8)
    signs = np.array([1, -1, 1, -1, -1, 1])[:, None]
    same(grad / 1e-8, -signs * a["mask"] / 2 / 3, 1e-7)


# --- ipo -----------------------------------------------------------------------------------------


def pair_of_one_token(margin):
    return {
        "logprobs": np.array([[margin - 1.0], [-1.0]]),
        "ref_logprobs": np.array([[-1.0], [-1.0]]),
        "mask": np.ones((2, 1)),
        "chosen": np.array([0], np.int32),
        "rejected": np.array([1], np.int32),
    }


def test_ipo_has_its_minimum_at_the_target():
    value, grad = value_and_grad("ipo", pair_of_one_token(5.0))
    same(value, 0.0)
    same(grad, 0.0)
    a = batch()
    a["logprobs"] = a["ref_logprobs"]
    same(run("ipo", a, beta=0.2), 1 / (4 * 0.2**2))


def test_ipo_is_symmetric_and_convex_in_the_margin():
    same(run("ipo", pair_of_one_token(5.7)), run("ipo", pair_of_one_token(4.3)))
    values = [run("ipo", pair_of_one_token(m)) for m in np.linspace(2, 8, 13)]
    same(np.diff(values, 2), 2 * 0.5**2)
    _, below = value_and_grad("ipo", pair_of_one_token(4.0))
    _, above = value_and_grad("ipo", pair_of_one_token(6.0))
    assert below[0, 0] < 0 < above[0, 0]


def test_ipo_with_and_without_length_normalisation():
    a = batch()
    h = ratios(a)
    for normalise, rows in ((False, h), (True, h / a["mask"].sum(-1))):
        margin = rows[a["chosen"]] - rows[a["rejected"]]
        value = run("ipo", a, length_normalize=normalise)
        same(value, ((margin - 5) ** 2).mean())
    one = pair_of_one_token(0.3)
    assert run("ipo", one) == run("ipo", one, length_normalize=False)


# --- simpo ---------------------------------------------------------------------------------------


def test_simpo_gradient_is_shared_by_the_length():
    a = batch()
    mean = (a["logprobs"] * a["mask"]).sum(-1) / a["mask"].sum(-1)
    z = 2 * (mean[a["chosen"]] - mean[a["rejected"]]) - 0.5
    value, grad = value_and_grad("simpo", a)
    same(value, -log_sigmoid(z).mean())
    for p, row in enumerate(a["chosen"]):
        same(grad[row], -2 * sigmoid(-z[p]) / (3 * a["mask"][row].sum()) * a["mask"][row])


def test_simpo_ignores_repetition():
    a = batch()
    twice = {**a, **{k: np.concatenate([a[k], a[k]], 1) for k in ("logprobs", "mask")}}
    same(run("simpo", twice), run("simpo", a))


def test_simpo_without_margin_is_dpo_with_a_flat_reference():
    a = batch()
    a["mask"][:] = 0
    a["mask"][:, [0, 2, 5]] = 1  # equal lengths, 3
    flat = {**a, "ref_logprobs": np.full((B, T), -1.7)}
    same(run("simpo", a, gamma=0.0), run("dpo", flat, beta=2 / 3))
    equal = {**a, "logprobs": np.full((B, T), -0.4)}
    same(run("simpo", equal), np.log(1 + np.exp(0.5)))


# --- orpo ----------------------------------------------------------------------------------------


def odds(a):
    mean = (a["logprobs"] * a["mask"]).sum(-1) / a["mask"].sum(-1)
    return mean - np.log(1 - np.exp(mean))


def negative(a):
    return {**a, "logprobs": -np.abs(a["logprobs"]) - 0.05}


def test_orpo_without_the_odds_is_supervised_learning_of_the_chosen():
    a = negative(batch())
    chosen = {"logprobs": a["logprobs"][a["chosen"]], "mask": a["mask"][a["chosen"]]}
    same(run("orpo", a, lam=0.0), run("sft", chosen))
    same(run("orpo", a, lam=0.3) - run("sft", chosen),
         -0.3 * log_sigmoid(odds(a)[a["chosen"]] - odds(a)[a["rejected"]]).mean())  # fmt: skip


def test_orpo_penalty_grows_with_likely_sequences():
    a = negative(batch())
    _, with_odds = value_and_grad("orpo", a, lam=1.0)
    _, without = value_and_grad("orpo", a, lam=0.0)
    mean = (a["logprobs"] * a["mask"]).sum(-1) / a["mask"].sum(-1)
    z = odds(a)[a["chosen"]] - odds(a)[a["rejected"]]
    for p, row in enumerate(a["chosen"]):
        slope = 1 / (1 - np.exp(mean[row]))
        expected = -sigmoid(-z[p]) / 3 * slope * a["mask"][row] / a["mask"][row].sum()
        same((with_odds - without)[row], expected)


def test_orpo_a_pair_of_one_row_adds_a_constant():
    a = {**negative(batch()), "rejected": batch()["chosen"]}
    value, grad = value_and_grad("orpo", a, lam=0.4)
    base, base_grad = value_and_grad("orpo", a, lam=0.0)
    same(value - base, 0.4 * np.log(2))
    same(grad, base_grad)


def test_orpo_of_unlikely_sequences_tends_to_simpo():
    a = negative(batch())
    a["logprobs"] = a["logprobs"] - 25
    difference = run("orpo", a, lam=1.0) - run("orpo", a, lam=0.0)
    same(difference, run("simpo", a, beta=1.0, gamma=0.0), 1e-9)


def test_orpo_counts_a_row_once_per_pair_and_stays_finite_at_certainty():
    a = {**negative(batch()), "chosen": np.array([0, 0, 5], np.int32)}
    total = (a["logprobs"] * a["mask"]).sum(-1)[a["chosen"]].sum()
    same(run("orpo", a, lam=0.0), -total / a["mask"].sum(-1)[a["chosen"]].sum())
    a["logprobs"][0] = 0.0
    value, grad = value_and_grad("orpo", a)
    assert np.isfinite(value) and np.isfinite(grad).all()
    _, without = value_and_grad("orpo", a, lam=0.0)
    same(grad[0], without[0])


# --- kto -----------------------------------------------------------------------------------------


def test_kto_at_the_reference():
    a = batch(masked_row=True)
    a["logprobs"] = a["ref_logprobs"]
    a["kl_log_ratios"] = np.zeros(B)
    value = run("kto", a, desirable_weight=2.0)
    same(value, (3 * 2.0 + 3 * 1.0) / 2 / B)


def test_kto_value_and_saturating_gradient():
    a = batch()
    z = max(a["kl_log_ratios"].mean(), 0)
    assert z > 0
    good = a["desirable"] > 0
    s = sigmoid(0.3 * np.where(good, ratios(a) - z, z - ratios(a)))
    w = np.where(good, 1.5, 0.7)
    value, grad = value_and_grad("kto", a, beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    same(value, (w * (1 - s)).mean())
    pull = (np.where(good, -1, 1) * w * 0.3 * s * (1 - s) / B)[:, None] * a["mask"]
    same(grad, pull)
    far = {**a, "logprobs": a["logprobs"] + 300.0}
    assert np.abs(value_and_grad("kto", far)[1]).max() < 1e-3 * np.abs(pull).max()


def test_kto_a_negative_reference_point_acts_as_zero():
    a = {**batch(), "kl_log_ratios": np.full(B, -0.3)}
    same(run("kto", a), run("kto", {**a, "kl_log_ratios": np.zeros(B)}))


def test_kto_depends_on_the_distance_to_a_positive_reference_point():
    a = batch()
    moved = {**a, "logprobs": a["logprobs"] + 1.2 / a["mask"].sum(-1, keepdims=True)}
    moved["kl_log_ratios"] = a["kl_log_ratios"] + 1.2
    same(run("kto", moved), run("kto", a))
    one_kind = {**a, "desirable": np.ones(B)}
    assert np.isfinite(run("kto", one_kind))


# --- ddro ----------------------------------------------------------------------------------------


def test_ddro_with_one_negative_per_query_is_dpo():
    a = batch()
    value, grad = value_and_grad("ddro", a)
    expected, expected_grad = value_and_grad("dpo", a, beta=0.4)
    same(value, expected)
    same(grad, expected_grad)
    at_reference = {**a, "logprobs": a["ref_logprobs"]}
    same(run("ddro", at_reference), np.log(2))


def test_ddro_averages_over_all_pairs_of_the_batch():
    a = batch()
    a["group_ids"] = np.array([3, 3, 3, 3, 8, 8], np.int32)  # 4 pairs and 1
    s = 0.4 * ratios(a)
    pairs = [(i, j) for i in range(B) for j in range(B) if a["preferred"][i] > a["preferred"][j]
             and a["group_ids"][i] == a["group_ids"][j]]  # fmt: skip
    assert len(pairs) == 5
    value, grad = value_and_grad("ddro", a)
    same(value, np.mean([-log_sigmoid(s[i] - s[j]) for i, j in pairs]))
    pull = sum(sigmoid(s[j] - s[0]) for i, j in pairs if i == 0)
    same(grad[0], -0.4 / 5 * pull * a["mask"][0])
    copies = {k: np.concatenate([v, v]) for k, v in a.items()}
    copies["group_ids"][B:] += 100
    same(run("ddro", copies), value)


def test_ddro_ignores_a_constant_on_rows_of_equal_length():
    a = batch()
    a["mask"][:] = 1
    moved = {**a, "logprobs": a["logprobs"] + np.where(a["group_ids"] == 9, 0.6, 0.0)[:, None]}
    same(run("ddro", moved), run("ddro", a))


# --- tgdpo ---------------------------------------------------------------------------------------


def test_tgdpo_without_guidance_is_dpo():
    a = batch()
    expected, expected_grad = value_and_grad("dpo", a)
    for arrays, alpha in ((a, 0.0), ({**a, "reward_logprobs": a["ref_logprobs"]}, 0.5)):
        value, grad = value_and_grad("tgdpo", arrays, alpha=alpha)
        same(value, expected)
        same(grad, expected_grad)


def tgdpo_parts(a, beta=0.1, alpha=0.5):
    side = np.where(a["preferred"] > 0, 1, -1)[:, None]
    f = 1 + alpha * side * beta * (a["reward_logprobs"] - a["ref_logprobs"])
    u = (a["logprobs"] - a["ref_logprobs"]) * a["mask"]
    s = (beta * f * u).sum(-1)
    return f, s[a["chosen"]] - s[a["rejected"]]


def test_tgdpo_gradient_is_weighted_token_by_token():
    a = batch()
    f, z = tgdpo_parts(a, alpha=20.0)  # factors of both signs: nothing clamps them
    assert f.min() < 0
    value, grad = value_and_grad("tgdpo", a, alpha=20.0)
    same(value, -log_sigmoid(z).mean())
    for p, (i, j) in enumerate(zip(a["chosen"], a["rejected"])):
        same(grad[i], -sigmoid(-z[p]) / 3 * 0.1 * f[i] * a["mask"][i])
        same(grad[j], sigmoid(-z[p]) / 3 * 0.1 * f[j] * a["mask"][j])


def test_tgdpo_at_the_reference_has_value_log_two_and_weighted_pulls():
    a = batch()
    a["logprobs"] = a["ref_logprobs"]
    value, grad = value_and_grad("tgdpo", a, alpha=2.0)
    same(value, np.log(2))
    f, _ = tgdpo_parts(a, alpha=2.0)
    same(np.abs(grad), 0.05 / 3 * f * a["mask"])
    raised = {**a, "reward_logprobs": a["reward_logprobs"].copy()}
    raised["reward_logprobs"][[0, 1], 0] += 1.0  # a chosen and a rejected token
    change = np.abs(value_and_grad("tgdpo", raised, alpha=2.0)[1]) - np.abs(grad)
    assert change[0, 0] > 0 > change[1, 0]
    change[[0, 1], 0] = 0
    same(change, 0.0)


def test_tgdpo_swapping_the_sides_flips_the_margin_only_without_guidance():
    a = batch()
    swapped = {**a, "preferred": 1 - a["preferred"]}

    def margin(arrays, alpha):
        metrics = losses.get("tgdpo")(**arguments("tgdpo", arrays), alpha=alpha)[1]
        return float(metrics["preference_margin"])

    same(margin(swapped, 0.0), -margin(a, 0.0))
    assert abs(margin(swapped, 0.5) + margin(a, 0.5)) > 1e-4


# --- t-reg ---------------------------------------------------------------------------------------


def test_t_reg_without_token_rewards_is_dpo():
    a = batch()
    expected, expected_grad = value_and_grad("dpo", a)
    for arrays, alpha in ((a, 0.0), ({**a, "worse_logprobs": a["better_logprobs"]}, 0.25)):
        value, grad = value_and_grad("t-reg", arrays, alpha=alpha)
        same(value, expected)
        same(grad, expected_grad)


def test_t_reg_gradient_identity():
    a = batch()
    rhat = sigmoid(a["better_logprobs"] - a["worse_logprobs"]) - 0.5
    w = sigmoid(-dpo_margin(a))
    value, grad = value_and_grad("t-reg", a)
    reg = -(0.1 * rhat * a["logprobs"] * a["mask"]).sum(-1)
    extra = 0.25 * w * (reg[a["chosen"]] + reg[a["rejected"]])
    same(value, (-log_sigmoid(dpo_margin(a)) + extra).mean())
    for p, (i, j) in enumerate(zip(a["chosen"], a["rejected"])):
        same(grad[i], -0.1 / 3 * a["mask"][i] * w[p] * (1 + 0.25 * rhat[i]), 1e-12)
        same(grad[j], -0.1 / 3 * a["mask"][j] * w[p] * (-1 + 0.25 * rhat[j]), 1e-12)


def test_t_reg_depends_on_the_difference_and_keeps_dpos_signs():
    a = batch()
    shifted = {k: a[k] - 3.0 for k in ("better_logprobs", "worse_logprobs")}
    same(run("t-reg", {**a, **shifted}), run("t-reg", a))
    a["better_logprobs"] = 30.0 * a["better_logprobs"]  # token rewards near both ends
    _, grad = value_and_grad("t-reg", a, alpha=1.99)
    _, dpo = value_and_grad("dpo", a)
    np.testing.assert_array_equal(np.sign(grad), np.sign(dpo))


# --- inverse-q-star ------------------------------------------------------------------------------


def test_inverse_q_star_is_zero_at_the_extrapolated_estimate():
    a = batch()
    a["logprobs"] = a["ref_logprobs"] + 1.3 * (a["teacher_logprobs"] - a["ref_logprobs"])
    value, grad = value_and_grad("inverse-q-star", a, eta=1.3)
    same(value, 0.0)
    same(grad, 0.0)


def test_inverse_q_star_special_cases():
    a = batch()
    mean = lambda x: (x * a["mask"]).sum() / a["mask"].sum()  # noqa: E731
    same(run("inverse-q-star", a), 0.01 * mean((a["logprobs"] - a["teacher_logprobs"]) ** 2))
    moved = {**a, "ref_logprobs": a["ref_logprobs"] - 2.0}
    same(run("inverse-q-star", moved), run("inverse-q-star", a))
    penalty = 0.01 * mean((a["logprobs"] - a["ref_logprobs"]) ** 2)
    same(run("inverse-q-star", a, eta=0.0), penalty)


def test_inverse_q_star_raises_what_the_teacher_likes_more():
    a = batch()
    _, grad = value_and_grad("inverse-q-star", a)
    valid = a["mask"] > 0
    likes = a["teacher_logprobs"] > a["logprobs"]
    np.testing.assert_array_equal((grad < 0)[valid], likes[valid])
    same(grad, 2 * 0.01 * (a["logprobs"] - a["teacher_logprobs"]) * a["mask"] / a["mask"].sum())


def test_inverse_q_star_clips_before_it_extrapolates():
    a = batch()
    rhat = np.clip(0.1 * (a["teacher_logprobs"] - a["ref_logprobs"]), -0.03, 0.03)
    r = 0.1 * (a["logprobs"] - a["ref_logprobs"])
    expected = ((r - 1.5 * rhat) ** 2 * a["mask"]).sum() / a["mask"].sum()
    same(run("inverse-q-star", a, eta=1.5, reward_clip=0.03), expected)
    metrics = losses.get("inverse-q-star")(**arguments("inverse-q-star", a))[1]
    agreement = ((r > 0) == (rhat > 0))[a["mask"] > 0].mean()
    same(float(metrics["agreement"]), agreement)


# --- r-to-q --------------------------------------------------------------------------------------


def trajectories(seed=3):
    a = batch(seed)
    rng = np.random.default_rng(seed)
    a["logits"] = rng.normal(size=(B, T, V))
    a["tokens"] = rng.integers(0, V, (B, T)).astype(np.int32)
    a["mask"][2] = 0
    return a


def token_rewards(a, **hyper):
    return np.asarray(losses.get("r-to-q")(**arguments("r-to-q", a), **hyper))


def potentials(a):
    return 0.1 * np.log(np.exp(a["logits"]).sum(-1))


def test_r_to_q_forms_telescope():
    a = trajectories()
    bellman, advantage = token_rewards(a, form="bellman"), token_rewards(a)
    v = potentials(a)
    for i in range(B):
        valid = np.flatnonzero(a["mask"][i])
        following = np.append(v[i, valid[1:]], 0.0) if valid.size else v[i, valid]
        same(bellman[i, valid], advantage[i, valid] + v[i, valid] - following)
        start = v[i, valid[0]] if valid.size else 0.0
        same(bellman[i].sum(), advantage[i].sum() + start)
        np.testing.assert_array_equal(bellman[i][a["mask"][i] == 0], 0)


def test_r_to_q_summed_advantages_are_dpos_margin():
    a = trajectories()
    p = np.exp(a["logits"]) / np.exp(a["logits"]).sum(-1, keepdims=True)
    a["logprobs"] = np.log(np.take_along_axis(p, a["tokens"][..., None], -1)[..., 0])
    total = token_rewards(a).sum(-1)
    same(total[a["chosen"]] - total[a["rejected"]], dpo_margin(a))


def test_r_to_q_only_bellman_reads_the_constant_of_the_logits():
    a = trajectories()
    i, (before, at) = 0, np.flatnonzero(a["mask"][0])[:2]
    moved = {**a, "logits": a["logits"].copy()}
    moved["logits"][i, at] += 2.0
    same(token_rewards(moved), token_rewards(a))
    change = token_rewards(moved, form="bellman") - token_rewards(a, form="bellman")
    expected = np.zeros((B, T))
    expected[i, at], expected[i, before] = 0.2, -0.2
    same(change, expected)


def test_r_to_q_expected_advantage_is_a_kl():
    rng = np.random.default_rng(4)
    logits, ref = rng.normal(size=V), rng.normal(size=V)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, ref))
    arrays = {
        "logits": np.broadcast_to(logits, (V, 1, V)),
        "ref_logprobs": np.log(q)[:, None],
        "tokens": np.arange(V, dtype=np.int32)[:, None],
        "mask": np.ones((V, 1)),
    }
    advantage = token_rewards(arrays)[:, 0]
    same(p @ advantage, 0.1 * (p * np.log(p / q)).sum())
    assert q @ advantage < 0 < p @ advantage


def test_r_to_q_recovers_the_rewards_of_soft_value_iteration():
    """A binary tree of depth 3: rewards -> Q* by backward induction -> logits -> rewards."""
    rng = np.random.default_rng(5)
    beta, depth = 0.1, 3
    reward = {s: rng.normal(size=2) for d in range(depth) for s in np.ndindex((2,) * d)}
    ref = {s: np.log(rng.dirichlet([1, 1])) for s in reward}
    q = {}

    def value(s):
        return beta * np.log(np.exp(q[s] / beta).sum()) if len(s) < depth else 0.0

    for s in sorted(reward, key=len, reverse=True):
        q[s] = np.array([reward[s][a] + beta * ref[s][a] + value((*s, a)) for a in (0, 1)])
    leaves = list(np.ndindex((2,) * depth))
    arrays = {
        "logits": np.array([[q[leaf[:t]] / beta for t in range(depth)] for leaf in leaves]),
        "ref_logprobs": np.array([[ref[y[:t]][y[t]] for t in range(depth)] for y in leaves]),
        "tokens": np.array(leaves, np.int32),
        "mask": np.ones((len(leaves), depth)),
    }
    expected = [[reward[y[:t]][y[t]] for t in range(depth)] for y in leaves]
    same(token_rewards(arrays, form="bellman"), expected)


def test_r_to_q_composes_with_dpo():
    a = trajectories()
    composed = losses.paper("r-to-q")
    value, _ = composed(**{k: a[k] for k in composed.needs})
    same(float(value), run("dpo", a))
    with pytest.raises(ValueError, match="Unknown form 'belman'.*'bellman'"):
        token_rewards(a, form="belman")
