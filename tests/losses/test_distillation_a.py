"""What the distillation papers state of themselves: reductions, signs, bounds, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from losses.catalogue import CatalogueError
from losses.distillation.gtr_turbo import ties_merge
from losses.distillation.mopd import teacher_of

B, T, V = 6, 9, 7


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(-1)


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def sequence_mean(x, mask):
    rows = [x[i][mask[i] > 0].mean() if mask[i].any() else 0.0 for i in range(len(x))]
    return np.mean(rows)


def batch(seed=0, hidden_rows=True):
    """Arrays of a small batch: interior masks, a one-token row, a fully masked row."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((B, T)) < 0.75).astype(float)
    mask[:, 0] = 1
    if hidden_rows:
        mask[2] = 0
        mask[4] = np.arange(T) == 3
    old = -rng.exponential(1.0, (B, T))
    return {
        "logits": rng.normal(size=(B, T, V)),
        "teacher_logits": rng.normal(size=(B, T, V)),
        "tokens": rng.integers(0, V, (B, T)).astype(np.int32),
        "old_logprobs": old,
        "logprobs": old + 0.2 * rng.normal(size=(B, T)),
        "teacher_logprobs": old + 0.7 * rng.normal(size=(B, T)),
        "sampler_logprobs": old + 0.1 * rng.normal(size=(B, T)),
        "advantages": rng.normal(size=(B, T)),
        "mask": mask,
    }


def arguments(name, arrays):
    return {k: v for k, v in arrays.items() if k in losses.entry(name).arrays}


def run(name, arrays, **hyper):
    """Value (the loss of an objective) of a paper on those of the arrays that it takes."""
    out = losses.get(name)(**arguments(name, arrays), **hyper)
    return np.asarray(out[0] if losses.entry(name).kind == "objective" else out)


def value_and_grad(name, arrays, wrt, **hyper):
    given = arguments(name, arrays)

    def loss(x):
        return losses.get(name)(**{**given, wrt: x}, **hyper)[0]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(given[wrt]))
    return float(value), np.asarray(grad)


def same(x, y, tolerance=1e-10):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# --- opd, opd-full -------------------------------------------------------------------------------


def test_opd_teacher_equal_to_student_teaches_nothing():
    a = batch()
    a["teacher_logprobs"] = a["old_logprobs"]
    value, grad = value_and_grad("opd", a, "logprobs")
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


def test_opd_mean_gradient_is_the_gradient_of_the_exact_reverse_kl():
    rng = np.random.default_rng(1)
    logits, teacher = rng.normal(size=V), rng.normal(size=V)
    p, q = softmax(logits), softmax(teacher)
    expected = np.zeros(V)
    for v in range(V):
        one = {
            "old_logprobs": np.log(p[v]).reshape(1, 1),
            "logprobs": np.log(p[v]).reshape(1, 1),
            "teacher_logprobs": np.log(q[v]).reshape(1, 1),
            "mask": np.ones((1, 1)),
        }
        _, grad = value_and_grad("opd", one, "logprobs")
        expected += p[v] * grad[0, 0] * (np.eye(V)[v] - p)
    full = {
        "logits": logits[None, None],
        "teacher_logits": teacher[None, None],
        "mask": np.ones((1, 1)),
    }
    value, grad = value_and_grad("opd-full", full, "logits")
    same(value, kl(p, q))
    same(grad[0, 0], expected)


def test_opd_pushes_down_a_token_the_teacher_likes_less():
    a = batch()
    _, grad = value_and_grad("opd", a, "logprobs")
    valid = a["mask"] > 0
    assert (np.sign(grad) == np.sign(a["old_logprobs"] - a["teacher_logprobs"]))[valid].all()


def test_opd_clip_acts_on_the_weighted_advantage():
    a = batch()
    gap = np.clip(2.0 * (a["teacher_logprobs"] - a["old_logprobs"]), -0.5, 0.5)
    expected = -token_mean(np.exp(a["logprobs"] - a["old_logprobs"]) * gap, a["mask"])
    same(run("opd", a, kl_coef=2.0, adv_clip=0.5), expected)


def test_opd_descent_drives_the_reverse_kl_to_zero():
    """Descent on the mean of the sampled-token gradient, tokens enumerated."""
    rng = np.random.default_rng(2)
    logits, teacher = jnp.asarray(rng.normal(size=V)), jax.nn.log_softmax(rng.normal(size=V))

    def mean_loss(x, old):
        def of_token(v):
            term = losses.get("opd")(
                jax.nn.log_softmax(x)[v][None, None], old[v][None, None],
                teacher[v][None, None], jnp.ones((1, 1)),
            )[0]  # fmt: skip
            return jnp.exp(old[v]) * term

        return jnp.sum(jax.vmap(of_token)(jnp.arange(V)))

    def step(x, _):
        return x - 1.0 * jax.grad(mean_loss)(x, jax.nn.log_softmax(x)), None

    before = kl(softmax(np.asarray(logits)), np.exp(teacher))
    after = jax.lax.scan(step, logits, None, length=200)[0]
    assert before > 0.1
    assert kl(softmax(np.asarray(after)), np.exp(teacher)) < 1e-6


def test_opd_full_is_zero_up_to_a_constant_per_position():
    a = batch()
    a["teacher_logits"] = a["logits"] + np.arange(T)[None, :, None]
    value, grad = value_and_grad("opd-full", a, "logits")
    same(value, 0.0)
    same(grad, 0.0)
    assert run("opd-full", batch()) > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_opd_full_reverse_gradient_in_closed_form(temperature):
    a = batch()
    _, grad = value_and_grad("opd-full", a, "logits", temperature=temperature)
    p, q = softmax(a["logits"] / temperature), softmax(a["teacher_logits"] / temperature)
    k = kl(p, q)[..., None]
    n = a["mask"].sum()
    expected = a["mask"][..., None] / (n * temperature) * p * (np.log(p) - np.log(q) - k)
    same(grad, expected)
    same(grad.sum(-1), 0.0)


# --- gkd -----------------------------------------------------------------------------------------


