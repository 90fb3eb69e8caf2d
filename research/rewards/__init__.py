"""Rewards: functions of a response and the record it answers, their weighted sums, their errors.

reward(response: str, record: Record, **parameters) -> float
"""

from research.rewards.functions import (
    chain,
    countdown,
    exact,
    format_reward,
    length_penalty,
    numeric,
    reasoning_gym,
)
from research.rewards.grading import REWARDS, RewardError, find_reward, grade, worker_pool
from research.rewards.mathematics import math_verify

__all__ = [
    "REWARDS",
    "RewardError",
    "chain",
    "countdown",
    "exact",
    "find_reward",
    "format_reward",
    "grade",
    "length_penalty",
    "math_verify",
    "numeric",
    "reasoning_gym",
    "worker_pool",
]
