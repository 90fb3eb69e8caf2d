"""Where a paper departs from a property of the common suite, and why.

(slug, property) -> the reason, from the paper's definition. The suite skips the property for that
paper and prints the reason.
"""

EXCEPTIONS = {
    ("reinforce-pp", "equal_rewards"): "whitened over the batch, with the KL in the reward",
    ("gae", "equal_rewards"): "reads dense rewards and a critic, not one outcome per group",
    ("remax", "equal_rewards"): "the baseline is the greedy response, not the group",
    ("rlfr", "equal_rewards"): "the flow penalty does not read the rewards",
    ("rtt", "equal_rewards"): "the token term reads verdicts and relevance, not the rewards",
    ("spae", "equal_rewards"): "the bonus for jumps in potential does not read the rewards",
    ("rlmec", "nothing_valid"): "the imitation of the edited solutions does not read the mask",
    ("flowtracer", "padding"): "attention spans prompt and response: T alone cannot grow",
    ("gtpo-entropy", "equal_rewards"): "entropy tells tokens apart whatever the rewards",
    ("pair-wgrpo", "equal_rewards"): "the role of the prompt decides what a reward counts as",
    ("drpo-length", "padding"): "max_length=None is the padded length",
    ("wapo", "padding"): "max_length=None is the padded length",
    ("pvpo", "equal_rewards"): "the baseline is the reference's past reward, not the group",
    ("rl-zvp", "equal_rewards"): "its signal is the entropy where rewards are equal",
    ("setpo", "equal_rewards"): "the diversity of the responses remains",
    ("opid", "equal_rewards"): "the skill terms do not read the rewards",
    ("dpo", "nothing_valid"): "a fully masked row has h = 0 and its pair stays: log 2",
    ("ipo", "nothing_valid"): "a fully masked row has h = 0 and its pair stays",
    ("simpo", "nothing_valid"): "a fully masked row has a = 0 and its pair stays",
    ("orpo", "nothing_valid"): "a fully masked row sits on the bound and its pair stays",
    ("kto", "nothing_valid"): "a fully masked row has h = 0 and stays in the count",
    ("dpo", "permutation"): "pairs are row indices; permuted together in its own test",
    ("ipo", "permutation"): "pairs are row indices; permuted together in its own test",
    ("simpo", "permutation"): "pairs are row indices; permuted together in its own test",
    ("orpo", "permutation"): "pairs are row indices; permuted together in its own test",
}
