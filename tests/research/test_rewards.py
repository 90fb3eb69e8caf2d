"""Rewards: what each pays, how they add up, and what happens when one fails."""

import threading

import numpy as np
import pytest

from research.answers import boxed, extract_answer, last_number
from research.rewards import (
    RewardError,
    countdown,
    exact,
    find_reward,
    format_reward,
    grade,
    length_penalty,
    math_verify,
    numeric,
    worker_pool,
)
from research.rewards import mathematics as mathematics_module
from research.rewards.functions import evaluate_arithmetic
from research.tasks import Record

RECORD = Record("37+58=", "95", id=4)
NUMBERS = Record("2 5 8 -> 18: ", "5*2+8", {"numbers": [2, 5, 8], "target": 18})

USER_FILE = """
import math

def digits(response, record, *, weight_of_one=1.0):
    return weight_of_one * sum(c.isdigit() for c in response)

def broken(response, record):
    return 1 / (len(response) - 2)

def wordy(response, record):
    return "1.0"

def nan(response, record):
    return math.nan if response == "95" else 1
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)
    return str(path)


@pytest.mark.parametrize(
    "response, answer",
    [
        (" 95 \n", "95"),
        ("<answer>1</answer> no, <answer> 95</answer>", "95"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{95} and \boxed{9", "95"),
        ("reasoning\n#### 95\n", "95"),
        (r"<answer>95</answer> \boxed{2}", "95"),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_boxed_and_numbers():
    assert boxed("nothing") is None
    assert boxed(r"\boxed{a{b}c}") == "a{b}c"
    assert last_number("from 3 to 1,234.50 dollars") == 1234.5
    assert last_number("-3/4") == -0.75
    assert last_number("none") is None and last_number("1/0") is None


def test_exact_and_numeric():
    assert exact("95", RECORD) == 1 and exact("095", RECORD) == 0 and exact("95.", RECORD) == 0
    assert numeric("it is 95.0", RECORD) == 1 and numeric("96", RECORD) == 0
    assert numeric("", RECORD) == 0
    assert numeric(".5", Record("", "1/2")) == 1 and numeric("0.333", Record("", "1/3")) == 0
    with pytest.raises(ValueError, match="has no number"):
        numeric("1", Record("", "one"))


def test_format_and_length():
    good = "<think>a\nb</think>\n<answer>95</answer>\n"
    assert format_reward(good, RECORD) == 1
    for bad in ("95", good + "95", good * 2, good.replace("a", "<think>"), "<answer>9</answer>"):
        assert format_reward(bad, RECORD) == 0
    assert format_reward("95", RECORD, pattern=r"\d+") == 1
    assert [length_penalty("x" * n, RECORD, target=10) for n in (0, 10, 15, 20, 99)] == [
        0, 0, -0.5, -1, -1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "response, score",
    [
        ("5*2+8", 1),
        ("<answer>(5 × 2) + 8 = 18</answer>", 1),
        ("8/(5-2)", 0),
        ("5*2+8=19", 0),
        ("9+9", 0),
        ("18", 0),
        ("8+5*2+8-8", 0),
        ("5*2+8+(2-2)", 0),
        ("8/(2-2)+5", 0),
        ("__import__('os')", 0),
        ("2**5-8-5-1", 0),
        ("28-5*2", 0),
        ("(" * 300, 0),
        ("", 0),
    ],
)
def test_countdown(response, score):
    assert countdown(response, NUMBERS) == score


def test_arithmetic_is_exact_and_safe():
    assert evaluate_arithmetic("1/3*3") == (1, [1, 3, 3])
    assert evaluate_arithmetic("-(3-5)")[0] == 2
    for text in ("9**9", "9//2", "1.5", "a", "2 3", "1_0", "(1)(2)", "(1,2)"):
        with pytest.raises(ValueError, match="arithmetic expression|allowed"):
            evaluate_arithmetic(text)


@pytest.mark.parametrize(
    "response, answer, score",
    [
        (r"\boxed{\frac12}", "0.5", 1),
        ("Hence the answer is $\\frac{1}{2}$.", "1/2", 1),
        (r"<answer>\sqrt{4}</answer>", "2", 1),
        ("#### 1,234", "1234", 1),
        (r"\boxed{x+1}", "1+x", 1),
        (r"\boxed{3}", "2", 0),
        ("no answer", "2", 0),
        ("", "2", 0),
    ],
)
def test_math_verify(response, answer, score):
    assert math_verify(response, Record("", answer)) == score


def test_math_verify_off_the_main_thread_and_after_a_stuck_comparison(monkeypatch):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(math_verify(r"\boxed{0.25}", Record("", r"\frac14")))
    )
    thread.start()
    thread.join()
    assert found == [1.0]
    monkeypatch.setattr(mathematics_module, "_SECONDS", 0.3)
    stuck = mathematics_module._process
    assert math_verify(r"\boxed{9^{9^{9^9}}}", Record("", "2")) == 0  # slower than 0.3 s
    assert stuck.poll() is not None
    monkeypatch.setattr(mathematics_module, "_SECONDS", 60.0)
    assert math_verify(r"\boxed{\frac{4}{2}}", Record("", "2")) == 1


def test_grade_weighs_and_keeps_components():
    spec = {"exact": 1.0, "format": {"weight": 0.5, "pattern": r"\d+"}, "length": {"target": 2}}
    graded = grade(["95", "96", "9 5"], [RECORD] * 3, spec)
    np.testing.assert_array_equal(graded["total"], np.float32([1.5, 0.5, -0.5]))
    assert graded["total"].dtype == np.float32
    assert graded["components"]["format"].tolist() == [1, 1, 0]
    assert graded["components"]["length"].tolist() == [0, 0, -0.5]
    assert graded["errors"] == {"exact": 0, "format": 0, "length": 0}


def test_user_rewards_by_file_and_by_module(user_file, monkeypatch, tmp_path):
    spec = {"mine": {"function": f"{user_file}:digits", "weight": 2.0, "weight_of_one": 0.5}}
    assert grade(["a12", "b"], [RECORD] * 2, spec)["total"].tolist() == [2.0, 0.0]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert grade(["a12"], [RECORD], {"my_rewards:digits": 1.0})["total"].tolist() == [2.0]


@pytest.mark.parametrize(
    "name, problem",
    [
        ("broken", r"raised ZeroDivisionError: .*my_rewards\.py:8"),
        ("wordy", r"returned '1\.0', not a finite number"),
        ("nan", r"returned nan, not a finite number"),
    ],
)
def test_a_failing_reward_stops_or_counts_as_zero(user_file, name, problem):
    responses, spec = (
        ["123", "95", "1234"],
        {"exact": 1.0, "mine": {"function": f"{user_file}:{name}"}},
    )
    with pytest.raises(RewardError, match=rf"Reward 'mine' {problem}") as caught:
        grade(responses, [RECORD] * 3, spec)
    assert repr(RECORD.prompt) in str(caught.value) and "record 4" in str(caught.value)
    graded = grade(responses, [RECORD] * 3, spec, on_error="zero")
    assert graded["errors"] == {"exact": 0, "mine": 3 if name == "wordy" else 1}
    assert graded["total"][1] == 1.0 and np.isfinite(graded["total"]).all()


def test_unknown_rewards_and_parameters(user_file):
    for spec, message in [
        ({"exat": 1.0}, "Did you mean 'exact'"),
        ({"exact": {"wieght": 1}}, "no parameter 'wieght'"),
        ({"length": {"targt": 1}}, "Did you mean 'target'"),
        ({"exact": "much"}, "weight 'much'"),
        ({f"{user_file}:digit": 1.0}, "Did you mean 'digits'"),
        ({"nowhere.py:f": 1.0}, "No reward file 'nowhere.py'"),
        ({"no_such_module:f": 1.0}, "Cannot import 'no_such_module'"),
        ({}, "No rewards"),
    ]:
        with pytest.raises(RewardError, match=message):
            grade(["95"], [RECORD], spec)
    with pytest.raises(RewardError, match="2 responses for 1 records"):
        grade(["95", "95"], [RECORD], {"exact": 1.0})
    with pytest.raises(RewardError, match="expected 'stop' or 'zero'"):
        grade(["95"], [RECORD], {"exact": 1.0}, on_error="skip")
    assert find_reward("exact") is exact


def test_a_pool_of_processes_grades_the_same(user_file):
    spec = {"exact": 1.0, "mine": {"function": f"{user_file}:broken"}}
    responses = ["95", "123", "4"] * 5
    with worker_pool(1) as pool:
        pooled = grade(responses, [RECORD] * 15, spec, on_error="zero", pool=pool)
    alone = grade(responses, [RECORD] * 15, spec, on_error="zero")
    np.testing.assert_array_equal(pooled["total"], alone["total"])
    assert pooled["errors"] == alone["errors"] == {"exact": 0, "mine": 5}
