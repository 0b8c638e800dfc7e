"""Data that stay with their holders: each node trains its own, and nothing of them leaves it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import Message

from benchmarks import simulated_coordinator
from benchmarks.simulation import Life, SimulatedRun, simulate
from node.island.data.dataset import Dataset
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.errors import ConfigError
from protocol.payload import Payload
from protocol.rounds import BOOK_PLACES, book_of, book_of_data
from protocol.run_spec import RunSpec
from tests.tiny_runs import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 4
RECORDS = {"clinic": 2_000, "bank": 4_000, "shop": 12_000}
"""Lines of each holder's text."""

SPEC = tiny(
    run={"rounds": ROUNDS, "min_nodes": 3},
    data={"source": "text", "private": True, "most_weight": 0.4, "held_out": 0.2},
)


def held_by(name: str, folder: Path, spec: RunSpec = SPEC) -> Dataset:
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{name} record {i}: {i * i % 9973}\n" for i in range(RECORDS[name])))
    return open_dataset(spec, DataPlaces(folder=folder, own=str(path)))


class Recorded:
    """All that nodes and coordinator tell each other, before it is encrypted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[bytes] = []
        over_the_wire: Callable[[Message], Message] = simulated_coordinator._over_the_wire
        seal = Payload.seal

        def told(message: Message) -> Message:
            self.messages.append(message.SerializeToString())
            return over_the_wire(message)

        def sealed(**parts: Any) -> Payload:
            payload = seal(**parts)
            self.messages.append(payload.body)
            return payload

        monkeypatch.setattr(simulated_coordinator, "_over_the_wire", told)
        monkeypatch.setattr(Payload, "seal", staticmethod(sealed))


def test_three_holders_train_one_model_and_no_record_of_theirs_is_in_any_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    held = {name: held_by(name, tmp_path) for name in RECORDS}
    # The shop has three times the speed, and would have three fifths of each mean.
    speeds = {"clinic": 0.3, "bank": 0.3, "shop": 0.1}
    lives = [Life(corpus=held[name], seconds_per_inner_step=speeds[name]) for name in held]
    run = simulate(SPEC, lives=lives)
    assert len(set(run.digests.values())) == 1
    assert run.held_out[-1].loss < run.held_out[0].loss - 0.5

    everything = b"\n".join(recorded.messages)
    assert len(recorded.messages) > 100 and len(everything) > 100_000
    for name in held:
        assert name.encode() + b" record" not in everything
        text = (tmp_path / f"{name}.txt").read_bytes()
        assert not [
            start for start in range(0, 20_000, 16) if text[start : start + 16] in everything
        ]
    _each_book_is_its_holders(run, held)


def _each_book_is_its_holders(run: SimulatedRun, held: dict[str, Dataset]) -> None:
    books = {name: book_of_data(data.summary().digest) for name, data in held.items()}
    assert len(set(books.values())) == 3
    samples = dict.fromkeys(books, 0)
    for piece in run.final.ledger.committed:
        (name,) = [name for name, book in books.items() if book == book_of(piece.first)]
        assert piece.first == books[name] * BOOK_PLACES + samples[name], (
            "each sample once, in order"
        )
        samples[name] += piece.num_samples
    assert sum(samples.values()) * SPEC.model.context == run.final.token_clock
    assert min(samples.values()) > 0


def test_a_node_that_names_no_data_is_told_where_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each node trains data of its own") as refused:
        open_dataset(SPEC, DataPlaces(folder=tmp_path))
    assert "--data PATH" in refused.value.next_step


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"private": True}, 'private = true needs source = "text" or "tokens"'),
        ({"private": True, "source": "text", "paths": ["a.txt"]}, "goes without paths and digest"),
        ({"most_weight": 0.5}, "most_weight = 0.5 belongs to private = true"),
    ],
)
def test_a_run_file_cannot_name_what_stays_with_its_holders(
    data: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(data=data)
