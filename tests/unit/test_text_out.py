"""Text goes to a model and comes back by the tokenizer that the run's tokens were made with, or as bytes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from node.island.data.places import DataPlaces
from node.island.models.describing import describe, first_vector
from node.island.models.generate import model_that_writes
from node.kept import PLACES_FILE, RUN_FILE, keep_places, kept_model, places_of
from node.models.export import export_model
from node.models.text import ByteText, TokenizedText, end_of_text, files_of_tokenizer, text_of_run
from protocol.errors import BadDataError, ConfigError, NoInputError, UsageError
from protocol.run.models import Description, FunctionModel, TransformersModel
from protocol.run.run_spec import RunSpec
from tests.unit.served_folder import serving
from tests.unit.test_export import ORIGIN
from tests.unit.tokens_scene import END, prepared, spec_of, write_jsonl, write_tokenizer


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
    spec = spec_of(tokens)
    elsewhere = DataPlaces(folder=tmp_path)
    far = spec.data.model_copy(update={"paths": ("https://there.example/tokens",)})
    gone = spec.data.model_copy(update={"paths": ("nowhere",)})
    held = spec.data.model_copy(update={"paths": (), "digest": None, "private": True})
    for data, where in (
        (far, "it has no folder of tokens"),
        (gone, f"there are no tokens in {tmp_path / 'nowhere'}"),
        (held, "it has no folder of tokens"),
    ):
        run = spec.model_copy(update={"data": data})
        for wanted in (files_of_tokenizer, text_of_run):
            with pytest.raises(NoInputError, match=f"is not on this machine: {where}") as refused:
                wanted(run, elsewhere)
            assert refused.value.next_step == "name it with --tokenizer PATH"
        named = tmp_path / "tokenizer" / "tokenizer.json"
        assert files_of_tokenizer(run, elsewhere, named=named) == {"tokenizer.json": named}
        assert text_of_run(run, elsewhere, named=named).tokens_of("word3x1")
        own = DataPlaces(folder=tmp_path, own="tokens")
        assert text_of_run(run, own).tokens_of("word3x1")


def test_a_tokenizer_at_an_address_is_fetched_once_and_checked(
    tokens: Path, tmp_path: Path
) -> None:
    with serving(tokens) as served:
        data = spec_of(tokens).data.model_copy(update={"paths": (served.url,)})
        spec = spec_of(tokens).model_copy(update={"data": data})
        places = DataPlaces(folder=tmp_path, cache=tmp_path / "cache")
        files = files_of_tokenizer(spec, places)
        assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
        assert all(
            path.read_bytes() == (tokens / name).read_bytes() for name, path in files.items()
        )
        text = text_of_run(spec, places)
        assert text.text_of(text.tokens_of("word3x1")) == "word3x1"
        assert sorted(name for name, _ in served.asked) == ["manifest.json", *sorted(files)]
        other = tmp_path / "other"
        other.mkdir()
        (other / "manifest.json").write_bytes((tokens / "manifest.json").read_bytes())
        own = DataPlaces(folder=tmp_path, own="other", cache=tmp_path / "cache")
        assert files_of_tokenizer(spec, own) == files, "a folder with some of the shards has none"
    (tokens / "tokenizer.json").write_bytes(b"{}" + (tokens / "tokenizer.json").read_bytes()[2:])
    with serving(tokens) as served:
        data = data.model_copy(update={"paths": (served.url,)})
        spec = spec.model_copy(update={"data": data})
        with pytest.raises(BadDataError, match=r"tokenizer\.json is damaged: piece 0"):
            files_of_tokenizer(spec, DataPlaces(folder=tmp_path, cache=tmp_path / "again"))


def test_without_a_tokenizer_tokens_are_bytes(tmp_path: Path) -> None:
    places = DataPlaces(folder=tmp_path)
    text = text_of_run(RunSpec(), places)
    assert isinstance(text, ByteText)
    files = files_of_tokenizer(RunSpec(), places)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    for path in files.values():
        shutil.copy(path, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    said = "def é 海 👩\u200d🔬\r\n\t  Ā \x7f\xa0" + "".join(map(chr, range(1, 256)))
    assert tokenizer(said).input_ids == text.tokens_of(said)
    assert tokenizer.decode(text.tokens_of(said)) == said
    assert tokenizer.decode([0xFF, 65]) == text.text_of([0xFF, 65])
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, 0)
    assert text.tokens_of("é") == [0xC3, 0xA9]
    assert text.tokens_of("") == [0]
    assert text.text_of([100, 300, 0xC3]) == "d��"
    write_jsonl(tmp_path / "a.jsonl", 30)
    prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens")
    spec = spec_of(tmp_path / "tokens")
    assert isinstance(text_of_run(spec, places), ByteText)


SAID = (
    "def f(x):\n    return 12345 + x",
    "  hello   world\n\n\n\tx",
    "naïve Ünïcode café 2024",
    f"word1x1{END}word2x2",
    "don't we'll I'M",
)


@pytest.mark.parametrize("has_settings", [False, True])
@pytest.mark.parametrize(
    "family", [{"qk_norm": True}, {}, {"attention_bias": "qkv"}, {"sliding_window": 16}]
)
def test_transformers_gives_an_exported_model_the_tokens_that_it_was_trained_on(
    family: dict[str, Any], has_settings: bool, tmp_path: Path
) -> None:
    """The class of a model's family would split text in that family's way, and add tokens of its own."""
    write_jsonl(tmp_path / "a.jsonl", 30)
    folder = write_tokenizer(tmp_path / "tokenizer")
    named = folder
    if not has_settings:
        (folder / "tokenizer_config.json").unlink()
        named = folder / "tokenizer.json"
    prepared(tmp_path / "a.jsonl", out=tmp_path / "tokens", tokenizer=named, end_of_document=END)
    spec = spec_of(tmp_path / "tokens")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update=family)})
    places = DataPlaces(folder=tmp_path)
    out = tmp_path / "out"
    problem = export_model(
        spec=spec,
        parameters=np.zeros(spec.num_parameters, np.float32),
        origin=ORIGIN,
        out=out,
        tokenizer=files_of_tokenizer(spec, places),
        end_of_text=end_of_text(spec, places),
    )
    assert not problem
    (by,) = re.findall(r"tokenizer = (\w+)\.from_pretrained", (out / "README.md").read_text())
    assert by == ("PreTrainedTokenizerFast" if "attention_bias" in family else "AutoTokenizer")
    given = getattr(transformers, by).from_pretrained(out)
    text = text_of_run(spec, places)
    for said in SAID:
        assert given(said).input_ids == text.tokens_of(said)
        assert given.decode(text.tokens_of(said)) == said
    (end,) = text.ends
    assert (given.eos_token, given.eos_token_id) == (END, end)
    assert len(given) <= spec.decoder.vocab_size, "no token beyond the model's"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == end


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_a_model_of_transformers_comes_out_whole_and_writes_what_it_would(
    kind: str, tmp_path: Path
) -> None:
    from tests.transformers_configs import CONFIGS

    CONFIGS[kind].save_pretrained(tmp_path)
    spec = RunSpec(model=TransformersModel(source="transformers", context=16))
    description = describe(spec, tmp_path).model_copy(update={"generation_config": {"top_p": 0.9}})
    spec = spec.model_copy(update={"description": description})
    weights = 3 * first_vector(spec)
    files = files_of_tokenizer(spec, DataPlaces(folder=tmp_path))
    out = tmp_path / "out"
    assert not export_model(spec=spec, parameters=weights, origin=ORIGIN, out=out, tokenizer=files)
    assert "AutoModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        type(model).__name__
        == json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    )
    assert model.generation_config.top_p == 0.9
    tokens = [0, 6, 7]
    with torch.no_grad():
        while len(tokens) < 12:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    written = model_that_writes(spec, weights)([0, 6, 7], num_tokens=9, temperature=0.0, seed=0)
    assert written == tokens[3:]
    drawn = [
        model_that_writes(spec, weights)([0, 6, 7], num_tokens=9, temperature=2.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    end = written[3]
    cut = model_that_writes(spec, weights)(
        [0, 6, 7], num_tokens=9, temperature=0.0, seed=0, ends={end}
    )
    assert cut == written[: written.index(end) + 1]
    with pytest.raises(
        UsageError, match="a prompt of 3 tokens and 30 more are beyond the model's 32"
    ):
        model_that_writes(spec, weights)([0, 6, 7], num_tokens=30, temperature=0.0, seed=0)


def test_a_function_of_a_run_writes_no_text() -> None:
    spec = RunSpec(model=FunctionModel(source="function", function="vision:model"))
    with pytest.raises(UsageError, match="is a function's"):
        model_that_writes(spec, np.zeros(1, np.float32))([0], num_tokens=1, temperature=0.0, seed=0)


def test_commands_find_the_data_where_the_node_was_started_with_them(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    home.mkdir()
    assert places_of(home, base=None, typed_in=elsewhere).folder == elsewhere
    started = DataPlaces(folder=tmp_path, own="tokens", base=tmp_path / "model")
    keep_places(home, started)
    found = places_of(home, base=None, typed_in=elsewhere)
    assert (found.folder, found.own, found.base) == (tmp_path, "tokens", tmp_path / "model")
    assert places_of(home, base="own", typed_in=elsewhere).base == elsewhere / "own"
    (home / "node.toml").write_text('name = "n"\ndata = "moved"\nbase = "there"\n')
    found = places_of(home, base=None, typed_in=elsewhere)
    assert (found.own, found.base) == ("moved", tmp_path / "there")


@pytest.mark.parametrize("damaged", [b"", b'{"folder": "/t', b"[]", b"\x80\x00"])
def test_what_a_node_kept_of_its_run_and_lies_damaged_is_said_with_what_writes_it_anew(
    tmp_path: Path, damaged: bytes
) -> None:
    (tmp_path / PLACES_FILE).write_bytes(damaged)
    with pytest.raises(BadDataError, match=r"places\.json is damaged: .*atoll node start --dir"):
        places_of(tmp_path, base=None, typed_in=tmp_path)
    (tmp_path / RUN_FILE).write_bytes(damaged)
    with pytest.raises(BadDataError, match=r"run\.json is damaged: .*atoll node start --dir"):
        kept_model(tmp_path)


def test_a_prompt_begins_as_documents_do_and_is_not_ended(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    begin, end = (tokenizer.encode(name).ids[0] for name in ("<|im_start|>", END))
    plain = tokenizer.encode("word3x1").ids
    tokenizer.post_processor = TemplateProcessing(
        single=f"<|im_start|> $A {END}", special_tokens=[("<|im_start|>", begin), (END, end)]
    )
    tokenizer.save(str(path))
    text = TokenizedText(path, ends=frozenset({end}))
    assert text.tokens_of("word3x1") == text.tokens_of("<|im_start|>word3x1") == [begin, *plain]
    assert text.tokens_of("") == [begin]


def test_what_a_user_says_is_put_as_transformers_puts_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", is_chat=True)
    asked = [{"role": "user", "content": "what is word3x1?"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    text = TokenizedText(folder / "tokenizer.json", ends=frozenset())
    assert text.tokens_that_ask("what is word3x1?") == expected


def test_without_a_chat_template_there_is_no_conversation(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    for text in (ByteText(), TokenizedText(folder / "tokenizer.json", ends=frozenset())):
        with pytest.raises(ConfigError, match="chat template") as refused:
            text.tokens_that_ask("hello")
        assert "--prompt" in refused.value.next_step
