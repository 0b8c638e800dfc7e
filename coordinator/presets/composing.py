"""The text of a new run's file: what is named, what is chosen for it, and the usual values and models.

What may be named and what the node's side knows of it is coordinator.presets.wanted's business.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.config import run_text
from coordinator.presets.choosing import FEW_NODES, Plan, chosen, often_steps
from coordinator.presets.cost import CUBIC, Situation
from coordinator.presets.loss import most_fragments
from coordinator.presets.reasons import NO_MOMENTUM, OFTEN
from coordinator.presets.settling import Place, link_of, span_of, with_values
from coordinator.presets.wanted import (
    TOTAL_STEPS,
    Facts,
    Machine,
    Wanted,
    facts_of_wanted,
    refuse_what_says_nothing,
)
from protocol.errors import ConfigError, NoInputError, UsageError
from protocol.run.models import DecoderModel, TensorShape, fragment_sizes
from protocol.run.run_files import description_beside, load_run_file, validated
from protocol.run.run_spec import RunSpec
from protocol.terminal.console import count_in_words

if TYPE_CHECKING:
    from coordinator.presets.advising import MeasuredLinks


# Decoders by name, with the batch and the rate that go with their size.
#
# Learning rates of 125m and above are those of GPT-3 (Brown et al. 2020, table 2.1); 0.2m is the model of
# the demo and of the template, with their batch and rate. Those between are in between, and not tried.
#
# Muon's steps are scaled to the size of AdamW's, so that AdamW's rates suit it (Liu et al. 2025, "Muon is
# Scalable for LLM Training"); how much higher both may be beside each other was tried with the demo's model.


MUON_TIMES, BESIDE_MUON_TIMES = 1.2, 5.0
"""Muon's rate on matrices, and AdamW's on all else then, in multiples of AdamW's on everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model and what usually goes with its size."""

    model: DecoderModel
    batch: int  # samples of one node in an inner step
    learning_rate: float  # AdamW's, at its peak

    @property
    def tokens_per_inner_step(self) -> int:
        """Of one node."""
        return self.batch * self.model.context

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(tensor.num_elements for tensor in self.model.tensors())


def _named(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, context: int, batch: int, rate: float
) -> NamedModel:
    model = DecoderModel(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        ffn_size=ffn,
        context=context,
        qk_norm=True,
    )
    return NamedModel(model=model, batch=batch, learning_rate=rate)


NAMED_MODELS: Mapping[str, NamedModel] = {
    "0.2m": _named(64, 3, 4, 2, 192, 128, 8, 1e-2),
    "3m": _named(192, 8, 6, 6, 480, 256, 32, 2e-3),
    "42m": _named(512, 14, 8, 8, 1360, 512, 64, 1e-3),
    "125m": _named(768, 18, 12, 12, 2048, 1024, 64, 6e-4),
    "350m": _named(1024, 28, 16, 16, 2736, 1024, 128, 3e-4),
    "1b": _named(2048, 20, 16, 16, 5504, 2048, 128, 2e-4),
    "7b": _named(4096, 35, 32, 32, 11008, 2048, 256, 1.2e-4),
}


ASSUMED_FLOPS = 50e12
"""What one GPU of today achieves, by 6 operations for each parameter and token."""

ASSUMED_CORE_FLOPS = 50e9
"""The same of a CPU's core; 60e9 were measured with SmolLM2-135M (docs/models-and-data.md)."""

LEAST_ASSUMED_STEP_SECONDS = 0.05

MOST_STEP_SECONDS = 30.0
"""What an inner step may take where its batch is chosen for a machine: leases, deadlines and losses are
told by the step."""

USUAL_NODES = 4
USUAL_FUNCTION_BATCH = 8

SGD_RATE = 0.1
"""Of residual networks (He et al. 2016, "Deep Residual Learning for Image Recognition", section 3.4)."""

CONTINUED_SHARE = 5
"""Given weights are trained on at this part of the rate that a new model of their size takes: usual are
a third to a tenth, and none was measured here."""

ADAPTERS_TIMES = 10
"""Adapters are trained at so many times the rate of the whole ("LoRA without regret", Schulman et al. 2025);
not measured here."""

MEAN_OF_PRIVATE = 'late in a run "agreeing" leaves out what only one node has data to learn from'
WHO_HOLDS_PRIVATE = (
    "private data: nobody can check what a holder trains, and in the plain mean a lie counts like work, "
    "up to twice the usual norm: invite holders that you trust, or 'atoll run amend outer.merge=agreeing'"
)

