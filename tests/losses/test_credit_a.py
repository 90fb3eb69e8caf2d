"""Properties that the papers state of themselves: losses/credit, AEM to MA-RLHF."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses.baselines.dapo import dapo_loss
from losses.baselines.gae import gae
from losses.credit import (
    attention_entropy_anchors,
    delta_credit,
    dense_irl,
    divergence_weighted,
    hicra,
    ma_rlhf,
)
from losses.credit.aem import aem_advantage
from losses.credit.attention_entropy_anchors import attention_entropy_advantage
from losses.credit.clip_cov import clip_cov_loss
from losses.credit.cort_rubric import cort_advantage
from losses.credit.delta_credit import delta_advantage
from losses.credit.dense_irl import irl_dense_advantage
from losses.credit.divergence_weighted import divergence_weighted_advantage, token_js
from losses.credit.egspo import egspo_loss
from losses.credit.entropy_exchange import entropy_exchange_advantage
from losses.credit.erpo import erpo_advantage
from losses.credit.flowtracer import attention_flow, flowtracer_advantage
from losses.credit.fspo_factuality import fspo_advantage
from losses.credit.gtpo_entropy import grpo_s_advantage, gtpo_advantage
from losses.credit.hicra import hicra_advantage
from losses.credit.high_entropy_tokens import high_entropy_loss
from losses.credit.kl_cov import kl_cov_loss
from losses.credit.ma_rlhf import ma_rlhf_advantage

B, T = 6, 9
GROUPS = np.array([7, -2, 7, -2, 30, 7])  # unsorted, with gaps, one group of one
MASK = np.ones((B, T))
MASK[0, 6:] = MASK[1, 3] = MASK[2, :2] = MASK[2, 5] = MASK[4, 4:] = MASK[5, 1:] = 0
VALID = MASK > 0
COUNTS = VALID.sum(1)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed, shape=(B, T), low=-2.5, high=0.0):
    return np.random.default_rng(seed).uniform(low, high, shape)


OLD = draw(0)
LOGPROBS = np.minimum(OLD + draw(1, low=-0.4, high=0.4), -1e-3)
REF = draw(2)
ENTROPY = draw(3, low=0.0, high=3.0)
ADVANTAGES = np.repeat(np.random.default_rng(4).normal(size=(B, 1)), T, 1)
TURNS = np.sort(np.random.default_rng(5).integers(0, 4, (B, T)), axis=1)


def close(actual, expected, rtol=1e-9, atol=1e-11):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def unchanged(out, advantages=None):
    """The advantages come back as they went in, 0 where masked."""
    np.testing.assert_array_equal(out, (ADVANTAGES if advantages is None else advantages) * MASK)


def weights(out, advantages=None):
    """What the valid tokens' advantages were multiplied by; NaN where masked."""
    given = ADVANTAGES if advantages is None else advantages
    return np.where(VALID, np.asarray(out) / given, np.nan)


def standard(x, eps):
    """Standard scores of a flat array, by the papers' common rule."""
    if len(x) < 2 or x.max() - x.min() <= 1e-6:
        return np.zeros_like(x)
    return (x - x.mean()) / (x.std() + eps)


def groups():
    return [GROUPS == g for g in np.unique(GROUPS)]


# ---------------------------------------------------------------------------------------------
# AEM


def aem(advantages=ADVANTAGES, entropy=ENTROPY, **hyper):
    return aem_advantage(advantages, entropy, TURNS, GROUPS, MASK, **hyper)


def test_aem_without_strength_changes_nothing():
    close(aem(lam=0.0), ADVANTAGES * MASK, rtol=1e-14)


def test_aem_weights_average_one_over_the_turns_of_a_group_and_keep_signs():
    w = weights(aem(lam=1.7))
    assert np.nanmin(w) > 0
    for rows in groups():
        turns = [
            w[i][VALID[i] & (TURNS[i] == k)][0]
            for i in np.flatnonzero(rows)
            for k in np.unique(TURNS[i][VALID[i]])
        ]
        close(np.mean(turns), 1.0)


def test_aem_weight_is_the_turns_own_and_reads_no_masked_token():
    out = aem()
    w = weights(out)
    for i in range(B):
        for k in np.unique(TURNS[i][VALID[i]]):
            close(np.ptp(w[i][VALID[i] & (TURNS[i] == k)]), 0.0)
    np.testing.assert_array_equal(aem(entropy=np.where(VALID, ENTROPY, 99.0)), out)
    scrambled = np.where(VALID, TURNS, 5)
    same = aem_advantage(ADVANTAGES, ENTROPY, scrambled, GROUPS, MASK)
    np.testing.assert_array_equal(same, out)


def test_aem_turns_of_equal_mean_entropy_and_different_length_weigh_alike():
    entropy = ENTROPY.copy()
    turns = TURNS.copy()
    turns[0], turns[1] = [0] * 2 + [1] * 7, 0
    entropy[0, :2], entropy[0, 2:6] = [0.4, 1.0], [0.1, 1.3, 0.6, 0.8]
    w = weights(aem_advantage(ADVANTAGES, entropy, turns, GROUPS, MASK))
    close(w[0, 0], w[0, 3])
    assert abs(w[0, 0] - w[2, 8]) > 0.05


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_aem_moves_entropy_further_than_uniform_credit(advantage):
    """A confident and an uncertain state; the advantage falls on the confident top action."""
    logits = jnp.array([[3.0, 0.0, 0.0], [0.3, 0.0, 0.1]])

    def mean_entropy(logits):
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(jnp.exp(log_p) * log_p, axis=-1))

    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[None]

    def change(lam):
        a = aem_advantage([[advantage, 0.0]], entropy, [[0, 1]], [0], [[1, 1]], lam=lam)
        grad = jax.grad(lambda x: jnp.sum(a[0] * jax.nn.log_softmax(x)[:, 0]))(logits)
        return mean_entropy(logits + 0.1 * grad) - mean_entropy(logits)

    assert -advantage * change(1.0) > -advantage * change(0.0) > 0


