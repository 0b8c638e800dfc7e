"""Groups of commands that are imported when they are called, by name from a table.

Nothing is imported for --help, and rooms of the coordinator and the node are named as text only, so
that no import leads from protocol to them.
"""

import difflib
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from protocol.errors import UsageError

OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "ban": ("nodes expel",),
    "cancel": ("run stop",),
    "chat": ("sample",),
    "continue": ("run resume",),
    "curves": ("track",),
    "dashboard": ("coordinator start --dashboard", "status --watch"),
    "end": ("run stop", "node drain"),
    "finish": ("run stop",),
    "generate": ("sample",),
    "help": ("--help",),
    "history": ("rounds",),
    "kick": ("nodes expel",),
    "leave": ("node drain",),
    "list": ("nodes", "invite list"),
    "ps": ("status",),
    "quit": ("node drain",),
    "remove": ("nodes expel",),
    "serve": ("coordinator start",),
    "stop": ("run stop", "node drain"),
    "train": ("node start",),
    "undo": ("run rollback",),
    "version": ("--version",),
    "watch": ("status --watch",),
}
"""What people type for commands that are called otherwise here."""

NO_COMMAND_FOR: Mapping[str, str] = {
    **dict.fromkeys(
        ("limit", "limits", "node limit", "node limits"),
        "write max_upload, hours, only_idle, on_battery, load or max_disk into the node's node.toml, and "
        "start it again; 'atoll invite limit' bounds how many nodes of an invite take part",
    ),
    "coordinator stop": "press Ctrl-C where it runs, or have systemd stop its service; 'atoll run stop' ends "
    "the run",
    "relay stop": "press Ctrl-C where it runs, or have systemd stop its service",
}
"""What is done without a command."""

MOST_GUESSES = 4


class Entry(NamedTuple):
    """A subcommand: where it is, as "module:attribute", and its line in the help."""

    name: str
    target: str
    summary: str


Sections = Mapping[str, tuple[Entry, ...]]
"""Subcommands below the headings of the help."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, and listed without it."""

    def __init__(self, *, sections: Sections, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type] # click's own keywords, passed on
        self._sections = sections
        self._entries = {entry.name: entry for entries in sections.values() for entry in entries}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command; None when there is none of this name."""
        if (entry := self._entries.get(cmd_name)) is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command of the command line; raises UsageError with the nearest name."""
        if args[0] not in self._entries and not args[0].startswith("-"):
            raise no_such_command(ctx, args[0])
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """What a shell offers after TAB, from the table: click's own way imports every command."""
        commands = [
            CompletionItem(entry.name, help=entry.summary)
            for entry in self._entries.values()
            if entry.name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections, from the table alone."""
        width = max(map(len, self._entries))
        for title, entries in self._sections.items():
            with formatter.section(title):
                # Padding all names to one width keeps the summaries aligned over the sections.
                formatter.write_dl([(entry.name.ljust(width), entry.summary) for entry in entries])


class WholeGroup(click.Group):
    """A group whose help has the first sentence of each command whole: click's own cuts them to one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, in the order of their names."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=sys.maxsize))
                    for name, command in found
                    if command is not None and not command.hidden
                ]
            )


def no_such_command(context: click.Context, name: str) -> UsageError:
    """Says what may have been meant, in this group or in another."""
    path = context.command_path
    of_group = "" if context.parent is None else f" of '{path}'"
    return UsageError(f"there is no command '{name}'{of_group}", next_step=_meant(context, name))


def _meant(context: click.Context, name: str) -> str:
    root = context.find_root()
    own = context.command_path.split()[1:]
    if said := NO_COMMAND_FOR.get(" ".join([*own, name])):
        return said
    assert isinstance(root.command, click.Group)
    paths = list(_paths_below(root.command, root))
    asked = [path for path in paths if path[-1] == name]
    asked += [tuple(words.split()) for words in OTHER_WORDS.get(name, ())]
    if not asked:
        near = difflib.get_close_matches(
            name, [path[-1] for path in paths if list(path[:-1]) == own], n=1
        )
        asked = [(*own, word) for word in near]
    # A word that is like one of another group may well be a mistake within this one.
    is_far = not asked and bool(own)
    if not asked:
        near = difflib.get_close_matches(name, {path[-1] for path in paths}, n=1, cutoff=0.8)
        asked = [path for path in paths if path[-1] in near]
    here = [path for path in asked if list(path[: len(own)]) == own] if own else []
    guesses = [f"'{' '.join((root.command_path, *path))}'" for path in dict.fromkeys(here or asked)]
    see = f"see '{context.command_path} --help'"
    if not guesses:
        return see
    *some, last = guesses[:MOST_GUESSES]
    meant = f"did you mean {', '.join(some)} or {last}?" if some else f"did you mean {last}?"
    return f"{see}; or {meant}" if is_far else meant


def _paths_below(group: click.Group, context: click.Context) -> Iterator[tuple[str, ...]]:
    """All commands that a group leads to, as what is typed after its name."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield (name,)
        if isinstance(command, click.Group):
            for path in _paths_below(command, context):
                yield (name, *path)
