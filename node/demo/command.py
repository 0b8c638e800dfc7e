"""The command: it types what people type, in order, shows how the run goes, and says what came of it.

At the end it tells what was learned, what it cost on the wire, and whether all agree. The run is a byte
language model on the Python standard library's own source.
"""

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import protocol
from node.demo.children import Child, ChildDiedError, Children
from node.installed import require_installed
from protocol.errors import (
    AtollError,
    BadDataError,
    CannotCreateError,
    TemporaryError,
    UnavailableError,
)
from protocol.files.durable import as_typed
from protocol.run.run_files import load_run_file
from protocol.terminal.console import (
    PathAtHome,
    bytes_in_words,
    count_in_words,
    digest_in_words,
    printable,
    seconds_in_words,
)
from protocol.terminal.node_words import by_name, name_of, sent_bytes
from protocol.terminal.query import StatusLink
from protocol.terminal.watch import REFRESH_SECONDS, LineScreen, LiveScreen, Screen
from protocol.trust.invite import INVITE
from protocol.v1 import status_pb2 as pb


class NotProvenError(AtollError):
    """The nodes did not all show the same final outer state: the promise of the whole thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes sent over the run against gradient averaging at every inner step."""

    sent_bytes: int  # by all nodes
    averaging_bytes: float  # by all nodes, had they averaged gradients

    @property
    def times_less(self) -> float:
        """How many times fewer bytes were sent; 0 when nothing would have been sent anyway."""
        return self.averaging_bytes / self.sent_bytes if self.sent_bytes else 0.0


def agreed_digest(nodes: Sequence[pb.NodeStatus], *, round: int, num_nodes: int) -> bytes:
    """The outer digest that every node reported itself at the round.

    Raises NotProvenError when one differs, is missing, or stands at another round.
    """
    if len(nodes) != num_nodes:
        raise NotProvenError(f"{len(nodes)} of {num_nodes} nodes are known to the coordinator")
    for node in nodes:
        beat = node.heartbeat
        if beat.outer_round != round or not beat.outer_digest:
            raise NotProvenError(
                f"{name_of(node)} did not report its outer state at round {round}: "
                f"its last report is of round {beat.outer_round}",
                next_step=f"read the log of {name_of(node)}",
            )
    digests = {bytes(node.heartbeat.outer_digest) for node in nodes}
    if len(digests) > 1:
        found = ", ".join(
            f"{name_of(n)} {digest_in_words(n.heartbeat.outer_digest)}" for n in nodes
        )
        raise NotProvenError(
            f"the nodes do not hold the same outer state at round {round}: {found}",
            next_step="report this as a bug, with the folder of the demo",
        )
    return digests.pop()


def traffic_of(
    nodes: Sequence[pb.NodeStatus], *, num_parameters: int, tokens_per_inner_step: int
) -> Traffic:
    """Compares with a ring all-reduce of fp32 gradients at every inner step that commits took.

    In a ring each of N nodes sends 2·(N−1)/N of the vector (Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms"). Framing is left out for it and counted for us.
    """
    share = 2 * (len(nodes) - 1) / len(nodes) if nodes else 0.0
    num_inner_steps = sum(node.committed_tokens for node in nodes) / tokens_per_inner_step
    return Traffic(
        sent_bytes=sum(map(sent_bytes, nodes)),
        averaging_bytes=share * 4 * num_parameters * num_inner_steps,
    )


def final_report(
    status: pb.GetStatusResponse,
    *,
    num_nodes: int,
    tokens_per_inner_step: int,
    seconds: float,
) -> list[str]:
    """The lines about losses, bytes and digests. Raises NotProvenError."""
    run, nodes = status.run, by_name(status.nodes)
    digest = agreed_digest(nodes, round=run.total_rounds, num_nodes=num_nodes)
    traffic = traffic_of(
        nodes,
        num_parameters=run.num_parameters,
        tokens_per_inner_step=tokens_per_inner_step,
    )
    return [
        f"trained       {count_in_words(run.num_parameters)} parameters on "
        f"{count_in_words(run.token_clock)} tokens, {run.total_rounds} rounds, "
        f"{num_nodes} nodes, {seconds_in_words(seconds)} in all",
        _loss_line(run),
        *_traffic_lines(traffic, nodes),
        f"outer state   {digest_in_words(digest)} at round {run.total_rounds}, "
        f"the same on {', '.join(map(name_of, nodes))}",
    ]


