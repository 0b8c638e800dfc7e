"""Open files: how many this process may have, and the three that every program expects.

A node's transfers and a coordinator's nodes take one each. Who runs out of them sees errors far
from the cause, so the limit is raised and compared with the need before anything is started.
"""

import contextlib
import os
import resource
import sys

from protocol.errors import SystemRefusedError


def allow_open_files() -> int:
    """Raises the soft limit on open files to the hard one; returns how many there may be now.

    Processes that are started from here on inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit that they do not allow: then the soft one is what counts.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def require_open_files(needed: int, *, of: str) -> int:
    """Allows as many as there may be; raises SystemRefusedError when that is less than `needed`."""
    allowed = allow_open_files()
    if allowed < needed:
        raise SystemRefusedError(
            f"{of} needs {needed} open files at a time and {allowed} are allowed",
            next_step=f"raise the hard limit: 'ulimit -Hn {needed}' as root, LimitNOFILE={needed} "
            f"in a systemd unit, or 'docker run --ulimit nofile={needed}'",
        )
    return allowed


def open_standard_files() -> None:
    """Opens those of standard input, output and error that the caller has closed, on nothing.

    Otherwise the next file gets the free number: a library that complains to number 2 would write
    into the database.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
