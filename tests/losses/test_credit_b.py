"""Properties that the papers state of themselves: losses/credit, PEPO to VPPO."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from losses.baselines.dapo import dapo_loss
from losses.baselines.grpo import grpo_loss
from losses.baselines.grpo_advantage import grpo_advantage
from losses.credit.pepo import pepo_advantage
from losses.credit.perceval import perceval_advantage, span_mask
from losses.credit.pgpo import pgpo_advantage, token_dependency
from losses.credit.rlfr import rlfr_advantage
from losses.credit.rlmec import rlmec_loss, rlmec_token_rewards
from losses.credit.rtt import rtt_advantage
from losses.credit.sent import semantic_entropy, sent_loss
from losses.credit.spae import spae_advantage, step_potential
from losses.credit.stare import stare_controller, stare_loss
from losses.credit.t2i_r1 import bicot_grpo_loss
from losses.credit.tempo_tree import tempo_advantage
from losses.credit.thr import thr_advantage
from losses.credit.trust_sql import dual_track_loss
from losses.credit.verl_rank import (
    effective_rank,
    rank_dynamics,
    rank_metrics,
    verl_rank_advantage,
)
from losses.credit.video_ktr import video_ktr_loss
from losses.credit.vppo import vppo_loss
from losses.surrogates.dual_clip_ppo import dual_clip_loss

B, T = 6, 9
GROUPS = np.array([7, 7, 3, 3, 3, 7])
MASK = np.ones((B, T))
MASK[0, 6:] = MASK[1, 3] = MASK[2, :2] = MASK[2, 5] = MASK[4, 4:] = MASK[5, 8] = 0
VALID = MASK > 0


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed, shape=(B, T), low=-2.5, high=0.0):
    return np.random.default_rng(seed).uniform(low, high, shape)


def row_values(seed):
    """A value per response, on all of its tokens, of both signs."""
    return np.repeat(np.random.default_rng(seed).normal(size=(B, 1)), T, 1)


LOGPROBS, OLD = draw(0), draw(0) + draw(1, low=-0.4, high=0.4)
ADVANTAGES = row_values(2)
REWARDS = np.array([1.0, 0.0, 0.3, 1.0, 0.0, 0.6])


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def gradient(function, logprobs=LOGPROBS):
    """Gradient of a loss `function(logprobs) -> (loss, metrics)`."""
    return np.asarray(jax.grad(lambda x: function(x)[0])(jnp.asarray(logprobs)))


# --- PEPO


SCORES, ENTROPY = draw(3, low=-0.2, high=0.9), draw(4, low=0.0, high=2.0)


def pepo_weights(scores=SCORES, entropy=ENTROPY, mask=MASK, **hyper):
    return np.asarray(pepo_advantage(np.ones_like(mask), scores, entropy, mask, **hyper))


def test_pepo_at_progress_zero_or_without_grounding_leaves_advantages():
    close(pepo_advantage(ADVANTAGES, SCORES, ENTROPY, MASK, progress=0.0), ADVANTAGES * MASK)
    flat = np.full((B, T), 0.4)
    close(pepo_advantage(ADVANTAGES, flat, ENTROPY, MASK, gate_alpha=0.0), ADVANTAGES * MASK)


def test_pepo_weights_sum_to_the_number_of_tokens_and_are_positive():
    weights = pepo_weights()
    close(weights.sum(1), MASK.sum(1))
    assert np.all(weights[VALID] > 0)


def test_pepo_without_gate_reads_context_scores_alone():
    weights = pepo_weights(gate_alpha=0.0)
    close(weights, pepo_weights(entropy=ENTROPY[::-1], gate_alpha=0.0))
    close(weights, pepo_weights(scores=SCORES + 3.0, gate_alpha=0.0))
    full = np.ones((B, T))
    order = np.random.default_rng(0).permutation(T)
    before = pepo_weights(mask=full, gate_alpha=0.0)
    close(pepo_weights(SCORES[:, order], mask=full, gate_alpha=0.0), before[:, order])


def test_pepo_gate_is_bounded_and_ignores_a_shift_of_the_entropy():
    # On equal scores of 1 the log-weights are the gates, up to a constant of the response.
    log_w = np.log(pepo_weights(np.ones((B, T)), gate_alpha=0.3, gate_temperature=1.0)[3])
    assert 0 < np.ptp(log_w) < 2 * 0.3
    close(pepo_weights(), pepo_weights(entropy=ENTROPY + 5.0))


def test_pepo_progress_may_be_traced():
    traced = jax.jit(lambda p: pepo_advantage(ADVANTAGES, SCORES, ENTROPY, MASK, progress=p))
    close(traced(0.4), pepo_advantage(ADVANTAGES, SCORES, ENTROPY, MASK, progress=0.4))


# --- Perceval


FLAGGED = (draw(5, low=0, high=1) > 0.6).astype(float)


def test_perceval_without_penalty_or_flags_leaves_advantages():
    close(perceval_advantage(ADVANTAGES, FLAGGED, MASK, penalty=0.0), ADVANTAGES * MASK)
    close(perceval_advantage(ADVANTAGES, 0 * FLAGGED, MASK), ADVANTAGES * MASK)


def test_perceval_only_lowers_and_never_flips_the_sign():
    out = np.asarray(perceval_advantage(ADVANTAGES, FLAGGED, MASK, penalty=0.9))
    assert np.all(out <= ADVANTAGES * MASK) and np.any(out < ADVANTAGES * MASK)
    np.testing.assert_array_equal(np.sign(out), np.sign(ADVANTAGES) * MASK)


def test_perceval_has_no_signal_in_a_group_of_equal_rewards():
    composed = losses.paper("perceval", objective={"beta": 0.0})
    arrays = dict(rewards=np.full(B, 0.3), group_ids=GROUPS, flagged=FLAGGED, mask=MASK)
    arrays.update(logprobs=LOGPROBS, old_logprobs=OLD)
    assert np.all(gradient(lambda x: composed(**{**arrays, "logprobs": x})) == 0)


def test_perceval_span_mask_flags_every_token_that_a_span_touches():
    offsets = [(0, 3), (3, 7), (7, 10), (10, 13), (0, 0)]  # "the| cat| is|red" and an end token
    text = "the cat isred"
    np.testing.assert_array_equal(span_mask(text, ["at i"], offsets), [0, 1, 1, 0, 0])
    np.testing.assert_array_equal(span_mask(text, ["dog", ""], offsets), 0)
    np.testing.assert_array_equal(span_mask(text, ["the", "he c"], offsets), [1, 1, 0, 0, 0])
    first = span_mask("red red", ["red"], [(0, 3), (3, 7)])
    np.testing.assert_array_equal(first, [1, 0])  # the first occurrence only


# --- PGPO


DEPENDENCY = draw(6, low=0.0, high=1.5) ** 2


def pgpo_weights(s=DEPENDENCY, **hyper):
    return np.asarray(pgpo_advantage(np.ones((B, T)), s, MASK, **hyper))


def test_pgpo_without_boost_and_floor_leaves_advantages():
    out = pgpo_advantage(ADVANTAGES, DEPENDENCY, MASK, boost=0.0, floor=1.0)
    close(out, ADVANTAGES * MASK)


def test_pgpo_conserves_the_sum_of_the_advantage():
    weights = pgpo_weights()
    assert np.all(weights[VALID] > 0)
    close(weights.sum(1), MASK.sum(1))


def test_pgpo_token_dependency_is_a_divergence():
    rng = np.random.default_rng(7)
    full, bare = rng.normal(size=(2, B, T, 5))
    s = np.asarray(token_dependency(full, bare, MASK))
    assert np.all(s[VALID] > 0) and np.all(s[~VALID] == 0)
    assert np.all(np.asarray(token_dependency(full, full, MASK)) == 0)
    close(token_dependency(full + 3.0, bare - rng.normal(size=(B, T, 1)), MASK), s)


def test_pgpo_ignores_the_scale_of_the_dependency():
    close(pgpo_weights(DEPENDENCY * 40), pgpo_weights(), 1e-6)


def test_pgpo_weight_grows_with_dependency_above_the_quantile():
    weights = pgpo_weights(floor=0.9, boost=0.1)
    for s, w, m in zip(DEPENDENCY, weights, VALID):
        gated = m & (s >= np.quantile(s[m], 0.6))
        order = np.argsort(s[gated])
        assert np.all(np.diff(w[gated][order]) > 0)
        assert w[gated].min() > w[m & ~gated].max()


def test_pgpo_values_behind_the_mask_do_not_count():
    close(pgpo_weights(np.where(VALID, DEPENDENCY, np.nan)), pgpo_weights())


# --- RLFR


FLOW = draw(8, low=0.0, high=6.0)


def test_rlfr_without_penalty_is_the_group_advantage():
    expected = np.asarray(grpo_advantage(REWARDS, GROUPS, eps=1e-9))[:, None] * MASK
    close(rlfr_advantage(REWARDS, FLOW, GROUPS, MASK, beta=0.0), expected)
    close(rlfr_advantage(REWARDS, FLOW, GROUPS, MASK, eta=1.0), expected)


def test_rlfr_penalises_few_tokens_and_by_a_bounded_amount():
    out = np.asarray(rlfr_advantage(REWARDS, FLOW, GROUPS, MASK, beta=0.1, eta=0.3, top_k=2))
    base = np.asarray(grpo_advantage(REWARDS, GROUPS, eps=1e-9))
    for row, a, m in zip(out, base, VALID):
        steps = np.diff(np.append(row[m], a))  # the penalty of each valid token
        penalties = steps[steps > 1e-12]
        assert np.all(steps > -1e-12) and 1 <= penalties.size <= 2
        assert np.all((penalties > 0.03) & (penalties <= 0.1 + 1e-12))


def test_rlfr_ignores_an_affine_change_of_the_scores():
    scale = np.arange(1.0, B + 1)[:, None]
    close(
        rlfr_advantage(REWARDS, FLOW * scale + 2 * scale, GROUPS, MASK),
        rlfr_advantage(REWARDS, FLOW, GROUPS, MASK),
    )


# --- RLMEC


CORRECT = np.array([1, 0, 1, 0, 1, 0])
GRM = np.log(draw(9, low=0.05, high=0.99))
EDITS, EDIT_WEIGHTS = draw(10, (B, 5)), np.array([[1, 0.5, 0.5, 1, 0]] * B)


def rlmec(logprobs, rewards, mask=MASK, old=OLD, **hyper):
    return rlmec_loss(logprobs, old, rewards, mask, EDITS, EDIT_WEIGHTS, **hyper)


def test_rlmec_token_rewards_have_the_sign_of_the_outcome():
    r = np.asarray(rlmec_token_rewards(GRM, CORRECT, MASK))
    p = np.exp(GRM)
    for i in range(B):
        low, high = (0.0, 0.5) if CORRECT[i] else (-0.1, 0.0)
        close(r[i], np.where(VALID[i], np.clip(p[i] - 0.5, low, high), 0))


def test_rlmec_raises_correct_rows_and_lowers_wrong_ones():
    rewards = rlmec_token_rewards(GRM, CORRECT, MASK)
    g = gradient(lambda x: rlmec(x, rewards, lam=0.0))
    right = CORRECT[:, None] == 1
    assert np.all(g * right <= 0) and np.all(g * ~right >= 0)
    assert np.any(g * right < 0) and np.any(g * ~right > 0)


def test_rlmec_without_rewards_is_weighted_imitation():
    loss, metrics = rlmec(LOGPROBS, np.zeros((B, T)))
    assert metrics["policy_loss"] == 0
    close(loss, -(EDIT_WEIGHTS * EDITS).sum() / (EDIT_WEIGHTS != 0).sum())


@pytest.mark.parametrize("rho,r,c", [(2.0, 0.4, 1.3 * 0.4), (0.5, -0.1, -0.07), (2.0, -0.1, -0.2)])
def test_rlmec_clip_caps_the_weight(rho, r, c):
    rewards = np.zeros((B, T))
    rewards[0, 0] = r
    old = LOGPROBS - np.log(rho)
    g = gradient(lambda x: rlmec(x, rewards, old=old, lam=0.0))
    close(g[0, 0], -c)


# --- RTT


RUBRICS = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]], float)
RELEVANCE = draw(11, (B, 3, T), 0, 1)


def rtt(rewards=REWARDS, rubrics=RUBRICS, relevance=RELEVANCE, ids=GROUPS, mask=MASK, **hyper):
    return np.asarray(rtt_advantage(rewards, rubrics, relevance, ids, mask, **hyper))


def test_rtt_without_token_term_is_the_group_advantage():
    expected = np.asarray(grpo_advantage(REWARDS, GROUPS))[:, None] * MASK
    close(rtt(weight=0.0), expected)
    close(rtt(rubrics=RUBRICS[:, :1], relevance=np.full((B, 1, T), 0.3)), expected)


def test_rtt_intra_sample_keeps_the_mean_of_each_response():
    close(rtt().sum(1) / MASK.sum(1), np.asarray(grpo_advantage(REWARDS, GROUPS)))


def test_rtt_group_keeps_the_sum_of_each_group_only():
    token_term = rtt(norm="group") - rtt(weight=0.0)
    for g in np.unique(GROUPS):
        close(token_term[GROUPS == g].sum(), 0)
    assert np.max(np.abs(token_term.sum(1))) > 0.1


@pytest.mark.parametrize("norm", ["intra_sample", "group"])
def test_rtt_follows_permutations_of_criteria_and_of_responses(norm):
    before = rtt(norm=norm)
    order = [2, 0, 1]
    close(rtt(rubrics=RUBRICS[:, order], relevance=RELEVANCE[:, order], norm=norm), before)
    rows = np.array([5, 0, 4, 2, 3, 1])
    after = rtt(REWARDS[rows], RUBRICS[rows], RELEVANCE[rows], GROUPS[rows], MASK[rows], norm=norm)
    close(after, before[rows])


def test_rtt_satisfied_criterion_raises_the_tokens_relevant_to_it():
    relevance = np.zeros((B, 1, T))
    relevance[:, 0, 2:4] = 1.0
    mask = np.ones((B, T))
    out = rtt(rubrics=np.ones((B, 1)), relevance=relevance, mask=mask)
    assert np.all(out[:, 2:4].min(1) > np.delete(out, [2, 3], 1).max(1))


# --- SENT


def sent(logprobs, old=OLD, **hyper):
    return sent_loss(logprobs, old, ENTROPY, ADVANTAGES, MASK, **hyper)


def test_sent_without_penalty_is_the_clipped_token_mean():
    plain = dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.2)[0]
    close(sent(LOGPROBS, beta=0.0, beta_cov=0.0)[0], plain)


def test_sent_with_one_coefficient_on_all_tokens_is_a_uniform_penalty():
    d = (OLD - LOGPROBS)[VALID]
    plain = dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.2)[0]
    loss = sent(LOGPROBS, beta=0.3, beta_cov=0.3, low_ratio=1.0)[0]
    close(loss, plain + 0.3 * np.mean(np.exp(d) - d - 1))


def test_sent_penalty_vanishes_on_policy():
    def on_policy(**hyper):
        return gradient(lambda x: sent(x, old=LOGPROBS, **hyper))

    close(on_policy(beta=5.0, beta_cov=9.0), on_policy(beta=0.0, beta_cov=0.0))


def test_sent_penalises_low_entropy_tokens_and_more_where_they_drive_entropy_down():
    low_count = int(np.ceil(0.5 * VALID.sum()))
    low = np.zeros((B, T), bool)
    flat = np.where(VALID, ENTROPY, np.inf).ravel()
    low.flat[np.argsort(flat, kind="stable")[:low_count]] = True
    a, logp = ADVANTAGES - ADVANTAGES[low].mean(), LOGPROBS - LOGPROBS[low].mean()
    cov = np.where(low, a * logp, -np.inf)
    high = np.zeros((B, T), bool)
    high.flat[np.argsort(-cov.ravel(), kind="stable")[: int(np.ceil(0.25 * low_count))]] = True

    def at(beta, beta_cov):
        hyper = dict(low_ratio=0.5, cov_ratio=0.25, beta=beta, beta_cov=beta_cov)
        return gradient(lambda x: sent(x, **hyper))

    k3_gradient = (1 - np.exp(OLD - LOGPROBS)) / VALID.sum()
    penalty = at(0.1, 1.0) - at(0.0, 0.0)
    close(penalty, k3_gradient * np.where(high, 1.0, np.where(low, 0.1, 0.0)))
    best = np.argmax(np.where(low & (a > 0) & (logp > 0), a * logp, -np.inf))
    assert high.flat[best]


def test_sent_semantic_entropy():
    ids = np.array([5, 5, 5, 5, 2, 2])
    close(semantic_entropy(np.array([1, 1, 3, 3, 7, 7]), ids), [np.log(2)] * 4 + [0.0] * 2)
    close(semantic_entropy(np.arange(6), ids), [np.log(4)] * 4 + [np.log(2)] * 2)
    close(semantic_entropy(np.array([9, 9, 0, 0, 4, 4]), ids)[0], np.log(2))


# --- SPAE


K = 4
STEPS = np.minimum(np.arange(T)[None] // np.array([2, 3, 2, 1, 2, 2])[:, None], K)
PHI = draw(12, (B, K), -1.0, 1.0)
PHI[3, 0] = 0.97
PROBED = np.array(
    [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
)


def spae(phi=PHI, rewards=REWARDS, steps=STEPS, probed=PROBED, mask=MASK, **hyper):
    return np.asarray(spae_advantage(rewards, GROUPS, steps, phi, probed, mask, **hyper))


def centred_rewards():
    return REWARDS - np.array([REWARDS[GROUPS == g].mean() for g in GROUPS])


def whitened(a):
    return np.where(VALID, (a - a[VALID].mean()) / a[VALID].std(ddof=1), 0)


def test_spae_without_both_terms_is_the_whitened_group_centred_reward():
    close(spae(alpha=0.0, xi=0.0), whitened(np.repeat(centred_rewards()[:, None], T, 1)), 1e-6)


def test_spae_equals_its_definition_written_as_loops():
    a = np.zeros((B, T))
    jumps = {(i, k): PHI[i, k] - PHI[i, k - 1] if k else 0.0 for i, k in np.argwhere(PROBED)}
    low, high = min(jumps.values()), max(jumps.values())
    g = {key: np.exp((d - low) / (high - low)) for key, d in jumps.items()}
    mean = np.mean(list(g.values()))
    for i, t in np.argwhere(VALID):
        k = STEPS[i, t]
        probed = k < K and PROBED[i, k]
        settled = sum(PHI[i, j] > 0.5 and PROBED[i, j] for j in range(k if probed else K))
        factor = 1 - 0.5 * (1 - np.exp(-settled))
        a[i, t] = centred_rewards()[i] * factor + (0.5 * (g[i, k] - mean) if probed else 0)
    out = spae(eps_sat=0.5)
    close(out, whitened(a), 1e-6)
    close(out[VALID].mean(), 0)
    close(out[VALID].std(ddof=1), 1, 1e-6)


def test_spae_credit_of_a_correct_response_falls_along_the_steps():
    out = spae(xi=0.0, mask=np.ones((B, T)), eps_sat=0.0)
    assert np.all(np.diff(out[3]) <= 1e-12) and out[3, -1] < out[3, 0]


def test_spae_has_one_value_per_step_and_moves_with_the_potential():
    out = spae()
    for i in range(B):
        for k in range(K):
            members = out[i][VALID[i] & (STEPS[i] == k)]
            assert members.size == 0 or np.ptp(members) == 0
    # Equal rewards leave the bonus alone; whitening keeps its order. Extremes lie in other rows.
    phi = np.clip(PHI, -0.5, 0.5)
    phi[2] = [-1.0, 1.0, -1.0, 1.0]
    raised = phi.copy()
    raised[0, 1] += 0.3
    equal = dict(rewards=np.ones(B), eps_sat=2.0, alpha=0.0)
    before, after = spae(phi, **equal), spae(raised, **equal)
    step = STEPS[0]
    assert np.all((after - before)[0][(step == 1) & VALID[0]] > 0.1)
    assert np.all((after - before)[0][(step == 2) & VALID[0]] < -0.1)


def test_spae_bonus_averages_to_zero_over_the_probed_steps():
    steps = np.tile(np.minimum(np.arange(T), K), (B, 1))  # one token a step, then a summary
    mask = np.ones((B, T))
    out = spae(rewards=np.ones(B), steps=steps, mask=mask)
    close(out[:, K:], 0)
    assert np.abs(out[0, :K]).max() > 0.1


def test_spae_step_potential():
    for (acc, conf), expected in {(0, 0): 0, (1, 1): 1, (0, 1): -1, (1, 0): 0.5}.items():
        assert step_potential(acc, conf) == expected


# --- STARE


def stare(logprobs, **hyper):
    return stare_loss(logprobs, OLD, ADVANTAGES, MASK, **hyper)


def test_stare_with_gate_off_or_unit_weights_is_dual_clip():
    plain = dual_clip_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.28)[0]
    close(stare(LOGPROBS, gate_on=False)[0], plain)
    close(stare(LOGPROBS, weight_pos=1.0, weight_neg=1.0, variant="C2")[0], plain)
    close(jax.jit(lambda gate: stare(LOGPROBS, gate_on=gate)[0])(jnp.array(False)), plain)


@pytest.mark.parametrize("variant", ["O1", "C2"])
def test_stare_reweights_the_most_surprising_tokens_of_the_current_policy(variant):
    plain = gradient(lambda x: stare(x, gate_on=False))
    weighted = gradient(lambda x: stare(x, variant=variant, weight_pos=1.5, weight_neg=0.5))
    expected = np.ones((B, T))
    for side, weight in ((ADVANTAGES > 0, 1.5), (ADVANTAGES < 0, 0.5 if variant == "C2" else 1)):
        members = VALID & side
        k = max(1, int(np.ceil(0.1 * members.sum())))
        surprise = np.where(members, -LOGPROBS, -np.inf).ravel()
        expected.flat[np.argsort(-surprise, kind="stable")[:k]] = weight
    close(weighted, plain * expected)
    assert set(np.unique(expected)) == {1.0, 1.5} | ({0.5} if variant == "C2" else set())


def test_stare_raises_the_entropy_of_a_toy_policy_above_the_plain_step():
    logits = jnp.array([2.0, 1.0, 0.0, -1.0, -2.0])
    actions = jax.random.categorical(jax.random.key(0), logits, shape=(20, 10))
    advantages, mask = jnp.ones((20, 10)), jnp.ones((20, 10))
    held = jax.nn.log_softmax(logits)[actions]

    def entropy_after(gate):
        def loss(theta):
            logprobs = jax.nn.log_softmax(theta)[actions]
            return stare_loss(logprobs, held, advantages, mask, gate_on=gate, weight_pos=1.5)[0]

        log_p = jax.nn.log_softmax(logits - 0.5 * jax.grad(loss)(logits))
        return -jnp.sum(jnp.exp(log_p) * log_p)

    assert entropy_after(True) > entropy_after(False) + 1e-4


def test_stare_controller_moves_towards_the_target():
    state = dict(gate_on=True, weight_pos=1.1, weight_neg=0.9)
    assert not stare_controller(state, 0.3)["gate_on"]
    low = stare_controller(state, 0.2, adaptive=True)
    assert low["gate_on"]
    close([low["weight_pos"], low["weight_neg"]], [1.11, 0.89])
    high = stare_controller(dict(state, weight_pos=1.0), 0.4, adaptive=True)
    close([high["weight_pos"], high["weight_neg"]], [1.0, 0.91])
    kept = stare_controller(state, np.nan, adaptive=True)
    assert kept["gate_on"] and kept["weight_pos"] == 1.1 and kept["weight_neg"] == 0.9


# --- T2I-R1


COMPONENTS = draw(13, (B, 3), 0, 1)


def test_bicot_gradient_of_a_token():
    def loss(x):
        return bicot_grpo_loss(x, OLD, MASK, COMPONENTS, GROUPS, beta=0.1)

    a = np.asarray(grpo_advantage(COMPONENTS.sum(1), GROUPS, eps=1e-4))[:, None]
    expected = (-a + 0.1 * (1 - np.exp(OLD - LOGPROBS))) / VALID.sum()
    close(gradient(loss), np.where(VALID, expected, 0))


def test_bicot_mean_of_the_rewards_is_their_sum_up_to_eps():
    summed = bicot_grpo_loss(LOGPROBS, OLD, MASK, COMPONENTS, GROUPS)[0]
    close(bicot_grpo_loss(LOGPROBS, OLD, MASK, COMPONENTS / 3, GROUPS)[0], summed, 2e-3)


def test_bicot_masking_the_plan_trains_the_work_alone():
    work = MASK * (np.arange(T) >= 4)
    g = gradient(lambda x: bicot_grpo_loss(x, OLD, work, COMPONENTS, GROUPS))
    assert np.all(g[:, :4] == 0) and np.all(g[work > 0] != 0)


# --- TEMPO


TREE = np.array(
    [
        [5, 2, 7, 1, 4, 4, 9, 0, 0],
        [5, 2, 7, 0, 3, 1, 1, 6, 8],
        [0, 0, 8, 8, 1, 0, 2, 2, 3],
        [8, 8, 1, 1, 2, 2, 5, 1, 1],
        [8, 6, 1, 1, 0, 0, 0, 0, 0],
        [5, 2, 3, 1, 1, 1, 1, 1, 0],
    ]
)


def prefix_values():
    """td of every valid token by plain loops over prefixes."""
    own = [tuple(row[m]) for row, m in zip(TREE, VALID)]

    def value(i, prefix):
        alike = [
            REWARDS[k]
            for k in range(B)
            if GROUPS[k] == GROUPS[i] and own[k][: len(prefix)] == prefix
        ]
        return np.mean(alike)

    return own, value, [
        np.array([value(i, o[: j + 1]) - value(i, o[:j]) for j in range(len(o))])
        for i, o in enumerate(own)
    ]  # fmt: skip


def test_tempo_adds_the_temporal_difference_of_prefix_values():
    out = np.asarray(tempo_advantage(REWARDS, TREE, GROUPS, MASK, scale=False))
    _, _, td = prefix_values()
    assert any(np.any(d[1:] != 0) for d in td)
    for i in range(B):
        close(out[i][VALID[i]], centred_rewards()[i] + td[i])
    std = np.array([REWARDS[GROUPS == g].std(ddof=1) for g in GROUPS])[:, None]
    close(tempo_advantage(REWARDS, TREE, GROUPS, MASK), out / (std + 1e-6))


def test_tempo_differences_telescope_to_the_value_of_the_whole_response():
    out = np.asarray(tempo_advantage(REWARDS, TREE, GROUPS, MASK, scale=False))
    own, value, _ = prefix_values()
    for i in range(B):
        td = out[i][VALID[i]] - centred_rewards()[i]
        close(td.sum(), value(i, own[i]) - REWARDS[GROUPS == GROUPS[i]].mean())


def test_tempo_first_token_counts_twice_when_all_start_differently():
    tokens = np.arange(B)[:, None] + np.zeros((B, T), int)
    out = np.asarray(tempo_advantage(REWARDS, tokens, GROUPS, MASK))
    base = np.asarray(grpo_advantage(REWARDS, GROUPS))
    for row, a, m in zip(out, base, VALID):
        close(row[m], np.append(2 * a, [a] * (m.sum() - 1)))


def test_tempo_is_grpo_without_a_branch_and_alike_on_shared_prefixes():
    same = np.broadcast_to(np.arange(T), (B, T))
    full = np.ones((B, T))
    base = np.asarray(grpo_advantage(REWARDS, GROUPS))[:, None] * full
    close(tempo_advantage(REWARDS, same, GROUPS, full), base)
    td = np.asarray(tempo_advantage(REWARDS, TREE, GROUPS, MASK, scale=False))
    td = td - centred_rewards()[:, None]
    close(td[0, :3], td[1, :3])  # rows 0 and 1 branch after three shared tokens
    assert abs(td[0, 3]) > 1e-3


def test_tempo_children_of_a_node_average_to_zero():
    _, value, _ = prefix_values()
    root = [value(i, (5,)) for i in (0, 1, 5)]
    assert np.ptp(root) == 0
    differences = [value(0, (5, 2, 7)), value(1, (5, 2, 7)), value(5, (5, 2, 3))]
    close(np.mean(differences) - value(0, (5, 2)), 0)
    out = np.asarray(tempo_advantage(REWARDS, TREE, GROUPS, MASK, scale=False))
    td = out - centred_rewards()[:, None]
    close(td[0, 2] + td[1, 2] + td[5, 2], 0)


def test_tempo_follows_a_permutation_of_the_responses():
    rows = np.array([5, 3, 0, 4, 1, 2])
    out = np.asarray(tempo_advantage(REWARDS, TREE, GROUPS, MASK))
    close(tempo_advantage(REWARDS[rows], TREE[rows], GROUPS[rows], MASK[rows]), out[rows])


# --- THR


V, D = 4, 3
LOGITS, HIDDEN = draw(14, (B, T, V), -2, 2), draw(15, (B, T, D), -1, 1)
TOKENS = np.random.default_rng(16).integers(0, V, (B, T))


def thr(advantages=ADVANTAGES, rewards=REWARDS, logits=LOGITS, h=HIDDEN, tokens=TOKENS, **hyper):
    out = thr_advantage(advantages, rewards, logits, h, tokens, GROUPS, MASK, **hyper)
    return np.asarray(out)


def influence():
    """s of every token by the double sum over token pairs."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    g = np.eye(V)[TOKENS] - p
    s = np.zeros((B, T))
    for j, t in np.argwhere(VALID):
        for i, u in np.argwhere(VALID):
            if GROUPS[i] == GROUPS[j] and REWARDS[i] > 0.5:
                s[j, t] += (g[i, u] @ g[j, t]) * (HIDDEN[i, u] @ HIDDEN[j, t])
    return s


