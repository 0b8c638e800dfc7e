"""A run file that changed since its run began is refused by key, old value and new value."""

from pathlib import Path

import pytest

from coordinator.rules import rules_of
from coordinator.store import Store
from coordinator.swarm.transition import initial_state
from protocol.errors import ConfigError
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

RUN_FILE = Path("my-run/run.toml")


def run_with(**tables: dict[str, object]) -> RunSpec:
    return validated(tables, origin="run.toml")


BEGUN = run_with(inner={"steps": 30, "learning_rate": 6e-3})


@pytest.fixture
def store() -> Store:
    """Of a run that has begun."""
    store = Store.in_memory()
    store.keep_or_compare(BEGUN, RUN_FILE)
    begin(store, BEGUN)
    return store


def begin(store: Store, run: RunSpec) -> None:
    state = initial_state(rules_of(run), run.digest())
    store.save(state, state, now=1000.0)


def test_the_same_run_file_is_taken(store: Store) -> None:
    store.keep_or_compare(BEGUN, RUN_FILE)


def test_a_changed_key_is_named_with_both_values_and_what_to_type(store: Store) -> None:
    changed = run_with(inner={"steps": 40, "learning_rate": 6e-3})
    with pytest.raises(ConfigError) as refused:
        store.keep_or_compare(changed, RUN_FILE)
    assert refused.value.what == (
        "my-run/run.toml has changed since the run began: [inner] steps was 30 and is 40"
    )
    assert refused.value.next_step == (
        "write steps = 30 into [inner] of my-run/run.toml, then start again, and type "
        "'atoll run amend inner.steps=40'; or start a new run with "
        "'atoll init NEWDIR --run my-run/run.toml'"
    )


def test_keys_that_came_and_went_are_told_so_and_many_are_counted(store: Store) -> None:
    changed = run_with(
        run={"name": "other", "rounds": 7},
        data={"source": "text", "paths": ["a.txt"]},
        inner={"steps": 30, "learning_rate": 6e-3, "total_tokens": 1000},
    )
    with pytest.raises(ConfigError) as refused:
        store.keep_or_compare(changed, RUN_FILE)
    assert '[data] paths was [] and is ["a.txt"]; [data] source was "python-stdlib"' in (
        refused.value.what
    )
    assert refused.value.what.endswith("; and 2 more")
    only = run_with(inner={"steps": 30, "learning_rate": 6e-3, "total_tokens": 1000})
    with pytest.raises(ConfigError, match="total_tokens was left out and is 1000") as refused:
        store.keep_or_compare(only, RUN_FILE)
    assert "remove total_tokens from [inner]" in str(refused.value.next_step)


def test_before_the_run_begins_its_file_may_change(store: Store) -> None:
    fresh = Store.in_memory()
    fresh.keep_or_compare(BEGUN, RUN_FILE)
    changed = run_with(inner={"steps": 40})
    fresh.keep_or_compare(changed, RUN_FILE)
    begin(fresh, changed)
    with pytest.raises(ConfigError, match="steps was 40 and is 30"):
        fresh.keep_or_compare(BEGUN, RUN_FILE)


def test_a_database_that_does_not_hold_its_run_file_leaves_the_digest_to_tell() -> None:
    old = Store.in_memory()
    begin(old, BEGUN)
    changed = run_with(inner={"steps": 40})
    old.keep_or_compare(changed, RUN_FILE)
    with pytest.raises(ConfigError, match="is of run file"):
        old.load(rules_of(changed), changed.digest())