def test_gkd_is_bounded_and_symmetric_at_one_half():
    a = batch()
    a["logits"] = 8 * a["logits"]
    swapped = {**a, "logits": a["teacher_logits"], "teacher_logits": a["logits"]}
    value = run("gkd", a)
    assert 0.1 < value <= np.log(2)
    same(value, run("gkd", swapped))
    assert abs(run("gkd", a, beta=0.3) - run("gkd", swapped, beta=0.3)) > 1e-3


@pytest.mark.parametrize("beta", [0, 0.2, 0.5, 1])
def test_gkd_vanishes_at_equality(beta):
    a = batch()
    a["teacher_logits"] = a["logits"]
    value, grad = value_and_grad("gkd", a, "logits", beta=beta)
    same(value, 0.0)
    same(grad, 0.0)


def test_gkd_ends_are_limits_up_to_the_weight():
    a = batch()
    p, q = softmax(a["teacher_logits"]), softmax(a["logits"])
    same(run("gkd", a, beta=0), token_mean(kl(p, q), a["mask"]))
    same(run("gkd", a, beta=1), token_mean(kl(q, p), a["mask"]))
    near = 1e-6
    same(run("gkd", a, beta=near) / near, run("gkd", a, beta=0), 1e-4)
    same(run("gkd", a, beta=1 - near) / near, run("gkd", a, beta=1), 1e-4)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_gkd_gradient_sums_to_zero_over_the_vocabulary(beta):
    _, grad = value_and_grad("gkd", batch(), "logits", beta=beta)
    assert np.abs(grad).max() > 1e-3
    same(grad.sum(-1), 0.0)


# --- copsd ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_copsd_without_cap_is_gkd_and_nonnegative(beta):
    a = batch()
    value = run("copsd", a, beta=beta, clip=None)
    same(value, run("gkd", a, beta=beta, temperature=1.1))
    assert value > 0
    a["teacher_logits"] = a["logits"]
    same(run("copsd", a, beta=beta), 0.0)


def test_copsd_forward_gradient_in_closed_form():
    a = batch()
    _, grad = value_and_grad("copsd", a, "logits", clip=None)
    p, q = softmax(a["logits"] / 1.1), softmax(a["teacher_logits"] / 1.1)
    same(grad, a["mask"][..., None] * (p - q) / (1.1 * a["mask"].sum()))


def test_copsd_cap_removes_gradient_only_where_the_teacher_has_more_mass():
    a = batch()
    cap = 0.02
    _, grad = value_and_grad("copsd", a, "logits", clip=cap)
    p, q = softmax(a["logits"] / 1.1), softmax(a["teacher_logits"] / 1.1)
    terms = q * (np.log(q) - np.log(p))
    capped = terms > cap
    assert capped[a["mask"] > 0].any() and (q > p)[capped].all()
    kept = np.where(capped, 0.0, q)  # d/d logits of -sum_kept q log p
    expected = p * kept.sum(-1, keepdims=True) - kept
    same(grad, a["mask"][..., None] * expected / (1.1 * a["mask"].sum()))
    same(run("copsd", a, clip=cap), token_mean(np.minimum(terms, cap).sum(-1), a["mask"]))


def test_copsd_weighs_long_rollouts_more():
    a = batch(hidden_rows=False)
    a["mask"][:] = 1
    a["mask"][0, 1:] = 0
    d = kl(softmax(a["teacher_logits"] / 1.1), softmax(a["logits"] / 1.1))
    same(run("copsd", a, clip=None), d[a["mask"] > 0].mean())
    padded = {k: np.concatenate([v, v[:1]]) for k, v in a.items()}
    padded["mask"][-1] = 0
    same(run("copsd", padded, clip=None), run("copsd", a, clip=None))


# --- esr -----------------------------------------------------------------------------------------


def test_esr_keeps_the_first_valid_tokens_of_each_row():
    a = batch()
    a["mask"][:2, 0] = 0  # the prefix does not start at the first position
    kept = np.zeros((B, T))
    for i in range(B):
        kept[i, np.flatnonzero(a["mask"][i])[:3]] = 1
    d = kl(softmax(a["logits"]), softmax(a["teacher_logits"]))
    value, grad = value_and_grad("esr", a, "logits", prefix=3)
    same(value, token_mean(d, kept))
    np.testing.assert_array_equal(np.abs(grad).max(-1) > 0, kept > 0)


def test_esr_with_a_prefix_of_one_is_the_kl_of_first_tokens():
    a = batch()
    d = kl(softmax(a["logits"]), softmax(a["teacher_logits"]))
    firsts = [d[i, np.flatnonzero(a["mask"][i])[0]] for i in range(B) if a["mask"][i].any()]
    same(run("esr", a, prefix=1), np.mean(firsts))


def test_esr_with_a_long_prefix_is_full_distillation():
    a = batch()
    assert run("esr", a, prefix=T) == run("opd-full", a) > 0
    a["teacher_logits"] = a["logits"]
    same(run("esr", a, prefix=3), 0.0)


# --- aligndistil ---------------------------------------------------------------------------------


def test_aligndistil_equal_dpo_models_leave_the_floor():
    a = batch()
    a["reverse_logits"] = a["teacher_logits"]
    d = kl(softmax(a["logits"]), softmax(a["teacher_logits"]))
    same(run("aligndistil", a), 0.1 / 1e-3 * sequence_mean(d, a["mask"]))


def test_aligndistil_is_zero_exactly_at_the_extrapolated_target():
    a = batch()
    a["reverse_logits"] = a["teacher_logits"] + 0.3 * np.random.default_rng(3).normal(
        size=(B, T, V)
    )
    gap = np.abs(softmax(a["teacher_logits"]) - softmax(a["reverse_logits"])).sum(-1, keepdims=True)
    assert run("aligndistil", a) > 1e-3
    a["logits"] = a["teacher_logits"] + (15 * gap + 1e-3) * (
        a["teacher_logits"] - a["reverse_logits"]
    )
    value, grad = value_and_grad("aligndistil", a, "logits")
    same(value, 0.0)
    same(grad, 0.0)


