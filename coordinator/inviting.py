"""The run owner's commands about invites: `atoll invite …`.

gRPC and TLS are imported inside the commands, so that help and mistakes are quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from coordinator.cli import DIR_OPTION, operator_of
from protocol.errors import UsageError
from protocol.terminal import console
from protocol.terminal.console import as_seconds
from protocol.terminal.lazy_group import WholeGroup

if TYPE_CHECKING:
    from protocol.v1.operator_pb2 import InviteStatus


@click.group(cls=WholeGroup)
def invite() -> None:
    """Make, list and revoke invites. The coordinator must be running."""


_MAX_NODES = click.option(
    "--max-nodes",
    type=click.IntRange(min=1),
    help="How many of those that join with it take part at once.  [default: all]",
)


@invite.command()
@click.option(
    "--uses",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many nodes may join with it.",
)
@click.option(
    "--expires",
    default="24h",
    show_default=True,
    callback=as_seconds,
    help="How long it is valid: 90s, 30m, 24h, 7d.",
)
@click.option("--host", default="", help="Host to send nodes to, instead of the advertised one.")
@click.option("--label", default="", help="What you call it in your lists: for whom it is.")
@click.option(
    "--needs-approval",
    is_flag=True,
    help="Who joins with it waits until 'atoll nodes approve NAME'.",
)
@click.option(
    "--role",
    type=click.Choice(("node", "helper", "viewer")),
    default="node",
    show_default=True,
    help="A helper reduces for nodes that cannot be dialled, and trains nothing; a viewer sees the status, "
    "without addresses, and takes no part.",
)
@click.option(
    "--own",
    is_flag=True,
    help="For your own machines: their work counts without the cap that other invites have.",
)
@_MAX_NODES
@DIR_OPTION
def create(
    uses: int,
    max_nodes: int | None,
    expires: float,
    host: str,
    label: str,
    needs_approval: bool,
    role: str,
    own: bool,
    directory: Path | None,
) -> None:
    """Make an invite and print the line that a contributor types.

    \b
    Examples:
      atoll invite create --uses 3 --expires 7d
      atoll invite create --label "lab B" --needs-approval
      atoll invite create --own --uses 8
      atoll invite create --uses 20 --max-nodes 4
    """
    from protocol.v1.operator_pb2 import CreateInviteRequest

    if not expires > 0:
        raise UsageError(
            f"an invite cannot be valid for {expires:g} s",
            next_step="give --expires more than 0, as 24h or 7d",
        )
    request = CreateInviteRequest(
        max_uses=uses,
        valid_seconds=expires,
        host=host,
        label=label,
        needs_approval=needs_approval,
        role=role,
        own=own,
        max_nodes=max_nodes or 0,
    )
    with operator_of(directory) as stub:
        made = stub.CreateInvite(request)
    click.echo(f"atoll join {made.invite}")
    nodes = f"one {role}" if uses == 1 else f"{uses} {role}s"
    held_back = ", who wait for your approval," if needs_approval else ""
    at_once = f", {max_nodes} of them at once," if max_nodes else ""
    click.echo(
        f"invite {made.invite_id} is for {nodes}{at_once}{held_back} and expires in "
        f"{console.seconds_in_words(expires)}; it holds a secret: send it privately",
        err=True,
    )


@invite.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects.")
@DIR_OPTION
def list_invites(as_json: bool, directory: Path | None) -> None:
    """Show the invites, newest first, without their secrets.

    Example: atoll invite list
    """
    from protocol.v1.operator_pb2 import ListInvitesRequest

    with operator_of(directory) as stub:
        invites = stub.ListInvites(ListInvitesRequest()).invites
    if as_json:
        console.print_json(
            [
                {
                    "invite_id": status.invite_id,
                    "max_uses": status.max_uses,
                    "node_ids": list(status.node_ids),
                    "remaining_seconds": round(status.remaining_seconds, 3),
                    "revoked": status.revoked,
                    "label": status.label,
                    "needs_approval": status.needs_approval,
                    "role": status.role,
                    "node_names": list(status.node_names),
                    "own": status.own,
                    "max_nodes": status.max_nodes or None,
                    "num_present": status.num_present,
                }
                for status in invites
            ]
        )
        return
    if not invites:
        click.echo("there are no invites; make one with 'atoll invite create'")
        return
    rows = [
        (
            status.invite_id,
            status.label or "-",
            f"own {status.role}" if status.own else status.role,
            f"{len(status.node_ids)} of {status.max_uses}",
            f"{status.num_present} of {status.max_nodes or 'all'}",
            _standing(status),
            ", ".join(
                f"{name} ({node_id[:8]})"
                for name, node_id in zip(status.node_names, status.node_ids, strict=True)
            ),
        )
        for status in invites
    ]
    console.terminal().print(
        console.table(("invite", "label", "role", "used", "here", "standing", "joined"), rows)
    )


@invite.command()
@click.argument("invite_id", metavar="ID")
@DIR_OPTION
def revoke(invite_id: str, directory: Path | None) -> None:
    """Make an invite useless. Nodes that joined with it stay.

    Example: atoll invite revoke 1f0c9a2b
    """
    from protocol.v1.operator_pb2 import RevokeInviteRequest

    with operator_of(directory) as stub:
        stub.RevokeInvite(RevokeInviteRequest(invite_id=invite_id))
    click.echo(f"invite {invite_id} is revoked")


@invite.command("limit")
@click.argument("invite_id", metavar="ID")
@_MAX_NODES
@DIR_OPTION
def limit_invite(invite_id: str, max_nodes: int | None, directory: Path | None) -> None:
    """Bound how many nodes of an invite take part at once; without --max-nodes, all do.

    Those that are here stay. One that comes when so many are here waits until another leaves.

    Example: atoll invite limit 1f0c9a2b --max-nodes 4
    """
    from protocol.v1.operator_pb2 import LimitInviteRequest

    with operator_of(directory) as stub:
        answer = stub.LimitInvite(LimitInviteRequest(invite_id=invite_id, max_nodes=max_nodes or 0))
    most = f"{max_nodes} of its nodes" if max_nodes else "all of its nodes"
    click.echo(f"invite {invite_id} lets {most} take part at once; here are {answer.num_present}")


@invite.command("own")
@click.argument("invite_id", metavar="ID")
@DIR_OPTION
def own_invite(invite_id: str, directory: Path | None) -> None:
    """Say that an invite is for your own machines: their work counts without a cap.

    Members of another invite weigh less than all others together, whatever they have trained. Say it only of
    machines that nobody else controls.

    Example: atoll invite own 1f0c9a2b
    """
    from protocol.v1.operator_pb2 import OwnInviteRequest

    with operator_of(directory) as stub:
        stub.OwnInvite(OwnInviteRequest(invite_id=invite_id))
    click.echo(f"invite {invite_id} is for your own machines")


def _standing(status: "InviteStatus") -> str:
    if status.revoked:
        return "revoked"
    if status.remaining_seconds <= 0:
        return f"expired {console.age_in_words(-status.remaining_seconds)}"
    approval = ", needs approval" if status.needs_approval else ""
    left = f"expires in {console.seconds_in_words(status.remaining_seconds)}{approval}"
    return f"used up, {left}" if len(status.node_ids) >= status.max_uses else left