def test_aem_ignores_shift_and_scale_of_entropy():
    close(aem(entropy=0.3 * ENTROPY + 2.0), aem(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# Attention entropy


CONTEXT = np.arange(T)[None] + np.array([5, 9, 12, 7, 5, 6])[:, None]


def anchors(entropy=None, context=CONTEXT, **hyper):
    entropy = ENTROPY if entropy is None else entropy
    return attention_entropy_advantage(ADVANTAGES, entropy, context, MASK, **hyper)


def test_attention_entropy_without_sharpness_changes_nothing():
    unchanged(anchors(kappa_start=0.0, kappa_end=0.0))
    unchanged(anchors(kappa_start=1.0, kappa_end=0.0, progress=3.0))


def test_attention_entropy_weights_average_one_and_keep_signs():
    for progress in (0.0, 0.4, 1.0):
        w = weights(anchors(progress=progress))
        assert np.nanmin(w) > 0
        close(np.nanmean(w, axis=1), np.ones(B))


def test_attention_entropy_is_measured_against_the_context():
    u = attention_entropy_anchors.normalised_attention_entropy
    close(u(np.log(CONTEXT), 1.0 * CONTEXT, MASK), MASK)
    close(u(np.zeros((B, T)), 1.0 * CONTEXT, MASK), np.zeros((B, T)))
    squared = anchors(entropy=2 * ENTROPY, context=CONTEXT**2)
    close(squared, anchors())


def test_attention_entropy_weights_are_bounded():
    kappa = 0.8
    entropy = ENTROPY.copy()
    entropy[1, 4] = 40.0
    u = entropy / np.log(CONTEXT)
    w = weights(anchors(entropy=entropy, kappa_start=kappa))
    for i in range(B):
        row = u[i][VALID[i]]
        raw = np.exp(-kappa * np.clip(standard(row, 1e-8), -2, 2))
        close(w[i][VALID[i]], raw / raw.mean())
        assert np.nanmax(w[i]) / np.nanmin(w[i]) <= np.exp(4 * kappa)
    assert np.nanmin(w[1]) == w[1, 4]


def test_attention_entropy_subsets_align_with_the_full_gradient():
    """Tokens share a gradient direction, drowned the more the more diffuse their attention is."""
    rng = np.random.default_rng(6)
    length, size = 400, 16
    entropy = rng.uniform(0.1, 1.0, (1, length))
    noise = rng.normal(size=(length, size)) * 12 * entropy[0][:, None] ** 2
    features = rng.normal(size=size) + noise
    context, mask = np.full((1, length), 50), np.ones((1, length))

    def gradient(kept):
        def loss(w):
            return -jnp.sum(kept * jax.nn.log_sigmoid(features @ w))

        return np.asarray(jax.grad(loss)(jnp.zeros(size)))

    def cosine(which):
        subset = attention_entropy_anchors.attention_entropy_subset(
            entropy, context, mask, which=which, key=jax.random.key(1)
        )
        assert subset.sum() == 80
        a, b = gradient(np.asarray(subset[0])), gradient(np.ones(length))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    assert cosine("random") > 0.5
    assert cosine("anchor") > cosine("explorer")


def test_attention_entropy_subset_of_everything_is_the_mask():
    for which in attention_entropy_anchors.SUBSETS:
        subset = attention_entropy_anchors.attention_entropy_subset(
            ENTROPY, CONTEXT, MASK, ratio=1.0, which=which, key=jax.random.key(0)
        )
        np.testing.assert_array_equal(subset, MASK)
    subset = attention_entropy_anchors.attention_entropy_subset(
        ENTROPY, CONTEXT, MASK, ratio=0.3, which="explorer"
    )
    np.testing.assert_array_equal(subset.sum(1), np.ceil(0.3 * COUNTS - 1e-9))
    with pytest.raises(ValueError, match="anchor"):
        attention_entropy_anchors.attention_entropy_subset(ENTROPY, CONTEXT, MASK, which="anchors")


# ---------------------------------------------------------------------------------------------
# Clip-Cov and KL-Cov


SCORES = draw(7, low=0.0, high=1.0)
TOKEN_ADVANTAGES = np.random.default_rng(8).normal(size=(B, T))


def covariances(logprobs=LOGPROBS, advantages=TOKEN_ADVANTAGES):
    return (advantages - advantages[VALID].mean()) * (logprobs - logprobs[VALID].mean())


def gradient(loss, logprobs=LOGPROBS, old=OLD, **hyper):
    return np.asarray(
        jax.grad(lambda x: loss(x, old, TOKEN_ADVANTAGES, MASK, **hyper)[0])(jnp.asarray(logprobs))
    )


def test_clip_cov_without_candidates_is_dapo():
    window = {"clip_low": 0.1, "clip_high": 0.15}
    band = {"cov_low": 50.0, "cov_high": 60.0, "select_scores": SCORES}
    value = clip_cov_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, **band, **window)[0]
    close(value, dapo_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, **window)[0])
    close(gradient(clip_cov_loss, **band, **window), gradient(dapo_loss, **window))


@pytest.mark.parametrize("ratio_cov,band", [(0.13, (0.1, 2.0)), (0.9, (0.1, 2.0)), (1e-4, (0, 9))])
def test_clip_cov_detaches_exactly_k_candidates(ratio_cov, band):
    window = {"clip_low": 0.1, "clip_high": 0.15}
    full = gradient(dapo_loss, **window)
    hyper = {"ratio_cov": ratio_cov, "cov_low": band[0], "cov_high": band[1], **window}
    left = gradient(clip_cov_loss, select_scores=SCORES, **hyper)
    c = covariances()
    candidates = (full != 0) & (c > band[0]) & (c < band[1])
    k = max(int(ratio_cov * VALID.sum()), 1)
    lowest = np.sort(SCORES[candidates])[:k]
    lost = (full != 0) & (left == 0)
    assert candidates.sum() > 2
    np.testing.assert_array_equal(lost, candidates & np.isin(SCORES, lowest))
    close(left[~lost], full[~lost])


def test_clip_cov_never_drops_outliers():
    c = covariances()
    high = np.sort(c[VALID])[-6]
    hyper = {"ratio_cov": 1.0, "cov_low": 0.0, "cov_high": high, "select_scores": SCORES}
    kept = gradient(clip_cov_loss, **hyper)[VALID & (c >= high)]
    assert len(kept) == 6 and np.all(kept != 0)


def bandit_entropy(loss, steps=60):
    """Entropy of a ten-armed softmax policy after GRPO-like steps on its own samples."""
    rewards = jnp.linspace(0.0, 1.0, 10)
    mask, length = jnp.ones((64, 1)), 64

    def step(logits, key):
        log_p = jax.nn.log_softmax(logits)
        draws, scores = jax.random.split(key)
        arms = jax.random.categorical(draws, logits, shape=(length,))
        r = rewards[arms]
        advantages = ((r - r.mean()) / (r.std() + 1e-6))[:, None]
        old = log_p[arms][:, None]
        uniform = jax.random.uniform(scores, (length, 1))

        def objective(x):
            current = jax.nn.log_softmax(x)[arms][:, None]
            return loss(current, old, advantages, mask, uniform)[0]

        for _ in range(2):
            logits = logits - 0.25 * jax.grad(objective)(logits)
        return logits, None

    keys = jax.random.split(jax.random.key(0), steps)
    log_p = jax.nn.log_softmax(jax.jit(lambda k: jax.lax.scan(step, jnp.zeros(10), k)[0])(keys))
    return float(-jnp.sum(jnp.exp(log_p) * log_p))


def test_clip_cov_holds_entropy_above_the_plain_loss():
    window = {"clip_low": 0.2, "clip_high": 0.2}
    band = {"ratio_cov": 0.3, "cov_low": 0.3, "cov_high": 5.0}
    plain = bandit_entropy(lambda x, old, a, m, u: dapo_loss(x, old, a, m, **window))
    clip = bandit_entropy(lambda x, old, a, m, u: clip_cov_loss(x, old, a, m, u, **band, **window))
    assert clip > plain + 0.2 > 0.2


def test_kl_cov_without_weight_is_the_unclipped_policy_gradient():
    expected = -np.mean((TOKEN_ADVANTAGES * np.exp(LOGPROBS - OLD))[VALID])
    close(kl_cov_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, kl_coef=0.0)[0], expected)
    far = OLD - 60.0 * np.sign(TOKEN_ADVANTAGES) * 0.5
    expected = np.where(VALID, -TOKEN_ADVANTAGES * np.exp(far - OLD), 0) / VALID.sum()
    close(gradient(kl_cov_loss, logprobs=far, kl_coef=0.0), expected)


def test_kl_cov_on_policy_is_reinforce():
    close(gradient(kl_cov_loss, old=LOGPROBS), -TOKEN_ADVANTAGES * MASK / VALID.sum())


@pytest.mark.parametrize("ratio_cov", [1e-4, 0.12, 0.5, 1.0])
def test_kl_cov_penalises_exactly_the_k_tokens_of_largest_covariance(ratio_cov):
    k = max(int(ratio_cov * VALID.sum() + 1e-9), 1)
    added = gradient(kl_cov_loss, ratio_cov=ratio_cov) - gradient(kl_cov_loss, kl_coef=0.0)
    c = np.where(VALID, covariances(), -np.inf)
    chosen = c >= np.sort(c[VALID])[-k]
    assert chosen.sum() == k
    close(added, np.where(chosen, np.sign(LOGPROBS - OLD), 0) / VALID.sum(), atol=1e-9)