def _loss_line(run: pb.RunStatus) -> str:
    if not run.held_out_losses:
        raise NotProvenError("no held-out loss was measured", next_step="read the nodes' logs")
    first, last = run.held_out_losses[0], run.held_out_losses[-1]
    return (
        f"held-out loss {first.loss:.3f} at round {first.round} → "
        f"{last.loss:.3f} at round {last.round}, nats per byte"
    )


def _traffic_lines(traffic: Traffic, nodes: Sequence[pb.NodeStatus]) -> list[str]:
    each = ", ".join(f"{name_of(node)} {bytes_in_words(sent_bytes(node))}" for node in nodes)
    if len(nodes) < 2:
        return [f"sent          {each}; one node has nobody to exchange with"]
    average = bytes_in_words(traffic.averaging_bytes / len(nodes))
    return [
        f"sent          {each}: {traffic.times_less:.0f} times less than averaging gradients",
        f"              ({average} a node: a ring all-reduce in fp32 at every inner step)",
    ]


RUN_FILE = """\
# The demo: a byte language model on the Python standard library's own source.

[run]
name = "demo"
seed = {seed}
rounds = {rounds}
min_nodes = {num_nodes}

[model]
hidden_size = 64
num_layers = 3
num_heads = 4
num_kv_heads = 2
ffn_size = 192
context = 128
qk_norm = true

[data]
source = "python-stdlib"

[inner]
optimizer = "muon"
steps = 15
batch = 8
learning_rate = 5e-2
muon_learning_rate = 1.2e-2

# What a preset takes for so many exchanges; the momentum of 0.9 wants a thousand.
[outer]
merge = "agreeing"
optimizer = "nesterov"
learning_rate = 0.7
momentum = 0.6

[exchange]
uplink = "int4"
downlink = "int4"

[deadlines]
train = 120
contribute = 150
commit = 180
apply = 30
lease = 10

[evaluation]
every_rounds = 10
"""

DEFAULT_ROUNDS = 80

_COMMAND_SECONDS = 60.0  # for a command that needs no torch
_HEAVY_COMMAND_SECONDS = 180.0  # for one that imports torch on a busy machine
_FINAL_WAIT_SECONDS = 30.0  # for nodes to end once the run is finished


@click.command()
@click.option("--nodes", "num_nodes", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 10_000), default=DEFAULT_ROUNDS, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option(
    "--out",
    type=PathAtHome(path_type=Path),
    help="A folder that does not exist yet. Default: atoll-demo, or the next free name.",
)
def demo(num_nodes: int, rounds: int, seed: int, out: Path | None) -> None:
    """Train a small model with several nodes on this machine.

    Starts a coordinator and the nodes as you would by hand, shows how they train and exchange, and
    stops everything at the end or on Ctrl-C. The folder keeps the model, the run file and all logs.

    Example: atoll demo --nodes 4
    """
    require_installed(to="show a swarm on this machine")
    folder = _fresh_folder(out)
    logs = folder / "logs"
    logs.mkdir()
    screen = LiveScreen() if sys.stdout.isatty() else LineScreen(key=_rounds_done)
    try:
        with (
            Children(logs=logs, environment=_environment(), working_folder=folder) as children,
            StatusLink(folder / "coordinator") as link,
        ):
            demonstration = _Demonstration(
                folder=folder, num_nodes=num_nodes, children=children, link=link, screen=screen
            )
            lines = demonstration.run(rounds=rounds, seed=seed)
    except KeyboardInterrupt:
        click.echo(f"stopped; everything the demo started has ended. Logs: {logs}", err=True)
        raise
    click.echo("\n".join(["", *lines]))


