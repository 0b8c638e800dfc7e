"""What a node tells the coordinator about its part in a round. node.link.session puts it on the wire."""

from dataclasses import dataclass, field

from protocol.rounds import ContributionDigest, Contributor, Digest
from protocol.wire_count import WireTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Inner steps are done. `samples` they have used up, `tokens` is what contributions will weigh.

    With 0 tokens none follow.
    """

    inner_steps: int
    samples: int
    tokens: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A result is encoded; digest None: nothing arrived to reduce.

    `contributions` says of each contributor, in their order, which bytes are in the mean.
    """

    slice_index: int
    digest: Digest | None
    contributors: tuple[Contributor, ...]
    contributions: tuple[ContributionDigest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A result is held."""

    slice_index: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The commit is applied; the digest is of the outer state after it.

    `wire` is what the process has sent and received so far, by kind.
    """

    outer_digest: Digest
    incarnation: int
    wire: WireTotals = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The node leaves after this round: it reduces nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The outer state is evaluated."""

    held_out_loss: float
    tokens: int
    metric: float | None = None


Report = Trained | Reduced | Held | Applied | Evaluated | Leaving
