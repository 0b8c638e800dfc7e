"""The run file: what is trained, on what, how, and by which rules.

Validated here; its digest stands in every payload.
"""

import json
import math
from ctypes import c_float
from typing import Annotated, Literal, Self

import blake3
from pydantic import Field, model_validator

from protocol.errors import ConfigError
from protocol.run.models import (
    OF_ITS_OWN,
    Beginning,
    DecoderModel,
    Description,
    FunctionName,
    HexDigest,
    Model,
    Positive,
    RunName,
    Section,
    TensorShape,
)
from protocol.wire.rounds import Digest

Fraction = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
CodecName = Literal[
    "fp32",
    "bf16",
    "int8",
    "int4",
    "ec3",
    "ec2",
    "int2",
    "ec1",
    "sign",
    "topk256",
    "topk64",
]
CODEC_VERSIONS: dict[CodecName, int] = {
    **dict.fromkeys(("fp32", "bf16", "int8", "int4", "int2", "sign", "topk256", "topk64"), 1),
    **dict.fromkeys(("ec3", "ec2", "ec1"), 2),
}
"""The version of each codec that this release speaks. A node with another one takes no part in a run."""

WANTS_FEEDBACK: tuple[CodecName, ...] = ("ec1", "sign", "topk256", "topk64")
"""Codecs of contributions that do not converge when what they round away is lost: of so few bits, what is
rounded away leans to one side (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD")."""

ReducerErrorRule = Literal["drop", "keep", "own"]
Merge = Literal["mean", "agreeing", "norm-preserving"]
RateScaling = Literal["none", "sqrt", "cbrt"]


class RunSection(Section):
    """[run]: what the run is called and how long it goes."""

    name: RunName = "my-run"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Positive = 100
    min_nodes: Positive = 1


class DataSection(Section):
    """[data]: what is trained on.

    "python-stdlib" and "text" are read as bytes, and a file belongs to the held-out split by the hash
    of its name; "tokens" is a folder that 'atoll data prepare' wrote; "function" is samples that a
    function of the run owner's gives; "loop" is nothing that the run knows of: all nodes train by loops of
    their own, which bring or make it. With `private` each node has data of its own, which never leave
    it, and `most_weight` bounds what part of a mean one holder's work is.
    """

    source: Literal["python-stdlib", "text", "tokens", "function", "loop"] = "python-stdlib"
    paths: Annotated[tuple[str, ...], Field(strict=False)] = ()  # TOML gives lists
    held_out: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    digest: HexDigest | None = None  # of a manifest
    across_documents: bool = True  # whether attention reaches from one into the next
    function: FunctionName | None = None
    arguments: dict[str, str | int | float | bool] = Field(default={})
    private: bool = False
    tokenizer: HexDigest | None = None  # that private tokens are made with; None: bytes
    most_weight: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def may_be_checked(self) -> bool:
        """Whether other nodes can train what one was leased: of loops and of private data none can."""
        return not self.private and self.source != "loop"

    @model_validator(mode="after")
    def _private_data_stand_with_their_holders(self) -> Self:
        if self.private and self.source not in ("text", "tokens"):
            raise ValueError(
                f'private = true needs source = "text" or "tokens", which says how holders keep their data, '
                f'not "{self.source}"'
            )
        if self.private and (self.paths or self.digest is not None):
            raise ValueError(
                "private = true goes without paths and digest: each node names its own data in node.toml"
            )
        if self.tokenizer is not None and not (self.private and self.source == "tokens"):
            raise ValueError('tokenizer belongs to private = true with source = "tokens"')
        if self.most_weight is not None and not self.private:
            raise ValueError(f"most_weight = {self.most_weight} belongs to private = true")
        return self

    @model_validator(mode="after")
    def _paths_belong_to_their_source(self) -> Self:
        if self.private:
            return self
        if self.source == "tokens" and len(self.paths) != 1:
            raise ValueError(
                f'source = "tokens" needs paths = ["FOLDER"], one folder that \'atoll data prepare\' '
                f"wrote, and {len(self.paths)} are given"
            )
        if (self.source == "tokens") != (self.digest is not None):
            raise ValueError(
                "source = \"tokens\" needs digest, which 'atoll data prepare' prints; others take none"
            )
        if (self.source == "function") != (self.function is not None):
            raise ValueError(
                'source = "function" needs function = "MODULE:FUNCTION"; other sources take none'
            )
        if self.arguments and self.function is None:
            raise ValueError("arguments belong to a function, and there is none")
        if (self.source not in ("text", "tokens")) == bool(self.paths):
            raise ValueError(
                'source = "text" needs paths, a list of files or globs; others take none'
            )
        return self


