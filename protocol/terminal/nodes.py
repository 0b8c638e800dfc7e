"""`atoll nodes` and `atoll nodes show`: who the nodes are, and how they stand with the swarm."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import UsageError
from protocol.terminal import console
from protocol.terminal.lazy_group import Entry, LazyGroup, Sections
from protocol.terminal.query import (
    StatusLink,
    as_json,
    dir_option,
    json_option,
    print_fitting,
    watch_until_finished,
)

if TYPE_CHECKING:
    from protocol.v1 import status_pb2

LEAST_ID_LENGTH = 4
"""Of the beginning of an id that names a node."""

_NODES_COMMANDS: Sections = {
    "Anyone": (
        Entry("show", "protocol.terminal.nodes:show_node", "Show all that is known of a node."),
    ),
    "Run owner": (
        Entry(
            "approve",
            "coordinator.steering:approve",
            "Let a node that waits for approval take part.",
        ),
        Entry("expel", "coordinator.steering:expel", "End a node's session and refuse its key."),
        Entry(
            "quarantine",
            "coordinator.steering:quarantine",
            "Let a node wait and take part in nothing.",
        ),
        Entry("readmit", "coordinator.steering:readmit", "Let it take part again."),
    ),
}


@click.group(cls=LazyGroup, sections=_NODES_COMMANDS, invoke_without_command=True)
@click.option(
    "--watch", "is_watching", is_flag=True, help="With --json: one line each second, until Ctrl-C."
)
@json_option
@dir_option
@click.pass_context
def nodes(context: click.Context, is_watching: bool, is_json: bool, directory: Path | None) -> None:
    """List the nodes: who they are and how they stand with the swarm; or decide who takes part.

    \b
    Examples:
      atoll nodes --json
      atoll nodes expel node-7 --reason "sends what it did not train"

    JSON is a list of NodeStatus (proto/protocol/v1/status.proto):

    \b
      [{"node_id": "5d41…", "node_name": "node-1", "state": "ready", "device": "cpu", …}]
    """
    if context.invoked_subcommand is not None:
        return
    if is_watching and not is_json:
        raise UsageError(
            "'atoll nodes --watch' streams JSON and was not given --json",
            next_step="add --json, or watch the nodes with 'atoll status --watch'",
        )
    with StatusLink(directory) as link:
        if is_watching:
            from protocol.terminal.watch import StreamScreen, json_line

            watch_until_finished(link, StreamScreen(lambda now: [json_line(_nodes_at(now))]))
            return
        answer = link.status()
    if is_json:
        console.print_json([as_json(node) for node in answer.nodes])
        return
    if not answer.nodes:
        click.echo("no node has taken part yet; 'atoll invite create' makes an invite for one")
        return
    from protocol.terminal.node_words import (
        by_name,
        copies_in_words,
        counted_in_words,
        cut_off,
        name_of,
        node_facts,
        state_in_words,
    )

    facts = [node_facts(node) for node in by_name(answer.nodes)]
    counted = counted_in_words(answer.run)
    columns = tuple(counted if name == "tokens" else name for name in node_facts(_no_node()))
    print_fitting(
        columns,
        [tuple(each.values()) for each in facts],
        spare=_SPARE_OF_NODES,
        right=(counted, "work"),
    )
    for node in by_name(answer.nodes):
        if node.standing:
            waits = ", and" if node.standing.startswith("waits") else ""
            console.terminal().print(
                f"{name_of(node)} is {state_in_words(node)}{waits} {node.standing}"
            )
    for fault in filter(None, (cut_off(answer.nodes), copies_in_words(answer.nodes))):
        console.terminal().print(fault)


def _nodes_at(answer: "status_pb2.GetStatusResponse") -> dict[str, object]:
    nodes = [as_json(node) for node in answer.nodes]
    return {"unix_seconds": answer.unix_seconds, "nodes": nodes}


_SPARE_OF_NODES = (
    *("addresses", "peak memory", "tcp", "time of a round", "mfu", "version", "text", "link"),
    *("invite",),
    *("upload", "device", "id", "work", "screened"),
)
"""What a narrow terminal does without, first what goes first."""


def _no_node() -> "status_pb2.NodeStatus":
    from protocol.v1 import status_pb2

    return status_pb2.NodeStatus()


@click.command("show")
@click.argument("name")
@json_option
@dir_option
def show_node(name: str, is_json: bool, directory: Path | None) -> None:
    """Show all that is known of a node: NAME is its name, its id, or the beginning of that.

    \b
    Example:
      atoll nodes show basement-4090
    """
    from protocol.terminal.node_words import by_name, name_of, node_details

    with StatusLink(directory) as link:
        answer = link.status()
    found = [n for n in answer.nodes if n.node_name == name] or [
        n for n in answer.nodes if len(name) >= LEAST_ID_LENGTH and n.node_id.startswith(name)
    ]
    if len(found) != 1:
        names = ", ".join(map(name_of, by_name(found or answer.nodes))) or "none"
        raise UsageError(
            f"{name!r} may be {len(found)} nodes: {names}" if found else f"no node is {name!r}",
            next_step=f"give the id of one: {', '.join(n.node_id[:12] for n in found)}"
            if found
            else f"the run's nodes are: {names}",
        )
    if is_json:
        console.print_json(as_json(found[0]))
        return
    facts = node_details(found[0], answer)
    width = max(map(len, facts))
    for label, words in facts.items():
        click.echo(f"{label.ljust(width)}  {words}")
