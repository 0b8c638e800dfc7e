"""What of a run's rules may change between rounds, and what amendments make of them. Pure.

The run file stays as it is, and so does its digest: it says which model and data the bytes on the wire are
of, and amendments touch none of these. What is in force in a round is the run file with all amendments from
that round or before. Codecs are amended with their versions: all nodes must decode alike.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from protocol.errors import ConfigError, UsageError
from protocol.run.run_files import validated
from protocol.run.run_spec import CODEC_VERSIONS, RunSpec
from protocol.run.schedule import Schedule, Span
from protocol.trust.rulings import Ruling, RulingKind, Scalar, withdraws

Changes = tuple[tuple[str, Scalar], ...]
"""Keys of the run file, as "run.rounds", with their new values."""

AMENDABLE = frozenset(
    {
        *("run.rounds", "run.min_nodes"),
        *("inner.steps", "inner.learning_rate", "inner.muon_learning_rate", "inner.final_fraction"),
        *("outer.learning_rate", "outer.merge", "outer.screening", "outer.audit"),
        *(f"deadlines.{key}" for key in ("train", "contribute", "commit", "apply", "lease")),
        *("deadlines.adapt", "deadlines.floor"),
        *("evaluation.every_rounds", "evaluation.go_back"),
        *("exchange.uplink", "exchange.downlink", "exchange.residual_decay"),
    }
)

CODECS = frozenset({"exchange.uplink", "exchange.downlink"})
"""Whose values are names of codecs."""

TEXTS = frozenset({"outer.merge", *CODECS})
"""Whose values are texts."""

RATES = ("inner.learning_rate", "inner.muon_learning_rate", "outer.learning_rate")
MOST_TIMES = 10

LOWER_RATES = (
    "tell the run owner: 'atoll run amend' lowers inner.learning_rate or outer.learning_rate; then start the "
    "node again"
)
"""What helps where training has diverged, said to the owner of a node."""

_BARE = re.compile(r"[\w./-]+")

INNER_RATES = frozenset({"inner.learning_rate", "inner.muon_learning_rate", "inner.final_fraction"})
"""What a node's own ranks train by, and a loop of its owner's only if it asks for it."""

_VERSIONS: Mapping[str, int] = {name: version for name, version in CODEC_VERSIONS.items()}  # noqa: C416 - any text may be looked up

_WHY_NOT = {
    "run": "it says which run this is",
    "model": "the weights have its shapes",
    "data": "leased samples are places in these data",
    "inner": "optimizers on all nodes have begun with it",
    "outer": "the outer state has begun with it",
    "exchange": "what nodes still owe is laid out by it",
    "evaluation": "losses before and after could not be compared",
    "lora": "the weights have its shapes",
}
"""Why the other keys of a table cannot change while a run goes on."""


def changes_of(texts: Sequence[str]) -> Changes:
    """Reads KEY=VALUE, with values as TOML has them. Raises UsageError."""
    changes: dict[str, Scalar] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator or not key:
            raise UsageError(
                f"{text!r} is no KEY=VALUE", next_step="write run.rounds=200, for example"
            )
        if key in changes:
            raise UsageError(f"{key} is given twice", next_step="leave one of them out")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:  # a shell has taken the quotes of a text away
            may_be_text = key in TEXTS or key not in AMENDABLE  # which is refused for its key
            read = value.strip() if may_be_text and _BARE.fullmatch(value.strip()) else None
        if not isinstance(read, int | float | str | bool):
            raise UsageError(
                f"{value.strip()!r} is no value for {key}",
                next_step="write it as in run.toml: a number, true, false, or text in quotes",
            )
        changes[key] = read
    return tuple(sorted(changes.items()))


def amended(spec: RunSpec, changes: Changes) -> RunSpec:
    """The run with these values. Raises UsageError or ConfigError for what may not be, or cannot be."""
    tables: dict[str, Any] = spec.model_dump()
    for key, value in changes:
        table, _, name = key.partition(".")
        if key not in AMENDABLE:
            raise _cannot(key, table, is_known=_is_known(tables, table, name))
        tables[table][name] = _codec_of_this_release(key, value) if key in CODECS else value
    if spec.inner.round_tokens is not None and any(key == "inner.steps" for key, _ in changes):
        raise UsageError(
            "inner.steps says nothing of this run: its nodes share [inner] round_tokens",
            next_step="leave inner.steps out",
        )
    if spec.inner.optimizer != "muon" and any(
        key == "inner.muon_learning_rate" for key, _ in changes
    ):
        raise UsageError(
            f"inner.muon_learning_rate says nothing of this run: its optimizer is {spec.inner.optimizer}",
            next_step="amend inner.learning_rate",
        )
    try:
        becomes = validated(tables, origin="the amendment")
    except ConfigError as error:
        error.next_step = (
            "correct it; keys that go by each other are amended together: KEY=VALUE KEY=VALUE"
        )
        raise
    if (spec.outer.audit > 0) != (becomes.outer.audit > 0):
        raise UsageError(
            f"outer.audit cannot change from {spec.outer.audit:g} to {becomes.outer.audit:g} while the run "
            "goes on: nodes have begun to sign and keep what auditors want, or not to",
            next_step="give a share above 0, as outer.audit=0.2"
            if spec.outer.audit
            else "begin a new run with its weights: 'atoll node fork ROUND --to FOLDER'",
        )
    return becomes


def changes_codecs(ruling: Ruling) -> bool:
    """Whether a ruling has bytes of later rounds encoded otherwise."""
    return ruling.kind is RulingKind.AMENDED and not CODECS.isdisjoint(dict(ruling.changes))


def with_versions(changes: Changes) -> Changes:
    """The changes as they are ruled: codecs with the versions that this release speaks."""
    return tuple(
        (key, f"{value}/{version}")
        if key in CODECS and (version := _VERSIONS.get(str(value))) is not None
        else (key, value)
        for key, value in changes
    )


def _codec_of_this_release(key: str, value: Scalar) -> str:
    """The codec's name alone. Raises UsageError for a version that this release does not speak."""
    name, _, version = str(value).partition("/")
    known = _VERSIONS.get(name)
    if known is None or version not in ("", str(known)):
        spoken = ", ".join(f"{codec}/{number}" for codec, number in CODEC_VERSIONS.items())
        raise UsageError(
            f"there is no codec {value!r} for {key} in this release",
            next_step=f"it speaks {spoken}",
        )
    return name


