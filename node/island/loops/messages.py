"""What the daemon and a training loop say to each other: a line of JSON each, over a Unix socket.

The loop's side is the package `atoll`, which is imported into environments that are not ours and so
shares no code with this one: who changes a message changes `atoll.connection` too, and VERSION.

The daemon greets with one byte, and descriptors of the two shared vectors beside it: the global
parameters, to be read, and room for one fragment of local ones, to be written. Each rank of the loop
then says hello and is welcomed, or refused. When all ranks are ready, the daemon gives orders, one at a
time and the same to all, and each rank answers with the order's number:

    adopt      take over the global parameters, of a fragment or of all  →  done
    train      take inner steps; rank 0 tells of them now and then (stepped)  →  trained
    publish    copy the local parameters of a fragment to the beginning of that room  →  done
    evaluate   measure the held-out loss of the global parameters  →  evaluated

`halt`, to rank 0, ends the training in progress after its current inner step, and is not answered.
While a loop trains, rank 0 may ask for the numbers of its samples, and for their tokens (samples →
samples). Either side may end it with a word: `leaving` from a loop, `goodbye` from the daemon. A word
`refused` ends the program of a loop that cannot go on as it is, also before it is welcome.
"""

import base64
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from node.island.data.dataset import Batch, Indices
from node.island.island import InnerWork
from protocol.run.models import Layout, Section
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Schedule, share_of_peak

VERSION = 9

MAX_LINE_BYTES = 1 << 20
"""Of what a loop says; the longest is a sentence. The welcome, the other way, names each tensor."""

GREETING = b"\0"

MOST_RATES = 65
"""Points of the learning rate's schedule in an order to train; between them it is a line."""

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Hello(Section):
    """A rank of a loop, before anything else."""

    kind: Literal["hello"]
    version: int
    group: Annotated[str, Field(max_length=64)]  # one for all ranks of a start, and no other start
    rank: Annotated[int, Field(ge=0, lt=1 << 16)]
    world_size: Annotated[int, Field(ge=1, le=1 << 16)]
    evaluates: bool


class Ready(Section):
    """The rank's model is the run's: it takes orders."""

    kind: Literal["ready"]
    software: Annotated[str, Field(max_length=100)]  # and frozen values that the run cannot compare
    evaluates_by: Annotated[str, Field(max_length=100)]  # a digest of its function, if it has one


class Refuses(Section):
    """The rank's model is not the run's."""

    kind: Literal["refuses"]
    why: Annotated[str, Field(max_length=2000)]


class Stepped(Section):
    """Inner steps so far of the order to train, of rank 0 alone."""

    kind: Literal["stepped"]
    number: Count
    steps: Count
    tokens: Count
    loss: float | None  # mean of the steps since the last word; None: the loop does not tell it
    is_finite: bool


class Trained(Section):
    """The answer to an order to train, of one rank."""

    kind: Literal["trained"]
    number: Count
    steps: Count
    tokens: Count  # of this rank
    loss: float | None
    is_finite: bool
    seconds: Annotated[float, Field(ge=0)]
    is_leased: bool  # whether all its steps were on leased samples


class Done(Section):
    """The answer to adopt and publish."""

    kind: Literal["done"]
    number: Count


class Evaluated(Section):
    """The answer to evaluate."""

    kind: Literal["evaluated"]
    number: Count
    loss: float  # nats per token
    tokens: Count
    metric: float | None  # what the loop's own function measures beside the loss


class Samples(Section):
    """Asks which samples the steps from `first_step` on train, of the order to train."""

    kind: Literal["samples"]
    number: Count
    first_step: Count
    wants_tokens: bool  # and not only the samples' numbers


class Leaving(Section):
    """The loop ends by itself, or begins anew."""

    kind: Literal["leaving"]
    is_done: bool  # it has contributed what it could, and nobody need wait for it to come back
    why: Annotated[str, Field(max_length=2000)]


Word = Annotated[
    Hello | Ready | Refuses | Stepped | Trained | Done | Evaluated | Samples | Leaving,
    Field(discriminator="kind"),
]
_WORDS: TypeAdapter[Word] = TypeAdapter(Word)


