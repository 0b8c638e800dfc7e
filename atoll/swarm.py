"""A training loop of one's own as an island of a swarm.

    import atoll
    with atoll.join(model, optimizer) as swarm:
        for batch in my_loader:
            loss = step(batch)
            swarm.step(tokens=num_targets(batch), loss=loss)  # without padding and what is masked

The node's daemon gives orders: take so many inner steps, publish what you trained, take over the new
weights. They are carried out within `join`, `step` and the end of the block, so between them the loop is
like any other; and it takes no inner step that no plan of the swarm has asked for.
"""

import logging
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from atoll import hints
from atoll.child import ChildNode
from atoll.connection import find_folder
from atoll.errors import (
    ConnectionLostError,
    ModelMismatchError,
    RunOverError,
    SamplesError,
    SwarmError,
)
from atoll.evaluation import Evaluate
from atoll.ranks import Ranks
from atoll.running_statistics import Compute
from atoll.session import ADAMW_RATE, CHILD_SECONDS, MUON_RATE, Run, Session
from atoll.training import Batch, Chunk, Training

TELL_SECONDS = 0.5
"""How often rank 0 tells the node of its steps."""

LOOK_SECONDS = 0.1
"""How long several ranks train at most before rank 0 tells the others again whether to go on."""

LEAST_TORCH = (2, 6)

MOST_TOKENS = 1 << 63
"""Beyond what a message to the node holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of an inner step."""

    round: int
    is_replaced: bool  # whether weights were taken over from the swarm since the step before
    steps_left: int  # inner steps that the plan still wants in this round
    is_over: bool  # whether the run, or this node's part in it, has ended: leave the loop


