"""What is chosen for a new run by what the node's side says of its model and its data."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.presets import composing
from coordinator.presets.wanted import Facts, Machine, Wanted
from protocol.errors import NoInputError

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "functions"


@pytest.mark.parametrize("held_out", [[40] * 9, [90, 10]])
def test_no_sample_is_counted_that_would_go_from_one_shard_into_the_next(
    held_out: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of nine held-out shards of 40 tokens none has a sample of 64, and of 90 tokens there is one."""
    facts = Facts(
        data={"source": "tokens", "paths": ["tokens"], "digest": "ab" * 32},
        num_tokens=100_000,
        training_shards=[100_000],
        held_out_shards=held_out,
    )
    monkeypatch.setattr(composing, "facts_of_wanted", lambda wanted, folder: facts)
    wanted = Wanted(data=("tokens",), context=64, batch=4)
    if max(held_out) > 64:
        composing.new_run(wanted, tmp_path)
        return
    with pytest.raises(NoInputError, match="360 tokens are held out, and none of their shards"):
        composing.new_run(wanted, tmp_path)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        # 150 rows of 65 tokens, of which conversations fill a part and answers a smaller one.
        (
            Facts(
                num_tokens=1200, training_shards=[9750], held_out_shards=[650], packed_context=64
            ),
            "train 96.0k tokens, 80 times what the data have",
        ),
        # As many samples without rows: each token is learned.
        (
            Facts(num_tokens=9600, training_shards=[9601], held_out_shards=[650]),
            "train 768.0k tokens, 80 times what the data have",
        ),
        # As many of a function, whose samples have places for 64 tokens.
        (
            Facts(
                model={"source": "function", "function": "m:f", "context": 64},
                data={"source": "function", "function": "m:d"},
                num_parameters=1000,
                num_layers=1,
                num_samples=150,
            ),
            "train 768.0k tokens, 80 times what the data have",
        ),
    ],
)
def test_how_often_data_come_again_is_counted_by_samples_and_not_by_what_they_teach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: Facts, told: str
) -> None:
    tokens = {"source": "tokens", "paths": ["tokens"], "digest": "ab" * 32}
    facts = replace(facts, data=facts.data or tokens)
    monkeypatch.setattr(composing, "facts_of_wanted", lambda wanted, folder: facts)
    wanted = Wanted(data=("tokens",), context=64, batch=4)
    if facts.num_samples:
        wanted = Wanted(function="m:f", data_function="m:d", source=EXAMPLES, context=64, batch=4)
    made = composing.new_run(wanted, tmp_path)
    # 100 rounds of 15 steps with batches of 4 on two nodes are 12,000 samples.
    assert told in "\n".join(made.notes)


FACTS = Facts(
    model={"source": "decoder", "context": 512, "num_layers": 30},
    num_parameters=134_500_000,
    num_layers=30,
    has_loaded=True,
    machine=Machine(name="2 CPU cores", num_cores=2, most_samples=64),
)
GIVEN = Wanted(source=Path("smol"), data=("tokens",))
FUNCTION = Wanted(function="m:f", data_function="m:d", source=EXAMPLES)


@pytest.mark.parametrize(
    ("wanted", "facts", "batch", "why"),
    [
        (GIVEN, FACTS, 4, "2 CPU cores) train in 30 s (64 are usual"),
        (
            GIVEN,
            replace(FACTS, machine=Machine(name="a GPU", most_samples=16)),
            16,
            "what nodes like this machine (a GPU) have the memory for",
        ),
        (GIVEN, replace(FACTS, machine=Machine(name="a GPU")), 64, "as for other models"),
        (
            GIVEN,
            replace(FACTS, machine=Machine(name="a GPU", most_samples=0)),
            1,
            "one sample is more than nodes like this machine (a GPU) have the memory for",
        ),
        (replace(GIVEN, tokens_per_second=500), FACTS, 16, "nodes of the speed told train in 30 s"),
        (replace(GIVEN, step="2s"), FACTS, 64, "as for other models"),
        (replace(GIVEN, batch=33), FACTS, 33, ""),
        (
            GIVEN,
            replace(FACTS, model={"source": "decoder", "context": 8192}, machine=None),
            8,
            "as for other models",
        ),
    ],
)
def test_the_batch_of_given_weights_fits_a_node_and_its_reason_is_written_down(
    monkeypatch: pytest.MonkeyPatch, wanted: Wanted, facts: Facts, batch: int, why: str
) -> None:
    monkeypatch.setattr(composing, "facts_of_wanted", lambda wanted, folder: facts)
    if wanted.step is not None:
        wanted = replace(wanted, link="100mbit")
    new = composing.new_run(wanted, Path())
    assert f"batch = {batch} " in new.text
    assert why in new.text
    assert bool(why) == any(why in note for note in new.notes)


@pytest.mark.parametrize(
    ("wanted", "facts", "optimizer", "has_weights"),
    [
        (Wanted(), Facts(), "muon", False),
        (Wanted(optimizer="adamw"), Facts(), "adamw", False),
        (GIVEN, FACTS, "adamw", True),
        (GIVEN, replace(FACTS, has_loaded=False), "adamw", False),
        (replace(GIVEN, optimizer="muon"), FACTS, "muon", True),
        # What a function draws is written down for one node to start with, and was never trained.
        (FUNCTION, replace(FACTS, first_digest="ab" * 32, has_loaded=False), "adamw", False),
        (FUNCTION, replace(FACTS, first_digest="ab" * 32), "adamw", True),
    ],
)
def test_an_exchange_is_chosen_for_the_inner_optimizer_and_the_weights_that_are_written(
    monkeypatch: pytest.MonkeyPatch,
    wanted: Wanted,
    facts: Facts,
    optimizer: str,
    has_weights: bool,
) -> None:
    monkeypatch.setattr(composing, "facts_of_wanted", lambda wanted, folder: facts)
    new = composing.new_run(replace(wanted, link="100mbit", step="2s"), Path())
    assert new.plan is not None
    situation = new.plan.situation
    assert (situation.inner_optimizer, situation.has_weights) == (optimizer, has_weights)
    assert f'optimizer = "{optimizer}"' in new.text


def test_weights_that_a_function_loads_are_trained_at_a_fifth_of_a_new_model_s_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate_of(facts: Facts) -> float:
        monkeypatch.setattr(composing, "facts_of_wanted", lambda wanted, folder: facts)
        inner = tomllib.loads(composing.new_run(FUNCTION, Path()).text)["inner"]
        assert isinstance(inner["learning_rate"], float)
        return inner["learning_rate"]

    assert rate_of(FACTS) == pytest.approx(rate_of(replace(FACTS, has_loaded=False)) / 5)
