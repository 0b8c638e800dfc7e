"""The commands about the model itself: export, evaluate and sample. Heavy imports happen inside them."""

import math
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.cli import DIRECTORY
from node.installed import require_installed
from protocol.errors import NoInputError, SystemRefusedError, UsageError
from protocol.files.leftovers import TemporaryFolder, remove_leftovers, temporary_directory
from protocol.terminal.console import PathAtHome, print_json, printable
from protocol.terminal.query import json_option
from protocol.trust.credentials import find_home
from protocol.wire.rounds import OTHER_SOURCES
from protocol.wire.vitals import loss_in_words

if TYPE_CHECKING:
    from node.kept import KeptModel
    from node.models.card import DType

_USUAL_PROMPT = "def "  # the demo's text is Python

TOKENIZER = click.option(
    "--tokenizer",
    metavar="PATH",
    type=PathAtHome(path_type=Path),
    help="A tokenizer.json, or a folder with one. Default: that of the run's tokens, or bytes.",
)


ROUND = click.option(
    "--round",
    type=click.IntRange(min=1),
    help="A round of which this node keeps a snapshot.  [default: the newest]",
)

BASE = click.option(
    "--base",
    metavar="FOLDER",
    help="The model that a run's adapters belong to.  [default: base of node.toml]",
)


