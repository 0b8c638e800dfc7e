"""The run as a page for people: the facts of `atoll status`, drawn anew every few seconds. Pure.

No script, no style or font from elsewhere: it works without the internet and with any browser.
"""

from collections.abc import Iterable, Sequence
from html import escape

from protocol.terminal.console import (
    bytes_in_words,
    count_in_words,
    digest_in_words,
    seconds_in_words,
)
from protocol.terminal.status_view import (
    agreement_in_words,
    by_name,
    cut_off,
    device_in_words,
    held_out_in_words,
    ledger_bytes,
    link_in_words,
    mean_time_in_words,
    memory_in_words,
    mfu_in_words,
    name_of,
    phase_in_words,
    saving_in_words,
    state_in_words,
    time_in_words,
    training_loss,
    wire_in_words,
)
from protocol.v1 import status_pb2 as pb
from protocol.vitals import upload_in_words

REFRESH_SECONDS = 5
NUM_ROUNDS = 20

_NODE_COLUMNS = (
    *("node", "state", "does", "device", "loss", "tokens/s", "time of a round", "MFU"),
    *("peak memory", "link", "upload", "sent", "received", "heard"),
)
_ROUND_COLUMNS = (
    *("round", "nodes", "slices", "tokens", "sent", "took", "loss", "digest", "reason"),
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0 2rem; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #ddd; }
th { font-weight: 600; }
progress { width: 16rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #111; } }
"""


def page_of(status: pb.GetStatusResponse, rounds: Sequence[pb.RoundSummary]) -> str:
    """The page; all text in it is escaped, as nodes choose their names."""
    run = status.run
    loss = training_loss(status.nodes)
    facts = (
        ("phase", phase_in_words(run)),
        ("waits for", run.reason),
        ("training loss", "-" if loss is None else f"{loss:.3f}"),
        ("held-out loss", held_out_in_words(run) or "-"),
        ("tokens", count_in_words(run.token_clock)),
        ("digest", agreement_in_words(run)),
        ("time of nodes", mean_time_in_words(status.nodes) or "-"),
        ("wire", saving_in_words(run.wire) or "-"),
        ("links", cut_off(status.nodes) or "all nodes reach each other"),
    )
    name = escape(run.run_name)
    done = f"round {run.open_round or run.committed_round} of {run.total_rounds}"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">',
            f"<title>{name}: {done}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{name}</h1>",
            f'<p><progress max="{max(run.total_rounds, 1)}" value="{run.committed_round}">'
            f"</progress> {done}</p>",
            _table((), facts),
            "<h2>Nodes</h2>",
            _table(
                _NODE_COLUMNS,
                (_node_cells(node) for node in by_name(status.nodes)),
            ),
            "<h2>Rounds</h2>",
            _table(
                _ROUND_COLUMNS,
                (_round_cells(closed) for closed in rounds),
            ),
            "</body></html>",
        )
    )


def _node_cells(node: pb.NodeStatus) -> tuple[str, ...]:
    beat = node.heartbeat
    return (
        name_of(node),
        state_in_words(node),
        beat.activity or "-",
        device_in_words(node),
        f"{beat.loss:.3f}" if beat.loss > 0 else "-",
        count_in_words(beat.tokens_per_second) if beat.tokens_per_second > 0 else "-",
        time_in_words(node),
        mfu_in_words(node),
        memory_in_words(node),
        link_in_words(node),
        upload_in_words(beat.upload_pace) or "-",
        *wire_in_words(node),
        f"{seconds_in_words(node.silent_seconds)} ago",
    )


def _round_cells(closed: pb.RoundSummary) -> tuple[str, ...]:
    return (
        str(closed.round),
        f"{closed.num_contributors} of {closed.num_participants}",
        f"{closed.num_committed_slices} of {closed.num_slices}",
        count_in_words(closed.tokens),
        bytes_in_words(ledger_bytes(closed.wire)),
        seconds_in_words(closed.seconds),
        f"{closed.loss:.3f}" if closed.loss > 0 else "-",
        digest_in_words(closed.outer_digest),
        closed.reason,
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"
