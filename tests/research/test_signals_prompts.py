"""Signals per prompt, of preferences and of sampling, on rollouts made by hand."""

import types

import numpy as np
import pytest

from losses.advantages.gdro import gdro_update
from research.rollouts import allowed_tokens
from research.signals import SIGNALS, SPECIAL
from research.signals.prompts import REFERENCE_SAMPLES
from research.tasks import Record, get_task
from tests.research.made import context_of, rollout_of, tokenizer_of

TASK = get_task("addition")
SUMS = [Record(f"{a}+{b}=", str(a + b), {"operands": (a, b)}, n) for n, (a, b) in
        enumerate([(1, 2), (3, 4), (5, 6)])]  # fmt: skip


def config(**fields):
    given = {"group_size": 2, "seed": 0, "update": types.SimpleNamespace(minibatches=1)}
    return types.SimpleNamespace(**{**given, **fields})


def batch(*answers):
    """Two responses to each of the sums."""
    rows = [(SUMS[row // 2], [text]) for row, text in enumerate(answers)]
    groups = [5 + row // 2 for row in range(len(answers))]
    return context_of(TASK, rollout_of(TASK, rows, group_ids=groups), config=config())


# -- preferences -----------------------------------------------------------------------------------


def test_pairs_are_the_best_and_the_worst_of_mixed_groups():
    context = batch("3", "4", "7", "7", "1", "11")
    chosen, rejected = SPECIAL["chosen", "rejected"](context), SIGNALS["rejected"](context)
    np.testing.assert_array_equal(chosen, [0, 5, 0])  # two pairs, gone through again to three
    np.testing.assert_array_equal(rejected, [1, 4, 1])
    np.testing.assert_array_equal(SIGNALS["chosen"](context), [1, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(SIGNALS["desirable"](context), [1, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(SIGNALS["relevant"](context), [1, 0, 1, 1, 0, 1])


def test_a_batch_without_pairs_has_none():
    context = batch("3", "3", "7", "7")
    assert SPECIAL["chosen", "rejected"](context).shape == (0,)
    assert SIGNALS["rejected"](context).shape == (0,)


def test_pairs_need_the_whole_batch():
    context = batch("3", "4")
    context.config = config(update=types.SimpleNamespace(minibatches=2))
    with pytest.raises(ValueError, match="minibatches=2"):
        SIGNALS["rejected"](context)


def test_mismatched_prompts_of_kto():
    context = batch("3", "4", "7", "7")
    asked = {}

    def rescore(source, names, prompts):
        asked[source] = prompts
        value = {"policy": -1.0, "reference": -1.5}[source]
        return {"logprobs": np.full(context.rollout.tokens.shape, value, np.float32)}

    context.rescore = rescore
    found = SIGNALS["kl_log_ratios"](context)
    assert asked["policy"] == asked["reference"] == ["3+4=", "3+4=", "1+2=", "1+2="]
    np.testing.assert_allclose(found, 0.5 * context.rollout.mask.sum(1))


def test_examples_of_t_reg_are_right_and_wrong():
    context = batch("3", "4", "7", "7")
    asked = []
    context.rescore = lambda source, names, prompts: asked.append(prompts) or {"logprobs": source}
    assert SIGNALS["better_logprobs"](context) == "reference"
    SIGNALS["worse_logprobs"](context)
    assert asked[0] == ["1+2=31+2="] * 2 + ["3+4=73+4="] * 2
    assert asked[1] == ["1+2=41+2="] * 2 + ["3+4=33+4="] * 2


# -- prompts ---------------------------------------------------------------------------------------


def test_reference_rewards_are_asked_once():
    context = batch("3", "4", "7", "7")
    calls = []

    def respond(records, ids, *, group_size, source):
        calls.append((source, [r.prompt for r in records], list(ids)))
        right = np.arange(len(records) * group_size) % 4 == 0
        return types.SimpleNamespace(rewards=right.astype(np.float32))

    context.respond = respond
    rewards, groups = SIGNALS["ref_rewards"](context), SIGNALS["ref_group_ids"](context)
    assert rewards.shape == groups.shape == (2 * REFERENCE_SAMPLES,)
    np.testing.assert_array_equal(np.unique(groups), [5, 6])
    np.testing.assert_allclose(SIGNALS["prompt_values"](context), [0.25] * 4)
    assert len(calls) == 1 and calls[0][:2] == ("reference", ["1+2=", "3+4="])
    assert not set(calls[0][2]) & {5, 6}  # other random keys than the rollout's


def test_beta_states_count_the_outcomes_of_each_prompt():
    value = SPECIAL["prompt_values", "mssr_advantage"]
    context = batch("3", "4", "7", "7")  # the first prompt right and wrong, the second right twice
    logprobs = {"logprobs": np.zeros(context.rollout.tokens.shape, np.float32)}
    context.statistics = lambda source, names: logprobs
    np.testing.assert_allclose(value(context), [0.5] * 4)
    eta = 0.96  # no drift from the reference, slowest forgetting
    right = eta * (eta * 1 + 1), eta * (eta * 1 + 1) + 1
    wrong = eta * eta * 1 + 1, eta * eta * 1
    np.testing.assert_allclose(context.carried["mssr_beta"], [[right[0], wrong[0]],
                                                             [right[1], wrong[1]]])  # fmt: skip
    found = value(context)
    np.testing.assert_allclose(found[0], right[0] / (right[0] + wrong[0]), rtol=1e-6)
    np.testing.assert_array_equal(context.carried["mssr_kl"], [0, 0])


def test_pairs_of_a_hard_and_an_easy_prompt():
    context = batch("3", "4", "7", "7", "1", "11")

    def respond(records, ids, *, group_size, source):
        rates = np.array([0.125, 0.5, 0.875])
        right = np.arange(group_size) < rates[:, None] * group_size
        return types.SimpleNamespace(rewards=right.astype(np.float32).reshape(-1))

    context.respond = respond
    np.testing.assert_array_equal(SIGNALS["pair_role"](context), [1, 1, 0, 0, -1, -1])
    np.testing.assert_array_equal(SIGNALS["pair_ids"](context), [-1, -1, 6, 6, -1, -1])


def test_difficulty_follows_the_visits_before_this_one():
    context = batch("3", "4", "7", "7", "1", "1")
    visits = []
    for _ in range(3):
        context.memo = {}
        visits.append(SIGNALS["class_ids"](context).tolist())
    assert visits == [[0] * 6, [2] * 4 + [0] * 2, [2] * 4 + [0] * 2]


def test_scores_of_classes_are_losses_after_the_update():
    context = batch("3", "4", "1", "1")
    shape = context.rollout.tokens.shape
    context.config = config(objective=types.SimpleNamespace(clip_low=0.2, clip_high=0.2))
    now = np.zeros(shape, np.float32)
    context.statistics = lambda source, names, other=None: {"logprobs": now}
    np.testing.assert_array_equal(SIGNALS["class_scores"](context), [0, 0, 0])
    now = np.full(shape, np.log(1.1), np.float32)
    context.memo = {}
    found = SIGNALS["class_scores"](context)
    advantages = np.array([1, -1, 0, 0]) * np.sqrt(0.5) / (np.sqrt(0.5) + 1e-6)
    want, _ = gdro_update(np.zeros(3), np.zeros(3), -1.1 * advantages, np.zeros(4, np.int32))
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_criteria_are_left_out():
    task = get_task("rubric")
    record = task.train(0)
    context = context_of(task, rollout_of(task, [(record, [record.answer])]))
    asked = []
    context.rescore = lambda source, names, prompts: asked.append(prompts) or {"logprobs": 0}
    SIGNALS["counterfactual_logprobs"](context)
    assert asked == [["~" + record.prompt[1:]]]
    assert record.prompt[0] in "<>" and context.rollout.correct[0] == 1
    with pytest.raises(ValueError, match="task.name=rubric"):
        SIGNALS["counterfactual_logprobs"](batch("3", "4"))


# -- sampling --------------------------------------------------------------------------------------


def test_tokens_per_pass_grow_with_confidence():
    context = batch("37", "37")
    p = np.array([[0.5, 0.95, 0.99], [0.95, 0.5, 0.95]])
    context.rollout.logprobs[:, :3] = np.log(p)
    np.testing.assert_allclose(SIGNALS["tpf"](context), [3, 1.5])
    context.rollout.correct[:] = 1
    context.rollout.truncated[1] = True
    np.testing.assert_array_equal(SPECIAL["correct", "tpf"](context), [1, 0])


def test_allowed_tokens_are_those_of_the_characters():
    tokenizer = tokenizer_of(TASK)
    allowed = allowed_tokens(tokenizer, "01", 3)
    digits = tokenizer.encode("01")
    np.testing.assert_array_equal(np.flatnonzero(allowed[0]), digits)
    np.testing.assert_array_equal(np.flatnonzero(allowed[2]), [tokenizer.eos_id, *digits])
    assert allowed_tokens(tokenizer, "", 3) is None
    with pytest.raises(ValueError, match="allowed='x'"):
        allowed_tokens(tokenizer, "x", 3)


def test_old_logprobs_are_of_the_restricted_policy():
    context = batch("10", "01")
    tokenizer = context.tokenizer
    context.config = config(
        sampling=types.SimpleNamespace(allowed="01", max_new_tokens=context.rollout.mask.shape[1])
    )
    shape = (*context.rollout.tokens.shape, tokenizer.vocab_size)
    context.statistics = lambda source, names: {"logits": np.zeros(shape, np.float32)}
    valid = SIGNALS["valid_tokens"](context)
    np.testing.assert_array_equal(valid[0, :3].sum(-1), [2, 3, 3])
    old = SPECIAL["old_logprobs", "valid_tokens"](context)
    np.testing.assert_allclose(old[0, :3], -np.log([2, 3, 3]), rtol=1e-6)


def test_random_scores_depend_on_the_step_alone():
    context = batch("3", "4")
    first = SIGNALS["select_scores"](context)
    np.testing.assert_array_equal(first, SIGNALS["select_scores"](context))
    context.step = 1
    assert np.all(first != SIGNALS["select_scores"](context))
    assert 0 <= first.min() and first.max() < 1