# ---------------------------------------------------------------------------------------------
# CoRT


def cort(counterfactual=REF, advantages=ADVANTAGES, **hyper):
    return cort_advantage(advantages, OLD, counterfactual, MASK, **hyper)


def test_cort_without_strength_or_contrast_changes_nothing():
    unchanged(cort(strength=0.0))
    unchanged(cort(counterfactual=OLD))
    unchanged(cort(counterfactual=OLD - 0.7))


def test_cort_keeps_each_responses_total_and_signs():
    out = np.asarray(cort(strength=0.9, temperature=0.3))
    close(out.sum(1), COUNTS * ADVANTAGES[:, 0])
    assert np.nanmin(weights(out)) > 0


def test_cort_reads_relative_dependence_only():
    shifts = np.arange(B)[:, None] - 2.0
    close(cort(counterfactual=REF + shifts), cort())
    scaled = OLD - 3.0 * (OLD - REF)
    close(cort(counterfactual=scaled, eps=0.0), cort(eps=0.0))


def test_cort_finds_the_tokens_that_realise_the_rubric():
    """The rubric asks for word 3: a word model that was told so says it more often."""
    rng = np.random.default_rng(9)
    plain = rng.normal(size=8)
    told = plain + 3.0 * (np.arange(8) == 3)
    told, plain = (x - np.log(np.exp(x).sum()) for x in (told, plain))
    words = rng.choice(8, size=(B, T), p=np.exp(told))
    words[:, 0], words[:, 2] = 3, 5
    w = weights(cort_advantage(ADVANTAGES, told[words], plain[words], MASK))
    assert np.mean(w[VALID & (words == 3)]) > 1 > np.mean(w[VALID & (words != 3)])


def test_cort_pushes_dependent_tokens_of_bad_responses_down_more():
    out = np.asarray(cort(advantages=-np.ones((B, T))))
    for i in range(B):
        d = (OLD - REF)[i][VALID[i]]
        if COUNTS[i] > 1:
            assert np.all(np.diff(out[i][VALID[i]][np.argsort(d)]) <= 0)
            assert out[i][VALID[i]][d.argmax()] < -1


# ---------------------------------------------------------------------------------------------
# DelTA


HIDDEN = np.random.default_rng(10).normal(size=(B, T, 5))
SIGNED = ADVANTAGES.copy()
SIGNED[3] = 0.0


def delta(advantages=SIGNED, old=OLD, hidden=HIDDEN, **hyper):
    return np.asarray(delta_advantage(advantages, old, hidden, MASK, **hyper))


def delta_by_loops(refine, lam_min=0.8, lam_max=1.2, own_only=False):
    v = (1 - np.exp(OLD))[..., None] * HIDDEN
    sides = {s: VALID & (np.sign(SIGNED) == s) for s in (1, -1)}
    size = np.abs(SIGNED)

    def centroid(s, alpha):
        w = (size * alpha)[sides[s]]
        return (w[:, None] * v[sides[s]]).sum(0) / max(w.sum(), 1e-8)

    def margins(mu):
        d = np.zeros((B, T))
        for s, inside in sides.items():
            far = ((v - (0 if own_only else mu[-s])) ** 2).sum(-1) * (not own_only)
            d[inside] = (far - ((v - mu[s]) ** 2).sum(-1))[inside]
        return d

    def spread(d):
        g = np.ones((B, T))
        for inside in sides.values():
            g[inside] = np.sqrt(max((d[inside] ** 2).mean() - d[inside].mean() ** 2, 1e-8))
        return g

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    d = margins({s: centroid(s, np.ones((B, T))) for s in sides})
    g = spread(d)
    for _ in range(refine):
        alpha = sigmoid(d / g)
        g = spread(d)
        d = margins({s: centroid(s, alpha) for s in sides})
    lam = np.where(SIGNED == 0, lam_min, lam_min + (lam_max - lam_min) * sigmoid(d / g))
    return MASK * SIGNED * lam * VALID.sum() / lam[VALID].sum()


@pytest.mark.parametrize("refine", [0, 1, 2])
def test_delta_equals_the_definition_by_loops(refine):
    close(delta(k_refine=refine), delta_by_loops(refine))


def test_delta_of_a_single_range_changes_nothing_and_else_averages_one():
    close(delta(lam_min=0.9, lam_max=0.9), SIGNED * MASK, rtol=1e-14)
    lam = weights(delta(), np.where(SIGNED == 0, 1.0, SIGNED))
    assert np.all(lam[VALID & (SIGNED != 0)] > 0)
    full = delta(advantages=ADVANTAGES) / ADVANTAGES
    close(full[VALID].mean(), 1.0)


def test_delta_of_equal_tokens_changes_nothing():
    same = delta(ADVANTAGES, np.full((B, T), -0.4), np.ones((B, T, 5)))
    close(same, ADVANTAGES * MASK, rtol=1e-12)


def test_delta_of_opposite_advantages_has_the_same_weights():
    close(delta(-SIGNED), -delta())


def test_delta_certain_tokens_of_a_side_weigh_alike():
    old = OLD.copy()
    old[0, 1] = old[2, 3] = old[1, 0] = old[5, 0] = 0.0
    lam = delta(old=old) / np.where(SIGNED == 0, 1, SIGNED)
    for sign in (1, -1):
        certain = lam[VALID & (old == 0) & (np.sign(SIGNED) == sign)]
        assert len(certain) and np.ptp(certain) < 1e-12


def test_delta_ignores_scale_and_rotation_of_hidden_states():
    rotation = np.linalg.qr(np.random.default_rng(11).normal(size=(5, 5)))[0]
    close(delta(hidden=HIDDEN @ rotation), delta())
    close(delta(hidden=37.0 * HIDDEN), delta(), rtol=1e-6)


def test_delta_reads_the_other_sides_centroid():
    assert np.max(np.abs(delta() - delta_by_loops(1, own_only=True))) > 0.01


def test_delta_without_one_side_uses_a_centroid_at_zero():
    one_sided = np.abs(SIGNED) + 0.1
    out = delta(one_sided)
    v = (1 - np.exp(OLD))[..., None] * HIDDEN
    mu = (one_sided[VALID][:, None] * v[VALID]).sum(0) / one_sided[VALID].sum()
    d = (v**2).sum(-1) - ((v - mu) ** 2).sum(-1)
    lam = 0.8 + 0.4 / (1 + np.exp(-d / d[VALID].std()))
    close(delta(one_sided, k_refine=0), MASK * one_sided * lam / lam[VALID].mean())
    assert np.all(np.isfinite(out))
    assert delta_credit.FLOOR == 1e-8


# ---------------------------------------------------------------------------------------------
# Dense IRL


PAIRS = np.array([7, -2, 7, -2, -2, 7])
TOKEN_REWARDS = np.random.default_rng(12).normal(size=(B, T))


def irl(rewards=TOKEN_REWARDS, **hyper):
    return np.asarray(irl_dense_advantage(rewards, MASK, PAIRS, **hyper))


def last_rewards(rewards=TOKEN_REWARDS):
    return np.array([rewards[i, np.flatnonzero(VALID[i])[-1]] for i in range(B)])


def affine(rewards=TOKEN_REWARDS, eps=1e-4):
    last, out = last_rewards(rewards), np.zeros((B, T))
    for g in np.unique(PAIRS):
        rows = PAIRS == g
        out[rows] = (rewards[rows] - last[rows].mean()) / (last[rows].std(ddof=1) + eps)
    return out * MASK


