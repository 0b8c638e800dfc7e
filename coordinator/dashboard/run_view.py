"""The run as its page shows it: the facts of `atoll status` as plain values for JSON. Pure.

What a figure means and how it is said stands here and in protocol.terminal.status_words; the page's script
puts text into places, and draws.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from protocol.terminal.console import (
    bytes_in_words,
    count_in_words,
    digest_in_words,
    seconds_in_words,
)
from protocol.terminal.node_words import (
    GONE,
    SILENT_SECONDS,
    activity_in_words,
    by_name,
    copies_in_words,
    counted_in_words,
    cut_off,
    cut_pairs,
    device_in_words,
    heard_in_words,
    is_present,
    link_in_words,
    memory_in_words,
    mfu_in_words,
    name_of,
    screening_in_words,
    state_in_words,
    time_in_words,
    wire_in_words,
    work_in_words,
)
from protocol.terminal.status_words import (
    agreement_in_words,
    backups_in_words,
    bits_per_byte,
    clock_in_words,
    compute_share,
    functions_in_words,
    held_out_in_words,
    ledger_bytes,
    mean_time_in_words,
    owner_troubles,
    phase_in_words,
    saving_in_words,
    screened_in_words,
    software_in_words,
    stands_in_words,
    training_loss,
)
from protocol.v1 import status_pb2 as pb
from protocol.wire.rounds import OWN_LOOP
from protocol.wire.vitals import loss_in_words, upload_in_words

NUM_ROUNDS = 20

MOST_POINTS = 1500
"""Of a curve: more than a screen has pixels for."""

MOST_NODES = 300
"""Rows of nodes: those that need somebody first."""

_GOOD, _BUSY, _BAD, _GONE = "good", "busy", "bad", "gone"

View = Mapping[str, object]


def view_of(status: pb.GetStatusResponse, rounds: Sequence[pb.RoundSummary]) -> View:
    """All that the page shows of this instant, beside its curves, timeline and news."""
    run = status.run
    urgency = (_BAD, _BUSY, _GOOD, _GONE).index
    nodes = sorted(by_name(status.nodes), key=lambda node: urgency(_tone(node)))
    return {
        "run": _run(status),
        "nodes": [_node(node, run) for node in nodes[:MOST_NODES]],
        "moreNodes": max(0, len(nodes) - MOST_NODES),
        "cutPairs": sorted(cut_pairs(status.nodes)),
        "rounds": [_round(closed) for closed in rounds],
        "at": status.unix_seconds,
    }


def _run(status: pb.GetStatusResponse) -> View:
    run = status.run
    loss = training_loss(status.nodes)
    share = compute_share(status.nodes)
    here = [node for node in status.nodes if is_present(node)]
    speeds = [node.heartbeat.tokens_per_second for node in here]
    num_ready = sum(node.state == pb.NODE_STATE_READY for node in here)
    held = run.held_out_losses
    bits = bits_per_byte(held[-1].loss, run) if held else None
    sent = ledger_bytes(run.wire)
    reach = cut_off(status.nodes)
    cut = reach if "do not reach each other" in reach else ""  # through a helper is well
    trouble = [
        *filter(None, (run.paused, cut, copies_in_words(status.nodes), run.alike, run.differing)),
        *filter(None, (functions_in_words(status.nodes), software_in_words(status.nodes))),
        *(
            ["the outer state is NOT the same on all nodes"]
            if run.outer_digest and not run.digests_agree
            else []
        ),
        *owner_troubles(run, for_everybody=True),
    ]
    return {
        "name": run.run_name,
        "id": run.swarm_id,
        "phase": phase_in_words(run),
        "sentence": _sentence(run, len(here), num_ready),
        "reason": run.reason,
        "trouble": trouble,
        "reach": reach,
        "rules": list(run.amendments),
        "round": run.open_round or run.committed_round,
        "committed": run.committed_round,
        "total": run.total_rounds,
        "clock": clock_in_words(run),
        "elapsed": seconds_in_words(run.elapsed_seconds),
        "left": seconds_in_words(run.estimated_seconds_left)
        if run.HasField("estimated_seconds_left") and run.phase != pb.RUN_PHASE_FINISHED
        else "",
        "isStanding": bool(stands_in_words(run)),
        "loss": None if loss is None else loss_in_words(loss),
        "heldOut": held_out_in_words(run),
        "heldOutNow": loss_in_words(held[-1].loss) if held else None,
        "heldOutFirst": loss_in_words(held[0].loss) if held else None,
        "bitsPerByte": None if bits is None else _number(bits),
        "counted": counted_in_words(run),
        "hasOwnLoss": run.has_own_loss or any(node.device == OWN_LOOP for node in here),
        "tokens": count_in_words(run.token_clock),
        "tokensPerSecond": count_in_words(sum(speeds)) if any(speeds) else "-",
        "computing": None if share is None else _number(share),
        "time": mean_time_in_words(status.nodes),
        "sent": bytes_in_words(sent) if sent else "-",
        "timesLess": round(run.wire.all_reduce_bytes / sent)
        if sent and run.wire.all_reduce_bytes
        else None,
        "written": written_view(run.written) if run.HasField("written") else None,
        "saving": saving_in_words(run.wire),
        "backup": backups_in_words(run, with_place=False),
        "digest": agreement_in_words(status),
        "parameters": count_in_words(run.num_parameters) if run.num_parameters else "-",
        "ready": num_ready,
        "present": len(here),
    }


def written_view(written: pb.Written) -> View:
    """What a model wrote; the page's script puts it in as text, never as markup."""
    return {
        "round": written.round,
        "node": written.node_name,
        "whyNot": written.why_not,
        "texts": [{"prompt": one.prompt, "text": one.text} for one in written.texts],
    }