def _fresh_folder(out: Path | None) -> Path:
    """Makes the folder, readable by its owner alone: it will hold keys."""
    for candidate in _default_folders() if out is None else (out,):
        try:
            candidate.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise CannotCreateError(
                f"{candidate} cannot be made: {error.strerror}",
                next_step="choose another folder with --out",
            ) from error
        return candidate.resolve()
    raise CannotCreateError(f"{out} exists already", next_step="choose another folder with --out")


def _default_folders() -> Iterator[Path]:
    yield Path("atoll-demo")
    yield from (Path(f"atoll-demo-{number}") for number in itertools.count(2))


def _environment() -> dict[str, str]:
    """For the children: our own code wherever we run from, and one thread for each process.

    Two processes of two threads on two cores are fifty times slower than one thread each.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("ATOLL_DIR", "ATOLL_INVITE")}
    sources = str(Path(protocol.__path__[0]).parent)
    known = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{sources}{os.pathsep}{known}" if known else sources
    environment["PYTHONUNBUFFERED"] = "1"
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def _atoll(*arguments: str | Path) -> list[str]:
    # -P: a folder's own protocol.py or node.py must not stand in for ours.
    return [sys.executable, "-P", "-m", "protocol.terminal.cli", *map(str, arguments)]


def _rounds_done(status: pb.GetStatusResponse) -> object:
    """What is worth a line when the demo does not run on a terminal."""
    return status.run.committed_round, status.run.phase == pb.RUN_PHASE_FINISHED


def follow(
    nodes: Sequence[Child],
    children: Children,
    ask: Callable[[], pb.GetStatusResponse],
    screen: Screen,
) -> pb.GetStatusResponse:
    """Shows the run until it is finished and its nodes have ended; returns the last status.

    Raises ChildDiedError when a node ends before that.
    """
    for node in nodes:
        node.may_end = True  # it may do so before we hear that the run is finished
    is_finished = False
    while not is_finished:
        ended = [node for node in nodes if node.exit_code() is not None]
        status = _look(ask, screen)
        is_finished = status is not None and status.run.phase == pb.RUN_PHASE_FINISHED
        if status is not None and not is_finished and ended:
            raise ChildDiedError(ended[0], 0)
        children.watch_for(0.0 if is_finished else REFRESH_SECONDS)
    give_up_at = time.monotonic() + _FINAL_WAIT_SECONDS
    while late := [node.name for node in nodes if node.exit_code() is None]:
        if time.monotonic() >= give_up_at:
            raise TemporaryError(
                f"the run is finished, but {' and '.join(late)} still ran "
                f"{_FINAL_WAIT_SECONDS:.0f} s later",
                next_step=f"read {nodes[0].log} and the logs beside it",
            )
        _look(ask, screen)
        children.watch_for(0.2)
    children.check()
    final = ask()  # the last heartbeats came after the last look
    screen.show(final)
    return final


def _look(ask: Callable[[], pb.GetStatusResponse], screen: Screen) -> pb.GetStatusResponse | None:
    """Asks and shows; None when the coordinator did not answer in time."""
    try:
        status = ask()
    except (UnavailableError, TemporaryError) as error:
        screen.away(error.what)
        return None
    status.run.is_without_backup = False  # nobody would miss a demo
    screen.show(status)
    return status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demonstration:
    """One run of the demo in its folder."""

    folder: Path
    num_nodes: int
    children: Children
    link: StatusLink
    screen: Screen

    def run(self, *, rounds: int, seed: int) -> list[str]:
        """Does all of it and returns what to say at the end."""
        began = time.monotonic()
        run_file = self.folder / "run.toml"
        run_file.write_text(
            RUN_FILE.format(seed=seed, rounds=rounds, num_nodes=self.num_nodes), encoding="utf-8"
        )
        spec = load_run_file(run_file)
        with self.screen:
            self.screen.say(f"a swarm of {self.num_nodes} on this machine, in {self.folder}")
            coordinator = self._start_coordinator(run_file)
            nodes = self._start_nodes(self._make_invite())
            status = follow(nodes, self.children, self.link.status, self.screen)
            self.link.close()
            self.children.end(coordinator)
            self.screen.say("the nodes have ended; writing the model out…")
            text = self._use_model()
        return [
            *final_report(
                status,
                num_nodes=self.num_nodes,
                tokens_per_inner_step=spec.tokens_per_inner_step,
                seconds=time.monotonic() - began,
            ),
            f"model         {self.folder / 'model'}",
            f"logs          {self.folder / 'logs'}",
            "it writes:",
            *(f"  {line}" for line in printable(text, most=4000).splitlines()),
            "next:",
            f"  atoll sample --dir {as_typed(self.folder / 'node-1')} --prompt 'class '",
            "  atoll init my-run      # a run of your own: README.md goes on from there",
        ]

    def _start_coordinator(self, run_file: Path) -> Child:
        home = self.folder / "coordinator"
        ports = ("--port", "0", "--enrolment-port", "0")
        setup = self.children.start(
            "coordinator-init",
            _atoll("coordinator", "init", home, "--run", run_file, "--host", "127.0.0.1", *ports),
        )
        self.children.wait_for([setup], seconds=_COMMAND_SECONDS, what="setting up the coordinator")
        coordinator = self.children.start("coordinator", _atoll("coordinator", "start", home))
        self.children.wait_until(
            lambda: "watch the run: " in coordinator.log_text(),
            seconds=_COMMAND_SECONDS,
            what="starting the coordinator",
        )
        if page := re.search(r"^page: (\S+)", coordinator.log_text(), re.MULTILINE):
            self.screen.say(f"its page, while it runs: {page[1]}")
        return coordinator

    def _make_invite(self) -> str:
        output = self.folder / "logs" / "invite.txt"
        home = self.folder / "coordinator"
        create = self.children.start(
            "invite",
            _atoll("invite", "create", "--uses", str(self.num_nodes), "--dir", home),
            output=output,
        )
        self.children.wait_for([create], seconds=_COMMAND_SECONDS, what="making an invite")
        printed = output.read_text(encoding="utf-8")
        output.unlink()  # it is a secret, and used up in a moment
        if (found := INVITE.first_in(printed)) is None:
            raise BadDataError("'atoll invite create' printed no invite")
        return found

    def _start_nodes(self, invite: str) -> list[Child]:
        """Lets all nodes join at once; each starts as soon as it has joined."""
        names = [f"node-{number}" for number in range(1, self.num_nodes + 1)]
        joins = {
            name: self.children.start(
                f"{name}-join",
                _atoll("join", "--dir", self.folder / name, "--name", name),
                more_environment={"ATOLL_INVITE": invite},  # command lines are for all to read
            )
            for name in names
        }
        nodes: list[Child] = []
        for join in joins.values():
            join.may_end = True

        def all_started() -> bool:
            for name in [n for n, join in joins.items() if join.exit_code() is not None]:
                del joins[name]
                command = _atoll("node", "start", "--dir", self.folder / name, "--name", name)
                # On Ctrl-C all of them stop together: nobody would be left to commit anything.
                command += ["--drain-within", "0"]
                nodes.append(self.children.start(name, command))
            return not joins

        self.children.wait_until(all_started, seconds=_COMMAND_SECONDS, what="joining")
        self.screen.say("the nodes have joined and are starting: torch takes some seconds to load")
        return nodes

    def _use_model(self) -> str:
        """Exports the model and lets it write; both as commands, at the same time."""
        home, output = self.folder / "node-1", self.folder / "logs" / "sample.txt"
        both = [
            self.children.start("export", _atoll("export", self.folder / "model", "--dir", home)),
            self.children.start(
                "sample", _atoll("sample", "--dir", home, "--bytes", "300"), output=output
            ),
        ]
        self.children.wait_for(both, seconds=_HEAVY_COMMAND_SECONDS, what="writing the model out")
        return output.read_text(encoding="utf-8", errors="replace")