def word_of(line: bytes) -> Word:
    """What a loop said. Raises ValueError in a sentence for what is none of its words."""
    try:
        return _WORDS.validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{place or 'a message'}: {problem['msg']}") from error


def welcome(spec: RunSpec, layout: Layout, *, num_samples: int) -> dict[str, Any]:
    """What a loop must know of the run; `lora_scaling` is None where it trains no adapters of [lora]."""
    lora = spec.adapters
    return {
        "kind": "welcome",
        "run": spec.run.name,
        "run_digest": spec.digest().hex(),
        "rounds": spec.run.rounds,
        "batch": spec.inner.batch,
        "context": spec.model.context,
        "tokens_per_step": spec.tokens_per_inner_step,
        "overlap": spec.exchange.overlap,
        "local_share": spec.exchange.local_share,
        "num_samples": num_samples,
        "rules": rules_in_force(spec),
        "num_elements": layout.num_elements,
        "fragments": [[f.start, f.num_elements] for f in layout.fragments],
        "frozen_values": {} if spec.description is None else spec.description.frozen_values,
        "lora_scaling": None if lora is None else lora.alpha / lora.rank,
        "tensors": [[place.name, list(place.shape), place.offset] for place in layout.places],
    }


def refused(what: str, next_step: str) -> dict[str, Any]:
    """Why the loop ends: coming back would change nothing."""
    return {"kind": "refused", "what": what, "next_step": next_step}


def train(spec: RunSpec, work: InnerWork) -> dict[str, Any]:
    """An order to train; `max_seconds` is None where there is no end.

    `rules` are those in force in the round. `rate_shares` are what the run makes of its learning rates, at
    inner steps that lie evenly between the first and the last.
    """
    first, last = (work.position(spec, step).progress for step in (0, work.inner_steps - 1))
    scale = Schedule.of(spec).scale_of(work.num_participants)
    points = min(work.inner_steps, MOST_RATES)
    places = (point * (work.inner_steps - 1) / max(1, points - 1) for point in range(points))
    return {
        "kind": "train",
        "round": work.round,
        "inner_steps": work.inner_steps,
        "max_seconds": None if work.max_seconds == float("inf") else work.max_seconds,
        "progress": [first, last],
        "rules": rules_in_force(spec, work),
        "rate_shares": [
            scale
            * share_of_peak(
                spec.inner, work.position(spec, place), final_fraction=work.final_fraction
            )
            for place in places
        ],
    }


def rules_in_force(spec: RunSpec, work: InnerWork | None = None) -> dict[str, float]:
    """What amendments may change of the run and a loop may go by, by the run file's keys.

    As they are in the round of `work`, or as the run file has them.
    """
    inner = spec.inner
    rates, final, rounds = (1.0, 1.0), inner.final_fraction, spec.run.rounds
    if work is not None:
        rates, rounds = (work.rate_factor, work.muon_rate_factor), work.num_rounds or rounds
        final = inner.final_fraction if work.final_fraction is None else work.final_fraction
    rules = {
        "run.rounds": rounds,
        "inner.learning_rate": _plain(inner.learning_rate * rates[0]),
        "inner.final_fraction": final,
    }
    if inner.optimizer == "muon":
        rules["inner.muon_learning_rate"] = _plain(inner.muon_peak_rate * rates[1])
    return rules


def _plain(rate: float) -> float:
    """Without what multiplying by a factor has rounded: as people wrote it."""
    return float(f"{rate:.12g}")


def samples(
    numbers: Indices, batch: Batch | None, targets: list[int] | None = None
) -> dict[str, Any]:
    """Samples of some steps: numbers [N], tokens [N, T + 1] and what counts of them [N, T].

    Without tokens, how many of each sample's count: targets [N]; None where all do.
    """
    counted = None if batch is None else batch.counted
    return {
        "kind": "samples",
        "why": "",
        "numbers": numbers.tolist(),
        "tokens": None if batch is None else _packed(batch.tokens.astype("<i4")),
        "counted": None if counted is None else _packed(counted.astype("u1")),
        "targets": targets,
    }


def no_samples(why: str) -> dict[str, Any]:
    """Why there are none."""
    return {**samples(np.empty(0, np.int64), None), "why": why}


def _packed(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).data).decode()