def test_thr_without_steering_leaves_advantages():
    close(thr(p=0.0, drop_small=False), ADVANTAGES * MASK)


def test_thr_equals_the_double_sum_over_token_pairs():
    s = influence()
    positive = REWARDS > 0.5
    score = np.where(positive[:, None], s, -s)
    expected = np.zeros((B, T))
    for j in range(B):
        correct = [i for i in range(B) if GROUPS[i] == GROUPS[j] and positive[i]]
        tau = 0.5 * min(s[i][VALID[i]].mean() for i in correct)
        kept = np.abs(score[j]) > tau
        expected[j] = ADVANTAGES[j] * kept * (1 + 0.2 * np.sign(score[j]))
    close(thr(p=0.2, tau_scale=0.5), expected * MASK)


def test_thr_wrong_copy_of_a_correct_response_is_weakened():
    logits, hidden, tokens = LOGITS.copy(), HIDDEN.copy(), TOKENS.copy()
    for array in (logits, hidden, tokens):
        array[4] = array[3]  # row 4 is wrong, row 3 the group's correct one
    ones = np.ones((B, T))
    out = thr(ones, logits=logits, h=hidden, tokens=tokens, p=0.1, drop_small=False)
    shared = VALID[3] & VALID[4]
    raised = shared & (out[3] > 1)
    assert np.any(raised) and np.all(out[4][raised] < 1)


