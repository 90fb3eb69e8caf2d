"""Where a paper departs from a property of the common suite, and why.

(slug, property) -> the reason, from the paper's definition. The suite skips the property for that
paper and prints the reason.
"""

EXCEPTIONS = {
    ("reinforce-pp", "equal_rewards"): "whitened over the batch, with the KL in the reward",
    ("gae", "equal_rewards"): "reads dense rewards and a critic, not one outcome per group",
    ("remax", "equal_rewards"): "the baseline is the greedy response, not the group",
}
