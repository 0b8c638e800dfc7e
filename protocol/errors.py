"""The errors that people see: one sentence with the value, the next command, and an exit code.

Exit codes are those of sysexits.h, so that scripts can tell what went wrong.
"""

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes (sysexits.h), one for each way a command can fail."""

    OK = 0
    USAGE = 64  # the command line is wrong
    BAD_DATA = 65  # an input cannot be read as what it should be: a mistyped invite
    NO_INPUT = 66  # a file or folder is not there, a glob matches nothing
    UNAVAILABLE = 69  # the coordinator, a peer, or an address of data or backups cannot be reached
    INTERNAL = 70  # a bug in Atoll
    SYSTEM = 71  # the machine refuses: a port in use, too little shared memory
    CANNOT_CREATE = 73  # an output exists or cannot be written
    INCOMPLETE = 74  # a node ended without the final state of its run
    TEMPORARY = 75  # try again later
    PROTOCOL = 76  # the other side is not who or what it should be
    NO_PERMISSION = 77  # not invited, expired, revoked
    CONFIG = 78  # run.toml or node.toml is wrong
    EXPELLED = 79  # the run owner refuses this node's key; not one of sysexits.h
    INTERRUPTED = 130  # Ctrl-C


class AtollError(Exception):
    """Something a person can act on. Shown as one sentence, never as a traceback.

    `what` is a sentence with the offending value; `next_step` is a command or a change to make.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}; {self.next_step}" if self.next_step else self.what


SAME_VERSION = "use the same version of Atoll on both sides"
"""What to do about a message that no version of Atoll writes, or not this one."""


class UsageError(AtollError):
    """The command line asks for something that makes no sense."""

    exit_code = ExitCode.USAGE


class BadDataError(AtollError):
    """An input cannot be read as what it should be."""

    exit_code = ExitCode.BAD_DATA


class NoInputError(AtollError):
    """A file or folder is missing, or a glob matches nothing."""

    exit_code = ExitCode.NO_INPUT


NOT_STARTED = (
    "the run owner starts it with 'atoll coordinator start'; if it runs, check host and port"
)
"""What to do where no coordinator answers, for its owner and for others."""


class UnavailableError(AtollError):
    """The coordinator or a peer cannot be reached."""

    exit_code = ExitCode.UNAVAILABLE


class AnswerLostError(UnavailableError):
    """The coordinator may have done what it was asked, or not: its answer did not arrive."""


class SystemRefusedError(AtollError):
    """The machine refuses: a port in use, a full disk, too little shared memory."""

    exit_code = ExitCode.SYSTEM


NEXT_STEP_FOR_REFUSAL = {
    errno.ENOSPC: "free some space on that disk, or remove files where 'df -i' shows no inodes left",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EMFILE: "raise the limit on open files: 'ulimit -n'",
    errno.ENFILE: "end other programs, or raise fs.file-max",
    errno.EAGAIN: "end other programs of this user, or raise the limit on processes: 'ulimit -u'",
    errno.ENOMEM: "end other programs, or raise the limit on memory: 'ulimit -v'",
    errno.EROFS: "that disk can only be read: mount it for writing, or choose a folder on another",
    errno.EIO: "that disk is damaged or gone: see what the kernel says with 'dmesg'",
    errno.ESTALE: "that share of the network is gone: mount it again",
    errno.ENOTCONN: "that share of the network is gone: mount it again",
    errno.ENOLCK: "let the folder be on a disk of this machine, which locks files",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "choose a folder on a disk that takes larger files (FAT ends at 4 GB), or raise 'ulimit -f'",
    errno.ELOOP: "links there lead in a circle: remove one",
    errno.EISDIR: "a folder is where a file should be: move it away",
    errno.ENOTDIR: "a file is where a folder should be: choose another",
    errno.EACCES: "run as the user whose it is, or choose another",
    errno.EPERM: "run as the user whose it is, or choose another",
}
"""What the machine refuses wherever it pleases; a bug of ours has other numbers."""


class CannotCreateError(AtollError):
    """An output exists already or cannot be written."""

    exit_code = ExitCode.CANNOT_CREATE


class IncompleteError(AtollError):
    """The run is over, and this node does not hold its final state."""

    exit_code = ExitCode.INCOMPLETE


class TemporaryError(AtollError):
    """It did not work now and may work later."""

    exit_code = ExitCode.TEMPORARY


class SessionEndedError(TemporaryError):
    """The coordinator no longer knows this session: attach again."""


class CopyAttachedError(TemporaryError):
    """Another process with this node's key is attached."""

    NEXT_STEP = (
        "if a copy of the node's folder runs elsewhere, stop one of the two; a second node needs a "
        "folder of its own: 'atoll join INVITE --dir NEWDIR'"
    )


class HeldBackError(TemporaryError):
    """The run owner has yet to let this node take part: it waits, and asks again."""


class ProtocolMismatchError(AtollError):
    """The other side is not who or what it should be."""

    exit_code = ExitCode.PROTOCOL


class CertificateRefusedError(ProtocolMismatchError):
    """A certificate has ended, or is of keys that were changed: a member's identity gets it a new one."""


class OtherSwarmError(ProtocolMismatchError):
    """Another run's coordinator answers where ours is to be: ours may come back."""


PASSING = (UnavailableError, TemporaryError, OtherSwarmError)
"""What may be over by itself, so that who has time waits: the coordinator is away or busy, or another run's
is in its place."""


class NotPermittedError(AtollError):
    """Not invited, or no longer."""

    exit_code = ExitCode.NO_PERMISSION


class ExpelledError(NotPermittedError):
    """The run owner has expelled this node."""

    exit_code = ExitCode.EXPELLED


class ConfigError(AtollError):
    """A configuration file is wrong."""

    exit_code = ExitCode.CONFIG
