"""The island of a helper: no ranks, no data, nothing to train; it reduces what others contribute."""

from collections.abc import Callable, Sequence

from node.island.island import Ability, Evaluation, InnerReport, InnerWork, Progress
from node.outer_state import Vector
from protocol.wire.rounds import CorpusSummary, Digest

HELPS = Ability(trains=False, evaluates=False, waits_for="the next plan")

NO_DATA = CorpusSummary(digest=Digest(bytes(32)), num_samples=0, num_bytes=0)


class RanklessIsland:
    """Implements Island for a member that plans ask for no inner steps."""

    @property
    def ability(self) -> Ability:
        """Nothing: so no plan waits for its contribution, and nobody asks it for a held-out loss."""
        return HELPS

    async def start(self) -> CorpusSummary:
        """Nothing to bring up."""
        return NO_DATA

    async def stop(self) -> None:
        """Nothing to end."""

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """Nobody takes the global parameters over."""

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """Raises: a plan that asks a helper to train is not one of ours."""
        raise RuntimeError(f"round {work.round} asks a helper for {work.inner_steps} inner steps")

    def halt(self) -> None:
        """Nothing is in progress."""

    async def publish(self, fragment: int) -> None:
        """Raises: nothing was trained."""
        raise RuntimeError(f"a helper has nothing of fragment {fragment} to publish")

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """There is no inner optimizer."""

    async def begin_anew(self, round: int) -> None:
        """There is no inner optimizer to forget."""

    async def evaluate(self) -> Evaluation | None:
        """See Island: not here."""
        return None

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> None:
        """See Island: not here."""
        return
