"""Properties that the papers state of themselves: losses/distillation, OmniOPD to TurnOPD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from losses.baselines.dapo import dapo_loss
from losses.baselines.grpo_advantage import grpo_advantage
from losses.distillation.omniopd import omniopd_loss, omniopd_mean, select_chunks
from losses.distillation.opd2 import opd2_advantage
from losses.distillation.opid import opid_advantage
from losses.distillation.opsd_compaction import opsd_compaction_loss
from losses.distillation.pcsd import pcsd_loss
from losses.distillation.rlcsd import rlcsd_loss
from losses.distillation.rltf import rltf_loss
from losses.distillation.scope import scope_loss
from losses.distillation.sdar import sdar_loss
from losses.distillation.seed_opd import seed_opd_loss
from losses.distillation.stepopsd import stepopsd_credit
from losses.distillation.tcod import tcod_advantage
from losses.distillation.tt_opd import phased_out, tt_opd_regularizer
from losses.distillation.turnopd import (
    depth_controller,
    effective_depth,
    is_probe,
    turnopd_weights,
)

B, T, V = 6, 9, 5
GROUPS = np.array([7, 7, 3, 3, 3, 7])
MASK = np.ones((B, T))
MASK[0, 6:] = MASK[1, 3] = MASK[2, :2] = MASK[2, 5] = MASK[4, 4:] = MASK[5, 8] = 0
VALID = MASK > 0
N = VALID.sum()
TURNS = np.array(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 2, 2, 2, 2],
        [0, 0, 0, 0, 1, 1, 1, 2, 2],
        [0, 1, 1, 2, 2, 2, 3, 3, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 4, 4, 4],
    ]
)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed, shape=(B, T), low=-2.5, high=0.0):
    return np.random.default_rng(seed).uniform(low, high, shape)


LOGPROBS, OLD = draw(0), draw(0) + draw(1, low=-0.4, high=0.4)
TEACHER = LOGPROBS + draw(2, low=-0.8, high=0.8)
ADVANTAGES = np.repeat(np.random.default_rng(3).normal(size=(B, 1)), T, 1)
REWARDS = np.array([1.0, 0.0, 0.3, 1.0, 0.0, 0.6])
LOGITS, TEACHER_LOGITS = draw(4, (B, T, V), -2, 2), draw(5, (B, T, V), -2, 2)
TOKENS = np.random.default_rng(6).integers(0, V, (B, T))


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def gradient(function, at=LOGPROBS):
    """Gradient of a loss `function(x) -> (loss, metrics)`."""
    return np.asarray(jax.grad(lambda x: function(x)[0])(jnp.asarray(at)))


def reverse_kl(p_logits, q_logits):
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p_logits, q_logits))
    return (np.exp(p) * (p - q)).sum(-1)


# --- OmniOPD


CHUNKS = np.full((B, T), -1)
CHUNKS[0, 1:3], CHUNKS[0, 4:6], CHUNKS[1, 2:5], CHUNKS[3, 6:9] = 1, 0, 0, 2
SUPPORT = draw(7, (B, 3), 0, 4)


def audited_weights(support=SUPPORT, **hyper):
    """hat of every token, from the gradient with respect to its log-probability."""
    g = gradient(
        lambda x: omniopd_mean(x, np.zeros((B, T)), MASK, CHUNKS, support, n_rollouts=4, **hyper)
    )
    return -g * B


def confidences():
    bar = np.zeros((B, T))
    for i in range(B):
        for c in range(3):
            members = VALID[i] & (CHUNKS[i] == c)
            if members.any():
                bar[i, members] = np.exp(LOGPROBS[i, members].mean())
    return bar


def test_omniopd_weight_is_the_posterior_mean_of_the_support():
    bar, audited = confidences(), VALID & (CHUNKS >= 0)
    support = np.take_along_axis(SUPPORT, np.maximum(CHUNKS, 0), 1)
    close(audited_weights(alpha=2.0), audited * (support + 2 * bar) / 6)
    close(audited_weights(np.full((B, 3), 4.0)), audited * (4 + bar) / 5)
    close(audited_weights(np.zeros((B, 3))), bar / 5)
    assert np.all(audited_weights(np.zeros((B, 3)))[audited] > 0)
    close(audited_weights(alpha=0.0), audited * support / 4)
    close(audited_weights(alpha=1e12), bar, 1e-9)


def test_omniopd_holds_only_unaudited_tokens_to_the_base():
    def loss(x, beta, chunks=CHUNKS):
        return omniopd_loss(x, TEACHER_LOGITS, TOKENS, MASK, chunks, SUPPORT, beta=beta)

    g = gradient(lambda x: loss(x, 0.0), LOGITS)
    np.testing.assert_array_equal(np.any(g != 0, -1), VALID & (CHUNKS >= 0))
    g = gradient(lambda x: loss(x, 0.3), LOGITS)
    np.testing.assert_array_equal(np.any(g != 0, -1), VALID)
    nowhere = np.full((B, T), -1)
    close(loss(TEACHER_LOGITS, 0.3, nowhere)[0], 0)
    expected = (reverse_kl(TEACHER_LOGITS, LOGITS) * MASK).sum() / B
    close(loss(LOGITS, 1.0, nowhere)[0], expected)


def test_omniopd_chunks_are_disjoint_and_at_the_most_uncertain_places():
    entropy = draw(8, low=0, high=2)
    chunk_ids = np.asarray(select_chunks(entropy, MASK, n_chunks=3, chunk_size=2))
    for i in range(B):
        starts, expected = [], np.full(T, -1)
        for j in range(3):
            free = [
                t
                for t in range(T - 1)
                if VALID[i, t : t + 2].all() and all(abs(t - s) >= 2 for s in starts)
            ]
            if free:
                starts.append(max(free, key=lambda t: (entropy[i, t], t)))
                expected[starts[-1] : starts[-1] + 2] = j
        np.testing.assert_array_equal(chunk_ids[i], expected)
    assert chunk_ids.max() == 2 and np.any(chunk_ids.max(1) < 2)  # fewer where they do not fit
    flat = np.asarray(select_chunks(np.ones((1, T)), np.ones((1, T)), n_chunks=1, chunk_size=3))
    np.testing.assert_array_equal(flat[0], [-1] * 6 + [0] * 3)  # ties: the later position
    assert np.all(np.asarray(select_chunks(entropy, MASK, chunk_size=16)) == -1)


# --- OPD2


BASE = TEACHER + draw(9, low=-0.7, high=0.7)


def opd2(teacher=TEACHER, base=BASE, old=OLD, **hyper):
    return np.asarray(opd2_advantage(teacher, base, old, MASK, **hyper))


def test_opd2_transfers_what_tuning_changed_and_nothing_else():
    close(opd2(base=TEACHER), 0)
    close(opd2(old=TEACHER), (TEACHER - BASE) * MASK)
    close(opd2(teacher=BASE - 9, clip=5.0), -5 * MASK)
    fluent = np.full((B, T), -0.01)  # likely to teacher and base, unlikely to the student
    assert np.abs(opd2(fluent, fluent - 0.01)).max() < 0.02 < np.abs(fluent - OLD)[VALID].min()


def test_opd2_anchor_interpolates_to_plain_distillation():
    plain = (TEACHER - OLD) * MASK
    close(opd2(clip=None, anchor=1.0), plain)
    close(opd2(clip=None, anchor=0.3), 0.7 * opd2(clip=None) + 0.3 * plain)


def test_opd2_anchored_fixed_point_extrapolates_beyond_the_teacher():
    teacher, base = (x - np.log(np.exp(x).sum()) for x in draw(10, (2, T), -2, 0))
    student = base + (teacher - base) / 0.4  # proportional to base (teacher / base)^(1 / anchor)
    student = student - np.log(np.exp(student).sum())
    value = opd2_advantage(teacher[None], base[None], student[None], np.ones((1, T)), anchor=0.4)
    close(np.ptp(np.asarray(value)), 0)


# --- OPID


EPISODE, STEP = OLD + draw(11, low=-0.5, high=0.5), OLD + draw(12, low=-0.5, high=0.5)
STEP_MASK = MASK * (TURNS == 1)
EPISODE_MASK = MASK * (TURNS != 1)


def opid(rewards=REWARDS, episode=EPISODE, step=STEP, turns=TURNS, groups=GROUPS, **hyper):
    out = opid_advantage(
        rewards, groups, OLD, episode, step, EPISODE_MASK, STEP_MASK, MASK, turns, **hyper
    )
    return np.asarray(out)


NO_SKILLS = dict(w_episode=0.0, w_step=0.0)


def test_opid_without_skills_counted_once_is_the_group_advantage():
    expected = np.asarray(grpo_advantage(REWARDS, GROUPS))[:, None] * MASK
    close(opid(weight_by_turns=False, **NO_SKILLS), expected)


def test_opid_counts_a_response_once_per_turn():
    out = opid(**NO_SKILLS)
    for g in np.unique(GROUPS):
        rows = np.flatnonzero(GROUPS == g)
        samples = np.concatenate([[REWARDS[i]] * len(np.unique(TURNS[i][VALID[i]])) for i in rows])
        for i in rows:
            a = (REWARDS[i] - samples.mean()) / (samples.std(ddof=1) + 1e-6)
            close(out[i], a * MASK[i])
    single = np.zeros_like(TURNS)
    even = opid(turns=single, scale_by_std=False, **NO_SKILLS)
    long = single.copy()
    long[3] = np.arange(T)  # the successful response of its group gets long
    pulled = opid(turns=long, scale_by_std=False, **NO_SKILLS)
    assert np.all((pulled - even)[GROUPS == 3][:, 2:4][MASK[GROUPS == 3][:, 2:4] > 0] < -0.1)


def test_opid_groups_of_one():
    out = opid(groups=np.arange(B), **NO_SKILLS)
    close(out[4], REWARDS[4] * MASK[4] / (1 + 1e-6))  # one turn
    close(out[[0, 1, 2, 3, 5]], 0)  # several turns
    one_turn = opid(groups=np.arange(B), turns=np.zeros_like(TURNS), **NO_SKILLS)
    close(one_turn, REWARDS[:, None] * MASK / (1 + 1e-6))


def test_opid_skill_terms_are_the_bounded_shifts_on_their_turns():
    base = opid(**NO_SKILLS)
    close(opid(episode=OLD, step=OLD), base)
    shift = opid(w_episode=0.1, w_step=0.2, clip=0.3) - base
    expected = 0.1 * np.clip(EPISODE - OLD, -0.3, 0.3) * EPISODE_MASK
    expected += 0.2 * np.clip(STEP - OLD, -0.3, 0.3) * STEP_MASK
    close(shift, expected)
    assert np.all(EPISODE_MASK * STEP_MASK == 0)
    np.testing.assert_array_equal(np.sign(opid()), np.sign(base))  # the outcome decides


# --- OPSD compaction


def opsd(logits=LOGITS, rewards=REWARDS - 0.3, **hyper):
    return opsd_compaction_loss(logits, TEACHER_LOGITS, rewards, MASK, **hyper)


def test_opsd_compaction_is_a_divergence_on_the_kept_rows():
    d, right = reverse_kl(LOGITS, TEACHER_LOGITS), (REWARDS - 0.3 > 0)[:, None]
    for keep, rows in (("correct", right), ("incorrect", ~right), ("all", True)):
        kept = VALID & rows
        close(opsd(keep=keep)[0], d[kept].mean())
        g = gradient(lambda x, keep=keep: opsd(x, keep=keep), LOGITS)
        np.testing.assert_array_equal(np.any(g != 0, -1), kept)
    close(opsd(TEACHER_LOGITS)[0], 0)
    assert opsd()[0] > 0


def test_opsd_compaction_arms_add_up_and_read_the_sign_alone():
    right = VALID[(REWARDS - 0.3) > 0].sum()
    arms = opsd(keep="correct")[0] * right + opsd(keep="incorrect")[0] * (N - right)
    close(arms, opsd(keep="all")[0] * N)
    close(opsd(rewards=np.sign(REWARDS - 0.3) * 7)[0], opsd()[0])
    assert opsd(rewards=-np.ones(B))[0] == 0


# --- SDAR


def test_sdar_gradient_is_the_gate_and_always_towards_the_sampled_token():
    for gate_beta in (0.0, 5.0, 1e6):
        g = gradient(lambda x, b=gate_beta: sdar_loss(x, TEACHER, MASK, gate_beta=b))
        exponent = np.clip(-gate_beta * (TEACHER - LOGPROBS), -700, 700)
        close(g, -0.01 * MASK / (1 + np.exp(exponent)) / N)
    assert np.any(TEACHER < LOGPROBS) and np.all(g <= 0)


def test_sdar_of_an_agreeing_teacher_has_no_value_but_a_gradient():
    assert sdar_loss(LOGPROBS, LOGPROBS, MASK)[0] == 0
    close(gradient(lambda x: sdar_loss(x, LOGPROBS, MASK)), -0.005 * MASK / N)


# --- PCSD


def pcsd_gates(teacher=TEACHER, turns=TURNS, **hyper):
    g = gradient(lambda x: pcsd_loss(x, teacher, MASK, turns, coef=1.0, **hyper))
    return -g * N


def pcsd_by_loops(gate_beta=2.0, w_min=2, w_max=8, decay=0.8, trend=0.5):
    gates = np.zeros((B, T))
    for i in range(B):
        gap = (TEACHER - LOGPROBS)[i]
        z = (gap - gap[VALID[i]].mean()) / (gap[VALID[i]].std() + 1e-6)
        for k in np.unique(TURNS[i]):
            before, last = [], None
            for t in np.flatnonzero(VALID[i] & (TURNS[i] == k)):
                noise = abs(z[t] - before[-1]) if before else 0.0
                before.append(z[t])
                width = min(w_min + int((w_max - w_min) * noise / (1 + noise)), len(before))
                weights = decay ** np.arange(width)
                p = np.dot(weights, before[::-1][:width]) / weights.sum()
                fall = max(0.0, last - p) if last is not None else 0.0
                gates[i, t] = 1 / (1 + np.exp(-gate_beta * (p - trend * fall)))
                last = p
    return gates


def test_pcsd_gates_equal_their_definition_written_as_loops():
    close(pcsd_gates(), pcsd_by_loops())
    close(pcsd_gates(w_min=3, w_max=5, decay=0.5, trend=2.0), pcsd_by_loops(2, 3, 5, 0.5, 2.0))


def test_pcsd_with_windows_of_one_is_sdar_on_standardised_gaps():
    gap = TEACHER - LOGPROBS
    z = np.zeros((B, T))
    for i, m in enumerate(VALID):
        z[i, m] = (gap[i, m] - gap[i, m].mean()) / (gap[i, m].std() + 1e-6)
    gates = pcsd_gates(w_min=1, w_max=1, trend=0.0)
    close(gates, -gradient(lambda x: sdar_loss(x, x + z, MASK, coef=1.0, gate_beta=2.0)) * N)


def test_pcsd_gates_are_relative_and_shares_between_0_and_1():
    gates = pcsd_gates()
    close(pcsd_gates(TEACHER + np.arange(B)[:, None]), gates)
    assert np.all((gates[VALID] > 0) & (gates[VALID] < 1)) and np.all(gates[~VALID] == 0)
    close(pcsd_gates(LOGPROBS + 0.3), 0.5 * MASK)


def test_pcsd_prefers_persistent_support():
    gap = np.full((B, T), -0.5)
    gap[0, 3], gap[3, 2:5] = 0.7, 0.7
    gap[0, 0] = gap[0, 1] = 0.7  # equal mean and spread of the two rows, other order
    mask, turns = np.ones((B, T)), np.zeros((B, T), int)
    g = -gradient(lambda x: pcsd_loss(x, LOGPROBS + gap, mask, turns, coef=1.0)) * B * T
    assert g[0, 3] < g[3, 4] - 0.05


def test_pcsd_trend_only_lowers_and_only_where_support_falls():
    plain, attenuated = pcsd_gates(trend=0.0), pcsd_gates(trend=0.8)
    assert np.all(attenuated <= plain + 1e-15) and np.any(attenuated < plain - 1e-3)
    unmoved = VALID & (np.abs(attenuated - plain) < 1e-15)
    p = np.log(plain[VALID] / (1 - plain[VALID]))
    support = np.zeros((B, T))
    support[VALID] = p
    for i, t in np.argwhere(VALID):
        earlier = [u for u in range(t) if VALID[i, u] and TURNS[i, u] == TURNS[i, t]]
        falls = bool(earlier) and support[i, t] < support[i, earlier[-1]] - 1e-9
        assert unmoved[i, t] != falls


def test_pcsd_windows_do_not_cross_turns():
    gap = TEACHER - LOGPROBS
    swapped = gap.copy()
    swapped[3, 6:9] = gap[3, [7, 6, 8]]  # within the last turn: mean and spread stay
    before, after = pcsd_gates(LOGPROBS + gap), pcsd_gates(LOGPROBS + swapped)
    close(after[3, :6], before[3, :6])
    assert np.abs(after - before)[3, 6:].max() > 1e-3


# --- RLCSD


WRONG = LOGPROBS[:, None] + draw(13, (B, 3, T), -0.1, 0.1)
RIGHT = LOGPROBS + draw(14, low=-0.1, high=0.1)
HINTS = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])


def rlcsd(x=LOGPROBS, right=RIGHT, wrong=WRONG, hints=HINTS, advantages=ADVANTAGES, **hyper):
    return rlcsd_loss(x, OLD, advantages, MASK, right, wrong, hints, **hyper)


def signals(right=RIGHT):
    e = np.zeros((B, T))
    for i in range(B):
        if HINTS[i].any():
            e[i] = right[i] - np.log(np.exp(WRONG[i][HINTS[i] > 0]).mean(0))
    return 0.5 * np.tanh(e / 0.02)


def test_rlcsd_without_contrast_is_the_clipped_token_mean():
    plain, _ = dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.2)
    same = np.repeat(RIGHT[:, None], 3, 1)
    loss, metrics = rlcsd(wrong=same)
    close(loss, plain)
    assert metrics["selected_fraction"] == 0
    close(rlcsd(hints=np.zeros((B, 3)), wrong=np.full_like(WRONG, np.nan))[0], plain)


def test_rlcsd_moves_advantages_by_the_signal_and_never_past_zero():
    r = signals()
    selected = VALID & (np.abs(r) > 0.4)
    assert selected.any() and (VALID & ~selected & HINTS.any(1)[:, None]).any()
    moved = ADVANTAGES + r
    moved = np.where(ADVANTAGES > 0, np.maximum(moved, 0), np.minimum(moved, 0))
    assert np.any(moved[selected] == 0) and np.any((r > 0) & (ADVANTAGES < 0) & selected)
    # At the old policy no clip binds, and the gradient is minus the advantage over the count.
    g = gradient(lambda x: rlcsd(x, eta=0.5, delta=0.4), OLD)
    expected = -ADVANTAGES / (VALID & ~selected).sum() * (VALID & ~selected)
    expected += -0.5 * moved / selected.sum() * selected
    close(g, expected)
    close(rlcsd(delta=0.4)[1]["selected_fraction"], selected.sum() / N)
    close(rlcsd(advantages=0 * ADVANTAGES)[0], 0)


def test_rlcsd_eta_zero_trains_the_unselected_alone():
    selected = VALID & (np.abs(signals()) > 0.02)
    g = gradient(lambda x: rlcsd(x, eta=0.0), OLD)
    np.testing.assert_array_equal(g != 0, VALID & ~selected)


def test_rlcsd_mixes_hints_before_the_logarithm():
    close(rlcsd(wrong=np.tile(WRONG, (1, 2, 1)), hints=np.tile(HINTS, (1, 2)))[0], rlcsd()[0])
    garbage = np.where(HINTS[..., None] > 0, WRONG, np.nan)
    g = gradient(lambda x: rlcsd(x, wrong=garbage))
    close(g, gradient(rlcsd))
    one = rlcsd(wrong=WRONG[:, :1], hints=np.ones((B, 1)), tau=1e3, delta=0.0)[0]
    tiny = 0.5 * (RIGHT - WRONG[:, 0]) / 1e3  # a plain difference where tanh is linear
    moved = ADVANTAGES + tiny
    rho = np.exp(LOGPROBS - OLD)
    loss = -np.minimum(rho * moved, np.clip(rho, 0.8, 1.2) * moved)
    close(one, loss[VALID].mean(), 1e-8)


# --- RLTF


CRITIQUES, CRITIQUE_MASK = draw(15, (B, 4)), (draw(16, (B, 4), 0, 1) > 0.4).astype(float)
FIRST = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.2])
REVISED = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])


def rltf(x=LOGPROBS, old=OLD, first=FIRST, revised=REVISED, critiques=CRITIQUES, **hyper):
    return rltf_loss(x, old, MASK, revised, first, GROUPS, critiques, CRITIQUE_MASK, **hyper)


def test_rltf_first_turn_baseline_avoids_the_collapse():
    ones = np.ones(B)
    assert rltf(revised=ones, baseline="second", fm_coef=0.0)[0] == 0
    assert rltf(revised=ones, fm_coef=0.0)[0] < 0
    assert rltf(revised=ones, first=ones, fm_coef=0.0)[0] == 0


def test_rltf_on_policy_gradient_is_the_improvement_over_the_group():
    baseline = np.array([FIRST[GROUPS == g].mean() for g in GROUPS])
    g = gradient(lambda x: rltf(x, old=LOGPROBS))
    close(g, -0.1 * (REVISED - baseline)[:, None] * MASK / B)
    alone = rltf_loss(
        LOGPROBS, LOGPROBS, MASK, REVISED, FIRST, np.arange(B), sd_coef=1.0, fm_coef=0.0
    )[0]
    close(alone, -((REVISED - FIRST) * MASK.sum(1)).sum() / B)


def test_rltf_leaves_out_tokens_the_plain_prompt_finds_impossible():
    g = gradient(lambda x: rltf(x, logprob_floor=-1.5))
    np.testing.assert_array_equal(g[OLD < -1.5], 0)
    kept = VALID & (OLD >= -1.5) & (g != 0)
    close(g[kept], gradient(rltf)[kept])
    edge = OLD[3, 4]
    assert gradient(lambda x: rltf(x, logprob_floor=edge))[3, 4] != 0


def test_rltf_feedback_modelling_does_not_read_rewards():
    for revised in (REVISED, -REVISED):
        g = gradient(lambda c, r=revised: rltf(critiques=c, revised=r), CRITIQUES)
        close(g, -0.1 * CRITIQUE_MASK / B)
    close(rltf(sd_coef=0.0)[0], -0.1 * (CRITIQUES * CRITIQUE_MASK).sum() / B)


def test_rltf_without_feedback_modelling_needs_no_critiques():
    needs = losses.entry("rltf").needs_with({"fm_coef": 0.0})
    assert "critique_logprobs" not in needs and "critique_mask" not in needs


# --- SCOPE


SIDES = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
SCOPE_GROUPS = np.array([7, 7, 7, 7, 7, 7])


def scope(x=LOGPROBS, old=OLD, teacher=TEACHER, rewards=SIDES, ids=SCOPE_GROUPS, **hyper):
    return scope_loss(x, old, teacher, rewards, ids, MASK, **hyper)


def scope_weights(old=OLD, teacher=TEACHER, rewards=SIDES, ids=SCOPE_GROUPS, **hyper):
    """Weight of every row, from the gradient at the old policy."""
    g = gradient(lambda x: scope(x, old, teacher, rewards, ids, **hyper), old)
    right, out = rewards > 0, np.zeros(B)
    for i in range(B):
        own = VALID[i]
        if right[i]:
            out[i] = -g[i, own][0] * VALID[right].sum()
        else:
            out[i] = -(g[i, own] / (teacher - old)[i, own])[0] * N
    return out


def test_scope_weights_sum_to_the_size_of_their_set():
    weights, right = scope_weights(), SIDES > 0
    close(weights[right].sum(), right.sum())
    close(weights[~right].sum(), (~right).sum())
    ppl = np.array([-OLD[i][m].mean() for i, m in enumerate(VALID)])
    expected = np.exp(ppl[right]) / np.exp(ppl[right]).sum() * right.sum()
    close(weights[right], expected)
    assert np.ptp(weights[~right]) > 1e-3


def test_scope_hot_weights_are_plain_likelihood_and_distillation():
    right = (SIDES > 0)[:, None] & VALID
    a = (TEACHER - OLD) * ~(SIDES > 0)[:, None]
    plain = dapo_loss(LOGPROBS, OLD, a * MASK, MASK, clip_high=0.2)[0]
    close(scope(tau=np.inf)[0], plain - LOGPROBS[right].mean())


def test_scope_on_policy_gradient():
    g = gradient(lambda x: scope(x, tau=np.inf), OLD)
    right = (SIDES > 0)[:, None]
    close(g, np.where(right, -1 / (right & VALID).sum(), -(TEACHER - OLD) / N) * MASK)


def test_scope_routes_by_correctness():
    _, metrics = scope(rewards=np.ones(B))
    assert metrics["distillation_loss"] == 0 and metrics["likelihood_loss"] > 0
    _, metrics = scope(rewards=np.zeros(B))
    assert metrics["likelihood_loss"] == 0 and metrics["distillation_loss"] != 0


def test_scope_weights_follow_the_perplexities():
    before = scope_weights()
    old, teacher = OLD.copy(), TEACHER.copy()
    old[0] += 0.1
    teacher[4] += 0.1
    assert scope_weights(old=old)[0] < before[0] and scope_weights(teacher=teacher)[4] > before[4]
    assert scope_weights(old=old, student_power=-1.0)[0] > scope_weights(student_power=-1.0)[0]


# --- SEED


SKILLS = MASK * (TURNS == 0)


def seed(x=LOGPROBS, teacher=TEACHER, skills=SKILLS, mask=MASK, **hyper):
    return seed_opd_loss(x, OLD, teacher, ADVANTAGES, skills, mask, **hyper)


def test_seed_without_skills_is_the_clipped_token_mean():
    plain = dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.2)[0]
    close(seed(coef=0.0)[0], plain)
    close(seed(skills=np.zeros((B, T)))[0], plain)
    close(seed(teacher=LOGPROBS)[1]["gate_mean"], 0.5)
    close(seed(teacher=LOGPROBS)[0], plain)


def test_seed_pulls_skill_tokens_up_with_a_denominator_of_their_own():
    extra = gradient(lambda x: seed(x, coef=0.3)) - gradient(lambda x: seed(x, coef=0.0))
    gate = 1 / (1 + np.exp(-5 * (TEACHER - LOGPROBS)))
    close(extra, -0.3 * gate * SKILLS / SKILLS.sum())
    fewer = MASK * ((TURNS == 0) | (np.arange(T) % 2 == 0))
    assert fewer.sum() < MASK.sum()
    close(seed(mask=fewer)[1]["distillation_loss"], seed()[1]["distillation_loss"])


# --- StepOPSD


def stepopsd(advantages=ADVANTAGES, teacher=TEACHER, **hyper):
    return np.asarray(stepopsd_credit(advantages, OLD, teacher, MASK, TURNS, **hyper))


def test_stepopsd_without_mixing_or_gap_leaves_advantages():
    close(stepopsd(lambda_mix=0.0), ADVANTAGES * MASK)
    close(stepopsd(teacher=OLD), ADVANTAGES * MASK)


def test_stepopsd_moves_credit_within_a_step_only():
    out = stepopsd(lambda_mix=1.0)
    np.testing.assert_array_equal(np.sign(out), np.sign(ADVANTAGES) * MASK)
    v = (out / ADVANTAGES)[VALID]
    assert v.min() >= np.exp(-0.4) and v.max() <= np.exp(0.4) and np.ptp(v) > 0.1
    for i in range(B):
        for k in np.unique(TURNS[i][VALID[i]]):
            members = VALID[i] & (TURNS[i] == k)
            close(out[i, members].mean(), ADVANTAGES[i, 0])
    shift = 0.01 * TURNS
    small = OLD + 0.1 * (TEACHER - OLD)
    close(stepopsd(teacher=small + shift), stepopsd(teacher=small))


def test_stepopsd_rewards_and_spares_what_the_teacher_prefers():
    out = stepopsd()
    gap = TEACHER - OLD
    for i in range(B):
        for k in np.unique(TURNS[i][VALID[i]]):
            members = np.flatnonzero(VALID[i] & (TURNS[i] == k))
            best, worst = members[np.argmax(gap[i, members])], members[np.argmin(gap[i, members])]
            assert out[i, best] >= out[i, worst]
    assert np.any(ADVANTAGES < 0) and np.any(ADVANTAGES > 0)


# --- TCOD


DEMO = np.array([3, 1, 4, 0, 2, 5])


def tcod(step, order="f2b", **hyper):
    out = tcod_advantage(OLD, TEACHER, MASK, TURNS, DEMO, step=step, order=order, **hyper)
    return np.asarray(out)


def test_tcod_at_the_end_is_plain_distillation():
    plain = (TEACHER - OLD) * MASK
    for order in ("f2b", "b2f"):
        close(tcod(1000, order), plain)
        close(tcod_advantage(OLD, OLD, MASK, TURNS, DEMO, step=1000, order=order), 0)


def test_tcod_starts_at_one_end_of_the_trajectory():
    plain = (TEACHER - OLD) * MASK
    close(tcod(0), plain * (TURNS == 0))
    close(tcod(0, "b2f"), plain * (TURNS >= np.maximum(DEMO - 1, 0)[:, None]))


@pytest.mark.parametrize("order", ["f2b", "b2f"])
def test_tcod_widens_at_multiples_of_every_only(order):
    kept = [tcod(step, order, every=3) != 0 for step in range(13)]
    for step, (before, after) in enumerate(zip(kept, kept[1:]), start=1):
        assert np.all(after | ~before)
        assert step % 3 == 0 or np.array_equal(before, after)
    assert kept[0].sum() < kept[-1].sum()
    traced = jax.jit(lambda s: tcod_advantage(OLD, TEACHER, MASK, TURNS, DEMO, step=s, order=order))
    close(traced(7), tcod(7, order))


def test_tcod_needs_demonstrations_for_one_order_only():
    entry = losses.entry("tcod")
    assert "demo_turns" in entry.needs_with({"order": "b2f"})
    assert "demo_turns" not in entry.needs


# --- TT-OPD


def tt_opd(x=LOGITS, teacher=TEACHER_LOGITS, mask=MASK, turns=TURNS, **hyper):
    return tt_opd_regularizer(x, teacher, mask, turns, **hyper)


def test_tt_opd_is_a_divergence():
    assert tt_opd()[0] > 0
    close(tt_opd(teacher=LOGITS)[0], 0)
    close(gradient(lambda x: tt_opd(x, teacher=LOGITS), LOGITS), 0)


def test_tt_opd_averages_tokens_then_turns_then_rows():
    d, rows = reverse_kl(LOGITS, TEACHER_LOGITS), []
    for i in range(B):
        turns = np.unique(TURNS[i][VALID[i]])
        rows.append(np.mean([d[i][VALID[i] & (TURNS[i] == k)][:2].mean() for k in turns]))
    close(tt_opd(kl_coef=0.7, max_tokens_per_turn=2)[0], 0.7 * np.mean(rows))


def test_tt_opd_tokens_beyond_the_cut_change_nothing():
    def loss(x, mask):
        return tt_opd(x, mask=mask, max_tokens_per_turn=2)

    shorter = MASK.copy()
    shorter[3, 8] = shorter[5, 4:6] = 0  # third tokens of their turns
    close(loss(LOGITS, shorter)[0], loss(LOGITS, MASK)[0])
    close(gradient(lambda x: loss(x, shorter), LOGITS), gradient(lambda x: loss(x, MASK), LOGITS))


def test_tt_opd_rows_weigh_the_same_however_they_are_cut_into_turns():
    one = np.repeat(LOGITS[:1, :1], T, 1)
    teacher = np.repeat(TEACHER_LOGITS[:1, :1], T, 1)
    values = [
        tt_opd(one, teacher, np.ones((1, T)), turns[None])[0]
        for turns in (np.zeros(T, int), np.arange(T))
    ]
    close(values[0], values[1])
    single = tt_opd(turns=np.zeros_like(TURNS), kl_coef=1.0, max_tokens_per_turn=T)[0]
    d = reverse_kl(LOGITS, TEACHER_LOGITS)
    close(single, np.mean([d[i][m].mean() for i, m in enumerate(VALID)]))


def test_tt_opd_phase_out_falls_to_zero_and_stays_there():
    weights = np.array([float(phased_out(step)) for step in range(60)])
    assert np.all(np.diff(weights) <= 0)
    close(weights[[0, 20, 30]], [0.1, 0.1, 0.05])
    np.testing.assert_array_equal(weights[40:], 0)


# --- TurnOPD


def turn_weights(**hyper):
    return np.asarray(turnopd_weights(np.ones((B, T)), MASK, TURNS, **hyper))


def test_turnopd_alpha_runs_from_equal_tokens_to_equal_depths():
    np.testing.assert_array_equal(
        turnopd_weights(ADVANTAGES, MASK, TURNS, alpha=0.0), ADVANTAGES * MASK
    )
    weights, depths = turn_weights(), np.unique(TURNS[VALID])
    for k in depths:
        close(weights[VALID & (TURNS == k)].sum(), N / len(depths))
    close(turn_weights(alpha=0.3), 0.7 * MASK + 0.3 * weights)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_turnopd_keeps_the_scale_of_its_scope(alpha):
    close(turn_weights(alpha=alpha).sum(), N)
    close(turn_weights(alpha=alpha, scope="sequence").sum(1), MASK.sum(1))
    single = turnopd_weights(ADVANTAGES, MASK, np.full((B, T), 5), alpha=alpha)
    close(single, ADVANTAGES * MASK)


def test_turnopd_rare_deep_turns_weigh_most_in_batch_scope():
    batch, sequence = turn_weights(), turn_weights(scope="sequence")
    rare = VALID & (TURNS == 4)
    assert rare.any(axis=1).sum() == 1 and batch[rare].min() == batch.max() > 3
    assert sequence[rare].max() < 2


def test_turnopd_depth_controller():
    state = dict(depth=None, cap=None, seen=0)
    state = depth_controller(state, [4] * 5, [True] * 5, max_depth=20)
    assert state["cap"] is None and state["depth"] == 4  # too few seen
    state = depth_controller(state, [4] * 5, [False] * 5, max_depth=20)
    assert state == dict(depth=4, cap=4, seen=10)
    mixed = depth_controller(state, [9, 9, 2, 30], [True, True, True, False], max_depth=20)
    close(mixed["depth"], 0.7 * 4 + 0.3 * 9)
    failed = depth_controller(state, [30] * 9, [False] * 9, max_depth=10)
    assert failed["cap"] == 10
    assert [is_probe(s, warmup=2, probe_every=4) for s in range(6)] == [True, True] + [
        False, False, True, False,
    ]  # fmt: skip
    close(effective_depth([1.0, 1.0, 2.0], [1.0, 0.5, 0.25]), (1 + 1 + 1.5) / 2)
