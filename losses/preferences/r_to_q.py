"""From r to Q*: the token rewards that a policy carries in its logits."""

import jax

from losses.catalogue import paper
from losses.ops.divergences import log_softmax, of_token
from losses.ops.masked import next_valid, select
from losses.ops.options import check_option


@paper(
    "r-to-q",
    kind="reward",
    base="dpo",
    title="From r to Q*: Your Language Model is Secretly a Q-Function",
    arxiv="2404.12358",
    year=2024,
    outputs=("token_rewards",),
)
def implicit_token_rewards(logits, ref_logprobs, tokens, mask, *, beta=0.1, form="advantage"):
    """Reward of each token, from beta logits read as a soft Q-function, [B,T].

        "advantage":  beta ( log_softmax(logits_t)[a_t] - ref_logprobs_t )
        "bellman":    beta ( logits_t[a_t] - ref_logprobs_t - logsumexp(logits_next) )

    next is the row's next valid position; behind the last one the term is absent. The two differ by
    the potential V* = beta logsumexp(logits) and define the same optimal policy; only "advantage"
    is free of the logits' constant. The loss stays DPO's: rewards are for credit and analysis.

    Args:
      logits: [B,T,V].
      ref_logprobs: [B,T].
      tokens: [B,T] int, the sampled tokens.
      mask: [B,T].
      beta: inverse temperature.
      form: "advantage" or "bellman".

    Returns:
      token rewards [B,T], constant (`implicit_token_rewards.__wrapped__` is differentiable).

    Raises:
      ValueError: unknown form.

    Reference: Rafailov et al. 2024, arXiv 2404.12358.
    """
    check_option("form", form, ("advantage", "bellman"))
    if form == "advantage":
        q, following = of_token(log_softmax(logits), tokens), 0.0
    else:
        values = jax.nn.logsumexp(logits, axis=-1)
        q, following = of_token(logits, tokens), next_valid(values, mask)
    return select(beta * (q - ref_logprobs - following), mask)