def test_thr_opposite_p_swaps_the_amplified_and_the_weakened():
    ones = np.ones((B, T))
    plus, minus = thr(ones, p=0.3), thr(ones, p=-0.3)
    np.testing.assert_array_equal(plus == 0, minus == 0)
    close((plus + minus)[plus != 0], 2)
    assert np.any(plus > 1) and np.any((plus < 1) & (plus > 0))
    assert np.all(np.sign(thr(p=1.0)) * np.sign(ADVANTAGES) >= 0)


def test_thr_sign_is_the_first_order_effect_on_the_correct_responses():
    h = np.array([0.7, -0.4, 1.1])  # a linear softmax policy on a constant hidden state
    hidden, w = np.broadcast_to(h, (B, T, D)), draw(17, (V, D), -1, 1)
    logits = np.broadcast_to(w @ h, (B, T, V))
    plus = thr(np.ones((B, T)), logits=logits, h=hidden, p=0.5, drop_small=False)
    positive = REWARDS > 0.5
    for j, t in [(0, 1), (1, 0), (2, 3), (3, 2), (4, 1), (5, 5)]:

        def after(step, j=j, t=t):
            p = np.exp(w @ h) / np.exp(w @ h).sum()
            new = w + step * np.outer(np.eye(V)[TOKENS[j, t]] - p, h)
            log_p = new @ h - np.log(np.exp(new @ h).sum())
            correct = (GROUPS == GROUPS[j]) & positive
            return np.sum(log_p[TOKENS] * VALID * correct[:, None])

        change = after(1e-6 if positive[j] else -1e-6) - after(0.0)
        assert np.sign(change) == np.sign(plus[j, t] - 1)