TO_BE_TOLD = "DIGEST"
"""Of a fork's code, which is not here: a node that was not allowed to run it says the digest."""

HEADER = """\
# The run: what is trained, on what, how, and by which rules. Written by 'atoll init' for what was named
# to it; "chosen" stands above what was chosen for that, all else is the usual value.
# Every node works by this file and every round carries its digest: change it before the first
# 'atoll coordinator start', never after.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """The run file's text, what was chosen for it, and what a person should know of both."""

    text: str
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    facts: Facts = field(default_factory=Facts)
    is_step_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is trained, and what usually goes with its size."""

    facts: Facts  # with the model and its sizes
    batch: int
    learning_rate: float
    why_batch: str = ""

    @property
    def tokens_per_inner_step(self) -> int:
        """Of one node."""
        return self.batch * int(self.facts.model["context"])


def new_run(wanted: Wanted, folder: Path) -> NewRun:
    """The template with what is named and chosen in its places, checked as a coordinator would.

    Where it begins with a model of somebody's, that is described in `folder`, the run's to be.
    """
    text = run_text(name=wanted.name)
    refuse_what_says_nothing(wanted)
    if wanted.link is not None:  # before a model is read
        told_link(wanted.link)
    facts = facts_of_wanted(wanted, folder)
    trained, note = _trained(wanted, facts)
    values: dict[Place, tuple[Any, str]] = {
        ("data", key): (value, "") for key, value in facts.data.items()
    }
    if wanted != Wanted(name=wanted.name, num_nodes=wanted.num_nodes):
        values |= {("model", key): (value, "") for key, value in trained.facts.model.items()}
        values[("inner", "batch")] = (trained.batch, trained.why_batch)
        values |= _inner(wanted, trained)
    if wanted.lora is not None:
        values[("lora", "rank")] = (wanted.lora, "")
    if wanted.num_nodes is not None:
        values[("run", "min_nodes")] = (wanted.num_nodes, "")
    if wanted.steps is not None:
        values[("inner", "steps")] = (wanted.steps, "")
    goes_on_by_adamw = facts.has_loaded and values[("inner", "optimizer")][0] == "adamw"
    # With weights that are given momentum ends lower, however often is exchanged (reasons.WEIGHTS).
    often = often_steps(wanted.num_nodes or FEW_NODES, _optimizer_of(wanted))
    if wanted.steps is not None and wanted.steps <= often and not goes_on_by_adamw:
        values |= {
            ("outer", "optimizer"): ("sgd", OFTEN),
            ("outer", "learning_rate"): (1.0, OFTEN),
            ("outer", "momentum"): (0.0, NO_MOMENTUM),
        }
    if wanted.private:
        values[("outer", "merge")] = ("mean", MEAN_OF_PRIVATE)
    notes = [note, *facts.notes, *([WHO_HOLDS_PRIVATE] if wanted.private else [])]
    if trained.why_batch:
        notes.append(f"batch {trained.batch}: {trained.why_batch}")
    plan = None
    if wanted.link is not None or wanted.measured is not None:
        plan, advice = _planned(wanted, trained, _tensors(trained.facts, folder))
        notes.append(advice)
        values[("run", "min_nodes")] = (plan.situation.num_nodes, "")
        values |= {
            (choice.table, choice.key): (choice.value, "" if choice.is_given else choice.reason)
            for choice in plan.choices
        }
    if values:
        _, _, tables = text.partition("\n\n")
        tables = _with_source(tables, trained.facts.model.get("source", "decoder"))
        if wanted.loop:
            tables = _of_loops(tables, has_adapters=wanted.lora is not None)
        # Of tokens what is held out was settled when they were made.
        retired = {("data", "held_out")} if facts.data.get("source") == "tokens" else set()
        if values.get(("inner", "optimizer"), ("muon",))[0] != "muon":
            retired |= {("inner", "muon_learning_rate")}
        text = with_values(f"{HEADER}\n{tables}", values, retired=retired)
        spec = validated(tomllib.loads(text), origin="the new run file")
        notes.append(_share_of_data(spec, facts))
    return NewRun(
        text=text,
        plan=plan,
        notes=tuple(filter(None, notes)),
        facts=facts,
        is_step_assumed=wanted.step is None and wanted.tokens_per_second is None,
    )


_OTHER_MODELS = {
    "transformers": """\
