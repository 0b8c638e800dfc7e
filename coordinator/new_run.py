"""`atoll init`, also called `atoll coordinator init`: makes a run, from its model and data to its folder."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from coordinator.presets.link_shares import CongestionControl
from protocol import console
from protocol.errors import UsageError

if TYPE_CHECKING:
    from coordinator.presets.composing import NewRun, Wanted

_NAMED = ("model", "source", "data", "run_file", "link", "measured")
"""Where one of these is given nobody is asked."""

_BESIDE_A_RUN_FILE = (
    *("directory", "run_file", "source", "is_json"),
    *("host", "advertise", "control_port", "enrolment_port"),
)
"""What a run file says nothing of."""

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option("--name", help="Name of the run: lower-case letters, digits and hyphens.")
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
    help="Begin with the model and the weights of a transformers folder; with --run, the folder of its "
    "functions.",
)
@click.option(
    "--by",
    type=click.Choice(("decoder", "transformers")),
    default="decoder",
    show_default=True,
    help="Whose code builds the model of --from: Atoll's decoder, for every mesh, or transformers.",
)
@click.option("--context", type=click.IntRange(8), help="Tokens of a sample.")
@click.option(
    "--data",
    metavar="PATH",
    multiple=True,
    help="A folder of 'atoll data prepare', or text files and globs.  [default: Python's own source]",
)
@click.option(
    "--run", "run_file", type=_FILE, help="Use this run.toml, and none of what says its contents."
)
@click.option(
    "--optimizer",
    type=click.Choice(("adamw", "muon")),
    help="The inner optimizer.  [default: adamw, with advice]",
)
@click.option("--batch", type=click.IntRange(1), help="Samples in an inner step of one node.")
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
    help="The same as tokens a second, as 'atoll status' shows them.",
)
@click.option(
    "--steps", type=click.IntRange(1, 100_000), help="Inner steps of a round, instead of a choice."
)
@click.option(
    "--total-steps",
    type=click.IntRange(1, 10**9),
    default=10_000,
    show_default=True,
    help="Inner steps of one node in the whole run, where the exchange is chosen.",
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host that invites send nodes to.  [default: this machine's address]",
)
@click.option(
    "--port", "control_port", type=_PORT, help="Port for nodes; 0 picks one.  [default: 7700]"
)
@click.option(
    "--enrolment-port", type=_PORT, help="Port for joining; 0 picks one.  [default: 7701]"
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

    JSON holds the situation, every choice with its reason, and the prediction, in seconds, bytes,
    and bits per second.
    """  # noqa: D301 - click reads the character \b, not its two letters
    from coordinator.config import CoordinatorConfig, advertised_host, create_home
    from coordinator.presets.composing import Wanted, new_run, run_of_file

    wanted = Wanted(**asked)
    if run_file is not None:
        _refuse_beside_a_run_file(run_file)
        new = run_of_file(run_file, wanted.source)
    elif sys.stdin.isatty() and not is_json and not any(map(asked.get, _NAMED)):
        new = new_run(_answered(wanted))
    else:
        new = new_run(wanted)
    home = create_home(
        directory,
        config=CoordinatorConfig.checked(
            host=host,
            control_port=control_port,
            enrolment_port=enrolment_port,
            advertise=advertise or advertised_host(host),
        ),
        text=new.text,
        finish=_describing(new),
    )
    if is_json:
        console.print_json({"folder": str(directory), **_as_json(new)})
        return
    _tell(directory, home.config.advertise, home.run.run.name, new)


def _answered(wanted: "Wanted") -> "Wanted":
    """What a person at the terminal says to what was not named; Enter takes the usual."""
    click.echo("What should the run train? Enter takes what stands in brackets.")
    model = click.prompt("model: a size, a TOML file, or a transformers folder", default="0.2m")
    is_folder = Path(model).is_dir()
    data = click.prompt("data: a folder of 'atoll data prepare', or text files", default="")
    nodes = click.prompt("nodes that you expect", default=2, type=click.IntRange(1, 10_000))
    link = wanted.link or click.prompt("the slowest node's link, such as 100mbit", default="")
    return replace(
        wanted,
        model=None if is_folder else model,
        source=Path(model) if is_folder else None,
        data=tuple(data.split()),
        num_nodes=wanted.num_nodes or nodes,
        link=link or None,
    )


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


def _describing(new: "NewRun") -> Callable[[Path], None] | None:
    """What completes the folder of a run whose model or first weights have to be looked at."""
    from coordinator.presets.composing import of_nodes_side

    if new.source is None and not new.needs_building:
        return None
    given = () if new.source is None else ("--from", str(new.source))
    return lambda folder: click.echo(of_nodes_side("describe", str(folder), *given), nl=False)


def _as_json(new: "NewRun") -> dict[str, object]:
    from coordinator.presets.view import as_json

    told: dict[str, object] = {"notes": list(new.notes)}
    if new.plan is None:
        return told
    return {**told, "step_is_assumed": new.is_step_assumed, **as_json(new.plan)}


def _tell(directory: Path, advertise: str, name: str, new: "NewRun") -> None:
    """What was made, why so, and what to type next."""
    from coordinator.presets.composing import ASSUMED_FLOPS

    if new.plan is not None:
        from coordinator.presets.view import show

        show(new.plan)
        if new.is_step_assumed:
            seconds = new.plan.situation.seconds_per_inner_step
            click.echo(
                f"assumed: nodes of {ASSUMED_FLOPS / 1e12:.0f} TFLOP/s, so inner steps of {seconds:.3g} s; "
                "say what yours take with --step"
            )
    for note in new.notes:
        click.echo(note)
    click.echo(f"made {directory} for run {name!r}")
    click.echo(
        f"invites will send nodes to {advertise}"
        f" (to change it: advertise in {directory / 'coordinator.toml'})"
    )
    click.echo(f"next: look through {directory / 'run.toml'}, then")
    click.echo(f"  atoll coordinator start {directory}")