def test_thr_group_without_a_correct_response_is_left_alone():
    rewards = np.where(GROUPS == 3, 0.3, REWARDS)
    out = thr(rewards=rewards)
    close(out[GROUPS == 3], (ADVANTAGES * MASK)[GROUPS == 3])
    assert not np.allclose(out[GROUPS == 7], (ADVANTAGES * MASK)[GROUPS == 7])


# --- TRUST-SQL


SCHEMA = MASK * (np.arange(T)[None] < np.array([5, 4, 0, 6, 3, 7])[:, None])
SCHEMA_REWARDS = np.array([1.0, 0.0, 0.4, 1.0, 0.0, 0.2])
USABLE = np.array([1, 1, 1, 1, 1, 0])


def trust(logprobs, rewards=REWARDS, schema=SCHEMA, schema_rewards=SCHEMA_REWARDS, **hyper):
    return dual_track_loss(
        logprobs, OLD, MASK, rewards, GROUPS, schema, schema_rewards, USABLE, **hyper
    )


def test_trust_sql_without_the_schema_track_is_grpo_on_valid_rows():
    a = np.zeros(B)
    for g in np.unique(GROUPS):
        members = (GROUPS == g) & (USABLE > 0)
        a[members] = (REWARDS[members] - REWARDS[members].mean()) / (REWARDS[members].std() + 1e-6)
    a = np.repeat(a[:, None], T, 1) * MASK
    plain = grpo_loss(LOGPROBS, OLD, a, MASK, clip_high=0.28, beta=0.0)[0]
    close(trust(LOGPROBS, schema_weight=0.0)[0], plain)
    close(trust(LOGPROBS, schema=np.zeros((B, T)))[0], plain)


