"""Data that stay with their holders: each node trains its own, and nothing of them leaves it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import Message

from benchmarks import simulated_coordinator
from benchmarks.simulation import Life, SimulatedRun, simulate
from node.island.data.dataset import Dataset
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol import cli, console
from protocol.errors import BadDataError, ConfigError
from protocol.payload import Payload
from protocol.rounds import BOOK_PLACES, book_of, book_of_data
from protocol.run_spec import RunSpec
from tests.tiny_runs import tiny
from tests.unit.tokens_scene import write_jsonl, write_tokenizer

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


def test_tokens_of_another_tokenizer_than_the_other_holders_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_jsonl(tmp_path / "text.jsonl", 300)
    tokens = tmp_path / "tokens"
    prepare = ["data", "prepare", str(tmp_path / "text.jsonl"), "--out", str(tokens)]
    assert console.run(cli.root, [*prepare, "--tokenizer", str(tmp_path)]) == 0
    own = DataPlaces(folder=tmp_path, own=str(tokens))
    digest = read_manifest(tokens).tokenizer_digest
    private = {"source": "tokens", "private": True}
    sized = {"vocab_size": 512}
    assert digest is not None
    assert open_dataset(tiny(data={**private, "tokenizer": digest}, model=sized), own).num_samples
    for other, words in ((None, "and the run's are bytes"), ("ab" * 32, "are of abababababab")):
        spec = tiny(data={**private, "tokenizer": other}, model=sized)
        with pytest.raises(BadDataError, match=f"are of tokenizer {digest[:12]}.*{words}"):
            open_dataset(spec, own)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"private": True}, 'private = true needs source = "text" or "tokens"'),
        ({"private": True, "source": "text", "paths": ["a.txt"]}, "goes without paths and digest"),
        ({"tokenizer": "ab" * 32}, "tokenizer belongs to private = true with source"),
        ({"most_weight": 0.5}, "most_weight = 0.5 belongs to private = true"),
    ],
)
def test_a_run_file_cannot_name_what_stays_with_its_holders(
    data: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(data=data)
