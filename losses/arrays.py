"""The arrays a loss can ask for: one name, one shape, one meaning, everywhere.

Axes: B responses in the batch, T response positions (padded), V vocabulary, K turns, R reward
components, D hidden size. A function takes the arrays it needs by these names; an array that is
not in this table is annotated in the function's own signature with a jaxtyping type.
"""

from jaxtyping import Array, Float, Int

Rows = Float[Array, "B"]
Tokens = Float[Array, "B T"]
Turns = Float[Array, "B K"]
Logits = Float[Array, "B T V"]
RowIds = Int[Array, "B"]
TokenIds = Int[Array, "B T"]

ARRAYS = {
    # Of the policy being trained; differentiable.
    "logprobs": (Tokens, "log pi_theta of the sampled token"),
    "entropy": (Tokens, "entropy of pi_theta at each position, nats"),
    "logits": (Logits, "logits of pi_theta"),
    "values": (Tokens, "value head"),
    # Constants of the rollout.
    "old_logprobs": (Tokens, "log pi_old of the sampled token, by the trainer, before the update"),
    "sampler_logprobs": (Tokens, "log mu of the sampled token, as the sampler reported it"),
    "ref_logprobs": (Tokens, "log-probability of the sampled token under the frozen reference"),
    "teacher_logprobs": (Tokens, "log-probability of the sampled token under the teacher"),
    "old_logits": (Logits, "logits of pi_old"),
    "ref_logits": (Logits, "logits of the reference"),
    "teacher_logits": (Logits, "logits of the teacher"),
    "old_entropy": (Tokens, "entropy of pi_old, nats"),
    "old_values": (Tokens, "value head before the update"),
    "tokens": (TokenIds, "the sampled tokens"),
    "mask": (Tokens, "1 on tokens the policy produced, 0 on padding and observations"),
    "rewards": (Rows, "outcome reward of each response"),
    "token_rewards": (Tokens, "reward of each token"),
    "turn_rewards": (Turns, "reward of each turn"),
    "reward_components": (Float[Array, "B R"], "a vector reward"),
    "group_ids": (RowIds, "which prompt a response belongs to"),
    "turn_ids": (TokenIds, "turn index of each token, from 0"),
    "step_ids": (TokenIds, "reasoning-step index of each token, from 0"),
    "advantages": (Tokens, "advantage of each token; constant"),
}

DIFFERENTIABLE = ("logprobs", "entropy", "logits", "values")
"""The standard arrays through which a gradient flows back to the model."""