@pytest.mark.parametrize("gamma", [0.0, 1e-3])
def test_irl_without_discounted_sums_is_affine_in_the_rewards(gamma):
    close(irl(gamma=gamma), affine())


def test_irl_of_a_constant_row_is_linear_in_the_remaining_length():
    rewards = np.repeat(TOKEN_REWARDS[:, :1], T, 1)
    out, a = irl(rewards, gamma=1.0), affine(rewards)
    for i in range(B):
        close(out[i][VALID[i]], a[i][VALID[i]] * np.arange(COUNTS[i], 0, -1))


def test_irl_ignores_shift_and_scale_of_the_rewards():
    close(irl(TOKEN_REWARDS + 5.0), irl(), rtol=1e-8)
    close(irl(3.0 * TOKEN_REWARDS, eps=0.0), irl(eps=0.0))


def test_irl_reward_before_the_end_moves_only_itself_and_what_came_before():
    moved = TOKEN_REWARDS.copy()
    moved[1, 4] += 2.0
    changed = ~np.isclose(irl(moved), irl(), rtol=1e-12)
    expected = np.zeros((B, T), bool)
    expected[1, :5] = VALID[1, :5]
    np.testing.assert_array_equal(changed, expected)


def test_irl_group_of_equal_ends_divides_by_eps_alone():
    rewards = TOKEN_REWARDS.copy()
    for i in range(B):
        rewards[i, np.flatnonzero(VALID[i])[-1]] = 0.1
    close(irl(rewards, gamma=0.0), (rewards - 0.1) / 1e-4 * MASK)


def test_irl_discriminator_falls_from_the_wrong_step_on():
    """Traces of sums; the features say whether this step, and all steps so far, are right."""
    rng = np.random.default_rng(13)
    n, length = 40, 6
    right = np.ones((2 * n, length))
    wrong_at = rng.integers(1, length, n)
    right[n + np.arange(n), wrong_at] = 0
    so_far = np.cumprod(right, axis=1)
    noise = rng.normal(size=(2 * n, length))
    features = np.stack([np.ones_like(right), right, so_far, noise], axis=-1)
    labels = np.repeat([1, 0], n)
    mask, each = np.ones_like(right), np.ones(2 * n)

    def loss(w):
        return dense_irl.irl_discriminator_loss(features @ w, mask, labels, each)[0]

    descend = jax.jit(lambda w: jax.lax.fori_loop(0, 300, lambda _, w: w - jax.grad(loss)(w), w))
    logits = features @ np.asarray(descend(jnp.zeros(4)))
    damaged = logits[n:]
    after = np.arange(length)[None] >= wrong_at[:, None]
    assert damaged[~after].mean() - damaged[after].mean() > 1.0
    assert logits[:n].mean() > damaged[after].mean() + 1.0


@pytest.mark.parametrize("kind", ["bce", "wgan"])
def test_irl_discriminator_loss_equals_the_definition(kind):
    labels, each = np.array([1, 0, 0, 1, 0, 0]), np.array([4.0, 1, 1, 4, 0.5, 1])
    d = TOKEN_REWARDS
    value = dense_irl.irl_discriminator_loss(jnp.asarray(d), MASK, labels, each, loss=kind)[0]
    if kind == "wgan":
        expert = (labels == 1)[:, None] & VALID
        close(value, d[VALID & ~expert].mean() - d[expert].mean())
        return
    y = np.where(labels == 1, 0.95, 0.05)[:, None]
    bce = np.logaddexp(0, d) - y * d
    rows = np.array([bce[i][VALID[i]].mean() for i in range(B)])
    close(value, (each * rows).sum() / each.sum())
    nothing = dense_irl.irl_discriminator_loss(jnp.asarray(d), 0 * MASK, labels, each)[0]
    assert nothing == 0


# ---------------------------------------------------------------------------------------------
# Divergence weights


def diverged(logprobs=LOGPROBS, old=OLD, **hyper):
    return divergence_weighted_advantage(logprobs, old, ADVANTAGES, MASK, **hyper)


def test_divergence_weights_are_one_right_after_the_rollout():
    unchanged(diverged(logprobs=OLD))


def test_divergence_weight_without_slope_is_one_and_asymmetric_in_the_log_ratio():
    unchanged(diverged(alpha=0.0))
    for d, kl in ((1.0, np.e - 2), (-1.0, 1 / np.e)):
        w = weights(diverged(logprobs=OLD + d, scale=0.5, alpha=2.0))
        close(w[VALID], np.full(VALID.sum(), 1 + 0.5 * (1 / (1 + np.exp(-2 * kl)) - 0.5)))


@pytest.mark.parametrize("alpha", [10.0, -10.0])
def test_divergence_weights_lie_on_one_side_of_one(alpha):
    w = weights(diverged(scale=0.8, alpha=alpha))[VALID]
    assert np.all((w >= 1) & (w < 1.4) if alpha > 0 else (w > 0.6) & (w <= 1))


def test_divergence_weight_passes_no_gradient():
    window = {"clip_low": None, "clip_high": None}

    def loss(x):
        return dapo_loss(x, OLD, diverged(logprobs=x), MASK, **window)[0]

    plain = gradient_of_plain(window)
    close(jax.grad(loss)(jnp.asarray(LOGPROBS)), plain * np.nan_to_num(weights(diverged())))


def gradient_of_plain(window):
    return np.asarray(
        jax.grad(lambda x: dapo_loss(x, OLD, ADVANTAGES, MASK, **window)[0])(jnp.asarray(LOGPROBS))
    )


def test_token_js_is_a_bounded_symmetric_divergence():
    a, b = (np.random.default_rng(s).normal(size=(B, T, 4)) for s in (14, 15))
    close(token_js(a, a, MASK), np.zeros((B, T)), atol=1e-15)
    close(token_js(a, b, MASK), token_js(b, a, MASK))
    assert np.all(np.asarray(token_js(a, b, MASK))[VALID] > 0)
    one_hot = np.where(np.arange(4) == 1, 0.0, -1e9) * np.ones((B, T, 1))
    other = np.where(np.arange(4) == 2, 0.0, -1e9) * np.ones((B, T, 1))
    close(token_js(one_hot, other, MASK), np.log(2) * MASK)


def test_cross_sampling_reproduces_either_model():
    rng = np.random.default_rng(16)
    primary, intervention = (jnp.asarray(2 * rng.normal(size=(64, 5))) for _ in range(2))
    keys, swaps = jax.random.split(jax.random.key(2), 64), jnp.zeros(64, jnp.int32)

    def run(first, second, **hyper):
        return divergence_weighted.cross_sample_step(first, second, swaps, keys, **hyper)

    own, none = run(primary, intervention, threshold=np.log(2))
    np.testing.assert_array_equal(own, run(primary, primary)[0])
    np.testing.assert_array_equal(own, run(primary, intervention, budget=0, threshold=-1.0)[0])
    assert none.sum() == 0
    other, counted = run(primary, intervention, threshold=-1.0)
    np.testing.assert_array_equal(other, run(intervention, intervention)[0])
    np.testing.assert_array_equal(counted, np.asarray(own) != np.asarray(other))
    assert 0 < counted.sum() < 64


# ---------------------------------------------------------------------------------------------
# EGSPO


def egspo(x, old, advantages, mask, **hyper):
    return egspo_loss(x, old, ENTROPY, advantages, mask, **hyper)


def uncertain(rho):
    k = max(1, int(np.ceil(rho * VALID.sum() - 1e-9)))
    return VALID & (np.sort(ENTROPY[VALID])[-k] <= ENTROPY)


WINDOW = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize("hyper", [{"rho": 1.0}, {"phi": 1.0}])
def test_egspo_with_every_token_in_full_is_ppo(hyper):
    close(
        egspo(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, **hyper)[0],
        dapo_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, **WINDOW)[0],
    )
    close(gradient(egspo, **hyper), gradient(dapo_loss, **WINDOW))


