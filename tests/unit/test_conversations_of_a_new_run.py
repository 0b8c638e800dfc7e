"""A new run on tokens of which only answers are learned keeps their conversations apart, where it can."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from node.island.data.manifest import read_manifest
from node.models.describing import describe_asked
from protocol.run.run_files import Asked
from tests.unit.tokens_scene import prepared, write_jsonl, write_llama, write_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, and of it tokens of conversations and of plain text."""
    import transformers  # takes seconds

    place = tmp_path_factory.mktemp("chat")
    write_llama(place / "llama")
    torch.manual_seed(0)
    config = transformers.CodeGenConfig(vocab_size=512, n_embd=32, n_layer=1, n_head=4)
    config.update({"n_positions": 64, "n_ctx": 64, "rotary_dim": 4})
    transformers.CodeGenForCausalLM(config).save_pretrained(place / "codegen")
    for name in ("llama", "codegen"):
        write_tokenizer(place / name, is_chat=True)
    write_jsonl(place / "text.jsonl", 100)
    records = [
        {
            "messages": [
                {"role": "user", "content": f"what is {number}"},
                {"role": "assistant", "content": f"it is {number}"},
            ]
        }
        for number in range(100)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    for name in ("text", "chat"):
        prepared(place / f"{name}.jsonl", out=place / name, tokenizer=place / "llama", row=33)
    return place


def described(place: Path, tokens: str, by: str | None, model: str | None) -> dict[str, Any]:
    """What 'atoll init' is told of a run on these tokens."""
    asked = Asked(by=by, data=(str(place / tokens),))
    folder = place / f"run-{len(list(place.glob('run-*')))}"
    folder.mkdir()
    return describe_asked(folder, None if model is None else place / model, asked)


@pytest.mark.parametrize(
    ("by", "model"), [(None, None), ("decoder", "llama"), ("transformers", "llama")]
)
def test_conversations_do_not_see_each_other_and_it_is_said(
    place: Path, by: str | None, model: str | None
) -> None:
    told = described(place, "chat", by, model)
    assert told["data"]["across_documents"] is False
    assert any(note.startswith("[data] across_documents = false") for note in told["notes"])


def test_models_that_do_not_keep_them_apart_are_told_of(place: Path) -> None:
    told = described(place, "chat", "transformers", "codegen")
    assert "across_documents" not in told["data"]
    assert any("no test shows that models of type 'codegen' keep" in note for note in told["notes"])


@pytest.mark.parametrize(("by", "model"), [(None, None), ("transformers", "llama")])
def test_plain_text_is_learned_across_documents(
    place: Path, by: str | None, model: str | None
) -> None:
    told = described(place, "text", by, model)
    assert "across_documents" not in told["data"]
    assert not any("across_documents" in note for note in told["notes"])


OTHER_END = "<|endoftext|>"
"""Of documents: the turns of the chat template end with <|im_end|>."""


def of_a_tokenizer_whose_turns_end_otherwise(place: Path, name: str) -> Path:
    """A copy of the model, whose config ends texts where its tokenizer's documents end, and its tokens."""
    folder = shutil.copytree(place / "llama", place / name)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": OTHER_END}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    prepared(place / "chat.jsonl", out=place / f"{name}-tokens", tokenizer=folder, row=33)
    return folder


@pytest.mark.parametrize(
    ("by", "has_model"), [("decoder", True), ("transformers", True), (None, False)]
)
def test_a_model_that_never_learns_to_stop_is_told_of(
    place: Path, by: str | None, has_model: bool
) -> None:
    name = f"base-{by}"
    folder = of_a_tokenizer_whose_turns_end_otherwise(place, name)
    [told] = (
        note
        for note in described(place, f"{name}-tokens", by, name if has_model else None)["notes"]
        if "write on after its answers" in note
    )
    assert f"end with '<|im_end|>', and the model writes until {OTHER_END!r}" in told
    asked_for = f'"eos_token_id": [0, 2] into {folder}/generation_config.json'
    assert (asked_for if has_model else "--end-of-document '<|im_end|>'") in told


@pytest.mark.parametrize("has_model", [True, False])
def test_so_it_is_told_of_data_that_their_holders_keep(place: Path, has_model: bool) -> None:
    """They are not here, so an answer that the chat template writes tells."""
    folder = of_a_tokenizer_whose_turns_end_otherwise(place, f"private-{has_model}")
    asked = (
        Asked(by="decoder", private=True)
        if has_model
        else Asked(private=True, tokenizer=str(folder))
    )

    def notes() -> list[str]:
        run = place / f"run-{len(list(place.glob('run-*')))}"
        run.mkdir()
        told: list[str] = describe_asked(run, folder if has_model else None, asked)["notes"]
        return [note for note in told if "write on after its answers" in note]

    [told] = notes()
    assert f"end with '<|im_end|>' by the chat template beside {folder}" in told
    assert f"the model writes until {OTHER_END!r}" in told
    if has_model:
        assert f'"eos_token_id": [0, 2] into {folder}/generation_config.json' in told
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    else:
        assert f'"eos_token": "<|im_end|>" into {folder}/tokenizer_config.json' in told
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert not notes()
    (folder / "chat_template.jinja").unlink()
    assert not notes()


def test_what_is_advised_ends_answers(place: Path) -> None:
    folder = of_a_tokenizer_whose_turns_end_otherwise(place, "mended")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    prepared(
        place / "chat.jsonl",
        out=place / "ended-tokens",
        tokenizer=folder,
        row=33,
        end_of_document="<|im_end|>",
    )
    notes = [
        *described(place, "mended-tokens", "decoder", "mended")["notes"],
        *described(place, "ended-tokens", None, None)["notes"],
    ]
    assert notes and not any("write on" in note for note in notes)


def test_the_manifest_tells_conversations_apart_and_of_plain_text_is_as_it_was(place: Path) -> None:
    """Packed rows of plain text have masks as well, and the digests of older tokens stand in run files."""
    chat, text = (
        json.loads((place / name / "manifest.json").read_text()) for name in ("chat", "text")
    )
    assert all(each["mask"] for told in (chat, text) for each in told["training"])
    assert chat["has_answers"] is True and "has_answers" not in text
    assert (
        read_manifest(place / "chat").has_answers and not read_manifest(place / "text").has_answers
    )
