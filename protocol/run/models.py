"""What a run trains: the [model] of its file, what building it has shown, and the canonical vector's layout.

A model is known here by its tensors alone: names, shapes, and the layer that each belongs to. Those of
the decoder that comes with Atoll follow from its sizes; those of any other model are found out by
building it, once, when the run is made (`atoll node describe`), and stand in the description. Without
torch: coordinator and daemon know no more of a model than this.

All nodes of a run must agree on where each tensor lies in the canonical vector (`layout_of`). It follows
from names and shapes alone, so the coordinator knows it before any node comes. Ranks compare it with the
module that they have built.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import blake3
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from protocol.wire.rounds import Digest, LayoutSummary

if TYPE_CHECKING:  # which reads this room
    from protocol.run.run_spec import RunSpec


Positive = Annotated[int, Field(gt=0, lt=2**31)]
Context = Annotated[int, Field(ge=8, le=1 << 20)]
HEX_DIGEST = r"^[0-9a-f]{64}$"
HexDigest = Annotated[str, Field(pattern=HEX_DIGEST)]

FUNCTION_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]
"""Such as "my_models.vision:digits"."""

RUN_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
RunName = Annotated[str, Field(pattern=RUN_NAME)]

_IN_WORDS = {
    HEX_DIGEST: "64 hexadecimal digits",
    FUNCTION_NAME: 'a module and a name in it, as "my_models.vision:digits"',
    RUN_NAME: "lowercase letters, digits and hyphens, 63 at most",
}

BYTES_VOCABULARY = 256
"""Of text that is read as bytes."""


class Section(BaseModel):
    """A table of a file that people write: unknown keys are refused, values never change.

    Strict, for `steps = "30"` and `steps = true` are mistakes, and would be taken as 30 and 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RopeScaling(Section):
    """[model.rope_scaling]: Llama 3.1's stretch of the rotary embedding to longer contexts.

    Frequencies that turn less than `low_freq_factor` times in `original_context` are divided by
    `factor`, those that turn more than `high_freq_factor` times stay, and those between are mixed.
    """

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    original_context: Positive

    @model_validator(mode="after")
    def _high_is_above_low(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor "
                f"{self.low_freq_factor}"
            )
        return self


class DecoderModel(Section):
    """[model] source = "decoder": the decoder that comes with Atoll.

    It is a Llama where no key says otherwise; the others make it a Qwen 2, a Qwen 3 or a Mistral.
    """

    source: Literal["decoder"] = "decoder"
    vocab_size: Positive = BYTES_VOCABULARY
    hidden_size: Positive = 64
    num_layers: Positive = 3
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_size: Positive | None = None
    ffn_size: Positive = 192
    context: Context = 128
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    mlp_bias: bool = False
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    sliding_window: Positive | None = None
    sliding_layers: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    rope_scaling: RopeScaling | None = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.values_of_head % 2:
            raise ValueError(f"a head of {self.values_of_head} values is odd; RoPE needs pairs")
        return self

    @model_validator(mode="after")
    def _sliding_layers_are_layers(self) -> Self:
        if self.sliding_layers is None:
            return self
        if self.sliding_window is None:
            raise ValueError("sliding_layers needs sliding_window, how far back they attend")
        if list(self.sliding_layers) != sorted(set(self.sliding_layers)):
            raise ValueError(f"sliding_layers {list(self.sliding_layers)} do not rise")
        for layer in self.sliding_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"sliding_layers has {layer}, and layers go from 0 to {self.num_layers - 1}"
                )
        return self

    @property
    def values_of_head(self) -> int:
        """Values of a query, a key or a value: `head_size`, or what follows from the width."""
        return self.head_size or self.hidden_size // self.num_heads

    def window_of(self, layer: int) -> int | None:
        """To how many positions a layer attends, its own included; None for all that came before.

        Also None where a sample is no longer than the window, which then hides nothing.
        """
        if self.sliding_window is None or self.sliding_window >= self.context:
            return None
        is_sliding = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if is_sliding else None

    def tensors(self) -> Iterator["TensorShape"]:
        """Names and shapes in the module's own order, without building it."""
        hidden = self.hidden_size
        yield TensorShape(name="model.embed_tokens.weight", shape=(self.vocab_size, hidden))
        for layer in range(self.num_layers):
            for name, shape in self._tensors_of_a_layer():
                full_name = f"model.layers.{layer}.{name}"
                yield TensorShape(name=full_name, shape=shape, layer=layer)
        yield TensorShape(name="model.norm.weight", shape=(hidden,))
        if not self.tie_embeddings:
            yield TensorShape(name="lm_head.weight", shape=(self.vocab_size, hidden))

    def _tensors_of_a_layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, ffn, head = self.hidden_size, self.ffn_size, self.values_of_head
        query, key = (head * heads for heads in (self.num_heads, self.num_kv_heads))
        has_qkv_bias, has_output_bias = self.attention_bias != "none", self.attention_bias == "all"
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", query, hidden, has_qkv_bias),
            ("self_attn.k_proj", key, hidden, has_qkv_bias),
            ("self_attn.v_proj", key, hidden, has_qkv_bias),
            ("self_attn.o_proj", hidden, query, has_output_bias),
        ):
            yield from _tensors_of_a_linear(name, rows, columns, has_bias)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (head,)
            yield "self_attn.k_norm.weight", (head,)
        for name, rows, columns in (
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):
            yield from _tensors_of_a_linear(name, rows, columns, self.mlp_bias)
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)


