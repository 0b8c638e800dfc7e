"""A training loop of one's own as an island of a swarm.

    import atoll
    with atoll.join(model, optimizer) as swarm:
        for batch in my_loader:
            loss = step(batch)
            swarm.step(tokens=batch.numel(), loss=loss)

The node's daemon gives orders: take so many inner steps, publish what you trained, take over the new
weights. They are carried out within `join`, `step` and the end of the block, so between them the loop is
like any other; and it takes no inner step that no plan of the swarm has asked for.
"""

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from atoll.child import ChildNode
from atoll.connection import VERSION, Connection, Message, find_folder
from atoll.errors import (
    ConnectionLostError,
    ModelMismatchError,
    NoNodeError,
    RunOverError,
    SamplesError,
    SwarmError,
)
from atoll.ranks import Ranks
from atoll.weights import Place, Weights, check_model, check_optimizer

log = logging.getLogger("atoll")

Evaluate = Callable[[], "float | tuple[float, int]"]

TELL_SECONDS = 0.5
"""How often rank 0 tells the node of its steps; reading the loss makes a GPU wait."""

LOOK_SECONDS = 0.1
"""How long several ranks train at most before rank 0 tells the others again whether to go on."""

CHILD_SECONDS = 180.0
"""How long a node of our own may take to be there: it loads what it needs, and asks the coordinator."""

LEAVE_SECONDS = 10.0
"""How long a loop that ends waits to be asked for what it has trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of an inner step."""

    round: int
    is_replaced: bool  # whether weights were taken over from the swarm since the step before
    steps_left: int  # inner steps that the plan still wants in this round
    is_over: bool  # whether the run, or this node's part in it, has ended: leave the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a loop may know of the run."""

    name: str
    rounds: int
    batch: int  # samples of an inner step, over all ranks
    context: int  # tokens of a sample
    tokens_per_step: int  # that the plan leases for an inner step, over all ranks
    num_samples: int  # of the training data here; 0 where there is none


@dataclass(slots=True, kw_only=True)
class _Training:
    """An order to train, and how far it has come."""

    number: int
    round: int
    inner_steps: int
    ends_at: float  # on this machine's monotonic clock
    first_progress: float
    last_progress: float
    began_at: float
    steps: int = 0
    look_at: int = 1  # steps after which the ranks agree next on whether to go on
    tokens: int = 0
    loss_sum: Tensor | float = 0.0
    num_losses: int = 0
    told_at: float = 0.0
    told_losses: tuple[float, int] = (0.0, 0)
    is_leased: bool = True
    sampled_step: int = -1  # the last one whose samples were handed out

    @property
    def progress(self) -> float:
        span = max(1, self.inner_steps - 1)
        part = min(1.0, self.steps / span)
        return self.first_progress + part * (self.last_progress - self.first_progress)