def test_egspo_without_attenuated_part_trains_uncertain_tokens_only():
    full = gradient(dapo_loss, **WINDOW)
    close(gradient(egspo, phi=0.0, rho=0.3), np.where(uncertain(0.3), full, 0))


def test_egspo_chord_attenuates_by_p_one_minus_p_and_keeps_signs():
    full, p = gradient(dapo_loss, **WINDOW), np.exp(LOGPROBS)
    ours = gradient(egspo)
    close(ours, np.where(uncertain(0.2), full, p * (1 - p) * full))
    bad = VALID & ~uncertain(0.2) & (TOKEN_ADVANTAGES < 0) & (full != 0)
    assert bad.any() and np.all(ours[bad] > 0)


def test_egspo_confident_token_gets_a_hundredth_of_the_update():
    logprobs = np.log([[0.99, 0.6, 0.7, 0.5]])
    entropy = np.array([[0.05, 1.0, 0.4, 0.5]])

    def loss(x):
        return egspo_loss(x, logprobs, entropy, np.ones((1, 4)), np.ones((1, 4)), rho=0.25)[0]

    grad = jax.grad(loss)(jnp.asarray(logprobs))[0]
    assert 0 < grad[0] / grad[1] < 0.01


def test_egspo_differentiating_the_attenuation_would_show_everywhere():
    low = VALID & ~uncertain(0.2)

    def leaky(x):
        p = jnp.exp(x)
        weight = jnp.where(low, p * (1 - p), 1.0)
        ratio = jnp.exp(x - OLD)
        term = jnp.minimum(ratio * TOKEN_ADVANTAGES, jnp.clip(ratio, 0.8, 1.2) * TOKEN_ADVANTAGES)
        return -jnp.sum(MASK * weight * term) / VALID.sum()

    wrong = np.asarray(jax.grad(leaky)(jnp.asarray(LOGPROBS)))
    assert np.min(np.abs(wrong - gradient(egspo))[low]) > 1e-6


def test_egspo_gate_keeps_all_ties():
    entropy = np.where(np.arange(T) % 2, 1.0, 0.2) * np.ones((B, 1))
    out = egspo_loss(LOGPROBS, OLD, entropy, TOKEN_ADVANTAGES, MASK, rho=0.1, phi=0.0)[1]
    close(out["kept_fraction"], np.mean(entropy[VALID] == 1.0))


# ---------------------------------------------------------------------------------------------
# Entropy exchange


def exchange(old=OLD, advantages=ADVANTAGES, ids=PAIRS, **hyper):
    return entropy_exchange_advantage(advantages, old, ids, MASK, **hyper)


def log_perplexity(old=OLD):
    return np.array([-old[i][VALID[i]].mean() for i in range(B)])


def test_exchange_without_size_changes_nothing():
    unchanged(exchange(mode="ppl", alpha=0.0))
    unchanged(exchange(mode="position", gamma=0.0))
    unchanged(exchange(mode="both", gamma=0.0, alpha=0.0))
    with pytest.raises(ValueError, match="position"):
        exchange(mode="positon")


def test_exchange_low_perplexity_gains_and_factors_average_one():
    factor = weights(exchange(alpha=0.2))
    ppl = log_perplexity()
    for g in np.unique(PAIRS):
        rows = np.flatnonzero(PAIRS == g)
        f = np.nanmean(factor[rows], axis=1)
        close(f, 1 - 0.2 * standard(ppl[rows], 1e-8))
        close(f.mean(), 1.0)
        np.testing.assert_array_equal(f > 1, ppl[rows] < ppl[rows].mean())


def test_exchange_position_term_grows_along_the_response():
    gamma = 0.3
    out = np.abs(np.asarray(exchange(mode="position", gamma=gamma)))
    for i in range(B):
        added = (out - np.abs(ADVANTAGES))[i][VALID[i]]
        assert np.all(added > gamma / 2)
        assert np.all(added <= gamma / (1 + np.exp(-1)) + 1e-12)
        assert np.all(np.diff(added) > 0)
    signs = np.sign(exchange(mode="position", gamma=gamma))
    np.testing.assert_array_equal(signs, np.sign(ADVANTAGES) * MASK)


def test_exchange_two_responses_score_plus_and_minus_one():
    ids = np.array([1, 5, 1, 5, 9, 9])
    factor = np.nanmean(weights(exchange(ids=ids, alpha=0.1)), axis=1)
    close(np.sort(factor), np.repeat([0.9, 1.1], 3), rtol=1e-6)


def test_exchange_needs_a_large_alpha_to_flip_a_sign():
    score = (1 - np.nanmean(weights(exchange(alpha=1.0)), axis=1)) / 1.0
    assert score.max() > 1
    for alpha in (0.5 / score.max(), 1.5 / score.max()):
        flipped = np.nanmin(weights(exchange(alpha=alpha))) < 0
        assert flipped == (alpha * score.max() > 1)
    assert np.nanmin(weights(exchange())) > 0


def test_exchange_masked_gap_does_not_advance_the_position():
    out = np.asarray(exchange(mode="position", gamma=0.2, direction=-2.0))
    for i in range(B):
        rank = np.arange(1, COUNTS[i] + 1) / COUNTS[i]
        added = np.sign(ADVANTAGES[i, 0]) * 0.2 / (1 + np.exp(2.0 * rank))
        close(out[i][VALID[i]], ADVANTAGES[i, 0] + added)


# ---------------------------------------------------------------------------------------------
# ERPO


def erpo(old=OLD, ref=REF, entropy=ENTROPY, advantages=ADVANTAGES, **hyper):
    return erpo_advantage(advantages, entropy, old, ref, GROUPS, MASK, **hyper)


def erpo_parts(buckets=4, gamma=1.0, eps=1e-6):
    """The gate W and the stage-wise score sn, by loops."""
    gate, score, stage = np.full((B, T), 0.5), np.zeros((B, T)), np.full((B, T), -1)
    for i in range(B):
        for j, t in enumerate(np.flatnonzero(VALID[i])):
            stage[i, t] = j * buckets // COUNTS[i]
    for rows in groups():
        pool = rows[:, None] & VALID
        gate[pool] = 1 / (1 + np.exp(-gamma * standard(ENTROPY[pool], eps)))
        for k in range(buckets):
            pool = rows[:, None] & (stage == k)
            score[pool] = standard((OLD - REF)[pool], eps)
    return gate, score


def test_erpo_equals_the_definition_by_loops():
    gate, score = erpo_parts(buckets=3, gamma=1.6)
    expected = MASK * (ADVANTAGES + 0.7 * gate * np.sign(ADVANTAGES) * score)
    close(erpo(buckets=3, gamma=1.6, lam=0.7), expected)


def test_erpo_without_weight_or_drift_changes_nothing():
    unchanged(erpo(lam=0.0))
    unchanged(erpo(ref=OLD))
    unchanged(erpo(advantages=np.zeros((B, T))), np.zeros((B, T)))


def test_erpo_gate_grows_with_entropy_within_a_group():
    gate = np.asarray(erpo(advantages=np.ones((B, T)), lam=1.0) - 1.0)
    _, score = erpo_parts()
    with np.errstate(invalid="ignore", divide="ignore"):
        gate = np.where(VALID & (score != 0), gate / score, np.nan)
    for rows in groups():
        pool = rows[:, None] & ~np.isnan(gate)
        values = gate[pool][np.argsort(ENTROPY[pool])]
        assert np.all((values > 0) & (values < 1)) and np.all(np.diff(values) > 0)
    flat = np.asarray(erpo(advantages=np.ones((B, T)), entropy=np.ones((B, T)), lam=1.0) - 1.0)
    close(flat[VALID], 0.5 * score[VALID])


