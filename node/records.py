"""A node's records on its disk: the outer state, the checkpoints of its ranks, and the one budget of both."""

from dataclasses import dataclass
from pathlib import Path

from node.config import SENT_FILE, SNAPSHOTS_FOLDER, NodeSettings
from node.disk.history import KEPT_BYTES, History, SentLog
from node.disk.round_folder import DiskBudget, Need, Retention, Saving
from node.disk.snapshot_folder import KEPT_FILES
from node.disk.snapshots import snapshot_bytes
from node.exchange.state.on_disk import StateOnDisk, most_result_bytes
from node.heavy import in_thread
from node.island.checkpoints.folder import CHECKPOINTS_FOLDER, CheckpointFolder, moments_bytes
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.terminal.logging import MOST_BYTES

BESIDE_BYTES = KEPT_BYTES + 2 * 2 * MOST_BYTES
"""What the folder comes to hold beside all that, whatever the model's size: commits, and logs of the node and
its ranks, the older ones included. After a day of short rounds it is most of a small model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a node keeps of one run, and what that takes at most."""

    state: StateOnDisk
    checkpoints: CheckpointFolder | None  # of the ranks' inner optimizer, if they keep any
    budget: DiskBudget
    retention: Retention
    needs: tuple[Need, ...]

    @classmethod
    def of(
        cls,
        folder: Path,
        settings: NodeSettings,
        spec: RunSpec,
        *,
        rules: RunSpec,
        history: History,
        num_ranks: int,
    ) -> "Records":
        """The records in a node's folder, as its owner and the run want them.

        `rules` are the run's as amended: results of either downlink may be there.
        """
        layout, budget = layout_of(spec), settings.disk_budget
        has_ranks = num_ranks > 0 and not settings.loop
        has_checkpoints = settings.checkpoint_every_rounds > 0 and has_ranks
        checkpoint_bytes = moments_bytes(layout.num_elements) // settings.hosts
        state = StateOnDisk(
            folder / SNAPSHOTS_FOLDER,
            history=history,
            sent=SentLog(folder / SENT_FILE),
            budget=budget,
            besides_bytes=checkpoint_bytes if has_checkpoints else 0,
            aside=in_thread,
            retention=settings.retention,
        )
        result_bytes = max(most_result_bytes(each, layout) for each in (spec, rules))
        needs = state.needs(layout.num_elements, result_bytes)
        checkpoints = None
        if has_checkpoints:
            each = snapshot_bytes(layout.num_elements) + checkpoint_bytes
            checkpoints = CheckpointFolder(
                path=folder / CHECKPOINTS_FOLDER,
                run_digest=spec.digest(),
                layout_digest=layout.summary().digest,
                every_rounds=settings.checkpoint_every_rounds,
                least_seconds=budget.seconds_between(each),
                num_hosts=settings.hosts,
            )
            needs += (checkpoints.need(layout.num_elements, num_ranks * len(layout.places)),)
        return cls(
            state=state,
            checkpoints=checkpoints,
            budget=budget,
            retention=settings.retention,
            needs=needs,
        )

    @property
    def missing_bytes(self) -> int:
        """What will be written beside what is there, at most."""
        return sum(max(0, need.num_bytes - need.held_bytes) for need in self.needs)

    def require_room(self) -> None:
        """Raises SystemRefusedError unless the disk, and its owner, have room for all of it."""
        snapshots, keep = self.needs[0].num_bytes, self.retention.keep
        savings = []
        if keep:
            beside = snapshots * keep // (KEPT_FILES + keep)
            savings.append(Saving(what="keep_snapshots = 0", num_bytes=beside))
        if self.checkpoints:
            of_ranks = self.needs[-1].num_bytes
            savings.append(Saving(what="checkpoint_every_rounds = 0", num_bytes=of_ranks))
        self.budget.require(self.needs, savings=savings)
