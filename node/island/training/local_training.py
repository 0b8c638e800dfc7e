"""How this machine trains: its own choices of speed and memory, never the run's rules.

Nothing here changes what is computed but for rounding, so nodes of one swarm may differ in all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from protocol.errors import ConfigError

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Accumulating = Literal["sharded", "whole"]
Recomputing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """What node.toml says about the inner steps of this machine's ranks."""

    micro_batch: int = 0  # samples that a rank puts through the model together; 0: all of its share
    accumulate: Accumulating = "sharded"  # what a rank keeps between the parts of a batch
    precision: Precision = "fp32"
    activation_checkpointing: Recomputing = "none"
    compile: bool = False
    deterministic: bool = False
    load: float = 1.0  # the part of its time that it trains; for the others it rests

    def check(self) -> None:
        """Raises ConfigError for choices that exclude each other; needs no torch."""
        if self.compile and self.activation_checkpointing == "selective":
            raise ConfigError(
                'activation_checkpointing = "selective" has no effect on compiled layers, for which '
                "torch chooses by itself what to keep",
                next_step='set it to "none" or "full" in node.toml, or compile = false',
            )
        if self.accumulate == "whole" and not self.micro_batch:
            raise ConfigError(
                'accumulate = "whole" has no effect where a batch goes through the model at once',
                next_step="set micro_batch to the samples of a part, or remove accumulate",
            )


PLAIN = LocalTraining()
"""Everything at once, in fp32: what tests and simulations train with."""


class Rests:
    """The rests of a rank between inner steps: of all its time since a moment, `load` is training."""

    def __init__(
        self, load: float, *, clock: Callable[[], float], rest: Callable[[float], None]
    ) -> None:
        self.seconds = 0.0  # until now
        self._load = load
        self._clock = clock
        self._rest = rest

    def take(self, *, since: float, most_seconds: float) -> float:
        """Rests for as long as is due, not beyond so many seconds since then; returns the time."""
        began_at = self._clock()
        elapsed = began_at - since
        due = (elapsed - self.seconds) / self._load - elapsed
        self._rest(max(0.0, min(due, most_seconds - elapsed)))
        now = self._clock()
        self.seconds += now - began_at
        return now
