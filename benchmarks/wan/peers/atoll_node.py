"""`atoll`, whose ranks keep the benchmark's pace: the ordinary command with one more preloaded module."""

from typing import Any

from node.island.ranks import forkserver
from protocol.terminal.cli import main


def preload_pace() -> None:
    """Lets the forkserver import atoll_rank after what it imports anyway."""
    set_preload = forkserver._context.set_forkserver_preload

    def with_pace(modules: list[str]) -> None:
        set_preload([*modules, "benchmarks.wan.peers.atoll_rank"])

    context: Any = forkserver._context
    context.set_forkserver_preload = with_pace


if __name__ == "__main__":
    preload_pace()
    main()
