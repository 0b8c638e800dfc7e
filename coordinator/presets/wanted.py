"""What a new run is asked to be, and what the node's side finds out about it.

What only that side knows (a transformers folder, a function's module, tokens, first weights, this machine's
devices) is asked of one process of it, which also writes the run's description: nothing here imports torch.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coordinator.config import RUN_FILE
from coordinator.presets.cost import CongestionControl
from protocol.errors import UsageError
from protocol.files.durable import as_typed, write_atomically
from protocol.run.models import FUNCTION_NAME
from protocol.run.run_files import MADE_OF, Asked, description_beside, validated_file
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import same_fields

TOTAL_STEPS = 10_000
"""Inner steps of one node in a whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Asked):
    """The options of `atoll init` that a run file would answer as well."""

    name: str | None = None
    model: str | None = None
    source: Path | None = None
    optimizer: str | None = None
    link: str | None = None
    measured: Path | None = None
    congestion: CongestionControl | None = None
    rtt: str = "100ms"
    num_nodes: int | None = None
    step: str | None = None
    tokens_per_second: float | None = None
    steps: int | None = None
    total_steps: int | None = None  # TOTAL_STEPS, where nobody says

    @property
    def builder(self) -> str | None:
        """Whose code builds the model that --from names; None for a model that is new."""
        if self.function is not None:
            return "function"
        if self.source is None:
            return None
        return self.by or ("decoder" if self.lora is None else "transformers")

    @property
    def needs_the_nodes_side(self) -> bool:
        """Whether files have to be read that are that side's business."""
        return self.builder is not None or bool(self.data) or self.tokenizer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What trains here, as the node's side sees it."""

    name: str  # such as "2 CPU cores" or a GPU's
    num_cores: int = 0  # of the CPU, where there is no GPU
    most_samples: int | None = None  # that fit its memory at once; None: only torch can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the node's side says of a run: tables of the run file, sizes, and how nodes begin."""

    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    num_parameters: int = 0  # that are trained, where a model was asked about
    num_frozen: int = 0
    num_layers: int = 0
    vocab_size: int | None = None  # of the data's tokens, or of the tokenizer's
    num_tokens: int | None = None  # to train on, where they were looked at
    num_samples: int | None = None  # likewise, of a function
    training_shards: Sequence[int] = ()  # tokens of each: no sample goes from one into the next
    held_out_shards: Sequence[int] = ()
    packed_context: int | None = None  # of rows with padding; None: samples cut through documents
    has_loaded: bool = False  # whether weights are a folder's, or a function has loaded them
    notes: Sequence[str] = ()
    first_digest: str = ""  # of given weights
    first_weights: str = ""  # the file of the run's folder, or transformers' folder, with them
    code_digest: str = ""  # of the run's functions, where it has any
    machine: Machine | None = None

    @property
    def num_in_all(self) -> int:
        """Parameters of the whole model, those that are not trained too."""
        return self.num_parameters + self.num_frozen

    @classmethod
    def of_json(cls, text: str) -> "Facts":
        """From what `atoll node describe --json` prints."""
        told = json.loads(text)
        machine = told.pop("machine", None)
        return cls(**told, machine=None if machine is None else Machine(**machine))


def facts_of_wanted(wanted: Wanted, folder: Path) -> Facts:
    """Has the run described in its new folder; nothing is asked where nothing has to be read."""
    if not wanted.needs_the_nodes_side:
        if wanted.loop:
            return Facts(data={"source": "loop"})
        return Facts(data={"source": "text", "private": True} if wanted.private else {})
    asked = same_fields(wanted, Asked) | {"by": wanted.builder}
    return described(folder, wanted.source, "--asked", json.dumps(asked))


LEAST_OF_PYTHON = 4 << 20
"""Bytes that any Python's standard library has to train on: a batch of fewer needs no look at it."""


def look_at_data(folder: Path, spec: RunSpec) -> None:
    """Ends this process where the data that a run names are here, and every node would refuse them.

    What is wrong is said. Nothing is looked at where the node's side is not installed.
    """
    is_python = spec.data.source == "python-stdlib"
    is_enough = spec.tokens_per_inner_step <= LEAST_OF_PYTHON and spec.data.held_out >= 0.01
    is_elsewhere = spec.data.private or spec.data.source in ("function", "loop")
    if is_elsewhere or (is_python and is_enough):
        return
    if find_spec("numpy") is None:
        return
    if code := _asked(str(folder), "--data").returncode:
        sys.exit(code)


def with_first_digest(text: str, folder: Path, source: Path | None, facts: Facts) -> Facts:
    """Has given weights read, unless their digest is that of the run file's fragments already.

    It is of the tensors in the order of fragments, which are chosen by what the model is.
    """
    if not (facts.first_digest or facts.first_weights):
        return facts
    made_of = (description_beside(folder) or {}).get(MADE_OF, {})
    fragments = validated_file(tomllib.loads(text), origin=RUN_FILE).exchange.fragments
    if facts.first_digest and fragments == made_of.get("exchange", {}).get("fragments", fragments):
        return facts
    write_atomically(folder / RUN_FILE, text.encode())
    return replace(facts, first_digest=described(folder, source, "--first").first_digest)