def test_trust_sql_schema_reward_acts_up_to_the_proposal_only():
    changed = SCHEMA_REWARDS[::-1].copy()
    difference = gradient(trust) - gradient(lambda x: trust(x, schema_rewards=changed))
    assert np.all(difference[SCHEMA == 0] == 0) and np.any(difference[SCHEMA > 0] != 0)


def test_trust_sql_credits_proposals_when_every_answer_is_wrong():
    wrong = np.zeros(B)
    loss, metrics = trust(LOGPROBS, rewards=wrong)
    assert metrics["answer_loss"] == 0 and metrics["schema_loss"] != 0 and loss != 0
    _, metrics = trust(LOGPROBS, schema_rewards=wrong)
    assert metrics["schema_loss"] == 0 and metrics["answer_loss"] != 0


# --- VERL


METRICS = draw(18, (B, 3), -1, 3)
BASE = np.array([0.3, 0.8, 1.2])


def verl(metrics=METRICS, base=BASE, **hyper):
    return np.asarray(verl_rank_advantage(ADVANTAGES, metrics, base, MASK, **hyper))


def test_verl_without_deviation_or_scale_leaves_advantages():
    close(verl(scale=0.0), ADVANTAGES * MASK)
    close(verl(np.tile(BASE, (B, 1))), ADVANTAGES * MASK)