def test_aligndistil_weighs_agreement_most():
    far = np.array([[[30.0, 0.0]]])
    arrays = {
        "logits": np.array([[[0.0, 1.0]]]),
        "teacher_logits": far,
        "reverse_logits": -far,
        "mask": np.ones((1, 1)),
    }
    metrics = losses.get("aligndistil")(**arrays)[1]
    same(float(metrics["weight_mean"]), 30.001, 1e-6)
    p = softmax(arrays["logits"][0, 0])
    z = far[0, 0] + 30.001 * 2 * far[0, 0]
    log_q = z - z.max() - np.log(np.exp(z - z.max()).sum())
    expected = 0.1 / 30.001 * (p * (np.log(p) - log_q)).sum()
    same(run("aligndistil", arrays), expected, 1e-6)


@pytest.mark.parametrize("name", ["logits", "teacher_logits", "reverse_logits"])
def test_aligndistil_ignores_constants_per_position(name):
    a = batch()
    a["reverse_logits"] = a["teacher_logits"][::-1].copy()
    moved = {**a, name: a[name] + np.arange(T)[None, :, None]}
    same(run("aligndistil", moved), run("aligndistil", a), 1e-8)


def test_aligndistil_refuses_a_floor_of_zero():
    a = batch()
    a["reverse_logits"] = a["teacher_logits"]
    with pytest.raises(ValueError, match="floor must be positive"):
        run("aligndistil", a, floor=0.0)


# --- aopd ----------------------------------------------------------------------------------------


def sampled(a, key):
    log_p = np.log(softmax(a[key]))
    return np.take_along_axis(log_p, a["tokens"][..., None], -1)[..., 0]


def test_aopd_at_the_two_ends_of_tau():
    a = batch()
    x, y = sampled(a, "logits"), sampled(a, "teacher_logits")
    value, grad = value_and_grad("aopd", a, "logits", tau=-1)
    same(value, sequence_mean(-(y - x) * x, a["mask"]))
    p = softmax(a["logits"])
    n = np.maximum(a["mask"].sum(-1), 1)[:, None, None]
    pull = -(y - x)[..., None] * (np.eye(V)[a["tokens"]] - p)
    same(grad, a["mask"][..., None] * pull / (B * n))
    q = softmax(a["teacher_logits"])
    truncated = np.zeros((B, T))
    for i, t in np.ndindex(B, T):
        top = np.argsort(-q[i, t], kind="stable")[:3]
        truncated[i, t] = (q[i, t, top] * (np.log(q[i, t, top]) - np.log(p[i, t, top]))).sum() / 3
    same(run("aopd", a, tau=1, top_k=3), sequence_mean(truncated, a["mask"]))


def test_aopd_splits_on_the_difference_of_probabilities():
    a = batch()
    a["mask"][:] = 1
    x, y = sampled(a, "logits"), sampled(a, "teacher_logits")
    _, grad = value_and_grad("aopd", a, "logits", tau=0.05, top_k=2)
    imitated = np.exp(y) - np.exp(x) <= 0.05
    assert imitated.any() and not imitated.all()
    q = softmax(a["teacher_logits"])
    top = np.argsort(-q, axis=-1, kind="stable")[..., :2]
    kept = np.zeros_like(q)
    np.put_along_axis(kept, top, np.take_along_axis(q, top, -1), -1)
    p = softmax(a["logits"])
    imitation = (kept.sum(-1, keepdims=True) * p - kept) / 2
    exploitation = -(y - x)[..., None] * (np.eye(V)[a["tokens"]] - p)
    same(grad * B * T, np.where(imitated[..., None], imitation, exploitation))


def test_aopd_at_agreement_still_pulls_into_the_top_k():
    a = batch(hidden_rows=False)
    a["teacher_logits"] = a["logits"]
    value, grad = value_and_grad("aopd", a, "logits", top_k=2)
    assert value == 0
    assert losses.get("aopd")(**arguments("aopd", a))[1]["imitation_fraction"] == 1
    p = softmax(a["logits"])
    top = np.zeros_like(p)
    np.put_along_axis(top, np.argsort(-p, -1)[..., :2], 1.0, -1)
    n = a["mask"].sum(-1)[:, None, None]
    mass = (p * top).sum(-1, keepdims=True)
    same(grad, a["mask"][..., None] * (mass - top) * p / 2 / (B * n))
    _, flat = value_and_grad("aopd", a, "logits", top_k=V)
    same(flat, 0.0)


def test_aopd_over_the_whole_vocabulary_is_the_forward_kl_over_v():
    a = batch()
    d = kl(softmax(a["teacher_logits"]), softmax(a["logits"])) / V
    same(run("aopd", a, tau=1, top_k=100), sequence_mean(d, a["mask"]))


def test_aopd_takes_the_lower_index_among_equal_teacher_logits():
    arrays = {
        "logits": np.array([[[0.3, -0.2, 0.9]]]),
        "teacher_logits": np.zeros((1, 1, 3)),
        "tokens": np.zeros((1, 1), np.int32),
        "mask": np.ones((1, 1)),
    }
    p = softmax(arrays["logits"][0, 0])
    same(run("aopd", arrays, tau=1, top_k=1), np.log(1 / 3 / p[0]) / 3)


# --- dgrpo ---------------------------------------------------------------------------------------


def with_logprobs(a):
    return {
        **a,
        "logprobs": sampled(a, "logits"),
        "old_logprobs": sampled(a, "logits") + 0.1 * a["advantages"],
    }


def test_dgrpo_reduces_to_grpo_and_to_distillation():
    a = with_logprobs(batch())
    same(run("dgrpo", a, kl_coef=0.0), run("grpo", a, beta=0.0))
    silent = {**a, "advantages": np.zeros((B, T))}
    d = kl(softmax(a["logits"]), softmax(a["teacher_logits"]))
    same(run("dgrpo", silent), 0.5 * sequence_mean(d, a["mask"]))


