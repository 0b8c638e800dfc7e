"""The commands of `atoll node` and `atoll helper`. Heavy imports happen inside them."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from node.config import (
    NodeSettings,
    load_settings,
    require_node_folder,
    tell_missing_settings,
)
from node.installed import HELPER, require_installed
from protocol.errors import NotPermittedError
from protocol.files.durable import FolderLock, as_typed
from protocol.service.limits import usable_cores
from protocol.service.unit import PRINT, SYSTEM, install_service
from protocol.terminal.console import PathAtHome, as_seconds, say
from protocol.terminal.lazy_group import WholeGroup
from protocol.trust.credentials import IDENTITY_FILE, Credentials, find_home
from protocol.trust.pki import Role

_Command = TypeVar("_Command", bound=Callable[..., Any])

DIRECTORY = click.option(
    "--dir",
    "folder",
    type=PathAtHome(path_type=Path, file_okay=False),
    help="The node's folder. Default: $ATOLL_DIR, or the one in your home.",
)

MAX_UPLOAD = click.option(
    "--max-upload", help="Most that transfers upload together: 10mbit, 1.25MB/s."
)

_STAYING = (
    click.option("--listen", help="Address that peers connect to."),
    click.option("--port", type=int, help="Port that peers connect to; 0 picks a free one."),
    click.option("--announce", help="Host to tell peers, when a router forwards the port."),
    click.option(
        "--interface", metavar="NAME", help="Interface whose addresses peers are told, as eth1."
    ),
    MAX_UPLOAD,
    click.option("--metrics", metavar="HOST:PORT", help="Serve its own /metrics there."),
    click.option(
        "--drain-within",
        metavar="TIME",
        callback=as_seconds,
        help="How long it may stay when it is stopped, to leave with its work: 30s, 5m; 0 for not at all.",
    ),
    click.option(
        "--wait/--no-wait",
        "waits",
        default=True,
        help="Wait for a coordinator that does not answer yet, or end with 69. Default: wait.",
    ),
    click.option("--log-json", is_flag=True, help="Log one JSON object a line."),
)


def _staying(command: _Command) -> _Command:
    """With the options of what stays until the run is finished."""
    for option in reversed(_STAYING):
        command = option(command)
    return command


@click.group(cls=WholeGroup)
def node() -> None:
    """Start and stop this machine's node, and look at the machine."""


@node.command()
@DIRECTORY
@click.option("--name", help="What people call this node, instead of the name in node.toml.")
@click.option("--device", help="Where to train: auto, cpu, cuda, xpu, mps, or one GPU, as cuda:1.")
@click.option("--ranks", type=int, help="Training processes; with GPUs, one for each.")
@click.option("--mesh", help="sizes: those given; auto: picked from devices, memory and model.")
@click.option("--replicate", type=int, help="Copies of the model, each with samples of its own.")
@click.option("--shard", type=int, help="Ranks that share a copy, each with samples of its own.")
@click.option("--tp", type=int, help="Ranks that share each matrix: tensor parallel.")
@click.option("--pp", type=int, help="Ranks that share the layers: pipeline parallel.")
@click.option("--cp", type=int, help="Ranks that share each sample: context parallel.")
@click.option("--hosts", type=int, help="Machines that share the ranks; the others follow.")
@click.option("--island-listen", help="This machine's address for them, as 10.0.0.1:7720.")
@click.option("--zero", type=int, help="What shards spread: 1 moments, 2 and gradients, 3 all.")
@click.option("--schedule", help="The pipeline's: gpipe, 1f1b, interleaved-1f1b, …")
@click.option("--microbatches", type=int, help="Of a pipeline; 0 finds a number.")
@click.option("--offload/--no-offload", default=None, help="Keep parameters in the CPU's memory.")
@click.option("--data", help="Where this machine has the run's data, instead of run.toml's paths.")
@click.option("--loop/--no-loop", default=None, help="Train by your own program: atoll.join().")
@click.option("--until-stdin-closes", "ends_with_stdin", is_flag=True, hidden=True)
@click.option(
    "--weights",
    metavar="FILE",
    help="The run's first weights, where the run begins with given ones and this node has them.",
)
@click.option(
    "--allow-function",
    "allow_functions",
    multiple=True,
    metavar="RUN",
    callback=lambda context, option, runs: list(runs) or None,
    help="A run whose own code may run here, as NAME@DIGEST; instead of those in node.toml.",
)
@click.option("--code", help="The folder that has the functions of the run.")
@click.option("--base", help="The transformers folder of the model that the run adapts.")
@_staying
def start(
    folder: Path | None,
    waits: bool,
    log_json: bool,
    ends_with_stdin: bool,
    **settings: str | float | None,
) -> None:
    """Contribute this machine until the run is finished or you press Ctrl-C.

    It waits for a coordinator that does not answer yet, and comes back to one that went away.

    On Ctrl-C or SIGTERM it stops training, contributes what it has trained in this round, waits for
    the round's commit and says goodbye; a second Ctrl-C makes it leave at once.

    Example: atoll node start --device cuda
    """
    home = _home_of(Role.NODE, folder)
    require_installed(to="start a node")
    chosen = load_settings(home, **settings)
    # Torch reads it when it is imported, here and in the ranks.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // chosen.ranks_here)))
    _run(home, chosen, waits=waits, log_json=log_json, ends_with_stdin=ends_with_stdin)


