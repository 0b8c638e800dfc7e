"""The inner learning rate, on the global token clock: the same on all nodes, also late ones."""

import math

from protocol.run_spec import InnerSection, RunSpec


def default_total_tokens(spec: RunSpec) -> int:
    """Tokens of the whole run when the fewest nodes that it asks for take part in every round."""
    return spec.run.rounds * spec.inner.steps * spec.tokens_per_inner_step * spec.run.min_nodes


def learning_rate(inner: InnerSection, token_clock: int, *, default_total_tokens: int) -> float:
    """The rate of an inner step that begins when the swarm has trained `token_clock` tokens.

    Rises linearly over `warmup_tokens` (a tenth of the total when left out), then stays, or falls
    along a half cosine to `final_fraction` of it at `total_tokens` and stays there (SGDR,
    Loshchilov and Hutter, 2017).
    """
    total_tokens = default_total_tokens if inner.total_tokens is None else inner.total_tokens
    warmup_tokens = total_tokens // 10 if inner.warmup_tokens is None else inner.warmup_tokens
    if token_clock < warmup_tokens:
        return inner.learning_rate * token_clock / warmup_tokens
    if inner.schedule == "constant":
        return inner.learning_rate
    falling_tokens = total_tokens - warmup_tokens
    done = min(1.0, (token_clock - warmup_tokens) / falling_tokens) if falling_tokens > 0 else 1.0
    remaining = 0.5 * (1 + math.cos(math.pi * done))
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * remaining)
