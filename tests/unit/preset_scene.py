"""What tests of presets ask of a plan, of all settings, and of links of all rates."""

import math

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


def ever_slower_mbit(fastest: float, slowest: float) -> list[float]:
    """Rates from one to the other, each a fifth below the one before."""
    count = math.ceil(math.log(fastest / slowest) / math.log(1.25))
    return [fastest / 1.25**place for place in range(count + 1)]
