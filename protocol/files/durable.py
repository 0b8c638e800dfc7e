"""Files that are whole or not there at all, what people wrote in them, and folders that one process has."""

import contextlib
import errno
import fcntl
import json
import os
import pwd
import secrets
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import platformdirs

from protocol.errors import (
    NEXT_STEP_FOR_REFUSAL,
    AtollError,
    BadDataError,
    CannotCreateError,
    ConfigError,
    NoInputError,
    NotPermittedError,
    SystemRefusedError,
)
from protocol.files.leftovers import Held, remove_left

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENOTCONN}

_OF_THE_DISK |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What another name or folder on the same disk would not mend."""


def refusal_to_write(path: Path, error: OSError) -> AtollError:
    """The sentence for a file that could not be written."""
    if error.errno in _OF_THE_DISK:
        return SystemRefusedError(
            f"cannot write {path}: {error.strerror}", next_step=NEXT_STEP_FOR_REFUSAL[error.errno]
        )
    next_step = whose_it_is(path) or (
        f"make {path.parent} a folder that you may write to, or choose another"
    )
    if error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.EISDIR):
        next_step = NEXT_STEP_FOR_REFUSAL[error.errno]
    return CannotCreateError(f"cannot write {path}: {error.strerror or error}", next_step=next_step)


# Whose files are: a command that was typed once with sudo leaves some of root's in a user's folder.


def name_of_user(user_id: int) -> str:
    """What the system calls a user; the number of one who has no name, as in containers."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def owner_of(path: Path) -> str:
    """The user whose file or folder it is. Raises OSError."""
    return name_of_user(path.lstat().st_uid)


def whose_it_is(path: Path, *, within: Path | None = None) -> str:
    """What to type about a file, or the folder where it should be, of another user; empty for our own.

    `within` is the folder that becomes ours as a whole, if that is ours itself.
    """
    place = next(one for one in (path, *path.parents) if os.path.lexists(one))
    ours = os.geteuid()
    if ours == 0 or place.lstat().st_uid == ours:
        return ""
    owner, us = owner_of(place), name_of_user(ours)
    is_in_ours = within is not None and within.lstat().st_uid == ours
    taken = within if within is not None and is_in_ours else place
    return (
        f"run as {owner}, whose {place} is, and not as {us}; where it is yours all the same, as after a "
        f"command with sudo, type 'sudo chown -R {us} {as_typed(taken)}'"
    )


_OF_THE_DISK_ITSELF = "lost+found"


def require_ours(folder: Path, written: Iterable[str]) -> None:
    """Raises CannotCreateError where a daemon could not write in its folder, before it has done any work.

    `written` are files that it changes where they are, and folders in which it makes and removes some. What
    else is there may be anybody's: data, keys, what a disk has of its own where it is mounted there.
    """
    named = [folder / name for name in written]
    inside = {path for top in named for path in top.rglob("*") if path.is_dir()}
    for path in (
        folder,
        *named,
        *sorted(path for path in inside if path.name != _OF_THE_DISK_ITSELF),
    ):
        if os.path.lexists(path) and not os.access(path, os.W_OK):
            number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            refused = refusal_to_write(path, OSError(number, os.strerror(number)))
            if number == errno.EACCES:
                refused.next_step = whose_it_is(path, within=folder) or refused.next_step
            raise refused


def user_beside_root(folder: Path) -> str:
    """Whose a folder is in which root starts a daemon: that user cannot change what root leaves there.

    Empty where this is not root, or the folder is root's.
    """
    return owner_of(folder) if os.geteuid() == 0 and folder.stat().st_uid != 0 else ""


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns what the system says against a file into SystemRefusedError or CannotCreateError."""
    try:
        yield
    except OSError as error:
        raise refusal_to_write(path, error) from error


def toml_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML."""
    lines: list[str] = []
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in keys.items()]
    return "\n".join([*lines, ""])


def toml_value(value: object) -> str:
    """A plain value as TOML, in one line. Raises BadDataError for a text that is no UTF-8."""
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            return _quoted(str(value))
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case int() | float():
            return repr(value)
        case Mapping():
            pairs = (f"{_quoted(key)} = {toml_value(each)}" for key, each in value.items())
            return f"{{ {', '.join(pairs)} }}"
    raise TypeError(f"{value!r} has no place in TOML")


_ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x7f\x85\u2028\u2029"}
"""What TOML wants escaped and JSON does not, and what Python takes for the end of a line."""


