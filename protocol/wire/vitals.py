"""What a node tells of itself, when it attaches and in heartbeats: each figure once, and how it travels.

One figure more takes four files: session.proto, this one, the node that measures it, the page that shows it.
What the coordinator acts on stands in its `Condition` of a member as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from protocol.v1 import session_pb2 as pb
from protocol.wire import convert
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import (
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
    RoundSpan,
)
from protocol.wire.versions import MERGE

SHORT_WORDS, LONG_WORDS = 64, 256
"""Characters of a text for people that a coordinator takes: of an activity, a mesh; of a wait, a goodbye."""


def words_for_people(text: str, *, most: int) -> str:
    """The text as a coordinator takes it: a program's name or a reason may be of any length, with any bytes.

    A heartbeat that is refused ends its node.
    """
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def loss_in_words(loss: float) -> str:
    """Three decimals, or four digits where those would hide it: '1.270', '0.000312', '-1.235e+06'.

    Losses of one's own may be of any size, and below 0.
    """
    is_shown = not loss or 0.1 <= abs(loss) < 1e6
    return f"{loss or 0.0:.3f}" if is_shown else f"{loss:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes of bodies per second; None: not measured yet."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None


UNMEASURED = LinkRates()

HeldBy = Literal["nothing", "limit", "link", "losses", "answers"]
"""What keeps uploads from going faster."""

HELD_BY = get_args(HeldBy)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPace:
    """Why uploads go no faster."""

    held_by: HeldBy | None  # None: nothing is uploaded
    bytes_per_second: float = 0.0  # of the limit, or of what the link is taken to carry
    num_peers: int = 0  # whose answers are waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpeed:
    """What an exchange asks of a node, on one of its cores: see node.exchange.codecs.registry."""

    bytes_per_second: float  # of fp32
    uplink: str  # the codecs it was measured with, as in [exchange]
    downlink: str


NO_UPLOAD = UploadPace(held_by=None)
FREE = UploadPace(held_by="nothing")
"""Bodies go out as fast as TCP takes them."""


def upload_in_words(pace: "UploadPace | pb.UploadPace") -> str:
    """Why uploads go no faster, for people; empty while nothing is uploaded."""
    rate = f"{pace.bytes_per_second / 1e6:.3g} MB/s"
    match pace.held_by:
        case "nothing":
            return "as fast as the network takes it"
        case "limit":
            return f"its owner's limit of {rate}"
        case "link":
            return f"the link carries {rate}"
        case "losses":
            return f"packets are lost: connections share {rate}"
        case "answers":
            return f"waiting for answers of {pace.num_peers} peer{'s' * (pace.num_peers != 1)}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """What a node made of a round. Shares are of the time since it adopted the round before."""

    round: int
    tokens_per_second: float  # while it trained
    flops_per_second: float  # likewise
    mfu: float | None  # of the peak of its devices; None: the peak is not known
    peak_flops_per_second: float | None  # of its devices; None: not known
    is_peak_measured: bool  # here, and not taken from a table
    compute_share: float  # inner steps, without the next where that is measured
    local_communication_share: float | None  # inner steps held up by it; None: not measured
    publish_share: float
    adopt_share: float
    exchange_share: float  # bytes that travel, and encoding to applying, while ranks do nothing
    waiting_share: float  # all else: the other nodes, ranks that were started again
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a node declares when it attaches and with each heartbeat: its outer state, what it can do."""

    outer_round: int
    outer_digest: Digest
    outer_incarnation: int = 0
    cannot_train: bool = False  # its owner's loop does not run: no plan counts on it
    cannot_evaluate: bool = False  # nobody asks it for a held-out loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(Declaration):
    """What a node says of itself when it attaches."""

    node_name: str
    address: PeerAddress
    run_digest: Digest
    layout: LayoutSummary
    codecs: tuple[str, ...]  # up and down, with their versions
    corpus: CorpusSummary
    device: str
    num_ranks: int
    version: str
    process_id: int = 0  # what another process of the node held in memory is gone
    merge_version: int = MERGE


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """How a node's link is to all peers, as its transport sees it. Lists of members are in order."""

    unreachable: tuple[NodeId, ...] = ()  # not connected, not dialled for a while; or narrow
    narrow: tuple[NodeId, ...] = ()  # only small packets get through
    punched: tuple[NodeId, ...] = ()  # reached through holes in routers
    by_proxy: tuple[NodeId, ...] = ()  # reached through its network's HTTP proxy
    through: Mapping[NodeId, NodeId] = field(default_factory=dict)  # who carries to them lately
    carry_bytes_per_second: float = 0.0  # for pairs that do not reach each other; 0: nothing
    outside_token: bytes = b""  # in its datagrams to the coordinator; empty: it sends none
    outside_by_ipv6: str = ""  # where its QUIC is, as no router translates it: a multiaddress
    link_rates: LinkRates = UNMEASURED
    upload_pace: UploadPace = NO_UPLOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals(Declaration):
    """How a node is doing, for its heartbeat."""

    activity: str
    waiting_for: str
    inner_step: int
    loss: float
    tokens_per_second: float
    wire: WireTotals
    link: LinkState = field(default_factory=LinkState)
    utilisation: Utilisation | None = None  # of the round that ended last, if it trained in it
    mesh: str = ""  # how its ranks are laid out, in words
    congestion_control: str = ""  # of its host's TCP; empty: not known
    software: str = ""  # whose versions decide what it computes; empty: none does
    let_go_rounds: float = 0.0  # of late work, by this process
    exchange_speed: ExchangeSpeed | None = None  # None: not measured
    reach_back: tuple[RoundSpan, ...] = ()  # rounds to whose states it can go back by itself
    evaluates_by: str = ""  # a digest of its loop's function for that; empty: the run's own measure


def heartbeat_of(session_id: int, vitals: Vitals) -> pb.HeartbeatRequest:
    """What a node says of itself, as it goes over the wire: by its fields, but for these."""
    own = convert.fields_to_wire(vitals)
    told = own.pop("link") | own
    told |= {
        "activity": words_for_people(vitals.activity, most=SHORT_WORDS),
        "waiting_for": words_for_people(vitals.waiting_for, most=LONG_WORDS),
        "mesh": words_for_people(vitals.mesh, most=SHORT_WORDS),
        "software": words_for_people(vitals.software, most=SHORT_WORDS),
        "evaluates_by": words_for_people(vitals.evaluates_by, most=SHORT_WORDS),
    }
    if vitals.link.link_rates == UNMEASURED:
        del told["link_rates"]
    if vitals.link.upload_pace == NO_UPLOAD:
        del told["upload_pace"]
    return pb.HeartbeatRequest(session_id=session_id, **told)