def _home_of(role: Role, folder: Path | None) -> Path:
    """The folder of a node or a helper, as the command is for; what is damaged is told first."""
    home = find_home(folder)
    found = Credentials.load(home, markers=[IDENTITY_FILE]).principal.role
    require_node_folder(home)
    if found is not role:
        raise NotPermittedError(
            f"{home} is a {found}'s folder, not a {role}'s",
            next_step=f"run 'atoll {found} start', or join as a {role} in another folder",
        )
    return home


def _run(
    home: Path, chosen: NodeSettings, *, waits: bool, log_json: bool, ends_with_stdin: bool
) -> None:
    """Runs the daemon of a folder to its end."""
    from protocol.terminal.logging import keeping_the_end, start_logging

    start_logging(as_json=log_json, folder=home, process="node", node=chosen.name)
    tell_missing_settings(home)
    with keeping_the_end(home, "node"):
        from node.app import run_node

        reason = asyncio.run(run_node(home, chosen, waits=waits, ends_with_stdin=ends_with_stdin))
    say(f"{chosen.name} has stopped: {reason}")


@click.group(cls=WholeGroup)
def helper() -> None:
    """Start this machine's helper, which reduces for nodes that cannot be dialled."""


@helper.command("start")
@DIRECTORY
@click.option("--name", help="What people call this helper, instead of the name in node.toml.")
@click.option("--until-stdin-closes", "ends_with_stdin", is_flag=True, hidden=True)
@_staying
def start_helper(
    folder: Path | None,
    waits: bool,
    log_json: bool,
    ends_with_stdin: bool,
    **settings: str | float | None,
) -> None:
    """Reduce for the nodes of a run until it is finished or you press Ctrl-C.

    A helper trains nothing and needs no data and no torch. Nodes that nobody can dial dial it, so its port
    must be open: set one with --port, and --announce where a router forwards it. It holds results and the
    model's state for nodes that come later. Join with an invite of 'atoll invite create --role helper'.

    Example: atoll helper start --port 7710
    """
    home = _home_of(Role.HELPER, folder)
    require_installed(HELPER, to="start a helper")
    chosen = load_settings(home, **settings)
    _run(home, chosen, waits=waits, log_json=log_json, ends_with_stdin=ends_with_stdin)


def _service_of(role: Role) -> click.Command:
    """`install-service` of the nodes' commands or of the helpers'."""

    @click.command(
        "install-service",
        help=f"""Have systemd start this machine's {role}, watch it, and start it again.

        Writes a unit and says what to type next; nothing is started. The {role} is ready when it takes
        part. It is started again when it fails, unless that wants a person, and has its time to leave with
        its work when it is stopped. Settings are those of node.toml.

        Example: atoll {role} install-service --print""",
    )
    @DIRECTORY
    @SYSTEM
    @PRINT
    def command(folder: Path | None, is_system: bool, prints: bool) -> None:
        from node.stopping import ENDING_SECONDS

        home = _home_of(role, folder).absolute()
        settings = load_settings(home)
        install_service(
            str(role),
            home,
            called=settings.name,
            arguments=(str(role), "start", "--dir", str(home)),
            stop_seconds=settings.drain_within + ENDING_SECONDS,
            running=FolderLock.holder_of(home),
            is_system=is_system,
            prints=prints,
        )

    return command


node.add_command(_service_of(Role.NODE))
helper.add_command(_service_of(Role.HELPER))