def _quoted(text: str) -> str:
    """A basic string: JSON's, without its pairs of surrogates for letters beyond 16 bits."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a file's name, as Linux lets it be
        raise BadDataError(
            f"{text!r} is no UTF-8, and a TOML file is", next_step="give it another name"
        ) from error
    return json.dumps(text, ensure_ascii=False).translate(_ESCAPED)


def read_toml(path: Path, *, when_missing: str) -> dict[str, Any]:
    """Reads a file that people write.

    Raises NoInputError when it cannot be read, with `when_missing` as the next step when it is not
    there, and ConfigError when it is not TOML, or empty: an editor on a full disk leaves nothing, and all
    that was set would fall back to defaults.
    """
    try:
        text = path.read_text(encoding=TOML_ENCODING)
    except FileNotFoundError as error:
        raise NoInputError(f"{path} is not there", next_step=when_missing) from error
    except OSError as error:
        raise NoInputError(
            f"{path} cannot be read: {error.strerror}",
            next_step=(error.errno == errno.EACCES and whose_it_is(path))
            or "make it a file that you may read",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not TOML, which is UTF-8: {error}", next_step="save it again, as UTF-8"
        ) from error
    if not text.strip():
        raise ConfigError(
            f"{path} is empty: {path.stat().st_size} bytes",
            next_step=f"restore it from a backup; for the defaults alone write '# defaults' into {path}",
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}", next_step="correct that line") from error


TOML_ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark at its beginning that editors of Windows write."""


def read_secret(path: Path) -> bytes:
    """A file that nobody but its owner, and its group, may read. Raises OSError, and NotPermittedError.

    A key that others could read may be theirs too; who could write it chose it. A group may read, for so
    services get their keys.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    mode = stat.S_IMODE(mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise NotPermittedError(
            f"others on this machine may read or change {path} (mode {mode:03o}), which is secret",
            next_step=f"type 'chmod 600 {as_typed(path)}'; if somebody may have read it, make a new one",
        )
    return path.read_bytes()


def expanded(path: Path | str) -> Path:
    """The path with ~ and ~user replaced; raises NoInputError for a user that there is not."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoInputError(
            f"{path}: no home folder of that user is known", next_step="write the path in full"
        ) from error


def as_typed(path: Path | str) -> str:
    """The path as a person types it behind a command: in quotes, where a shell would take it apart.

    Double ones where they do: commands within sentences stand in single ones.
    """
    text = str(path)
    quoted = shlex.quote(text)
    return quoted if quoted == text or set('"$`\\!') & set(text) else f'"{text}"'


def user_cache() -> Path | None:
    """The user's folder for what can be made again; None where nothing can be written there.

    In containers that run as any user there is no home, or it is the root folder.
    """
    with contextlib.suppress(OSError, RuntimeError):  # the latter where no home is known
        folder = Path(platformdirs.user_cache_path("atoll"))
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


OURS_ALONE = 0o700
"""Of a new folder with weights or optimizer states: the one around it may be whatever its owner has made."""