def test_erpo_term_has_the_sign_of_advantage_times_score():
    gate, score = erpo_parts()
    term = np.asarray(erpo()) - ADVANTAGES * MASK
    moved = VALID & (np.abs(score) > 1e-9)
    np.testing.assert_array_equal(
        np.sign(term)[moved], (np.sign(ADVANTAGES) * np.sign(score))[moved]
    )


def test_erpo_removes_the_difficulty_of_a_prompt():
    first = (GROUPS == 7)[:, None]
    close(erpo(ref=REF - 2.0 * first), erpo(), rtol=1e-7)
    doubled = np.where(first, OLD - 2 * (OLD - REF), REF)
    close(erpo(ref=doubled), erpo(), rtol=1e-4, atol=1e-5)


def test_erpo_groups_do_not_interact():
    first = (GROUPS == 7)[:, None]
    disturbed = np.where(first, ENTROPY, 3.0 - ENTROPY)
    out = np.asarray(erpo(entropy=disturbed, ref=np.where(first, REF, 0.5 * REF)))
    close(out[GROUPS == 7], np.asarray(erpo())[GROUPS == 7])
    assert np.max(np.abs(out - np.asarray(erpo()))) > 0.01


def test_erpo_can_flip_a_sign():
    small = 0.01 * np.sign(ADVANTAGES)
    assert np.any(np.asarray(erpo(advantages=small)) * small < 0)


# ---------------------------------------------------------------------------------------------
# FlowTracer


def causal_attention(seed=17, prompt=4, share=0.4):
    rng = np.random.default_rng(seed)
    size = prompt + T
    weights = rng.uniform(size=(B, size, size)) * (rng.uniform(size=(B, size, size)) < share)
    weights = np.tril(weights) + 0.05 * np.eye(size)
    attention = weights / weights.sum(-1, keepdims=True)
    question, answer = np.zeros((B, size)), np.zeros((B, size))
    question[:, 1:3] = 1
    answer[:, -2:] = answer[2, 8:9] = 1
    answer[4], question[5] = 0, 0
    return attention, question, answer


def flow_by_loops(attention, question, answer):
    """h, W' and f as the definition has them, one position at a time."""
    n, size, _ = attention.shape
    h, f, shares = np.zeros((n, size)), np.zeros((n, size)), np.zeros((n, size, size))
    for b in range(n):
        for i in reversed(range(size)):
            later = sum(attention[b, k, i] * h[b, k] for k in range(i + 1, size))
            h[b, i] = 1.0 if answer[b, i] else later
        for i in range(size):
            for k in range(i + 1, size):
                if not answer[b, i] and h[b, i] > 0:
                    shares[b, i, k] = attention[b, k, i] * h[b, k] / h[b, i]
        for k in range(size):
            source = (question[b, k] and h[b, k] > 0) / max(question[b].sum(), 1)
            f[b, k] = source + sum(f[b, i] * shares[b, i, k] for i in range(k))
    return h, shares, f


def test_flow_equals_the_definition_by_loops():
    attention, question, answer = causal_attention()
    h, _, f = flow_by_loops(attention, question, answer)
    close(attention_flow(attention, question, answer), f)
    k, flow = np.ceil(0.4 * COUNTS - 1e-9), f[:, 4:]
    high = np.zeros((B, T), bool)
    for i in range(B):
        for t in np.flatnonzero(VALID[i]):
            larger = (flow[i] > flow[i, t]) & VALID[i]
            tied = (flow[i] == flow[i, t]) & VALID[i] & (np.arange(T) < t)
            high[i, t] = flow[i, t] > 0 and larger.sum() + tied.sum() < k[i]
    out = flowtracer_advantage(ADVANTAGES, attention, question, answer, MASK, gamma_flow=1.7)
    close(out, MASK * ADVANTAGES * np.where(high, 1.7, 1.0))
    assert high.any(axis=1).sum() > 2 and not high[[4, 5]].any()


def test_flowtracer_factors_are_one_or_gamma_flow():
    arrays = causal_attention()
    unchanged(flowtracer_advantage(ADVANTAGES, *arrays, MASK, gamma_flow=1.0))
    w = weights(flowtracer_advantage(ADVANTAGES, *arrays, MASK, gamma_flow=2.5))[VALID]
    assert set(np.round(w, 12)) == {1.0, 2.5}


def test_flow_is_conserved_and_ends_in_the_answer():
    attention, question, answer = causal_attention()
    h, shares, _ = flow_by_loops(attention, question, answer)
    inner = (answer == 0) & (h > 0)
    close(shares.sum(-1)[inner], np.ones(inner.sum()))
    f = np.asarray(attention_flow(attention, question, answer))
    reached = ((question > 0) & (h > 0)).sum(1) / np.maximum(question.sum(1), 1)
    close((f * answer).sum(1), reached)


def chain(size, prompt_length):
    attention = np.eye(size, k=-1)[None]
    question, answer = np.zeros((1, size)), np.zeros((1, size))
    question[0, prompt_length - 1], answer[0, -1] = 1, 1
    return attention, question, answer


def test_flow_of_a_chain_is_one_and_ignores_the_scale_of_attention():
    attention, question, answer = chain(10, 3)
    f = np.asarray(attention_flow(attention, question, answer))[0]
    np.testing.assert_array_equal(f, np.arange(10) >= 2)
    close(attention_flow(0.3 * attention, question, answer)[0], f)
    tied = flowtracer_advantage(
        np.ones((1, 7)), 0.3 * attention, question, answer, np.ones((1, 7)), top_ratio=0.5
    )
    np.testing.assert_array_equal(tied[0], [1.5] * 4 + [1.0] * 3)
    attention[0, 6, 3] = 0.5  # a shortcut: routes of different length share the flow otherwise
    one = np.asarray(attention_flow(attention, question, answer))
    other = np.asarray(attention_flow(0.3 * attention, question, answer))
    assert np.max(np.abs(one - other)) > 0.05


def test_flow_never_enters_what_nothing_downstream_reads():
    attention, question, answer = causal_attention()
    attention[:, 8:, 7] = 0.0  # position 7, response token 3
    answer[:, 7] = 0
    f = np.asarray(attention_flow(attention, question, answer))
    np.testing.assert_array_equal(f[:, 7], 0)
    out = flowtracer_advantage(ADVANTAGES, attention, question, answer, MASK, top_ratio=1.0)
    np.testing.assert_array_equal(np.asarray(out)[:, 3], (ADVANTAGES * MASK)[:, 3])


def test_flowtracer_padding_of_the_response_changes_nothing():
    attention, question, answer = causal_attention()

    def wide(x, axes):
        return np.pad(x, [(0, 2 if a in axes else 0) for a in range(x.ndim)])

    out = flowtracer_advantage(ADVANTAGES, attention, question, answer, MASK)
    padded = flowtracer_advantage(
        wide(ADVANTAGES, (1,)),
        wide(attention, (1, 2)),
        wide(question, (1,)),
        wide(answer, (1,)),
        wide(MASK, (1,)),
    )
    close(padded, wide(np.asarray(out), (1,)))


# ---------------------------------------------------------------------------------------------
# FSPO


VERDICTS = np.random.default_rng(18).integers(-1, 2, (B, T))


def fspo(advantages=ADVANTAGES, verdicts=VERDICTS):
    return np.asarray(fspo_advantage(advantages, verdicts, MASK))


def test_fspo_without_verdicts_changes_nothing_and_twice_is_once():
    unchanged(fspo(verdicts=0 * VERDICTS))
    np.testing.assert_array_equal(fspo(fspo()), fspo())


