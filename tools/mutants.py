"""Puts bugs into a copy of this checkout, one at a time, and counts how many of them tests notice.

The bugs (mutants) stand in tools/mutants_by_room: each is a file, a text that occurs once in it, what
replaces that, the promise that breaks by it, and the tests that should notice. A test that cannot fail
shows here, and so does a promise that no test holds.

    python tools/mutants.py                    # all of them; half an hour on two cores
    python tools/mutants.py --only NAME ...    # some
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent

ENOUGH = 0.95
"""The part of the mutants that tests must notice."""

TEST_SECONDS = 120
"""A single test that takes longer under a mutant hangs: the slowest takes a quarter of that."""

UNMUTATED_SECONDS = 600.0
"""Tests without a mutant may take so long."""

PATIENCE = 5.0
"""Tests under a mutant may take so many times what they take without it, beside one that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One bug."""

    name: str
    file: str
    text: str
    becomes: str
    breaks: str  # the promise, in a sentence
    tests: tuple[str, ...]  # files or tests, the one that should notice first

    def applied_to(self, source: str) -> str | None:
        """The source with the bug; None unless its text occurs there exactly once."""
        return source.replace(self.text, self.becomes) if source.count(self.text) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of some tests."""

    is_passed: bool
    noticed_by: str  # empty when nothing failed, or when no test came to run
    seconds: float
    output: str


def all_mutants() -> list[Mutant]:
    """The lists of all rooms, in the order of their names."""
    mutants = []
    for path in sorted((ROOT / "tools" / "mutants_by_room").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    return mutants


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of what git tracks or would: nothing is ever changed in the checkout itself."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


def run_tests(copy: Path, tests: tuple[str, ...], limit_seconds: float) -> Run:
    """Runs tests in a copy with pytest, until the first one fails."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0", f"--timeout={TEST_SECONDS}", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(copy.parent / "cache"),  # what mutated kernels compile to
    }
    began_at = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        noticed_by = f"no end within {limit_seconds:.0f} s"
    else:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)(.*)", output, flags=re.M)
        noticed_by = "" if failed is None else failed[1]
        if failed is not None and "Timeout" in failed[2]:
            noticed_by += ", by waiting"
        if process.returncode < 0:
            noticed_by = f"a process that ended by signal {-process.returncode}"
    return Run(
        is_passed=process.returncode == 0,
        noticed_by=noticed_by,
        seconds=time.monotonic() - began_at,
        output=output,
    )


RunTests = Callable[[Path, tuple[str, ...], float], Run]
"""Runs tests in a copy, for so many seconds at most."""


@contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[bool]:
    """Puts the bug into the copy while this is entered; False when its text is not there once."""
    path = copy / mutant.file
    source = path.read_text() if path.is_file() else ""
    mutated = mutant.applied_to(source)
    if mutated is None:
        yield False
        return
    path.write_text(mutated)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
    try:
        yield True
    finally:
        path.write_text(source)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


class Judge:
    """Runs tests without mutants and with them, and says what comes of it."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        *,
        copies: Sequence[Path],
        run_tests: RunTests,
        out: TextIO,
    ) -> None:
        self._mutants = mutants
        self._run_tests = run_tests
        self._out = out
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._pool = ThreadPoolExecutor(max_workers=len(copies))
        self._usual_seconds: dict[str, float] = {}  # of files, or tests, that pass
        self.noticed: list[Mutant] = []
        self.survived: list[Mutant] = []
        self.unjudged: list[Mutant] = []  # no longer applies, or its tests say nothing

    def run(self) -> None:
        """First the tests as they are, then each mutant."""
        try:
            self._run_unmutated()
            self._run_mutants()
        finally:
            self._pool.shutdown(cancel_futures=True)  # a Ctrl-C waits for what runs, and no more

    def _run_unmutated(self) -> None:
        selected = list(dict.fromkeys(test for mutant in self._mutants for test in mutant.tests))
        waits = {self._pool.submit(self._try, tests): tests for tests in selected}
        for number, done in enumerate(as_completed(waits), start=1):
            tests, run = waits[done], done.result()
            if run.is_passed:
                self._usual_seconds[tests] = run.seconds
                verdict = f"pass in {run.seconds:.0f} s"
            else:
                verdict = f"FAIL without any mutant: {run.noticed_by or run.output[-2000:]}"
            self._say(f"[tests {number}/{len(selected)}] {tests} {verdict}")

    def _run_mutants(self) -> None:
        began_at = time.monotonic()
        waits = {self._pool.submit(self._judge, mutant): mutant for mutant in self._mutants}
        for number, done in enumerate(as_completed(waits), start=1):
            list_, verdict = done.result()
            list_.append(waits[done])
            left = (time.monotonic() - began_at) / number * (len(waits) - number)
            progress = f"[{number}/{len(waits)}, about {left / 60:.0f} min left]"
            self._say(f"{progress} {waits[done].name}: {verdict}")

    def _try(self, tests: str) -> Run:
        copy = self._copies.get()
        try:
            return self._run_tests(copy, (tests,), UNMUTATED_SECONDS)
        finally:
            self._copies.put(copy)

    def _judge(self, mutant: Mutant) -> tuple[list[Mutant], str]:
        if not self._usual_seconds.keys() >= set(mutant.tests):
            return self.unjudged, "not judged, for its tests fail without it"
        usual = sum(self._usual_seconds[test] for test in mutant.tests)
        copy = self._copies.get()
        try:
            with applied(mutant, copy) as is_there:
                if not is_there:
                    return (
                        self.unjudged,
                        f"NO LONGER APPLIES: its text is not once in {mutant.file}",
                    )
                run = self._run_tests(copy, mutant.tests, TEST_SECONDS + PATIENCE * usual)
        finally:
            self._copies.put(copy)
        if run.is_passed:
            return self.survived, f"SURVIVED: {mutant.breaks}"
        if not run.noticed_by:
            return self.unjudged, f"not judged, for no test runs with it: {run.output[-2000:]}"
        return self.noticed, f"noticed by {run.noticed_by}"

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    @property
    def share(self) -> float:
        """The part that was noticed, of those that could be judged."""
        num_judged = len(self.noticed) + len(self.survived)
        return len(self.noticed) / num_judged if num_judged else 0.0