def test_verl_bonus_is_one_sided_and_bounded():
    bonus = verl(kappa=3.0, scale=5.0) - ADVANTAGES * MASK
    assert np.all(bonus >= 0) and np.any(bonus > 0)
    assert np.all(bonus <= np.abs(ADVANTAGES) / 3 + 1e-12)
    np.testing.assert_array_equal(np.sign(verl(scale=5.0)), np.sign(ADVANTAGES) * MASK)


def test_verl_acceleration_chooses_between_rank_and_velocity():
    def bonus(era, erv, er):
        metrics = np.tile(BASE, (B, 1)) * (1 + np.array([era, erv, er]))
        out = verl(metrics, gain=20.0, kappa=1.0, scale=1e-3)
        return (out - ADVANTAGES * MASK)[VALID] / 1e-3

    close(bonus(5, 0.4, 0.7), np.tanh(0.7), 1e-6)
    close(bonus(-5, 0.4, 0.7), np.tanh(0.4), 1e-6)
    close(bonus(0, 0.4, 0.7), (np.tanh(0.4) + np.tanh(0.7)) / 2, 1e-6)


def test_verl_effective_rank():
    frame = np.linalg.qr(np.random.default_rng(19).normal(size=(7, 7)))[0]
    paired = np.concatenate([frame[:3], -frame[:3]])  # centred, three orthogonal directions
    close(effective_rank(paired), 3, 1e-5)
    close(effective_rank(np.outer(np.arange(5.0), frame[0])), 1, 1e-5)
    z = np.random.default_rng(20).normal(size=(6, 7))
    close(effective_rank(z @ frame * 4), effective_rank(z), 1e-6)
    assert effective_rank(z, np.array([0, 1, 0, 0, 0, 0.0])) == 0


