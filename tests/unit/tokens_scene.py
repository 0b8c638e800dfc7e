"""Small inputs for `atoll data prepare`, a tokenizer, and the folders of tokens made of them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from node.island.data.manifest import (
    Manifest,
    ShardEntry,
    piece_digests,
    pieces_of_file,
    read_manifest,
)
from node.island.data.preparing import Prepared, prepare
from node.island.data.shard_plan import Wanted
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

END = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(number: int, count: int = 40) -> str:
    """A document that says whose it is in every word."""
    return " ".join(f"word{number}x{i}" for i in range(count))


def write_jsonl(path: Path, num_documents: int, *, count: int = 40) -> list[str]:
    """Documents as JSON lines; returns their texts."""
    texts = [words(i, count) for i in range(num_documents)]
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return texts


def write_tokenizer(folder: Path, *, is_chat: bool = False) -> Path:
    """Trains a small byte-level BPE and writes it as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, *(CHAT_TOKENS if is_chat else ())]
    tokenizer.train_from_iterator(
        [words(i) for i in range(50)],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": CHAT_TOKENS[1] if is_chat else {"content": END}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if is_chat:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def prepared(*inputs: object, out: Path, **options: object) -> Prepared:
    """Runs a preparation, quietly."""
    wanted = {"held_out": 0.2, **options}
    return prepare(
        Wanted(inputs=tuple(map(str, inputs)), out=out, **wanted),  # type: ignore[arg-type] # options are typed where they are used
        on_state=lambda state: None,
        say=lambda line: None,
    )


def cut_into_pieces(folder: Path, piece_bytes: int) -> None:
    """Rewrites a folder's manifest: pieces are so small that little data has many."""
    tables = json.loads((folder / "manifest.json").read_text())
    tables["piece_bytes"] = piece_bytes
    for name, entry in tables["files"].items():
        entry["pieces"] = piece_digests(pieces_of_file(folder / name, piece_bytes))
    (folder / "manifest.json").write_text(json.dumps(tables))


def small_shards(place: Path, *, piece_bytes: int) -> Path:
    """A folder of tokens, which are bytes, in some shards of several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.island.data.shard_plan.LEAST_SHARD_BYTES", 4096)
        patch.setattr("node.island.data.shard_plan.SHARDS_AIMED_AT", 1 << 30)
        write_jsonl(place / "a.jsonl", 60)
        prepared(place / "a.jsonl", out=place / "out")
    cut_into_pieces(place / "out", piece_bytes)
    return place / "out"


def spec_of(folder: Path, *, context: int = 16, batch: int = 2, vocab_size: int = 512) -> RunSpec:
    """A run on a folder of tokens."""
    return RunSpec(
        model=DecoderModel(
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            ffn_size=24,
            context=context,
            vocab_size=vocab_size,
        ),
        data=DataSection(
            source="tokens", paths=(str(folder),), digest=read_manifest(folder).digest().hex()
        ),
        inner=InnerSection(batch=batch),
    )


def tokens_of(folder: Path, manifest: Manifest, shard: ShardEntry) -> np.ndarray:
    """All tokens of a shard, read without our reader."""
    whole = np.fromfile(folder / shard.tokens, f"<u{manifest.token_bytes}")
    return whole[shard.first : shard.first + shard.num_tokens].astype(np.int64)


def documents_of(folder: Path, split: str) -> list[bytes]:
    """Documents of a split of a folder of bytes, without their ends."""
    manifest = read_manifest(folder)
    found = []
    for shard in getattr(manifest, split):
        tokens = tokens_of(folder, manifest, shard).astype(np.uint8)
        offsets = np.fromfile(folder / str(shard.offsets), "<u8").astype(int)
        for start, stop in itertools.pairwise(offsets):
            assert tokens[stop - 1] == 0
            found.append(tokens[start : stop - 1].tobytes())
    return found


def write_llama(folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """A small Llama as transformers saves it, with a tokenizer of its own."""
    import transformers  # takes seconds

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
