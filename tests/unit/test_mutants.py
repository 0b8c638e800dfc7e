"""The list of bugs put in by hand stays true, and the tool that runs them judges rightly.

The bugs themselves are not run here: `make mutants` does that.
"""

import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, Run, RunTests, all_mutants, judge, run_tests

MUTANTS = all_mutants()


def test_every_mutant_has_a_name_of_its_own_and_says_what_it_breaks() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 60
    assert all(mutant.breaks.endswith(".") for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutants_text_occurs_once_and_what_replaces_it_can_be_read(mutant: Mutant) -> None:
    mutated = mutant.applied_to((ROOT / mutant.file).read_text())
    assert mutated is not None, f"{mutant.text!r} is not once in {mutant.file}"
    assert mutant.text != mutant.becomes
    compile(mutated, mutant.file, "exec", dont_inherit=True)


def test_the_tests_that_should_notice_are_there() -> None:
    for selected in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = selected.partition("::")
        assert (ROOT / file).is_file(), selected
        assert f"def {name}(" in (ROOT / file).read_text() if name else True, selected


LARGEST = "def largest(one, other):\n    return one if one > other else other\n"

A_TEST = "from largest import largest\ndef test_largest():\n    assert largest(1, 2) == 2\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "largest.py").write_text(LARGEST)
    (tmp_path / "test_largest.py").write_text(A_TEST)
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "test_failing.py").write_text("def test_failing():\n    assert False\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def mutant(name: str, *, text: str, becomes: str, test: str) -> Mutant:
    return Mutant(
        name=name,
        file="largest.py",
        text=text,
        becomes=becomes,
        breaks=f"{name} breaks this.",
        tests=(test,),
    )


NOTICED = mutant("noticed", text=">", becomes="<", test="test_largest.py")
SURVIVES = mutant("survives", text=">", becomes="<", test="test_nothing.py")
OLD = mutant("old", text="no more", becomes="", test="test_largest.py")
TWICE = mutant("twice", text="other", becomes="", test="test_largest.py")
UNTRIED = mutant("untried", text=">", becomes="<", test="test_failing.py")
UNREADABLE = mutant("unreadable", text=">", becomes="> >", test="test_largest.py")


def run_reading(copy: Path, tests: tuple[str, ...], limit_seconds: float) -> Run:
    """Says what pytest would, by the text that it would run."""
    is_mutated = (copy / "largest.py").read_text() != LARGEST
    fails = tests == ("test_failing.py",) or (is_mutated and tests == ("test_largest.py",))
    return Run(
        is_passed=not fails,
        noticed_by="test_largest.py::test_largest" if fails else "",
        seconds=1.0,
        output="",
    )


def judged(checkout: Path, *mutants: Mutant, run_tests: RunTests = run_reading) -> tuple[bool, str]:
    out = io.StringIO()
    is_content = judge(mutants, root=checkout, jobs=1, out=out, run_tests=run_tests)
    assert (checkout / "largest.py").read_text() == LARGEST
    return is_content, out.getvalue()


def test_the_tool_tells_what_tests_notice_from_what_survives_and_from_what_says_nothing(
    checkout: Path,
) -> None:
    is_content, said = judged(checkout, NOTICED, SURVIVES, OLD, TWICE, UNTRIED)
    assert not is_content
    assert "noticed: noticed by test_largest.py::test_largest" in said
    assert "survives: SURVIVED: survives breaks this." in said
    assert "old: NO LONGER APPLIES" in said
    assert "twice: NO LONGER APPLIES" in said
    assert "untried: not judged, for its tests fail without it" in said
    assert "1 of 5 mutants were noticed, 1 survived, 3 were not judged; 50.0%" in said


def test_the_tool_is_content_only_when_enough_are_noticed_and_all_are_judged(
    checkout: Path,
) -> None:
    enough = [replace(NOTICED, name=f"noticed {number}") for number in range(19)]
    assert judged(checkout, *enough, SURVIVES)[0]
    assert not judged(checkout, *enough[1:], SURVIVES)[0]
    assert not judged(checkout, *enough, OLD)[0]


def test_a_mutant_with_which_no_test_begins_is_not_taken_for_one_that_was_noticed(
    checkout: Path,
) -> None:
    is_content, said = judged(checkout, NOTICED, UNREADABLE, run_tests=run_tests)
    assert not is_content
    assert "noticed: noticed by test_largest.py::test_largest" in said
    assert "unreadable: not judged, for no test runs with it" in said