def test_verl_rank_dynamics_along_a_response_with_gaps():
    z, stride = np.random.default_rng(21).normal(size=(T, D)), 2
    for mask in (MASK[3], MASK[4], MASK[2], MASK[1]):
        own = z[mask > 0]
        e = [float(effective_rank(own[: t + 1])) for t in range(stride, len(own), stride)]
        v = [e[j] - np.mean(e[:j]) for j in range(1, len(e))]
        c = list(np.diff(v))
        expected = [np.mean(v) if v else 0.0, np.mean(c) if c else 0.0]
        close(rank_dynamics(z, stride, mask), expected, 1e-7)
    assert len(own) > 3 * stride and expected[1] != 0
    erv, era = rank_dynamics(z[: 2 * stride], stride)
    assert erv == 0 and era == 0
    erv, era = rank_dynamics(z[: 3 * stride], stride)
    assert erv != 0 and era == 0


def test_verl_rank_metrics_come_in_the_order_of_the_baselines():
    hidden = np.random.default_rng(22).normal(size=(2, T, D))
    metrics = np.asarray(rank_metrics(hidden, MASK[:2], stride=2))
    erv, era = rank_dynamics(hidden[1], 2, MASK[1])
    close(metrics[1], [era, erv, effective_rank(hidden[1], MASK[1])])


