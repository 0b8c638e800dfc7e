"""Text that a run file names lies where this machine's owner lets it lie, or is refused before it is read."""

from pathlib import Path

import pytest

from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces, check_reach, reads_in_words
from protocol.errors import NotPermittedError
from protocol.run.run_spec import DataSection
from tests.tiny_runs import tiny


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a key, texts elsewhere, and the folder where the node is started."""
    for name in (".ssh/id_ed25519", "work/texts/a.txt", "work/.cache/b.txt", "other/c.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("some text to train on, which is long enough for samples. " * 900)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("~/.ssh/id_*", "outside"),
        ("{home}/other/*.txt", "outside"),
        ("../other/c.txt", "outside"),
        ("texts/../../other/c.txt", "outside"),
        ("*/../../other/c.txt", "outside"),
        ("**/../../*", "outside"),
        (".cache/b.txt", "hidden"),
        ("texts/../.cache/*", "hidden"),
        ("{home}/work/.cache/*", "hidden"),
        ("/etc/passwd", "outside"),
    ],
)
def test_what_a_run_file_names_elsewhere_or_hidden_is_refused_with_what_would_allow_it(
    pattern: str, why: str, home: Path
) -> None:
    pattern = pattern.format(home=home)
    with pytest.raises(NotPermittedError, match=why) as caught:
        check_reach([pattern], DataPlaces(folder=home / "work"))
    assert repr(pattern) in caught.value.what
    assert "may_read" in caught.value.next_step


@pytest.mark.parametrize(
    ("data", "own", "words"),
    [
        ({}, "", "the standard library of Python"),
        (
            {"source": "text", "paths": ["texts/*.txt", "~/.ssh/id_*\x1b[2J"]},
            "",
            "text that the run names, from where the node is started: 'texts/*.txt', '~/.ssh/id_*\\x1b[2J'",
        ),
        (
            {"source": "text", "paths": ["a.txt"]},
            "mine/*.txt",
            "'mine/*.txt', which you have named",
        ),
        ({"source": "text", "private": True}, "", "data of your own"),
        (
            {"source": "tokens", "paths": ["shards"], "digest": "ab" * 32},
            "",
            "tokens that the run names, here or from other members: 'shards'",
        ),
        ({"source": "function", "function": "mine:samples"}, "", "function gives: mine:samples"),
    ],
)
def test_all_patterns_that_a_run_names_are_told_before_they_are_read(
    data: dict[str, object], own: str, words: str
) -> None:
    assert words in reads_in_words(DataSection.model_validate(data), own=own)


def test_nothing_is_read_of_a_run_that_names_what_is_not_allowed(home: Path) -> None:
    spec = tiny(data={"source": "text", "paths": ["texts/*.txt", "~/.ssh/id_*"]})
    with pytest.raises(NotPermittedError, match=r"~/\.ssh/id_\*"):
        open_dataset(spec, DataPlaces(folder=home / "work"))


def test_a_home_as_the_nodes_folder_still_hides_its_keys(home: Path) -> None:
    with pytest.raises(NotPermittedError, match="hidden"):
        check_reach(["~/.ssh/id_*"], DataPlaces(folder=home))


@pytest.mark.parametrize("pattern", ["texts/*.txt", "**/*.txt", "texts/../texts/a.txt"])
def test_text_below_the_nodes_folder_is_read(pattern: str, home: Path) -> None:
    check_reach([pattern], DataPlaces(folder=home / "work"))


@pytest.mark.parametrize("pattern", ["{home}/other/*.txt", "../other/c.txt", "~/other/*"])
def test_an_owner_may_allow_a_folder(pattern: str, home: Path) -> None:
    places = DataPlaces(folder=home / "work", may_read=(home / "other",))
    check_reach([pattern.format(home=home)], places)


def test_what_the_owner_names_may_lie_anywhere(home: Path) -> None:
    spec = tiny(data={"source": "text", "paths": ["~/.ssh/id_*"], "held_out": 0.3})
    own = DataPlaces(folder=home / "work", own=str(home / "other" / "c.txt"))
    assert open_dataset(spec, own).num_samples > 0