@node.command()
@click.argument("token", type=PathAtHome(path_type=Path, dir_okay=False))
@click.option("--name", help="What the leader calls this host. Default: its name.")
@click.option("--device", default="auto", show_default=True, help="As for 'atoll node start'.")
@click.option(
    "--checkpoints",
    type=PathAtHome(path_type=Path, file_okay=False),
    help="Folder for this host's part of checkpoints. Default: inner-NAME, here.",
)
@click.option(
    "--data", default="", help="Where this host has the run's data. Default: as run.toml."
)
@click.option("--log-json", is_flag=True, help="Log one JSON object a line.")
def follow(
    token: Path,
    name: str | None,
    device: str,
    checkpoints: Path | None,
    data: str,
    log_json: bool,
) -> None:
    """Lend this machine's devices to the node of another one, for one island of several hosts.

    TOKEN is the file island.token from the folder of that node, which was started with --hosts.
    Keep it secret: who has it can take part in the island. Its checkpoints and logs lie in inner-NAME, or
    in the folder that --checkpoints names.

    Example: atoll node follow island.token --device cuda
    """
    require_installed(to="follow a node")
    from node.hosts.wire import HostToken
    from node.island.ranks.devices import check_choice
    from protocol.files.durable import OURS_ALONE, make_folder
    from protocol.terminal.logging import keeping_the_end, start_logging

    leader = HostToken.read(token)
    check_choice(device)
    own_name = name or socket.gethostname()[:64] or "host"
    # A name is no path: one with a slash in it would lead elsewhere.
    folder = checkpoints or Path(f"inner-{own_name.replace('/', '-')}")
    make_folder(folder, mode=OURS_ALONE)
    start_logging(as_json=log_json, folder=folder, process="follower", node=own_name)
    with keeping_the_end(folder, "follower"):
        from node.hosts.following import run_follower

        reason = asyncio.run(
            run_follower(leader, name=own_name, device=device, checkpoints=folder, data=data)
        )
    say(f"{own_name} has stopped: {reason}")


@node.command()
@DIRECTORY
@click.option(
    "--within",
    default="30s",
    show_default=True,
    metavar="TIME",
    callback=as_seconds,
    help="How long it may stay; after that it leaves at once. Its own --drain-within holds too.",
)
def drain(folder: Path | None, within: float) -> None:
    """Let the running node leave with its work, and wait until it has ended.

    It stops training, contributes what it has trained in this round and waits for the round's
    commit. For machines that are about to be taken away.

    Example: atoll node drain --within 20s
    """
    from node.stopping import drain_node

    drain_node(find_home(folder), within_seconds=within, say=click.echo)
    click.echo("it has left")


@node.command()
@DIRECTORY
def pause(folder: Path | None) -> None:
    """Let this machine's node train nothing, until 'atoll node resume'.

    It stays a member: it applies commits, and is up to date when it goes on. Restarts do not end that.

    Example: atoll node pause
    """
    from node.stopping import pause_node

    pause_node(find_home(folder), say=click.echo)


@node.command()
@DIRECTORY
def resume(folder: Path | None) -> None:
    """Let a node that was paused train again.

    Example: atoll node resume
    """
    from node.stopping import resume_node

    resume_node(find_home(folder), say=click.echo)


@node.command()
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@DIRECTORY
def snapshots(folder: Path | None, is_json: bool) -> None:
    """List the committed models that this node keeps, with the figures of their rounds.

    'atoll export --round', 'atoll node fork' and going back take one of these rounds. The figures are the
    coordinator's; the held-out loss is of exactly that model, where one was measured.

    \b
    Example:
      atoll node snapshots

    \b
    JSON is a list, the newest first; null is what nobody knows:
      [{"round": 40, "num_bytes": 9437312, "digest": "8f3a…", "damage": "", "loss": 2.1,
        "held_out": 2.2, "tokens": 184320}, …]
    """
    from node.kept import list_snapshots

    list_snapshots(find_home(folder), is_json=is_json)