def _tensors_of_a_linear(
    name: str, rows: int, columns: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


class TransformersModel(Section):
    """[model] source = "transformers": a causal language model that transformers builds.

    Its config stands in the run's description, taken from the folder that the run was made from.
    """

    source: Literal["transformers"]
    context: Context


class FunctionModel(Section):
    """[model] source = "function": a module and its loss, from a function of the run owner's.

    `context` is how many tokens a sample counts; for data that has no tokens a sample is one.
    """

    source: Literal["function"]
    function: FunctionName
    arguments: dict[str, str | int | float | bool] = {}
    context: Positive = 1


def _source_of(table: object) -> str:
    source = (
        table.get("source", "decoder")
        if isinstance(table, Mapping)
        else getattr(table, "source", "decoder")
    )
    return source if isinstance(source, str) else repr(source)


Model = Annotated[
    Annotated[DecoderModel, Tag("decoder")]
    | Annotated[TransformersModel, Tag("transformers")]
    | Annotated[FunctionModel, Tag("function")],
    Discriminator(_source_of),
]
"""[model], whichever its source is."""


class TensorShape(Section):
    """A trained tensor: its canonical name, its shape, and the layer that it belongs to, if to one."""

    name: Annotated[str, Field(min_length=1)]
    shape: Annotated[tuple[Positive, ...], Field(strict=False)]
    layer: Annotated[int, Field(ge=0)] | None = None

    @property
    def num_elements(self) -> int:
        """How many values it holds."""
        product = 1
        for size in self.shape:
            product *= size
        return product


TensorStyle = Literal["column", "gathered", "row", "sequence", "replicate", "table"]
"""How tensor parallel treats a module: output cut (or cut and gathered), input cut, parts of its inputs on
each rank, whole on each rank; or an embedding cut by its rows."""


class StageUnit(Section):
    """Modules that a pipeline keeps together, in their order, and what leaves the last of them.

    `output` is its shape for one sample, in fp32; `operations` are what a sample costs there, in any unit.
    """

    modules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    output: Annotated[tuple[Positive, ...], Field(strict=False)]
    operations: Annotated[int, Field(ge=0)]


FIRST_WEIGHTS = "first.safetensors"
"""Given first weights, beside a run's description, in a file as large as the model."""


class Beginning(Section):
    """What a fork goes on with of the run that it was made of: how far that had come, and its samples.

    `progress` is that of the learning rate's schedule. `trained` are the places of the sample order that are
    used up, as a first place and the one after the last, in turns.
    """

    round: Annotated[int, Field(ge=0)] = 0
    progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    tokens: Annotated[int, Field(ge=0, lt=2**63)] = 0
    trained: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _trained_are_pieces_in_order(self) -> Self:
        firsts, ends = self.trained[::2], self.trained[1::2]
        rise = all(a < b for a, b in pairwise(self.trained))
        if len(firsts) != len(ends) or not rise:
            raise ValueError(
                "trained is not first places and ends in turns, each above the one before"
            )
        return self


OF_ITS_OWN = Beginning()
"""Of a run that goes on with nothing."""


class Description(Section):
    """What building a run's model has shown. It is part of the run: its digest covers it.

    Without `tensors` those of the decoder are meant. `first_digest` is that of the outer state that
    the run begins with, where it begins with given weights; else each node draws them from the seed.
    It is of the canonical vector in `first_fragments` fragments, where that is said. `beginning` is of a fork
    that goes on where its run was: then the file with the weights has the outer optimizer's momentum too.
    `frozen_digest` is that of the `num_frozen` values that are not trained; `frozen_values` are a few of each
    parameter, and sums of all, by which a loop's are known, rounded or not. `num_running_statistics` is how
    many norms keep some, or vectors, which are computed anew before evaluation. `activation_bytes` is what
    backward keeps of one sample, in fp32. `tensor_plan` names modules, with `*` for a part of a name, and
    is empty where there is none, with the reason beside it; so are `stages`, which are the whole model one
    after another, for pipelines to cut. `sources` has a digest for each file of the code that the run
    brings, by its path there. `config` and `generation_config` are the JSON files of a transformers folder
    that the run was made from: exports begin with them. `compares_samples` says that the loss of samples
    together is not made of the losses of each, as with negatives from the same batch: then nobody can tell
    from single samples who has trained on which. `num_samples` are those of its data function, to train on.
    `has_loaded` says that weights are those of a folder, or that a function has loaded them. Both stand
    in the coordinator's folder alone: what nodes are sent does not tell them, nor does the digest.
    """

    tensors: Annotated[tuple[TensorShape, ...], Field(strict=False)] = ()
    flops_per_token: Annotated[int, Field(gt=0)] | None = None
    first_digest: HexDigest | None = None
    frozen_digest: HexDigest | None = None
    frozen_values: dict[str, Annotated[tuple[float, ...], Field(strict=False)]] = {}
    num_frozen: Annotated[int, Field(ge=0)] = 0
    num_running_statistics: Annotated[int, Field(ge=0)] = 0
    config: dict[str, Any] = {}
    activation_bytes: Annotated[int, Field(ge=0)] | None = None
    tensor_plan: dict[str, TensorStyle] = {}
    no_tensor_plan: str = ""
    stages: Annotated[tuple[StageUnit, ...], Field(strict=False)] = ()
    no_stages: str = ""
    sources: dict[str, HexDigest] = {}
    generation_config: dict[str, Any] = {}
    first_fragments: Positive | None = None
    beginning: Beginning | None = None
    compares_samples: bool = False
    num_samples: int | None = Field(default=None, ge=0, exclude=True)
    has_loaded: bool = Field(default=False, exclude=True)


def first_problem(error: ValidationError, file: type[Section]) -> str:
    """One sentence for the first thing that is wrong in a file, with its place and its value."""
    problem = error.errors()[0]
    if not problem["loc"]:  # tables that do not fit each other, and the sentence says which
        return str(problem["ctx"]["error"])
    table, *rest = (str(part) for part in problem["loc"])
    if table == "model":
        rest = rest[1:]  # the source, by which pydantic names the kind of model
    place = f"[{table}] {'.'.join(rest)}" if rest else f"[{table}]"
    match problem["type"]:
        case "union_tag_invalid":
            source = problem["ctx"]["tag"]
            return f"[{table}] source = {source!r}: not one of {problem['ctx']['expected_tags']}"
        case "missing":
            return f"[{table}] has no {rest[-1]}"
        case "extra_forbidden" if not rest:
            return f"[{table}]: unknown table{nearest_key(table, file)}"
        case "extra_forbidden":
            section = None if len(rest) > 1 else _section_of(table, file)
            return f"{place}: unknown key{nearest_key(rest[-1], section)}"
        case "string_pattern_mismatch":
            return f"{place} = {problem['input']!r}: write {_IN_WORDS[problem['ctx']['pattern']]}"
        case "value_error":
            return f"{place}: {problem['ctx']['error']}"
        case "model_type":
            return f"{table} = {problem['input']!r}: [{table}] is a table of keys and values"
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            return f"{place} = {problem['input']!r}: {message}"


def nearest_key(word: str, section: type[BaseModel] | None) -> str:
    """What was probably meant, to follow a sentence."""
    known = [] if section is None else list(section.model_fields)
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _section_of(table: str, file: type[BaseModel]) -> type[BaseModel] | None:
    """What a table is, unless it may be one of several: the keys of [model] depend on its source."""
    kind = file.model_fields[table].annotation
    sections = [
        k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, BaseModel)
    ]
    return sections[0] if len(sections) == 1 else None