def test_dgrpo_gradients_add():
    a = with_logprobs(batch())
    _, both = value_and_grad("dgrpo", a, "logits")
    _, reward = value_and_grad("dgrpo", a, "logits", kl_coef=0.0)
    _, teacher = value_and_grad("dgrpo", {**a, "advantages": np.zeros((B, T))}, "logits")
    same(both, reward + teacher)
    agreed = {**a, "teacher_logits": a["logits"]}
    same(value_and_grad("dgrpo", agreed, "logits")[1], reward)


def test_dgrpo_clipped_tokens_keep_the_teachers_gradient():
    a = with_logprobs(batch())
    a["old_logprobs"] = a["logprobs"] - 1.0
    a["advantages"] = np.ones((B, T))
    _, reward = value_and_grad("dgrpo", a, "logits", kl_coef=0.0)
    np.testing.assert_array_equal(reward, 0)
    _, both = value_and_grad("dgrpo", a, "logits")
    assert (np.abs(both).max(-1) > 0)[a["mask"] > 0].all()


def test_dgrpo_with_a_heavy_teacher_forgets_the_reward():
    a = with_logprobs(batch())
    other = {**a, "advantages": -a["advantages"]}
    g, h = (value_and_grad("dgrpo", x, "logits", kl_coef=1e9)[1].ravel() for x in (a, other))
    assert g @ h / np.linalg.norm(g) / np.linalg.norm(h) > 1 - 1e-12


# --- drift ---------------------------------------------------------------------------------------


def routed(rates, demos=None):
    a = with_logprobs(batch(hidden_rows=False))
    a["pass_rate"] = np.asarray(rates, float)
    a["demo_mask"] = np.ones(B) if demos is None else np.asarray(demos, float)
    return a