def _sentence(run: pb.RunStatus, present: int, ready: int) -> str:
    """What the run does now, and how long it will."""
    nodes = f"{ready} of {present} node{'s' * (present != 1)} ready"
    if run.phase == pb.RUN_PHASE_FINISHED:
        took = seconds_in_words(run.elapsed_seconds)
        return f"The run is finished: {run.committed_round} rounds in {took}."
    if stands := stands_in_words(run):
        return f"After round {run.committed_round} the run is {stands}; {nodes}."
    left = (
        f"about {seconds_in_words(run.estimated_seconds_left)} left"
        if run.HasField("estimated_seconds_left")
        else "the time left is known after some rounds"
    )
    doing = {"training": "Training", "exchanging": "Exchanging", "applying": "Applying"}
    verb = doing.get(phase_in_words(run), "In")
    return f"{verb} round {run.open_round} of {run.total_rounds}; {nodes}, {left}."


def _node(node: pb.NodeStatus, run: pb.RunStatus) -> View:
    beat = node.heartbeat
    is_gone = node.state in GONE
    made = beat.utilisation
    sent, received = wire_in_words(node)
    return {
        "id": node.node_id,
        "name": name_of(node),
        "state": state_in_words(node),
        "isHelper": node.is_helper,
        "tone": _tone(node),
        "does": "-" if is_gone else activity_in_words(node, run),
        "waitsFor": "; ".join(filter(None, (node.standing, "" if is_gone else beat.waiting_for))),
        "device": "helper" if node.is_helper else device_in_words(node),
        "loss": loss_in_words(beat.loss) if beat.loss and not is_gone else "-",
        "tokensPerSecond": count_in_words(beat.tokens_per_second)
        if beat.tokens_per_second > 0 and not is_gone
        else "-",
        "time": time_in_words(node),
        "shares": [
            _number(share)
            for share in (
                made.compute_share,
                made.local_communication_share,
                made.exchange_share + made.publish_share + made.adopt_share,
                made.waiting_share,
            )
        ]
        if beat.HasField("utilisation") and not is_gone
        else None,
        "mfu": mfu_in_words(node),
        "memory": memory_in_words(node),
        "link": link_in_words(node),
        "upload": upload_in_words(beat.upload_pace) or "-",
        "sent": sent,
        "received": received,
        "heard": heard_in_words(node),
        "work": work_in_words(node),
        "workShare": round(node.confirmed_work_share, 4)
        if node.HasField("confirmed_work_share")
        else None,
        "committedTokens": node.committed_tokens,
        "committed": count_in_words(node.committed_tokens),
        "screened": screening_in_words(node.screening) if node.HasField("screening") else "-",
        "letGo": f"{beat.let_go_rounds:.1f} rounds" if beat.let_go_rounds > 0 else "-",
        "version": node.version,
    }


