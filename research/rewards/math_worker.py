"""Compares answers with math-verify, one JSON request a line; run as a process of its own.

It imports nothing of this project, so that it starts without JAX and as a plain script.
"""

import functools
import json
import resource
import sys

from math_verify import parse, verify

SECONDS = 2  # of parsing or comparing, after which the answer counts as wrong
MEMORY = 4 * 2**30


@functools.lru_cache(maxsize=4096)
def _parsed_reference(text):
    return parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS)


def compare(reference, answer, marked):
    """Returns {"score": 0 or 1}, or {"error": ...} if the reference cannot be read."""
    gold = _parsed_reference(reference)
    if not gold:
        return {"error": f"math-verify cannot read the reference answer {reference!r}"}
    found = parse(f"\\boxed{{{answer}}}" if marked else answer, parsing_timeout=SECONDS)
    return {"score": float(verify(gold, found, timeout_seconds=SECONDS))}


def main():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # 9^9^9^9 ends in MemoryError
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            reply = compare(**json.loads(line))
        except (MemoryError, RecursionError):
            reply = {"score": 0.0}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
