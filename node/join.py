"""From an invite to a member: make an identity, prove it, keep the certificate."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from node.config import IDENTITY_FILE, write_settings
from protocol.credentials import LINK_FILE, Credentials
from protocol.errors import CannotCreateError, NoInputError, UsageError
from protocol.files import make_folder
from protocol.identity import Identity
from protocol.invite import Invite

INVITE_VARIABLE = "ATOLL_INVITE"


def read_invite(given: str | None) -> Invite:
    """Takes the invite as text, as the name of a file, from standard input (-), or the environment.

    The whole line that 'atoll invite create' prints is taken as well.
    """
    if given is None:
        given = os.environ.get(INVITE_VARIABLE)
    if not given:
        raise UsageError(
            f"no invite given and {INVITE_VARIABLE} is not set",
            next_step="run 'atoll join INVITE' with the line that the run owner sent you",
        )
    if given == "-":
        given = sys.stdin.read()
    elif not given.strip().startswith(("atoll1-", "atoll join")) and _is_file_name(given):
        path = Path(given).expanduser()
        if not path.is_file():
            raise NoInputError(
                f"there is no file {path}", next_step="give the invite itself, or '-'"
            )
        given = path.read_text(encoding="utf-8", errors="replace")
    return Invite.decode(given.strip().removeprefix("atoll join").strip())


def _is_file_name(text: str) -> bool:
    return Path(text).expanduser().is_file() or os.sep in text


async def join(invite: Invite, folder: Path, *, name: str) -> Credentials:
    """Enrols this machine with the swarm that the invite is of; returns what it got.

    A folder that belongs to another swarm is left as it is. Raises AtollError.
    """
    from protocol.enrolment import enrol

    if (folder / LINK_FILE).exists():
        known = Credentials.load(folder)
        raise CannotCreateError(
            f"{folder} is a member of '{known.run_name}' ({known.endpoint}) already",
            next_step="start it with 'atoll node start', or join another swarm with --dir OTHER",
        )
    with _identity(folder) as identity:
        credentials = await enrol(invite, identity, name)
    write_settings(folder, name=name)
    credentials.save(folder)
    return credentials


@contextlib.contextmanager
def _identity(folder: Path) -> Iterator[Identity]:
    """The folder's identity, made and saved when there is none; taken back when enrolling fails.

    It is saved before the invite is used: should the machine fail right after, the same identity
    may use the same invite again.
    """
    path, is_new_folder = folder / IDENTITY_FILE, not folder.exists()
    if path.exists():
        yield Identity.load(path)
        return
    make_folder(folder, mode=0o700)
    identity = Identity.generate()
    identity.save(path)
    try:
        yield identity
    except BaseException:
        path.unlink(missing_ok=True)
        if is_new_folder:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