def test_fspo_takes_the_verdicts_sign_and_keeps_sizes():
    out = fspo()
    assert np.all(out[VERDICTS == -1] <= 0) and np.all(out[VERDICTS == 1] >= 0)
    np.testing.assert_array_equal(np.abs(out), np.abs(ADVANTAGES) * MASK)


def test_fspo_contradicted_sentence_of_a_correct_answer_is_pushed_down():
    verdicts = np.ones((B, T))
    verdicts[:, 2:5] = -1
    out = fspo(np.abs(ADVANTAGES), verdicts)
    np.testing.assert_array_equal(out, verdicts * np.abs(ADVANTAGES) * MASK)


def test_fspo_verdicts_alone_give_no_signal():
    np.testing.assert_array_equal(fspo(0 * ADVANTAGES), 0)


def test_fspo_unchecked_answer_of_a_wrong_response_stays_negative():
    verdicts = VERDICTS.copy()
    verdicts[:, 6:] = 0
    out = fspo(-np.abs(ADVANTAGES), verdicts)
    np.testing.assert_array_equal(out[:, 6:], (-np.abs(ADVANTAGES) * MASK)[:, 6:])


# ---------------------------------------------------------------------------------------------
# GTPO and GRPO-S


OUTCOMES = np.array([1.0, 0.0, 0.2, 1.0, 0.9, 0.7])
ONE = np.array([4, 4, 4, 4, 4, 11])


def gtpo(entropy=ENTROPY, outcomes=OUTCOMES, ids=ONE, **hyper):
    return np.asarray(gtpo_advantage(outcomes, entropy, ids, MASK, **hyper))


def test_gtpo_conserves_the_outcome_at_every_position():
    out = gtpo(alpha1=0.7, alpha2=0.3, normalize="none")
    for g in np.unique(ONE):
        for right in (True, False):
            rows = (ONE == g) & ((OUTCOMES > 0.5) == right)
            close(out[rows].sum(0), (1 if right else -1) * VALID[rows].sum(0))


def test_gtpo_without_entropy_term_is_the_outcome_and_equal_entropies_share_alike():
    sign = np.where(OUTCOMES > 0.5, 1.0, -1.0)[:, None] * MASK
    close(gtpo(alpha1=0.8, alpha2=0.0, normalize="none"), 0.8 * sign)
    close(gtpo(np.full((B, T), 0.4), normalize="none"), 1.1 * sign)


def test_gtpo_shares_by_entropy_and_by_its_inverse():
    right = gtpo_advantage([1, 1], [[3.0], [1.0]], [0, 0], [[1], [1]], normalize="none")
    close(right[:, 0], [1.15, 1.05])
    wrong = gtpo_advantage([0, 0], [[4.0], [1.0]], [0, 0], [[1], [1]], normalize="none")
    close(wrong[:, 0], [-1.04, -1.16])


def test_gtpo_separate_centres_each_side_and_joint_keeps_the_outcome():
    out, joint = gtpo(), gtpo(normalize="joint")
    raw = gtpo(normalize="none")
    for right in (True, False):
        pool = VALID & (ONE == 4)[:, None] & ((OUTCOMES > 0.5) == right)[:, None]
        close(out[pool].mean(), 0.0, atol=1e-9)
        close(out[pool], standard(raw[pool], 1e-8))
        assert np.all((joint[pool] > 0) == right)
    pool = VALID & (ONE == 4)[:, None] & (OUTCOMES > 0.5)[:, None]
    assert np.any(out[pool] < 0)
    both = VALID & (ONE == 4)[:, None]
    close(joint[both], standard(raw[both], 1e-8))
    np.testing.assert_array_equal(out[ONE == 11], 0)  # alone on its side, one token


def test_gtpo_passes_no_gradient_and_a_lone_position_gets_the_whole_share():
    grad = jax.grad(lambda h: gtpo_advantage(OUTCOMES, h, ONE, MASK).sum())(jnp.asarray(ENTROPY))
    np.testing.assert_array_equal(grad, 0)
    lone = np.zeros((B, T))
    lone[5, 0] = 1
    close(gtpo(normalize="none")[lone > 0], [1.1])
    raw = gtpo(normalize="none")
    columns = (VALID & (ONE == 4)[:, None] & (OUTCOMES > 0.5)[:, None]).sum(0) == 1
    for t in np.flatnonzero(columns):
        i = np.flatnonzero(VALID[:, t] & (ONE == 4) & (OUTCOMES > 0.5))[0]
        close(raw[i, t], 1.1)


def test_grpo_s_is_gtpo_on_mean_entropies():
    mean = np.array([ENTROPY[i][VALID[i]].mean() for i in range(B)])
    outcomes, entropy, ids, mask = (jnp.asarray(x) for x in (OUTCOMES, ENTROPY, ONE, MASK))
    for normalize in ("none", "joint", "separate"):
        out = grpo_s_advantage(outcomes, entropy, ids, mask, normalize=normalize)
        expected = gtpo_advantage(
            OUTCOMES, mean[:, None], ONE, np.ones((B, 1)), normalize=normalize
        )
        close(out, expected[:, 0])
    raw = grpo_s_advantage(outcomes, entropy, ids, mask, normalize="none")
    right = (ONE == 4) & (OUTCOMES > 0.5)
    close(np.asarray(raw)[right], 1.0 + 0.1 * right.sum() * mean[right] / mean[right].sum())


# ---------------------------------------------------------------------------------------------
# HICRA


PLANNING = np.random.default_rng(19).integers(0, 2, (B, T))


def test_hicra_without_weight_or_planning_changes_nothing():
    unchanged(hicra_advantage(ADVANTAGES, PLANNING, MASK, alpha=0.0))
    unchanged(hicra_advantage(ADVANTAGES, 0 * PLANNING, MASK))
    w = weights(hicra_advantage(ADVANTAGES, PLANNING, MASK, alpha=0.99))
    assert np.nanmin(w) > 0


def test_hicra_moves_every_planning_token_up_by_alpha_times_its_size():
    out = np.asarray(hicra_advantage(ADVANTAGES, PLANNING, MASK, alpha=0.3))
    close(out - ADVANTAGES * MASK, 0.3 * np.abs(ADVANTAGES) * PLANNING * MASK)
    assert out.sum() > (ADVANTAGES * MASK).sum()


