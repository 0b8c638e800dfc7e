"""A new run on tokens of which only answers are learned keeps their conversations apart, where it can."""

import json
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
