"""`preset = "auto"` in a run file's [exchange]: read, answered, and written out as plain keys.

It happens once, before the first round: the settled file has no preset any more, so its digest is of
values alone and every node has the same ones, whatever version chooses differently later.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from coordinator.presets.choosing import Plan, Value, chosen
from coordinator.presets.cost import Situation
from coordinator.presets.link_shares import CUBIC, CongestionControl
from coordinator.presets.reasons import counted
from coordinator.presets.toml_edit import CannotEditError, Place, with_values
from protocol.errors import ConfigError
from protocol.files.durable import TOML_ENCODING, read_toml
from protocol.run.models import Positive, Section
from protocol.run.run_spec import RunSpec, validated, validated_file
from protocol.terminal.typed import directions_of, seconds_of

SLOWEST_LINK = 256e3
"""Bits per second; with less, transfers are slower than peers wait for (node.toml's max_upload)."""


class PresetKeys(Section):
    """What of [exchange] only asks for a preset. None of it is in a settled run file."""

    preset: Literal["auto"]
    link: str | None = None
    round_trip: str = "100ms"
    congestion: CongestionControl = CUBIC
    inner_step: str | None = None
    nodes: Positive | None = None
    total_steps: Positive | None = None


PRESET_KEYS = tuple(PresetKeys.model_fields)

DECIDING = ("uplink", "downlink", "fragments", "overlap")
"""With all of these given, there is nothing left to choose that bytes depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A run file without a preset, and what was chosen for it."""

    text: str
    spec: RunSpec
    plan: Plan


def wants_settling(tables: Mapping[str, Any]) -> bool:
    """Whether a run file holds keys that only a preset has."""
    exchange = tables.get("exchange")
    return isinstance(exchange, dict) and not exchange.keys().isdisjoint(PRESET_KEYS)


def settled(text: str, *, origin: str) -> Settled:
    """Answers the preset of a run file's text; raises ConfigError with what is missing or wrong."""
    tables = tomllib.loads(text)
    keys, rest = _split(tables, origin=origin)
    # What is given must be sound by itself.
    spec = validated_file(_with_room_for_blend(rest), origin=origin)
    given = _given(rest)
    plan = chosen(_situation(keys, spec, given, origin=origin), given)
    if plan.is_too_short:
        raise ConfigError(
            f"{origin}: the run is over after {counted(plan.situation.total_steps, 'inner step')}, before "
            f"each parameter is exchanged, every {plan.setting.interval}: "
            f"{counted(plan.setting.fragments, 'fragment')} of {counted(plan.setting.steps, 'step')} each",
            next_step="write fewer [inner] steps or [exchange] fragments, or more total_steps",
        )
    values: dict[Place, tuple[Value, str]] = {
        (choice.table, choice.key): (choice.value, choice.reason)
        for choice in plan.choices
        if not choice.is_given
    }
    retired = {("exchange", key) for key in PRESET_KEYS if key in tables["exchange"]}
    if plan.overlap == "none" and "blend" in tables["exchange"]:
        retired.add(("exchange", "blend"))
    try:
        edited = with_values(text, values, retired=retired)
    except CannotEditError as error:
        raise ConfigError(
            f"{origin}: a preset cannot be written out here: {error}",
            next_step="write it so, or set the keys of [exchange] yourself",
        ) from error
    return Settled(text=edited, spec=validated(tomllib.loads(edited), origin=origin), plan=plan)


def link_of(text: str, *, origin: str) -> tuple[float, float]:
    """Bits per second down and up; raises ConfigError."""
    directions = directions_of(text)
    if directions is None:
        raise ConfigError(
            f"{origin} = {text!r} is no link",
            next_step='write bits a second as "100mbit", or down and up as "100mbit/20mbit"',
        )
    if min(directions) < SLOWEST_LINK:
        raise ConfigError(
            f"{origin} = {text!r} is too slow to take part", next_step="write 256kbit or more"
        )
    return directions


def span_of(text: str, *, origin: str, may_be_zero: bool) -> float:
    """Seconds; raises ConfigError."""
    seconds = seconds_of(text)
    if seconds is None or not math.isfinite(seconds) or (not seconds and not may_be_zero):
        raise ConfigError(
            f"{origin} = {text!r} is no time", next_step='write it as "100ms" or "1.2s"'
        )
    return seconds


def _split(tables: dict[str, Any], *, origin: str) -> tuple[PresetKeys, dict[str, Any]]:
    """The preset's keys, and the tables without them."""
    exchange = tables["exchange"]
    asked = {key: value for key, value in exchange.items() if key in PRESET_KEYS}
    if "preset" not in asked:
        key = next(iter(asked))
        raise ConfigError(
            f'{origin}: [exchange] {key} = {asked[key]!r} has no effect without preset = "auto"',
            next_step='add preset = "auto", or remove it',
        )
    try:
        keys = PresetKeys.model_validate(asked)
    except ValidationError as error:
        problem = error.errors()[0]
        key, value = problem["loc"][0], problem["input"]
        raise ConfigError(
            f"{origin}: [exchange] {key} = {value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}",
            next_step='correct it; a preset is asked for as preset = "auto", link = "100mbit", '
            'inner_step = "1.2s"',
        ) from error
    rest = {key: value for key, value in exchange.items() if key not in PRESET_KEYS}
    if all(key in rest for key in DECIDING):
        raise ConfigError(
            f'{origin}: [exchange] preset = "auto" has nothing to choose, for '
            f"{', '.join(DECIDING)} are all given",
            next_step="remove those that it should choose, or the preset",
        )
    return keys, tables | {"exchange": rest}


def _with_room_for_blend(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with overlap, where blend is given and overlap is still to be chosen."""
    exchange = tables["exchange"]
    if "blend" not in exchange or "overlap" in exchange:
        return tables
    return tables | {"exchange": exchange | {"overlap": "keep"}}


def _situation(
    keys: PresetKeys, spec: RunSpec, given: Mapping[Place, object], *, origin: str
) -> Situation:
    if keys.link is None:
        raise ConfigError(
            f'{origin}: [exchange] preset = "auto" needs link, what the slowest node\'s link carries',
            next_step="write link = \"100mbit\" beside it; 'atoll nodes' of an earlier run shows what "
            "links carried",
        )
    if keys.inner_step is None:
        raise ConfigError(
            f'{origin}: [exchange] preset = "auto" needs inner_step, how long one takes on a node',
            next_step='write inner_step = "1.2s" beside it: '
            f"{spec.tokens_per_inner_step} tokens over what 'atoll status' shows as tok/s",
        )
    num_nodes = keys.nodes or spec.run.min_nodes
    if num_nodes < 2:
        raise ConfigError(
            f'{origin}: [exchange] preset = "auto" is for two nodes or more, not for {num_nodes}',
            next_step="write nodes = 4, as many as you expect, beside it",
        )
    if spec.inner.round_tokens is not None:
        raise ConfigError(
            f'{origin}: [exchange] preset = "auto" chooses [inner] steps, and [inner] round_tokens = '
            f"{spec.inner.round_tokens} says how long a round is",
            next_step="remove one of them; round_tokens may take the place of the steps that a preset chose",
        )
    step_seconds = span_of(
        keys.inner_step, origin=f"{origin}: [exchange] inner_step", may_be_zero=False
    )
    down, up = link_of(keys.link, origin=f"{origin}: [exchange] link")
    told = spec.run.rounds * spec.inner.steps
    if (
        keys.total_steps not in (None, told)
        and {("run", "rounds"), ("inner", "steps")} <= given.keys()
    ):
        raise ConfigError(
            f"{origin}: [exchange] total_steps = {keys.total_steps}, but [run] rounds times [inner] steps "
            f"are {told}",
            next_step="leave one of the three out",
        )
    if (
        keys.total_steps is not None
        and ("run", "rounds") in given
        and spec.run.rounds > keys.total_steps
    ):
        raise ConfigError(
            f"{origin}: [run] rounds = {spec.run.rounds} are more than [exchange] total_steps = "
            f"{keys.total_steps}, and a round takes one inner step at least",
            next_step="write fewer rounds or more total_steps, or leave one of them out",
        )
    return Situation(
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        num_nodes=num_nodes,
        down_bits_per_second=down,
        up_bits_per_second=up,
        round_trip_seconds=span_of(
            keys.round_trip, origin=f"{origin}: [exchange] round_trip", may_be_zero=True
        ),
        seconds_per_inner_step=step_seconds,
        total_steps=keys.total_steps or told,
        batch=spec.inner.batch,
        congestion_control=keys.congestion,
        inner_optimizer=spec.inner.optimizer,
        flops_per_second=6.0 * spec.num_parameters * spec.tokens_per_inner_step / step_seconds,
    )


def _given(tables: Mapping[str, Any]) -> dict[Place, object]:
    return {
        (name, key): value
        for name, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }


def settled_run_file(path: Path) -> Settled | None:
    """The settled form of a run file; None when it asks for no preset, and is sound without.

    Raises NoInputError or ConfigError.
    """
    tables = read_toml(path, when_missing=f"run 'atoll coordinator init {path.parent}'")
    if wants_settling(tables):
        return settled(path.read_text(encoding=TOML_ENCODING), origin=str(path))
    validated_file(tables, origin=str(path))
    return None
