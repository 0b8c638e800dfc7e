"""`atoll me`: what this folder's node has given to its run."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import NoInputError, UsageError
from protocol.terminal import console
from protocol.terminal.query import StatusLink, dir_option, json_option

if TYPE_CHECKING:
    from protocol.trust.pki import Role
    from protocol.v1 import status_pb2 as pb


@click.command()
@json_option
@dir_option
def me(is_json: bool, directory: Path | None) -> None:
    """Show what this folder's node has given to its run, over all its starts.

    \b
    Example:
      atoll me --dir basement

    JSON: committed tokens and rounds, each beside the run's; bytes; seconds present:

    \b
      {"node_name": "basement", "run_name": "my-run", "tokens": 614400, "run_tokens": 1843200,
       "share": 0.333, "rounds": 40, "run_rounds": 41, "sent_bytes": 81300000, …}
    """  # noqa: D301 - click reads the character \b, not its two letters
    from protocol.trust.credentials import Credentials, find_home

    home = find_home(directory)
    ours = Credentials.load(home).principal
    with StatusLink(directory) as link:
        answer = link.status()
    node = next((each for each in answer.nodes if each.node_id == ours.node_id), None)
    if node is None:
        raise refusal(home, answer, role=ours.role)
    if is_json:
        console.print_json(facts(node, answer.run))
        return
    for label, words in in_words(node, answer.run).items():
        click.echo(f"{label.ljust(8)}{words}")


def refusal(
    home: Path, answer: "pb.GetStatusResponse", *, role: "Role"
) -> UsageError | NoInputError:
    """Why there is nothing to show."""
    if role not in ("node", "helper"):
        whose = "a viewer's" if role == "viewer" else "the run owner's"
        return UsageError(
            f"{home} is {whose} folder, which gives nothing itself",
            next_step="'atoll nodes show NAME' shows what a node has given",
        )
    return NoInputError(
        f"the {role} of {home} has not taken part in {answer.run.run_name} yet",
        next_step=f"start it: atoll {role} start --dir {shlex.quote(str(home))}",
    )


def facts(node: "pb.NodeStatus", run: "pb.RunStatus") -> dict[str, object]:
    """For programs."""
    return {
        "node_id": node.node_id,
        "node_name": node.node_name,
        "run_name": run.run_name,
        "tokens": node.committed_tokens,
        "run_tokens": run.token_clock,
        "share": node.committed_tokens / run.token_clock if run.token_clock else 0.0,
        "rounds": node.given.num_rounds,
        "run_rounds": run.committed_round,
        "sent_bytes": node.given.sent_bytes,
        "received_bytes": node.given.received_bytes,
        "present_seconds": node.given.present_seconds,
        "work_share": node.confirmed_work_share if node.HasField("confirmed_work_share") else None,
    }


def in_words(node: "pb.NodeStatus", run: "pb.RunStatus") -> dict[str, str]:
    """For people."""
    from protocol.terminal.node_words import given_in_words, name_of, state_in_words, work_in_words

    told = facts(node, run)
    return {
        "node": f"{name_of(node)} in {run.run_name}, {state_in_words(node)}",
        "tokens": f"{console.count_in_words(node.committed_tokens)} of "
        f"{console.count_in_words(run.token_clock)} committed, {told['share']:.1%} of the run",
        "rounds": f"{node.given.num_rounds} of {run.committed_round}",
        "bytes": given_in_words(node.given),
        "time": f"{console.seconds_in_words(node.given.present_seconds)} present",
        "work": f"{work_in_words(node)} of the confirmed work of those present, "
        "which is what it weighs when members decide"
        if node.HasField("confirmed_work_share")
        else "counts where it is present and has trained: it is what weighs when members decide",
    }