class InnerSection(Section):
    """[inner]: training within a round. Schedules follow the run's progress, never a node's own steps.

    "sgd", with momentum, is what loops of one's own train by: exchanges are chosen for it, no rank has it.
    """

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    steps: Positive = 15
    round_tokens: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    batch: Positive = 8
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    muon_learning_rate: Annotated[float, Field(gt=0)] | None = None
    muon_momentum: Fraction | None = None
    clip: Annotated[float, Field(gt=0)] = 1.0
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_tokens: Annotated[int, Field(ge=0)] | None = None
    total_tokens: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    scaling: Literal["none", "linear", "sqrt"] = "none"
    sparse: bool = False  # embedding rows without a gradient are left alone

    @model_validator(mode="after")
    def _muon_keys_belong_to_muon(self) -> Self:
        for key in ("muon_learning_rate", "muon_momentum"):
            if getattr(self, key) is not None and self.optimizer != "muon":
                raise ValueError(
                    f'{key} = {getattr(self, key)} belongs to optimizer = "muon", '
                    f'not to "{self.optimizer}"'
                )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.decay_fraction is not None and self.schedule != "wsd":
            raise ValueError(
                f'decay_fraction = {self.decay_fraction} belongs to schedule = "wsd", '
                f'not to "{self.schedule}"'
            )
        if self.schedule == "wsd" and None not in (self.warmup_tokens, self.total_tokens):
            assert self.warmup_tokens is not None and self.total_tokens is not None
            decay_tokens = round(self.decay_share * self.total_tokens)
            if self.warmup_tokens + decay_tokens > self.total_tokens:
                raise ValueError(
                    f"a warm-up of {self.warmup_tokens} tokens and a decay over {decay_tokens} "
                    f"do not fit into total_tokens {self.total_tokens}"
                )
        return self

    @property
    def muon_peak_rate(self) -> float:
        """Muon's learning rate at the peak of the schedule."""
        return self.muon_learning_rate or self.learning_rate

    @property
    def muon_momentum_or_default(self) -> float:
        """How much of its mean gradient Muon keeps in each inner step."""
        return 0.95 if self.muon_momentum is None else self.muon_momentum

    @property
    def decay_share(self) -> float:
        """The part of total_tokens over which "wsd" falls."""
        return 0.2 if self.decay_fraction is None else self.decay_fraction


class OuterSection(Section):
    """[outer]: the optimizer that applies committed pseudo-gradients."""

    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Fraction = 0.6
    merge: Merge = "mean"
    screening: bool = True
    audit: Annotated[float, Field(ge=0, le=1)] = 0.05
    scaling: RateScaling = "none"

    @model_validator(mode="after")
    def _rates_are_some_in_fp32(self) -> Self:
        """Nodes compute with them in fp32."""
        rate, momentum = c_float(self.learning_rate).value, c_float(self.momentum).value
        if not 0 < rate < math.inf:
            raise ValueError(
                f"learning_rate = {self.learning_rate!r} is {rate} in fp32: choose one between 0.01 and 10"
            )
        if momentum >= 1:
            raise ValueError(
                f"momentum = {self.momentum!r} is {momentum} in fp32: choose one from 0 to 0.9999"
            )
        return self


