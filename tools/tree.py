"""Prints each folder and each file of Python with the first line of what it says of itself."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("protocol", "coordinator", "node", "lab", "benchmarks", "tools", "tests")
GENERATED = {"__pycache__", "v1"}
COLUMN = 40


def first_line(file: Path) -> str:
    """The first line of a module's docstring; empty where it has none."""
    said = ast.get_docstring(ast.parse(file.read_text()))
    return said.splitlines()[0] if said else ""


def print_folder(folder: Path, depth: int = 0) -> None:
    """Prints a folder's own line, then its files, then its folders."""
    package = folder / "__init__.py"
    indent = "  " * depth
    print(
        f"{indent + folder.name + '/':<{COLUMN}}{first_line(package) if package.exists() else ''}"
    )
    for file in sorted(folder.glob("*.py")):
        if file != package:
            print(f"{indent + '  ' + file.name:<{COLUMN}}{first_line(file)}".rstrip())
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and inner.name not in GENERATED and any(inner.rglob("*.py")):
            print_folder(inner, depth + 1)


if __name__ == "__main__":
    for room in ROOMS:
        print_folder(ROOT / room)
