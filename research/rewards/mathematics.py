"""Equality of mathematical answers, in a process that can be stopped.

math-verify limits its time by a signal, which works in a main thread only and cannot interrupt a
long computation in C (the digits of 9^9^9). A policy in training writes such things, so answers are
compared in one helper process, stopped and started anew when it does not reply.
"""

import atexit
import json
import select
import subprocess
import sys
import threading
from pathlib import Path

from research.answers import marked_answer
from research.tasks.base import Record

_SECONDS = 8.0
_START_SECONDS = 120.0
_lock = threading.Lock()
_process: subprocess.Popen | None = None


def math_verify(response: str, record: Record) -> float:
    """1 if math-verify finds the answer equal to the reference, else 0.

    The answer is the marked one (answer tags, a box, or ####); in an unmarked response math-verify
    looks for it. An answer that takes too long to compare is wrong.

    Args:
      response: the response.
      record: its answer is the reference, LaTeX or plain.

    Raises:
      ValueError: math-verify cannot read the reference.
    """
    marked = marked_answer(response)
    answer = response if marked is None else marked
    if answer.strip() == record.answer.strip() != "":
        return 1.0
    reply = _ask({"reference": record.answer, "answer": answer, "marked": marked is not None})
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["score"]


def _ask(request: dict) -> dict:
    global _process
    with _lock:
        if _process is None or _process.poll() is not None:
            _process = _start()
        _process.stdin.write(json.dumps(request).encode() + b"\n")
        reply = _reply(_process, _SECONDS)
        if reply is None:
            _stop()
            return {"score": 0.0}
        return reply


def _start() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("math_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a traceback for each unreadable answer
        bufsize=0,
    )
    if _reply(process, _START_SECONDS) is None:
        process.kill()
        raise RuntimeError("the process of math-verify did not start; is math-verify installed?")
    return process


def _reply(process, seconds) -> dict | None:
    """The next line of the process, or None if there is none in time or it has ended."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else b""
    return json.loads(line) if line else None


@atexit.register
def _stop() -> None:
    global _process
    if _process is not None:
        _process.kill()
        _process.wait()
        _process.stdin.close()
        _process.stdout.close()
        _process = None
