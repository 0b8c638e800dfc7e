"""Orders between the hosts of an island: they come over the wire as they were, or are refused."""

import json
import math
from typing import Any

import pytest

from node.hosts.wire import (
    Adopt,
    End,
    Evaluate,
    Hold,
    KeepPart,
    OpenShelf,
    Order,
    Part,
    Publish,
    Shelved,
    Start,
    Stop,
    TakeOver,
    Train,
    answer_from_wire,
    answer_to_wire,
    from_wire,
    to_wire,
)
from node.island.checkpoints.folder import About, Kept, Loaded
from node.island.island import Evaluation, InnerReport, InnerWork
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from protocol.errors import ProtocolMismatchError
from tests.tiny_runs import tiny

WORK = InnerWork(
    round=3,
    inner_steps=5,
    first_sample=40,
    num_samples=20,
    token_clock=1280,
    round_tokens=640,
    max_seconds=math.inf,
    num_participants=2,
)
ABOUT = About(
    run_digest="ab", layout_digest="cd", round=2, mesh="tensor 2", num_hosts=2, set_id="1f"
)
REPORT = InnerReport(round=3, inner_steps=5, samples=20, tokens=600, loss=2.5, seconds=1.25)
ORDERS: tuple[tuple[Order[Any], object], ...] = (
    (TakeOver(about=ABOUT), Loaded(failure="a file is damaged", passed_bytes=7)),
    (Hold(fragment=1), None),
    (Adopt(fragment=None, is_taken=True), None),
    (Train(work=WORK), REPORT),
    (Publish(fragment=0), None),
    (KeepPart(round=3, is_waited=False, set_id="1f"), Kept(is_busy=True, failure="")),
    (Evaluate(), Evaluation(loss=2.0, tokens=128, metric=None)),
    (
        OpenShelf(
            run_digest="ab",
            layout_digest="cd",
            every_rounds=1,
            num_hosts=2,
            num_elements=1000,
            num_parts=10,
        ),
        Shelved(parts=(Part(set_id="1f", host=1, num_hosts=2),)),
    ),
    (Stop(), None),
    (End(), None),
)


def over_the_wire(message: object) -> Any:
    return json.loads(json.dumps(message))


@pytest.mark.parametrize(("order", "answer"), ORDERS, ids=lambda each: type(each).__name__)
def test_an_order_and_its_answer_come_over_the_wire_as_they_were(
    order: Order[Any], answer: object
) -> None:
    assert from_wire(over_the_wire(to_wire(order))) == order
    told = over_the_wire(answer_to_wire(order, answer))
    assert answer_from_wire(order, told) == answer


def test_a_start_comes_with_its_mesh_and_its_machines_choices() -> None:
    start = Start(
        spec=json.loads(tiny().canonical_json()),
        shape=MeshShape(),
        local=LocalTraining(micro_batch=2, precision="bf16"),
        first_rank=2,
        num_ranks=2,
        host="10.0.0.1",
        port=7800,
        num_hosts=2,
    )
    assert from_wire(over_the_wire(to_wire(start))) == start


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"order": "Explode"}, "'Explode', which is no order"),
        ({"order": None}, "None, which is no order"),
        ({"arguments": {"fragment": "first", "is_taken": True}}, "Adopt wrongly: fragment"),
        ({"arguments": {"fragment": 1}}, "Adopt wrongly: is_taken"),
        ({"arguments": {"fragment": 1, "is_taken": True, "run": "rm"}}, "Adopt wrongly: run"),
        ({"arguments": None}, "Adopt wrongly"),
    ],
)
def test_what_is_no_order_of_ours_is_refused_with_what_is_wrong(
    changes: dict[str, object], what: str
) -> None:
    message = to_wire(Adopt(fragment=1, is_taken=True)) | changes
    with pytest.raises(ProtocolMismatchError, match=what):
        from_wire(message)


def test_an_answer_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolMismatchError, match=r"Train was answered wrongly: inner_steps"):
        answer_from_wire(Train(work=WORK), {"round": 3})
