"""Groups of commands that are imported when they are called, by name from a table.

Nothing is imported for --help, and rooms of the coordinator and the node are named as text only, so
that no import leads from protocol to them.
"""

import difflib
from dataclasses import dataclass
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from protocol.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A subcommand: where it is, as "module:attribute", and its line in the help."""

    name: str
    target: str
    summary: str


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, and listed without it."""

    def __init__(
        self, *, sections: tuple[tuple[str, tuple[Entry, ...]], ...], **settings: object
    ) -> None:
        super().__init__(**settings)  # type: ignore[arg-type] # click's own keywords, passed on
        self._sections = sections
        self._entries = {entry.name: entry for _, entries in sections for entry in entries}

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
        name = args[0]
        if name not in self._entries and not name.startswith("-"):
            near = difflib.get_close_matches(name, self._entries, n=1)
            path = ctx.command_path
            advice = f"did you mean '{path} {near[0]}'?" if near else f"see '{path} --help'"
            of_group = "" if ctx.parent is None else f" of '{path}'"
            raise UsageError(f"there is no command '{name}'{of_group}", next_step=advice)
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
        for title, entries in self._sections:
            with formatter.section(title):
                # Padding all names to one width keeps the summaries aligned over the sections.
                formatter.write_dl([(entry.name.ljust(width), entry.summary) for entry in entries])