def described(folder: Path, source: Path | None, *more: str) -> Facts:
    """What 'atoll node describe' finds out. What it refuses it has said itself; its exit code is ours."""
    given = () if source is None else ("--from", str(source))
    ended = _asked(str(folder), *given, "--json", *more)
    if ended.returncode != 0:
        sys.exit(ended.returncode)
    return Facts.of_json(ended.stdout)


def _asked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    # -P: what lies in the folder where this is typed is imported by nobody.
    command = (sys.executable, "-P", "-m", "protocol.terminal.cli", "node", "describe")
    return subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=False)


def refuse_what_says_nothing(wanted: Wanted) -> None:
    """Raises UsageError for what says one thing twice, or has no effect."""
    _refuse_two_models(wanted)
    _refuse_two_kinds_of_data(wanted)
    _refuse_two_speeds(wanted)


def _refuse_two_models(wanted: Wanted) -> None:
    if wanted.model is not None and wanted.source is not None:
        raise _twice(f"--model {wanted.model}", f"--from {wanted.source}", "what is trained")
    for option, named in (
        ("--function", wanted.function),
        ("--data-function", wanted.data_function),
    ):
        if named is not None and re.fullmatch(FUNCTION_NAME, named) is None:
            raise UsageError(
                f"{option} {named} names no function",
                next_step="name its module and itself, as vision:model",
            )
    for option, value in (("--model", wanted.model), ("--by", wanted.by), ("--lora", wanted.lora)):
        if wanted.function is not None and value is not None:
            raise _twice(f"--function {wanted.function}", f"{option} {value}", "what is trained")
    if wanted.source is None:
        for option, value in (("--by", wanted.by), ("--lora", wanted.lora)):
            if value is not None:
                raise UsageError(
                    f"{option} {value} has no effect without a model of transformers",
                    next_step="name its folder with --from",
                )
    if wanted.lora is not None and wanted.by == "decoder":
        raise UsageError(
            f"--lora {wanted.lora} goes with --by transformers: Atoll's decoder has no adapters",
            next_step="leave --by out",
        )


def _refuse_two_kinds_of_data(wanted: Wanted) -> None:
    if wanted.data and wanted.data_function is not None:
        raise _twice(
            f"--data {wanted.data[0]}", f"--data-function {wanted.data_function}", "what it learns"
        )
    if wanted.data_function is not None and wanted.function is None:
        raise UsageError(
            f"--data-function {wanted.data_function} goes with a model that a function makes",
            next_step="name it with --function MODULE:NAME",
        )
    if wanted.function is not None and not (
        wanted.data or wanted.data_function is not None or wanted.private or wanted.loop
    ):
        raise UsageError(
            f"--function {wanted.function} says what is trained, and nothing what it learns from",
            next_step="add --data-function MODULE:NAME, or tokens with --data or --private; or --loop, where "
            "nodes train by loops of their own, on data of these",
        )
    if wanted.loop and (wanted.data or wanted.data_function is not None or wanted.private):
        other = "--data" if wanted.data else "--private" if wanted.private else "--data-function"
        raise _twice("--loop", other, "what it learns from")
    if wanted.optimizer == "sgd" and not wanted.loop:
        raise UsageError(
            "--optimizer sgd is what training loops of their own may train by, and Atoll's ranks by adamw or "
            "muon",
            next_step="add --loop, or name one of these",
        )
    if wanted.private and (wanted.data or wanted.data_function is not None):
        raise UsageError(
            f"--private goes without {'--data' if wanted.data else '--data-function'}: each node has data "
            "of its own, and names them to itself alone",
            next_step="leave one of them out",
        )
    if wanted.tokenizer is not None and not wanted.private:
        raise UsageError(
            f"--tokenizer {wanted.tokenizer} has no effect without --private: other tokens have theirs "
            "beside them",
            next_step="make tokens with it: atoll data prepare TEXT… --tokenizer "
            f"{as_typed(wanted.tokenizer)} --out tokens; then add --data tokens",
        )


def _refuse_two_speeds(wanted: Wanted) -> None:
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
            ("--total-steps", wanted.total_steps),
            ("--congestion", wanted.congestion),
            # With given weights it also says how many samples a step takes.
            ("--speed", None if wanted.source is not None else wanted.tokens_per_second),
        ):
            if value is not None:
                raise UsageError(
                    f"{option} {value} has no effect while nothing is chosen for a link",
                    next_step="add --link 100mbit, or --measured DIR with the folder of a swarm that runs",
                )


def _twice(one: str, other: str, what: str) -> UsageError:
    return UsageError(f"{one} and {other} both say {what}", next_step="leave one of them out")
