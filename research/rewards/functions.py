"""The rewards that need no process of their own."""

import ast
import operator
import re
from fractions import Fraction

from research.answers import extract_answer, last_number
from research.tasks.base import Record
from research.tasks.chain import final_answer
from research.tasks.gym import gym_dataset

_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"\s*<think>{_UNTAGGED}</think>\s*<answer>{_UNTAGGED}</answer>\s*"
"""Reasoning in think tags, then the answer in answer tags, each once, and nothing else."""


def exact(response: str, record: Record) -> float:
    """1 if the extracted answer is the reference, character for character, else 0."""
    return float(extract_answer(response) == record.answer.strip())


def numeric(response: str, record: Record) -> float:
    """1 if the last number of the extracted answer equals the reference, else 0.

    Numbers are compared exactly: 0.5, .50 and 1/2 are equal, 0.333 and 1/3 are not.

    Raises:
      ValueError: the reference has no number.
    """
    expected = last_number(record.answer)
    if expected is None:
        raise ValueError(f"the reference answer {record.answer!r} has no number")
    return float(last_number(extract_answer(response)) == expected)


def format_reward(response: str, record: Record, *, pattern: str = THINK_ANSWER) -> float:
    """1 if the whole response matches the pattern, else 0.

    Args:
      response: the response.
      record: unused; every reward has the same signature.
      pattern: a regular expression in which a dot also matches a line break; by default
        `<think>...</think><answer>...</answer>`.
    """
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def length_penalty(response: str, record: Record, *, target: int = 1000) -> float:
    """0 up to `target` characters, then falling linearly to -1 at twice as many.

        -clip((characters - target) / target, 0, 1)

    Args:
      response: the response.
      record: unused; every reward has the same signature.
      target: characters that cost nothing. (`soft_overlong` shapes by tokens.)
    """
    return -min(max((len(response) - target) / target, 0.0), 1.0)


def countdown(response: str, record: Record) -> float:
    """1 if the extracted expression uses every given number once and equals the target, else 0.

    Arithmetic is exact. The expression may be followed by `= target`, and x and ÷ signs of
    mathematics are read as * and /.

    Args:
      response: the response.
      record: its info has `numbers` and `target`.
    """
    expression, equals, right = extract_answer(response).partition("=")
    target = record.info["target"]
    if equals and right.strip() != str(target):
        return 0.0
    try:
        value, used = evaluate_arithmetic(expression.replace("×", "*").replace("÷", "/"))
    except (ArithmeticError, ValueError):
        return 0.0
    return float(value == target and sorted(used) == sorted(record.info["numbers"]))


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate_arithmetic(expression: str) -> tuple[Fraction, list[int]]:
    """Evaluates whole numbers joined by + - * / and parentheses, exactly and safely.

    Args:
      expression: at most 200 characters.

    Returns:
      (value, the numbers in the expression).

    Raises:
      ValueError: anything else stands in it.
      ZeroDivisionError: it divides by zero.
    """
    # The alphabet and the length keep names, powers of ten digits and deep nesting from the parser.
    if len(expression) > 200 or not re.fullmatch(r"[\d\s()+\-*/]+", expression, re.ASCII):
        raise ValueError(f"not an arithmetic expression: {expression[:200]!r}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    used: list[int] = []

    def value(node) -> Fraction:
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"only + - * / and parentheses are allowed: {expression!r}")

    return value(tree), used


def chain(response: str, record: Record) -> float:
    """1 if the answer behind the working, after the last `#`, is the reference, else 0."""
    return float(final_answer(response) == record.answer)


def reasoning_gym(response: str, record: Record) -> float:
    """The data set's own score of the extracted answer, in [0, 1].

    Args:
      response: the response.
      record: its info has `dataset`, `parameters` and `entry`.
    """
    dataset = gym_dataset(record.info["dataset"], record.info["parameters"])
    return float(dataset.score_answer(extract_answer(response), entry=record.info["entry"]))