class Swarm:
    """A loop's part in a swarm. `join` makes it; it is a context manager."""

    def __init__(self, session: Session, ranks: Ranks, child: ChildNode | None) -> None:
        self._session = session
        self._ranks = ranks
        self._child = child
        self._has_warned = False
        self._process_id = os.getpid()
        self._last: Training | None = None  # once nothing is trained any more

    @property
    def run(self) -> Run:
        """The run's facts."""
        return self._session.run

    @property
    def progress(self) -> float:
        """How far the run has come, from 0 to 1: what a schedule of one's own may follow."""
        self._session.follows = True
        training = self._session.training or self._last
        return 0.0 if training is None else training.progress

    @property
    def learning_rate(self) -> float:
        """The run's learning rate at the next inner step: `[inner] learning_rate`, by its schedule.

        Amendments, and `[inner] scaling` with the nodes of a round, are in it. A loop may take it over, as
        `group["lr"] = swarm.learning_rate`; by itself nothing does.
        """
        return self._rate(ADAMW_RATE)

    @property
    def muon_learning_rate(self) -> float:
        """The same of `[inner] muon_learning_rate`. Raises SwarmError where the run has no Muon."""
        return self._rate(MUON_RATE)

    def _rate(self, key: str) -> float:
        self._session.follows = True
        training = self._session.training or self._last
        if training is None or key not in training.rates:
            raise SwarmError(
                f"the run says nothing of {key}" if training else "no plan has come here yet",
                next_step="read swarm.learning_rate" if training else "",
            )
        rate = training.rate(key)
        training.read[key] = rate
        return rate

    @property
    def is_over(self) -> bool:
        """Whether the run, or this node's part in it, has ended."""
        return bool(self._session.over)

    @property
    def why_over(self) -> str:
        """Why it has ended; empty while it goes on."""
        return self._session.over

    def step(self, *, tokens: int | None = None, loss: float | Tensor | None = None) -> Step:
        """Counts an inner step; call it after each step of the optimizer, on all ranks.

        When the plan wants no more steps, what was trained is exchanged, and this returns with the next
        plan. `tokens` are the targets that this rank trained and no other rank counts, without padding and
        what is masked: they are what the work weighs. The steps on `samples` and `batches` know theirs,
        and may tell fewer. `loss` is in nats per token, for people to see.

        Once it has returned `is_over`, calling it again raises RunOverError, which leaves the `with`
        block of `join` and is not seen outside of it. What was trained since is undone: the model has the
        global parameters.
        """
        session = self._session
        if session.over:
            session.undo_what_came_after()
            raise RunOverError(f"the loop's part in the swarm is over: {session.over}")
        session.is_replaced = False
        if session.was_interrupted and self._last is not None:
            session.resume()
            return self._step_of(self._last)
        training = self._training
        counted = self._tokens_of(training, tokens)
        training.tokens += counted
        training.is_leased &= training.sampled_step == training.steps
        training.steps += 1
        session.steps_at_risk += 1
        if loss is not None:
            training.add_loss(loss)
        session.took_a_step(training, counts=counted > 0)
        self._tell_now_and_then(training)
        if training.steps >= training.look_at:
            more_steps = self._ranks.said_by_first(lambda: self._more_steps(training))
            training.look_at = training.steps + more_steps
            if more_steps == 0:
                self._last = training
                session.serve()
            else:
                session.look_for_change(training)
        return self._step_of(training)

    def samples(self) -> Iterator[Tensor]:
        """Numbers of the samples that the ledger has leased for each inner step, until the run is over.

        This rank's share of the step's batch, int64 [batch / ranks], each below `run.num_samples`. No
        other node trains them in this epoch. Call `step` after each: the next batch depends on it, so
        it cannot be fetched ahead.
        """
        for batch in self._leased(wants_tokens=False):
            yield batch.numbers

    def batches(self) -> Iterator[Batch]:
        """As `samples`, with the tokens of the run's data, which the node reads, and which of them count."""
        yield from self._leased(wants_tokens=True)

    def _leased(self, *, wants_tokens: bool) -> Iterator[Batch]:
        if os.getpid() != self._process_id:
            # Their copy of the connection is closed, and a new one would be another loop.
            raise SamplesError(
                "samples are leased to the process that has joined, and a DataLoader's worker asks for them",
                next_step="let the loader take their numbers: DataLoader(dataset, "
                "batch_sampler=swarm.samples(), num_workers=0)",
            )
        world_size = self._ranks.world_size
        if self.run.batch % world_size:
            raise SamplesError(
                f"[inner] batch = {self.run.batch} cannot be shared evenly by {world_size} ranks",
                next_step="start as many ranks as divide it",
            )
        share = self.run.batch // world_size
        chunk: Chunk | None = None
        while not self.is_over:
            training = self._training
            if training.sampled_step == training.steps:
                raise SamplesError(
                    "the next samples were asked for before step() told that the last ones are trained",
                    next_step="call swarm.step() after each batch; a DataLoader must not fetch ahead: "
                    "num_workers=0",
                )
            if chunk is None or not chunk.holds(training):
                asked = self._session.samples(wants_tokens) if self._ranks.rank == 0 else None
                chunk = self._ranks.same_for_all(asked)
            if chunk is None:
                self._session.serve()  # the node is gone: it, or another one, gives other samples
                continue
            if chunk.why or not chunk.holds(training):
                raise SamplesError(
                    f"no samples are leased here: {chunk.why or 'there are too few'}"
                )
            training.sampled_step = training.steps
            first = (training.steps - chunk.first_step) * self.run.batch + self._ranks.rank * share
            training.sampled_tokens = chunk.targets_at(first, share, context=self.run.context)
            yield chunk.batch_at(first, share)

    def leave(self, why: str = "it has ended") -> None:
        """Ends the loop's part, after contributing what it has trained of the round."""
        try:
            self._session.hand_in()
        except ConnectionLostError:
            self._session.log.tell(
                logging.WARNING, "the node was gone before it had what was trained last"
            )
        except ModelMismatchError as error:
            self._end(str(error), is_done=False)
            raise
        self._end(why, is_done=True)

    def _end(self, why: str, *, is_done: bool) -> None:
        if is_done and self._session.has_come_in:
            self._session.log.tell(logging.INFO, "left the swarm", why=self._session.over or why)
        self._session.end(why, is_done=is_done)
        if self._child is not None:
            self._child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Leaves. What was trained is contributed, unless an error has ended the loop."""
        is_early = kind is None and not self.is_over and self._session.training is not None
        if is_early and self._ranks.rank == 0:
            self._session.log.tell(
                logging.WARNING,
                "this loop has ended, and the run goes on without it: let it train until step() says "
                "is_over; max_steps, epochs and limits of its own end it sooner",
            )
        if kind is None or issubclass(kind, (KeyboardInterrupt, SystemExit, RunOverError)):
            self.leave()
        else:
            why = f"{kind.__name__}: {error}"
            told = "".join(traceback.format_exception(kind, error, trace))
            self._session.log.tell(logging.ERROR, f"ended: {why}", exception=told)
            if self._session.is_replaced and "modified by an inplace operation" in why:
                self._session.log.tell(logging.ERROR, hints.OLD_GRAPH)
            self._end(why, is_done=False)
        return kind is RunOverError

    # One inner step

    def _step_of(self, training: Training) -> Step:
        current = self._session.training
        return Step(
            round=(current or training).round,
            is_replaced=self._session.is_replaced,
            steps_left=0 if current is None else current.inner_steps - current.steps,
            is_over=self.is_over,
        )

    @property
    def _training(self) -> Training:
        training = self._session.training
        if training is None:
            raise SwarmError("this loop has left the swarm", next_step="join again")
        return training

    def _tokens_of(self, training: Training, tokens: int | None) -> int:
        """Tokens that a step counts; on leased samples no more than count in them."""
        leased = self.run.tokens_per_step // self._ranks.world_size
        if tokens is not None:
            tokens = _whole(tokens, of=self._counted)
        if training.sampled_step == training.steps:
            most = training.sampled_tokens
            if tokens is not None and not 0 <= tokens <= most:
                raise ValueError(
                    f"the lease of this step has {most} {self._counted} to train on, not {tokens}: leave "
                    "tokens=… out, or tell fewer where the loop masks more"
                )
            return most if tokens is None else tokens
        if tokens is None:
            raise ValueError(
                f"step() wants tokens=…: how many {self._counted} this rank trained. Only steps on "
                "swarm.samples() know"
            )
        if tokens > leased and not self._has_warned:
            self._has_warned = True
            ranks = self._ranks.world_size
            spread = f", spread over {ranks} ranks" if ranks > 1 else ""
            what = " times [model] context"
            instead = "make the run with this loop's batch and context"
            if self.run.context == 1:
                what = ""
                instead = (
                    f"make the run with this loop's batch ('atoll init … --batch {tokens * ranks}'), or "
                    "tell samples if these are their tokens"
                )
            self._session.log.tell(
                logging.WARNING,
                f"a step of this loop has {tokens} {self._counted}, and only {leased} of them weigh in the "
                f"swarm: the run's [inner] batch{what}{spread}; {instead}",
            )
        return tokens

    @property
    def _counted(self) -> str:
        """What is told as tokens, for people: a sample without a context is one."""
        return "tokens" if self.run.context > 1 else "samples"

    def _tell_now_and_then(self, training: Training) -> None:
        now = time.monotonic()
        is_due = now - training.told_at >= TELL_SECONDS or training.steps == 1
        if self._ranks.rank == 0 and is_due:
            with suppress(ConnectionLostError):  # the next look finds out, for all ranks
                self._session.say(training.stepped(now, self._session.are_weights_finite))

    def _more_steps(self, training: Training) -> int:
        """Asked of rank 0: how many steps all ranks take before it is asked again; 0 ends the round."""
        left = training.inner_steps - training.steps
        now = time.monotonic()
        seconds_left = training.ends_at - now
        if left < 1 or seconds_left <= 0 or self._is_halted():
            return 0
        per_step = (now - training.began_at) / training.steps
        if self._ranks.world_size == 1 or per_step <= 0:
            return 1
        return max(1, min(left, int(min(LOOK_SECONDS, seconds_left) / per_step)))

    def _is_halted(self) -> bool:
        """Whether the node wants no more of it, or is gone."""
        try:
            order = self._session.hear(0.0)
        except ConnectionLostError:
            return True
        if order is not None and order["kind"] == "goodbye":
            self._session.take_goodbye(order)
        return order is not None


def _whole(count: Any, *, of: str) -> int:
    """A count as an int. Raises ValueError for what is none: a node would end the connection over it."""
    try:
        whole = int(count)
    except (TypeError, ValueError, OverflowError):
        whole = -1
    if whole < 0 or whole != count or whole >= MOST_TOKENS:
        raise ValueError(f"step(tokens=…) is how many {of} there are, from 0 on, and not {count!r}")
    return whole


def join(
    model: nn.Module,
    optimizer: Any = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    invite: str | None = None,
    evaluate: Evaluate | None = None,
    statistics: Compute | None = None,
    wait_seconds: float = 60.0,
) -> Swarm:
    """Joins a swarm with a training loop of one's own; use it in a `with`.

    The model's trainable parameters must be the run's, in names and shapes: they are replaced by the
    global ones, now and after each round. `optimizer`, or several, is only checked to step them all: its
    moments and its learning rate stay its own.

    A node must run in `folder` (else $ATOLL_DIR, as for `atoll node start`) with `--loop`; one that is not
    there is waited for `wait_seconds`. With `invite` this program joins and starts the node itself, by
    the `atoll` that $ATOLL_PROGRAM or the PATH names, and ends it when it leaves. `evaluate` returns the
    held-out loss in nats per token, or (loss, tokens that it was measured on), or (loss, tokens, metric) with
    an accuracy or the like; it is called on all ranks while the model holds the global parameters. Without
    it, other nodes evaluate.

    `statistics` is for models with batch norm: a function that runs the model over some training batches,
    each rank over its own. Before `evaluate`, and at the end of the run, it is called, without gradients and
    with the norms in training mode, and their running statistics become the means over those batches.

    With several ranks, call it on all of them after `torch.distributed` was set up and the model
    sharded. Returns with the first plan. Raises SwarmError and those made of it.
    """
    require_torch(torch.__version__)
    ranks = Ranks.of(model)
    home = find_folder(folder)
    is_starter = invite is not None and ranks.rank == 0
    child = ChildNode.start(home, invite) if is_starter and invite is not None else None
    session = Session(
        model=model,
        optimizer=optimizer,
        ranks=ranks,
        folder=home,
        child=child,
        evaluate=evaluate,
        statistics=statistics,
        wait_seconds=wait_seconds if invite is None else CHILD_SECONDS,
    )
    swarm = Swarm(session, ranks, child)
    try:
        session.come_in()
    except BaseException:
        swarm.leave("it did not come in")
        raise
    return swarm


def require_torch(version: str) -> None:
    """Raises SwarmError for one without what is called here, such as FSDP2 and stances of the compiler."""
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise SwarmError(
            f"this environment has torch {version}, and a loop needs {least} or later",
            next_step="'pip install --upgrade torch' there; the node's own environment may have another",
        )
