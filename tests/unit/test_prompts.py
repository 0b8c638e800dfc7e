"""Prompts of the run file, and what a model writes on from them: a process writes it, anybody may read it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.services import checks
from node.island.data.places import DataPlaces
from node.island.models.generate import model_that_writes
from node.models.text import ByteText, Text, text_of_run
from node.models.writing import TEMPERATURE, TextWriter
from node.outer_state import SharedVectors
from protocol.errors import BadDataError, ConfigError
from protocol.run.models import layout_of
from protocol.run.run_files import validated, validated_file
from protocol.run.run_spec import OuterSection, RunSpec
from protocol.terminal.console import printable
from protocol.terminal.rounds import written_in_full
from protocol.terminal.status_words import written_in_words
from protocol.v1 import status_pb2 as pb
from protocol.wire.messages import Wrote
from tests.tiny_runs import tiny
from tests.unit.tokens_scene import prepared, spec_of, write_jsonl, write_tokenizer

PROMPTS = ("def ", "The sea")


def with_prompts(spec: RunSpec, **values: Any) -> RunSpec:
    evaluation = {"prompts": PROMPTS, "prompt_tokens": 12, **values}
    return validated({**spec.model_dump(), "evaluation": evaluation}, origin="a test")


# The run file


def test_a_run_without_prompts_is_the_run_that_it_was_before_there_were_any() -> None:
    # Of the commit before this key came; another digest would end every run at an upgrade.
    assert "prompt" not in RunSpec().canonical_json()
    assert (
        RunSpec(outer=OuterSection(audit=0)).digest().hex()
        == "d96d54c8d175b68fc8ee4b05978c5e4c379dc43044d5a0a2b4a05ba5ef4a3b69"
    )
    assert "prompt_tokens" not in with_prompts(RunSpec(), prompt_tokens=64).canonical_json()
    spec = with_prompts(RunSpec())
    assert spec.digest() != RunSpec().digest()
    assert validated(spec.model_dump(mode="json"), origin="sent").evaluation.prompts == PROMPTS


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"evaluation": {"prompts": ["x"] * 9}}, r"\[evaluation\] prompts"),
        ({"evaluation": {"prompts": [""]}}, r"\[evaluation\] prompts"),
        ({"evaluation": {"prompts": ["x" * 501]}}, r"\[evaluation\] prompts"),
        ({"evaluation": {"prompts": "The sea"}}, r"\[evaluation\] prompts"),
        ({"evaluation": {"prompts": ["x"], "prompt_tokens": 513}}, r"\[evaluation\] prompt_tokens = 513"),
        ({"evaluation": {"prompt_tokens": 9}}, r"prompt_tokens = 9 has no effect without prompts"),
        (
            {
                "evaluation": {"prompts": ["x"]},
                "model": {"source": "function", "function": "a:b", "context": 8},
            },
            r'\[evaluation\] prompts does not go with \[model\] source = "function"',
        ),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_refused_by_key_and_value(
    tables: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        validated_file(tables, origin="run.toml")


# The process that writes


@contextmanager
def parameters_of(spec: RunSpec) -> Iterator[SharedVectors]:
    """Not the initial ones: those write much the same whatever they are given."""
    layout = layout_of(spec)
    vectors = SharedVectors.create(layout.num_elements, layout.largest_fragment)
    try:
        vectors.parameters[:] = np.random.default_rng(0).normal(0, 0.5, layout.num_elements)
        yield vectors
    finally:
        vectors.close()


def written_here(spec: RunSpec, vectors: SharedVectors, text: Text) -> tuple[str, ...]:
    model = model_that_writes(spec, vectors.parameters)
    return tuple(
        text.text_of(
            model(
                text.tokens_of(prompt),
                num_tokens=spec.evaluation.prompt_tokens,
                temperature=TEMPERATURE,
                seed=spec.run.seed,
                ends=text.ends,
            )
        )
        for prompt in spec.evaluation.prompts
    )


async def test_texts_are_of_the_state_that_was_asked_for_though_it_moves_meanwhile(
    tmp_path: Path,
) -> None:
    spec, places = with_prompts(tiny()), DataPlaces(folder=tmp_path)
    with parameters_of(spec) as vectors:
        here = written_here(spec, vectors, text_of_run(spec, places))

        def on_copied() -> None:
            vectors.parameters[:] = 0.0  # the next commit moves them while the model writes

        writer = TextWriter(spec, vectors.names, places, num_threads=1)
        assert await writer.write(on_copied) == Wrote(texts=here)
        assert len(set(here)) == 2 and all(here)
        assert await writer.write(on_copied) != Wrote(texts=here)


async def test_tokens_are_written_with_the_tokenizer_of_the_run_and_without_it_the_reason_is_told(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens", tokenizer=tokenizer)
    spec = with_prompts(spec_of(tmp_path / "tokens"), prompts=("word3x1", "word3x2"))
    places, heard = DataPlaces(folder=tmp_path), list[str]()
    with parameters_of(spec) as vectors:
        writer = TextWriter(spec, vectors.names, places, num_threads=1)
        here = written_here(spec, vectors, text_of_run(spec, places))
        assert here != written_here(spec, vectors, ByteText())
        assert await writer.write(lambda: heard.append("copied")) == Wrote(texts=here)
        assert heard == ["copied"]
        (tmp_path / "tokens" / "tokenizer.json").unlink()
        wrote = await writer.write(lambda: heard.append("copied"))
        assert wrote.texts == () and "tokenizer" in wrote.why_not and heard == ["copied"]


# Whoever reads it


HOSTILE = (
    "\x1b[2J\x9b31m\r<script>alert(1)</script>\u202egnp.exe\nsecond\tline [bold]é 海 👩\u200d🔬\x00"
)
SHOWN = "�[2J�31m�<script>alert(1)</script>�gnp.exe\nsecond\tline [bold]é 海 👩\u200d🔬�"


def test_a_text_is_cut_and_cannot_steer_a_terminal() -> None:
    assert printable(HOSTILE, most=1000) == SHOWN
    assert printable("x" * 12, most=10) == "x" * 10 + "…"
    told = checks.report(Wrote(texts=(HOSTILE, "x" * 5000), why_not="\x1b]0;owned\x07\nno"))
    assert isinstance(told, Wrote)
    assert told.texts[0] == SHOWN and len(told.texts[1]) == checks.MAX_TEXT_LENGTH + 1
    assert told.why_not.isprintable() and "no" in told.why_not
    with pytest.raises(BadDataError, match="there are 9 texts"):
        checks.report(Wrote(texts=("x",) * 9))


def test_a_terminal_shows_texts_below_their_prompts_whatever_the_coordinator_sends() -> None:
    written = pb.Written(
        round=40,
        node_name="sea\x1bside",
        texts=[pb.PromptedText(prompt="Once", text=HOSTILE), pb.PromptedText(prompt="a", text="b")],
    )
    shown = written_in_full(written)
    assert "what the model wrote, on sea�side" in shown
    assert "  Once│�[2J" in shown and "\n  second" in shown and "  a│b" in shown
    line = written_in_words(pb.RunStatus(written=written))
    assert line.startswith("after round 40 “Once�[2J") and "1 more: 'atoll rounds show 40'" in line
    for words in (shown, line):
        assert not set(words) & {"\x1b", "\x9b", "\r", "\x00", "\u202e"}


def test_why_nothing_was_written_is_said_in_the_status_and_of_the_round() -> None:
    written = pb.Written(round=40, node_name="a", why_not="no tokenizer")
    assert written_in_words(pb.RunStatus(written=written)) == "none after round 40: no tokenizer"
    assert written_in_full(written) == "the model wrote nothing, on a: no tokenizer"
    assert written_in_words(pb.RunStatus()) == ""
