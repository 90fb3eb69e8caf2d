"""Finding the answer in a response, and the number in an answer."""

import re
from fractions import Fraction

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\.\d+")


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : end].strip()
        start = text.rfind("\\boxed{", 0, start)  # this one never closes: cut off
    return None


def marked_answer(response: str) -> str | None:
    r"""Returns the last marked answer of a response, or None where nothing is marked.

    Marks, in this order: `<answer>...</answer>`, `\boxed{...}`, `#### ...`.
    """
    for found in (_TAG.findall(response), [boxed(response)], _HASHES.findall(response)):
        if found and found[-1] is not None:
            return found[-1].strip()
    return None


def extract_answer(response: str) -> str:
    """Returns the marked answer of a response, else the whole response, without outer space.

    The answer of an unmarked response is all of it: a task whose responses are bare answers needs
    no marks, and reasoning without a marked answer equals no reference.
    """
    marked = marked_answer(response)
    return response.strip() if marked is None else marked


def last_number(text: str) -> Fraction | None:
    """Returns the last number of a text, exactly: 1,234.50, -3, .5 or 3/4; None without one."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    top, _, bottom = re.sub(r"[,\s]", "", found[-1]).partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top) / int(bottom or 1)