[model]
source = "transformers"     # built by transformers, from the config in description.json
context = 128               # tokens of a sample

""",
    "function": """\
[model]
source = "function"         # a module and its loss, from code of the run owner's
function = "module:name"    # where they come from
# arguments = {width = 64}  # of that function
context = 1                 # tokens that a sample counts

""",
}


def _with_source(tables: str, source: str) -> str:
    """The template; for a model of another source without the decoder's sizes."""
    if source == "decoder":
        return tables
    table = _OTHER_MODELS[source]
    return re.sub(r"(?ms)^\[model\]\n.*?(?=^\[data\])", lambda _: table, tables)


_LOOPS_OWN = re.compile(
    r"(?m)^(# )?(beta1|beta2|weight_decay|muon_momentum|sparse|clip|samples|prompts|prompt_tokens) +=.*\n"
)
"""Lines of keys that no loop hears of: it has an optimizer and held-out data of its own."""

_TABLES_OF_LOOPS = """\
[data]
source = "loop"             # what training loops bring or make

[inner]
optimizer = "muon"          # what loops train by, which exchanges are chosen for: "adamw", "muon" or "sgd"
"""


def _of_loops(tables: str, *, has_adapters: bool) -> str:
    """The template without what loops settle by themselves."""
    adapters = re.search(r"(?ms)^\[lora\]\n.*?(?=^\[inner\])", tables)
    assert adapters is not None
    kept = f"{adapters[0]}[inner]\n" if has_adapters else "[inner]\n"
    begin = _TABLES_OF_LOOPS.replace("[inner]\n", kept)
    tables = re.sub(r'(?ms)^\[data\]\n.*?^optimizer = "muon" .*?\n', lambda _: begin, tables)
    tables = tables.replace(
        "# AdamW's peak; 1e-2 where it trains matrices too, as left out",
        "# peak of swarm.learning_rate, which loops may follow",
    )
    return _LOOPS_OWN.sub("", tables)


def _trained(wanted: Wanted, facts: Facts) -> tuple[Trained, str]:
    """What is trained, and in words what else the file says that names it: none of that is taken."""
    if wanted.builder is not None:
        usual = _nearest_to(facts.num_in_all)
        batch, why_batch = _batch(wanted, facts, usual)
        rate = usual.learning_rate
        return Trained(facts=facts, batch=batch, why_batch=why_batch, learning_rate=rate), ""
    named, note = named_model(wanted.model or "0.2m")
    packed = facts.packed_context
    is_size = wanted.model is None or wanted.model.lower() in NAMED_MODELS
    if wanted.context is None and not is_size and packed not in (None, named.model.context):
        raise UsageError(
            f"the tokens are packed for a context of {packed}, and [model] context of {wanted.model} is "
            f"{named.model.context}",
            next_step=f"say --context {packed}, or pack them for that: atoll data prepare … --pack "
            f"{named.model.context} --out NEWDIR",
        )
    changes = {"context": wanted.context or packed, "vocab_size": facts.vocab_size}
    tables = named.model.model_dump(exclude_none=True)
    tables |= {key: value for key, value in changes.items() if value is not None}
    model = type(named.model).model_validate(tables)
    named = replace(named, model=model, batch=wanted.batch or named.batch)
    facts = replace(
        facts, model=tables, num_parameters=named.num_parameters, num_layers=model.num_layers
    )
    return Trained(facts=facts, batch=named.batch, learning_rate=named.learning_rate), note


def named_model(name: str) -> tuple[NamedModel, str]:
    """A size by its name, or the [model] of a file with the batch and rate of the nearest size.

    Raises UsageError, ConfigError.
    """
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