def make_folder(path: Path, *, mode: int = 0o755) -> None:
    """Makes a folder and those above it; one that exists is left as it is."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise refusal_to_write(path, error) from error


def make_closed_folder(path: Path) -> None:
    """Makes a folder of ours alone; one that is there and open to others of the machine is closed to them."""
    make_folder(path, mode=OURS_ALONE)
    if path.stat().st_mode & ~OURS_ALONE & 0o777:
        with contextlib.suppress(OSError):  # another user's, or a disk that knows no permissions
            path.chmod(OURS_ALONE)


def is_taken(path: Path) -> bool:
    """Whether there is something that a new folder of this name would have to replace."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder that is whole or not there: fill the one given; then it takes its name.

    Only we can read it. It may replace an empty folder. Raises SystemRefusedError when the disk is
    full and CannotCreateError when it cannot be made; nothing is left then. What is left when this
    process is killed is cleared by the next one that makes a folder there.
    """
    make_folder(path.parent)
    clear_unfinished(path.parent)
    try:
        building, held = _building_for(path)
    except OSError as error:
        raise _refusal_to_make(path, error) from error
    try:
        yield building
        sync_folder(building)
        building.rename(path)
        sync_folder(path.parent)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError):
            raise _refusal_to_make(path, error) from error
        raise
    finally:
        held.release()


_UNFINISHED = "unfinished-"


def _building_for(path: Path) -> tuple[Path, Held]:
    """A folder to be filled, and what holds it for as long as this process lives.

    It is a sibling, so that the rename at the end stays on one file system.
    """
    while True:
        prefix = f".{path.name}.{_UNFINISHED}"
        building = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
        with contextlib.suppress(FileNotFoundError):
            return building, Held(building)


def unfinished_in(folder: Path) -> list[Path]:
    """What processes fill that live, or have left behind."""
    return sorted(folder.glob(f".*.{_UNFINISHED}*"))


def remove_folder(path: Path) -> None:
    """Removes a folder that must not be taken for a whole one while it goes. Raises OSError."""
    going = path.with_name(f".{path.name}.{_UNFINISHED}{os.getpid()}")
    path.rename(going)  # what is left when this process is killed is cleared like the others
    try:
        sync_folder(path.parent)
        shutil.rmtree(going)
    except BaseException:  # a signal, too
        shutil.rmtree(going, ignore_errors=True)
        raise


def clear_unfinished(folder: Path) -> None:
    """Removes the folders that `whole_folder` was filling here when its process was killed.

    A process that lives holds a lock on its own.
    """
    remove_left(unfinished_in(folder))


def _refusal_to_make(path: Path, error: OSError) -> AtollError:
    if error.errno in _OF_THE_DISK:
        return refusal_to_write(path, error)
    return CannotCreateError(
        f"{path} cannot be made: {error.strerror}", next_step="choose another folder"
    )


def write_atomically(path: Path, *data: bytes | memoryview, mode: int = 0o644) -> None:
    """Writes a file so that a crash leaves the old file or the new one, never a part.

    What is given is written piece after piece, without a copy of it. The folder must exist. The file
    has `mode` from its first byte on, or less. Raises SystemRefusedError when the disk is full and
    CannotCreateError when the file cannot be written; both leave what was there before.
    """
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if not _is_written_unnamed(name, data, mode):
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(name, flags, 0o600), "wb") as file:
                _fill(file, data, mode)
        name.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        # It is gone once it has taken its name, or never had one.
        with contextlib.suppress(OSError):
            name.unlink()
        if isinstance(error, OSError):
            raise refusal_to_write(path, error) from error
        raise


_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def _is_written_unnamed(name: Path, data: Sequence[bytes | memoryview], mode: int) -> bool:
    """Writes a file that gets its name once it is whole; whether the system and this disk can.

    What has no name is gone with a process that is killed: a secret, or a large piece, would stay for good.
    Some disks, as those of networks, know only files with names.
    """
    unnamed = getattr(os, "O_TMPFILE", None)  # Linux alone has it
    if unnamed is None:
        return False
    try:
        descriptor = os.open(name.parent, os.O_WRONLY | os.O_CLOEXEC | unnamed, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
        return False
    with os.fdopen(descriptor, "wb") as file:
        _fill(file, data, mode)
        try:
            # Only with a folder, which an absolute path ignores, does Python follow the link there.
            os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor)
        except OSError:  # no /proc here, or a disk that makes such files and gives them no name
            return False
    return True


def _fill(file: BinaryIO, data: Sequence[bytes | memoryview], mode: int) -> None:
    file.writelines(data)
    file.flush()
    os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_durably(path: Path) -> None:
    """Removes a file, if it is there, so that it stays removed after a power cut."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal_to_write(path, error) from error
    sync_folder(path.parent)


# One process at a time for a folder: a coordinator, a node, or a machine that joins.


LOCK_NAME = "lock"


class FolderLock:
    """Holds a folder for this process until `release`, or until the process ends, however it ends.

    The programs that it starts do not inherit the lock, so one that outlives it holds nothing.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, *, holder: str, next_step: str) -> Self:
        """Takes the folder; raises SystemRefusedError when another process holds it.

        `holder` is what people call whoever holds it: "coordinator", "node".
        """
        path = folder / LOCK_NAME
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SystemRefusedError(
                    f"{path} cannot be opened: {error.strerror}",
                    next_step=(error.errno == errno.EACCES and whose_it_is(path))
                    or NEXT_STEP_FOR_REFUSAL.get(
                        error.errno or 0, "check the folder's permissions"
                    ),
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise SystemRefusedError(
                    f"another {holder} (process {owner}) runs in {folder}", next_step=next_step
                ) from error
            except OSError as error:  # a share of a network, or a program's own file system
                os.close(descriptor)
                raise SystemRefusedError(
                    f"the disk of {path} locks no files ({error.strerror}), so a second {holder} there "
                    "would not be noticed",
                    next_step="let the folder be on a disk of this machine",
                ) from error
            if _is_that_file(path, os.fstat(descriptor)):
                break
            os.close(descriptor)  # its holder removed the file before letting go
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise refusal_to_write(path, error) from error
        return cls(path, descriptor)

    @staticmethod
    def holder_of(folder: Path) -> int | None:
        """The process that holds the folder; None when none does, or it is another user's.

        Asks the process too: the number in the file may be that of one which has ended.
        """
        path = folder / LOCK_NAME
        try:
            process_id = int(path.read_text())
            lock = path.stat()
            opened = tuple(Path(f"/proc/{process_id}/fd").iterdir())
        except (OSError, ValueError):
            return None
        return process_id if any(_is_that_file(link, lock) for link in opened) else None

    def release(self) -> None:
        """Lets another process have the folder; safe to call more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_that_file(path: Path, that: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), that)
    except FileNotFoundError:
        return False