def judge(
    mutants: Sequence[Mutant],
    *,
    root: Path,
    jobs: int,
    out: TextIO,
    run_tests: RunTests = run_tests,
) -> bool:
    """Whether tests notice enough of the mutants, and all of them could be judged."""
    with _copies_of(root, jobs) as copies:
        verdict = Judge(mutants, copies=copies, run_tests=run_tests, out=out)
        verdict.run()
    for mutant in verdict.survived:
        print(f"survived: {mutant.name} ({mutant.file}): {mutant.breaks}", file=out)
    for mutant in verdict.unjudged:
        print(f"mend the list or the tests: {mutant.name} ({mutant.file})", file=out)
    print(
        f"{len(verdict.noticed)} of {len(mutants)} mutants were noticed, {len(verdict.survived)} "
        f"survived, {len(verdict.unjudged)} were not judged; {verdict.share:.1%} of those judged, "
        f"and {ENOUGH:.0%} are needed",
        file=out,
    )
    return verdict.share >= ENOUGH and not verdict.unjudged


@contextmanager
def _copies_of(root: Path, number: int) -> Iterator[list[Path]]:
    if number == 0:
        yield []
        return
    with copy_of(root) as copy, _copies_of(root, number - 1) as others:
        yield [copy, *others]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Counts the bugs put in by hand that tests notice."
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants only")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time, each in a copy")
    options = parser.parse_args()
    mutants = all_mutants()
    known = {mutant.name for mutant in mutants}
    if unknown := sorted(set(options.only or ()) - known):
        parser.error(f"there is no mutant {', '.join(unknown)}; --list prints all")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more")
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<44} {mutant.file}: {mutant.breaks}")
        return
    if not judge(mutants, root=ROOT, jobs=options.jobs, out=sys.stdout):
        sys.exit(1)


if __name__ == "__main__":
    main()