class ExchangeSection(Section):
    """[exchange]: how pseudo-gradients travel."""

    uplink: CodecName = "int4"
    downlink: CodecName = "int4"
    error_feedback: bool = True
    residual_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    reducer_error: ReducerErrorRule = "keep"
    fragments: Positive = 1
    overlap: Literal["none", "blend", "keep"] = "none"
    blend: Annotated[float, Field(ge=0, lt=1)] | None = None

    @property
    def codecs(self) -> tuple[str, str]:
        """Up and down, with their versions, as each node of the run must have them."""
        up, down = (f"{name}/{CODEC_VERSIONS[name]}" for name in (self.uplink, self.downlink))
        return up, down

    @model_validator(mode="after")
    def _the_rest_needs_error_feedback(self) -> Self:
        if self.error_feedback:
            return self
        if self.uplink in WANTS_FEEDBACK:
            raise ValueError(
                f'uplink = "{self.uplink}" needs error_feedback = true: one of 2 bits or more does without'
            )
        if self.residual_decay != 1:
            raise ValueError(
                f"residual_decay = {self.residual_decay} has no effect without error_feedback = true"
            )
        if self.reducer_error == "own":
            raise ValueError('reducer_error = "own" needs error_feedback = true')
        return self

    @model_validator(mode="after")
    def _blend_belongs_to_overlap(self) -> Self:
        if self.blend is not None and self.overlap == "none":
            raise ValueError(
                f'blend = {self.blend} belongs to overlap = "keep" or "blend", not to "none"'
            )
        if self.blend == 0 and self.overlap == "blend":
            raise ValueError(
                'blend = 0 drops what was trained since publishing: take overlap = "keep" for that'
            )
        return self

    @property
    def local_share(self) -> float:
        """What ranks hold on to of their own weights where they take over global ones, from 0 to 1."""
        if self.blend is not None:
            return self.blend
        return 0.5 if self.overlap == "blend" else 0.0


class DeadlinesSection(Section):
    """[deadlines]: seconds from the start of a round; each must leave time for the one before.

    With `adapt` they are upper bounds, and the coordinator plans by what recent rounds took; a
    bound below `floor` comes before it.
    """

    train: Seconds = 600
    contribute: Seconds = 660
    commit: Seconds = 720
    apply: Seconds = 60
    lease: Seconds = 15
    adapt: bool = True
    floor: Seconds = 5

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.train < self.contribute < self.commit:
            raise ValueError(
                f"deadlines must rise: train {self.train}, contribute {self.contribute}, commit {self.commit}"
            )
        return self


class LoraSection(Section):
    """[lora]: low-rank adapters are trained, and the model of a transformers folder stays as it is.

    A rank of 0 is none of it. `targets` are ends of modules' names, as "q_proj"; without any, all linear
    layers but the head.
    """

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _targets_have_a_rank(self) -> Self:
        if self.targets and not self.rank:
            raise ValueError("targets have no effect without a rank, as rank = 16")
        return self


Prompt = Annotated[str, Field(min_length=1, max_length=500)]
MOST_PROMPTS = 8


class EvaluationSection(Section):
    """[evaluation]: the held-out loss of the committed model, and what it writes on from prompts."""

    every_rounds: Positive = 5
    samples: Positive = 64
    go_back: bool = True
    prompts: Annotated[tuple[Prompt, ...], Field(strict=False, max_length=MOST_PROMPTS)] = ()
    prompt_tokens: Annotated[int, Field(ge=1, le=512)] = 64


