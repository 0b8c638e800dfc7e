"""The lines `atoll …` that README, docs and `--help` show, for tests that parse and type them."""

import re
import shlex
from collections.abc import Iterator

import click

from protocol.terminal import cli
from tests.unit.test_docs import PAGES, code_of


def _all_of(command: click.Command, context: click.Context) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _all_of(found, click.Context(found, info_name=name, parent=context))


def _plain(line: str) -> str:
    """Without its comment, on one line."""
    return " ".join(re.sub(r"\s#\s.*", "", line).split())


def _is_a_name(line: str) -> bool:
    """Whether a sentence only names the command or its option: what the command needs is left out."""
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    command: click.Command = cli.root
    words = shlex.split(re.split(r" [|>]", line)[0])[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return False
        command, context = found, click.Context(found, info_name=name, parent=context)
    if isinstance(command, click.Group) and not command.invoke_without_command:
        return not words and command is not cli.root
    given, _, _ = command.make_parser(context).parse_args([*words])
    return any(
        param.required
        and not (isinstance(given.get(param.name), str | tuple) and given[param.name])
        for param in command.params
        if "--help" not in words
    )


def shown() -> set[str]:
    """Every line `atoll …` of the pages, in and outside sentences, and of the examples of `--help`."""
    lines = set()
    for page in PAGES:
        if page.name in ("reference.md", "CHANGELOG.md"):  # generated from --help; a log
            continue
        blocks = {
            _plain(line.strip().removeprefix("$ "))
            for line in page.read_text().splitlines()
            if line.startswith("    ")
        }
        for code in code_of(page):
            line = _plain(code)
            if re.match(r"atoll( |$)", line) and (line in blocks or not _is_a_name(line)):
                lines.add(line)
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    for command in _all_of(cli.root, context):
        for line in re.findall(r"^ *(?:Example: )?(atoll .+)$", command.help or "", flags=re.M):
            lines.add(_plain(line))
    return lines
