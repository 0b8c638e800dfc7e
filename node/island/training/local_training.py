"""How this machine trains: its own choices of speed and memory, never the run's rules.

Nothing here changes what is computed but for rounding, so nodes of one swarm may differ in all of it.
"""

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
