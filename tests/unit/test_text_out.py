"""Text goes to a model and comes back by the tokenizer that the run's tokens were made with, or as bytes."""

from pathlib import Path

import pytest
from tokens_scene import END, prepared, spec_of, write_jsonl, write_tokenizer

from node.island.data.places import DataPlaces
from node.text_out import ByteText, files_of_tokenizer, text_of_run
from protocol.errors import NoInputError
from protocol.models import Description
from protocol.run_spec import RunSpec


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", 30)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens", tokenizer=tokenizer)
    return tmp_path / "tokens"


def test_text_of_a_run_goes_through_the_tokenizer_of_its_tokens(tokens: Path) -> None:
    spec, places = spec_of(tokens), DataPlaces(folder=tokens.parent)
    text = text_of_run(spec, places)
    numbers = text.tokens_of("word3x1 word3x2")
    assert 0 < len(numbers) < 15
    assert text.text_of(numbers) == "word3x1 word3x2"
    (end,) = text.ends
    assert text.tokens_of(END) == text.tokens_of("") == [end]
    assert set(files_of_tokenizer(spec, places)) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_model_that_was_given_says_itself_where_it_ends(tokens: Path) -> None:
    for description, ends in (
        (Description(config={"eos_token_id": 3}), {3}),
        (
            Description(config={"eos_token_id": 3}, generation_config={"eos_token_id": [4, 5]}),
            {4, 5},
        ),
    ):
        spec = spec_of(tokens).model_copy(update={"description": description})
        assert text_of_run(spec, DataPlaces(folder=tokens.parent)).ends == ends


def test_a_tokenizer_that_is_not_here_can_be_named(tokens: Path, tmp_path: Path) -> None:
    spec, elsewhere = spec_of(tokens), DataPlaces(folder=tmp_path, own="nowhere")
    for wanted in (files_of_tokenizer, text_of_run):
        with pytest.raises(NoInputError, match="the run's tokenizer is not here: ") as refused:
            wanted(spec, elsewhere)
        assert refused.value.next_step == "name it with --tokenizer PATH"
    named = tmp_path / "tokenizer" / "tokenizer.json"
    assert files_of_tokenizer(spec, elsewhere, named=named) == {"tokenizer.json": named}
    assert text_of_run(spec, elsewhere, named=named).tokens_of("word3x1")


def test_without_a_tokenizer_tokens_are_bytes(tmp_path: Path) -> None:
    places = DataPlaces(folder=tmp_path)
    text = text_of_run(RunSpec(), places)
    assert isinstance(text, ByteText)
    assert not files_of_tokenizer(RunSpec(), places)
    assert text.tokens_of("é") == [0xC3, 0xA9]
    assert text.tokens_of("") == [0]
    assert text.text_of([100, 300, 0xC3]) == "d��"
    write_jsonl(tmp_path / "a.jsonl", 30)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens")
    spec = spec_of(tmp_path / "tokens")
    assert isinstance(text_of_run(spec, places), ByteText)
