"""atoll data prepare, show and check. What they do is imported when they do it."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.installed import READING, require_installed
from node.island.data.telling import (
    PIECES,
    counted,
    tell,
    tell_several,
    tell_sources,
    warn_of_names,
)
from protocol.errors import NoInputError, UsageError
from protocol.service.limits import usable_cores
from protocol.terminal import console
from protocol.terminal.console import PathAtHome

if TYPE_CHECKING:
    from node.island.data.foreign import Adopted
    from node.island.data.manifest import Split, State
    from node.island.data.shard_plan import Wanted
    from node.island.data.showing import Shown

LINE_SECONDS = 10.0
"""How often progress is told where nobody sees a line change."""

TEXT_FIELD = "text"

HOW_TO_GO_ON = "what is prepared is kept, and the same command goes on from there"


def _share_or_files(held_out: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
    """What --held-out says: a share of the documents, or files."""
    default = 0.01
    if not held_out:
        return default, ()
    try:
        share = float(held_out[0])
    except ValueError:
        return 0.0, held_out
    if len(held_out) > 1 or not 0 < share <= 0.5:
        raise UsageError(
            f"--held-out {' '.join(held_out)}: a share lies above 0 and is at most 0.5",
            next_step="write one share, as --held-out 0.01, or files",
        )
    return share, ()


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT…")
@click.option(
    "--out", required=True, type=PathAtHome(path_type=Path), help="The folder that is made."
)
@click.option(
    "--tokenizer",
    type=PathAtHome(path_type=Path),
    help="A tokenizer.json, or a folder of transformers with one. Default: bytes.",
)
@click.option(
    "--end-of-document",
    metavar="TOKEN",
    help="The token that ends each document. Default: the tokenizer's eos_token.",
)
@click.option(
    "--field",
    default=TEXT_FIELD,
    show_default=True,
    help="The key or column that has the text or the messages; raw.text is that of 'text' within 'raw'.",
)
@click.option(
    "--held-out",
    multiple=True,
    metavar="SHARE|FILE",
    help="What no node trains on: a share of the documents, by their hash, or files. Default: 0.01.",
)
@click.option(
    "--repeat",
    multiple=True,
    metavar="PATTERN=TIMES",
    help="How often documents of some of the files are trained on: 2.5, or 0.3 for some of them.",
)
@click.option(
    "--add-to",
    type=PathAtHome(path_type=Path),
    metavar="FOLDER",
    help="Tokens to which these are added: --out gets both, and FOLDER stays as it is.",
)
@click.option(
    "--pack",
    type=click.IntRange(8, 1 << 20),
    metavar="CONTEXT",
    help="Fit whole documents into rows for this [model] context, instead of cutting through them.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(1, 2**31 - 1),
    help="Of files of tokens that come without a tokenizer.",
)
@click.option(
    "--token-bytes",
    type=click.Choice(["1", "2", "4"]),
    help="Of flat .bin files of tokens, which do not say it.",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes. Default: one for each core.")
def prepare(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: Path | None,
    end_of_document: str | None,
    field: str,
    held_out: tuple[str, ...],
    repeat: tuple[str, ...],
    add_to: Path | None,
    pack: int | None,
    vocab_size: int | None,
    token_bytes: str | None,
    jobs: int | None,
) -> None:
    """Make tokens of text, once, for a run.

    INPUT is a file, a folder or a glob: text, .jsonl, .json, .csv or .tsv (also .gz, .bz2, .xz, .zst),
    .parquet, .arrow, or a folder that Hugging Face's datasets saved. A record has a "text", "messages",
    ShareGPT's "conversations", or "prompt" and "completion". Where it is interrupted, the same command
    goes on. The folder is there when it is complete.

    Tokens that other software wrote are linked, not copied: Megatron's .bin with .idx, datatrove's
    .ds, flat .bin files. Keep those files where they are.

    \b
    Example:
      atoll data prepare corpus/*.parquet --tokenizer ./tokenizer.json --out ./tokens
    """
    require_installed(READING, to="prepare data")
    from node.island.data.foreign import Adopted
    from node.island.data.shard_plan import Wanted
    from protocol.files.durable import toml_value

    toml_value(out)  # refused here and not after hours: a run file is to name it
    if tokenizer is None:
        _refuse(
            {"--end-of-document": end_of_document},
            because="belongs to a tokenizer, and none is named",
            next_step="add --tokenizer FILE, or leave it out: a zero byte ends documents of bytes",
        )
    share, held_out_inputs = _share_or_files(held_out)
    repeated = tuple(map(_repetition, repeat))
    if add_to is not None:
        _refuse(
            {"--held-out": " ".join(held_out) or None},
            because=f"has no effect: what is held out goes on as in {add_to}",
            next_step="leave it out, or prepare all of the text anew",
        )
    tokens = _files_of_tokens(inputs, but_for=held_out_inputs)
    jobs = jobs or usable_cores()
    if tokens:
        _refuse(
            {
                "--pack": pack,
                "--repeat": " ".join(repeat) or None,
                "--add-to": None if add_to is None else str(add_to),
            },
            because="arranges documents anew, and tokens of other software are read as they are",
            next_step="leave it out, or prepare the text itself",
        )
        _refuse(
            {"--field": field if field != TEXT_FIELD else None},
            because="names what is read of records, and the input is tokens",
            next_step="leave it out",
        )
        _adopt(
            Adopted(
                files=tokens,
                out=out,
                held_out=share,
                held_out_files=_files_of_tokens(held_out_inputs) if held_out_inputs else (),
                tokenizer=tokenizer,
                end_of_document=end_of_document,
                vocab_size=vocab_size,
                token_bytes=None if token_bytes is None else int(token_bytes),
                jobs=jobs,
            )
        )
        return
    _refuse(
        {"--vocab-size": vocab_size, "--token-bytes": token_bytes},
        because="belongs to files of tokens, and the input is text",
        next_step="leave it out",
    )
    _prepare(
        Wanted(
            inputs=inputs,
            out=out,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            field=field,
            held_out=share,
            held_out_inputs=held_out_inputs,
            repeated=repeated,
            row=None if pack is None else pack + 1,
            add_to=add_to,
            jobs=jobs,
        )
    )


def _adopt(adopted: "Adopted") -> None:
    """Links to tokens of other software, and tells what they are."""
    from node.island.data.foreign import adopt

    progress = _Progress("prepared")
    manifest = adopt(adopted, on_state=progress.show)
    progress.end()
    tell(adopted.out, manifest)


def _prepare(wanted: "Wanted") -> None:
    """Makes tokens of text, and tells what became of it."""
    from node.island.data.preparing import prepare as prepare_tokens

    progress = _Progress("prepared")
    with _kept_when_interrupted(progress):
        made = prepare_tokens(
            wanted, on_state=progress.show, say=lambda line: click.echo(line, err=True)
        )
    progress.end()
    if wanted.repeated:
        tell_sources(wanted.repeated, made.tokens_of)
    if made.in_several.num_conversations:
        tell_several(made.in_several)
    warn_of_names(made.named)
    if made.not_utf8:
        click.echo(
            f"warning: {counted(len(made.not_utf8), 'document is', 'documents are')} not UTF-8, as "
            f"{made.not_utf8[0]}: the bytes are learned as they stand; convert the file, as "
            "'iconv -f ISO-8859-1 -t UTF-8'",
            err=True,
        )
    if made.unknown_share:
        click.echo(
            f"warning: {made.unknown_share:.2%} of all tokens stand for text that the tokenizer has no token "
            "for, and what it says is lost; take a tokenizer that falls back to bytes",
            err=True,
        )
    tell(
        wanted.out,
        made.manifest,
        added=None if wanted.add_to is None else (made.new, wanted.add_to),
        num_files=made.num_files,
        num_empty=made.num_empty,
        num_held_out_too=made.num_held_out_too,
        num_cut=made.num_cut,
    )


def _refuse(given: dict[str, str | int | None], *, because: str, next_step: str) -> None:
    """Raises UsageError for an option that was given, and has no effect here."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {value} {because}", next_step=next_step)


def _repetition(text: str) -> tuple[str, float]:
    """A pattern of files, and how often they are read."""
    pattern, _, times = text.rpartition("=")
    try:
        value = float(times)
    except ValueError:
        value = 0.0
    if not (pattern and 0 < value <= MOST_TIMES):
        raise UsageError(
            f"--repeat {text} is no pattern with a number above 0 and up to {MOST_TIMES}",
            next_step="write it as --repeat 'code/*.jsonl=2.5'",
        )
    return pattern, value


MOST_TIMES = 100


@contextmanager
def _kept_when_interrupted(progress: "_Progress") -> Iterator[None]:
    """SIGTERM, which batch systems send, ends it as Ctrl-C does, its processes too; both say how to go on."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        progress.end()
        click.echo(f"stopped; {HOW_TO_GO_ON}", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _files_of_tokens(inputs: tuple[str, ...], *, but_for: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """The inputs, where they are tokens already; none where they are text. Raises UsageError for both."""
    from node.island.data.foreign import TOKEN_SUFFIXES
    from node.island.data.inputs import BESIDE_TOKENS, input_files

    files = [
        path for path in input_files(inputs, but_for=but_for) if path.suffix not in BESIDE_TOKENS
    ]
    tokens = tuple(path for path in files if path.suffix in TOKEN_SUFFIXES)
    if tokens and len(tokens) < len(files):
        other = next(path for path in files if path.suffix not in TOKEN_SUFFIXES)
        raise UsageError(
            f"{tokens[0]} holds tokens, and {other} text",
            next_step="prepare the one and the other apart",
        )
    return tokens


@click.command()
@click.argument("folder", type=PathAtHome(path_type=Path))
@click.option(
    "--held-out", is_flag=True, help="Of what is held out, in place of what is trained on."
)
@click.option(
    "--document",
    "numbers",
    type=click.IntRange(0),
    multiple=True,
    metavar="NUMBER",
    help="This document, counted from 0. Default: three, evenly spread.",
)
@click.option("--whole", is_flag=True, help="Show long texts to their end.")
def show(folder: Path, held_out: bool, numbers: tuple[int, ...], whole: bool) -> None:
    """Show documents of a folder of tokens as text, and what of them is learned.

    A model reads all of a document. Of conversations and answers it learns the lines behind "learned".

    Example: atoll data show ./tokens --document 17
    """
    require_installed(READING, to="show data")
    from node.island.data.manifest import read_manifest
    from node.island.data.showing import TokenFolder, lengths_in_words, some_of

    manifest = read_manifest(folder)
    tokens = TokenFolder(folder, manifest)
    split: Split = "held_out" if held_out else "training"
    lengths = tokens.lengths(split)
    if not len(lengths):
        raise NoInputError(
            f"{folder} has no documents that are {'held out' if held_out else 'trained on'}",
            next_step="show the others, without --held-out" if held_out else "add --held-out",
        )
    piece, one, many = PIECES[manifest.row is not None]
    purpose = "held out" if held_out else "to train on"
    click.echo(f"{counted(len(lengths), one, many)} {purpose}: {lengths_in_words(lengths)}")
    for number in numbers or some_of(len(lengths)):
        _show_document(
            piece, tokens.document(split, number), most=None if whole else SHOWN_CHARACTERS
        )


SHOWN_CHARACTERS = 600
"""Of neighbouring tokens that are learned alike."""

SHOWN_NAME = 40
"""Characters of a source's name."""


def _show_document(piece: str, shown: "Shown", *, most: int | None) -> None:
    learned = (
        "all learned"
        if shown.num_learned == shown.num_tokens
        else f"{shown.num_learned:,} of them learned"
    )
    source = f" of {console.printable(shown.source, most=SHOWN_NAME)}" if shown.source else ""
    padding = f", and {shown.num_padding:,} of padding" if shown.num_padding else ""
    click.echo(
        f"\n{piece} {shown.number}, in {shown.file}{source}: {shown.num_tokens:,} tokens, {learned}{padding}"
    )
    for stretch in shown.stretches:
        mark = "learned" if stretch.is_learned else "read"
        text = console.printable(stretch.text, most=len(stretch.text) if most is None else most)
        for line in text.split("\n"):
            click.echo(f"{mark:>9} | {line}")
            mark = ""


@click.command()
@click.argument("folder", type=PathAtHome(path_type=Path))
def check(folder: Path) -> None:
    """Read a folder of tokens and compare all digests with its manifest.

    Nodes check what they read when they first read it; this reads everything.

    Example: atoll data check ./tokens
    """
    require_installed(READING, to="check data")
    from node.island.data.manifest import check_folder

    progress = _Progress("checked")
    manifest = check_folder(folder, on_state=progress.show)
    progress.end()
    click.echo(f"{folder}: {len(manifest.files)} files as their manifest says")
    click.echo(f"digest {manifest.digest().hex()}")


class _Progress:
    """One line that changes on a terminal; elsewhere a line now and then."""

    def __init__(self, done: str) -> None:
        self._done = done
        self._is_live = sys.stderr.isatty()
        self._began_at = self._told_at = time.monotonic()
        self._has_line = False

    def show(self, state: "State") -> None:
        """Says how far it is, how fast, and how long it takes yet."""
        now = time.monotonic()
        if not self._is_live and now - self._told_at < LINE_SECONDS:
            return
        self._told_at = now
        seconds = now - self._began_at
        rate = (state.done_bytes - state.resumed_bytes) / seconds if seconds > 0 else 0.0
        line = (
            f"{self._done} {console.bytes_in_words(state.done_bytes)} of "
            f"{console.bytes_in_words(state.total_bytes)}"
        )
        if rate > 0:
            left = (state.total_bytes - state.done_bytes) / rate
            line += f", {console.bytes_in_words(rate)}/s, {console.seconds_in_words(left)} left"
        if self._is_live:
            click.echo(f"\r\x1b[2K{line}", err=True, nl=False)
            self._has_line = True
        else:
            click.echo(line, err=True)

    def end(self) -> None:
        """Leaves the line."""
        if self._has_line:
            click.echo("\r\x1b[2K", err=True, nl=False)
