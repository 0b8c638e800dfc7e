"""README and docs say what is so: files, commands, links, exit codes and keys exist as written."""

import os
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from coordinator.config import RUN_TEMPLATE
from protocol.errors import ExitCode
from protocol.run.models import FunctionModel
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli

ROOT = Path(cli.__file__).parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
PAGE_IDS = [page.name for page in PAGES]

ROOMS = (
    *("atoll", "protocol", "coordinator", "node", "proto"),
    *("lab", "benchmarks", "examples", "tools", "tests", "docs", "deploy"),
)
BLOCK_INDENT = 4


def section(page: Path, title: str) -> str:
    """The text between a heading and the next one of its level."""
    return re.split(r"^## ", page.read_text().partition(f"## {title}\n")[2], flags=re.M)[0]


def code_of(page: Path) -> Iterator[str]:
    """Lines of code blocks, and code within sentences."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for line in text.splitlines():
        if line.startswith(" " * BLOCK_INDENT):
            yield line.strip().removeprefix("$ ")
        else:
            yield from re.findall(r"`([^`]+)`", line)
    yield from re.findall(r"`([^`\n]+\n[^`\n]+)`", text)


def command_lines(page: Path) -> list[str]:
    return [code for code in code_of(page) if re.match(r"atoll( |$)", code)]


def check_command_line(line: str) -> None:
    """Raises click's errors for a command, an option or an argument that does not exist."""
    _, *words = shlex.split(line.split(" | ")[0], comments=True)
    context = cli.root.make_context("atoll", [], resilient_parsing=True)
    command: click.Command = cli.root
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command {name!r}")
        command = found
        context = click.Context(command, info_name=name, parent=context)
    _, left_over, _ = command.make_parser(context).parse_args(words)
    if left_over:
        raise click.UsageError(f"{left_over} are too many")


def slug(heading: str) -> str:
    """How GitHub names a heading's anchor."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_folder_of_the_tree_has_a_line_in_the_readme() -> None:
    block = section(ROOT / "README.md", "Where things are")
    named = set(re.findall(rf"^ {{{BLOCK_INDENT}}}(\w+)/  +\S", block, flags=re.M))
    assert named == set(ROOMS)
    assert all((ROOT / room).is_dir() for room in named)


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    listing = subprocess.run(
        [sys.executable, ROOT / "tools" / "tree.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(listing) > 300
    bare = [line.strip() for line in listing if line.endswith(".py")]
    assert [name for name in bare if not name.startswith("test_")] == []


def comments_of(file: Path) -> Iterator[str]:
    """Its comments and docstrings."""
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                yield token.string


def stands(dotted: str) -> bool:
    """Whether it is a module or a folder of ours, or what stands in one."""
    place = ROOT / dotted.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    module = place.parent.with_suffix(".py")
    return module.is_file() and re.search(rf"\b{place.name}\b", module.read_text()) is not None


@pytest.mark.parametrize("room", [room for room in ROOMS if any((ROOT / room).rglob("*.py"))])
def test_what_a_comment_names_of_ours_is_there(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if "v1" not in path.parts]
    ours = (path.name for each in ROOMS for path in (ROOT / each).rglob("*.py"))
    named = {*ours, "node.py", "protocol.py"}  # of a folder that somebody else has
    rooms = "|".join(ROOMS)
    gone = [
        (str(file.relative_to(ROOT)), name)
        for file in files
        for comment in comments_of(file)
        for name in (
            *(
                d
                for d in re.findall(rf"(?<![\w./-])(?:{rooms})(?:\.[a-z]\w+){{2,}}", comment)
                if not stands(d)
            ),
            *(py for py in re.findall(r"(?<![\w./*{<-])\w+\.py\b", comment) if py not in named),
        )
    ]
    assert gone == []


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    for line in command_lines(page):
        if line.startswith("atoll stauts"):
            continue  # the example of a mistake
        try:
            check_command_line(line)
        except click.ClickException as error:
            pytest.fail(f"{page.name}: {line}: {error.format_message()}")


def test_a_command_line_with_a_mistake_would_be_found() -> None:
    check_command_line("atoll invite create --uses 3 --dir my-run   # a comment")
    for line in ("atoll stauts", "atoll node start --fast", "atoll export a b", "atoll invite mak"):
        with pytest.raises(click.ClickException):
            check_command_line(line)
    assert len(command_lines(ROOT / "README.md")) >= 8  # else they are no longer recognised


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.M)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = re.sub(r"atoll/\d/\w+", "", page.read_text())  # libp2p's names of our protocols
    for name in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./*-]+)`", text):
        assert any(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        place = ROOT / module.replace(".", "/")
        runs = (place.with_suffix(".py"), place / "__main__.py")
        assert any(file.is_file() for file in runs), f"{page.name} runs {module}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_what_a_page_names_behind_a_file_stands_in_it(page: Path) -> None:
    for file, names in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", page.read_text()):
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b(def|class) {name}\b", (ROOT / file).read_text()), (file, name)


def test_every_line_of_the_logs_that_a_page_explains_is_logged() -> None:
    quoted = re.findall(r"`([a-z][a-z0-9 ]+)`", section(ROOT / "docs" / "watching.md", "Logs"))
    sources = "".join(
        path.read_text() for room in ("node", "coordinator") for path in (ROOT / room).rglob("*.py")
    )
    assert len(quoted) > 10
    assert [words for words in quoted if f'"{words}"' not in sources] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text()):
            new |= {(page.parent / target).resolve()} - reached
    assert reached == set(PAGES)


def test_the_pages_build_as_a_site_in_which_every_page_has_a_place(tmp_path: Path) -> None:
    """With --strict: no page outside the navigation, and no link or anchor that leads nowhere."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    first = (tmp_path / "index.html").read_text()
    assert "Atoll trains one model on machines that are far apart" in first
    assert all(
        (tmp_path / page.stem / "index.html").exists() for page in (ROOT / "docs").glob("*.md")
    )


