"""From an invite to a member: make an identity, prove it, keep the certificate."""

import asyncio
import contextlib
import os
import select
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from node.config import Limit, check_limits, write_settings
from protocol.errors import (
    AnswerLostError,
    AtollError,
    BadDataError,
    CannotCreateError,
    ExpelledError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
    UsageError,
)
from protocol.files.durable import FolderLock, as_typed, expanded, make_folder
from protocol.service.limits import COMMAND_PROCESSES, require_processes
from protocol.terminal.query import StatusLink
from protocol.trust.credentials import COORDINATOR_FILE, IDENTITY_FILE, LINK_FILE, Credentials
from protocol.trust.identity import Identity
from protocol.trust.invite import INVITE, Invite
from protocol.trust.pki import Role, pin_of
from protocol.trust.proxy import Proxy

INVITE_VARIABLE = "ATOLL_INVITE"

_MAX_FILE_CHARACTERS = 1 << 16
_LONGEST_ENDING = 8  # ".invite"
_PASTING_SECONDS = 0.3  # within which the next line of one pasted text is there


def read_invite(given: str | None) -> Invite:
    """Takes the invite as text, as the name of a file, from standard input (-), or the environment.

    Where none is given, a person at a terminal is asked for it: other people on the machine see the
    arguments of commands, and shells keep them. The whole line that 'atoll invite create' prints is
    taken as well.
    """
    if given is None:
        given = os.environ.get(INVITE_VARIABLE)
    if not given and sys.stdin.isatty():
        given = _asked()
    if not given:
        raise UsageError(
            f"no invite given and {INVITE_VARIABLE} is not set",
            next_step="run 'atoll join INVITE' with the line that the run owner sent you",
        )
    if given == "-":
        given = _not_empty(sys.stdin.read(_MAX_FILE_CHARACTERS), "standard input")
    elif _is_file(given) or (not INVITE.is_in(given) and _is_file_name(given)):
        given = _not_empty(_content(expanded(given)), f"the file {given}")
    return Invite.decode(given.strip().removeprefix("atoll join").strip())


def _asked() -> str:
    """What a person pastes at a terminal, which does not show it: all lines, where a program broke it.

    getpass would take the first line alone, and drop the others.
    """
    terminal, lines = sys.stdin.fileno(), ""
    shown = termios.tcgetattr(terminal)
    hidden = [*shown[:3], shown[3] & ~termios.ECHO, *shown[4:]]
    try:
        # What was typed before counts as well.
        termios.tcsetattr(terminal, termios.TCSADRAIN, hidden)
        while not lines.strip() or select.select([terminal], [], [], _PASTING_SECONDS)[0]:
            if not lines.strip():
                click.echo("The run owner's invite (it is not shown): ", nl=False, err=True)
            typed = os.read(terminal, _MAX_FILE_CHARACTERS)
            if not typed:  # Ctrl-D
                break
            lines += typed.decode(errors="replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, shown)
        click.echo(err=True)
    return lines.strip()


def _is_file(text: str) -> bool:
    """Whether it is there, whatever it is called: also as an invite begins."""
    with contextlib.suppress(OSError, ValueError, NoInputError):
        return expanded(text).is_file()
    return False


def _is_file_name(text: str) -> bool:
    """Also of a file that is not there: no invite has a slash, nor a short name's ending."""
    try:
        ending = Path(text).suffix
        return os.sep in text or 1 < len(ending) <= _LONGEST_ENDING or Path(text).exists()
    except OSError:
        return False  # too long for one, for example


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE_CHARACTERS)
    except FileNotFoundError as error:
        raise NoInputError(
            f"there is no file {path}", next_step="give the invite itself, or '-'"
        ) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}", next_step="give the invite itself, or '-'"
        ) from error


def _not_empty(text: str, origin: str) -> str:
    if not text.strip():
        raise BadDataError(
            f"{origin} holds no invite: it is empty",
            next_step="ask the run owner for the line that 'atoll invite create' printed",
        )
    return text


Elsewhere = Callable[[Invite], Awaitable[Sequence[Invite]]]
"""The same invite at the places where members that it names say that the coordinator is."""


async def nowhere(invite: Invite) -> Sequence[Invite]:
    """Where nobody can be asked."""
    return ()


