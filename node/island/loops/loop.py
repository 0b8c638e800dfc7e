"""The ranks of one start of a contributor's program, and who may be one of them."""

from dataclasses import dataclass, field
from typing import Any

from node.island.loops.door import Visitor
from node.island.loops.messages import VERSION, Hello


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """The ranks of one start of a program."""

    group: str
    world_size: int
    evaluates: bool
    visitors: dict[int, Visitor] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    is_fresh: bool = True  # it has not adopted the global parameters yet
    unpublished_steps: int = 0
    is_done: bool = False  # it has left with its work

    @property
    def is_whole(self) -> bool:
        """Whether all ranks take orders."""
        return len(self.ready) == self.world_size

    def say(self, message: dict[str, Any]) -> None:
        """Says it to all ranks."""
        for visitor in self.visitors.values():
            visitor.say(message)


def refusal_of(hello: Hello, here: Loop | None) -> tuple[str, str] | None:
    """Why a rank may not come in, and what its owner may do; None when it may. Pure."""
    if hello.version != VERSION:
        return (
            f"the loop's package atoll speaks version {hello.version} and the node version {VERSION}",
            "install the same version of Atoll in both environments",
        )
    if hello.rank >= hello.world_size:
        return (f"rank {hello.rank} of {hello.world_size} is none", "")
    if here is not None and (
        here.group != hello.group
        or here.world_size != hello.world_size
        or hello.rank in here.visitors
    ):
        others = ", ".join(str(visitor.process_id) for visitor in here.visitors.values())
        return (
            f"another training loop is with this node: process {others}",
            "end that one first; a second loop needs a node of its own, in a folder of its own",
        )
    return None