def test_hicra_planning_mask_merges_overlaps_and_stops_at_gaps():
    grams = [(1, 2, 3), (3, 4), (2, 3, 1, 2)]
    tokens = [[1, 2, 3, 4, 0, 3], [1, 2, 3, 1, 2, 3], [2, 3, 1, 2, 9, 9]]
    found = hicra.planning_mask(tokens, grams)
    np.testing.assert_array_equal(found, [[1, 1, 1, 1, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0]])
    mask = [[1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1], [1] * 6]
    found = hicra.planning_mask(tokens, grams, mask)
    np.testing.assert_array_equal(
        found, [[0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    )
    np.testing.assert_array_equal(hicra.planning_mask(tokens, []), np.zeros((3, 6)))


def test_hicra_planning_entropy_of_one_gram_and_of_k_equal_ones():
    close(hicra.planning_entropy(np.array([[5, 5], [5, -1]])), 0.0)
    close(hicra.planning_entropy(np.array([0, 1, 2, -1, 2, 1, 0])), np.log(3))
    close(hicra.planning_entropy(np.array([7, 7, 7, 2])), -0.75 * np.log(0.75) + 0.25 * np.log(4))
    assert hicra.planning_entropy(np.array([-1, -1])) == 0


def test_hicra_reads_the_phrase_and_not_the_tokens_entropy():
    certain = VALID & (ENTROPY < 0.5) & (PLANNING == 1) & (ADVANTAGES > 0)
    out = np.asarray(hicra_advantage(ADVANTAGES, PLANNING, MASK))
    assert certain.any()
    close(out[certain], 1.2 * ADVANTAGES[certain])


# ---------------------------------------------------------------------------------------------
# High-entropy tokens


def forking(x, old, advantages, mask, **hyper):
    return high_entropy_loss(x, old, advantages, ENTROPY, mask, **hyper)


@pytest.mark.parametrize("denominator", ["selected", "all"])
def test_high_entropy_of_all_tokens_is_dapo(denominator):
    hyper = {"top_ratio": 1.0, "denominator": denominator}
    close(
        forking(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK, **hyper)[0],
        dapo_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, MASK)[0],
    )
    close(gradient(forking, **hyper), gradient(dapo_loss))


@pytest.mark.parametrize("top_ratio", [0.01, 0.2, 0.5])
def test_high_entropy_trains_exactly_the_k_most_uncertain_tokens(top_ratio):
    open_window = {"clip_low": None, "clip_high": None}
    chosen = uncertain(top_ratio)
    full = gradient(dapo_loss, **open_window)
    ours = gradient(forking, top_ratio=top_ratio, **open_window)
    close(ours, np.where(chosen, full * VALID.sum() / chosen.sum(), 0))
    shared = gradient(forking, top_ratio=top_ratio, denominator="all", **open_window)
    close(shared, np.where(chosen, full, 0))


def test_high_entropy_ties_go_to_the_earlier_position():
    flat = high_entropy_loss(LOGPROBS, OLD, TOKEN_ADVANTAGES, np.ones((B, T)), MASK, top_ratio=0.1)
    first = np.flatnonzero(VALID)[: int(np.ceil(0.1 * VALID.sum()))]
    term = -np.minimum(
        np.exp(LOGPROBS - OLD) * TOKEN_ADVANTAGES,
        np.clip(np.exp(LOGPROBS - OLD), 0.8, 1.28) * TOKEN_ADVANTAGES,
    )
    close(flat[0], term.reshape(-1)[first].mean())


def test_high_entropy_permuted_rows_permute_the_gradient():
    order = np.random.default_rng(20).permutation(B)

    def loss(x):
        rows = (OLD[order], TOKEN_ADVANTAGES[order], ENTROPY[order], MASK[order])
        return high_entropy_loss(x, *rows)[0]

    close(jax.grad(loss)(jnp.asarray(LOGPROBS[order])), gradient(forking)[order])


def test_high_entropy_minority_trains_better_than_the_rest():
    """Two forks decide a chain's outcome; its eight other steps are certain and do not matter."""
    start = jnp.zeros((10, 2)).at[2:, 0].set(4.0)
    mask = jnp.ones((64, 10))

    def success(keep_forks):
        def step(logits, key):
            log_p = jax.nn.log_softmax(logits)
            moves = jax.random.categorical(key, logits, shape=(64, 10))
            reward = (moves[:, 0] * moves[:, 1]).astype(log_p.dtype)
            advantages = jnp.broadcast_to((reward - reward.mean())[:, None], (64, 10))
            entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
            ranked = entropy if keep_forks else -entropy
            ratio = 0.2 if keep_forks else 0.8

            def loss(x):
                now = jnp.take_along_axis(jax.nn.log_softmax(x)[None], moves[..., None], 2)[..., 0]
                spread = jnp.broadcast_to(ranked, (64, 10))
                return high_entropy_loss(
                    now, now, advantages, spread, mask, top_ratio=ratio, denominator="all"
                )[0]

            return logits - 2.0 * jax.grad(loss)(logits), None

        end = jax.lax.scan(step, start, jax.random.split(jax.random.key(3), 120))[0]
        p = jax.nn.softmax(end)[:2, 1]
        return float(p[0] * p[1])

    assert success(True) > 0.6 > 0.4 > success(False)


# ---------------------------------------------------------------------------------------------
# MA-RLHF


VALUES = np.random.default_rng(21).normal(size=(B, T))
DENSE = np.random.default_rng(22).normal(size=(B, T))


def macro(rewards=DENSE, values=VALUES, **hyper):
    return np.asarray(ma_rlhf_advantage(rewards, values, MASK, **hyper))


def macro_chunks(i, n):
    """The positions of each macro action of row i, in order."""
    at = np.flatnonzero(VALID[i])
    return [at[:-1][k : k + n] for k in range(0, len(at) - 1, n)] + [at[-1:]]


@pytest.mark.parametrize("n,reduce", [(2, "mean"), (3, "sum"), (4, "mean"), (50, "sum")])
def test_macro_advantages_equal_the_definition_by_loops(n, reduce):
    gamma, lam = 0.97, 0.9
    out, expected = macro(n=n, gamma=gamma, lam=lam, reward_reduce=reduce), np.zeros((B, T))
    for i in range(B):
        later, value = 0.0, 0.0
        for at in reversed(macro_chunks(i, n)):
            v, r = VALUES[i, at].mean(), DENSE[i, at]
            later = (
                (r.mean() if reduce == "mean" else r.sum())
                + gamma * value
                - v
                + (gamma * lam * later)
            )
            value, expected[i, at] = v, later
    close(out, expected)


def test_macro_actions_of_one_token_are_gae():
    close(macro(n=1, gamma=0.9, lam=0.8), gae(DENSE, VALUES, MASK, gamma=0.9, lam=0.8))
    with pytest.raises(ValueError, match="at least 1"):
        macro(n=0)


def test_macro_advantage_is_shared_and_ignores_the_order_of_values_inside():
    swapped = VALUES.copy()
    out = macro(n=3)
    for i in range(B):
        for at in macro_chunks(i, 3):
            assert np.ptp(out[i, at]) == 0
            swapped[i, at] = VALUES[i, at[::-1]]
    close(macro(values=swapped, n=3), out)


def test_macro_undiscounted_without_values_is_the_return():
    out = macro(values=0 * VALUES, gamma=1.0, lam=1.0, reward_reduce="sum")
    for i in range(B):
        close(out[i][VALID[i]][0], DENSE[i][VALID[i]].sum())
    pooled = macro(values=0 * VALUES, gamma=1.0, lam=1.0)
    for i in range(B):
        close(pooled[i][VALID[i]][0], sum(DENSE[i, at].mean() for at in macro_chunks(i, 5)))


def test_macro_credit_of_a_final_reward_decays_per_action():
    final = np.zeros((B, T))
    for i in range(B):
        final[i, np.flatnonzero(VALID[i])[-1]] = 2.0
    out = macro(final, 0 * VALUES, n=3, lam=0.8)
    for i in range(B):
        chunks = macro_chunks(i, 3)
        for k, at in enumerate(chunks):
            close(out[i, at], 2.0 * 0.8 ** (len(chunks) - 1 - k))
    by_token = np.asarray(gae(final, 0 * VALUES, MASK, lam=0.8))
    longer = [i for i in range(B) if COUNTS[i] > 2]
    assert all(out[i][VALID[i]][0] > by_token[i][VALID[i]][0] for i in longer)


def test_macro_actions_run_on_through_masked_gaps():
    chunk, slots = ma_rlhf.macro_actions(jnp.asarray([[1.0, 1, 0, 0, 1, 1, 1, 0]]), 3)
    assert slots == 4
    np.testing.assert_array_equal(chunk[0][jnp.array([0, 1, 4, 5, 6])], [0, 0, 0, 1, 2])
    targets = ma_rlhf.macro_targets(macro(n=3), VALUES, jnp.asarray(MASK), n=3)
    for i in range(B):
        for at in macro_chunks(i, 3):
            close(targets[i, at], macro(n=3)[i, at] + VALUES[i, at].mean())
