"""`preset = "auto"` in a run file's [exchange]: read, answered, and written into its text as plain keys.

It happens once, before the first round: the settled file has no preset any more, so its digest is of
values alone and every node has the same ones, whatever version chooses differently later.

Keys are set in the text that people wrote, and all else stays as it stands. So small an editor knows one key
on a line, below the header of its table or, above all headers, with the table's name before it
(exchange.preset = "auto"), which is how run files are written. Whatever else TOML allows is found by reading
the result, and refused.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from coordinator.presets.choosing import Plan, chosen
from coordinator.presets.cost import CUBIC, CongestionControl, Situation
from coordinator.presets.loss import most_fragments
from coordinator.presets.reasons import counted
from protocol.errors import AtollError, ConfigError
from protocol.files.durable import TOML_ENCODING, read_toml, toml_value
from protocol.run.models import Positive, Section, fragment_sizes
from protocol.run.run_files import (
    MADE_OF,
    WHEN_MISSING,
    description_beside,
    validated,
    validated_file,
)
from protocol.run.run_spec import RunSpec
from protocol.terminal.console import directions_of, seconds_of

Place = tuple[str, str]
"""Table and key."""

Value = str | int | float | list[str]

_HEADER = re.compile(r"\s*\[\s*(\w+)\s*\]\s*(#.*)?")
_LINE = re.compile(
    r"""(\s*)(# )?(?:(\w+)\s*\.\s*)?(\w+)\s*=\s*("[^"]*"|'[^']*'|\[[^\]]*\]|[^\s#"'\[]+)(\s*#.*|\s*)"""
)


class CannotEditError(ValueError):
    """The text is written in a way that this file does not know."""


def with_values(
    text: str,
    values: Mapping[Place, tuple[Value, str]],
    *,
    retired: Set[Place] = frozenset(),
) -> str:
    """The text with each value in its place, below a comment that says why.

    A key that stands there, or in a comment of its own, changes there; others come right after
    their table's header, or the first key that names the table. Keys in `retired` become comments.
    Raises CannotEditError.
    """
    before = tomllib.loads(text)
    lines = text.splitlines()
    places, begins = _places(lines)
    missing: dict[str, list[str]] = {}
    for place, (value, why) in values.items():
        written = toml_value(value)
        comment = f"# chosen: {why}" if why else None
        if place in places:
            number = places[place]
            lines[number] = _changed(lines[number], written, comment)
        else:
            added = [comment] if comment else []
            prefix = begins[place[0]].prefix if place[0] in begins else ""
            missing.setdefault(place[0], []).extend([*added, f"{prefix}{place[1]} = {written}"])
    for place in retired & places.keys():
        number = places[place]
        lines[number] = f"# settled: {lines[number].lstrip()}"
    edited = "\n".join(_with_added(lines, missing, begins)) + "\n"
    try:
        is_right = tomllib.loads(edited) == _expected(before, values, retired)
    except tomllib.TOMLDecodeError:
        is_right = False  # a key that stood there in a way that we do not know, and now twice
    if not is_right:
        raise CannotEditError(
            "keys need a line each, below a line with the name of their table, as [exchange]"
        )
    return edited


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """Where a table begins, and what stands before its keys there."""

    line: int
    prefix: str  # empty below a header


def _places(lines: list[str]) -> tuple[dict[Place, int], dict[str, _Begin]]:
    """Where each key stands, in a comment only if it stands nowhere else; and where tables begin."""
    live: dict[Place, int] = {}
    commented: dict[Place, int] = {}
    begins: dict[str, _Begin] = {}
    header_above = ""
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line):
            header_above = header[1]
            begins.setdefault(header_above, _Begin(line=number, prefix=""))
        elif match := _LINE.fullmatch(line):
            table, key = match[3] or header_above, match[4]
            if match[3] and header_above:
                continue  # of a table within that table
            if match[3] and not match[2]:
                begins.setdefault(table, _Begin(line=number, prefix=f"{table}."))
            (commented if match[2] else live).setdefault((table, key), number)
    return commented | live, begins


def _changed(line: str, written: str, comment: str | None) -> str:
    match = _LINE.fullmatch(line)
    assert match is not None
    indent, tail = match[1], match[6].strip()
    prefix = f"{match[3]}." if match[3] else ""
    changed = f"{indent}{prefix}{match[4]} = {written}"
    if tail:
        changed = f"{changed.ljust(line.find(tail, match.start(6)) - 1)} {tail}"
    return f"{indent}{comment}\n{changed}" if comment else changed


def _with_added(
    lines: list[str], missing: Mapping[str, list[str]], begins: Mapping[str, _Begin]
) -> list[str]:
    """The lines with new keys where their tables begin, and new tables at the end."""
    after = {begins[table].line: added for table, added in missing.items() if table in begins}
    result: list[str] = []
    for number, line in enumerate(lines):
        result += [line, *after.get(number, [])]
    for table, added in missing.items():
        if table not in begins:
            result += ["", f"[{table}]", *added]
    return result


def _expected(
    before: Mapping[str, Any],
    values: Mapping[Place, tuple[Value, str]],
    retired: Set[Place],
) -> dict[str, Any]:
    tables = {name: dict(t) if isinstance(t, dict) else t for name, t in before.items()}
    for table, key in retired:
        if isinstance(tables.get(table), dict):
            tables[table].pop(key, None)
    for (table, key), (value, _) in values.items():
        tables.setdefault(table, {})[key] = value
    return tables


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


