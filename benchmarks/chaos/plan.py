"""Which faults a chaos run has: drawn from a seed before it begins. Pure.

Who is alive when a fault is due depends on the machine, so a fault names its victims in an order of
preference. The rest (rounds, kinds, phases, times, pauses) is the seed's.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["daemon", "rank", "p2pd", "coordinator"]

NODE_PHASES = (
    "training",
    "contributing",
    "reducing",
    "handing out",
    "holding",
    "applying",
    "adopting",
)
"""Those that a node passes in every round that it takes part in."""

COORDINATOR_PHASES = ("exchanging", "committed", "settled", "opened")

KINDS: tuple[tuple[Kind, float], ...] = (
    ("daemon", 0.5),
    ("rank", 0.2),
    ("p2pd", 0.15),
    ("coordinator", 0.15),
)
"""And how often each is drawn."""

QUIET_ROUNDS = 1
"""So many rounds at the start are without faults, and so many more at the end."""

PAUSE_SECONDS = 3.0
"""The mean time for which a victim stays away before it is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of a run."""

    round: int
    kind: Kind
    victims: tuple[str, ...]  # the first of them that can be struck; none for the coordinator
    phase: str | None  # None: at a time, wherever the victim is then
    part: float  # of a round's length, after which a fault without phase comes
    pause_seconds: float
    joiner: str | None  # who comes in the victim's place, which does not come back


def plan_faults(
    rng: random.Random,
    *,
    names: Sequence[str],
    rounds: int,
    num_faults: int,
    joiners: Sequence[str],
) -> tuple[PlannedFault, ...]:
    """Draws the faults, in the order of their rounds.

    Kinds come in the proportions of KINDS, in a drawn order, so that short runs have of each.
    Joiners are spread evenly over the faults that kill a daemon.
    """
    first, last = 1 + QUIET_ROUNDS, rounds - 2 * QUIET_ROUNDS
    numbers = sorted(rng.randint(first, last) for _ in range(num_faults))
    kinds = _dealt(rng, num_faults)
    deaths = [index for index, kind in enumerate(kinds) if kind == "daemon"]
    coming = dict(zip(_spread(deaths, len(joiners)), joiners, strict=False))
    known = [*names]
    planned = []
    for index, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
        phases = COORDINATOR_PHASES if kind == "coordinator" else NODE_PHASES
        is_at_phase = rng.random() < 0.5
        joiner = coming.get(index)
        planned.append(
            PlannedFault(
                round=number,
                kind=kind,
                victims=() if kind == "coordinator" else tuple(rng.sample(known, len(known))),
                phase=rng.choice(phases) if is_at_phase else None,
                part=rng.random(),
                pause_seconds=min(rng.expovariate(1 / PAUSE_SECONDS), 4 * PAUSE_SECONDS),
                joiner=joiner,
            )
        )
        if joiner is not None:
            known.append(joiner)
    return tuple(planned)


def _dealt(rng: random.Random, num_faults: int) -> list[Kind]:
    """Kinds in their proportions, the rarest not left out, in a random order."""
    kinds: list[Kind] = []
    for kind, share in sorted(KINDS, key=lambda one: one[1]):
        kinds += [kind] * max(1, round(share * num_faults))
    kinds = kinds[:num_faults]
    kinds += ["daemon"] * (num_faults - len(kinds))
    rng.shuffle(kinds)
    return kinds


def _spread(indices: Sequence[int], num: int) -> Iterator[int]:
    """`num` of them, evenly."""
    if indices and num:
        yield from (indices[place * len(indices) // num] for place in range(min(num, len(indices))))
