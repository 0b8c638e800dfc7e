"""What tests of presets ask of a plan and of the ladder."""

from coordinator.presets.choosing import Plan
from coordinator.presets.cost import Setting, Situation
from coordinator.presets.ladder import Given, Rung, ladder


def value(plan: Plan, key: str) -> object:
    (found,) = [c.value for c in plan.choices if f"{c.table}.{c.key}" == key]
    return found


def why(plan: Plan, key: str) -> str:
    (found,) = [c.reason for c in plan.choices if c.key == key]
    return found


def codecs_and_interval(plan: Plan) -> tuple[str, str, int]:
    return plan.setting.uplink, plan.setting.downlink, plan.setting.interval


def rungs(situation: Situation, given: Given | None = None) -> list[Rung]:
    return list(ladder(situation, given or {}))


def all_settings(situation: Situation, given: Given | None = None) -> list[Setting]:
    return [setting for rung in rungs(situation, given) for setting in rung]