def test_drift_reduces_to_grpo_and_to_jensen_shannon():
    a = routed(np.linspace(0, 1, B))
    same(run("drift", a, low=0.0, high=1.1, gate_gain=0.0),
         run("grpo", a, beta=0.0, aggregation="token_mean"))  # fmt: skip
    p, q = softmax(a["logits"]), softmax(a["teacher_logits"])
    jsd = (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    assert jsd.max() <= np.log(2)
    same(run("drift", a, low=1.1), token_mean(jsd, a["mask"]))
    swapped = {**a, "logits": a["teacher_logits"], "teacher_logits": a["logits"]}
    same(run("drift", swapped, low=1.1), run("drift", a, low=1.1))


def test_drift_routes_and_gates_row_by_row():
    a = routed([0.1, 0.1, 0.3, 0.5, 0.8, 0.9], [1, 0, 1, 0, 1, 1])
    p, q = softmax(a["logits"]), softmax(a["teacher_logits"])
    jsd = (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    entropies = [-(x * np.log(x)).sum(-1) for x in (p, q)]
    u = np.maximum(entropies[0] - entropies[1], 0) / np.log(V)
    rho = np.exp(a["logprobs"] - a["old_logprobs"])
    total = 0.0
    for i, route in enumerate(["hard", "plain", "boundary", "boundary", "easy", "easy"]):
        for t in np.flatnonzero(a["mask"][i]):
            adv = a["advantages"][i, t]
            if route == "hard":
                total += 0.7 * jsd[i, t]
                continue
            if route == "easy":
                adv *= 0.2
            if route == "boundary" and adv > 0:
                adv *= 1 + 1.5 * u[i, t]
            total -= min(rho[i, t] * adv, np.clip(rho[i, t], 0.8, 1.2) * adv)
    value = run("drift", a, distill_coef=0.7, gate_gain=1.5)
    same(value, total / a["mask"].sum())


def test_drift_hints_of_explored_rows_change_only_the_gate():
    a = routed([0.5] * B)
    moved = {**a, "teacher_logits": a["teacher_logits"][::-1].copy()}
    same(run("drift", a, gate_gain=0.0), run("drift", moved, gate_gain=0.0))
    assert abs(run("drift", a) - run("drift", moved)) > 1e-6
    negative = {**a, "advantages": -np.abs(a["advantages"])}
    same(run("drift", negative), run("drift", negative, gate_gain=0.0))
    certain = {**a, "teacher_logits": 0.0 * a["teacher_logits"]}  # the hint leaves it uncertain
    same(run("drift", certain), run("drift", certain, gate_gain=0.0))


# --- iw-opd --------------------------------------------------------------------------------------


def iw_weights(a, gamma=0.5):
    w = np.ones((B, T)) * (1 + gamma)
    gaps = np.abs(a["teacher_logprobs"] - a["old_logprobs"]) * a["mask"]
    for i, t in np.ndindex(B, T):
        w[i, t] = 1 + gamma * (1 - gaps[i, :t].sum() / max(gaps[i].sum(), 1e-8))
    return w


def test_iw_opd_without_gamma_is_sampled_token_distillation():
    a = batch()
    value = run("iw-opd", a, gamma=0.0, clip_low=None, clip_high=None)
    gap = a["teacher_logprobs"] - a["old_logprobs"]
    same(value, -token_mean(a["logprobs"] * gap, a["mask"]))
    same(run("iw-opd", a, gamma=0.0, clip_low=50.0, clip_high=50.0), run("opd", a))


@pytest.mark.parametrize("clip", [0.2, None])
def test_iw_opd_on_policy_gradient_is_the_weighted_gap(clip):
    a = batch()
    a["logprobs"] = a["old_logprobs"]
    _, grad = value_and_grad("iw-opd", a, "logprobs", clip_low=clip, clip_high=clip)
    gap = (a["teacher_logprobs"] - a["old_logprobs"]) * a["mask"]
    w = iw_weights(a)
    same(grad, -w * gap / a["mask"].sum())
    falls = np.diff(w, axis=1)
    moved = gap[:, :-1] != 0
    assert (falls[moved] < 0).all() and (falls[~moved] == 0).all()
    assert (w >= 1).all() and (w <= 1.5).all()


def test_iw_opd_weights_depend_on_relative_size_and_past_only():
    a = batch(hidden_rows=False)
    a["logprobs"] = a["old_logprobs"]
    gap = a["teacher_logprobs"] - a["old_logprobs"]

    def weights(gaps):
        arrays = {**a, "teacher_logprobs": a["old_logprobs"] + gaps}
        _, grad = value_and_grad("iw-opd", arrays, "logprobs")
        return (-grad * a["mask"].sum() / gaps)[a["mask"] > 0]

    same(weights(3.0 * gap), weights(gap), 1e-8)
    same(weights(-gap), weights(gap), 1e-8)
    assert np.abs(weights(gap[:, ::-1]) - weights(gap)).max() > 0.01


def test_iw_opd_refuses_one_bound_alone():
    with pytest.raises(ValueError, match="both clip_low and clip_high"):
        run("iw-opd", batch(), clip_low=None)


# --- mopd ----------------------------------------------------------------------------------------


def test_mopd_on_policy_gradient():
    a = batch()
    a["sampler_logprobs"] = a["old_logprobs"]
    _, grad = value_and_grad("mopd", a, "logprobs", orm_coef=0.3)
    gap = a["teacher_logprobs"] - a["old_logprobs"] + 0.3 * a["advantages"]
    n = np.maximum(a["mask"].sum(-1, keepdims=True), 1)
    same(grad, -a["mask"] * gap / (B * n))


def test_mopd_gate_keeps_its_bounds_and_drops_single_tokens():
    a = batch(hidden_rows=False)
    a["mask"][:] = 1
    a["sampler_logprobs"] = a["old_logprobs"].copy()
    a["sampler_logprobs"][0, :4] -= np.log([5.0, 0.2, 6.0, 0.19])
    _, grad = value_and_grad("mopd", a, "logprobs")
    w = np.ones((B, T))
    w[0, :4] = [5.0, 0.2, 0.0, 0.0]
    gap = a["teacher_logprobs"] - a["old_logprobs"]
    same(grad, -w * gap / (B * T))
    with jax.enable_x64(False):
        single = {k: np.asarray(v, np.float32) for k, v in a.items()}
        _, grad = value_and_grad("mopd", single, "logprobs")
        np.testing.assert_array_equal(grad[0, :4] != 0, [True, True, False, False])


def test_mopd_swapping_teachers_changes_their_rows_only():
    a = batch(hidden_rows=False)
    moved = {**a, "teacher_logprobs": a["teacher_logprobs"].copy()}
    moved["teacher_logprobs"][:2] += 0.5
    _, before = value_and_grad("mopd", a, "logprobs")
    _, after = value_and_grad("mopd", moved, "logprobs")
    np.testing.assert_array_equal(np.abs(after - before).max(-1) > 0, [True] * 2 + [False] * 4)


def test_mopd_with_one_teacher_is_distillation_and_outcome_can_dominate():
    a = batch()
    a["sampler_logprobs"] = a["old_logprobs"]
    gap = a["teacher_logprobs"] - a["old_logprobs"]
    same(run("mopd", a), -sequence_mean(gap * a["logprobs"], a["mask"]))
    _, grad = value_and_grad("mopd", a, "logprobs", orm_coef=1e9)
    n = np.maximum(a["mask"].sum(-1, keepdims=True), 1)
    same(grad / 1e9, -a["mask"] * a["advantages"] / (B * n), 1e-7)


def test_mopd_routes_domains_to_teachers():
    teachers = {"sort": 1, "add": 2}
    assert teacher_of("add", teachers) == 2
    assert teacher_of("chess", teachers, default=3) == 3
    with pytest.raises(CatalogueError, match="No teacher for the domain 'ad'.*'add'"):
        teacher_of("ad", teachers)


# --- gndpo ---------------------------------------------------------------------------------------


def test_gndpo_is_standardised_over_the_batch():
    a = batch()
    value = run("gndpo", a)
    valid = a["mask"] > 0
    same(value[valid].mean(), 0.0)
    same(value[valid].std(ddof=1), 1.0, 1e-7)
    np.testing.assert_array_equal(value[~valid], 0)
    shifted = {**a, "teacher_logprobs": a["teacher_logprobs"] + 0.4}
    same(run("gndpo", shifted), value)


def test_gndpo_pushes_down_although_the_teacher_likes_every_token():
    a = batch()
    a["teacher_logprobs"] = a["old_logprobs"] + np.random.default_rng(4).uniform(0.1, 2, (B, T))
    value = run("gndpo", a)[a["mask"] > 0]
    assert 0.25 < (value < 0).mean() < 0.75


def test_gndpo_clamps_before_the_statistics():
    a = batch()
    a["teacher_logprobs"][0, 0] = a["old_logprobs"][0, 0] + 6
    farther = {**a, "teacher_logprobs": a["teacher_logprobs"].copy()}
    farther["teacher_logprobs"][0, 0] += 40
    np.testing.assert_array_equal(run("gndpo", farther), run("gndpo", a))


def test_gndpo_gives_zeros_to_equal_gaps_and_to_a_single_token():
    a = batch()
    equal = {**a, "old_logprobs": np.full((B, T), -1.3), "teacher_logprobs": np.full((B, T), -0.9)}
    np.testing.assert_array_equal(run("gndpo", equal), 0)
    single = {**a, "mask": np.zeros((B, T))}
    single["mask"][1, 2] = 1
    np.testing.assert_array_equal(run("gndpo", single), 0)


# --- gtr-turbo -----------------------------------------------------------------------------------


def episodes(seed=5):
    rng = np.random.default_rng(seed)
    a = batch(seed)
    a["mask"][2, :3] = 1
    k = 4
    lengths = np.array([4, 2, 3, 1, 4, 2])
    a["turn_ids"] = np.sort(rng.integers(0, lengths[:, None], (B, T)), axis=1).astype(np.int32)
    a["turn_mask"] = (np.arange(k) < lengths[:, None]).astype(float)
    a["turn_rewards"] = rng.normal(size=(B, k))
    a["turn_values"] = rng.normal(size=(B, k))
    a["format_valid"] = (rng.random((B, k)) < 0.8).astype(float)
    a["thought_mask"] = (rng.random((B, T)) < 0.6).astype(float)
    return a


def gtr_raw(a, gamma=0.9, lam=0.95, cap=10.0):
    """Turn advantages before standardisation, by a loop over turns from the end."""
    raw = np.full(a["turn_mask"].shape, np.nan)
    for i in range(B):
        carry, nxt = 0.0, 0.0
        for k in reversed(range(int(a["turn_mask"][i].sum()))):
            carry = (
                a["turn_rewards"][i, k] + gamma * nxt - a["turn_values"][i, k] + gamma * lam * carry
            )
            nxt = a["turn_values"][i, k]
            here = (a["turn_ids"][i] == k) & (a["mask"][i] * a["thought_mask"][i] > 0)
            gap = np.clip(a["old_logprobs"][i] - a["teacher_logprobs"][i], 0, cap)[here]
            valid = a["format_valid"][i, k] > 0
            penalty = (gap.mean() if here.any() else 0.0) if valid else 100.0
            raw[i, k] = carry + (3.0 if valid else -2.0) - penalty
    return raw


def spread_over_tokens(a, per_turn):
    value = np.zeros((B, T))
    for i, t in np.ndindex(B, T):
        if a["mask"][i, t]:
            value[i, t] = per_turn[i, a["turn_ids"][i, t]]
    return value


def test_gtr_turbo_against_a_loop_over_turns():
    a = episodes()
    raw = gtr_raw(a, cap=0.4)
    standard = (raw - np.nanmean(raw)) / (np.nanstd(raw, ddof=1) + 1e-5)
    same(run("gtr-turbo", a, kl_cap=0.4), spread_over_tokens(a, standard))


def test_gtr_turbo_agreeing_teacher_leaves_whitened_gae():
    a = episodes()
    a["teacher_logprobs"] = a["old_logprobs"]
    a["format_valid"][:] = 1
    raw = gtr_raw(a) - 3.0
    standard = (raw - np.nanmean(raw)) / (np.nanstd(raw, ddof=1) + 1e-5)
    same(run("gtr-turbo", a), spread_over_tokens(a, standard))
    liked = {**a, "teacher_logprobs": a["teacher_logprobs"] + 0.3}
    same(run("gtr-turbo", liked), run("gtr-turbo", a))


def test_gtr_turbo_an_invalid_turn_is_by_far_the_worst():
    a = episodes()
    a["format_valid"][:] = 1
    a["format_valid"][0, 1] = 0
    a["turn_ids"][0, :2] = [0, 1]
    a["mask"][0, :2] = 1
    value = run("gtr-turbo", a)
    invalid = spread_over_tokens(a, (np.arange(4) == 1) * (np.arange(B) == 0)[:, None]) > 0
    others = value[(a["mask"] > 0) & ~invalid]
    assert invalid.any() and (value[invalid] < others.min() - 3).all()


def test_gtr_turbo_equal_or_single_turns_give_zeros():
    a = episodes()
    for name in ("turn_rewards", "turn_values"):
        a[name][:] = 0.1
    a["turn_mask"][:, 1:] = 0
    a["turn_ids"][:] = 0
    a["teacher_logprobs"] = a["old_logprobs"]
    a["format_valid"][:] = 1
    np.testing.assert_array_equal(run("gtr-turbo", a), 0)
    a["turn_mask"][1:] = 0
    a["mask"][1:] = 0
    np.testing.assert_array_equal(run("gtr-turbo", a), 0)


def test_ties_merge_identity_cancellation_and_election():
    rng = np.random.default_rng(6)
    delta = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}
    same_tree = ties_merge([delta], [0.7], density=1.0)
    jax.tree.map(same, same_tree, delta)
    opposite = jax.tree.map(np.negative, delta)
    jax.tree.map(lambda x: same(x, 0.0), ties_merge([delta, opposite], [1.0, 1.0]))
    x = np.array([4.0, -1.0, 1.0, 0.5, -3.0])
    y = np.array([2.0, 3.0, -2.0, 0.1, 0.2])
    # 3 of 5 kept: x -> [4, -1, 0, 0, -3] (of the equal magnitudes the first), y -> [2, 3, -2, 0, 0]
    merged = ties_merge([x, y], [1.0, 3.0], density=0.6)
    same(merged, [(4 + 6) / 4, 3.0, -2.0, 0.0, -3.0])
    smallest = ties_merge([x], [1.0], density=0.01)
    same(smallest, [4.0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="one weight per checkpoint"):
        ties_merge([x, y], [1.0])


# --- hint-sd -------------------------------------------------------------------------------------


def hindsight():
    a = batch()
    a["target_mask"] = (np.random.default_rng(7).random((B, T)) < 0.5).astype(float)
    a["target_mask"][2] = 1  # a masked row is never a target
    return a


@pytest.mark.parametrize("add_tail", [True, False])
def test_hint_sd_is_zero_at_agreement_and_positive_elsewhere(add_tail):
    a = hindsight()
    assert run("hint-sd", a, top_k=3, add_tail=add_tail) > 1e-3
    a["teacher_logits"] = a["logits"] + 2.0
    value, grad = value_and_grad("hint-sd", a, "logits", top_k=3, add_tail=add_tail)
    same(value, 0.0)
    same(grad, 0.0)


@pytest.mark.parametrize("add_tail", [True, False])
def test_hint_sd_on_the_reduced_support(add_tail):
    a = hindsight()
    p, q = softmax(a["logits"]), softmax(a["teacher_logits"])
    d = np.zeros((B, T))
    for i, t in np.ndindex(B, T):
        top = np.argsort(-p[i, t])[:3]
        if add_tail:
            u, w = (np.append(x[i, t, top], 1 - x[i, t, top].sum()) for x in (p, q))
        else:
            u, w = (x[i, t, top] / x[i, t, top].sum() for x in (p, q))
        d[i, t] = kl(u, w)
    expected = token_mean(d, a["mask"] * a["target_mask"])
    same(run("hint-sd", a, top_k=3, add_tail=add_tail), expected)


def test_hint_sd_with_one_token_in_the_tail_is_the_full_reverse_kl():
    a = hindsight()
    full = token_mean(kl(softmax(a["logits"]), softmax(a["teacher_logits"])),
                      a["mask"] * a["target_mask"])  # fmt: skip
    same(run("hint-sd", a, top_k=V - 1), full)
    same(run("hint-sd", a, top_k=None), full)
    same(run("hint-sd", a, top_k=100), full, 1e-5)  # cut to V: the bounded tail adds about 1e-7


def test_hint_sd_touches_chosen_tokens_only():
    a = hindsight()
    _, grad = value_and_grad("hint-sd", a, "logits", top_k=3)
    chosen = a["mask"] * a["target_mask"] > 0
    np.testing.assert_array_equal(np.abs(grad).max(-1) > 0, chosen)
    a["target_mask"][:] = 0
    value, grad = value_and_grad("hint-sd", a, "logits", top_k=3)
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


# --- agentopsd -----------------------------------------------------------------------------------


def turns_of(a, seed=8):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    ids[1] = ids[1, ::-1]  # turns need not appear in their order
    a["turn_ids"] = (37 * ids - 40).astype(np.int32)  # gaps, negative and larger than T
    a["advantages"] = np.sign(a["advantages"])[:, :1] * np.full((B, T), 0.8)
    return a


def agentopsd_loop(a, v0=0.5, lam=0.5, band=0.2, eps=1e-6):
    out = np.zeros((B, T))
    v0 = np.clip(v0, 1e-4, 1 - 1e-4)
    for i in range(B):
        valid = a["mask"][i] > 0
        turns = np.unique(a["turn_ids"][i][valid])
        log_odds, before, q = np.log(v0 / (1 - v0)), v0, []
        for k in turns:
            here = valid & (a["turn_ids"][i] == k)
            log_odds += (a["teacher_logprobs"][i] - a["old_logprobs"][i])[here].sum()
            belief = np.clip(1 / (1 + np.exp(-log_odds)), 1e-6, 1 - 1e-6)
            q.append(belief - before)
            before = belief
        for k, q_k in zip(turns, q):
            z = (q_k - np.mean(q)) / (np.std(q) + eps)
            here = valid & (a["turn_ids"][i] == k)
            w = np.clip(1 + band * np.sign(a["advantages"][i]) * z, 1 - band, 1 + band)
            out[i, here] = (a["advantages"][i] * (1 - lam + lam * w))[here]
    return out


@pytest.mark.parametrize("v0", [0.5, 0.2, 0.0])
def test_agentopsd_against_a_loop_over_turns(v0):
    a = turns_of(batch())
    same(run("agentopsd", a, v0=v0, band=0.4), agentopsd_loop(a, v0=v0, band=0.4))


def test_agentopsd_is_the_advantage_without_weight_or_evidence():
    a = turns_of(batch())
    expected = a["advantages"] * a["mask"]
    same(run("agentopsd", a, lam=0.0), expected)
    same(run("agentopsd", a, band=0.0), expected)
    a["teacher_logprobs"] = a["old_logprobs"]
    np.testing.assert_array_equal(run("agentopsd", a, v0=0.3), expected)


def test_agentopsd_keeps_signs_and_ten_percent():
    a = turns_of(batch())
    factor = run("agentopsd", a)[a["mask"] > 0] / a["advantages"][a["mask"] > 0]
    assert factor.min() >= 0.9 - 1e-12 and factor.max() <= 1.1 + 1e-12
    assert factor.max() - factor.min() > 0.05


def one_episode(evidence, advantage):
    n = len(evidence)
    return {
        "advantages": np.full((1, n), advantage),
        "old_logprobs": np.full((1, n), -3.0),
        "teacher_logprobs": -3.0 + np.asarray(evidence)[None],
        "mask": np.ones((1, n)),
        "turn_ids": np.arange(n, dtype=np.int32)[None],
    }


def test_agentopsd_evidence_counts_less_once_the_belief_is_settled():
    value = run("agentopsd", one_episode([2.0, 2.0, 2.0], 1.0), band=0.9)[0]
    assert value[0] > value[1] > value[2]


def test_agentopsd_blames_the_largest_drop_in_a_failure():
    value = run("agentopsd", one_episode([0.3, -1.5, 0.2, -0.1], -1.0))[0]
    assert np.argmax(np.abs(value)) == 1


def test_agentopsd_only_sums_inside_a_turn_matter():
    a = turns_of(batch(hidden_rows=False))
    gap = a["teacher_logprobs"] - a["old_logprobs"]
    moved = gap.copy()
    for i in range(B):
        for k in np.unique(a["turn_ids"][i]):
            here = np.flatnonzero((a["turn_ids"][i] == k) & (a["mask"][i] > 0))
            moved[i, here] = gap[i, here[::-1]]
    assert np.abs(moved - gap).max() > 0.1
    other = {**a, "teacher_logprobs": a["old_logprobs"] + moved}
    same(run("agentopsd", other), run("agentopsd", a))


# --- adrs ----------------------------------------------------------------------------------------


def shaped_groups():
    a = batch()
    rng = np.random.default_rng(9)
    a["rewards"] = np.array([1.0, 0.0, 0.7, 0.2, 0.6, 0.5])
    a["group_ids"] = np.array([12, -3, 12, -3, 12, 40], np.int32)
    a["step_ids"] = (5 * np.sort(rng.integers(0, 4, (B, T)), axis=1)).astype(np.int32)
    return a


def adrs_loop(a, eta=0.02, tau=2.0, temperature=1.0, clip=0.2, adaptive_clip=True,
              renormalize=True, eps=1e-6):  # fmt: skip
    x, m, r, g = a["teacher_logprobs"], a["mask"] > 0, a["rewards"], a["group_ids"]
    q, conf = np.zeros((B, T)), np.full(B, np.nan)
    for i in range(B):
        if not m[i].any():
            continue
        conf[i] = x[i, m[i]].mean()
        for k in np.unique(a["step_ids"][i]):
            here = m[i] & (a["step_ids"][i] == k)
            if here.any():
                q[i, here] = x[i, here] - x[i, here].mean()
        q[i, m[i]] /= q[i, m[i]].std() + 1e-8
    al = 1 / (1 + np.exp(-(conf - np.nanmean(conf)) / temperature))
    al = np.where(np.isnan(al), 0.5, al)
    spreads = {k: r[g == k].std(ddof=1) for k in np.unique(g) if (g == k).sum() > 1}
    counted = sorted(s for s in spreads.values() if s >= 1e-6)
    med = counted[(len(counted) - 1) // 2] if counted else 1.0
    value = np.zeros((B, T))
    for k in np.unique(g):
        rows = np.flatnonzero(g == k)
        sd = spreads.get(k, 0.0)
        if len(rows) == 1:
            value[rows] = r[rows][:, None]
            continue
        value[rows] = ((r[rows] - r[rows].mean()) / (sd + eps))[:, None]
        if sd < 1e-6:
            continue
        w = al[rows]
        tva = (w * r[rows]).sum() / w.sum() - ((1 - w) * r[rows]).sum() / (1 - w).sum()
        s = q[rows] / (1 + np.exp(-tau * tva))
        if renormalize:
            valid = s[m[rows]]
            std = valid.std(ddof=1) if len(valid) > 1 else 0.0
            s = (s - valid.mean()) / std if std > 0 else 0 * s
        term = eta * s
        if clip is not None:
            bound = clip * min(1, sd / (med + eps)) if adaptive_clip else clip
            term = np.clip(term, -bound, bound)
        value[rows] += term
    return value * m


@pytest.mark.parametrize("hyper", [
    {},
    {"eta": 0.3},
    {"eta": 0.3, "renormalize": False},
    {"eta": 0.3, "adaptive_clip": False},
    {"eta": 0.5, "clip": None, "renormalize": False, "tau": 5.0, "temperature": 0.3},
])  # fmt: skip
def test_adrs_against_a_loop_over_groups(hyper):
    a = shaped_groups()
    same(run("adrs", a, **hyper), adrs_loop(a, **hyper))


def test_adrs_without_eta_is_the_group_advantage():
    a = shaped_groups()
    expected = np.asarray(losses.get("grpo-advantage")(a["rewards"], a["group_ids"]))
    expected = np.where(a["group_ids"] == 40, a["rewards"], expected)  # a group of one keeps r
    same(run("adrs", a, eta=0.0), expected[:, None] * a["mask"])


def test_adrs_ignores_a_shift_of_a_step():
    a = shaped_groups()
    moved = {**a, "teacher_logprobs": a["teacher_logprobs"] + 0.4 * (a["step_ids"] == 5)}
    same(run("adrs", moved, eta=0.3), run("adrs", a, eta=0.3))


def test_adrs_gate_cancels_only_when_renormalised():
    a = shaped_groups()
    same(run("adrs", a, eta=0.1, tau=0.1), run("adrs", a, eta=0.1, tau=9.0))
    free = {"eta": 0.1, "renormalize": False, "clip": None}
    outcome = run("adrs", a, eta=0.0)
    weak, strong = (np.abs(run("adrs", a, tau=t, **free) - outcome).max(-1) for t in (0.1, 9.0))
    for group in (12, -3):
        ratio = (strong / np.where(weak > 0, weak, 1))[(a["group_ids"] == group) & (weak > 0)]
        assert np.ptp(ratio) < 1e-9 and abs(ratio[0] - 1) > 1e-3  # one gate per group


def test_adrs_fades_where_confidence_opposes_the_reward():
    a = batch(hidden_rows=False)
    a["group_ids"] = np.zeros(B, np.int32)
    a["step_ids"] = np.zeros((B, T), np.int32)
    a["rewards"] = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    a["teacher_logprobs"] = -2 + 0.1 * a["advantages"]
    free = {"eta": 0.1, "renormalize": False, "clip": None}

    def gate(shift):
        moved = {**a, "teacher_logprobs": a["teacher_logprobs"] + shift * a["rewards"][:, None]}
        term = run("adrs", moved, **free) - run("adrs", moved, eta=0.0)
        even = run("adrs", moved, tau=0.0, **free) - run("adrs", moved, eta=0.0)
        return np.abs(term).sum() / np.abs(even).sum()

    assert gate(3.0) > 1.2 and gate(-3.0) < 0.8


def test_adrs_term_is_bounded_and_absent_in_groups_without_spread():
    a = shaped_groups()
    term = np.abs(run("adrs", a, eta=50.0) - run("adrs", a, eta=0.0)).max(-1)
    several, valid = a["group_ids"] != 40, a["mask"].sum(-1) > 1
    same(term[several & valid], 0.2, 1e-4)  # eps next to the median
    assert term.max() <= 0.2 + 1e-12
    np.testing.assert_array_equal(term[~several], 0)
    a["rewards"][[1, 3]] = 0.5
    np.testing.assert_array_equal(run("adrs", a, eta=50.0)[a["group_ids"] == -3], 0)


def test_adrs_tightens_the_bound_of_narrow_groups():
    a = batch(hidden_rows=False)
    a["group_ids"] = np.array([0, 0, 1, 1, 2, 2], np.int32)
    a["step_ids"] = np.zeros((B, T), np.int32)
    a["rewards"] = np.array([0.5, 0.6, 0.3, 0.7, 0.0, 1.0])  # spreads 1 : 4 : 10, median 4
    term = np.abs(run("adrs", a, eta=50.0) - run("adrs", a, eta=0.0)).max(-1)
    same(term, [0.05, 0.05, 0.2, 0.2, 0.2, 0.2], 1e-4)
    flat = np.abs(run("adrs", a, eta=50.0, adaptive_clip=False) - run("adrs", a, eta=0.0)).max(-1)
    same(flat, [0.2] * 6)


def test_adrs_centres_confidence_over_the_batch():
    a = shaped_groups()
    free = {"eta": 0.1, "renormalize": False, "clip": None}
    moved = {**a, "teacher_logprobs": a["teacher_logprobs"].copy()}
    moved["teacher_logprobs"][5] -= 4.0  # another prompt's confidence
    tight = a["group_ids"] == 12
    assert np.abs(run("adrs", moved, **free) - run("adrs", a, **free))[tight].max() > 1e-5
