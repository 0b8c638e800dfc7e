"""What a preparation tells a person: what was made, what it cost, and what to look at."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.files.durable import as_typed
from protocol.terminal import console

if TYPE_CHECKING:
    from node.island.data.manifest import Manifest
    from node.island.data.shard_writing import InSeveral, Named

PIECES = {
    False: ("document", "document", "documents"),
    True: ("piece", "piece of a document", "pieces of documents"),
}
"""What offsets part tokens into, by whether rows are packed."""


def tell_sources(repeated: tuple[tuple[str, float], ...], tokens_of: dict[str, int]) -> None:
    """What is trained on of each source, and its share of the whole."""
    total = sum(tokens_of.values())
    named = {
        pattern: f"{pattern}, {'once' if times == 1 else f'{times:g} times'}"
        for pattern, times in repeated
    }
    for source, num_tokens in tokens_of.items():
        if source or num_tokens:
            click.echo(
                f"{named.get(source, 'others, once')}: {console.count_in_words(num_tokens)} tokens to train "
                f"on, {num_tokens / total:.1%} of all"
            )


def _warn_of_cuts(context: int | None, num_cut: int) -> None:
    """Of answers that are learned without what asks for them."""
    if context is None:
        click.echo(
            "warning: samples cut through conversations, so that answers are learned without what asks for "
            "them; prepare them with --pack CONTEXT, which keeps them whole",
            err=True,
        )
    elif num_cut:
        click.echo(
            f"warning: {num_cut:,} pieces begin within a document that is longer than {context:,} tokens, "
            "and what they answer is learned without what asks for it; pack them for a longer context, or "
            "leave them out",
            err=True,
        )


def tell_several(several: "InSeveral") -> None:
    """What such a chat template costs, once for all."""
    click.echo(
        f"{several.num_conversations:,} conversations became {several.num_documents:,} documents with "
        f"{several.num_tokens / several.num_tokens_once:.1f} times their tokens: their chat template writes "
        "earlier answers otherwise once others follow"
    )


def counted(number: int, one: str, many: str) -> str:
    """So many things, by their name for one or for many."""
    return f"{number:,} {one if number == 1 else many}"


def warn_of_names(named: "Named") -> None:
    """Of special tokens that somebody has written out by their names."""
    if named.num_texts:
        click.echo(
            f"warning: {counted(named.num_texts, 'text has', 'texts have')} the name of a special token, as "
            f"{named.in_text}: there it is letters and not that token; let a chat template write the tokens "
            "of conversations, which records have as 'messages'",
            err=True,
        )
    if named.num_conversations:
        have = counted(named.num_conversations, "conversation has", "conversations have")
        click.echo(
            f"warning: {have} the name of a special token in what is said, as {named.in_conversation}: there "
            "it is that token, and may end a turn or begin another; remove it",
            err=True,
        )


def tell(
    out: Path,
    manifest: "Manifest",
    *,
    added: "tuple[Manifest, Path] | None" = None,
    num_files: int | None = None,
    num_empty: int = 0,
    num_held_out_too: int = 0,
    num_cut: int = 0,
) -> None:
    """What was made, and the lines of the run file that name it."""
    from node.island.data.preparing import as_run_file

    told = manifest if added is None else added[0]
    trained, kept_back = told.num_tokens("training"), told.num_tokens("held_out")
    num_documents = sum(s.num_documents for s in (*told.training, *told.held_out))
    *_, pieces = PIECES[manifest.row is not None]
    files = "" if num_files is None else f" from {num_files:,} file{'s' * (num_files != 1)}"
    left_out = f"; {num_empty:,} without text left out" if num_empty else ""
    if num_held_out_too:
        left_out += f"; {num_held_out_too:,} left out of training, as they are held out too"
    click.echo(
        f"{out}: {'' if added is None else 'added '}{console.count_in_words(trained)} tokens to train on and "
        f"{console.count_in_words(kept_back)} held out, of {num_documents:,} {pieces}{files}{left_out}"
    )
    if added is not None:
        click.echo(
            f"{out} has with {added[1]} {console.count_in_words(manifest.num_tokens('training'))} tokens to "
            f"train on and {console.count_in_words(manifest.num_tokens('held_out'))} held out; a run that "
            f"has begun keeps {added[1]}, and a fork of it may take {out}: "
            "atoll node fork ROUND"
        )
    if manifest.num_tokens("held_out") > manifest.num_tokens("training"):
        click.echo(
            "warning: more is held out than there is to train on, as whole documents are; prepare more of "
            "them, or name those that are held out: --held-out FILE",
            err=True,
        )
    if manifest.has_answers:
        _warn_of_cuts(None if manifest.row is None else manifest.row - 1, num_cut)
    click.echo(f"next: atoll init my-run --data {as_typed(out)}; or in a run file of yours:\n")
    click.echo(as_run_file(out, manifest), nl=False)
    if manifest.has_answers:
        click.echo("across_documents = false")
    if manifest.tokenizer_digest is not None:
        click.echo(
            f"# or, where each node has tokens of its own: private = true, and instead of paths and "
            f'digest\n# tokenizer = "{manifest.tokenizer_digest}"'
        )
    context = "" if manifest.row is None else f"\ncontext = {manifest.row - 1}"
    click.echo(f"\n[model]\nvocab_size = {manifest.vocab_size}{context}")
