"""Signals of several turns, and the second attempts of RLTF, on episodes made by hand."""

import numpy as np
import pytest

from research.signals import SIGNALS, feedback, outcome_on_last_token, turns
from research.tasks import Record, get_task
from tests.research.made import context_of, rollout_of, text_of

TASK = get_task("two_attempts")
SUM = Record("3+4=", "7", {"operands": (3, 4)})


@pytest.fixture
def context():
    episodes = [(SUM, ["7"]), (SUM, ["5", "7"]), (SUM, ["9", "=="]), (SUM, ["12", "3"])]
    return context_of(TASK, rollout_of(TASK, episodes))


def test_an_episode_holds_attempts_and_replies_in_order(context):
    r = context.rollout
    said = ["".join(context.tokenizer.decode([t]) or "." for t in row[:n])
            for row, n in zip(r.tokens, r.present.sum(1).astype(int))]  # fmt: skip
    assert said == ["7.", "5.<7.", "9.>==.", "12.>3."]
    assert text_of(context, r.mask) == ["7.", "5.7.", "9.==.", "12.3."]
    assert text_of(context, r.turn_ids == 1) == ["", "7.", "==.", "3."]
    np.testing.assert_array_equal(r.logprobs, -0.5 * r.mask)
    positions = r.model_rows()["positions"][:, 16:]
    np.testing.assert_array_equal(positions[1, :6], [4, 5, 6, 7, 8, -1])


def test_rewards_and_turns_that_took_place(context):
    np.testing.assert_array_equal(
        SIGNALS["turn_rewards"](context), [[1, 0], [0, 1], [0, 0], [0, 0]]
    )
    np.testing.assert_array_equal(SIGNALS["turn_mask"](context), [[1, 0], [1, 1], [1, 1], [1, 1]])
    assert SIGNALS["turn_ids"](context) is SIGNALS["step_ids"](context)


def test_the_outcome_stands_on_the_last_sampled_token(context):
    dense = outcome_on_last_token(context.rollout)
    np.testing.assert_array_equal(np.argwhere(dense > 0), [[0, 1], [1, 4]])


def test_a_turn_without_a_number_has_no_valid_format(context):
    np.testing.assert_array_equal(
        SIGNALS["format_valid"](context), [[1, 0], [1, 1], [1, 0], [1, 1]]
    )


def test_turn_values_are_read_at_the_start_of_each_turn(context):
    grid = np.arange(context.rollout.tokens.size, dtype=np.float32)
    grid = grid.reshape(context.rollout.tokens.shape)
    context.statistics = lambda source, names: {"values": grid}
    width = grid.shape[1]
    found = SIGNALS["turn_values"](context)
    np.testing.assert_array_equal(found, [[0, 0], [width, width + 3], [2 * width, 2 * width + 3],
                                          [3 * width, 3 * width + 4]])  # fmt: skip


def test_hindsight_picks_the_wrong_turns(context):
    assert text_of(context, SIGNALS["skill_mask"](context)) == ["", "5.", "9.==.", "12.3."]
    assert text_of(context, SIGNALS["target_mask"](context)) == ["", "", "9.==.", "12.3."]
    assert text_of(context, SIGNALS["step_mask"](context)) == ["", "5.", "9.", "12."]
    assert text_of(context, SIGNALS["episode_mask"](context)) == ["7.", "7.", "==.", "3."]


def test_skills_tell_of_an_attempt_and_the_reply_to_it(context):
    asked = []
    context.rescore = lambda source, names, prompts: asked.append(prompts) or {"logprobs": 0}
    SIGNALS["step_teacher_logprobs"](context)
    SIGNALS["episode_teacher_logprobs"](context)
    assert asked[0] == ["7=3+4=", "5<3+4=", "9>3+4=", "12>3+4="]
    assert asked[1] == ["7=3+4=", "7=3+4=", "==?3+4=", "3<3+4="]


def test_the_entropy_history_leaves_the_present_out(context):
    entropy = np.where(context.rollout.turn_ids == 0, 2.0, 0.5).astype(np.float32)
    context.statistics = lambda source, names: {"entropy": entropy}
    np.testing.assert_array_equal(SIGNALS["entropy_history"](context), [0, 0])
    entropy = entropy * 2
    np.testing.assert_allclose(SIGNALS["entropy_history"](context), [2, 0.5])
    np.testing.assert_allclose(SIGNALS["entropy_history"](context), [3, 0.75])


def test_a_task_without_replies_is_refused():
    task = get_task("addition")
    context = context_of(task, rollout_of(task, [(SUM, ["7"])]))
    with pytest.raises(ValueError, match="two_attempts"):
        SIGNALS["skill_mask"](context)
    with pytest.raises(ValueError, match="1 turns"):
        SIGNALS["revision_rewards"](context)


def test_revisions_follow_the_plain_prompt(context):
    revised = feedback.revision(context)
    assert text_of(context_of(TASK, revised), revised.mask) == ["", "7.", "==.", "3."]
    np.testing.assert_array_equal(revised.prompts, context.rollout.prompts)
    np.testing.assert_array_equal(revised.model_rows()["positions"][1, 16:19], [4, 5, -1])
    np.testing.assert_array_equal(SIGNALS["first_rewards"](context), [1, 0, 0, 0])
    np.testing.assert_array_equal(SIGNALS["revision_rewards"](context), [0, 1, 0, 0])


def test_critiques_follow_the_first_attempt(context):
    predicted = feedback.critique(context)
    assert text_of(context_of(TASK, predicted), predicted.mask) == ["", "<", ">", ">"]
    shown = [context.tokenizer.decode(row) for row in predicted.prompts]
    assert shown == ["3+4=7", "3+4=5", "3+4=9", "3+4=12"]
    assert predicted.prompts[1, -1] == context.tokenizer.eos_id


def test_hindsight_is_a_prompt():
    assert turns.hindsight(TASK, SUM, "7") == "7=3+4="
    assert turns.hindsight(TASK, SUM, "9") == "9>3+4="
