"""The card of a model that is exported: where it comes from, who trained it, and how it is loaded."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from node.config import HISTORY_FILE
from node.disk.history import History
from node.exchange.codecs.registry import codec_named
from protocol.run.models import Description, FunctionModel
from protocol.run.run_spec import RunSpec
from protocol.terminal.console import bytes_in_words, count_in_words
from protocol.wire.rounds import Commit, Digest, NodeId

DType = Literal["fp32", "bf16", "fp16"]

TORCH_NAMES: Mapping[DType, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

CARD = "README.md"
AUTO_TOKENIZER = "AutoTokenizer"

_ALL = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """Of the rounds that a node's folder still has the commits of."""

    rounds: range  # from the first to the last
    tokens_of: Mapping[NodeId, int]
    most_bytes: int  # of contributions and results on the wire, all nodes together

    @property
    def tokens(self) -> int:
        """What commits took, of all nodes."""
        return sum(self.tokens_of.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a model comes from."""

    run: str
    run_digest: Digest
    round: int
    outer_digest: Digest
    contributions: Contributions | None = field(default=None)

    def facts(self) -> dict[str, object]:
        """For machines."""
        facts: dict[str, object] = {
            "run": self.run,
            "run_digest": self.run_digest.hex(),
            "round": self.round,
            "outer_digest": self.outer_digest.hex(),
        }
        if self.contributions is not None:
            facts |= {
                "first_counted_round": self.contributions.rounds.start,
                "tokens": self.contributions.tokens,
                "most_exchanged_bytes": self.contributions.most_bytes,
                "tokens_by_node": dict(self.contributions.tokens_of),
            }
        return facts


def contributions_in(folder: Path, spec: RunSpec, *, until: int) -> Contributions | None:
    """Adds up the commits in a node's folder, up to a round; None where it has none of them."""
    if not (folder / HISTORY_FILE).is_file():
        return None
    history = History(folder / HISTORY_FILE)
    commits = [each for each in history.after(0, max_bytes=_ALL) if each.round <= until]
    return contributions_of(commits, spec) if commits else None


def contributions_of(commits: list[Commit], spec: RunSpec) -> Contributions:
    """Adds up commits, in the order of their rounds."""
    up, down = codec_named(spec.exchange.uplink), codec_named(spec.exchange.downlink)
    tokens_of: Counter[NodeId] = Counter()
    most_bytes = 0
    for commit in commits:
        in_round: dict[NodeId, int] = {}
        for taken in commit.slices:
            if taken.digest is None:
                continue
            for contributor in taken.contributors:
                before = in_round.get(contributor.node_id, 0)
                in_round[contributor.node_id] = max(before, contributor.tokens)
            # Its reducer is one of the contributors and one of the holders, and sends itself nothing.
            most_bytes += max(0, len(taken.contributors) - 1) * up.most_bytes(taken.num_elements)
            most_bytes += max(0, len(taken.holder_ids) - 1) * down.most_bytes(taken.num_elements)
        tokens_of.update(in_round)
    return Contributions(
        rounds=range(commits[0].round, commits[-1].round + 1),
        tokens_of=dict(sorted(tokens_of.items(), key=lambda item: (-item[1], item[0]))),
        most_bytes=most_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """In which form a model is written."""

    dtype: DType
    is_merged: bool
    base_name: str
    num_files: int = 1  # of weights, which a function's model reads one after another
    has_all: bool = False  # frozen values and running statistics are in the file too


def card_of(spec: RunSpec, origin: Origin, form: Form, *, tokenizer_by: str, problem: str) -> str:
    """README.md: front matter as model hubs read it, the facts, and how to load the model.

    `tokenizer_by` is transformers' class that reads the tokenizer; empty where there is none.
    """
    is_adapter = spec.adapters is not None and not form.is_merged
    is_function = isinstance(spec.model, FunctionModel)  # which may build a model of any kind
    library = "peft" if is_adapter else "transformers"
    return "\n".join(
        [
            "---",
            *([] if problem else [f"library_name: {library}"]),
            *([] if problem or is_function else ["pipeline_tag: text-generation"]),
            *([f"base_model: {form.base_name}"] if spec.adapters and form.base_name else []),
            "tags:",
            "- atoll",
            *(["- lora"] if is_adapter else []),
            "---",
            "",
            f"# {origin.run}, round {origin.round}",
            "",
            "A model trained with Atoll, by nodes far apart.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in _rows(spec, origin, form)),
            "",
            _way_to_load(spec, form, tokenizer_by, problem),
        ]
    )


def _rows(spec: RunSpec, origin: Origin, form: Form) -> list[tuple[str, str]]:
    count = f"{spec.num_parameters:,} ({count_in_words(spec.num_parameters)})"
    if spec.adapters is not None:
        count += " trained"
    counted = spec.counted
    rows = [
        ("parameters", f"{count}, {TORCH_NAMES[form.dtype]}"),
        *_rows_of_adapters(spec, form),
        *([("context", f"{spec.model.context} tokens a sample")] if counted == "tokens" else []),
        ("run", f"`{origin.run}`, digest `{origin.run_digest.hex()}`"),
        ("round", str(origin.round)),
        ("digest of the outer state", f"`{origin.outer_digest.hex()}`"),
        ("data", spec.data.source),
    ]
    of = origin.contributions
    if of is None:
        return rows
    since = "" if of.rounds.start == 1 else f", rounds {of.rounds.start} to {of.rounds[-1]}"
    shares = ", ".join(
        f"`{node_id[:12]}` {tokens:,}" for node_id, tokens in of.tokens_of.items() if tokens
    )
    return [
        *rows,
        (f"{counted} trained{since}", f"{of.tokens:,}"),
        (f"bytes exchanged{since}", f"{bytes_in_words(of.most_bytes)} at most, all nodes together"),
        (f"{counted} by node{since}", shares or "none"),
    ]


def _rows_of_adapters(spec: RunSpec, form: Form) -> list[tuple[str, str]]:
    """What was adapted, and how."""
    if spec.adapters is None or spec.description is None:
        return []
    kinds = spec.description.config.get("architectures") or ["model"]
    frozen = spec.description.num_frozen
    name = f"`{form.base_name}`, a" if form.base_name else "a"
    base = f"{name} {kinds[0]} of {frozen:,} ({count_in_words(frozen)}) parameters"
    found = {tensor.name.partition(".lora_")[0].rpartition(".")[2] for tensor in spec.tensors}
    return [
        ("base model", f"{base}, digest `{spec.description.frozen_digest}`"),
        ("adapters", "added to the base model" if form.is_merged else "alone, beside it"),
        ("rank, alpha", f"{spec.adapters.rank}, {spec.adapters.alpha:g}"),
        ("targets", ", ".join(sorted(found))),
    ]


def _way_to_load_function(spec: RunSpec, model: FunctionModel, form: Form) -> str:
    """By the function itself: it makes what is not trained, and buffers."""
    has_all = form.has_all
    reads = ['module.load_state_dict(load_file("model.safetensors"), strict=False)']
    if form.num_files > 1:
        reads = [
            'for file in Path(".").glob("model-*.safetensors"):',
            "    module.load_state_dict(load_file(file), strict=False)",
        ]
    described = spec.description or Description()
    has_norms = described.num_running_statistics > 0 and not has_all
    draws_frozen = described.num_frozen > 0 and not has_all
    held = ["what the run trains"]
    held += ["what is not trained"] if described.num_frozen and has_all else []
    held += ["running statistics"] if described.num_running_statistics and has_all else []
    imports = ["from pathlib import Path", ""] if form.num_files > 1 else []
    imports += [*(["import torch"] if draws_frozen or has_norms else [])]
    imports += ["from safetensors.torch import load_file"]
    imports += [*(["from torch.utils.data import DataLoader"] if has_norms else []), ""]
    names = {model.function, *([spec.data.function] if has_norms and spec.data.function else [])}
    imports += [f"from {each.replace(':', ' import ')}" for each in sorted(names)]
    if draws_frozen:
        seed = f"torch.manual_seed({spec.run.seed})  # what is not trained is drawn from it"
        imports += ["", seed]
    lines = [
        "```python",
        *imports,
        "",
        *_way_to_build(spec, model, with_loss=has_norms),
        *reads,
        *(_way_to_statistics(spec) if has_norms else ()),
        *(["module.eval()"] if described.num_running_statistics and has_all else ()),
        "```",
        "",
        f"{'The file has' if form.num_files == 1 else 'The files have'} {' and '.join(held)}. "
        "All else is as the function makes it."
        + (
            " Another version of torch may draw other values: 'atoll export --code' writes the run's own."
            if draws_frozen
            else ""
        )
        + (" Running statistics of its norms are computed from data." if has_norms else ""),
        "",
    ]
    return "\n".join(lines)


def _way_to_build(spec: RunSpec, model: FunctionModel, *, with_loss: bool) -> list[str]:
    """What makes the module; a function of a run of loops may return it alone."""
    made = _call(model.function, model.arguments)
    if spec.data.source == "loop":
        return [f"made = {made}", "module = made[0] if isinstance(made, tuple) else made"]
    return [f"module, {'loss, ' if with_loss else ''}*_ = {made}"]


def _way_to_statistics(spec: RunSpec) -> list[str]:
    """What computes running statistics, which no exchange has, for the weights that were read."""
    is_of_loops = spec.data.source == "loop"
    data = (
        f"training = …  # a dataset whose batches the {'module' if is_of_loops else 'loss'} takes"
    )
    if spec.data.function is not None:
        data = f"training, _ = {_call(spec.data.function, spec.data.arguments)}"
    return [
        "",
        data,
        "norms = [m for m in module.modules() if getattr(m, 'running_mean', None) is not None]",
        f"batches = DataLoader(training, batch_size={spec.inner.batch}, shuffle=True, "
        "collate_fn=getattr(training, 'collate_fn', None))",
        "with torch.no_grad():",
        "    for number, batch in enumerate(batches, 1):",
        "        for norm in norms:",
        "            norm.momentum = 1 / number  # a mean over all batches",
        f"        {'module.train()(batch)' if is_of_loops else 'loss(module.train(), batch)'}",
        "module.eval()",
    ]


def _call(function: str, arguments: Mapping[str, object]) -> str:
    told = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{function.partition(':')[2]}({told})"


def _way_to_load(spec: RunSpec, form: Form, tokenizer_by: str, problem: str) -> str:
    if spec.adapters is not None and not form.is_merged:
        return (
            "```python\n"
            "from peft import PeftModel\n"
            f"from transformers import AutoModelForCausalLM{f', {tokenizer_by}' if tokenizer_by else ''}\n\n"
            + (f'tokenizer = {tokenizer_by}.from_pretrained(".")\n' if tokenizer_by else "")
            + f'base = AutoModelForCausalLM.from_pretrained("{form.base_name or "BASE"}")\n'
            'model = PeftModel.from_pretrained(base, ".")\n'
            "```\n"
        )
    if isinstance(spec.model, FunctionModel):
        way = _way_to_load_function(spec, spec.model, form)
        kinds = spec.description.config.get("architectures") if spec.description else None
        if kinds and not problem:
            way += f'\nAs transformers loads it: `transformers.{kinds[0]}.from_pretrained(".")`.\n'
        return way
    if problem:
        return (
            f"transformers has no model like it: {problem}. Weights are in the safetensors format, by "
            "their names in Atoll.\n"
        )
    if tokenizer_by:
        return (
            "```python\n"
            f"from transformers import AutoModelForCausalLM, {tokenizer_by}\n\n"
            f'tokenizer = {tokenizer_by}.from_pretrained(".")\n'
            'model = AutoModelForCausalLM.from_pretrained(".")\n'
            'prompt = tokenizer("The sea", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))\n"
            "```\n"
        )
    return "The tokenizer is not in this folder: token numbers are those of the run's data.\n"
