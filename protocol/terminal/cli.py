"""The root command `atoll`. Subcommands are loaded when they are called, by name from a table.

Nothing is imported for `atoll --help`, and the rooms of the coordinator and the node are named here
as text only, so that no import leads from protocol to them.
"""

import os
import sys
from collections.abc import Sequence

import click

from protocol.errors import SystemRefusedError
from protocol.terminal import console
from protocol.terminal.lazy_group import Entry, LazyGroup, Sections
from protocol.wire.versions import release

SECTIONS: Sections = {
    "Try it": (
        Entry("demo", "node.demo:demo", "Train a small model with three nodes on this machine."),
    ),
    "Run owner": (
        Entry(
            "init",
            "coordinator.new_run:init",
            "Write a run file for a model, its links and its nodes.",
        ),
        Entry(
            "coordinator",
            "coordinator.cli:coordinator",
            "Set up and start the coordinator of a run.",
        ),
        Entry(
            "relay",
            "coordinator.relay.command:relay",
            "Carry coordinators that nobody can dial, on a small server.",
        ),
        Entry("invite", "coordinator.inviting:invite", "Make, list and revoke invites."),
        Entry(
            "run",
            "coordinator.steering:run",
            "Pause, resume, stop, extend, amend or roll back the run.",
        ),
        Entry(
            "audit",
            "coordinator.steering:audit",
            "Show who joined, was expelled, and what was changed.",
        ),
    ),
    "Contributor": (
        Entry("join", "node.joining:join", "Trade an invite for membership."),
        Entry("node", "node.cli:node", "Start and stop this machine's node."),
        Entry(
            "helper", "node.cli:helper", "Start a helper, which reduces for nodes behind routers."
        ),
        Entry("me", "node.me:me", "Show what this folder's node has given to the run."),
        Entry("export", "node.models.command:export", "Write the model out for other software."),
        Entry(
            "evaluate",
            "node.models.command:evaluate",
            "Measure the model with lm-eval, or on held-out samples.",
        ),
        Entry("sample", "node.models.command:sample", "Let the model write a little text."),
    ),
    "Anyone": (
        Entry("status", "protocol.terminal.query:status", "Show what the run and its nodes do."),
        Entry("nodes", "protocol.terminal.nodes:nodes", "List the nodes; decide who takes part."),
        Entry(
            "rounds",
            "protocol.terminal.rounds:rounds",
            "List the latest rounds, or show one as a chart.",
        ),
        Entry(
            "track",
            "protocol.terminal.track:track",
            "Write the run's curves for TensorBoard, W&B or trackio.",
        ),
        Entry(
            "logs",
            "protocol.terminal.logs:logs",
            "Show what all processes of a folder have logged, and follow.",
        ),
        Entry(
            "data",
            "protocol.terminal.query:data",
            "Prepare data; show which samples are trained, leased, waiting.",
        ),
        Entry(
            "completion",
            "protocol.terminal.cli:completion",
            "Print what lets bash, zsh or fish complete commands.",
        ),
    ),
}


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if not is_asked or ctx.resilient_parsing:
        return
    click.echo(f"atoll {release()}")
    ctx.exit()


@click.pass_context
def _show_help(ctx: click.Context) -> None:
    """`atoll` alone shows the help, on stdout and with exit code 0."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


root = LazyGroup(
    name="atoll",
    sections=SECTIONS,
    invoke_without_command=True,
    callback=_show_help,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Train one model on GPUs that are far apart.

    Each machine trains alone for many steps; then all exchange one small, compressed message and go
    on from the same weights. 'atoll demo' shows it on this machine.""",
    epilog="Each command has its own --help.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show the version and exit.",
        )
    ],
)


def other_system(platform: str, machine: str) -> SystemRefusedError | None:
    """What keeps Atoll from running there; None on Linux on x86-64."""
    if platform == "linux" and machine == "x86_64":
        return None
    here = f"{platform} on {machine}" if machine else platform
    return SystemRefusedError(
        f"Atoll runs on Linux on x86-64, and this is {here}",
        next_step="on Windows use WSL 2; 'Other systems' in docs/getting-started.md has the rest",
    )


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script by which a shell completes commands, options and files after TAB.

    \b
    Once, for good:
      atoll completion bash >> ~/.bashrc
      atoll completion zsh >> ~/.zshrc
      atoll completion fish > ~/.config/fish/completions/atoll.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three"
    click.echo(kind(root, {}, "atoll", "_ATOLL_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the console script and of `python -m protocol.terminal.cli`."""
    asked = sys.argv[1:] if arguments is None else arguments
    machine = os.uname().machine if hasattr(os, "uname") else ""
    refusal = other_system(sys.platform, machine)
    if refusal is not None and not {"--version", "--help", "-h"}.issuperset(asked):
        sys.exit(console.refuse(refusal))
    if refusal is None:
        from protocol.service.limits import open_standard_files  # Windows has no such module

        open_standard_files()
    console.write_what_can_be_written()
    # gRPC's own log repeats what we report, and tells of every stranger's failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(console.run(root, arguments))


if __name__ == "__main__":
    main()
