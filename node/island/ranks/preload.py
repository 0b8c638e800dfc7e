"""What ranks are forked with: torch and all that is theirs. Only the forkserver imports this.

Python's collector is off meanwhile, and until a rank begins: it finds nothing in what imports make, and
took a sixth of the time. What is loaded by then it leaves alone, so ranks go on sharing that memory.
"""

import gc
from importlib import import_module

gc.disable()
import_module("node.island.ranks.rank")


def begin_collecting() -> None:
    """For a process that was forked from the forkserver."""
    gc.freeze()
    gc.enable()
