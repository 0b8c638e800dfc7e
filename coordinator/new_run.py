"""`atoll init`: a run file for a model, its links and its nodes, with the exchange that fits them."""

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from coordinator.presets.link_shares import CUBIC, CongestionControl
from protocol import console
from protocol.errors import CannotCreateError, ConfigError, UsageError

if TYPE_CHECKING:
    from coordinator.presets.cost import Situation
    from coordinator.presets.measured_links import MeasuredLinks
    from coordinator.presets.model_sizes import NamedModel
    from coordinator.presets.toml_edit import Place

ASSUMED_FLOPS = 50e12
"""What one GPU of today achieves, by 6 operations for each parameter and token."""

LEAST_ASSUMED_STEP_SECONDS = 0.05

USUAL_NODES = 4

HEADER = """\
# The run: what is trained, on what, how, and by which rules. Written by 'atoll init' for the links and
# nodes named below; "chosen" stands above what was chosen for them, all else is the usual value.
# Every node works by this file and every round carries its digest: change it before the first
# 'atoll coordinator start', never after.
"""


@click.command()
@click.option(
    "--model",
    "model_name",
    metavar="NAME|FILE",
    default="0.2m",
    show_default=True,
    help="0.2m, 3m, 42m, 125m, 350m, 1b or 7b; or a TOML file with a [model].",
)
@click.option(
    "--link",
    metavar="RATE",
    help="What the slowest node's link carries: 100mbit, or down and up as 100mbit/20mbit.",
)
@click.option(
    "--measured",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
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
    type=click.IntRange(2, 10_000),
    help="How many you expect.  [default: 4, or as many as were measured]",
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
    help="Inner steps of one node in the whole run.",
)
@click.option("--name", default="my-run", show_default=True, help="Name of the run.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("run.toml"),
    show_default=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def init(
    model_name: str,
    link: str | None,
    measured: Path | None,
    congestion: CongestionControl | None,
    rtt: str,
    num_nodes: int | None,
    step: str | None,
    tokens_per_second: float | None,
    steps: int | None,
    total_steps: int,
    name: str,
    out: Path,
    force: bool,
    is_json: bool,
) -> None:
    """Write a run file whose exchange fits a model, its links and its nodes, and say why.

    \b
    Example:
      atoll init --model 125m --link 100mbit --nodes 4 --step 1.2s

    'atoll coordinator init DIR --run FILE' makes a run of it. JSON holds the situation, every
    choice with its reason, and the prediction, in seconds, bytes, and bits per second.
    """  # noqa: D301 - click reads the character \b, not its two letters
    from coordinator.presets.choosing import chosen
    from coordinator.presets.cost import Situation
    from coordinator.presets.view import as_json, show
    from protocol.files import write_atomically

    if out.exists() and not force:
        raise CannotCreateError(
            f"{out} exists already", next_step="choose another with --out, or add --force"
        )
    if step is not None and tokens_per_second is not None:
        raise UsageError(
            f"--step {step} and --speed {tokens_per_second:g} say the same thing twice",
            next_step="leave one of them out",
        )
    if (link is None) == (measured is None):
        raise UsageError(
            "what links carry is not told" if link is None else "--link and --measured both tell",
            next_step="give --link 100mbit, or --measured DIR with the folder of a swarm that runs",
        )
    if measured is not None and congestion is not None:
        raise UsageError(
            f"--congestion {congestion} says nothing beside --measured: those rates are what exchanges "
            "achieved with it",
            next_step="leave one of them out",
        )
    named, left_out = _model_of(model_name)
    found = None if measured is None else _measured(measured)
    if found is not None:
        down, up = found.down_bits_per_second, found.up_bits_per_second
    else:
        assert link is not None
        down, up = _told_link(link)
    round_trip = _span(rtt, "--rtt", may_be_zero=True)
    if step is not None:
        seconds = _span(step, "--step", may_be_zero=False)
    elif tokens_per_second is not None:
        seconds = named.tokens_per_inner_step / tokens_per_second
    else:
        seconds = _assumed_step_seconds(named)
    situation = Situation(
        num_parameters=named.num_parameters,
        num_layers=named.model.num_layers,
        num_nodes=num_nodes or (USUAL_NODES if found is None else max(2, found.num_nodes)),
        down_bits_per_second=down,
        up_bits_per_second=up,
        round_trip_seconds=round_trip,
        seconds_per_inner_step=seconds,
        total_steps=total_steps,
        congestion_control=congestion or CUBIC if found is None else None,
    )
    given: dict[Place, object] = {} if steps is None else {("inner", "steps"): steps}
    plan = chosen(situation, given)
    if plan.is_too_short:
        raise UsageError(
            f"--steps {steps} are more than --total-steps {total_steps}",
            next_step="give fewer of the first or more of the second",
        )
    values = {
        (choice.table, choice.key): (choice.value, "" if choice.is_given else choice.reason)
        for choice in plan.choices
    }
    text = _text(named, situation, name=name, values=values)
    write_atomically(out, text.encode())
    is_assumed = step is None and tokens_per_second is None
    advice = "; ".join(filter(None, (left_out, "" if found is None else found.advice)))
    if is_json:
        console.print_json(
            {
                "file": str(out),
                "model": model_name,
                "step_is_assumed": is_assumed,
                "advice": advice,
                **as_json(plan),
            }
        )
        return
    show(plan)
    if is_assumed:
        click.echo(
            f"assumed: nodes of {ASSUMED_FLOPS / 1e12:.0f} TFLOP/s, so inner steps of {seconds:.3g} s; "
            "say what yours take with --step"
        )
    if advice:
        click.echo(advice)
    click.echo(f"\nwrote {out}; next: look through it, then")
    click.echo(f"  atoll coordinator init DIR --run {out}")


def _model_of(name: str) -> tuple["NamedModel", str]:
    """A size by its name, or the [model] of a file with the batch and rate of the nearest size.

    And in words what else the file says, none of which is taken.
    """
    from dataclasses import replace

    from coordinator.presets.model_sizes import NAMED_MODELS
    from protocol.run_spec import load_run_file

    if (named := NAMED_MODELS.get(name.lower())) is not None:
        return named, ""
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"--model {name!r} is neither a size nor a file",
            next_step=f"choose one of {', '.join(NAMED_MODELS)}, or a TOML file with a [model]",
        )
    spec = load_run_file(path)
    if "model" not in spec.model_fields_set:
        raise ConfigError(
            f"{name} has no [model]", next_step="write one, or choose a size: --model 125m"
        )
    size = spec.num_parameters
    nearest = min(
        NAMED_MODELS.values(),
        key=lambda other: max(size, other.num_parameters) / min(size, other.num_parameters),
    )
    others = [f"[{table}]" for table in sorted(spec.model_fields_set) if table != "model"]
    left_out = (
        f"of {name} only [model] is taken, not {', '.join(others)}: for a preset in that file write "
        'preset = "auto" and link into its [exchange]'
    )
    return replace(nearest, model=spec.decoder), left_out if others else ""


