"""What models of tokens have in common: samples are windows of T + 1 tokens; padding counts for nothing."""

from torch import Tensor, nn

from node.island.models.architecture import Counted
from node.island.models.decoder_modules import NO_TARGET


class TokenInputs:
    """Tokens and targets of windows; the part of Architecture that is the same for all such models."""

    def inputs(self, batch: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tokens, and the ones after them, [B, T] each, of windows [B, T + 1]; or the two as they come.

        And their documents, [B, T], where attention keeps to those.
        """
        return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])

    def padded(self, inputs: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        """Exactly `rows` samples: pipelines have one shape, and shards are gathered by all at once."""
        tokens, targets, *documents = inputs
        missing = rows - len(tokens)
        return (
            nn.functional.pad(tokens, (0, 0, 0, missing)),
            nn.functional.pad(targets, (0, 0, 0, missing), value=NO_TARGET),
            *(nn.functional.pad(each, (0, 0, 0, missing)) for each in documents),
        )

    def measured(
        self, mean: Tensor | Counted, inputs: tuple[Tensor, ...], num_samples: int
    ) -> tuple[Tensor, Tensor]:
        """The mean is over all targets, and those that are not counted added nothing to it."""
        assert isinstance(mean, Tensor)
        targets = inputs[1]
        return mean * targets.numel(), (targets != NO_TARGET).sum()