def _tone(node: pb.NodeStatus) -> str:
    """How urgently somebody should look."""
    if node.state in (pb.NODE_STATE_LEFT, pb.NODE_STATE_EXPELLED):
        return _GONE
    if node.state in (pb.NODE_STATE_LOST, pb.NODE_STATE_DIVERGED) or node.has_waiting_copy:
        return _BAD
    if node.state != pb.NODE_STATE_READY or node.silent_seconds > SILENT_SECONDS:
        return _BUSY
    return _GOOD


def _round(closed: pb.RoundSummary) -> View:
    return {
        "round": closed.round,
        "nodes": f"{closed.num_contributors} of {closed.num_participants}",
        "slices": f"{closed.num_committed_slices} of {closed.num_slices}",
        "tokens": count_in_words(closed.tokens),
        "sent": bytes_in_words(ledger_bytes(closed.wire)),
        "took": seconds_in_words(closed.seconds),
        "seconds": round(closed.seconds, 2),
        "loss": loss_in_words(closed.loss) if closed.loss else "-",
        "digest": digest_in_words(closed.outer_digest),
        "screened": screened_in_words(closed),
        "reason": closed.reason,
        "tone": _GOOD if closed.num_committed_slices == closed.num_slices else _BAD,
    }


def curves_stamp(run: pb.RunStatus) -> tuple[int, ...]:
    """Another one when the curves would look different: of a long run a point is many rounds."""
    a_point = max(1, run.committed_round // MOST_POINTS)
    evaluated = run.held_out_losses[-1].round + 1 if run.held_out_losses else 0
    drawn_to = (number - number % a_point for number in (run.committed_round, evaluated))
    return len(run.went_back), *drawn_to


def history_of(run: pb.RunStatus, rounds: Sequence[pb.RoundSummary]) -> View:
    """Columns for curves, oldest first, of at most MOST_POINTS rounds; `rounds` come newest first.

    Of old rounds only some are kept: those between have the tokens and seconds of the next that is.
    """
    kept = [closed for closed in reversed(rounds) if closed.loss or closed.tokens]
    numbers = [0, *(closed.round for closed in kept)]
    gaps = [after - before for before, after in pairwise(numbers)]
    tokens = _summed([closed.tokens * gap for closed, gap in zip(kept, gaps, strict=True)])
    seconds = _summed([closed.seconds * gap for closed, gap in zip(kept, gaps, strict=True)])
    scale = run.token_clock / tokens[-1] if tokens and tokens[-1] else 1.0
    places = _spread(len(kept))
    held = [(one.round, one.loss) for one in run.held_out_losses]
    held = [held[place] for place in _spread(len(held))]
    return {
        "rounds": [kept[place].round for place in places],
        "tokens": [round(tokens[place] * scale) for place in places],
        "seconds": [round(seconds[place], 1) for place in places],
        "loss": [_number(kept[place].loss) if kept[place].loss else None for place in places],
        "took": [round(kept[place].seconds, 2) for place in places],
        "sent": [ledger_bytes(kept[place].wire) for place in places],
        "contributors": [kept[place].num_contributors for place in places],
        "heldRounds": [number for number, _ in held],
        "heldLoss": [_number(loss) for _, loss in held],
    }


def _number(value: float) -> float | None:
    """For JSON, which has no NaN and no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _summed(values: Iterable[float]) -> list[float]:
    whole, sums = 0.0, []
    for value in values:
        whole += value
        sums.append(whole)
    return sums


def _spread(length: int) -> Sequence[int]:
    """At most MOST_POINTS places, evenly spread; the first and the last are among them."""
    if length <= MOST_POINTS:
        return range(length)
    return [round(place * (length - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)]
