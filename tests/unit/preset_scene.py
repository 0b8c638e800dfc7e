"""What tests of presets ask of a plan, of all settings, and of links of all rates."""

import math
from collections.abc import Callable

from coordinator.presets.choosing import Plan
from coordinator.presets.cost import Setting, Situation
from coordinator.presets.loss import Given, settings_of


def value(plan: Plan, key: str) -> object:
    (found,) = [c.value for c in plan.choices if f"{c.table}.{c.key}" == key]
    return found


def why(plan: Plan, key: str) -> str:
    (found,) = [c.reason for c in plan.choices if c.key == key]
    return found


def codecs_and_interval(plan: Plan) -> tuple[str, str, int]:
    return plan.setting.uplink, plan.setting.downlink, plan.setting.interval


def all_settings(situation: Situation, given: Given | None = None) -> list[Setting]:
    return settings_of(situation, given or {})


def slowest_mbit(is_so: Callable[[float], bool], *, least: float = 0.1, most: float = 1e5) -> float:
    """Where what holds over faster links ends, to a thousandth of the rate."""
    assert is_so(most) and not is_so(least)
    while most > 1.001 * least:
        middle = math.sqrt(least * most)
        least, most = (least, middle) if is_so(middle) else (middle, most)
    return most


def ever_slower_mbit(fastest: float, slowest: float) -> list[float]:
    """Rates from one to the other, each a fifth below the one before."""
    count = math.ceil(math.log(fastest / slowest) / math.log(1.25))
    return [fastest / 1.25**place for place in range(count + 1)]