class RunSpec(Section):
    """A whole run file."""

    run: RunSection = RunSection()
    model: Model = DecoderModel()
    data: DataSection = DataSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    exchange: ExchangeSection = ExchangeSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    evaluation: EvaluationSection = EvaluationSection()
    lora: LoraSection = LoraSection()
    description: Description | None = None

    @model_validator(mode="after")
    def _documents_can_be_kept_apart(self) -> Self:
        if self.data.across_documents:
            return self
        if self.data.source != "tokens":
            raise ValueError(
                '[data] across_documents = false needs source = "tokens", which has the places where '
                f'documents begin, not "{self.data.source}"'
            )
        if self.model.source == "function":
            raise ValueError(
                '[data] across_documents = false goes with [model] source = "decoder" or "transformers": a '
                "function's model sees what it likes of a row"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_model(self) -> Self:
        if self.lora.rank and self.model.source != "transformers":
            raise ValueError(
                f'[lora] goes with [model] source = "transformers", not "{self.model.source}"'
            )
        return self

    @model_validator(mode="after")
    def _sgd_is_a_loops(self) -> Self:
        if self.inner.optimizer == "sgd" and self.data.source != "loop":
            raise ValueError(
                '[inner] optimizer = "sgd" goes with [data] source = "loop": it is what loops of their own '
                'train by, and Atoll trains by "adamw" or "muon"'
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_a_model_of_text(self) -> Self:
        if not self.evaluation.prompts:
            return self
        for table, source in (("model", self.model.source), ("data", self.data.source)):
            if source == "function":
                raise ValueError(
                    f'[evaluation] prompts does not go with [{table}] source = "function": nobody knows '
                    "whether what the model gives is text"
                )
        if self.data.source == "loop":
            raise ValueError(
                '[evaluation] prompts does not go with [data] source = "loop": no node of the run has the '
                "model where it could write"
            )
        return self

    @model_validator(mode="after")
    def _every_fragment_has_a_layer(self) -> Self:
        if self.is_described and self.exchange.fragments > self.num_layers:
            raise ValueError(
                f"[exchange] fragments = {self.exchange.fragments}: each holds one layer at least, "
                f"and the model has {self.num_layers}"
            )
        return self

    @model_validator(mode="after")
    def _every_fragment_has_a_round(self) -> Self:
        if self.run.rounds < self.exchange.fragments:
            raise ValueError(
                f"[run] rounds = {self.run.rounds}: each synchronises one of [exchange] fragments = "
                f"{self.exchange.fragments}, and the others would keep their first weights"
            )
        return self

    @model_validator(mode="after")
    def _round_tokens_are_whole_steps(self) -> Self:
        round_tokens, step_tokens = self.inner.round_tokens, self.tokens_per_inner_step
        if round_tokens is None:
            return self
        least = self.run.min_nodes * step_tokens
        if round_tokens < least:
            raise ValueError(
                f"[inner] round_tokens = {round_tokens}: an inner step of each of [run] min_nodes = "
                f"{self.run.min_nodes} is {least} tokens, [inner] batch times [model] context a node"
            )
        if rest := round_tokens % step_tokens:
            raise ValueError(
                f"[inner] round_tokens = {round_tokens} is not whole inner steps of {step_tokens} tokens, "
                f"[inner] batch = {self.inner.batch} times [model] context = {self.model.context}: "
                f"write {round_tokens - rest} or {round_tokens - rest + step_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _first_digest_is_of_this_layout(self) -> Self:
        of = None if self.description is None else self.description.first_fragments
        if of not in (None, self.exchange.fragments):
            raise ValueError(
                f"[exchange] fragments = {self.exchange.fragments}: the digest of the first weights is of "
                f"{of}, so write fragments = {of}"
            )
        return self

    @model_validator(mode="after")
    def _functions_are_described(self) -> Self:
        if self.data.source == "function" and isinstance(self.model, DecoderModel):
            raise ValueError(
                '[data] source = "function" goes with [model] source = "function" or "transformers"'
            )
        return self

    @property
    def adapters(self) -> LoraSection | None:
        """What is trained where the model itself is not."""
        return self.lora if self.lora.rank else None

    @property
    def is_described(self) -> bool:
        """Whether the model's tensors are known: those of the decoder always are."""
        has_tensors = self.description is not None and len(self.description.tensors) > 0
        return has_tensors or isinstance(self.model, DecoderModel)

    @property
    def tensors(self) -> tuple[TensorShape, ...]:
        """What is trained, in canonical order. Raises ConfigError for a model without its description."""
        if self.description is not None and self.description.tensors:
            return self.description.tensors
        if isinstance(self.model, DecoderModel):
            return tuple(self.model.tensors())
        raise ConfigError(
            f'the model with source = "{self.model.source}" has no description yet',
            next_step="make it on a machine with torch: 'atoll node describe DIR'",
        )

    @property
    def decoder(self) -> DecoderModel:
        """The sizes of the decoder that comes with Atoll. Raises ConfigError for another model."""
        if isinstance(self.model, DecoderModel):
            return self.model
        raise ConfigError(
            f'[model] source = "{self.model.source}" cannot do what is asked for here',
            next_step='it needs source = "decoder"',
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model; one where it has none that are alike."""
        return max((tensor.layer or 0) for tensor in self.tensors) + 1

    @property
    def num_parameters(self) -> int:
        """Values that are trained: of the outer state's parameters."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def first_digest(self) -> Digest | None:
        """The digest of the state at round 0; None where nodes draw it from the seed."""
        text = None if self.description is None else self.description.first_digest
        return None if text is None else Digest(bytes.fromhex(text))

    @property
    def goes_on_with_weights(self) -> bool:
        """Whether the state at round 0, or what its adapters change, was trained before."""
        told = self.description
        return told is not None and (told.has_loaded or told.first_fragments is not None)

    @property
    def beginning(self) -> Beginning:
        """What the run goes on with of another one."""
        given = None if self.description is None else self.description.beginning
        return given or OF_ITS_OWN

    @property
    def counted(self) -> Literal["tokens", "samples"]:
        """What is counted, for people: samples of a function, or of loops, that are one place each."""
        is_sample = self.data.source in ("function", "loop") and self.model.context == 1
        return "samples" if is_sample else "tokens"

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is of a function of the run's own, in a unit that only its owner knows."""
        return self.model.source == "function"

    @property
    def tokens_per_inner_step(self) -> int:
        """Tokens that one node trains in one inner step."""
        return self.inner.batch * self.model.context

    @property
    def round_steps(self) -> int | None:
        """Inner steps that all nodes of a round share; None where each has `steps` of its own."""
        tokens = self.inner.round_tokens
        return None if tokens is None else tokens // self.tokens_per_inner_step

    @property
    def node_steps(self) -> int:
        """Inner steps of one node in a round of `min_nodes` that are equally fast."""
        return self.steps_among(self.run.min_nodes)

    def steps_among(self, num_nodes: int) -> int:
        """The same in a round of so many."""
        shared = self.round_steps
        return self.inner.steps if shared is None else max(1, shared // num_nodes)

    def canonical_json(self) -> str:
        """The run as JSON with sorted keys and no spaces: what the digest is taken of.

        Keys that came later say nothing where they have their default: runs from before there were any
        keep their digest, and nodes from then take part.
        """
        tables, default = self.model_dump(mode="json"), _DEFAULTS.model_dump(mode="json")
        for table, key in LATER_KEYS:
            if tables[table] is not None and tables[table][key] == default[table][key]:
                del tables[table][key]
        return json.dumps(tables, sort_keys=True, separators=(",", ":"))

    def digest(self) -> Digest:
        """BLAKE3 of the canonical JSON; stands in every payload's header."""
        return Digest(blake3.blake3(self.canonical_json().encode()).digest())


LATER_KEYS = (
    ("evaluation", "prompts"),
    ("evaluation", "prompt_tokens"),
    ("description", "beginning"),
    ("description", "first_fragments"),
    ("description", "num_running_statistics"),
    ("description", "frozen_values"),
    ("description", "compares_samples"),
)
"""Of tables that were there already: a new key of a run file goes here, and never changes its default, which
is what was so before."""


_DEFAULTS = RunSpec(description=Description())
