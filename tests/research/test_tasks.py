"""Tasks: the split is real, records repeat, demonstrations are graded as correct."""

import json

import pytest

from research import rewards
from research.tasks import TASKS, Record, TaskError, get_task, task_parameters, texts
from research.tasks.base import draw, is_heldout


def jsonl_file(directory):
    path = directory / "data.jsonl"
    lines = [
        {"question": f"What is {n}+{n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(90)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture(params=["addition", "reversed", "countdown", "gym", "jsonl"])
def make(request, tmp_path):
    name, parameters = {
        "addition": ("addition", {"max_operand": 30}),
        "reversed": ("addition", {"digits": 3, "reversed": True}),
        "countdown": ("countdown", {"max_number": 5, "max_target": 20}),
        "gym": ("reasoning_gym", {"dataset": "chain_sum", "max_terms": 2, "max_digits": 2,
                                  "size": 300}),
        "jsonl": ("jsonl", {"path": jsonl_file(tmp_path)}),
    }[request.param]  # fmt: skip
    return lambda seed: get_task(name, seed=seed, **parameters)


def test_training_never_sees_a_heldout_prompt_whatever_the_seed(make):
    heldout = {record.prompt for record in make(0).heldout(200)}
    seen = {make_task.train(i).prompt for make_task in (make(0), make(1)) for i in range(400)}
    assert len(heldout) >= 5
    assert len(seen) > 50
    assert not heldout & seen


def test_heldout_prompts_are_distinct_and_independent_of_the_seed(make):
    first, second = make(0).heldout(20), make(7).heldout(20)
    assert first == second
    assert len({record.prompt for record in first}) == len(first)
    assert make(0).heldout(3) == first[:3]


def test_a_record_is_a_function_of_seed_and_index(make):
    task, again = make(3), make(3)
    assert [task.train(i) for i in (5, 0, 17)] == [again.train(i) for i in (5, 0, 17)]
    if task.name != "jsonl":  # a file has one order; the selection shuffles it by the seed
        other = make(4)
        assert [task.train(i).prompt for i in range(9)] != [other.train(i).prompt for i in range(9)]
    if task.size:
        assert task.train(task.size + 2) == task.train(2)


def test_demonstrations_are_correct_and_spelled_with_the_alphabet(make):
    task = make(0)
    records = [*(task.train(i) for i in range(40)), *task.heldout(20)]
    graded = rewards.grade([task.demonstration(r) for r in records], records, task.rewards)
    assert graded["total"].tolist() == [1.0] * len(records)
    assert set("".join(texts(task, 40))) <= set(task.alphabet)
    assert len(set(task.alphabet)) == len(task.alphabet)


def test_addition_answers_and_options():
    record = get_task("addition", digits=2, seed=1).train(0)
    a, b = map(int, record.prompt.removesuffix("=").split("+"))
    assert record.answer == str(a + b)
    backwards = get_task("addition", digits=2, seed=1, reversed=True).train(0)
    assert backwards.prompt == record.prompt and backwards.answer == record.answer[::-1]
    small = get_task("addition", max_operand=12)
    assert max(max(small.train(i).info["operands"]) for i in range(200)) == 12
    finite = get_task("addition", size=5)
    assert finite.train(7) == finite.train(2) and finite.train(7).id == 2


def test_addition_holds_out_both_orders_of_a_sum():
    task = get_task("addition", max_operand=20)
    heldout = {tuple(sorted(r.info["operands"])) for r in task.heldout(100)}
    seen = {tuple(sorted(task.train(i).info["operands"])) for i in range(2000)}
    assert not heldout & seen and len(heldout | seen) > 200


def test_too_small_a_space_is_an_error():
    side = is_heldout("only")
    make_one = lambda rng: Record("only", "")  # noqa: E731
    assert draw(make_one, seed=0, index=3, heldout=side) == Record("only", "", id=3)
    with pytest.raises(TaskError, match="'only'.*too few different prompts"):
        draw(make_one, seed=0, index=3, heldout=not side)
    with pytest.raises(TaskError, match="no target up to max_target=1"):
        get_task("countdown", numbers=2, max_number=10**6, max_target=1, seed=1).train(0)


def test_unknown_names_are_met_with_the_nearest():
    with pytest.raises(TaskError, match="Did you mean 'addition'"):
        get_task("additon")
    with pytest.raises(TaskError, match="Did you mean 'digits'"):
        get_task("addition", digit=3)
    with pytest.raises(TaskError, match="Did you mean 'gsm_symbolic'"):
        get_task("reasoning_gym", dataset="gsm_symbolc")
    with pytest.raises(TaskError, match="Did you mean .*'max_terms'"):
        get_task("reasoning_gym", dataset="chain_sum", max_term=3)
    with pytest.raises(TaskError, match=r"rejects chain_sum\(max_terms=2, min_terms=9"):
        get_task("reasoning_gym", dataset="chain_sum", min_terms=9, max_terms=2)
    with pytest.raises(TaskError, match="digits=0"):
        get_task("addition", digits=0)


def test_task_parameters_build_the_default_task():
    assert set(task_parameters("addition")) == {
        "digits",
        "max_operand",
        "reversed",
        "size",
        "stray",
    }
    for name in set(TASKS) - {"jsonl"}:
        parameters = task_parameters(name)
        assert get_task(name, **parameters) == get_task(name)
    with pytest.raises(TaskError, match="names no file"):
        get_task("jsonl")


def test_gym_grades_by_the_data_sets_own_score():
    task = get_task("reasoning_gym", dataset="gsm_symbolic")
    record = task.train(0)
    responses = [record.answer, f"thus\n<answer>{record.answer}</answer>", "no number"]
    graded = rewards.grade(responses, [record] * 3, task.rewards)
    assert graded["total"].tolist() == [1.0, 1.0, 0.0]


def test_gym_demonstrates_what_the_instructions_ask_for():
    tagged = get_task("reasoning_gym", dataset="chain_sum")
    bare = get_task("reasoning_gym", dataset="chain_sum", system="Reply with the answer only.")
    record = tagged.train(0)
    assert bare.system == "Reply with the answer only." and bare.train(0) == record
    assert tagged.demonstration(record) == f"<answer>{record.answer}</answer>"
    assert bare.demonstration(record) == record.answer


def test_gym_without_references_says_so():
    task = get_task("reasoning_gym", dataset="propositional_logic", size=30)
    with pytest.raises(TaskError, match="no reference answers"):
        task.demonstration(task.train(0))


@pytest.mark.parametrize(
    "line, prompt, answer",
    [
        ({"question": "Q", "answer": "5 * 200.\n#### 1,000"}, "Q", "1000"),
        ({"problem": "P", "solution": r"so $x$ is \boxed{\frac{1}{2}}.", "level": 5}, "P",
         r"\frac{1}{2}"),
        ({"problem": "P", "answer": "204"}, "P", "204"),
        ({"prompt": "P", "answer": 204}, "P", "204"),
    ],
)  # fmt: skip
def test_jsonl_layouts(tmp_path, line, prompt, answer):
    path = tmp_path / "one.jsonl"
    # The separator is legal inside a JSON string, and no end of a line.
    path.write_text("\n" + json.dumps({**line, "note": "a\u2028b"}, ensure_ascii=False) + "\n")
    record = get_task("jsonl", path=str(path), heldout_path=jsonl_file(tmp_path)).train(0)
    assert (record.prompt, record.answer, record.id) == (prompt, answer, 2)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"question": "Q", "answer"', r"data.jsonl, line 91: not JSON"),
        ('["Q", "A"]', "line 91: expected a JSON object, got list"),
        ('{"query": "Q", "answer": "1"}', r"line 91: no prompt among the fields \['answer'"),
        ('{"problem": "P", "solution": "it is 4"}', "line 91: its solution has no"),
        ('{"prompt": "P"}', "line 91: no answer among the fields"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = jsonl_file(tmp_path)
    with open(path, "a") as file:
        file.write("\n" + line)
    with pytest.raises(TaskError, match=message):
        get_task("jsonl", path=path)


def test_jsonl_heldout_file_wins_and_missing_files_are_named(tmp_path):
    path = jsonl_file(tmp_path)
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"prompt": "What is 4+4?", "answer": "8"}))
    task = get_task("jsonl", path=path, heldout_path=str(test))
    assert [record.answer for record in task.heldout(9)] == ["8"]
    assert task.size == 89
    with pytest.raises(TaskError, match="Did you mean 'data.jsonl'"):
        get_task("jsonl", path=str(tmp_path / "date.jsonl"))