class Swarm:
    """A loop's part in a swarm. `join` makes it; it is a context manager."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Any,
        folder: Path,
        child: ChildNode | None,
        evaluate: Evaluate | None,
        wait_seconds: float,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._folder = folder
        self._child = child
        self._evaluate = evaluate
        self._wait_seconds = wait_seconds
        self._ranks = Ranks.of(model)
        self._connection: Connection | None = None
        self._training: _Training | None = None
        self._weights: Weights | None = None
        self._numbers: dict[int, list[int]] = {}  # of samples, by the step of the order
        self._is_replaced = False
        self._steps_at_risk = 0  # trained, and not published yet
        self._run_digest = ""
        self._has_warned = False
        self._over = ""
        self._last_round = 0
        self._last_progress = 0.0
        self.run: Run

    # What a loop calls

    @property
    def progress(self) -> float:
        """How far the run has come, from 0 to 1: what a schedule of one's own may follow."""
        return self._last_progress if self._training is None else self._training.progress

    @property
    def is_over(self) -> bool:
        """Whether the run, or this node's part in it, has ended."""
        return bool(self._over)

    @property
    def why_over(self) -> str:
        """Why it has ended; empty while it goes on."""
        return self._over

    def step(self, *, tokens: int | None = None, loss: float | Tensor | None = None) -> Step:
        """Counts an inner step; call it after each step of the optimizer, on all ranks.

        When the plan wants no more steps, what was trained is exchanged, and this returns with the next
        plan. `tokens` are those that this rank trained and no other rank counts; the steps on `samples`
        know theirs. `loss` is in nats per token, for people to see.

        Once it has returned `is_over`, calling it again raises RunOverError, which leaves the `with`
        block of `join` and is not seen outside of it.
        """
        if self._over:
            raise RunOverError(f"the loop's part in the swarm is over: {self._over}")
        training = self._trains
        self._is_replaced = False
        training.tokens += self._tokens_of(training, tokens)
        training.is_leased &= training.sampled_step == training.steps
        training.steps += 1
        self._steps_at_risk += 1
        if loss is not None:
            training.loss_sum = training.loss_sum + (
                loss.detach().float() if isinstance(loss, Tensor) else float(loss)
            )
            training.num_losses += 1
        self._tell_now_and_then(training)
        if training.steps >= training.look_at:
            more_steps = self._ranks.said_by_first(lambda: self._more_steps(training))
            training.look_at = training.steps + more_steps
            if more_steps == 0:
                self._serve(answer=self._trained(training))
        current = self._training
        return Step(
            round=self._last_round,
            is_replaced=self._is_replaced,
            steps_left=0 if current is None else current.inner_steps - current.steps,
            is_over=bool(self._over),
        )

    def samples(self) -> Iterator[Tensor]:
        """Numbers of the samples that the ledger has leased for each inner step, until the run is over.

        This rank's share of the step's batch, int64 [batch / ranks]. No other node trains them in this
        epoch. Call `step` after each: the next batch depends on it, so it cannot be fetched ahead.
        """
        if self.run.num_samples < 1:
            raise SamplesError("the node has no samples of the run to lease")
        if self.run.batch % self._ranks.world_size:
            raise SamplesError(
                f"[inner] batch = {self.run.batch} cannot be shared evenly by "
                f"{self._ranks.world_size} ranks",
                next_step="start as many ranks as divide it",
            )
        while not self._over:
            training = self._trains
            if training.sampled_step == training.steps:
                raise SamplesError(
                    "the next samples were asked for before step() told that the last ones are trained",
                    next_step="call swarm.step() after each batch; a DataLoader must not fetch ahead",
                )
            numbers = self._numbers_of(training)
            if numbers is None:
                self._serve()  # the node is gone: it, or another one, gives other samples
                continue
            training.sampled_step = training.steps
            share = self.run.batch // self._ranks.world_size
            yield torch.tensor(numbers[self._ranks.rank * share :][:share], dtype=torch.int64)

    def leave(self, why: str = "it has ended") -> None:
        """Ends the loop's part, after contributing what it has trained of the round."""
        connection, training = self._connection, self._training
        try:
            if connection is not None and training is not None and training.steps > 0:
                self._hand_in(connection, training)
        except ConnectionLostError:
            log.warning("the node was gone before it had what was trained last")
        self._close(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        """Leaves. What was trained is contributed, unless an error has ended the loop."""
        try:
            if kind is None or issubclass(kind, (KeyboardInterrupt, SystemExit)):
                self.leave()
            else:
                self._close("it has ended" if kind is RunOverError else f"{kind.__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.end()
        return kind is RunOverError

    # Coming in, and coming back

    def come_in(self) -> None:
        """Connects, takes the global parameters over, and waits for the first plan."""
        self._connect(wait_seconds=CHILD_SECONDS if self._child else self._wait_seconds)
        log.info("waiting for the swarm's next round")
        self._serve()

    def _connect(self, *, wait_seconds: float) -> None:
        group = self._ranks.same_for_all(secrets.token_hex(8))
        child = self._child
        try:
            connection = Connection.open(
                self._folder,
                wait_seconds=wait_seconds,
                is_alive=lambda: child is None or child.is_alive,
            )
        except NoNodeError:
            if child is not None and not child.is_alive:
                raise child.why_ended() from None
            raise
        try:
            self._be_welcomed(connection, group)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _be_welcomed(self, connection: Connection, group: str) -> None:
        connection.say(
            {
                "kind": "hello",
                "version": VERSION,
                "group": group,
                "rank": self._ranks.rank,
                "world_size": self._ranks.world_size,
                "evaluates": self._evaluate is not None,
            }
        )
        welcome = connection.hear()
        assert welcome is not None
        if welcome["kind"] == "goodbye":  # another rank was refused meanwhile
            raise ConnectionLostError(welcome["why"])
        if welcome["kind"] == "refused":
            raise SwarmError(welcome["what"], next_step=welcome["next_step"])
        if self._run_digest not in ("", welcome["run_digest"]):
            raise SwarmError("the node is in another run now than when this loop joined it")
        places = [
            Place(name=name, shape=tuple(shape), offset=offset)
            for name, shape, offset in welcome["tensors"]
        ]
        try:
            check_model(self._model, places)
            if self._optimizer is not None:
                check_optimizer(self._model, self._optimizer, places)
        except ModelMismatchError as error:
            connection.say({"kind": "refuses", "why": error.what})
            raise
        parameters, published = connection.vectors(welcome["num_elements"])
        self._weights = Weights(
            model=self._model,
            places=places,
            fragments=[(first, num_elements) for first, num_elements in welcome["fragments"]],
            overlap=welcome["overlap"],
            local_share=welcome["local_share"],
            rank=self._ranks.rank,
            parameters=parameters,
            published=published,
        )
        self._run_digest = welcome["run_digest"]
        self.run = Run(
            name=welcome["run"],
            rounds=welcome["rounds"],
            batch=welcome["batch"],
            context=welcome["context"],
            tokens_per_step=welcome["tokens_per_step"],
            num_samples=welcome["num_samples"],
        )
        connection.say({"kind": "ready"})

    def _come_back(self, why: str) -> None:
        """Connects again after the node, or another rank, was gone; all ranks do so together."""
        self._close(why)
        lost = f"; {self._steps_at_risk} inner steps that were not published are lost"
        log.warning(
            "the loop was cut off (%s)%s; waiting up to %g s for the node in %s",
            why,
            lost if self._steps_at_risk else "",
            self._wait_seconds,
            self._folder,
        )
        self._steps_at_risk = 0
        self._connect(wait_seconds=self._wait_seconds)

    def _close(self, why: str) -> None:
        connection, self._connection = self._connection, None
        self._training = None
        if connection is None:
            return
        try:
            connection.say({"kind": "leaving", "why": why[:1000]})
        except ConnectionLostError:
            pass
        connection.close()

    # The node's orders

    def _serve(self, *, answer: Message | None = None) -> None:
        """Answers the order to train, and carries out others until the next one, or the end."""
        self._training = None
        while not self._over:
            try:
                connection = self._connected
                if answer is not None:
                    connection.say(answer)
                answer = None
                order = connection.hear()
                assert order is not None
                if order["kind"] == "train":
                    self._begin(order)
                    return
                answer = self._carry_out(order)
            except ConnectionLostError as lost:
                answer = None
                self._come_back_until_in(lost.what)

    def _come_back_until_in(self, why: str) -> None:
        while True:
            try:
                self._come_back(why)
                return
            except ConnectionLostError as lost:
                why = lost.what

    def _carry_out(self, order: Message) -> Message | None:
        """What an order is answered with."""
        weights = self._weights
        assert weights is not None
        done = {"kind": "done", "number": order.get("number", 0)}
        match order["kind"]:
            case "adopt":
                weights.adopt(order["fragment"], is_taken=order["is_taken"])
                self._is_replaced = True
                if order["fragment"] is None:
                    self._steps_at_risk = 0
                return done
            case "publish":
                weights.publish(order["fragment"])
                self._steps_at_risk = 0
                return done
            case "evaluate":
                loss, tokens = self._evaluated(weights)
                return {**done, "kind": "evaluated", "loss": loss, "tokens": tokens}
            case "goodbye" if order["is_over"]:
                self._over = order["why"]
            case "goodbye":
                raise ConnectionLostError(order["why"])
        return None  # a halt that came when nothing was trained any more

    def _begin(self, order: Message) -> None:
        now = time.monotonic()
        first, last = order["progress"]
        seconds = order["max_seconds"]
        self._training = _Training(
            number=order["number"],
            round=order["round"],
            inner_steps=order["inner_steps"],
            ends_at=math.inf if seconds is None else now + seconds,
            first_progress=first,
            last_progress=last,
            began_at=now,
            told_at=now,
        )
        self._numbers = {}
        self._last_round = order["round"]

    def _evaluated(self, weights: Weights) -> tuple[float, int]:
        """The loss of the global parameters, by the loop's own function; its own weights stay."""
        assert self._evaluate is not None
        own = weights.aside()
        weights.show_global()
        try:
            found = self._evaluate()
        finally:
            weights.put_back(own)
        loss, tokens = found if isinstance(found, tuple) else (found, 0)
        return float(loss), int(tokens)

    def _hand_in(self, connection: Connection, training: _Training) -> None:
        """Ends the training in progress, and publishes it if the node asks for it now."""
        connection.say(self._trained(training))
        give_up_at = time.monotonic() + LEAVE_SECONDS
        while (left := give_up_at - time.monotonic()) > 0:
            order = connection.hear(left)
            if order is None or order["kind"] in ("train", "goodbye"):
                return  # it was trained ahead, or nobody takes it
            if (answer := self._carry_out(order)) is not None:
                connection.say(answer)
            if order["kind"] == "publish":
                return

    # One inner step

    @property
    def _trains(self) -> _Training:
        if self._training is None:
            raise SwarmError("this loop has left the swarm", next_step="join again")
        return self._training

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConnectionLostError("the node is gone")
        return self._connection

    def _tokens_of(self, training: _Training, tokens: int | None) -> int:
        """Tokens that a step counts; those on leased samples are what the ledger takes them for."""
        leased = self.run.tokens_per_step // self._ranks.world_size
        if training.sampled_step == training.steps:
            if tokens not in (None, leased):
                raise ValueError(
                    f"a step on leased samples counts the {leased} tokens that the ledger counts, not "
                    f"{tokens}: leave tokens out"
                )
            return leased
        if tokens is None:
            raise ValueError(
                "step() wants tokens=…: how many this rank trained. Only steps on swarm.samples() know"
            )
        if tokens > leased and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a step of this loop has %d tokens on a rank, and only %d of them weigh in the swarm: "
                "the run's [inner] batch times [model] context, over %d ranks",
                tokens,
                leased,
                self._ranks.world_size,
            )
        return int(tokens)

    def _more_steps(self, training: _Training) -> int:
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
            order = self._connected.hear(0.0)
        except ConnectionLostError:
            return True  # what follows finds out, on all ranks
        if order is not None and order["kind"] == "goodbye":
            self._take_goodbye(order)
        return order is not None

    def _tell_now_and_then(self, training: _Training) -> None:
        now = time.monotonic()
        is_due = now - training.told_at >= TELL_SECONDS or training.steps == 1
        if self._ranks.rank != 0 or not is_due:
            return
        loss_sum, num_losses = float(training.loss_sum), training.num_losses
        sum_before, num_before = training.told_losses
        is_told = num_losses > num_before
        mean = (loss_sum - sum_before) / (num_losses - num_before) if is_told else None
        training.told_at, training.told_losses = now, (loss_sum, num_losses)
        try:
            self._connected.say(
                {
                    "kind": "stepped",
                    "number": training.number,
                    "steps": training.steps,
                    "tokens": training.tokens,
                    **_loss(mean),
                }
            )
        except ConnectionLostError:
            pass  # what follows finds out, on all ranks

    def _trained(self, training: _Training) -> Message:
        self._last_progress = training.progress
        is_told = training.num_losses > 0
        return {
            "kind": "trained",
            "number": training.number,
            "steps": training.steps,
            "tokens": training.tokens,
            "seconds": time.monotonic() - training.began_at,
            "is_leased": training.is_leased,
            **_loss(float(training.loss_sum) / training.num_losses if is_told else None),
        }

    def _numbers_of(self, training: _Training) -> list[int] | None:
        """The batch of the step that is next; None when the node is gone.

        It tells those of many steps at once, to rank 0, which tells the others.
        """
        step, batch = training.steps, self.run.batch
        if step not in self._numbers:
            told = self._asked_for_numbers(training) if self._ranks.rank == 0 else None
            numbers = self._ranks.same_for_all(told)
            if numbers is None:
                return None
            if len(numbers) < batch:
                raise SamplesError("the node has no samples for this step any more")
            self._numbers = {
                step + i: numbers[i * batch : (i + 1) * batch] for i in range(len(numbers) // batch)
            }
        return self._numbers[step]

    def _asked_for_numbers(self, training: _Training) -> list[int] | None:
        try:
            connection = self._connected
            connection.say(
                {"kind": "samples", "number": training.number, "first_step": training.steps}
            )
            while True:
                message = connection.hear()
                assert message is not None
                match message["kind"]:
                    case "samples":
                        numbers: list[int] = message["numbers"]
                        return numbers
                    case "halt":
                        training.ends_at = -math.inf  # after this step
                    case "goodbye":
                        self._take_goodbye(message)
                        return None
        except ConnectionLostError:
            return None

    def _take_goodbye(self, order: Message) -> None:
        """The end, or that of this connection: the loop connects again where it waits for orders."""
        if order["is_over"]:
            self._over = order["why"]
        else:
            self._connected.close()


def _loss(mean: float | None) -> Message:
    """A loss as it is told: JSON has no word for what is not a number."""
    is_finite = mean is None or math.isfinite(mean)
    return {"loss": mean if is_finite else None, "is_finite": is_finite}


def join(
    model: nn.Module,
    optimizer: Any = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    invite: str | None = None,
    evaluate: Evaluate | None = None,
    wait_seconds: float = 60.0,
) -> Swarm:
    """Joins a swarm with a training loop of one's own; use it in a `with`.

    The model's trainable parameters must be the run's, in names and shapes: they are replaced by the
    global ones, now and after each round. `optimizer`, or several, is only checked to step them all.

    A node must run in `folder` (else $ATOLL_DIR, as for `atoll node start`) with `--loop`; one that is not
    there is waited for `wait_seconds`. With `invite` this program joins and starts the node itself, by
    the `atoll` that $ATOLL_PROGRAM or the PATH names, and ends it when it leaves. `evaluate` returns the
    held-out loss in nats per token, or that and how many tokens it was measured on; it is called on all
    ranks while the model holds the global parameters. Without it, other nodes evaluate.

    With several ranks, call it on all of them after `torch.distributed` was set up and the model
    sharded. Returns with the first plan. Raises SwarmError and those made of it.
    """
    home = find_folder(folder)
    child = None
    if invite is not None and int(os.environ.get("RANK", "0")) == 0:
        child = ChildNode.start(home, invite)
    swarm = Swarm(
        model=model,
        optimizer=optimizer,
        folder=home,
        child=child,
        evaluate=evaluate,
        wait_seconds=CHILD_SECONDS if invite is not None else wait_seconds,
    )
    try:
        swarm.come_in()
    except BaseException:
        swarm.leave("it did not come in")
        if child is not None:
            child.end()
        raise
    return swarm