MOST_WORDS = 30
"""Of a sentence: a longer one holds two thoughts."""


def paragraphs_of(text: str) -> Iterator[str]:
    """Prose alone: no code, table, heading or picture. An item of a list is a paragraph of its own."""
    lines: list[str] = []
    for line in [*re.sub(r"^```.*?^```", "\n", text, flags=re.M | re.S).splitlines(), ""]:
        is_code = line.startswith(" " * BLOCK_INDENT) and not lines
        is_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        is_other = is_code or not line.strip() or line.startswith(("|", "#", "![", "<"))
        if lines and (is_other or is_item):
            yield " ".join(lines)
            lines = []
        if not is_other:
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def long_sentences(text: str) -> list[str]:
    found = []
    for paragraph in paragraphs_of(text):
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", paragraph))
        for sentence in re.split(r"(?<=[.!?])[\"*)]*\s+", words):
            if sum(re.search(r"\w", word) is not None for word in sentence.split()) > MOST_WORDS:
                found.append(sentence)
    return found


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_no_sentence_of_a_page_has_more_than_thirty_words(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # a log
        assert long_sentences(page.read_text()) == []


def test_a_sentence_that_is_too_long_would_be_found() -> None:
    long = " ".join(["word"] * (MOST_WORDS + 1))
    assert long_sentences(f"# A page\n\nShort. {long}.\n") == [f"{long}."]
    assert long_sentences(f"- one\n- {long}\n  more\n") == [f"{long} more"]
    assert long_sentences(f"    {long}\n\n| {long} |\n\n```\n{long}\n```\n## {long}\n") == []
    assert long_sentences(" ".join(["word"] * MOST_WORDS) + f" `{long}` [x](y z).") == [
        " ".join(["word"] * MOST_WORDS) + " code [x]."
    ]


def test_the_table_of_exit_codes_is_the_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.M)
    assert [(int(code), name) for code, name in rows] == [(c.value, c.name) for c in ExitCode]


def test_the_template_explains_every_key_of_the_run_file() -> None:
    table, explained = "", set()
    for line in RUN_TEMPLATE.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            table = match[1]
        elif match := re.fullmatch(r"(?:# )?(\w+) = \S.*# \S.*", line):
            explained.add((table, match[1]))
    defaults = RunSpec().model_dump(exclude={"description"})
    assert explained == {(name, key) for name in defaults for key in defaults[name]}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_key_of_the_run_file_that_a_page_names_exists(page: Path) -> None:
    defaults = RunSpec().model_dump(exclude={"description"})
    known = {**defaults, "model": {**FunctionModel.model_fields, **defaults["model"]}}
    words = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    for table, key in re.findall(r"\[(\w+)\] (\w+)[` ]", words):
        assert key in known.get(table, {}), f"{page.name} names [{table}] {key}"


def test_the_algorithm_on_one_page_runs_and_ends_near_what_is_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path("docs/reading.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(program, "docs/reading.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    distances = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(distances) == 12 and distances[-1] < 0.02 < distances[0]