async def join(
    invite: Invite,
    folder: Path,
    *,
    name: str,
    elsewhere: Elsewhere = nowhere,
    limits: Mapping[str, Limit] | None = None,
    proxy: Proxy | None = None,
) -> Credentials:
    """Enrols this machine with the swarm that the invite is of; returns what it got.

    `limits` are keys of the node.toml that it writes. `proxy` is how this network lets connections out.

    Where the invite's coordinator is not at its address, it looks `elsewhere`. A folder that belongs to
    another swarm, or to a member, is left as it is. Raises AtollError.
    """
    require_processes(COMMAND_PROCESSES, of="joining")
    known = _known_to(folder)
    if known is not None:
        await asyncio.to_thread(_require_forgotten, known, folder, invite)
        proxy = proxy or known.proxy
    check_limits(folder, limits or {})
    with _held(folder):
        if (now := _known_to(folder)) != known and now is not None:
            raise _a_member(now, folder)  # another 'atoll join' has just used it
        with _identity(folder) as identity:
            enrolled = await _enrolled(invite, identity, name, elsewhere, proxy)
            credentials = replace(enrolled, members=invite.members)
        is_helper = credentials.principal.role is Role.HELPER
        write_settings(folder, name=name, is_helper=is_helper, limits=limits)
        credentials.save(folder)
    return credentials


async def _enrolled(
    invite: Invite, identity: Identity, name: str, elsewhere: Elsewhere, proxy: Proxy | None
) -> Credentials:
    from protocol.trust.enrolment import enrol

    try:
        return await enrol(invite, identity, name, proxy)
    except AnswerLostError:
        raise  # it is there
    except (UnavailableError, ProtocolMismatchError) as error:
        missed = error
    if not invite.members:
        raise missed
    for moved in await elsewhere(invite):
        try:
            return await enrol(moved, identity, name, proxy)
        except AnswerLostError:
            raise
        except (UnavailableError, ProtocolMismatchError):
            continue
    raise type(missed)(
        f"{missed.what}; nor anywhere that the members named in the invite know of",
        next_step=missed.next_step,
    ) from missed


def _known_to(folder: Path) -> Credentials | None:
    """What a folder has of a swarm already; raises CannotCreateError for a coordinator's."""
    if (folder / COORDINATOR_FILE).exists():
        raise CannotCreateError(
            f"{folder} is a coordinator's folder",
            next_step="give the node a folder of its own with --dir OTHER",
        )
    if not (folder / LINK_FILE).exists():
        return None
    try:
        return Credentials.load(folder)
    except BadDataError:
        return None  # damaged: to join again is the way to mend it


def _require_forgotten(known: Credentials, folder: Path, invite: Invite) -> None:
    """Lets a folder join its swarm again whose coordinator goes on from a copy of before. Blocks.

    Raises CannotCreateError where it is a member, or where that cannot be known.
    """
    if invite.pin == pin_of(known.server_root_pem):
        try:
            with StatusLink(folder) as link:
                link.status()
        except (ExpelledError, TemporaryError):
            raise
        except NotPermittedError:
            return
        except AtollError:
            pass  # it is away, so nobody joins
    raise _a_member(known, folder)


def _a_member(known: Credentials, folder: Path) -> CannotCreateError:
    return CannotCreateError(
        f"{folder} is a member of '{known.run_name}' ({known.endpoint}) already",
        next_step=f"start it with 'atoll {_started_by(known)} start --dir {as_typed(folder)}', or join "
        "another swarm with --dir OTHER",
    )


def _started_by(credentials: Credentials) -> str:
    """The command that starts what the folder is of."""
    return "helper" if credentials.principal.role is Role.HELPER else "node"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, made when it is not there, for us alone; taken back when it stayed empty."""
    is_new = not folder.exists()
    make_folder(folder, mode=0o700)
    lock = FolderLock.take(folder, holder="node", next_step="wait for it, or choose --dir OTHER")
    try:
        yield
    finally:
        if is_new and {path.name for path in folder.iterdir()} == {lock.path.name}:
            lock.path.unlink()
            with contextlib.suppress(OSError):  # somebody else uses it already
                folder.rmdir()
        lock.release()


@contextlib.contextmanager
def _identity(folder: Path) -> Iterator[Identity]:
    """The folder's identity, made and saved when there is none; taken back when we are refused.

    It is saved before the invite is used, and kept when nobody knows whether it was: the same
    identity may use the same invite again.
    """
    path = folder / IDENTITY_FILE
    if path.exists():
        yield Identity.load(path)
        return
    identity = Identity.generate()
    identity.save(path)
    try:
        yield identity
    except AnswerLostError:
        raise
    except AtollError:
        path.unlink(missing_ok=True)
        raise
