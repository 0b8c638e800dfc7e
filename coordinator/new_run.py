"""`atoll init`, also called `atoll coordinator init`: makes a run, from its model and data to its folder."""

import errno
import re
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from coordinator.presets.cost import CongestionControl
from protocol.errors import AtollError, UsageError
from protocol.files.durable import as_typed, expanded
from protocol.terminal import console
from protocol.terminal.console import PathAtHome

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.config import Home
    from coordinator.presets.composing import NewRun
    from coordinator.presets.wanted import Wanted
    from coordinator.settings import CoordinatorConfig

_NAMED = (
    *("model", "source", "lora", "function", "data", "data_function", "private", "loop"),
    *("tokenizer", "run_file", "link", "measured"),
)
"""Where one of these is given nobody is asked."""

_OPTIMIZERS = ("adamw", "muon", "sgd")

PORTS_OF_A_RUN = 10
MOST_RUNS_HERE = 20
"""How far from the usual ports those of another run on the same machine are looked for."""

LONGEST_NAME = 63
"""Of a run."""

_BESIDE_A_RUN_FILE = (
    *("directory", "run_file", "source", "is_json"),
    *("host", "advertise", "control_port", "enrolment_port"),
)
"""What a run file says nothing of."""

_FOLDER = PathAtHome(file_okay=False, path_type=Path)
_FILE = PathAtHome(exists=True, dir_okay=False, path_type=Path)
_PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option(
    "--name",
    help="Name of the run: lower-case letters, digits and hyphens.  [default: the folder's]",
)
@click.option(
    "--model",
    metavar="NAME|FILE",
    help="0.2m, 3m, 42m, 125m, 350m, 1b or 7b; or a TOML file with a [model].  [default: 0.2m]",
)
@click.option(
    "--from",
    "source",
    metavar="FOLDER",
    type=_FOLDER,
    help="Begin with the model and the weights of a transformers folder; with --function, the folder of "
    "its code.",
)
@click.option(
    "--by",
    type=click.Choice(("decoder", "transformers")),
    help="Whose code builds the model of --from: Atoll's decoder, for every mesh, or transformers.  "
    "[default: decoder; with --lora transformers]",
)
@click.option(
    "--lora",
    metavar="RANK",
    type=click.IntRange(1, 4096),
    help="Train adapters of this rank, and leave the model of --from as it is.",
)
@click.option(
    "--function",
    metavar="MODULE:NAME",
    help="Train the torch module that a function of yours returns with its loss.",
)
@click.option("--context", type=click.IntRange(8), help="Tokens of a sample.")
@click.option(
    "--data",
    metavar="PATH",
    multiple=True,
    help="A folder of 'atoll data prepare', or text files and globs.  [default: Python's own source]",
)
@click.option(
    "--data-function",
    metavar="MODULE:NAME",
    help="Samples that a function of yours returns: two datasets, to train on and held out.",
)
@click.option(
    "--private",
    is_flag=True,
    help="Each node trains data of its own, which never leave it.",
)
@click.option(
    "--loop",
    is_flag=True,
    help="The run has no data: nodes train by loops of their own, on what these bring or make.",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    type=PathAtHome(),
    help="What private data are made into tokens with.  [default: the one of --from; else bytes]",
)
@click.option(
    "--run", "run_file", type=_FILE, help="Use this run.toml, and none of what says its contents."
)
@click.option(
    "--optimizer",
    type=click.Choice(_OPTIMIZERS),
    help="The inner optimizer; with --loop what loops train by, sgd with momentum too.  [default: muon for a "
    "new decoder, else adamw]",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Samples in an inner step of one node.  [default: by the model's size; with --from what a node "
    "like this machine holds and trains in half a minute]",
)
@click.option(
    "--link",
    metavar="RATE",
    help="What the slowest node's link carries, 100mbit or down and up as 100mbit/20mbit: the exchange "
    "is chosen for it.",
)
@click.option(
    "--measured",
    metavar="DIR",
    type=_FOLDER,
    help="Instead of --link: what a swarm has measured that runs now; DIR is its coordinator's or a "
    "node's folder.",
)
@click.option(
    "--congestion",
    type=click.Choice(get_args(CongestionControl)),
    help="TCP's congestion control on the nodes' hosts, of which 'atoll node doctor' tells.  "
    "[default: cubic, Linux's]",
)
@click.option(
    "--rtt", metavar="TIME", default="100ms", show_default=True, help="Round trip between nodes."
)
@click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(1, 10_000),
    help="How many you expect.  [default: 2; with --link 4, with --measured as many as were]",
)
@click.option("--step", metavar="TIME", help="How long an inner step takes on a node: 1.2s, 300ms.")
@click.option(
    "--speed",
    "tokens_per_second",
    metavar="TOKENS/S",
    type=click.FloatRange(min=0, min_open=True),
    help="The same as tokens a second, as 'atoll status' shows them; with --from it decides on the batch.",
)
@click.option(
    "--steps", type=click.IntRange(1, 100_000), help="Inner steps of a round, instead of a choice."
)
@click.option(
    "--total-steps",
    type=click.IntRange(1, 10**9),
    help="Inner steps of one node in the whole run, where the exchange is chosen.  [default: 10000]",
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host that invites send nodes to.  [default: this machine's address]",
)
@click.option(
    "--port",
    "control_port",
    type=_PORT,
    help="Port for nodes; 0 picks one.  [default: 7700, or beside another run 7710, …]",
)
@click.option(
    "--enrolment-port",
    type=_PORT,
    help="Port for joining; 0 picks one.  [default: the one after --port]",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def init(
    directory: Path,
    run_file: Path | None,
    host: str,
    advertise: str | None,
    control_port: int | None,
    enrolment_port: int | None,
    is_json: bool,
    **asked: Any,
) -> None:
    """Make a new run in DIR: keys, certificates, and a commented run.toml.

    The run file trains what you name on what you name. With --link its exchange fits the links and
    the nodes, and each choice is printed with its reason. On a terminal it asks for what is not named.

    \b
    Examples:
      atoll init my-run
      atoll init my-run --model 125m --data ./tokens --link 100mbit --nodes 4 --step 1.2s
      atoll init my-run --from ./SmolLM2-135M --data ./tokens
      atoll init my-run --from ./SmolLM2-135M --data ./tokens --lora 16
      atoll init my-run --from ./SmolLM2-135M --private
      atoll init my-run --function vision:model --data-function vision:data --from ./code
      atoll init my-run --function gan:model --loop --from ./code

    JSON holds the situation, every choice with its reason, and the prediction, in seconds, bytes,
    and bits per second.
    """
    from coordinator.config import require_free
    from coordinator.presets.wanted import Wanted
    from coordinator.settings import CoordinatorConfig, advertised_host

    wanted = Wanted(**asked)
    if run_file is not None:
        _refuse_beside_a_run_file(run_file)
    elif sys.stdin.isatty() and not is_json and not any(map(asked.get, _NAMED)):
        require_free(directory)  # before anybody answers questions
        wanted = _answered(wanted)
    if wanted.name is None:
        # Two runs of one owner are told apart by it, and contributors allow a run's code by it.
        wanted = replace(wanted, name=_name_of(directory))
    others: tuple[int, int] | None = None
    if control_port is None and enrolment_port is None:
        others = _ports_beside_another_run(host)
    if others is not None:
        control_port, enrolment_port = others
    config = CoordinatorConfig.new(
        host=host,
        control_port=control_port,
        enrolment_port=enrolment_port,
        advertise=advertise or advertised_host(host),
    )
    home, new = _create(directory, config, wanted, run_file)
    start = _way_to_start(directory, home, new, wanted)
    if is_json:
        console.print_json({"folder": str(directory), **_as_json(new), "start": start})
        return
    if others is not None:
        click.echo(f"the usual ports are in use here, so this run has {others[0]} and {others[1]}")
    _tell(directory, home, new, start)


def _create(
    directory: Path, config: "CoordinatorConfig", wanted: "Wanted", run_file: Path | None
) -> "tuple[Home, NewRun]":
    """Makes the run's folder, by a run file or by what is wanted."""
    from coordinator.config import create_home
    from coordinator.presets.composing import new_run
    from coordinator.presets.costly import costs_in_words
    from coordinator.presets.of_file import run_of_file
    from coordinator.presets.wanted import with_first_digest

    made: list[NewRun] = []

    def text_of(folder: Path) -> str:
        if run_file is not None:
            new = run_of_file(run_file, wanted.source, folder)
        else:
            new = new_run(wanted, folder)
        facts = with_first_digest(new.text, folder, wanted.source, new.facts)
        made.append(replace(new, facts=facts))
        return new.text

    home = create_home(directory, config=config, text=text_of)
    (new,) = made
    num_nodes = None if new.plan is None else new.plan.situation.num_nodes
    costs = map("loss: {}".format, costs_in_words(home.run, num_nodes=num_nodes))
    return home, replace(new, notes=(*new.notes, *costs))


def _answered(wanted: "Wanted") -> "Wanted":
    """What a person at the terminal says to what was not named; Enter takes the usual."""
    from coordinator.presets.composing import told_link

    click.echo("What should the run train? Enter takes what stands in brackets.")
    model = _right_answer(
        "model: a size, a TOML file, a transformers folder, or module:function of yours",
        default="0.2m",
        check=_check_model,
    )
    model = _at_home(model)
    asked = _answered_function(wanted, model) if ":" in model else _answered_model(wanted, model)
    nodes = click.prompt("nodes that you expect", default=2, type=click.IntRange(1, 10_000))
    link = wanted.link or _right_answer(
        "the slowest node's link, such as 100mbit [not said]",
        default="",
        check=lambda told: told and told_link(told),
    )
    return replace(asked, num_nodes=wanted.num_nodes or nodes, link=link or None)


def _right_answer(question: str, *, default: str, check: "Callable[[str], object]") -> str:
    """An answer that holds: one that does not is asked for again, with what is wrong."""
    while True:
        answer = str(click.prompt(question, default=default, show_default=bool(default)))
        try:
            check(answer)
            return answer
        except AtollError as error:
            click.echo(f"{error.what}; {error.next_step}", err=True)


def _check_model(answer: str) -> None:
    """Raises AtollError for what cannot be read as a model, as far as that is quick to see."""
    from coordinator.presets.composing import named_model
    from protocol.run.models import FUNCTION_NAME

    path = Path(_at_home(answer))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                f"{answer} is no folder of transformers: it has no config.json",
                next_step="name one that 'save_pretrained' has made",
            )
    elif ":" not in answer:
        named_model(str(path) if path.is_file() else answer)
    elif re.fullmatch(FUNCTION_NAME, answer) is None:
        raise UsageError(
            f"{answer} names no function", next_step="name its module and itself, as vision:model"
        )


def _answered_model(wanted: "Wanted", model: str) -> "Wanted":
    is_folder = Path(model).is_dir()
    rank = 0
    if is_folder and wanted.by != "decoder":
        rank = click.prompt(
            "rank of adapters, or 0 to train all of it", default=0, type=click.IntRange(0, 4096)
        )
    data = click.prompt(
        "data: a folder of 'atoll data prepare', text files, 'private' for each node's own, or 'loop' for "
        "what training loops bring [Python's own source]",
        default="",
        show_default=False,
    )
    is_private, is_loop = data.strip() == "private", data.strip() == "loop"
    return replace(
        wanted,
        model=None if is_folder else model,
        source=Path(model) if is_folder else None,
        lora=rank or None,
        optimizer=_answered_optimizer("adamw" if is_folder else "muon") if is_loop else None,
        data=() if is_private or is_loop else tuple(map(_at_home, data.split())),
        private=is_private,
        loop=is_loop,
    )


def _answered_function(wanted: "Wanted", function: str) -> "Wanted":
    folder = click.prompt(
        "the folder of its code [it is installed]", default="", show_default=False
    )
    data = click.prompt(
        "data: module:function, a folder of 'atoll data prepare', or 'loop' for what training loops bring"
    )
    is_function, is_loop = ":" in data, data.strip() == "loop"
    context = wanted.context
    if not (is_function or is_loop) and context is None:
        context = click.prompt("tokens of a sample", default=512, type=click.IntRange(8))
    return replace(
        wanted,
        function=function,
        source=Path(_at_home(folder)) if folder else None,
        optimizer=_answered_optimizer("adamw") if is_loop else None,
        data=() if is_function or is_loop else tuple(map(_at_home, data.split())),
        data_function=data if is_function else None,
        loop=is_loop,
        context=context,
    )


def _answered_optimizer(usual: str) -> str:
    """What loops train by: the exchange is chosen for it."""
    return str(
        click.prompt(
            "what loops train by; sgd has momentum", default=usual, type=click.Choice(_OPTIMIZERS)
        )
    )


def _ports_beside_another_run(host: str) -> tuple[int, int] | None:
    """Two that are free, where one of the usual ones is in use on this machine; None where both are free."""
    from coordinator.settings import DEFAULT_CONTROL_PORT, DEFAULT_ENROLMENT_PORT

    both = (DEFAULT_CONTROL_PORT, DEFAULT_ENROLMENT_PORT)
    for more in range(0, MOST_RUNS_HERE * PORTS_OF_A_RUN, PORTS_OF_A_RUN):
        control, enrolment = (port + more for port in both)
        if _is_free(host, control) and _is_free(host, enrolment):
            return (control, enrolment) if more else None
    return None  # the start says which is in use


def _is_free(host: str, port: int) -> bool:
    """Also where the host cannot be listened on here: the run may be started elsewhere."""
    try:
        socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _name_of(directory: Path) -> str | None:
    """The folder's name as one of a run; None where it has no letter or digit of one."""
    words = re.findall(r"[a-z0-9]+", directory.absolute().name.lower())
    return "-".join(words)[:LONGEST_NAME].rstrip("-") or None


def _at_home(path: str) -> str:
    """A path as a shell would hand it over: nobody is at a shell while questions are answered."""
    return str(expanded(path)) if path.startswith("~") else path


def _refuse_beside_a_run_file(run_file: Path) -> None:
    """Raises UsageError for an option that the run file answers."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE and name not in _BESIDE_A_RUN_FILE:
            raise UsageError(
                f"{parameter.opts[0]} {context.params[name]} has no effect with --run",
                next_step=f"write it into {run_file}, or leave --run out",
            )


def _way_to_start(directory: Path, home: "Home", new: "NewRun", wanted: "Wanted") -> dict[str, str]:
    """The command that nodes of this run start with, what one of them says more, and what comes before."""
    from coordinator.presets.composing import TO_BE_TOLD

    run, source = home.run, wanted.source
    options: list[str] = []
    if run.data.source == "loop":
        options.append("--loop")
    elif new.facts.code_digest:
        options += ["--allow-function", f"{run.run.name}@{new.facts.code_digest}"]
        if source is not None:
            options += ["--code", str(source)]
        elif new.facts.code_digest == TO_BE_TOLD:
            options += ["--code", "CODE"]
    if run.adapters is not None and run.data.source != "loop":
        options += ["--base", str(source or "MODEL")]
    if run.data.private:
        options += ["--data", "TOKENS" if run.data.source == "tokens" else "FILES"]
    found = {"nodes": shlex.join(["atoll", "node", "start", *options])}
    if run.data.private and run.data.source == "tokens":
        tokenizer = str(wanted.tokenizer or source or "TOKENIZER")
        found["before"] = shlex.join(
            ["atoll", "data", "prepare", "FILES", "--tokenizer", tokenizer, "--out", "TOKENS"]
        )
    if first := new.facts.first_weights:
        inside = directory / first
        found["first_weights"] = shlex.join(
            ["--weights", str(inside if inside.is_file() else first)]
        )
    return found


def _as_json(new: "NewRun") -> dict[str, object]:
    from coordinator.presets.view import as_json

    told: dict[str, object] = {"notes": list(new.notes)}
    if new.plan is None:
        return told
    return {**told, "step_is_assumed": new.is_step_assumed, **as_json(new.plan)}


def _tell(directory: Path, home: "Home", new: "NewRun", start: dict[str, str]) -> None:
    """What was made, why so, and what to type next."""
    from coordinator.presets.composing import ASSUMED_FLOPS

    if new.plan is not None:
        from coordinator.presets.view import show

        show(new.plan)
        if new.is_step_assumed:
            machine = new.facts.machine
            seconds = new.plan.situation.seconds_per_inner_step
            whose = (
                f"nodes of {ASSUMED_FLOPS / 1e12:.0f} TFLOP/s"
                if machine is None
                else f"nodes like this machine ({machine.name})"
            )
            click.echo(
                f"assumed: {whose}, so inner steps of {seconds:.3g} s; say what yours take with --step"
            )
    for note in new.notes:
        click.echo(note)
    click.echo(f"made {directory} for run {home.run.run.name!r}{_what_is_trained(new)}")
    click.echo(
        f"invites will send nodes to {home.config.advertise}"
        f" (to change it: advertise in {directory / 'coordinator.toml'})"
    )
    click.echo(f"next: look through {directory / 'run.toml'}, then")
    click.echo(f"  atoll coordinator start {as_typed(directory)}")
    if "before" in start:
        click.echo(f"each data holder makes tokens of its own once\n  {start['before']}")
    if start["nodes"] != "atoll node start" or "first_weights" in start:
        click.echo(f"nodes that have joined start with\n  {start['nodes']}")
    if "first_weights" in start:
        click.echo(
            f"and one of them has the first weights, which the others fetch from it:\n"
            f"  {start['nodes']} {start['first_weights']}"
        )
    if start["nodes"] not in ("atoll node start", "atoll node start --loop"):
        only = "but --weights " if "first_weights" in start else ""
        click.echo(
            f"with a training loop of its own a node needs nothing of that {only}and starts with\n"
            "  atoll node start --loop"
        )


def _what_is_trained(new: "NewRun") -> str:
    """Of a model that was looked at."""
    facts = new.facts
    if not facts.num_parameters:
        return ""
    trained = console.count_in_words(facts.num_parameters)
    if facts.num_frozen:
        trained += f" of {console.count_in_words(facts.num_in_all)}"
    given = f", beginning with the weights {facts.first_digest[:12]}" if facts.first_digest else ""
    return f": {trained} parameters{given}"