def refuse_leaps(spec: RunSpec, becomes: RunSpec) -> None:
    """Raises UsageError for a learning rate that rises by more than ten times at once.

    Nodes whose loss is no number any more end, and their owners have to start them: a slip of the finger
    would stop a swarm.
    """
    for key in RATES:
        table, _, name = key.partition(".")
        before = getattr(getattr(spec, table), name)
        after = getattr(getattr(becomes, table), name)
        if before and after and after > MOST_TIMES * before:
            raise UsageError(
                f"{key} = {after:g} is {after / before:,.0f} times what is in force, {before:g}: nodes "
                "whose loss is not finite any more end",
                next_step=f"raise it by {MOST_TIMES} times at most: "
                f"'atoll run amend {key}={MOST_TIMES * before:g}'",
            )


def refuse_at_rest(spec: RunSpec, *, progress: float) -> None:
    """Raises UsageError where a schedule has ended at a rate of 0: more rounds would train nothing."""
    inner = spec.inner
    if progress >= 1 and inner.schedule != "constant" and inner.final_fraction == 0:
        raise UsageError(
            "the learning rate has fallen to its end, which is 0: more rounds would train nothing",
            next_step=f"give it another end: 'atoll run amend run.rounds={spec.run.rounds} "
            "inner.final_fraction=0.1'",
        )


