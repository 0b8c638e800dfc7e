"""A rank's session with its node: coming in, and back; orders, and what is answered.

Orders are carried out while the loop is in one of the calls of atoll.swarm, and only then. Several
ranks go through all of it together: they are given the same orders in the same order.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atoll import hints
from atoll.child import ChildNode
from atoll.connection import VERSION, Connection, Message
from atoll.errors import ConnectionLostError, ModelMismatchError, NoNodeError, SwarmError
from atoll.evaluation import EarlyCopies, Evaluate, digest_of_function, evaluated
from atoll.frozen import check_frozen, software_of
from atoll.log_file import LoopLog
from atoll.moments import Moments
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.running_statistics import Compute, RunningStatistics
from atoll.training import Chunk, Training
from atoll.watch import Watch
from atoll.weights import Place, Weights, check_model, check_scaling, reshard, tensors_of

RATE = "learning_rate"
"""The end of the rules that are learning rates."""

ADAMW_RATE, MUON_RATE = "inner.learning_rate", "inner.muon_learning_rate"
"""Those of them that a loop reads."""

CHILD_SECONDS = 180.0
"""How long a node of our own may take to be there: it loads what it needs, and asks the coordinator."""

FIRST_WAIT_SECONDS, WAIT_SECONDS = 10.0, 120.0
"""After which a loop says that it waits for an order: at first, and once it has trained."""

LEAVE_SECONDS = 10.0
"""How long a loop that ends waits to be asked for what it has trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a loop may know of the run."""

    name: str
    rounds: int  # as amended
    batch: int  # samples of an inner step, over all ranks
    context: int  # tokens of a sample
    tokens_per_step: int  # that the plan leases for an inner step, over all ranks
    num_samples: int  # of the training data here; 0 where there is none


class Session:
    """One for a loop's rank; it outlives its connection, and its node."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Any,
        ranks: Ranks,
        folder: Path,
        child: ChildNode | None,
        evaluate: Evaluate | None,
        statistics: Compute | None,
        wait_seconds: float,
    ) -> None:
        self._model = model
        self._optimizers = Optimizers(optimizer)
        self._ranks = ranks
        self._folder = folder
        self._child = child
        self._evaluate = evaluate
        self._compute_statistics = statistics
        self._statistics: RunningStatistics | None = None
        self._watch: Watch | None = None
        self._wait_seconds = wait_seconds
        self._connection: Connection | None = None
        self._weights: Weights | None = None
        self._software = ""  # by which others see whether this loop computes as theirs do
        self._run_digest = ""
        self._rules: dict[str, float] = {}  # in force, by the run file's keys
        self.run: Run
        self.log = LoopLog(folder, rank=ranks.rank)
        self.training: Training | None = None  # the order that the loop carries out
        self.over = ""  # why there will be no further order
        self.is_replaced = False  # weights were taken over; the loop sets it back
        self.steps_at_risk = 0  # trained, and not published yet
        self.follows = False  # the loop has asked how far the run is, or what it wants of rates
        self._early: EarlyCopies | None = None  # until the first round is trained
        self._has_told_wait = False  # since it trained last
        self._has_told_rate = False  # that one was taken for what Muon trains
        self._moments: Moments  # kept for the next start
        self._trained_last = (0, 0)  # a round, and the inner steps of it
        self._begins_anew = False  # the optimizer has no moments yet

    @property
    def has_come_in(self) -> bool:
        """Whether a node has ever let this loop in."""
        return bool(self._run_digest)

    def come_in(self) -> None:
        """Connects, takes the global parameters over, and waits for the first plan."""
        self._connect(
            wait_seconds=CHILD_SECONDS if self._child else self._wait_seconds,
            on_wait=self._tell_no_node,
        )
        self.log.tell(
            logging.INFO,
            "waiting for the swarm's next round",
            run=self.run.name,
            folder=str(self._folder),
        )
        assert self._weights is not None
        if self._begins_anew:
            has_taken = self._moments.take_up(self._trained_tensors, self._run_digest)
            self._begins_anew = not has_taken
        early = EarlyCopies(self._model, self._weights)
        self.serve()
        early.look(self._weights)
        self._early = early

    def serve(self) -> None:
        """Answers the order to train, and carries out others until the next one, or the end.

        At the end of the run the model's running statistics are computed for what it then holds. Raises
        ModelMismatchError where what was trained is none of the run's work.
        """
        training, self.training = self.training, None
        watch, weights = self._watch, self._weights
        assert watch is not None and weights is not None
        if training is not None:
            watch.ends(training.steps, weights.bits)
            self._tell(watch.advice(follows=self.follows))
            self._tell_of_early_averages(weights)
            self._trained_last = training.round, training.steps
            self.log.tell(logging.INFO, "trained", round=training.round, inner_steps=training.steps)
        own = watch.values()
        were_flat = weights.flat() if training is None else None
        self._optimizers.evaluate()
        self._carry_out_all(None if training is None else self._trained(training))
        if self.over:
            self._keep_moments()
            self._settle()
            return
        self._optimizers.train()
        assert self._weights is not None  # others, where the loop has come back
        if were_flat is not None and (flattened := self._weights.flat() - were_flat):
            self._tell([hints.trained_before(min(flattened))])
        watch.given(self._weights.bits(), own if self.is_replaced else None)

    def _carry_out_all(self, answer: Message | None) -> None:
        """Until an order to train has begun, or it is over."""
        while not self.over:
            try:
                if answer is not None:
                    self.say(answer)
                answer = None
                order = self._order()
                if order["kind"] == "train":
                    self._begin(order)
                    return
                answer = self._carry_out(order)
                if order["kind"] == "publish" and self._moments.is_due(time.monotonic()):
                    assert answer is not None
                    self.say(answer)  # now: the node waits for the commit, and this for the disk
                    answer = None
                    self._keep_moments()
            except ConnectionLostError as lost:
                answer = None
                if not self.over:
                    self._come_back(lost.what)

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception, as of a notebook's stop button, has come while orders were carried out."""
        return self.training is None and self._connection is not None

    def resume(self) -> None:
        """Comes in anew after that: nobody knows how far the order was that was carried out then."""
        self._come_back("it was interrupted while it waited for the swarm")
        self.serve()

    def undo_what_came_after(self) -> None:
        """Takes the global parameters over once more: a loop that has not looked has trained a step more."""
        if self._weights is not None:
            self._optimizers.evaluate()
            self._weights.adopt(None, is_taken=True)
            self._settle()

    def _settle(self) -> None:
        if self._statistics is not None:
            self._statistics.settle()
            reshard(self._model)

    def _trained(self, training: Training) -> Message:
        return training.trained(time.monotonic(), self.are_weights_finite)

    def are_weights_finite(self) -> bool:
        """Whether all that this rank trains is: what tells a ruined model from a step that was skipped."""
        assert self._weights is not None
        return self._weights.are_finite()

    def took_a_step(self, training: Training, *, counts: bool) -> None:
        """After an inner step, which has told tokens if it `counts`.

        Raises ModelMismatchError for what may not have changed.
        """
        assert (
            self._statistics is not None and self._watch is not None and self._weights is not None
        )
        is_first = training.steps == 1
        if is_first:
            self._statistics.look()
        self._watch.took_a_step(is_first=is_first, counts=counts)
        if is_first and not self._has_told_rate:
            self._has_told_rate = self._tell_rate_of_matrices(training)
        if is_first and self._begins_anew:
            self._begins_anew = False
            self._tell_of_new_moments(training)

    def look_for_change(self, training: Training) -> None:
        """At a step that all ranks have come to. Raises ModelMismatchError where too many change nothing."""
        assert self._watch is not None and self._weights is not None
        self._watch.is_still(training.steps, self._weights.bits, is_last=False)

    def say(self, message: Message) -> None:
        """Sends a message. Raises ConnectionLostError, and SwarmError as `hear` does.

        Where the node has closed, its last words are here and unheard: whether it is for good.
        """
        try:
            self._connected.say(message)
        except ConnectionLostError:
            with suppress(ConnectionLostError):
                while (order := self.hear(0.0)) is not None:
                    if order["kind"] == "goodbye":
                        self.take_goodbye(order)
            raise

    def hear(self, timeout_seconds: float | None = None) -> Message | None:
        """The next message; None when none comes in so long.

        Raises ConnectionLostError, and SwarmError where the node refuses this loop for good.
        """
        return _not_refused(self._connected.hear(timeout_seconds))

    def _order(self) -> Message:
        """The next order. A long wait for one to train is told once, at the loop's terminal too."""
        has_moved = self._watch is not None and self._watch.has_moved
        seconds = WAIT_SECONDS if has_moved else FIRST_WAIT_SECONDS
        order = self.hear(None if self._has_told_wait else seconds)
        if order is None:
            self._has_told_wait = True
            if self._ranks.rank == 0:
                self.log.tell(logging.WARNING, hints.nothing_to_train(seconds, self._folder))
            order = self.hear()
        assert order is not None
        return order

    def _tell_no_node(self) -> None:
        if self._ranks.rank == 0 and self._child is None:
            self.log.tell(logging.WARNING, hints.no_node(self._folder, self._wait_seconds))

    def _tell_of_early_averages(self, weights: Weights) -> None:
        early, self._early = self._early, None
        if early is not None and early.are_averages(weights):
            self._tell([hints.EARLY_AVERAGE])

    def _tell_rate_of_matrices(self, training: Training) -> bool:
        """Says, if so, that a rate was taken for matrices that the run means for what Muon leaves out."""
        rate, muon = training.read.get(ADAMW_RATE), training.rates.get(MUON_RATE)
        assert self._weights is not None
        weights = tensors_of(self._model, self._weights.places).values()
        if rate is None or muon is None or not self._optimizers.step_matrices_at(rate, weights):
            return False
        self._tell([hints.rate_of_matrices(training.rates[ADAMW_RATE], muon=muon)])
        return True

    def _tell_of_new_moments(self, training: Training) -> None:
        """Says, if so, that a loop has come into a run in progress with an optimizer that begins anew."""
        if training.round > 1 and self._optimizers.keep_any_of(self._trained_tensors.values()):
            self._tell([hints.new_moments(training.round, kept=self._moments.why_not)])

    @property
    def _trained_tensors(self) -> dict[str, Tensor]:
        """What the run trains of the model, by the run's names."""
        assert self._weights is not None
        return tensors_of(self._model, self._weights.places)

    def _keep_moments(self) -> None:
        """Writes what optimizers have learnt for a next start of this loop."""
        round, steps = self._trained_last
        if steps:
            reshard(self._model)
            self._moments.keep(self._trained_tensors, self._run_digest, round=round, steps=steps)

    def _tell(self, advice: Sequence[str]) -> None:
        if self._ranks.rank == 0:
            for each in advice:
                self.log.tell(logging.WARNING, each)

    def take_goodbye(self, order: Message) -> None:
        """The end, or that of this connection: the next `serve` connects again, on all ranks."""
        if order["is_over"]:
            self.over = order["why"]
        else:
            self._connected.close()

    def samples(self, wants_tokens: bool) -> Chunk | None:
        """The samples leased for the next steps; None when the node is gone."""
        training = self.training
        assert training is not None
        try:
            self.say(
                {
                    "kind": "samples",
                    "number": training.number,
                    "first_step": training.steps,
                    "wants_tokens": wants_tokens,
                }
            )
            while True:
                message = self.hear()
                assert message is not None
                match message["kind"]:
                    case "samples":
                        run = self.run
                        return Chunk.of(message, training, batch=run.batch, context=run.context)
                    case "halt":
                        training.ends_at = -math.inf  # after this step
                    case "goodbye":
                        self.take_goodbye(message)
                        return None
        except ConnectionLostError:
            return None

    def hand_in(self) -> None:
        """Ends the training in progress, and publishes it if the node asks for it now."""
        training, self.training = self.training, None
        if training is None:
            return
        try:
            if training.steps:
                self._trained_last = training.round, training.steps
                self._hand_in(training)
        finally:
            if self._ranks.world_size == 1:  # of several others may be gone, or a step behind
                self._keep_moments()

    def _hand_in(self, training: Training) -> None:
        assert self._watch is not None
        self._watch.ends_alone()
        self._optimizers.evaluate()
        self.say(self._trained(training))
        give_up_at = time.monotonic() + LEAVE_SECONDS
        while (left := give_up_at - time.monotonic()) > 0:
            order = self.hear(left)
            if order is None or order["kind"] in ("train", "goodbye"):
                return  # it was trained ahead, or nobody takes it
            if (answer := self._carry_out(order)) is not None:
                self.say(answer)
            if order["kind"] == "publish":
                return

    def end(self, why: str, *, is_done: bool) -> None:
        """Leaves for good, with goodbye."""
        self.close(why, is_done=is_done)
        if self._watch is not None:
            self._watch.close()

    def close(self, why: str, *, is_done: bool) -> None:
        """Says goodbye and ends the connection; unless it `is_done` the node may wait for another."""
        connection, self._connection = self._connection, None
        self.training = None
        if connection is not None:
            with suppress(ConnectionLostError):
                connection.say({"kind": "leaving", "why": why[:1000], "is_done": is_done})
            connection.close()

    # Coming in, and coming back

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConnectionLostError("the node is gone")
        return self._connection

    def _come_back(self, why: str) -> None:
        """Connects again after the node, or another rank, was gone; all ranks do so together."""
        while True:
            self.close(why, is_done=False)
            lost = f"; {self.steps_at_risk} inner steps that were not published are lost"
            self.log.tell(
                logging.WARNING,
                f"the loop was cut off ({why}){lost if self.steps_at_risk else ''}; waiting up to "
                f"{self._wait_seconds:g} s for the node in {self._folder}",
            )
            self.steps_at_risk = 0
            try:
                self._connect(wait_seconds=self._wait_seconds)
                return
            except ConnectionLostError as again:
                why = again.what

    def _connect(self, *, wait_seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        group = self._ranks.same_for_all(secrets.token_hex(8))
        child = self._child
        try:
            connection = Connection.open(
                self._folder,
                wait_seconds=wait_seconds,
                is_alive=lambda: child is None or child.is_alive,
                on_wait=on_wait,
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
        """Checks that model and run agree before anything of either moves."""
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
        welcome = _not_refused(connection.hear())
        assert welcome is not None
        if welcome["kind"] == "goodbye":  # another rank was not welcome
            raise ConnectionLostError(welcome["why"])
        if self._run_digest not in ("", welcome["run_digest"]):
            raise SwarmError("the node is in another run now than when this loop joined it")
        places = [
            Place(name=name, shape=tuple(shape), offset=offset)
            for name, shape, offset in welcome["tensors"]
        ]
        try:
            is_first = self._watch is None
            check_model(self._model, places, may_be_frozen=not is_first)
            check_scaling(self._model, welcome["lora_scaling"])
            if is_first:  # of a large body it takes seconds; later changes are watched
                check_frozen(self._model, welcome["frozen_values"])
                self._software = software_of(self._model, welcome["frozen_values"])
            self._optimizers.check(self._model, places)
            if is_first:
                if besides := self._optimizers.stepped_besides(self._model):
                    self._tell([hints.stays(besides)])
                self._begin_to_watch(places)
        except ModelMismatchError as error:
            connection.say({"kind": "refuses", "why": error.what[:1000]})
            raise
        fragments = [(first, num_elements) for first, num_elements in welcome["fragments"]]
        parameters, published = connection.vectors(
            welcome["num_elements"], max(num_elements for _, num_elements in fragments)
        )
        self._weights = Weights(
            model=self._model,
            places=places,
            fragments=fragments,
            overlap=welcome["overlap"],
            local_share=welcome["local_share"],
            rank=self._ranks.rank,
            parameters=parameters,
            published=published,
            copies_of=self._optimizers.copies_of,
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
        self._rules = self._rules or welcome["rules"]
        connection.say(
            {
                "kind": "ready",
                "software": self._software,
                "evaluates_by": digest_of_function(self._evaluate),
            }
        )

    def _begin_to_watch(self, places: Sequence[Place]) -> None:
        """From now on, over all connections. Raises ModelMismatchError."""
        weights = tensors_of(self._model, places).values()
        self._statistics = RunningStatistics(
            self._model, averaged=weights, compute=self._compute_statistics, ranks=self._ranks
        )
        self._statistics.refuse_if_untold()
        self._optimizers.find_copies(weights)  # of a state that was loaded
        self._begins_anew = self._optimizers.are_given and not self._optimizers.keep_any_of(weights)
        self._moments = Moments(
            self._folder, optimizers=self._optimizers, ranks=self._ranks, log=self.log
        )
        self._watch = Watch(
            self._model,
            places=places,
            optimizers=self._optimizers,
            ranks=self._ranks,
            but_for=self._statistics.names,
        )

    # The node's orders

    def _carry_out(self, order: Message) -> Message | None:
        """What an order is answered with. Raises ConnectionLostError where it ends the connection."""
        weights = self._weights
        assert weights is not None
        done = {"kind": "done", "number": order.get("number", 0)}
        match order["kind"]:
            case "adopt":
                weights.adopt(order["fragment"], is_taken=order["is_taken"])
                self._optimizers.forget_curvature()
                # As of the first weights; one round's are near the last.
                if order["fragment"] is None:
                    assert self._statistics is not None
                    self._statistics.settle_vectors()
                self.is_replaced = True
                return done
            case "publish":
                weights.publish(order["fragment"])
                self.steps_at_risk = 0
                return done
            case "evaluate":
                assert self._evaluate is not None and self._statistics is not None
                assert self._watch is not None
                loss, tokens, metric = evaluated(
                    self._evaluate,
                    model=self._model,
                    weights=weights,
                    statistics=self._statistics,
                    optimizers=self._optimizers,
                    values=self._watch.values,
                )
                found = {"loss": loss, "tokens": tokens, "metric": metric}
                return {**done, "kind": "evaluated", **found}
            case "goodbye" if order["is_over"]:
                self.over = order["why"]
            case "goodbye":
                raise ConnectionLostError(order["why"])
        return None  # a halt that came when nothing was trained any more

    def _begin(self, order: Message) -> None:
        self._has_told_wait = False
        self._take_rules(order["rules"])
        now = time.monotonic()
        first, last = order["progress"]
        seconds = order["max_seconds"]
        self.training = Training(
            number=order["number"],
            round=order["round"],
            inner_steps=order["inner_steps"],
            ends_at=math.inf if seconds is None else now + seconds,
            progress_span=(first, last),
            rates={key: value for key, value in self._rules.items() if key.endswith(RATE)},
            rate_shares=tuple(order["rate_shares"]),
            began_at=now,
            told_at=now,
        )

    def _take_rules(self, rules: dict[str, float]) -> None:
        """Tells what amendments have changed since the last order, or of the run file."""
        changed = [key for key, value in rules.items() if self._rules.get(key) != value]
        if changed:
            told = [f"{key} {self._rules.get(key, 0):g} -> {rules[key]:g}" for key in changed]
            self.log.tell(logging.WARNING, hints.amended(told))
        self._rules = rules
        self.run = replace(self.run, rounds=int(rules["run.rounds"]))


def _not_refused(message: Message | None) -> Message | None:
    if message is not None and message["kind"] == "refused":
        raise SwarmError(message["what"], next_step=message["next_step"])
    return message