@click.command()
@click.argument("out", type=PathAtHome(path_type=Path))
@DIRECTORY
@ROUND
@TOKENIZER
@BASE
@click.option("--merged", is_flag=True, help="Add a run's adapters to their model.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="What weights are rounded to.  [default: as in the folder that the run began with; of a new "
    "model and of adapters fp32]",
)
@click.option(
    "--code",
    metavar="FOLDER",
    type=PathAtHome(path_type=Path, exists=True, file_okay=False),
    help="Add frozen values and running statistics, as batch norm's, by the run's functions in FOLDER, "
    "which are run.",
)
def export(
    out: Path,
    folder: Path | None,
    round: int | None,
    tokenizer: Path | None,
    base: str | None,
    merged: bool,
    dtype: "DType | None",
    code: Path | None,
) -> None:
    """Write the model of this node's newest round, or of an earlier one, to the folder OUT.

    OUT holds safetensors, a config.json that the transformers library loads, the tokenizer, and a
    model card that says where the model comes from. Of a run with [lora] it holds the adapters, as the
    peft library loads them, unless they are --merged.

    Example: atoll export ./model --round 120
    """
    require_installed(to="export a model")
    model, dtype, problem = _exported(
        find_home(folder),
        out,
        round=round,
        tokenizer=tokenizer,
        base=base,
        is_merged=merged,
        dtype=dtype,
        code=code,
    )
    rounded = "" if dtype == "fp32" else ", rounded (--dtype fp32 keeps all bits)"
    what = "model" if merged or model.spec.adapters is None else "adapters"
    click.echo(
        f"wrote the {what} at round {model.round} ({model.outer_digest.hex()[:12]}) to {out} in "
        f"{dtype}{rounded}"
    )
    if problem:
        click.echo(f"transformers does not load it: {problem}; see {out / 'README.md'}")


def _exported(
    home: Path,
    out: Path,
    *,
    round: int | None,
    tokenizer: Path | None,
    base: str | None,
    is_merged: bool | None,
    dtype: "DType | None" = None,
    code: Path | None = None,
) -> "tuple[KeptModel, DType, str]":
    """Writes a node's model; with `is_merged` None adapters are merged where there are any.

    Returns the model, the type of its weights, and why transformers does not load them.
    """
    from node.kept import kept_model, places_of, say_of_many
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: a damaged snapshot is told there
    model = kept_model(home, round)
    from node.models.card import Origin, contributions_in
    from node.models.export import export_model, usual_dtype
    from node.models.folders import name_of_model
    from node.models.text import end_of_text, files_of_tokenizer

    places = places_of(home, base=base, typed_in=Path.cwd())
    has_adapters = model.spec.adapters is not None
    if is_merged and not has_adapters:
        raise UsageError(
            f"--merged adds adapters to their model, and run {model.spec.run.name!r} trains all of it",
            next_step="leave --merged out",
        )
    merges = has_adapters if is_merged is None else is_merged
    if merges and places.base is None:
        raise NoInputError(
            "adapters are added to their model, and nothing says where it is",
            next_step="name its folder with --base, or as base in node.toml",
        )
    dtype = dtype or usual_dtype(model.spec, is_merged=merges)
    say_of_many(model.layout.num_elements, f"writing the model of round {model.round} to {out}")
    problem = export_model(
        spec=model.spec,
        parameters=model.parameters,
        origin=Origin(
            run=model.spec.run.name,
            run_digest=model.spec.digest(),
            round=model.round,
            outer_digest=model.outer_digest,
            contributions=contributions_in(home, model.spec, until=model.round),
        ),
        out=out,
        tokenizer=files_of_tokenizer(model.spec, places, named=tokenizer),
        end_of_text=end_of_text(model.spec, places, named=tokenizer),
        base=places.base if merges else None,
        base_name="" if places.base is None else name_of_model(places.base.resolve()),
        dtype=dtype,
        code=code,
    )
    return model, dtype, problem


@click.command()
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
@DIRECTORY
@ROUND
@TOKENIZER
@BASE
@click.option(
    "--tasks",
    metavar="NAMES",
    help="Names of lm-eval's tasks, with commas between them. 'lm-eval ls tasks' lists them.",
)
@click.option(
    "--held-out",
    is_flag=True,
    help="Instead: its loss on the run's held-out samples, on the CPU, also by source.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="With --held-out: so many of them.  [default: as the run evaluates]",
)
@json_option
def evaluate(
    options: tuple[str, ...],
    folder: Path | None,
    round: int | None,
    tokenizer: Path | None,
    base: str | None,
    tasks: str | None,
    held_out: bool,
    samples: int | None,
    is_json: bool,
) -> None:
    """Measure the model of this node's newest round, or of an earlier one, with EleutherAI's lm-eval.

    The model is exported to a temporary folder below $TMPDIR, and adapters are added to their model. Its
    OPTIONS go to lm-eval as they are. With --held-out nothing is exported, and lm-eval not needed.

    \b
    Examples:
      atoll evaluate --tasks arc_easy,hellaswag
      atoll evaluate --tasks mine --round 120 -- --include_path ./tasks --limit 100
      atoll evaluate --held-out --samples 512
    """
    require_installed(to="evaluate a model")
    if held_out:
        _refuse_beside_held_out(
            {"--tasks": tasks, "--": " ".join(options), "--tokenizer": tokenizer}
        )
        _measure_held_out(find_home(folder), round, base=base, samples=samples, is_json=is_json)
        return
    if tasks is None:
        raise UsageError(
            "nothing says what the model is measured on",
            next_step="name lm-eval's tasks with --tasks, or the run's held-out samples with --held-out",
        )
    if samples is not None or is_json:
        raise UsageError(
            "--samples and --json belong to --held-out, and lm-eval has options of its own",
            next_step="leave them out, as in --tasks mine -- --limit 100 --output_path out.json",
        )
    _refuse_to_measure_what_has_no_text(find_home(folder), tokenizer)
    missing = [name for name in ("lm_eval", "transformers") if find_spec(name) is None]
    if missing:
        raise SystemRefusedError(
            f"{' and '.join(missing)} is not installed, and needed to evaluate a model",
            next_step="pip install 'atoll[lm-eval]'",
        )
    from node.models.export import tokenizer_apart

    remove_leftovers(temporary_directory())
    scratch = TemporaryFolder("evaluate")
    try:
        out = scratch.path / "model"
        model, _, problem = _exported(
            find_home(folder), out, round=round, tokenizer=tokenizer, base=base, is_merged=None
        )
        if problem:
            raise UsageError(
                f"lm-eval loads models by transformers, which does not load this one: {problem}",
                next_step="export it with 'atoll export OUT', and measure it by a program of your own",
            )
        click.echo(f"evaluating round {model.round} ({model.outer_digest.hex()[:12]})", err=True)
        command = (sys.executable, "-m", "lm_eval", "run", "--model", "hf")
        apart = tokenizer_apart(out, scratch.path / "tokenizer")
        told = f"pretrained={out}" + ("" if apart is None else f",tokenizer={apart}")
        arguments = ("--model_args", told, "--tasks", tasks, *options)
        code = subprocess.run((*command, *arguments), check=False).returncode
    finally:
        scratch.remove()
    if code:
        raise SystemRefusedError(
            f"lm-eval ended with {code}; its own words stand above",
            next_step="correct --tasks or the options behind --; 'lm-eval run --help' lists them",
        )


def _refuse_beside_held_out(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value:
            raise UsageError(
                f"{option} {value} is for lm-eval, which measures nothing with --held-out",
                next_step="leave it out, or --held-out",
            )


def _measure_held_out(
    home: Path, round: int | None, *, base: str | None, samples: int | None, is_json: bool
) -> None:
    from node.kept import kept_model, places_of
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: a damaged snapshot is told there
    model = kept_model(home, round)
    from node.models.measuring import held_out_loss

    count = samples or model.spec.evaluation.samples
    digest = model.outer_digest.hex()
    click.echo(
        f"measuring round {model.round} ({digest[:12]}) on up to {count:,} held-out samples",
        err=True,
    )
    places = places_of(home, base=base, typed_in=Path.cwd())
    found = held_out_loss(model, places, samples=samples)
    if is_json:
        print_json(
            {
                "round": model.round,
                "digest": digest,
                "held_out_loss": _number(found.loss),
                "held_out_metric": None if found.metric is None else _number(found.metric),
                "tokens": found.tokens,
                "by_source": [
                    {"source": e.source, "loss": _number(e.loss), "tokens": e.tokens}
                    for e in found.by_source
                ],
            }
        )
        return
    metric = "" if found.metric is None else f", metric {found.metric:.4g}"
    click.echo(f"held-out loss {loss_in_words(found.loss)}{metric}, of {found.tokens:,} tokens")
    names = {
        e.source: printable(e.source, most=LONGEST_SHOWN) or OTHER_SOURCES for e in found.by_source
    }
    width = max(map(len, names.values()), default=0)
    for each in found.by_source:
        click.echo(
            f"  {names[each.source]:<{width}}  {loss_in_words(each.loss)}, of {each.tokens:,} tokens"
        )


def _number(value: float) -> float | None:
    """JSON has no number for the loss of a ruined model."""
    return value if math.isfinite(value) else None


LONGEST_SHOWN = 40


def _refuse_to_measure_what_has_no_text(home: Path, tokenizer: Path | None) -> None:
    """Raises AtollError before anybody installs what would not measure this run's model either."""
    from node.kept import RUN_FILE, kept_run
    from node.models.text import refusal_without_data

    if not (home / RUN_FILE).is_file():
        return  # what is missing is said where the model is read
    spec = kept_run(home)
    if spec.model.source == "function":
        raise UsageError(
            f"lm-eval measures models that transformers loads, and that of run {spec.run.name!r} is a "
            "function's",
            next_step="export it with 'atoll export OUT', and measure it by a program of your own",
        )
    if spec.data.source == "loop" and tokenizer is None:
        raise refusal_without_data(spec)


@click.command()
@DIRECTORY
@ROUND
@TOKENIZER
@BASE
@click.option("--prompt", help="Text to go on from.  [default: 'def ']")
@click.option(
    "--chat",
    metavar="TEXT",
    help="What a user says, instead of --prompt: the model answers it by its tokenizer's chat template.",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1, 100_000),
    help="Most tokens to write. Default: 300 where they are bytes, else 100.",
)
@click.option(
    "--bytes", "num_bytes", type=click.IntRange(1, 100_000), help="The same, where they are bytes."
)
@click.option("--temperature", default=0.7, show_default=True, type=click.FloatRange(0, 10))
@click.option("--seed", default=0, show_default=True, type=int)
def sample(
    folder: Path | None,
    round: int | None,
    tokenizer: Path | None,
    base: str | None,
    prompt: str | None,
    chat: str | None,
    num_tokens: int | None,
    num_bytes: int | None,
    temperature: float,
    seed: int,
) -> None:
    """Let the model of this node's newest round, or of an earlier one, write a little text.

    \b
    Examples:
      atoll sample --prompt "class " --tokens 500
      atoll sample --chat "What is a swarm?"
    """
    require_installed(to="let a model write")
    if chat is not None and prompt is not None:
        raise UsageError(
            "--chat and --prompt both say what the model goes on from",
            next_step="leave one of them out",
        )
    from node.kept import kept_model, places_of
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: a damaged snapshot is told there
    home = find_home(folder)
    model = kept_model(home, round)
    from node.models.text import ByteText, text_of_run

    places = places_of(home, base=base, typed_in=Path.cwd())
    text = text_of_run(model.spec, places, named=tokenizer)
    are_bytes = isinstance(text, ByteText)
    if num_bytes is not None and (num_tokens is not None or not are_bytes):
        raise UsageError(
            f"--bytes {num_bytes} is for a run whose tokens are bytes, instead of --tokens",
            next_step="give --tokens alone",
        )
    prompt = _USUAL_PROMPT if prompt is None else prompt
    start_tokens = text.tokens_of(prompt) if chat is None else text.tokens_that_ask(chat)
    from node.island.models.generate import model_that_writes

    writes_on = model_that_writes(model.spec, model.parameters, base=places.base)
    written = writes_on(
        start_tokens,
        num_tokens=num_tokens or num_bytes or (300 if are_bytes else 100),
        temperature=temperature,
        seed=seed,
        ends=text.ends,
    )
    if chat is not None:
        is_whole = bool(written) and written[-1] in text.ends
        said = text.text_of(written[:-1] if is_whole else written)
    else:
        said = text.text_of([*(start_tokens if prompt else ()), *written])
    # A model may write what steers a terminal; a program that reads this gets it as it is.
    click.echo(printable(said, most=len(said)) if sys.stdout.isatty() else said)