def _is_known(tables: dict[str, Any], table: str, name: str) -> bool:
    keys = tables.get(table)
    return isinstance(keys, dict) and name in keys


def _cannot(key: str, table: str, *, is_known: bool) -> UsageError:
    allowed = ", ".join(sorted(AMENDABLE))
    if not is_known:
        near = difflib.get_close_matches(key, sorted(AMENDABLE), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return UsageError(
            f"the run file has no key {key!r}{meant}", next_step=f"what can change: {allowed}"
        )
    why = _WHY_NOT.get(table, "nodes have begun with it")
    fork = (
        "begin a new run with its weights, in which everything may be another: 'atoll node fork ROUND --to "
        "FOLDER'"
    )
    here = f"what can change here: {allowed}"
    if table == "data":
        here = "'atoll data skip FIRST-END' takes samples out of this one"
    return UsageError(
        f"{key} cannot change while the run goes on: {why}", next_step=f"{fork}; {here}"
    )


def in_force(spec: RunSpec, rulings: Iterable[Ruling], *, round: int | None = None) -> RunSpec:
    """The run's rules in a round, or after all rulings. Raises ConfigError for one that does not fit."""
    for from_round, ruling in _amendments(rulings):
        if round is not None and from_round > round:
            continue
        followed = tuple(
            (key, value)
            for key, value in ruling.changes
            if key in AMENDABLE
            or key not in ruling.optional  # then it is the coordinator's business
        )
        try:
            spec = amended(spec, followed)
        except UsageError as error:
            raise ConfigError(
                f"ruling {ruling.number} amends what this version cannot follow: {error.what}",
                next_step="install the coordinator's version of Atoll: 'atoll --version'",
            ) from error
    return spec


def still_in_force(rulings: Iterable[Ruling]) -> list[Ruling]:
    """The amendments in the order in which they hold, each without what a later one has amended again."""
    ordered = [ruling for _, ruling in _amendments(rulings)]
    last_of = {key: ruling.number for ruling in ordered for key, _ in ruling.changes}
    parts = (
        replace(one, changes=tuple(c for c in one.changes if last_of[c[0]] == one.number))
        for one in ordered
    )
    return [part for part in parts if part.changes]


def _amendments(rulings: Iterable[Ruling]) -> list[tuple[int, Ruling]]:
    """In the order of the rounds that they hold from, with those.

    One that was brought back may have a later number than its turn. Going back undoes training, not rules:
    what was in force before then is in force from the first undone round on. Where that is withdrawn, the
    rounds are again what they were, and what was amended meanwhile comes after them.
    """
    amending: list[tuple[int, Ruling]] = []
    before: list[tuple[Ruling, list[tuple[int, Ruling]]]] = []  # goings back not withdrawn
    for ruling in rulings:
        if ruling.kind is RulingKind.AMENDED:
            amending.append((ruling.from_round, ruling))
        elif ruling.kind is RulingKind.ROLLED_BACK:
            before.append((ruling, amending))
            amending = [(min(first, ruling.from_round), each) for first, each in amending]
        elif ruling.kind is RulingKind.WITHDRAWN:
            while before and withdraws(ruling, before[-1][0]):
                gone, earlier = before.pop()
                since = amending[len(earlier) :]
                again = gone.last_round + 1
                amending = [*earlier, *((max(first, again), each) for first, each in since)]
    return sorted(amending, key=lambda each: each[0])


def schedule_of(spec: RunSpec, rulings: Iterable[Ruling]) -> Schedule:
    """The learning rates' schedule after all rulings."""
    schedule = Schedule.of(spec)
    for from_round, ruling in _amendments(rulings):
        schedule = schedule.amended(from_round, dict(ruling.changes))
    return schedule


def span_of(spec: RunSpec, rulings: Iterable[Ruling], round: int) -> Span:
    """How far the run is in a round, by its number of rounds as amended."""
    return schedule_of(spec, rulings).span_of(round)
