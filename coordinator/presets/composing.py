"""The text of a new run's file: what is named, what is chosen for it, and the usual values.

What is known of models and tokens only on the node's side (a transformers folder, a manifest, first
weights) is asked of a process of that side: nothing here imports torch.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.config import run_text
from coordinator.presets.choosing import Plan, chosen
from coordinator.presets.cost import Situation
from coordinator.presets.link_shares import CUBIC, CongestionControl
from coordinator.presets.model_sizes import NAMED_MODELS, NamedModel
from coordinator.presets.settling import link_of, settled_run_file, span_of
from coordinator.presets.toml_edit import Place, with_values
from protocol.errors import ConfigError, UsageError
from protocol.models import BYTES_VOCABULARY
from protocol.run_spec import load_run_file, validated

if TYPE_CHECKING:
    from coordinator.presets.measured_links import MeasuredLinks

ASSUMED_FLOPS = 50e12
"""What one GPU of today achieves, by 6 operations for each parameter and token."""

LEAST_ASSUMED_STEP_SECONDS = 0.05

USUAL_NODES = 4

CONTINUED_SHARE = 5
"""Given weights are trained on at this part of the rate that a new model of their size takes: usual are
a third to a tenth, and none was measured here."""

MUON_RATE = 2.4e-2
"""The best of five for the demo's model, eight times AdamW's (benchmarks.inner_optimizers)."""

HEADER = """\
# The run: what is trained, on what, how, and by which rules. Written by 'atoll init' for what was named
# to it; "chosen" stands above what was chosen for that, all else is the usual value.
# Every node works by this file and every round carries its digest: change it before the first
# 'atoll coordinator start', never after.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a new run is asked to be: the options that a run file would answer as well."""

    name: str | None = None
    model: str | None = None
    source: Path | None = None
    by: str = "decoder"
    context: int | None = None
    data: tuple[str, ...] = ()
    optimizer: str | None = None
    batch: int | None = None
    link: str | None = None
    measured: Path | None = None
    congestion: CongestionControl | None = None
    rtt: str = "100ms"
    num_nodes: int | None = None
    step: str | None = None
    tokens_per_second: float | None = None
    steps: int | None = None
    total_steps: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """The run file's text, what was chosen for it, and what a person should know of both."""

    text: str
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    source: Path | None = None  # where its first weights come from
    is_step_assumed: bool = False

    @property
    def needs_building(self) -> bool:
        """Whether the model's tensors are known only once it was built."""
        return bool(tomllib.loads(self.text).get("model", {}).get("source", "decoder") != "decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the node's side says of a model and of data: tables of the run file, and sizes."""

    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int = 0  # of the model, where one was asked about
    num_layers: int = 0
    model_vocab_size: int = 0  # likewise
    vocab_size: int | None = None  # of the data's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is trained, and what usually goes with its size."""

    model: Mapping[str, Any]
    num_parameters: int
    num_layers: int
    batch: int
    learning_rate: float

    @property
    def tokens_per_inner_step(self) -> int:
        """Of one node."""
        return self.batch * int(self.model["context"])


def of_nodes_side(*arguments: str) -> str:
    """What 'atoll node …' prints. What it refuses it has said itself, and its exit code is ours."""
    ended = subprocess.run(
        [sys.executable, "-m", "protocol.cli", "node", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        sys.exit(ended.returncode)
    return ended.stdout


def run_of_file(run_file: Path, source: Path | None) -> NewRun:
    """A run file that somebody wrote, with its preset answered if it asks for one."""
    settled = settled_run_file(run_file)
    if settled is None:
        return NewRun(text=run_text(name=None, run_file=run_file), source=source)
    return NewRun(text=settled.text, plan=settled.plan, source=source)


def new_run(wanted: Wanted) -> NewRun:
    """The template with what is named and chosen in its places, checked as a coordinator would."""
    _refuse_what_says_nothing(wanted)
    facts = _facts_of(wanted)
    trained, note = _trained(wanted, facts)
    values: dict[Place, tuple[Any, str]] = {
        ("data", key): (value, "") for key, value in facts.data.items()
    }
    if wanted != Wanted(name=wanted.name, num_nodes=wanted.num_nodes):
        values |= {("model", key): (value, "") for key, value in trained.model.items()}
        values[("inner", "batch")] = (trained.batch, "")
        values[("inner", "learning_rate")] = _learning_rate(wanted, trained)
    if wanted.optimizer == "muon":
        values[("inner", "optimizer")] = ("muon", "")
        values[("inner", "muon_learning_rate")] = (MUON_RATE, "the best for the demo's model")
    if wanted.num_nodes is not None:
        values[("run", "min_nodes")] = (wanted.num_nodes, "")
    if wanted.steps is not None:
        values[("inner", "steps")] = (wanted.steps, "")
    notes = [note, _advice_on_optimizer(wanted)]
    plan = None
    if wanted.link is not None or wanted.measured is not None:
        plan, advice = _planned(wanted, trained)
        notes.append(advice)
        values[("run", "min_nodes")] = (plan.situation.num_nodes, "")
        values |= {
            (choice.table, choice.key): (choice.value, "" if choice.is_given else choice.reason)
            for choice in plan.choices
        }
    text = run_text(name=wanted.name, run_file=None)
    if values:
        _, _, tables = text.partition("\n\n")
        if trained.model.get("source") == "transformers":
            tables = _with_other_model(tables)
        # Of tokens what is held out was settled when they were made.
        retired = {("data", "held_out")} if facts.data.get("source") == "tokens" else set()
        text = with_values(f"{HEADER}\n{tables}", values, retired=retired)
        validated(tomllib.loads(text), origin="the new run file")
    return NewRun(
        text=text,
        plan=plan,
        notes=tuple(filter(None, notes)),
        source=wanted.source,
        is_step_assumed=wanted.step is None and wanted.tokens_per_second is None,
    )


def _with_other_model(tables: str) -> str:
    """The template without the decoder's sizes."""
    table = (
        "[model]\n"
        'source = "transformers"     # built by transformers, from the config in description.json\n'
        "context = 128               # tokens of a sample\n\n"
    )
    return re.sub(r"(?ms)^\[model\]\n.*?(?=^\[data\])", table, tables)


def _refuse_what_says_nothing(wanted: Wanted) -> None:
    """Raises UsageError for what says one thing twice, or has no effect."""
    if wanted.model is not None and wanted.source is not None:
        raise UsageError(
            f"--model {wanted.model} and --from {wanted.source} both say what is trained",
            next_step="leave one of them out",
        )
    if wanted.by != "decoder" and wanted.source is None:
        raise UsageError(
            f"--by {wanted.by} has no effect without a model of transformers",
            next_step="name its folder with --from",
        )
    if wanted.step is not None and wanted.tokens_per_second is not None:
        raise UsageError(
            f"--step {wanted.step} and --speed {wanted.tokens_per_second:g} say the same thing twice",
            next_step="leave one of them out",
        )
    if wanted.link is not None and wanted.measured is not None:
        raise UsageError(
            "--link and --measured both tell what links carry", next_step="leave one of them out"
        )
    if wanted.measured is not None and wanted.congestion is not None:
        raise UsageError(
            f"--congestion {wanted.congestion} says nothing beside --measured: those rates are what "
            "exchanges achieved with it",
            next_step="leave one of them out",
        )
    if wanted.link is None and wanted.measured is None:
        for option, value in (
            ("--step", wanted.step),
            ("--speed", wanted.tokens_per_second),
            ("--congestion", wanted.congestion),
        ):
            if value is not None:
                raise UsageError(
                    f"{option} {value} has no effect while nothing is chosen for a link",
                    next_step="add --link 100mbit, or --measured DIR with the folder of a swarm that runs",
                )


def _facts_of(wanted: Wanted) -> Facts:
    """Asked of the node's side only where files have to be read that are its business."""
    arguments = [f"--data={path}" for path in wanted.data]
    if wanted.source is not None:
        arguments += ["--from", str(wanted.source), "--by", wanted.by]
        if wanted.context is not None:
            arguments += ["--context", str(wanted.context)]
    return Facts(**json.loads(of_nodes_side("facts", *arguments))) if arguments else Facts()


def _trained(wanted: Wanted, facts: Facts) -> tuple[Trained, str]:
    """What is trained, and in words what else the file says that names it: none of that is taken."""
    if wanted.source is not None:
        _require_tokens(wanted.source, facts)
        usual = _nearest_to(facts.num_parameters)
        return Trained(
            model=facts.model,
            num_parameters=facts.num_parameters,
            num_layers=facts.num_layers,
            batch=wanted.batch or usual.batch,
            learning_rate=usual.learning_rate,
        ), ""
    named, note = _named(wanted.model or "0.2m")
    changes = {"context": wanted.context, "vocab_size": facts.vocab_size}
    tables = named.model.model_dump(exclude_none=True)
    tables |= {key: value for key, value in changes.items() if value is not None}
    named = NamedModel(
        model=type(named.model).model_validate(tables),
        batch=wanted.batch or named.batch,
        learning_rate=named.learning_rate,
    )
    return Trained(
        model=tables,
        num_parameters=named.num_parameters,
        num_layers=named.model.num_layers,
        batch=named.batch,
        learning_rate=named.learning_rate,
    ), note


def _require_tokens(source: Path, facts: Facts) -> None:
    """Raises UsageError for a model of tokens that would be trained on bytes."""
    if facts.data.get("source") != "tokens" and facts.model_vocab_size != BYTES_VOCABULARY:
        raise UsageError(
            f"the model in {source} is one of tokens, and no --data names any",
            next_step=f"make them once: atoll data prepare TEXT… --tokenizer {source} --out tokens; "
            "then add --data tokens",
        )
    if (facts.vocab_size or 0) > facts.model_vocab_size:
        raise UsageError(
            f"the data have {facts.vocab_size} different tokens, and the model in {source} "
            f"{facts.model_vocab_size}",
            next_step=f"make the tokens with its own tokenizer: atoll data prepare … --tokenizer {source}",
        )


def _named(name: str) -> tuple[NamedModel, str]:
    """A size by its name, or the [model] of a file with the batch and rate of the nearest size."""
    if (named := NAMED_MODELS.get(name.lower())) is not None:
        return named, ""
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"--model {name!r} is neither a size nor a file",
            next_step=f"choose one of {', '.join(NAMED_MODELS)}, or a TOML file with a [model]; "
            "a transformers folder is named with --from",
        )
    spec = load_run_file(path)
    if "model" not in spec.model_fields_set:
        raise ConfigError(
            f"{name} has no [model]", next_step="write one, or choose a size: --model 125m"
        )
    others = [f"[{table}]" for table in sorted(spec.model_fields_set) if table != "model"]
    left_out = (
        f"of {name} only [model] is taken, not {', '.join(others)}: to use all of it, --run {name}"
    )
    usual = _nearest_to(spec.num_parameters)
    named = NamedModel(model=spec.decoder, batch=usual.batch, learning_rate=usual.learning_rate)
    return named, left_out if others else ""


def _nearest_to(num_parameters: int) -> NamedModel:
    return min(
        NAMED_MODELS.values(),
        key=lambda named: (
            max(num_parameters, named.num_parameters) / min(num_parameters, named.num_parameters)
        ),
    )


def _learning_rate(wanted: Wanted, trained: Trained) -> tuple[float, str]:
    if wanted.source is None:
        return trained.learning_rate, ""
    why = "a fifth of a new model's of this size, for the weights are given"
    return float(f"{trained.learning_rate / CONTINUED_SHARE:.2g}"), why


def _advice_on_optimizer(wanted: Wanted) -> str:
    """Muon where it was measured to end lower: for new models, at equal steps."""
    if wanted.optimizer is not None or wanted.source is not None or wanted.model is None:
        return ""
    return (
        "advice: with --optimizer muon the demo's model ended at 1.70 nats a byte after equal steps, with "
        "adamw at 1.98; larger models and the time of its steps were not measured"
    )


def _planned(wanted: Wanted, trained: Trained) -> tuple[Plan, str]:
    """The exchange for the links, and what measured ones advise."""
    if wanted.num_nodes == 1:
        raise UsageError(
            "--nodes 1: an exchange takes two nodes",
            next_step="give --nodes 2 or more, or no --link",
        )
    found = None if wanted.measured is None else _measured(wanted.measured)
    down, up = (
        _told_link(wanted.link)
        if found is None
        else (
            found.down_bits_per_second,
            found.up_bits_per_second,
        )
    )
    situation = Situation(
        num_parameters=trained.num_parameters,
        num_layers=trained.num_layers,
        num_nodes=wanted.num_nodes or (USUAL_NODES if found is None else max(2, found.num_nodes)),
        down_bits_per_second=down,
        up_bits_per_second=up,
        round_trip_seconds=_span(wanted.rtt, "--rtt", may_be_zero=True),
        seconds_per_inner_step=_step_seconds(wanted, trained),
        total_steps=wanted.total_steps,
        congestion_control=wanted.congestion or CUBIC if found is None else None,
    )
    plan = chosen(situation, {} if wanted.steps is None else {("inner", "steps"): wanted.steps})
    if plan.is_too_short:
        raise UsageError(
            f"--steps {wanted.steps} are more than --total-steps {wanted.total_steps}",
            next_step="give fewer of the first or more of the second",
        )
    return plan, "" if found is None else found.advice


def _step_seconds(wanted: Wanted, trained: Trained) -> float:
    if wanted.step is not None:
        return _span(wanted.step, "--step", may_be_zero=False)
    if wanted.tokens_per_second is not None:
        return trained.tokens_per_inner_step / wanted.tokens_per_second
    operations = 6 * trained.num_parameters * trained.tokens_per_inner_step
    return max(LEAST_ASSUMED_STEP_SECONDS, operations / ASSUMED_FLOPS)


def _told_link(text: str | None) -> tuple[float, float]:
    """Bits per second down and up."""
    assert text is not None
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
    try:
        return span_of(text, origin=option, may_be_zero=may_be_zero)
    except ConfigError as error:
        raise UsageError(error.what, next_step=error.next_step) from error
