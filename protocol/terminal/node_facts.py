"""All that `atoll nodes` says of a node, by its columns and labels. Pure."""

from protocol.terminal.console import count_in_words, seconds_in_words
from protocol.terminal.node_words import (
    activity_in_words,
    carried_in_words,
    counted_in_words,
    device_in_words,
    given_in_words,
    heard_in_words,
    invite_in_words,
    link_in_words,
    memory_in_words,
    mfu_in_words,
    name_of,
    screening_in_words,
    state_in_words,
    text_in_words,
    time_in_words,
    wire_in_words,
    work_in_words,
)
from protocol.terminal.ways import ways_to_others
from protocol.v1 import status_pb2 as pb
from protocol.wire.vitals import loss_in_words, upload_in_words


def node_facts(node: pb.NodeStatus) -> dict[str, str]:
    """All columns of `atoll nodes`, in words."""
    return {
        "node": name_of(node),
        "id": node.node_id[:12],
        "state": state_in_words(node),
        "device": device_in_words(node),
        "heard": heard_in_words(node),
        "tokens": count_in_words(node.committed_tokens),
        "work": work_in_words(node),
        "screened": screening_in_words(node.screening),
        "link": link_in_words(node),
        "upload": upload_in_words(node.heartbeat.upload_pace) or "-",
        "tcp": node.heartbeat.congestion_control or "-",
        "time of a round": time_in_words(node),
        "mfu": mfu_in_words(node),
        "peak memory": memory_in_words(node),
        "text": text_in_words(node),
        "invite": invite_in_words(node),
        "version": node.version,
        "addresses": " ".join(node.address.multiaddrs),
    }


def node_details(node: pb.NodeStatus, status: pb.GetStatusResponse) -> dict[str, str]:
    """All that is known of one node, in words; what is not known is left out."""
    beat = node.heartbeat
    sent, received = wire_in_words(node)
    told = node_facts(node) | {
        "id": node.node_id,
        "standing": node.standing,
        "software": beat.software,
        "evaluates by": beat.evaluates_by,
        "does": activity_in_words(node, status.run),
        "waits for": beat.waiting_for,
        "loss": loss_in_words(beat.loss) if beat.loss else "",
        "speed": f"{count_in_words(beat.tokens_per_second)} {counted_in_words(status.run)} a second"
        if beat.tokens_per_second > 0
        else "",
        "steps asked": str(node.inner_steps or ""),
        "state held": f"round {beat.outer_round}" if node.HasField("heartbeat") else "",
        "sent": sent,
        "received": received,
        "carried": carried_in_words(node),
        "let go": f"{beat.let_go_rounds:.1f} rounds of late work" if beat.let_go_rounds else "",
        "gave": f"{node.given.num_rounds} rounds, {given_in_words(node.given)}, "
        f"{seconds_in_words(node.given.present_seconds)} present"
        if node.HasField("given")
        else "",
        "reaches": ways_to_others(node, status.nodes),
        "second process": "waits with the same key: stop one of the two"
        if node.has_waiting_copy
        else "",
    }
    return {label: words for label, words in told.items() if words not in ("", "-")}