@node.command()
@click.argument("round", metavar="ROUND", type=click.IntRange(min=1))
@click.option(
    "--to",
    "to",
    metavar="FOLDER",
    required=True,
    type=PathAtHome(path_type=Path, file_okay=False),
    help="A new folder for the new run's file and weights.",
)
@click.option(
    "--keep-progress",
    is_flag=True,
    help="Go on with the outer momentum, the schedule, the token clock and the samples of the run.",
)
@DIRECTORY
def fork(round: int, to: Path, folder: Path | None, keep_progress: bool) -> None:
    """Write what a new run is made of that begins with the weights after ROUND of this node's run.

    FOLDER gets run.toml with the rules that were in force, which may all be changed, description.json, and
    the weights in first.safetensors. This node must keep a snapshot of ROUND, and may be running or not.

    Rounds, schedule and samples of the new run begin anew. With --keep-progress they go on from ROUND, as do
    the token clock and the outer optimizer's momentum; the coordinator must answer. What nodes owe and what
    inner optimizers have learnt begins anew in any case.

    \b
    Example:
      atoll node fork 120 --to ./fork
      atoll init my-second-run --run ./fork/run.toml
    """
    from node.kept import kept_model
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: a damaged snapshot is told there
    home = find_home(folder)
    model = kept_model(home, round)
    from node.models.forking import RUN_FILE, fork

    told = None
    if keep_progress:
        from protocol.terminal.query import StatusLink

        with StatusLink(home) as link:
            told = link.round(round, wants_books=True)
    spec = fork(model, home, to, told=told)
    click.echo(f"wrote run {spec.run.name!r} with the weights after round {round} to {to}")
    if told is not None:
        begun = spec.beginning
        click.echo(
            f"it goes on at {begun.progress:.1%} of the schedule and {begun.tokens:,} tokens, with the outer "
            f"momentum and the samples that are left; {spec.run.rounds} rounds are to come"
        )
    click.echo(f"next: change {to / RUN_FILE} as you like, then on the coordinator's machine")
    click.echo(f"  atoll init NEWDIR --run {as_typed(to / RUN_FILE)}")


@contextmanager
def _prints_to_standard_error() -> Iterator[None]:
    """What libraries and a run's functions print within it is beside the answer, which programs read."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)


@node.command()
@click.argument("directory", metavar="DIR", type=PathAtHome(path_type=Path, file_okay=False))
@click.option(
    "--from",
    "source",
    metavar="FOLDER",
    type=PathAtHome(path_type=Path, file_okay=False),
    help="The transformers folder that first weights are taken from, or the folder of its functions.",
)
@click.option("--force", is_flag=True, help="Make it anew, before the run's first start.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--asked", help="Instead of DIR's run.toml: JSON of 'atoll init'.", hidden=True)
@click.option("--data", "looks_at_data", is_flag=True, help="Look at its data alone.", hidden=True)
@click.option(
    "--first", "is_first", is_flag=True, help="Read its first weights alone.", hidden=True
)
def describe(
    directory: Path,
    source: Path | None,
    force: bool,
    is_json: bool,
    asked: str | None,
    looks_at_data: bool,
    is_first: bool,
) -> None:
    """Find out what the model of the run in DIR is by building it, and write that down there.

    'atoll init' does it by itself. For a machine with torch, when DIR was made on one without: copy
    run.toml here, and description.json and first.safetensors back.

    Example: atoll node describe my-run --from ./SmolLM2-135M
    """
    import json

    if looks_at_data:
        from node.island.data.opening import look_at_run_data
        from protocol.run.run_files import load_run_folder

        look_at_run_data(load_run_folder(directory, "run.toml"), Path.cwd())
        return
    require_installed(to="describe a model")
    from node.models.describing import describe_asked, describe_first, describe_run, in_words
    from protocol.run.run_files import Asked
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)
    with _prints_to_standard_error():
        if asked is not None:
            facts = describe_asked(directory, source, Asked(**json.loads(asked)))
        elif is_first:
            facts = describe_first(directory, source=source)
        else:
            facts = describe_run(directory, source=source, is_forced=force)
    click.echo(json.dumps(facts) if is_json else in_words(facts))


@node.command()
@DIRECTORY
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, folder: Path | None, is_json: bool) -> None:
    """Look at this machine: what keeps a node from working, and what makes it slower.

    It only looks. Versions, devices, open files, the coordinator and its clock, the port, libp2p,
    and what of the kernel's settings slows long links. Before or after 'atoll join', and beside a
    running node. Ends with 0 unless something is wrong, and then with its exit code; advice is
    nothing wrong.

    \b
    Example:
      atoll node doctor --json

    \b
    JSON is a list of findings; a verdict is fine, note, advice or wrong:
      [{"about": "kernel", "verdict": "advice", "what": "…", "next_step": "…", "exit_code": 0}, …]
    """
    from node.doctor.command import run_doctor
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: standard output is for the findings
    context.exit(run_doctor(find_home(folder), is_json=is_json))
