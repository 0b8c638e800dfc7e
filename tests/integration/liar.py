"""A node that lies: `python liar.py LIE COMMAND...` runs the node's real command with one thing replaced.

COMMAND is what would have run the honest node: python -P -m protocol.terminal.cli node start ...
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import blake3
import numpy as np

from lab.misreading import Misreading
from node.exchange.outer import Outer
from node.exchange.owing import Owing
from node.exchange.reduction import Reduction, SliceResult
from node.link.calls import CoordinatorLink
from node.outer_state import Vector
from protocol.terminal import cli
from protocol.wire.messages import Applied, Report, Trained
from protocol.wire.payload import Payload
from protocol.wire.rounds import Digest
from protocol.wire.vitals import Announcement, Vitals

LOUDER = 1000
FASTER = 20_000


def contribute(times: float) -> None:
    """It contributes so many times what its island has trained."""
    accumulated = Owing.accumulated

    def told(self: Owing, start: int, num_elements: int, *, out: Vector | None = None) -> Vector:
        return np.float32(times) * accumulated(self, start, num_elements, out=out)

    Owing.accumulated = told  # type: ignore[method-assign]


def _replace_reports(lie: Callable[[int, Report], Report | None]) -> None:
    """Reports go to the coordinator as `lie` has them; None: not at all."""
    report = CoordinatorLink.report

    async def told(
        self: CoordinatorLink, session_id: int, reports: Sequence[tuple[int, Report]]
    ) -> None:
        lies = [(round, lie(round, honest)) for round, honest in reports]
        await report(self, session_id, [(n, each) for n, each in lies if each is not None])

    CoordinatorLink.report = told  # type: ignore[method-assign]


def report_nothing() -> None:
    """It keeps its lease, and reports nothing."""
    _replace_reports(lambda round, honest: None)


def boast() -> None:
    """It says that it trained so many times as fast as it did."""

    def faster(round: int, honest: Report) -> Report:
        if isinstance(honest, Trained):
            return replace(honest, seconds=honest.seconds / FASTER)
        return honest

    _replace_reports(faster)


def make_up_states() -> None:
    """After each round it says to hold a state that no training led to, as all that lie so do."""

    def made_up(round: int, honest: Digest) -> Digest:
        return Digest(blake3.blake3(b"made up %d" % round).digest()) if round else honest

    def applied(round: int, honest: Report) -> Report:
        if isinstance(honest, Applied):
            return replace(honest, outer_digest=made_up(round, honest.outer_digest))
        return honest

    _replace_reports(applied)
    attach, heartbeat = CoordinatorLink.attach, CoordinatorLink.heartbeat

    async def attach_lying(
        self: CoordinatorLink, announced: Announcement, **rulings: Any
    ) -> object:
        digest = made_up(announced.outer_round, announced.outer_digest)
        return await attach(self, replace(announced, outer_digest=digest), **rulings)

    async def beat_lying(self: CoordinatorLink, session_id: int, vitals: Vitals) -> bool:
        digest = made_up(vitals.outer_round, vitals.outer_digest)
        return await heartbeat(self, session_id, replace(vitals, outer_digest=digest))

    CoordinatorLink.attach = attach_lying  # type: ignore[method-assign, assignment]
    CoordinatorLink.heartbeat = beat_lying  # type: ignore[method-assign]


def reduce_backwards() -> None:
    """From round 3 on it hands out means that point backwards and are as long as honest ones."""
    result_of = Outer.result_of

    def turned(self: Outer, reduction: Reduction, fragment: int) -> SliceResult | None:
        if reduction.plan.round >= 3:
            reduction = replace(reduction, uplink=Misreading(reduction.uplink))  # type: ignore[arg-type]
        return result_of(self, reduction, fragment)

    Outer.result_of = turned  # type: ignore[method-assign]


def reduce_to_nonsense() -> None:
    """From round 3 on it reports, signs and hands out results that no codec takes."""
    result_of = Outer.result_of

    def nonsense(self: Outer, reduction: Reduction, fragment: int) -> SliceResult | None:
        made = result_of(self, reduction, fragment)
        signer = self._sender.signer
        if made is None or signer is None or reduction.plan.round < 3:
            return made
        body = b"\xff" * len(made.payload.body)
        header = replace(made.payload.header, body_digest=Digest(blake3.blake3(body).digest()))
        signer._signed.pop(header.slot, None)  # an honest one signs no two results
        return replace(made, payload=signer.signed(Payload(header=header, body=body)))

    Outer.result_of = nonsense  # type: ignore[method-assign]


LIES: dict[str, Callable[[], None]] = {
    "contributes too much": partial(contribute, LOUDER),
    "pulls backwards": partial(contribute, -1),
    "reports nothing": report_nothing,
    "boasts": boast,
    "makes up states": make_up_states,
    "reduces backwards": reduce_backwards,
    "reduces to nonsense": reduce_to_nonsense,
}

if __name__ == "__main__":
    LIES[sys.argv[1]]()
    command = sys.argv[2:]
    cli.main(command[command.index("protocol.terminal.cli") + 1 :])
