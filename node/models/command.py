"""The commands about the model itself: export and sample. Heavy imports happen inside them."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.cli import DIRECTORY
from node.installed import require_installed
from protocol.errors import NoInputError, UsageError
from protocol.trust.credentials import find_home

if TYPE_CHECKING:
    from node.models.card import DType

TOKENIZER = click.option(
    "--tokenizer",
    metavar="PATH",
    type=click.Path(path_type=Path),
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
@click.argument("out", type=click.Path(path_type=Path))
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
def export(
    out: Path,
    folder: Path | None,
    round: int | None,
    tokenizer: Path | None,
    base: str | None,
    merged: bool,
    dtype: "DType | None",
) -> None:
    """Write the model of this node's newest round, or of an earlier one, to the folder OUT.

    OUT holds safetensors, a config.json that the transformers library loads, the tokenizer, and a
    model card that says where the model comes from. Of a run with [lora] it holds the adapters, as the
    peft library loads them, unless they are --merged.

    Example: atoll export ./model --round 120
    """
    require_installed(to="export a model")
    from node.kept import kept_model, places_of
    from protocol.terminal.logging import start_logging

    start_logging(as_json=False)  # to standard error: a damaged snapshot is told there
    home = find_home(folder)
    model = kept_model(home, round)
    from node.models.card import Origin, contributions_in
    from node.models.export import export_model, usual_dtype
    from node.models.text import files_of_tokenizer

    places = places_of(home, base=base, typed_in=Path.cwd())
    if merged and model.spec.adapters is None:
        raise UsageError(
            f"--merged adds adapters to their model, and run {model.spec.run.name!r} trains all of it",
            next_step="leave --merged out",
        )
    if merged and places.base is None:
        raise NoInputError(
            "--merged adds adapters to their model, and nothing says where it is",
            next_step="name its folder with --base, or as base in node.toml",
        )
    dtype = dtype or usual_dtype(model.spec, is_merged=merged)
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
        base=places.base if merged else None,
        base_name="" if places.base is None else places.base.resolve().name,
        dtype=dtype,
    )
    rounded = "" if dtype == "fp32" else ", rounded (--dtype fp32 keeps all bits)"
    click.echo(
        f"wrote the model at round {model.round} ({model.outer_digest.hex()[:12]}) to {out} in "
        f"{dtype}{rounded}"
    )
    if problem:
        click.echo(f"transformers does not load it: {problem}")


@click.command()
@DIRECTORY
@ROUND
@TOKENIZER
@BASE
@click.option("--prompt", default="def ", show_default=True, help="Text to go on from.")
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
    prompt: str,
    num_tokens: int | None,
    num_bytes: int | None,
    temperature: float,
    seed: int,
) -> None:
    """Let the model of this node's newest round, or of an earlier one, write a little text.

    Example: atoll sample --prompt "class " --tokens 500
    """
    require_installed(to="let a model write")
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
    from node.island.models.generate import model_that_writes

    start_tokens = text.tokens_of(prompt)
    writes_on = model_that_writes(model.spec, model.parameters, base=places.base)
    written = writes_on(
        start_tokens,
        num_tokens=num_tokens or num_bytes or (300 if are_bytes else 100),
        temperature=temperature,
        seed=seed,
        ends=text.ends,
    )
    click.echo(text.text_of([*(start_tokens if prompt else ()), *written]))