# --- Video-KTR


BLANKED, SHUFFLED = LOGPROBS + draw(23, low=-0.8, high=0.5), LOGPROBS + draw(24, low=-0.5, high=0.5)


def video(logprobs, blanked=BLANKED, shuffled=SHUFFLED, **hyper):
    return video_ktr_loss(logprobs, OLD, blanked, shuffled, ENTROPY, ADVANTAGES, MASK, **hyper)


def test_video_ktr_with_all_tokens_selected_is_on_policy_grpo():
    full = dict(entropy_ratio=1.0, visual_ratio=1.0, temporal_ratio=1.0)
    plain = grpo_loss(LOGPROBS, LOGPROBS, ADVANTAGES, MASK, OLD)[0]
    close(video(LOGPROBS, **full)[0], plain)


def test_video_ktr_trains_the_union_of_three_sets_and_nothing_else():
    sets = []
    for score in (ENTROPY, LOGPROBS - BLANKED, LOGPROBS - SHUFFLED):
        sets.append(VALID & (score >= np.quantile(score[VALID], 0.8)))
    union = sets[0] | sets[1] | sets[2]
    assert all(abs(s.sum() - 0.2 * VALID.sum()) <= 1 for s in sets)
    assert max(s.sum() for s in sets) < union.sum() <= sum(s.sum() for s in sets)
    g = gradient(video)
    np.testing.assert_array_equal(g != 0, union)
    close(video(LOGPROBS)[1]["selected_fraction"], union.sum() / VALID.sum())


def test_video_ktr_scores_behind_the_mask_do_not_count():
    garbage = np.where(VALID, BLANKED, -1e9)
    close(gradient(lambda x: video(x, blanked=garbage)), gradient(video))


def test_video_ktr_selects_everything_where_evidence_does_not_matter():
    assert video(LOGPROBS, blanked=LOGPROBS)[1]["selected_fraction"] == 1


# --- VPPO


COUNTERFACTUAL = OLD + draw(25, low=-0.8, high=0.8)


def vppo(logprobs, counterfactual=COUNTERFACTUAL, **hyper):
    return vppo_loss(logprobs, OLD, counterfactual, ADVANTAGES, MASK, **hyper)


def test_vppo_with_everything_kept_is_dual_clip():
    plain = dual_clip_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.28)[0]
    close(vppo(LOGPROBS, top_p=1.0, scale_min=1.0, entropy_coef=0.0)[0], plain)


def vppo_scales(scale_min):
    """c of each response, from the gradient at the old policy of its kept tokens."""

    def loss(x):
        return vppo(x, top_p=1.0, scale_min=scale_min, entropy_coef=0.0)

    g = gradient(loss, OLD)
    return (g * MASK).sum(1) / MASK.sum(1) * VALID.sum() / -ADVANTAGES[:, 0]


def test_vppo_scales_average_to_one_and_follow_the_dependency():
    c = vppo_scales(0.6)
    d = COUNTERFACTUAL - OLD
    s = np.array([(np.exp(x[m]) - x[m] - 1).mean() for x, m in zip(d, VALID)])
    close(c.mean(), 1, 1e-6)
    close(c.min(), 0.6)
    np.testing.assert_array_equal(np.argsort(c), np.argsort(s))


def test_vppo_keeps_the_most_dependent_tokens_of_each_response():
    g = gradient(lambda x: vppo(x, entropy_coef=0.0), OLD)
    d = COUNTERFACTUAL - OLD
    k = np.where(VALID, np.exp(d) - d - 1, -1)
    kept = np.zeros((B, T), bool)
    for i in range(B):
        kept[i, np.argsort(-k[i])[: int(np.ceil(0.4 * VALID[i].sum()))]] = True
    np.testing.assert_array_equal(g != 0, kept)
    assert np.any(d[kept] > 0) and np.any(d[kept] < 0)


def test_vppo_last_term_pushes_all_sampled_tokens_up():
    with_term = gradient(lambda x: vppo(x, entropy_coef=0.5))
    close(with_term - gradient(lambda x: vppo(x, entropy_coef=0.0)), -0.5 * MASK / VALID.sum())


def test_vppo_without_dependency_keeps_the_earliest_tokens():
    g = gradient(lambda x: vppo(x, counterfactual=OLD, entropy_coef=0.0), OLD)
    for row, m in zip(g, VALID):
        n = int(np.ceil(0.4 * m.sum()))
        np.testing.assert_array_equal(row[m] != 0, np.arange(m.sum()) < n)
    close(g[g != 0], (-ADVANTAGES / VALID.sum())[g != 0])