def _told_link(text: str) -> tuple[float, float]:
    """Bits per second down and up."""
    from coordinator.presets.settling import link_of

    try:
        return link_of(text, origin="--link")
    except ConfigError as error:
        raise UsageError(error.what, next_step=error.next_step) from error


def _measured(folder: Path) -> "MeasuredLinks":
    from coordinator.presets.measured_links import measured_links
    from protocol.query import StatusLink

    with StatusLink(folder) as asked:
        return measured_links(asked.status().nodes)


def _span(text: str, option: str, *, may_be_zero: bool) -> float:
    from coordinator.presets.settling import span_of

    try:
        return span_of(text, origin=option, may_be_zero=may_be_zero)
    except ConfigError as error:
        raise UsageError(error.what, next_step=error.next_step) from error


def _assumed_step_seconds(named: "NamedModel") -> float:

    operations = 6 * named.num_parameters * named.tokens_per_inner_step
    return max(LEAST_ASSUMED_STEP_SECONDS, operations / ASSUMED_FLOPS)


def _text(
    named: "NamedModel",
    situation: "Situation",
    *,
    name: str,
    values: "dict[Place, tuple[str | int | float, str]]",
) -> str:
    """The template with all values in their places, checked as a coordinator would."""
    import tomllib

    from coordinator.config import run_text
    from coordinator.presets.toml_edit import with_values
    from protocol.run_spec import validated

    usual = {
        ("model", key): (value, "")
        for key, value in named.model.model_dump(exclude_none=True).items()
    }
    usual |= {
        ("run", "min_nodes"): (situation.num_nodes, ""),
        ("inner", "batch"): (named.batch, ""),
        ("inner", "learning_rate"): (named.learning_rate, ""),
    }
    _, _, tables = run_text(name=name, run_file=None).partition("\n\n")
    text = with_values(f"{HEADER}\n{tables}", {**usual, **values})
    validated(tomllib.loads(text), origin="the new run file")
    return text