def _batch(wanted: Wanted, facts: Facts, usual: NamedModel) -> tuple[int, str]:
    """Samples of an inner step, and why so many where nobody said.

    Of given weights as many as are usual for their size, but no more than a node like this machine, or
    one of the speed that is told, holds and trains in a moderate time: a power of two.
    """
    if wanted.batch is not None:
        return wanted.batch, ""
    if wanted.function is not None:
        return USUAL_FUNCTION_BATCH, ""
    context = int(facts.model["context"])
    wished = max(1, min(usual.batch, usual.tokens_per_inner_step // context))
    speed, nodes = wanted.tokens_per_second, "nodes of the speed told"
    bounds: list[tuple[int, str]] = []
    if speed is None and wanted.step is None and facts.machine is not None:
        nodes = f"nodes like this machine ({facts.machine.name})"
        speed = _flops_of(facts.machine) / (6 * facts.num_in_all)
        if (fitting := facts.machine.most_samples) is not None:
            bounds.append((fitting, f"{nodes} have the memory for"))
    if speed is not None:
        in_time = int(speed * MOST_STEP_SECONDS / context)
        bounds.append((in_time, f"{nodes} train in {MOST_STEP_SECONDS:g} s"))
    most, what = min(bounds, key=lambda bound: bound[0], default=(wished, ""))
    if most >= wished:
        return wished, "as for other models of this size"
    if most < 1:
        return 1, f"one sample is more than {what}: make it shorter with --context"
    usual_here = f"{wished} are usual for a model of this size: --batch {wished}"
    return 1 << (most.bit_length() - 1), f"what {what} ({usual_here})"


def _flops_of(machine: Machine | None) -> float:
    """What a node achieves, by 6 operations for each parameter and token: assumed, not measured."""
    if machine is None or not machine.num_cores:
        return ASSUMED_FLOPS
    return machine.num_cores * ASSUMED_CORE_FLOPS


def _share_of_data(spec: RunSpec, facts: Facts) -> str:
    """How many tokens the run trains, beside those that there are: a small dataset comes again and again.

    Raises NoInputError where they are no batch, or none of them a held-out sample: each node would refuse
    them at its start.
    """
    if facts.num_samples:
        each = spec.model.context if spec.counted == "tokens" else 1
        return _times_the_data(spec, facts.num_samples, learned=facts.num_samples * each)
    num_tokens = facts.num_tokens
    if num_tokens is None:
        return ""
    batch, context = spec.inner.batch, spec.model.context
    samples, held_out = (
        sum(
            n // (context + 1) if facts.packed_context else max(0, n - 1) // context for n in shards
        )
        for shards in (facts.training_shards, facts.held_out_shards)
    )
    if samples < batch:
        raise NoInputError(
            f"the data have {num_tokens:,} tokens to train on, which are {samples:,} samples of {context:,}, "
            f"and one batch takes {batch:,}",
            next_step="prepare more text, or ask for smaller batches: --batch, --context",
        )
    if held_out < 1:
        raise NoInputError(
            f"of the data {sum(facts.held_out_shards):,} tokens are held out, and none of their shards has "
            f"a sample of {context:,}: nothing would say how good the model is",
            next_step="give more text, or hold more of it out when tokens are made ('atoll data prepare "
            "--held-out 0.1'), or ask for shorter samples: --context",
        )
    return _times_the_data(spec, samples, learned=min(num_tokens, samples * spec.model.context))


def _times_the_data(spec: RunSpec, num_samples: int, *, learned: int) -> str:
    """Counted by samples, of which some teach fewer tokens than they have: prompts and padding do not count.

    `learned` is what all of them teach once, in tokens or samples.
    """
    nodes = spec.run.min_nodes
    times = spec.run.rounds * spec.node_steps * spec.inner.batch * nodes / num_samples
    return (
        f"{spec.run.rounds} rounds of {nodes} nodes train {count_in_words(round(times * learned))} "
        f"{spec.counted}, {f'{times:,.0f}' if times >= 10 else f'{times:.2g}'} times what the data have "
        "([run] rounds changes it)"
    )


def _optimizer_of(wanted: Wanted) -> str:
    """The inner one: Muon for new decoders."""
    return wanted.optimizer or ("muon" if wanted.builder is None else "adamw")


def _inner(wanted: Wanted, trained: Trained) -> dict[Place, tuple[Any, str]]:
    """The inner optimizer and its rates."""
    optimizer = _optimizer_of(wanted)
    is_chosen = wanted.optimizer is None and optimizer == "muon"
    why = "ended lower than adamw" if is_chosen else ""
    rate, why_rate = _learning_rate(wanted, trained)
    values: dict[Place, tuple[Any, str]] = {("inner", "optimizer"): (optimizer, why)}
    if optimizer == "muon":
        muon, beside = (float(f"{t * rate:.2g}") for t in (MUON_TIMES, BESIDE_MUON_TIMES))
        values[("inner", "muon_learning_rate")] = (muon, why_rate)
        rate = beside
    return values | {("inner", "learning_rate"): (rate, why_rate)}


def _learning_rate(wanted: Wanted, trained: Trained) -> tuple[float, str]:
    """AdamW's where it trains everything, or that of loops by SGD."""
    if wanted.optimizer == "sgd":
        return SGD_RATE, "usual for SGD with momentum; what this model wants, you know better"
    is_function = wanted.function is not None
    if not trained.facts.has_loaded:
        why = "a decoder's of this size; what this model wants, you know better"
        return trained.learning_rate, why if is_function else ""
    rate, why = trained.learning_rate / CONTINUED_SHARE, "a fifth of a new model's of this size"
    if is_function:
        return float(f"{rate:.2g}"), f"{why}, as a decoder's, for the function loads its weights"
    if wanted.lora is not None:
        return float(f"{ADAPTERS_TIMES * rate:.2g}"), f"adapters': ten times {why}"
    return float(f"{rate:.2g}"), f"{why}, for the weights are given"


def _tensors(facts: Facts, folder: Path) -> Sequence[TensorShape]:
    """What is trained: as it is described in the run's folder, or as a decoder's sizes say."""
    if described := (description_beside(folder) or {}).get("tensors"):
        return [TensorShape.model_validate(each) for each in described]
    return list(DecoderModel.model_validate(facts.model).tensors())


def _planned(wanted: Wanted, trained: Trained, tensors: Sequence[TensorShape]) -> tuple[Plan, str]:
    """The exchange for the links, and what measured ones advise."""
    if wanted.num_nodes == 1:
        raise UsageError(
            "--nodes 1: an exchange takes two nodes",
            next_step="give --nodes 2 or more, or no --link",
        )
    found = None if wanted.measured is None else _measured(wanted.measured)
    if found is None:
        assert wanted.link is not None
        down, up = told_link(wanted.link)
    else:
        down, up = found.down_bits_per_second, found.up_bits_per_second
    facts = trained.facts
    operations = 6.0 * facts.num_in_all * trained.tokens_per_inner_step
    step_seconds = _step_seconds(wanted, trained, operations)
    situation = Situation(
        num_parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        num_frozen=facts.num_frozen,
        num_nodes=wanted.num_nodes or (USUAL_NODES if found is None else max(2, found.num_nodes)),
        down_bits_per_second=down,
        up_bits_per_second=up,
        round_trip_seconds=span_of(
            wanted.rtt, origin="--rtt", may_be_zero=True, refusal=UsageError
        ),
        seconds_per_inner_step=step_seconds,
        total_steps=wanted.total_steps or TOTAL_STEPS,
        batch=trained.batch,
        congestion_control=wanted.congestion or CUBIC if found is None else None,
        arithmetic=None if found is None else found.arithmetic,
        inner_optimizer=_optimizer_of(wanted),
        has_weights=facts.has_loaded,
        may_check=not (wanted.loop or wanted.private),
        flops_per_second=operations / step_seconds,
        fragment_sizes=fragment_sizes(tensors, most_fragments(facts.num_layers)),
    )
    plan = chosen(situation, {} if wanted.steps is None else {("inner", "steps"): wanted.steps})
    if plan.is_too_short:
        raise UsageError(
            f"--steps {wanted.steps} are more than --total-steps {situation.total_steps}",
            next_step="give fewer of the first or more of the second",
        )
    return plan, "" if found is None else found.advice


def _step_seconds(wanted: Wanted, trained: Trained, operations: float) -> float:
    if wanted.step is not None:
        return span_of(wanted.step, origin="--step", may_be_zero=False, refusal=UsageError)
    if wanted.tokens_per_second is not None:
        return trained.tokens_per_inner_step / wanted.tokens_per_second
    return max(LEAST_ASSUMED_STEP_SECONDS, operations / _flops_of(trained.facts.machine))


def told_link(text: str) -> tuple[float, float]:
    """Bits per second down and up. Raises UsageError."""
    return link_of(text, origin="--link", refusal=UsageError)


def _measured(folder: Path) -> "MeasuredLinks":
    from coordinator.presets.advising import measured_links
    from protocol.terminal.query import StatusLink

    with StatusLink(folder) as asked:
        return measured_links(asked.status().nodes, instead=", or give --link")
