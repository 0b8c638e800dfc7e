"""The image of deploy/Dockerfile without a container engine: its steps, carried out in roots of Debian.

    image = made_image(folder)
    subprocess.run(image.command("--version"))

A stage is a folder that mmdebstrap filled and `chroot` enters. What pip installs there was fetched before
(`pip download`), so that a machine's own index serves. Knows the instructions that our file has, and no more.
Needs root, mmdebstrap, and a network for what it installs.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from protocol.errors import SystemRefusedError

SOURCES = Path(__file__).parents[1]
DOCKERFILE = SOURCES / "deploy" / "Dockerfile"
_WHEELS = "/var/tmp/wheels"

_PYTHON = (3, 11)
"""Of Debian 12, bookworm."""

_OWN_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"),)
"""Where a machine of Debian gets its packages from; elsewhere mmdebstrap knows."""

_PLACES = {"/dev": Path("/dev"), "/sys": Path("/sys"), "/proc": Path("/proc")}


class ImageUnavailableError(SystemRefusedError):
    """Here no image can be made; the sentence says why."""


class ImageBrokenError(SystemRefusedError):
    """A step of our own fails."""


@dataclass(slots=True, kw_only=True)
class Image:
    """What the last stage leaves: a root, and how commands start in it."""

    root: Path
    wheels: Path
    user: str = "root"
    work: str = "/"
    environment: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
    )
    entrypoint: tuple[str, ...] = ()

    def command(self, *arguments: str, volumes: Mapping[str, Path] | None = None) -> list[str]:
        """What starts its program with these arguments; `volumes` are folders, by where they appear."""
        line = shlex.join(["exec", *self.entrypoint, *arguments])
        return self.entered(line, user=self.user, volumes=volumes)

    def entered(
        self, line: str, *, user: str = "root", volumes: Mapping[str, Path] | None = None
    ) -> list[str]:
        """What runs a line of shell inside, and becomes what that line ends with."""
        root = self.root
        # In a mount namespace of its own, so that nothing stays mounted.
        mounts = []
        for place, source in {**_PLACES, **(volumes or {})}.items():
            there = shlex.quote(f"{root}{place}")
            mounts += [f"mkdir -p {there}", f"mount --rbind {shlex.quote(str(source))} {there}"]
        assigned = [f"{key}={value}" for key, value in self.environment.items()]
        starts = ["env", "-i", "-C", self.work, *assigned, "/bin/sh", "-euc", line]
        options = [] if user == "root" else [f"--userspec={user}:{user}"]
        enters = ["chroot", *options, str(root), *starts]
        line = "; ".join([*mounts, f"exec {shlex.join(enters)}"])
        return ["unshare", "--mount", "/bin/sh", "-euc", line]


def made_image(folder: Path) -> Image:
    """Carries the file out in a folder, which takes some 2 GB, with its own arguments.

    Raises ImageUnavailableError without tools or Debian's packages, and ImageBrokenError where a step fails.
    """
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        raise ImageUnavailableError(
            "an image is made by root, with mmdebstrap", next_step="apt-get install mmdebstrap"
        )
    if sys.version_info[:2] != _PYTHON:
        raise ImageUnavailableError("what pip fetches here is for another Python than the image's")
    base = folder / "base"
    made = ["mmdebstrap", "--variant=minbase", "--mode=root", "--skip=check/empty", "bookworm"]
    _run([*made, str(base), *(str(file) for file in _OWN_SOURCES if file.exists())])
    shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")
    wheels = _fetched(folder / "wheels")
    stages: dict[str, Image] = {}
    filled: dict[str, str] = {}
    image: Image | None = None
    for name, rest in _instructions(DOCKERFILE.read_text()):
        if name != "RUN":  # there the shell fills them in, if it is not kept from that by quotes
            rest = _filled(rest, filled)
        if name == "ARG":
            key, _, value = rest.partition("=")
            filled[key] = value.strip('"')
            continue
        if name == "FROM":
            stage = rest.split(" AS ")[1] if " AS " in rest else "last"
            root = folder / stage
            _run(["cp", "--archive", "--reflink=auto", str(base), str(root)])
            (root / _WHEELS[1:]).mkdir(parents=True)
            image = stages[stage] = Image(root=root, wheels=wheels)
            continue
        assert image is not None, "an instruction before FROM"
        _carry_out(image, name, rest, stages, filled)
    assert image is not None, "a Dockerfile without FROM"
    return image


def _carry_out(
    image: Image, name: str, rest: str, stages: Mapping[str, Image], arguments: Mapping[str, str]
) -> None:
    match name:
        case "RUN":
            installs = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": _WHEELS}
            installs |= {"DEBIAN_FRONTEND": "noninteractive", **arguments}
            inside = replace(image, environment=image.environment | installs)
            _run(inside.entered(rest, volumes={_WHEELS: image.wheels}), is_ours=True)
        case "COPY":
            *sources, target = rest.split()
            stage = sources.pop(0)[len("--from=") :] if sources[0].startswith("--from=") else ""
            root = stages[stage].root if stage else SOURCES
            for source in sources:
                _copy(root / source.lstrip("/"), image.root, target)
        case "ENV":
            for one in shlex.split(rest):
                key, _, value = one.partition("=")
                image.environment[key] = value.replace("$PATH", image.environment["PATH"])
        case "USER":
            image.user = rest
        case "WORKDIR":
            image.work = rest
        case "ENTRYPOINT":
            image.entrypoint = tuple(json.loads(rest))
        case "VOLUME" | "CMD" | "HEALTHCHECK":
            pass
        case _:
            raise AssertionError(f"the instruction {name} is not known here")


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]


def _filled(text: str, arguments: Mapping[str, str]) -> str:
    for key, value in arguments.items():
        text = text.replace(f"${{{key}}}", value)
    return text


def _copy(source: Path, root: Path, target: str) -> None:
    """A folder's content, or a file: into a folder where the target ends with a slash."""
    place = root / target.strip("/") / (source.name if target.endswith("/") else "")
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, place)


def _fetched(folder: Path) -> Path:
    """What pip installs in the image, and what it builds with: versions that exclude each other are ours."""
    fetched = ["torch", "hatchling", "setuptools", "wheel", f"{SOURCES}[node]"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    _run([*pip, "--constraint", str(SOURCES / "constraints.txt"), *fetched], is_ours=True)
    return folder


def _run(command: Sequence[str], *, is_ours: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        what = f"{shlex.join(command)[-300:]} ended with {done.returncode}: {done.stderr[-2000:]}"
        raise ImageBrokenError(what) if is_ours else ImageUnavailableError(what)
