"""Lets the exchange wait in slow motion, as the links of the lab do then.

On links of a tenth of the rate and ten times the delay everything takes ten times as long, but what
computing takes; so cores hardly count. What the exchange waits by must stretch with it: with a grace of two
seconds nodes would fetch results that are on their way to them.
"""

import sys
from collections.abc import Mapping
from types import ModuleType

EXCHANGE = "node.exchange"


def stretch_waits(factor: float, modules: Mapping[str, ModuleType] = sys.modules) -> list[str]:
    """Multiplies every constant of seconds of the exchange's modules, once in a process; returns which.

    Raises when there is none: then nothing would be stretched, and figures would lie.
    """
    stretched = []
    for place, module in sorted(modules.items()):
        if place != EXCHANGE and not place.startswith(f"{EXCHANGE}."):
            continue
        for name, value in sorted(vars(module).items()):
            if name.endswith("_SECONDS") and isinstance(value, (int, float)):
                setattr(module, name, factor * value)
                stretched.append(f"{place}.{name}")
    if not stretched:
        raise LookupError(f"no module of {EXCHANGE} has a constant of seconds")
    return stretched
