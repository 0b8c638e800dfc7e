"""TAB completes commands, without importing them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from protocol.terminal.cli import SECTIONS, root

ROOT = Path(__file__).parents[2]


def offered(folder: Path, *words: str) -> list[str]:
    """What a real bash offers after these words, the last of which is not finished."""
    script = folder / "completion.bash"
    script.write_text(CliRunner().invoke(root, ["completion", "bash"]).output)
    program = folder / "atoll"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m protocol.terminal.cli "$@"\n')
    program.chmod(0o755)
    typed = " ".join(f"'{word}'" for word in ("atoll", *words))
    ran = subprocess.run(
        [
            *("bash", "--norc", "-c"),
            f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
            '_atoll_completion atoll; printf "%s\\n" "${COMPREPLY[@]}"',
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stdout.split()


def test_bash_offers_commands_subcommands_options_and_choices(tmp_path: Path) -> None:
    assert offered(tmp_path, "ro") == ["rounds"]
    assert offered(tmp_path, "rounds", "sh") == ["show"]
    assert offered(tmp_path, "rounds", "--wa") == ["--watch"]
    assert offered(tmp_path, "track", "--to", "t") == ["tensorboard", "trackio"]
    names = [entry.name for entries in SECTIONS.values() for entry in entries]
    assert offered(tmp_path, "") == names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_atoll(shell: str) -> None:
    result = CliRunner().invoke(root, ["completion", shell])
    assert result.exit_code == 0
    assert f"_ATOLL_COMPLETE={shell}_complete" in result.output


def test_offering_commands_imports_none_of_them() -> None:
    program = (
        "import sys, click\nfrom protocol.terminal.cli import root\n"
        "context = click.Context(root, info_name='atoll')\n"
        "assert len(root.shell_complete(context, '')) > 10\n"
        "print([name for name in sys.modules if name.startswith(('node', 'coordinator', 'grpc'))])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
