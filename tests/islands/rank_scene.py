"""What islands of real ranks train on: a dozen small texts, and vectors that hold initial weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.island.models.first_weights import initial_parameters
from node.outer_state import SharedVectors
from protocol.run.layout import layout_of
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec


def small_spec(learning_rate: float = 1e-2, batch: int = 4) -> RunSpec:
    return RunSpec(
        model=DecoderModel(
            hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
        ),
        data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
        inner=InnerSection(batch=batch, learning_rate=learning_rate, schedule="constant"),
        evaluation=EvaluationSection(samples=7),
    )


def with_texts(folder: Path) -> Path:
    for i in range(12):
        text = " ".join(f"{i}:{j * j}" for j in range(60 + 10 * i))
        (folder / f"{i}.txt").write_text(text)
    return folder


@contextmanager
def initial_vectors(model: DecoderModel) -> Iterator[SharedVectors]:
    vectors = SharedVectors.create(layout_of(RunSpec(model=model)).num_elements)
    vectors.parameters[:] = initial_parameters(RunSpec(model=model))
    try:
        yield vectors
    finally:
        vectors.close()
