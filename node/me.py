"""`atoll me`: what this folder's node has given to its run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import NoInputError, OtherSwarmError, UnavailableError, UsageError
from protocol.files.durable import as_typed
from protocol.terminal import console
from protocol.terminal.query import StatusLink, dir_option, json_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.trust.credentials import Credentials
    from protocol.trust.pki import Role
    from protocol.v1 import status_pb2 as pb
    from protocol.wire.rounds import Commit, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class OfFolder:
    """What commits in a node's folder say of it: what was committed in the rounds that it has followed."""

    first_round: int
    last_round: int
    num_rounds: int  # with something of its work in them; of a helper those that it took part in
    tokens: int
    run_tokens: int  # of all nodes


@click.command()
@json_option
@dir_option
def me(is_json: bool, directory: Path | None) -> None:
    """Show what this folder's node has given to its run, over all its starts.

    \b
    Example:
      atoll me --dir basement

    Where the coordinator does not answer, it counts the commits in the folder, and says so.

    JSON: committed tokens and rounds, each beside the run's; bytes; seconds present. Where "source" is
    "folder", what it does not hold is null:

    \b
      {"source": "coordinator", "node_name": "basement", "run_name": "my-run", "counted": "tokens",
       "tokens": 614400, "run_tokens": 1843200, "share": 0.333, "rounds": 40, "run_rounds": 41,
       "sent_bytes": 81300000, …}
    """
    from protocol.trust.credentials import Credentials, find_home

    home = find_home(directory)
    credentials = Credentials.load(home)
    ours = credentials.principal
    try:
        with StatusLink(directory) as link:
            answer = link.status()
    except (UnavailableError, OtherSwarmError) as error:
        if (known := _of_this_folder(home, credentials)) is None:
            raise
        click.echo(f"of this folder alone, for {error.what}", err=True)
        _show(*known, is_json=is_json)
        return
    node = next((each for each in answer.nodes if each.node_id == ours.node_id), None)
    if node is None:
        raise refusal(home, answer, role=ours.role)
    _show(facts(node, answer.run), in_words(node, answer.run), is_json=is_json)


def _show(facts: dict[str, object], words: dict[str, str], *, is_json: bool) -> None:
    if is_json:
        console.print_json(facts)
        return
    for label, told in words.items():
        click.echo(f"{label.ljust(8)}{told}")


def _of_this_folder(
    home: Path, credentials: "Credentials"
) -> tuple[dict[str, object], dict[str, str]] | None:
    """Facts and words of what it holds; None of a node that has followed no round, and of nobody's."""
    from node.config import HISTORY_FILE, load_settings
    from node.disk.history import History
    from node.kept import RUN_FILE, kept_run
    from protocol.terminal.logging import start_logging

    node_id = credentials.principal.node_id
    if node_id is None or not (home / HISTORY_FILE).is_file():
        return None
    start_logging(as_json=False)  # to standard error: a damaged file is said
    known = of_folder(History(home / HISTORY_FILE).commits, node_id)
    if known is None:
        return None
    named = (node_id, load_settings(home).name, credentials.run_name)
    counted = kept_run(home).counted if (home / RUN_FILE).is_file() else "tokens"
    return (
        facts_of_folder(known, *named, counted=counted),
        folder_in_words(known, *named, counted=counted),
    )


def of_folder(commits: "Iterable[Commit]", node_id: "NodeId") -> OfFolder | None:
    """What the commits, oldest first, took from a node; None where there are none."""
    first_round = last_round = num_rounds = tokens = run_tokens = 0
    for commit in commits:
        first_round, last_round = first_round or commit.round, commit.round
        taken = commit.tokens
        is_helping = any(a.node_id == node_id and not a.trains for a in commit.assignments)
        num_rounds += not commit.is_void and (node_id in taken or is_helping)
        tokens += taken.get(node_id, 0)
        run_tokens += sum(taken.values())
    if not last_round:
        return None
    return OfFolder(
        first_round=first_round,
        last_round=last_round,
        num_rounds=num_rounds,
        tokens=tokens,
        run_tokens=run_tokens,
    )


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
        next_step=f"start it: atoll {role} start --dir {as_typed(home)}",
    )


def facts(node: "pb.NodeStatus", run: "pb.RunStatus") -> dict[str, object]:
    """For programs."""
    return {
        "source": "coordinator",
        "node_id": node.node_id,
        "node_name": node.node_name,
        "run_name": run.run_name,
        "counted": run.counted or "tokens",  # what the next three are of
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


def facts_of_folder(
    known: OfFolder, node_id: str, node_name: str, run_name: str, *, counted: str = "tokens"
) -> dict[str, object]:
    """The same, as far as the folder knows."""
    return {
        "source": "folder",
        "node_id": node_id,
        "node_name": node_name,
        "run_name": run_name,
        "counted": counted,
        "tokens": known.tokens,
        "run_tokens": known.run_tokens,
        "share": known.tokens / known.run_tokens if known.run_tokens else 0.0,
        "rounds": known.num_rounds,
        "run_rounds": known.last_round,
        "sent_bytes": None,
        "received_bytes": None,
        "present_seconds": None,
        "work_share": None,
    }


def folder_in_words(
    known: OfFolder, node_id: str, node_name: str, run_name: str, *, counted: str = "tokens"
) -> dict[str, str]:
    """The same for people."""
    told = facts_of_folder(known, node_id, node_name, run_name)
    return {
        "node": f"{node_name} in {run_name}, as its folder knows it",
        counted: f"{console.count_in_words(known.tokens)} of {console.count_in_words(known.run_tokens)} "
        f"committed, {told['share']:.1%} of rounds {known.first_round} to {known.last_round}",
        "rounds": f"{known.num_rounds} of those {known.last_round - known.first_round + 1}",
        "bytes": "the coordinator counts them, and how long the node was present",
    }


def in_words(node: "pb.NodeStatus", run: "pb.RunStatus") -> dict[str, str]:
    """For people."""
    from protocol.terminal.node_words import (
        counted_in_words,
        given_in_words,
        name_of,
        state_in_words,
        work_in_words,
    )

    told = facts(node, run)
    return {
        "node": f"{name_of(node)} in {run.run_name}, {state_in_words(node)}",
        counted_in_words(run): f"{console.count_in_words(node.committed_tokens)} of "
        f"{console.count_in_words(run.token_clock)} committed, {told['share']:.1%} of the run",
        "rounds": f"{node.given.num_rounds} of {run.committed_round}",
        "bytes": given_in_words(node.given),
        "time": f"{console.seconds_in_words(node.given.present_seconds)} present",
        "work": f"{work_in_words(node)} of the confirmed work of those present, "
        "which is what it weighs when members decide"
        if node.HasField("confirmed_work_share")
        else "counts where it is present and has trained: it is what weighs when members decide",
    }
