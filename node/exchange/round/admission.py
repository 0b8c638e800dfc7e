"""What a peer may bring to a round: decided by a payload's header, and by what the round is at. Pure.

It is decided once, here, and asked before a byte of a body is read, while it comes, and when it is here: a
slice may have been taken over, and a mean have begun, since the offer.
"""

from node.exchange.codecs.codec import Codec
from node.exchange.round.state import Phase, RoundState, Rules, SliceState
from protocol.wire.payload import CONTRIBUTION, RESULT, PayloadHeader
from protocol.wire.rounds import NodeId, Slice, SliceOutcome


def refusal(
    rules: Rules,
    state: RoundState | None,
    sender: NodeId,
    header: PayloadHeader,
    *,
    admitted_in: int | None = None,
) -> str:
    """Why a payload is not taken of its sender, in a sentence; empty when it is.

    `admitted_in` is the slice's attempt when it was admitted; None: it is offered. `state` is of the
    round that is open at this node; None when none is.
    """
    if header.run_digest != rules.run_digest:
        return f"run digest {header.run_digest.hex()[:8]} is not ours, {rules.run_digest.hex()[:8]}"
    if state is None or state.is_closed or state.plan.round != header.round:
        return f"round {header.round} is not open at this node"
    if header.base_digest != state.plan.base_digest:
        return (
            f"{place_of(header)} is from state {header.base_digest.hex()[:8]}, and its plan is on "
            f"{state.plan.base_digest.hex()[:8]}"
        )
    if header.plan_opened_at != state.plan.opened_at:
        return f"{place_of(header)} goes by another plan of the round"
    known = state.slices.get(header.slice_index)
    if header.kind == CONTRIBUTION:
        return _refusal_of_contribution(state, known, sender, header)
    if header.kind == RESULT:
        return _refusal_of_result(state, known, sender, header, admitted_in)
    return f"a {header.kind_name} is fetched, never pushed"


def _refusal_of_contribution(
    state: RoundState, known: SliceState | None, sender: NodeId, header: PayloadHeader
) -> str:
    place, rules = place_of(header), state.rules
    if known is None or known.phase is Phase.ELSEWHERE or header.fragment != state.plan.fragment:
        return f"this node does not reduce {place}"
    if header.sender_id != sender:
        return f"{sender} offers a contribution in the name of {header.sender_id}"
    assignment = state.plan.assignment_of(sender)
    if assignment is None:
        return f"{sender} takes no part in round {header.round}"
    if why := misfit(header, known.part, rules.uplink):
        return why
    if header.samples > assignment.num_samples:
        return f"{header.samples} samples for {place}, where {assignment.num_samples} were assigned"
    most_tokens = header.samples * rules.context
    if not 0 < header.tokens <= most_tokens:
        return (
            f"{header.tokens} tokens in {header.samples} samples for {place}, which have "
            f"{most_tokens}"
        )
    before = known.contributions.get(sender)
    if before is not None and before.header.body_digest != header.body_digest:
        return f"{place} has another contribution of {sender} already"
    if before is None and known.phase is not Phase.COLLECTING:
        return f"{place} is already reduced"
    return ""


def _refusal_of_result(
    state: RoundState,
    known: SliceState | None,
    sender: NodeId,
    header: PayloadHeader,
    admitted_in: int | None,
) -> str:
    place = place_of(header)
    if known is None or known.part.reducer_id != sender or header.sender_id != sender:
        return f"{sender} does not reduce {place}"
    if admitted_in is None and known.is_fetched and state.commit is not None:
        return f"{place} is being fetched already"
    if admitted_in not in (None, known.attempt):  # its reducer makes another result
        return f"{place} has been taken over meanwhile"
    if known.held is not None and known.held.header != header:
        return f"another result of {place} is held already"
    if why := misfit(header, known.part, state.rules.downlink):
        return why
    return f"this result of {place} does not decode" if known.refused == header else ""


def misfit_of_result(state: RoundState, header: PayloadHeader) -> str:
    """What of a result that a slice's reducer has signed for this plan shows that nobody can use it."""
    plan, known = state.plan, state.slices.get(header.slice_index)
    place = header.round, header.base_digest, header.plan_opened_at
    if known is None or place != (plan.round, plan.base_digest, plan.opened_at):
        return ""
    if header.kind != RESULT or header.run_digest != state.rules.run_digest:
        return ""
    if header.sender_id != known.part.reducer_id:
        return ""
    return misfit(header, known.part, state.rules.downlink)


def contradicted(state: RoundState | None, header: PayloadHeader) -> PayloadHeader | None:
    """What is here of the same maker for the same slot, and is another: one of both is a lie."""
    known = None if state is None else state.slices.get(header.slice_index)
    if known is None:
        return None
    held = known.contributions.get(header.sender_id) if header.kind == CONTRIBUTION else known.held
    for here in (held.header if held is not None else None, known.refused):
        if here is not None and header.contradicts(here):
            return here
    return None


def misfit(header: PayloadHeader, part: Slice | SliceOutcome, codec: Codec) -> str:
    """What of a payload is not as its slice must have it, by elements, codec and size; empty for nothing."""
    place = place_of(header)
    if (header.start, header.num_elements) != (part.start, part.num_elements):
        return (
            f"{place} holds elements {part.start}+{part.num_elements}, "
            f"not {header.start}+{header.num_elements}"
        )
    if header.codec != codec.name:
        return f"a {header.kind_name} of {place} comes in {codec.name}, not {header.codec}"
    if not codec.admits(header.body_bytes, header.num_elements):
        return f"{place} has no body of {header.body_bytes} bytes"
    return ""


def place_of(header: PayloadHeader) -> str:
    """Which slice a payload is of, in words."""
    return f"slice {header.slice_index} of round {header.round}"
