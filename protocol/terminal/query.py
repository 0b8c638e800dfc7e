"""The commands that ask a coordinator: status, data. They start in a fraction of a second.

grpc and rich are imported where they are used: --help and usage errors do not wait for them.
"""

import math
import os
import sys
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from protocol.errors import (
    AtollError,
    CertificateRefusedError,
    HeldBackError,
    NotPermittedError,
    OtherSwarmError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.terminal import console
from protocol.terminal.console import PathAtHome
from protocol.terminal.lazy_group import Entry, LazyGroup, Sections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc
    from google.protobuf.message import Message

    from protocol.terminal.watch import Screen
    from protocol.trust.credentials import Credentials
    from protocol.trust.rulings import Address
    from protocol.v1 import status_pb2
    from protocol.v1.status_pb2_grpc import StatusServiceStub

Answer = TypeVar("Answer")

ANSWER_SECONDS = 5.0
"""How long a query may take before the coordinator counts as away."""


class StatusLink:
    """Asks the coordinator of one folder's swarm.

    After a failure the credentials are read and the channel is opened anew: a coordinator may come
    back on another port, and gRPC itself waits ever longer before it tries a lost address again.

    A coordinator that does not answer may have moved: then it looks where the folder says that it goes,
    and asks, once, the members that the folder names.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._channel: grpc.Channel | None = None
        self._has_asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; a later question opens it again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def status(self) -> "status_pb2.GetStatusResponse":
        """The status; raises AtollError when there is none to be had."""
        from protocol.v1.status_pb2 import GetStatusRequest

        return self._answer(lambda stub: stub.GetStatus(GetStatusRequest(), timeout=ANSWER_SECONDS))

    def rounds(self, limit: int) -> "status_pb2.ListRoundsResponse":
        """The latest closed rounds; raises AtollError when there is no answer."""
        from protocol.v1.status_pb2 import ListRoundsRequest

        return self._answer(
            lambda stub: stub.ListRounds(ListRoundsRequest(limit=limit), timeout=ANSWER_SECONDS)
        )

    def round(self, number: int, *, wants_books: bool = False) -> "status_pb2.GetRoundResponse":
        """One round, 0 for the newest; raises AtollError when there is no answer."""
        from protocol.v1.status_pb2 import GetRoundRequest

        request = GetRoundRequest(round=number, wants_books=wants_books)
        return self._answer(lambda stub: stub.GetRound(request, timeout=ANSWER_SECONDS))

    def _answer(self, ask: "Callable[[StatusServiceStub], Answer]") -> "Answer":
        """A viewer's certificate, or that of a node that does not run now, may have ended meanwhile."""
        from protocol.trust.credentials import Credentials, find_home

        try:
            try:
                return ask(self._stub())
            except CertificateRefusedError as refusal:
                self.close()
                try:
                    _renewed(Credentials.load(find_home(self._directory)), refusal).save_renewed()
                except OtherSwarmError as error:
                    return self._answer_elsewhere(ask, error)
                return ask(self._stub())
            except UnavailableError as error:
                self.close()
                return self._answer_elsewhere(ask, error)
        except AtollError:
            self.close()
            raise

    def _answer_elsewhere(
        self, ask: "Callable[[StatusServiceStub], Answer]", error: AtollError
    ) -> "Answer":
        """Raises the error where the coordinator answers nowhere."""
        from protocol.trust.credentials import LINK_FILE, Credentials, find_home
        from protocol.trust.pki import Role

        home = find_home(self._directory)
        ours = Credentials.load(home)
        places = [] if ours.elsewhere is None else [ours.elsewhere]
        for number, address in enumerate([*places, *self._told_by_members(ours)]):
            there = replace(ours, **asdict(address), elsewhere=None)
            try:
                try:
                    answer = ask(self._stub(there))
                except CertificateRefusedError as refusal:
                    self.close()
                    there = _renewed(there, refusal)
                    answer = ask(self._stub(there))
                    there.save_renewed()
            except (NotPermittedError, HeldBackError):
                raise  # it is there, and does not let us in
            except AtollError:
                self.close()
                continue
            if number >= len(places):  # else the running node sees to it
                there.save_link()
            click.echo(f"the coordinator has moved to {there.endpoint}", err=True)
            return answer
        if ours.principal.role is Role.OPERATOR or ours.members:
            raise error
        raise type(error)(
            error.what,
            next_step=f"{error.next_step}; if it has moved, this folder names nobody who knows where to: ask "
            f"the run owner, and set host in {home / LINK_FILE}",
        ) from error

    def _told_by_members(self, ours: "Credentials") -> "Sequence[Address]":
        """Rooms of the node are named as text only (protocol.terminal.lazy_group)."""
        if self._has_asked or not ours.members:
            return ()
        self._has_asked = True
        try:
            asking = import_module("node.exchange.transport.whereabouts").ask_members
        except ImportError:
            click.echo(
                "members may know where the coordinator is; with 'atoll[node]' installed they are asked",
                err=True,
            )
            return ()
        from protocol.terminal.logging import start_logging

        start_logging(as_json=False)  # to standard error: standard output is for the answer
        where = ", ".join(f"{member.host}:{member.port}" for member in ours.members)
        click.echo(f"the coordinator does not answer; asking members at {where}", err=True)
        try:
            told: Sequence[Address] = asking(ours)
        except AtollError as error:
            click.echo(f"members are not asked: {error.what}", err=True)
            return ()
        return told

    def _stub(self, credentials: "Credentials | None" = None) -> "StatusServiceStub":
        from protocol.trust.credentials import Credentials, find_home
        from protocol.v1.status_pb2_grpc import StatusServiceStub
        from protocol.wire.channel import open_blocking_channel

        if self._channel is None:
            ours = credentials or Credentials.load(find_home(self._directory))
            self._channel = open_blocking_channel(ours)
        return StatusServiceStub(self._channel)


def _renewed(credentials: "Credentials", refusal: CertificateRefusedError) -> "Credentials":
    """The same with a new certificate, got by the identity of their folder.

    Raises the refusal where it has none, or who answers is not of the swarm, and UnavailableError where
    nobody answers.
    """
    import asyncio

    from protocol.trust.credentials import IDENTITY_FILE
    from protocol.trust.enrolment import no_new_one, renew_by_identity
    from protocol.trust.identity import Identity

    if credentials.folder is None or not (credentials.folder / IDENTITY_FILE).is_file():
        raise refusal
    identity = Identity.load(credentials.folder / IDENTITY_FILE)
    try:
        return asyncio.run(renew_by_identity(credentials, identity))
    except (ProtocolMismatchError, UnavailableError) as error:
        raise no_new_one(credentials, refusal, error) from error


def as_json(message: "Message") -> dict[str, object]:
    """A message under the names of its fields, which proto/ describes.

    Bytes become hex, enums their short lower-case word; what is absent, and numbers that JSON has
    not, become null. Every field is there, whatever its value.
    """
    return {
        field.name: [_plain(field, item) for item in getattr(message, field.name)]
        if field.is_repeated
        else None
        if field.has_presence and not message.HasField(field.name)
        else _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain(field: Any, value: Any) -> object:
    # Any: protobuf's stubs and its C implementation name two unrelated descriptor types.
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(prefix).lower() if known else f"unknown-{value}"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


dir_option = click.option(
    "--dir",
    "directory",
    type=PathAtHome(path_type=Path, file_okay=False),
    help="Folder of the node or coordinator. Default: $ATOLL_DIR, else the current folder when it "
    "is one, else the folder that 'atoll join' made.",
)

json_option = click.option("--json", "is_json", is_flag=True, help="Print JSON.")


@click.command()
@click.option(
    "--watch", "is_watching", is_flag=True, help="Follow the run until it is finished; Ctrl-C ends."
)
@json_option
@dir_option
def status(is_watching: bool, is_json: bool, directory: Path | None) -> None:
    """Show what the run and its nodes do.

    \b
    Example:
      atoll status --watch

    JSON holds the fields of GetStatusResponse (proto/protocol/v1/status.proto), digests as hex; with
    --watch it is one line each second:

    \b
      {"run": {"run_name": "my-run", "phase": "training", "committed_round": 6,
               "total_rounds": 100, "outer_digest": "8f3a…", "digests_agree": true, …},
       "nodes": [{"node_name": "node-1", "state": "ready", "heartbeat": {…}, …}]}
    """
    with StatusLink(directory) as link:
        if is_watching:
            _watch(link, is_json=is_json)
            return
        answer = link.status()
    if is_json:
        console.print_json(as_json(answer))
        return
    from protocol.terminal.watch import render

    console.terminal().print(render(answer))


def _watch(link: StatusLink, *, is_json: bool) -> None:
    from protocol.terminal.watch import LineScreen, LiveScreen, StreamScreen, json_line

    if is_json:
        watch_until_finished(link, StreamScreen(lambda answer: [json_line(as_json(answer))]))
    else:
        watch_until_finished(link, LiveScreen() if sys.stdout.isatty() else LineScreen())


def watch_until_finished(
    link: StatusLink,
    screen: "Screen",
    *,
    look: "Callable[[status_pb2.GetStatusResponse], None]" = lambda answer: None,
) -> None:
    """Shows the status each second until the run is finished; `look` may ask for more before."""
    from protocol.terminal.watch import watch

    def ask() -> "status_pb2.GetStatusResponse":
        answer = link.status()
        look(answer)
        return answer

    try:
        with screen:
            watch(ask, screen)
    except KeyboardInterrupt:
        return  # the way to end it, hence exit code 0


def print_fitting(
    columns: "Sequence[str]",
    rows: "Sequence[Sequence[str]]",
    *,
    spare: "Sequence[str]",
    right: "Sequence[str]",
) -> None:
    """Prints a table with the columns that a terminal has room for, and says which it has not."""
    screen = console.terminal()
    width = screen.width if screen.is_terminal or "COLUMNS" in os.environ else None
    shown, cells, left_out = console.fitting(columns, rows, spare=spare, width=width)
    screen.print(console.table(shown, cells, right=right))
    if left_out:
        screen.print(console.left_out_in_words(columns, left_out))


_DATA_COMMANDS: Sections = {
    "Commands": (
        Entry(
            "prepare", "node.island.data.command:prepare", "Make tokens of text, once, for a run."
        ),
        Entry(
            "show",
            "node.island.data.command:show",
            "Show documents of a folder of tokens, and what of them is learned.",
        ),
        Entry(
            "check",
            "node.island.data.command:check",
            "Read a folder of tokens and compare all digests.",
        ),
        Entry(
            "skip",
            "coordinator.steering:skip",
            "Take samples out of a run, after a spike of the loss.",
        ),
    ),
}


@click.group(cls=LazyGroup, sections=_DATA_COMMANDS, invoke_without_command=True)
@json_option
@dir_option
@click.pass_context
def data(context: click.Context, is_json: bool, directory: Path | None) -> None:
    """Prepare data for a run; alone: show what became of the run's samples.

    \b
    Example:
      atoll data
      atoll data prepare corpus/*.jsonl --tokenizer tokenizer.json --out tokens

    JSON is the run's DataStatus (proto/protocol/v1/status.proto):

    \b
      {"epoch_samples": 91400, "committed_samples": 36000, "leased_samples": 720,
       "free_again_samples": 80, "free_again_pieces": 1, "frontier": 36800, "skipped_samples": 0}
    """
    if context.invoked_subcommand is not None:
        return
    with StatusLink(directory) as link:
        samples = link.status().run.data
    if is_json:
        console.print_json(as_json(samples))
        return
    pieces = "piece" if samples.free_again_pieces == 1 else "pieces"
    counts = [
        ("committed", samples.committed_samples, "in the model, each counted once"),
        ("leased now", samples.leased_samples, "to the participants of the round in flight"),
        (
            "to be leased again",
            samples.free_again_samples,
            f"leased, not committed; in {samples.free_again_pieces} {pieces}",
        ),
        ("reached", samples.frontier, "all of the above; what follows was never leased"),
    ]
    if samples.skipped_samples:
        counts.append(("taken out", samples.skipped_samples, "by 'atoll data skip'"))
    rows = [
        (
            what,
            str(count),
            f"{count / samples.epoch_samples:.3f}" if samples.epoch_samples else "-",
            meaning,
        )
        for what, count, meaning in counts
    ]
    columns = ("what", "samples", "epochs", "")
    console.terminal().print(console.table(columns, rows, right=("samples", "epochs")))
