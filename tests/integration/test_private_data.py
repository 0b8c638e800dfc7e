"""Data that stay with their holders: each node trains its own, and nothing of them leaves it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import Message

from lab.simulation import coordinator as simulated_coordinator
from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.exchange.reduction import Reduction
from node.island.data.dataset import Dataset, SampleOrder
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.errors import BadDataError, ConfigError, NoInputError
from protocol.run.run_spec import RunSpec
from protocol.terminal import cli, console
from protocol.wire.payload import Payload
from protocol.wire.rounds import BOOK_PLACES, book_of, book_of_data
from tests.tiny_runs import tiny
from tests.unit.tokens_scene import prepared, words, write_jsonl, write_tokenizer

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
    last = run.held_out[-1].holders
    weights = [one.weight for one in last]
    assert sorted(weights) == sorted(data.summary().num_held_out_tokens for data in held.values())
    mean = sum(one.loss * one.weight for one in last) / sum(weights)
    assert run.held_out[-1].loss == pytest.approx(mean)
    assert len({one.loss for one in last}) == 3, "each measured on its own"

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


def test_conversations_weigh_by_their_answers_and_use_their_samples_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = write_tokenizer(tmp_path / "chat", is_chat=True)
    for name, length in (("brief", 2), ("wordy", 30)):
        made = prepared(_talks(tmp_path / name, length), out=tmp_path / name, tokenizer=tokenizer)
    spec = tiny(
        run={"rounds": ROUNDS, "min_nodes": 2},
        model={"vocab_size": 512},
        data={"source": "tokens", "private": True, "tokenizer": made.manifest.tokenizer_digest},
    )
    held = [
        open_dataset(spec, DataPlaces(folder=tmp_path, own=str(tmp_path / name)))
        for name in ("brief", "wordy")
    ]
    by_book = {book_of_data(data.summary().digest): data for data in held}
    weighed: list[tuple[list[int], int]] = []
    weigh = Reduction._weights

    def weights_of(self: Reduction, *given: Any) -> tuple[list[int], int]:
        weights, late = weigh(self, *given)
        weighed.append((weights, self.plan.round))
        return weights, late

    monkeypatch.setattr(Reduction, "_weights", weights_of)
    run = simulate(spec, lives=[Life(corpus=data) for data in held])

    samples = tokens = 0
    for commit in run.commits:
        (contributors,) = {outcome.contributors for outcome in commit.slices}
        asked = {a.node_id: a for a in commit.assignments}
        expected = []
        for one in contributors:
            first, count = asked[one.node_id].first_sample, asked[one.node_id].num_samples
            data = by_book[book_of(first)]
            order = SampleOrder(
                seed=spec.run.seed, num_samples=data.num_samples, num_together=data.num_together
            )
            numbers = order.indices(first % BOOK_PLACES, count)
            assert one.samples == count
            expected.append(data.num_counted("training", numbers))
        assert [one.tokens for one in contributors] == expected
        assert 2 * min(expected) < max(expected) < count * spec.model.context
        weights = [weights for weights, number in weighed if number == commit.round]
        assert len(weights) >= len(commit.slices)  # auditors weigh some once more
        assert all(each == expected for each in weights)
        samples += sum(one.samples for one in contributors)
        tokens += sum(expected)
    assert run.final.token_clock == tokens
    assert sum(piece.num_samples for piece in run.final.ledger.committed) == samples
    # Plans go by what counts: the clock that steps are told of leads by less than a round of places.
    told = run.final.recent[-1].plan
    places = len(held) * spec.inner.steps * spec.tokens_per_inner_step
    assert 0 <= told.token_clock + told.round_tokens - tokens < places


def _talks(folder: Path, length: int) -> Path:
    """Conversations with long questions, and answers of so many words."""
    path = folder.with_suffix(".jsonl")
    talks = [
        [
            {"role": "user", "content": words(i, 30)},
            {"role": "assistant", "content": words(i + 1, length)},
        ]
        for i in range(120)
    ]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talks))
    return path


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
    for other, why in ((None, "and the run's are bytes"), ("ab" * 32, "are of abababababab")):
        spec = tiny(data={**private, "tokenizer": other}, model=sized)
        with pytest.raises(BadDataError, match=f"are of tokenizer {digest[:12]}.*{why}"):
            open_dataset(spec, own)
    text = DataPlaces(folder=tmp_path, own=str(tmp_path / "text.jsonl"))
    with pytest.raises(NoInputError, match=r"text\.jsonl holds no tokens") as refused:
        open_dataset(tiny(data={**private, "tokenizer": digest}, model=sized), text)
    assert f"atoll data prepare {text.own} --tokenizer FILE" in refused.value.next_step


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
