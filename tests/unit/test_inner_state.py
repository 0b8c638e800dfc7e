"""The inner optimizer's state goes to the disk and back as it was, and training never notices."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver

from node.island.checkpoints.folder import CheckpointFolder, rewarming_steps
from node.island.checkpoints.inner_state import Named, Staging
from node.island.checkpoints.writer import CheckpointWriter
from node.island.data.dataset import Corpus, read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.models import DecoderModel, layout_of
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.unit.work_scene import inner_work

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24, context=16
    ),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=4, steps=6, learning_rate=1e-2, schedule="constant", warmup_tokens=0),
    evaluation=EvaluationSection(samples=4),
)
MUON = SPEC.model_copy(update={"inner": SPEC.inner.model_copy(update={"optimizer": "muon"})})
SPARSE = SPEC.model_copy(update={"inner": SPEC.inner.model_copy(update={"sparse": True})})
FP16 = LocalTraining(precision="fp16")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text("the quick brown fox; " * (20 + i))
    return read_corpus(SPEC.data, context=16, batch=4, folder=folder)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(
        path=tmp_path / "inner",
        run_digest=SPEC.digest(),
        layout_digest=layout_of(SPEC).summary().digest,
        every_rounds=1,
    )


class Rank:
    """A trainer and what writes its checkpoints."""

    def __init__(
        self,
        corpus: Corpus,
        parameters: Vector,
        spec: RunSpec = SPEC,
        local: LocalTraining = PLAIN,
    ) -> None:
        self.parameters = parameters.copy()
        self.trainer = Trainer(
            spec=spec,
            corpus=corpus,
            device=torch.device("cpu"),
            mesh=Mesh(),
            clock=time.monotonic,
            local=local,
        )
        self.writer = CheckpointWriter(self.trainer, Mesh())
        self.trainer.adopt(self.parameters)

    def train(self, round_: int, *, steps: int = 3) -> None:
        work = inner_work(
            steps,
            round=round_,
            first_sample=12 * round_,
            num_samples=4 * steps,
            token_clock=(round_ - 1) * 192,
            round_tokens=64 * steps,
        )
        self.trainer.train(work, lambda progress: None)
        self.trainer.publish(self.parameters, 0)

    def load(self, folder: CheckpointFolder) -> str:
        checkpoint = next(folder.whole())
        return self.writer.load(checkpoint.about, checkpoint.path).failure

    def learning_rate(self) -> float:
        """Of the inner step that was taken last."""
        return float(self.trainer._optimizers[-1].param_groups[0]["lr"])


def first() -> Vector:
    return initial_parameters(SPEC)


@pytest.mark.parametrize(
    ("spec", "local"),
    [(SPEC, PLAIN), (MUON, PLAIN), (SPARSE, PLAIN), (SPEC, FP16)],
    ids=["adamw", "muon", "sparse", "fp16"],
)
def test_training_goes_on_bit_for_bit_as_if_there_had_been_no_restart(
    spec: RunSpec, local: LocalTraining, corpus: Corpus, folder: CheckpointFolder
) -> None:
    one = Rank(corpus, first(), spec, local)
    one.train(1)
    assert one.writer.keep(folder, 1, is_waited=True).failure == ""
    other = Rank(corpus, one.parameters, spec, local)
    forgetful = Rank(corpus, one.parameters, spec, local)
    assert other.load(folder) == ""
    for rank in (one, other, forgetful):
        rank.train(2)
    assert other.parameters.tobytes() == one.parameters.tobytes()
    assert forgetful.parameters.tobytes() != one.parameters.tobytes()


def test_fp16_goes_on_at_the_loss_scale_that_it_had(
    corpus: Corpus, folder: CheckpointFolder
) -> None:
    one = Rank(corpus, first(), local=FP16)
    one.train(1)
    one.trainer._engine.loss_scale.take_up(128.0, 77)
    one.writer.keep(folder, 1, is_waited=True)
    again, in_fp32 = Rank(corpus, first(), local=FP16), Rank(corpus, first())
    assert again.load(folder) == in_fp32.load(folder) == ""
    assert again.trainer._engine.loss_scale.kept() == (128.0, 77)
    assert in_fp32.trainer._engine.loss_scale.value == 1.0


def test_steps_taken_while_it_is_written_do_not_change_what_is_written(
    corpus: Corpus, folder: CheckpointFolder, writing: "Writing"
) -> None:
    one = Rank(corpus, first())
    one.train(1)
    base = one.parameters.copy()
    one.writer.keep(folder, 1, is_waited=False)
    assert writing.has_begun.wait(200)
    one.train(2)
    writing.may_go_on.set()
    one.writer.keep(folder, 1, is_waited=True)
    other = Rank(corpus, base)
    assert other.load(folder) == ""
    other.train(2)
    assert other.parameters.tobytes() == one.parameters.tobytes()


class Writing:
    """Lets the test hold torch at its first save."""

    def __init__(self, save: Callable[..., object]) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self._save = save

    def __call__(self, *args: object, **named: object) -> object:
        self.has_begun.set()
        assert self.may_go_on.wait(200)
        return self._save(*args, **named)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    held = Writing(state_dict_saver.save)
    monkeypatch.setattr(state_dict_saver, "save", held)
    yield held
    held.may_go_on.set()


def test_a_round_that_ends_before_the_last_checkpoint_is_written_gets_none(
    corpus: Corpus, folder: CheckpointFolder, writing: Writing
) -> None:
    one = Rank(corpus, first())
    one.train(1)
    assert not one.writer.keep(folder, 1, is_waited=False).is_busy
    assert one.writer.keep(folder, 2, is_waited=False).is_busy
    writing.may_go_on.set()
    assert not one.writer.keep(folder, 3, is_waited=True).is_busy
    assert [whole.about.round for whole in folder.whole()] == [3, 1]


def test_the_last_one_is_not_written_twice(corpus: Corpus, folder: CheckpointFolder) -> None:
    one = Rank(corpus, first())
    one.train(1)
    one.writer.keep(folder, 1, is_waited=True)
    written_at = (folder.path / "round-1").stat().st_mtime_ns
    one.writer.keep(folder, 1, is_waited=True)
    assert (folder.path / "round-1").stat().st_mtime_ns == written_at


def test_a_disk_that_refuses_is_told_and_leaves_nothing_half_written(
    corpus: Corpus, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank(corpus, first())
    one.train(1)
    one.writer.keep(folder, 1, is_waited=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(filesystem.FileSystemWriter, "write_data", full)
        kept = one.writer.keep(folder, 2, is_waited=True)
    assert "No space left on device" in kept.failure
    assert [path.name for path in folder.path.iterdir()] == ["round-1"]
    assert one.writer.keep(folder, 3, is_waited=True).failure == ""
    assert [whole.about.round for whole in folder.whole()] == [3, 1]


def test_nothing_is_kept_before_the_first_step(corpus: Corpus, folder: CheckpointFolder) -> None:
    kept = Rank(corpus, first()).writer.keep(folder, 1, is_waited=True)
    assert "has not taken a step yet" in kept.failure
    assert not list(folder.whole())


def test_a_state_that_does_not_fit_is_refused_whole(
    corpus: Corpus, folder: CheckpointFolder
) -> None:
    muon = Rank(corpus, first(), MUON)
    muon.train(1)
    muon.writer.keep(folder, 1, is_waited=True)
    adamw, untouched = Rank(corpus, first()), Rank(corpus, first())
    why = adamw.load(folder)
    assert "exp_avg" in why
    for rank in (adamw, untouched):
        rank.train(1)
    assert adamw.parameters.tobytes() == untouched.parameters.tobytes()


def test_a_node_that_joins_in_mid_run_begins_with_small_steps(corpus: Corpus) -> None:
    length = rewarming_steps(SPEC)
    joiner, early = Rank(corpus, first()), Rank(corpus, first())
    joiner.train(9, steps=1)
    early.train(1, steps=1)
    assert joiner.learning_rate() == pytest.approx(1e-2 / (length + 1))
    assert early.learning_rate() == pytest.approx(1e-2)
    joiner.train(10, steps=length)
    assert joiner.learning_rate() == pytest.approx(1e-2)


def test_a_restart_within_a_re_warm_up_goes_on_with_it(
    corpus: Corpus, folder: CheckpointFolder
) -> None:
    joiner = Rank(corpus, first())
    joiner.train(9, steps=2)
    joiner.writer.keep(folder, 9, is_waited=True)
    again = Rank(corpus, joiner.parameters)
    again.load(folder)
    again.train(10, steps=1)
    assert again.learning_rate() == pytest.approx(1e-2 * 3 / (rewarming_steps(SPEC) + 1))
    assert next(folder.whole()).about.rewarming_steps == rewarming_steps(SPEC) - 2


def test_a_part_of_several_hosts_holds_a_tied_embedding_wherever_it_is() -> None:
    """Its first copy may be on another host, whose disk this one cannot read."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    copy = Named(name="embed_tokens", parameter=weight, optimizer=optimizer, is_copy=True)
    staging = Staging(torch.device("cpu"))
    assert staging.staged([copy]) == {}
    assert {"step/embed_tokens", "exp_avg/embed_tokens", "exp_avg_sq/embed_tokens"} == set(
        staging.staged([copy], is_part=True)
    )