def settled(text: str, *, origin: str, description: Mapping[str, Any] | None = None) -> Settled:
    """Answers the preset of a run file's text, whose model is described where it has to be.

    Raises ConfigError with what is missing or wrong.
    """
    tables = tomllib.loads(text)
    keys, rest = _split(tables, origin=origin)
    # What is given must be sound by itself.
    spec = validated_file(_with_room_for_blend(rest), origin=origin)
    given = _given(rest)
    if description is not None:
        spec = validated({**spec.model_dump(), "description": description}, origin=origin)
    if not spec.is_described:
        raise ConfigError(
            f'{origin}: a preset goes by the size of the model, and one with source = "{spec.model.source}" '
            "is known only once it was built",
            next_step="'atoll init NEWDIR --run' with this file and --from FOLDER builds it, and answers the "
            "preset",
        )
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
    edited = _edited(text, values, retired, origin=origin)
    return Settled(text=edited, spec=validated(tomllib.loads(edited), origin=origin), plan=plan)


def _edited(
    text: str, values: Mapping[Place, tuple[Value, str]], retired: Set[Place], *, origin: str
) -> str:
    try:
        return with_values(text, values, retired=retired)
    except CannotEditError as error:
        raise ConfigError(
            f"{origin}: a preset cannot be written out here: {error}",
            next_step="write it so, or set the keys of [exchange] yourself",
        ) from error


def link_of(
    text: str, *, origin: str, refusal: type[AtollError] = ConfigError
) -> tuple[float, float]:
    """Bits per second down and up; raises the refusal."""
    directions = directions_of(text)
    if directions is None:
        raise refusal(
            f"{origin} = {text!r} is no link",
            next_step='write bits a second as "100mbit", or down and up as "100mbit/20mbit"',
        )
    if min(directions) < SLOWEST_LINK:
        raise refusal(
            f"{origin} = {text!r} is too slow to take part", next_step="write 256kbit or more"
        )
    return directions


def span_of(
    text: str, *, origin: str, may_be_zero: bool, refusal: type[AtollError] = ConfigError
) -> float:
    """Seconds; raises the refusal."""
    seconds = seconds_of(text)
    if seconds is None or not math.isfinite(seconds) or (not seconds and not may_be_zero):
        raise refusal(f"{origin} = {text!r} is no time", next_step='write it as "100ms" or "1.2s"')
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
    total_steps = _total_steps(keys, spec, given, origin=origin)
    return Situation(
        num_parameters=spec.num_parameters,
        num_layers=spec.num_layers,
        num_frozen=0 if spec.description is None else spec.description.num_frozen,
        num_nodes=num_nodes,
        down_bits_per_second=down,
        up_bits_per_second=up,
        round_trip_seconds=span_of(
            keys.round_trip, origin=f"{origin}: [exchange] round_trip", may_be_zero=True
        ),
        seconds_per_inner_step=step_seconds,
        total_steps=total_steps,
        batch=spec.inner.batch,
        congestion_control=keys.congestion,
        inner_optimizer=spec.inner.optimizer,
        has_weights=spec.goes_on_with_weights,
        may_check=spec.data.may_be_checked,
        flops_per_second=6.0 * spec.num_parameters * spec.tokens_per_inner_step / step_seconds,
        fragment_sizes=fragment_sizes(
            spec.tensors, max(most_fragments(spec.num_layers), spec.exchange.fragments)
        ),
    )


def _total_steps(
    keys: PresetKeys, spec: RunSpec, given: Mapping[Place, object], *, origin: str
) -> int:
    """Inner steps of the whole run; raises ConfigError where the file says two different things of them."""
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
    return keys.total_steps or told


def _given(tables: Mapping[str, Any]) -> dict[Place, object]:
    return {
        (name, key): value
        for name, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }


def without_preset(text: str, *, origin: str) -> str:
    """The text with the preset's keys as comments: by it a model is described before they are answered."""
    told = tomllib.loads(text)["exchange"]
    keys = PRESET_KEYS if "overlap" in told else (*PRESET_KEYS, "blend")
    return _edited(text, {}, {("exchange", key) for key in keys if key in told}, origin=origin)


def settled_run_file(path: Path, *, described_in: Path | None = None) -> Settled | None:
    """The settled form of a run file; None when it asks for no preset, and is sound without.

    Its model's description lies beside it; or in a folder of its own, where it can be made anew for what
    is chosen: the digest of given weights is of so many fragments. Raises NoInputError or ConfigError.
    """
    tables = read_toml(path, when_missing=WHEN_MISSING)
    if wants_settling(tables):
        description = description_beside(described_in or path.parent) or {}
        made_of = description.pop(MADE_OF, {})
        text = path.read_text(encoding=TOML_ENCODING)
        cut = description.get("first_fragments")
        if described_in is None:
            cut = cut or made_of.get("exchange", {}).get("fragments")
        if cut and "fragments" not in tables["exchange"]:
            why = "the digest of the first weights is of so many"
            text = _edited(text, {("exchange", "fragments"): (cut, why)}, set(), origin=str(path))
        return settled(text, origin=str(path), description=description or None)
    validated_file(tables, origin=str(path))
    return None
