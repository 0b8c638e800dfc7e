"""One rank's training: model, inner optimizer, the inner steps of a round, and their pace.

The optimizer's state stays with the rank over all rounds; weights come from the shared vector and
go back there. Processes and commands are node.island.ranks.rank's business.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.island.checkpoints.folder import About, rewarming_steps
from node.island.checkpoints.inner_state import Blank, Named, Staging, Tensors, is_stepped, named_by
from node.island.data.dataset import Dataset, SampleOrder
from node.island.data.functions import seed_of
from node.island.island import Evaluation, InnerReport, InnerWork, Progress, rebases
from node.island.measuring import (
    LocalCommunication,
    flops_per_token,
    measure_peak_if_unknown,
    measured,
    wait_for,
)
from node.island.models.architecture import BufferWatch
from node.island.parallel.mesh import (
    Held,
    Mesh,
    adopt_boxes,
    blend_boxes,
    held_by,
    publish_boxes,
    published_by,
    rebase_boxes,
)
from node.island.parallel.mesh_shape import (
    PLAIN,
    LocalTraining,
    check_mesh,
    goes_by_a_plan,
    may_be_traced,
)
from node.island.parallel.modules import reshard
from node.island.ranks.accelerator import begin_measuring_memory, copies_of, tally_dtype
from node.island.ranks.faults import TrainingDivergedError
from node.island.training.engine import Engine, Losses
from node.island.training.optimizers import Muon
from node.outer_state import Vector
from protocol.run.amendments import LOWER_RATES
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.run.schedule import Position, Schedule, share_of_peak
from protocol.wire.rounds import Digest

EXPECTED_SAMPLES = 1 << 14
"""Samples of a round that data which is far away is asked for ahead: they touch all pieces of a window."""

Clock = Callable[[], float]


class Trainer:
    """A rank's model and inner optimizer. All ranks make the same calls in the same order."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        corpus: Dataset,
        device: torch.device,
        mesh: Mesh,
        clock: Clock,
        local: LocalTraining = PLAIN,
    ) -> None:
        check_mesh(mesh.shape, spec, local)
        self._spec = spec
        self._corpus = corpus
        self._device = device
        self._mesh = mesh
        self._clock = clock
        self._load = local.load
        self._is_warm = False
        self._layout = layout_of(spec)
        self._places = {place.name: place for place in self._layout.places}
        self._published = published_by(mesh, self._layout)
        self._flops_per_token = flops_per_token(spec)
        self._copies = copies_of(torch.device("cpu") if mesh.shape.has_offload else device)
        self._staging = Staging(torch.device("cpu") if mesh.shape.has_offload else device)
        self._engine = Engine(spec=spec, mesh=mesh, device=device, local=local)
        self._optimizers = self._engine.optimizers(spec.inner)
        self._buffers: BufferWatch | None = BufferWatch(self._engine.parts)  # for the first step
        self._order = SampleOrder.of(spec.run.seed, corpus)
        self._losses = Losses(
            spec=spec,
            corpus=corpus,
            order=self._order,
            engine=self._engine,
            mesh=mesh,
            device=device,
        )
        self._counted_tokens = 0  # since training of a round began
        self._has_plan_to_check = goes_by_a_plan(mesh.shape, spec)
        self._rewarming = Rewarming(rewarming_steps(spec))
        self._communication = LocalCommunication(
            device, mesh, may_trace=may_be_traced(mesh.shape, local)
        )
        if local.compile:
            self._compile_now()

    def take_base(self, base: Path | None) -> None:
        """Reads what the run does not train, where it leaves something as it is; raises AtollError."""
        self._engine.take_base(base)
        self._buffers = BufferWatch(self._engine.parts)  # some have been read as well

    def know_peak(self) -> None:
        """Measures what the device can do, unless a table tells."""
        measure_peak_if_unknown(self._device, self._engine.dtype)
        self._communication.prepare()

    def adopt(self, parameters: Vector) -> None:
        """Copies the global parameters into the model; what was trained locally is gone.

        The first time a plan of the run's own for tensor parallel or stages is tried; raises ConfigError.
        """
        adopt_boxes(self._held(), parameters, copies=self._copies)
        self._engine.settle_vectors()
        if self._has_plan_to_check:
            from node.island.models.plan_check import check_plan

            self._has_plan_to_check = False
            first = np.arange(self._engine.rows) % self._corpus.num_held_out_samples
            batch = self._corpus.batch("held_out", first)
            check_plan(self._engine, self._mesh, self._spec, parameters, batch)

    def merge(
        self, parameters: Vector, published: Vector, fragment: int, *, is_taken: bool
    ) -> None:
        """Takes over a fragment's new global parameters, as [exchange] overlap says.

        `published` begins with what was published of the fragment.
        """
        exchange = self._spec.exchange
        span = self._layout.fragments[fragment].span
        share = exchange.local_share if is_taken else 0.0  # what was not taken is all still owed
        if exchange.overlap == "none":
            adopt_boxes(self._held(), parameters, span, copies=self._copies)
        elif rebases(exchange, is_taken=is_taken):
            rebase_boxes(
                self._held(), parameters, published, span, local_share=share, copies=self._copies
            )
        else:
            blend_boxes(self._held(), parameters, span, local_share=share, copies=self._copies)

    def publish(self, into: Vector, fragment: int) -> None:
        """Copies this rank's parts of the fragment to `into`, which begins with the fragment."""
        span = self._layout.fragments[fragment].span
        publish_boxes(self._held(), into, span, copies=self._copies)

    def _held(self) -> list[Held]:
        """What the rank holds, to be read or changed in place."""
        engine = self._engine
        reshard(engine.parts)
        return list(
            held_by(engine.parts, self._places, published=self._published, copies=engine.copies)
        )

    def train(
        self,
        work: InnerWork,
        on_progress: Callable[[Progress], None],
        is_halted: Callable[[], bool] = lambda: False,
        rest: Callable[[float], None] = time.sleep,
    ) -> InnerReport:
        """Takes inner steps until they, the samples or the time are used up, at least one.

        `is_halted` is asked after each inner step, of rank 0, which also rests for the seconds that the
        load asks for: the others wait for its word. Progress shows this rank's loss, the report that of
        all. Raises TrainingDivergedError.
        """
        batch = self._spec.inner.batch
        max_steps = min(work.inner_steps, work.num_samples // batch)
        if max_steps < 1:
            raise ValueError(
                f"{work.num_samples} samples in {work.inner_steps} steps are no inner step"
            )
        num_expected = min(max_steps * batch, EXPECTED_SAMPLES)
        self._corpus.expect("training", self._order.indices(work.first_sample, num_expected))
        begin_measuring_memory(self._device)
        if self._engine.draws:
            torch.manual_seed(self._seed_of(work))
        tally = Tally(self._device)
        started = self._clock()
        telling = Telling(
            tally, round=work.round, since=started, clock=self._clock, tell=on_progress
        )
        self._counted_tokens = 0
        scale = Schedule.of(self._spec).scale_of(work.num_participants)
        self._rewarming.begin(work.token_clock)
        to_trace = self._communication.step_to_trace(max_steps)
        rests = Rests(self._load, clock=self._clock, rest=rest)
        warm_at = started  # libraries wake up and layers compile in the first step
        look_at = 1  # inner steps after which the ranks agree next on whether to go on
        for step in range(max_steps):
            self._set_learning_rates(work, work.position(self._spec, step), scale)
            with self._communication.traced() if step == to_trace else contextlib.nullcontext():
                tally.add(*self._inner_step(work.first_sample + step * batch))
            self._rewarming.stepped()
            now = telling.look(self._clock(), tokens=self._counted_tokens)
            if tally.steps < look_at:
                continue
            if self._load < 1 and self._mesh.rank == 0 and step + 1 < max_steps:
                wait_for(self._device)  # a GPU may be steps behind
                if not self._is_warm:
                    warm_at = self._clock()
                now = rests.take(since=warm_at, most_seconds=started + work.max_seconds - warm_at)
            self._is_warm = True
            seconds_left = work.max_seconds - (now - started)
            more_steps = 0
            if seconds_left > 0 and not is_halted():
                more_steps = steps_until_next_look(
                    seconds_left,
                    per_step=(now - started) / tally.steps,
                    num_ranks=self._mesh.num_ranks,
                )
            more_steps = self._mesh.said_by_first(more_steps)
            if more_steps == 0:
                break
            look_at = tally.steps + more_steps
        telling.end()
        return self._report(work, tally, started=started, rested=rests.seconds)

    def _report(
        self, work: InnerWork, tally: "Tally", *, started: float, rested: float
    ) -> InnerReport:
        """What all ranks have trained; each makes this call, with the seconds that it has rested itself."""
        loss_sum = self._mesh.summed(torch.tensor(tally.loss_sum, dtype=torch.float64)).item()
        num_losses = tally.num_losses * self._mesh.num_data * self._mesh.shape.context
        seconds = self._clock() - started
        rested = self._mesh.said_by_first(round(1000 * rested)) / 1000 if self._load < 1 else 0
        self._communication.trained(seconds - rested)
        share = self._communication.share
        hardware = measured(self._device, self._engine.dtype, self._mesh)
        return InnerReport(
            round=work.round,
            inner_steps=tally.steps,
            samples=tally.steps * self._spec.inner.batch,
            tokens=self._counted_tokens,
            loss=loss_sum / max(1, num_losses),
            seconds=seconds,
            flops=float(tally.steps * self._spec.tokens_per_inner_step * self._flops_per_token),
            peak_flops_per_second=hardware.peak_flops_per_second,
            is_peak_measured=hardware.is_peak_measured,
            peak_memory_bytes=hardware.peak_memory_bytes,
            skipped_steps=tally.skipped_steps,
            communication_seconds=None if share is None else share * (seconds - rested),
        )

    def evaluate(self) -> Evaluation:
        """Held-out loss of the rank's own weights."""
        return self._losses.held_out()

    def evaluate_at(
        self, parameters: Vector, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Held-out loss of the global parameters."""
        with self._away_to(parameters):
            return self._losses.held_out(on_batch)

    def losses_at(
        self,
        parameters: Vector,
        places: Sequence[int],
        on_sample: Callable[[], None] = lambda: None,
    ) -> tuple[float, ...]:
        """Losses [places] of single training samples at other parameters (Losses.of_samples)."""
        with self._away_to(parameters):
            return self._losses.of_samples(places, on_sample)

    @contextlib.contextmanager
    def _away_to(self, parameters: Vector) -> Iterator[None]:
        """The model has other parameters for a while; the rank's own weights are put back after it."""
        # In the CPU's memory: a GPU that a model fills has no room for it twice.
        before = self._held()
        own = [torch.empty(held.local.shape) for held in before]
        self._copies((kept, held.local) for kept, held in zip(own, before, strict=True))
        vectors = [(each, each.clone()) for each in self._engine.vectors()]
        self.adopt(parameters)
        yield
        for each, kept in vectors:
            each.copy_(kept)
        self._copies((held.local, kept) for kept, held in zip(own, self._held(), strict=True))

    def inner_state(
        self, *, run_digest: Digest, layout_digest: Digest, round: int
    ) -> tuple[Tensors, About]:
        """A copy of this rank's part of the inner optimizer's state, and what belongs to it.

        Raises ValueError before the first step.
        """
        named = self._named()
        if not is_stepped(named):
            raise ValueError("the inner optimizer has not taken a step yet")
        scale = self._engine.loss_scale.kept()
        about = About(
            run_digest=run_digest.hex(),
            layout_digest=layout_digest.hex(),
            round=round,
            mesh=str(self._mesh.shape),
            loss_scale=None if scale is None else scale[0],
            loss_scale_steps=0 if scale is None else scale[1],
            rewarming_steps=self._rewarming.steps_left,
        )
        return self._staging.staged(named, is_part=self._mesh.num_hosts > 1), about

    def blank_inner_state(self) -> Blank:
        """What a checkpoint is read into."""
        return Blank(self._named())

    def take_over(self, state: Blank, about: About) -> None:
        """Lets training go on from a checkpoint that was read."""
        state.install()
        self._rewarming.go_on(about.rewarming_steps)
        if about.loss_scale is not None:
            self._engine.loss_scale.take_up(about.loss_scale, about.loss_scale_steps)

    def _named(self) -> list[Named]:
        reshard(self._engine.parts)  # else its parameters are not those that are stepped
        return named_by(self._engine.parts, self._optimizers, copies=self._engine.copies)

    def _compile_now(self) -> None:
        """Else the first round, and the speed that it is planned by, would pay for it."""
        self._add_gradients(first_sample=0)
        self._engine.forget_gradients()
        self.evaluate()

    def _inner_step(self, first_sample: int) -> tuple[Tensor | None, Tensor | None]:
        """One step on this rank's share of a batch: loss, and gradient norm before clipping.

        None for the norm says that the step was left out. So it is on a batch without a target that
        counts, which has no loss: momentum and weight decay would move the weights by nothing learned.
        """
        loss = self._add_gradients(first_sample)
        if loss is None:
            return None, None
        if self._buffers is not None:
            self._buffers.check()
            self._buffers = None
        norm = self._engine.clip(self._spec.inner.clip)
        is_taken = self._engine.loss_scale.allows(norm)
        if is_taken:
            for optimizer in self._optimizers:
                optimizer.step()
        self._engine.forget_gradients()
        return loss, norm if is_taken else None

    def _add_gradients(self, first_sample: int) -> Tensor | None:
        """Leaves the scaled gradients of this rank's share of a batch; returns its loss.

        Both are means over what counts in the whole batch: a rank with fewer counted targets weighs less.
        None where nothing counts in it, which all ranks find alike: there are no gradients then.
        """
        batch = self._spec.inner.batch
        indices = self._order.indices(first_sample, batch)
        counted = self._corpus.num_counted("training", indices)
        if counted == 0:
            return None
        own = indices[self._mesh.share(batch)]
        loss = self._engine.train(self._corpus.batch("training", own))
        self._counted_tokens += counted
        if self._engine.divides_by_all and counted != batch * self._spec.model.context:
            factor = batch * self._spec.model.context / counted
            self._engine.scale_gradients(factor)
            loss = loss * factor
        return loss

    def _seed_of(self, work: InnerWork) -> int:
        """Of dropout and the like: the same for ranks that share samples, and for the same work again."""
        place, shape = self._mesh.place, self._mesh.shape
        part = place.replicate * shape.shard + place.shard
        return seed_of(self._spec.run.seed, "draws", work.first_sample, part)

    def _set_learning_rates(self, work: InnerWork, at: Position, scale: float) -> None:
        of_peak = share_of_peak(self._spec.inner, at, final_fraction=work.final_fraction)
        share = scale * of_peak * self._rewarming.share()
        for optimizer in self._optimizers:
            factor = work.muon_rate_factor if isinstance(optimizer, Muon) else work.rate_factor
            for group in optimizer.param_groups:
                group["lr"] = share * (group["peak_rate"] * factor)


# The pace: when a rank tells of inner steps, rests, or asks to go on, and how its rates rise at first.

PROGRESS_SECONDS = 0.5

LOOK_SECONDS = 0.1
"""How long ranks train at most before the first tells the others again whether to go on."""


class Tally:
    """Sums of loss and gradient norm, kept on the device: reading them makes a GPU wait."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=tally_dtype(device), device=device)
        self._loss_before = 0.0
        self._steps_before = 0
        self._losses_before = 0
        self._mean = 0.0
        self.steps = 0
        self.num_losses = 0
        self.skipped_steps = 0
        self.loss_sum = 0.0

    def add(self, loss: Tensor | None, norm: Tensor | None) -> None:
        """Without a norm the step was skipped: its loss counts, if it is finite.

        Without a loss there was nothing to learn from.
        """
        self.steps += 1
        if loss is not None:
            self._sums += torch.stack((loss, torch.zeros_like(loss) if norm is None else norm))
            self.num_losses += 1
            self.skipped_steps += norm is None

    def read(self, training_round: int) -> float:
        """Mean loss since the last reading that found any; raises TrainingDivergedError."""
        self.loss_sum, norm_sum = self._sums.tolist()
        # A finite loss with an infinite gradient has ruined the weights as well.
        if not (math.isfinite(self.loss_sum) and math.isfinite(norm_sum)):
            is_first = training_round == 1 and not self._steps_before
            raise TrainingDivergedError(
                f"round {training_round}: the loss or its gradient is no longer finite "
                f"(inner step {self._steps_before + 1} to {self.steps})",
                next_step=(
                    "look at the loss and its samples: targets that are all left out, a logarithm or a "
                    "division of 0; else "
                    if is_first
                    else ""
                )
                + LOWER_RATES,
            )
        if self.num_losses > self._losses_before:
            num_new = self.num_losses - self._losses_before
            self._mean = (self.loss_sum - self._loss_before) / num_new
        self._loss_before, self._losses_before = self.loss_sum, self.num_losses
        self._steps_before = self.steps
        return self._mean


class Telling:
    """Tells of a round's inner steps while they go on; not after each, as to read a loss makes a GPU wait."""

    def __init__(
        self,
        tally: Tally,
        *,
        round: int,
        since: float,
        clock: Callable[[], float],
        tell: Callable[[Progress], None],
    ) -> None:
        self._tally = tally
        self._round = round
        self._clock = clock
        self._tell = tell
        self._at, self._steps, self._tokens = since, 0, 0  # when it told last, and of what

    def look(self, now: float, *, tokens: int) -> float:
        """Tells if it is time to, with so many tokens until now; returns the time after that."""
        if now - self._at < PROGRESS_SECONDS:
            return now
        loss = self._tally.read(self._round)
        now = self._clock()  # a GPU has caught up only now
        self._tell(
            Progress(
                round=self._round,
                inner_step=self._tally.steps,
                loss=loss,
                tokens_per_second=(tokens - self._tokens) / (now - self._at),
            )
        )
        self._at, self._steps, self._tokens = now, self._tally.steps, tokens
        return now

    def end(self) -> None:
        """Reads what steps since then have summed."""
        if self._tally.steps > self._steps:
            self._tally.read(self._round)


def steps_until_next_look(seconds_left: float, *, per_step: float, num_ranks: int) -> int:
    """Inner steps until the ranks agree again, at least one; a lone rank looks after each.

    All wait for what the first one says: after each of many short steps that would cost more than
    they do.
    """
    if num_ranks == 1 or per_step <= 0:
        return 1
    return max(1, int(min(LOOK_SECONDS, seconds_left) / per_step))


class Rests:
    """The rests of a rank between inner steps: of all its time since a moment, `load` is training."""

    def __init__(
        self, load: float, *, clock: Callable[[], float], rest: Callable[[float], None]
    ) -> None:
        self.seconds = 0.0  # until now
        self._load = load
        self._clock = clock
        self._rest = rest

    def take(self, *, since: float, most_seconds: float) -> float:
        """Rests for as long as is due, not beyond so many seconds since then; returns the time."""
        began_at = self._clock()
        elapsed = began_at - since
        due = (elapsed - self.seconds) / self._load - elapsed
        self._rest(max(0.0, min(due, most_seconds - elapsed)))
        now = self._clock()
        self.seconds += now - began_at
        return now


class Rewarming:
    """The rise of learning rates after a start with zero moments, unless the run itself begins."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._is_decided = False
        self.steps_left = 0

    def begin(self, token_clock: int) -> None:
        """Before inner steps of a round. Where the clock is at 0 the run's own warm-up is what there is."""
        if not self._is_decided and token_clock > 0:
            self.steps_left = self._num_steps
        self._is_decided = True

    def go_on(self, steps_left: int) -> None:
        """The moments are not zero: only what an earlier rise had left is to be done."""
        self.steps_left = min(steps_left, self._num_steps)
        self._is_decided = True

    def share(self) -> float:
        """What the learning rates of the next inner step are multiplied by."""
        return (self._num_steps - self.steps_left + 1) / (self._num_steps + 1)

    def stepped(self) -> None:
        """An inner step was taken."""
        self.steps_left = max(0, self.steps_left - 1)
