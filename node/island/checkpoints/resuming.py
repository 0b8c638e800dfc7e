"""How ranks that were just started come to their inner optimizer's state, and how long rates rise without it.

Reading and cutting it is node.island.checkpoints.writer's, in the ranks.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from node.island.checkpoints.folder import About, Checkpoint, CheckpointFolder, Kept, Loaded
from node.island.ranks.faults import RankDiedError
from protocol.run.run_spec import RunSpec

log = structlog.get_logger()

Load = Callable[[Checkpoint], Awaitable[Loaded]]
"""Has the ranks take over a checkpoint."""


class Resuming:
    """The checkpoints of an island over its ranks' lives. Without a folder there are none."""

    def __init__(
        self,
        folder: CheckpointFolder | None,
        spec: RunSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._spec = spec
        self._clock = clock
        self.leave_out_after: int | None = None
        """At the next start: checkpoints of later rounds are of a history that is undone."""
        self._is_at_zero = True
        self._rounds_since_kept = 0
        self._kept_until = -math.inf  # by the clock: none is due before

    async def resume(self, load: Load, among: Iterable[Checkpoint] | None = None) -> None:
        """Takes the newest checkpoint that loads. A rank that dies of it must not meet it again.

        `among`, the newest first, are those of which all parts are here, where there are several hosts.
        """
        self._is_at_zero = True
        if self.folder is None:
            return
        # The first round from here on is kept: what is there may be old, or nothing.
        self._rounds_since_kept, self._kept_until = self.folder.every_rounds - 1, -math.inf
        await asyncio.to_thread(self.folder.remove_unfinished)
        checkpoints = self.folder.whole() if among is None else iter(among)
        checkpoints_left_out = 0
        newest, self.leave_out_after = self.leave_out_after, None
        while checkpoint := await asyncio.to_thread(next, checkpoints, None):
            if newest is not None and checkpoint.about.round > newest:
                self.folder.discard(checkpoint)
                continue
            try:
                loaded = await load(checkpoint)
            except RankDiedError:
                self.folder.discard(checkpoint)
                raise
            if not loaded.failure:
                self.goes_on_from(checkpoint.about, loaded)
                return
            log.warning("checkpoint left out", path=str(checkpoint.path), why=loaded.failure)
            checkpoints_left_out += 1
        if checkpoints_left_out:
            log.warning(
                "inner optimizer begins at zero", why="no checkpoint of this run can be loaded"
            )

    def goes_on_from(self, about: About, loaded: Loaded) -> None:
        """The ranks have taken this one over."""
        self._is_at_zero = False
        passed = {"passed_bytes": loaded.passed_bytes} if loaded.passed_bytes else {}
        log.info("inner optimizer goes on from its checkpoint", round=about.round, **passed)

    def tell_of_training(self, token_clock: int) -> None:
        """Says once that learning rates rise, where they do."""
        if self._is_at_zero and token_clock > 0:
            log.info(
                "re-warm-up: learning rates rise, as the inner optimizer began at zero in mid-run",
                inner_steps=rewarming_steps(self._spec),
            )
        self._is_at_zero = False

    def folder_if_due(self, *, is_last: bool) -> CheckpointFolder | None:
        """Where the round that was just trained is to be kept; None when it is not to be."""
        if self.folder is None:
            return None
        self._rounds_since_kept += 1
        is_soon = self._rounds_since_kept < self.folder.every_rounds
        if is_soon or self._clock() < self._kept_until:
            return self.folder if is_last else None
        self._rounds_since_kept = 0
        self._kept_until = self._clock() + self.folder.least_seconds
        return self.folder

    def tell_of_keeping(self, round: int, kept: Kept) -> None:
        """Says what went wrong; training goes on without."""
        if kept.failure:
            log.warning("checkpoint not written", why=kept.failure)
        if kept.is_busy:
            log.warning("no checkpoint: the one before is still being written", round=round)


def rewarming_steps(spec: RunSpec) -> int:
    """Inner steps over which learning rates rise when moments begin at zero in the midst of a run.

    2 / (1 - beta2), the rule of Ma and Yarats, 2021, "On the adequacy of untuned warmup for adaptive
    optimization", section 5: so long the second moment is a mean of too few gradients, and steps are
    too large. A round's steps at most: a restart should not cost more than one.
    """
    return min(spec.node_steps, round(2 / (1 - spec.inner.beta2)))
