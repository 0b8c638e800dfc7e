"""`atoll join`: an invite becomes membership, and the new member hears what it may expect."""

import asyncio
import shlex
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from node.cli import DIRECTORY, MAX_UPLOAD
from node.config import OF_HELPERS
from node.installed import HELPER, NODE, require_installed
from protocol.errors import AtollError
from protocol.files.durable import as_typed
from protocol.trust.credentials import find_home
from protocol.trust.invite import Invite
from protocol.trust.pki import Role
from protocol.trust.proxy import Proxy


@click.command()
@click.argument("invite", required=False)
@DIRECTORY
@click.option("--name", help="What people call this node. Default: the name of this machine.")
@MAX_UPLOAD
@click.option(
    "--hours", help="When it trains, by this machine's clock: 22:00-07:00. Default: always."
)
@click.option(
    "--only-idle", is_flag=True, default=None, help="Train only while nobody uses this machine."
)
@click.option(
    "--on-battery/--no-battery", default=None, help="Train on battery too. Default: it does."
)
@click.option("--load", type=float, help="The part of the time that it trains, from 0.1 to 1.")
@click.option(
    "--proxy",
    "proxy_url",
    metavar="URL",
    help="HTTP proxy by which this network lets connections out: http://proxy.example:3128.",
)
def join(
    invite: str | None,
    folder: Path | None,
    name: str | None,
    proxy_url: str | None,
    **limits: str | float | bool | None,
) -> None:
    """Trade an invite for membership in a swarm.

    INVITE is the text from the run owner, a file that holds it, or - for standard input; without
    it, $ATOLL_INVITE is read, or you are asked. This machine gets an identity of its own that never
    leaves it. Then it says what this machine has, what the run takes of it, and what it may give a day.

    Limits are written into the node.toml of the folder, and hold until you change them there. A proxy is
    written into its link.toml; the coordinator and members are then reached through it.

    Example: atoll join --name basement-4090 --max-upload 10mbit --hours 22:00-07:00
    """
    from node.link.join import join as enrol
    from node.link.join import read_invite

    proxy = None if proxy_url is None else Proxy.read(proxy_url)
    home, given = find_home(folder), read_invite(invite)
    called = name or socket.gethostname()[:64] or "node"
    told = {key: value for key, value in limits.items() if value is not None}
    credentials = asyncio.run(
        enrol(
            given, home, name=called, elsewhere=partial(_elsewhere, proxy), limits=told, proxy=proxy
        )
    )
    if (credentials.host, credentials.enrolment_port) != (given.host, given.port):
        click.echo("the coordinator has moved: a member that the invite names knew where to")
    suffix = f" --dir {as_typed(folder)}" if folder is not None else ""
    if credentials.principal.role is Role.VIEWER:
        click.echo(f"joined '{credentials.run_name}' at {credentials.endpoint} as a viewer")
        click.echo(f"next: atoll status --watch{suffix}")
        return
    click.echo(
        f"joined '{credentials.run_name}' at {credentials.endpoint}; "
        f"your {credentials.principal.role} lives in {home}"
    )
    is_helper = credentials.principal.role is Role.HELPER
    if is_helper and (vain := sorted(told.keys() - OF_HELPERS)):
        click.echo(
            f"a helper does not train: {', '.join(vain)} means nothing to it, and is not kept"
        )
    command = ["atoll", "helper" if is_helper else "node", "start"]
    if folder is not None:
        command += ["--dir", str(folder)]
    _look_around(home, command, is_helper=is_helper)


async def _elsewhere(proxy: Proxy | None, invite: Invite) -> Sequence[Invite]:
    """Asks the members that the invite names; nobody where what that takes is not installed."""
    try:
        require_installed(HELPER, to="ask members where the coordinator is")
        from node.exchange.transport.whereabouts import invites_elsewhere
        from protocol.terminal.logging import start_logging

        start_logging(as_json=False)
        return await invites_elsewhere(invite, proxy)
    except AtollError as error:
        click.echo(f"members are not asked where the coordinator is: {error}", err=True)
        return ()


def _look_around(home: Path, command: list[str], *, is_helper: bool) -> None:
    """Says what the new member may expect, its machine, and what to type; nothing undoes the joining."""
    try:
        require_installed(HELPER if is_helper else NODE, to="take part")
        from node.first_look import first_look

        for line in first_look(home, command, is_helper=is_helper):
            click.echo(line)
    except AtollError as error:
        click.echo(f"before it can start: {error}")
        click.echo(f"next: {shlex.join(command)}")