NamedShape = tuple[str, tuple[int, ...]]
"""A tensor's name and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor's place in the canonical vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A contiguous run of whole tensors that is synchronised together."""

    index: int
    start: int  # elements
    num_elements: int

    @property
    def span(self) -> slice:
        """Where the fragment lies in the canonical vector."""
        return slice(self.start, self.start + self.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every tensor's place, and the fragments that cover them."""

    places: tuple[TensorPlace, ...]
    fragments: tuple[Fragment, ...]

    @classmethod
    def of(cls, *fragments: Sequence[NamedShape]) -> "Layout":
        """Lays fragments out one after the other, and so the tensors of each, in the order given."""
        places: list[TensorPlace] = []
        spans: list[Fragment] = []
        offset = 0
        for index, shapes in enumerate(fragments):
            start = offset
            for name, shape in shapes:
                num_elements = math.prod(shape)
                places.append(
                    TensorPlace(name=name, shape=shape, offset=offset, num_elements=num_elements)
                )
                offset += num_elements
            spans.append(Fragment(index=index, start=start, num_elements=offset - start))
        return cls(places=tuple(places), fragments=tuple(spans))

    @property
    def num_elements(self) -> int:
        """Elements of the whole model."""
        return sum(fragment.num_elements for fragment in self.fragments)

    @property
    def largest_fragment(self) -> int:
        """Elements of the largest fragment: what a vector must have that holds any one of them."""
        return max(fragment.num_elements for fragment in self.fragments)

    def span_of(self, fragment: int, start: int, num_elements: int) -> slice:
        """Where a slice of a fragment lies in the canonical vector."""
        start += self.fragments[fragment].start
        return slice(start, start + num_elements)

    def summary(self) -> LayoutSummary:
        """What the coordinator compares between nodes."""
        hasher = blake3.blake3()
        for place in self.places:
            shape = ",".join(map(str, place.shape))
            hasher.update(f"{place.name}:{shape}@{place.offset};".encode())
        for fragment in self.fragments:
            hasher.update(f"fragment {fragment.start}+{fragment.num_elements};".encode())
        return LayoutSummary(
            digest=Digest(hasher.digest()),
            fragment_elements=tuple(fragment.num_elements for fragment in self.fragments),
        )


def layout_of(spec: "RunSpec") -> Layout:
    """The run's layout: fragment by fragment, each in the model's own order.

    Strided (Streaming DiLoCo, Douillard et al. 2025, section 2.1): fragment k of F holds layers
    k, k + F, …, so that every round touches the model in all depths. What belongs to no layer goes,
    the largest first, to the fragment that is smallest by then. Raises ConfigError for a model
    without its description.
    """
    fragments = _cut(spec.tensors, spec.exchange.fragments)
    return Layout.of(*([(tensor.name, tensor.shape) for tensor in each] for each in fragments))


def fragment_sizes(tensors: Sequence[TensorShape], most: int) -> tuple[tuple[int, ...], ...]:
    """Elements of each fragment of a model that is cut into one, into two, and so on up to `most`.

    They differ by times where one tensor, as an embedding, is larger than a fragment would be.
    """
    return tuple(
        tuple(sum(tensor.num_elements for tensor in each) for each in _cut(tensors, count))
        for count in range(1, most + 1)
    )


def _cut(tensors: Sequence[TensorShape], num_fragments: int) -> list[list[TensorShape]]:
    """The tensors of each fragment, in the model's own order."""
    sizes = [0] * num_fragments
    fragment_of: dict[str, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            fragment_of[tensor.name] = tensor.layer % num_fragments
            sizes[tensor.layer % num_fragments] += tensor.num_elements
    outside_layers = [tensor for tensor in tensors if tensor.layer is None]
    for tensor in sorted(outside_layers, key=lambda each: each.num_elements, reverse=True):
        smallest = sizes.index(min(sizes))
        fragment_of[tensor.name] = smallest
        sizes[smallest] += tensor.num_elements
    return [
        [tensor for tensor in tensors if fragment_of[tensor.name] == index]
        for index in range(num_fragments)
    ]
