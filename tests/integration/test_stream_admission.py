"""Places of a receiver that many senders want at once: over real streams, and as a value."""

import asyncio
import os
import resource
from contextlib import AsyncExitStack, suppress

import pytest

from node.exchange.peers import Limits, TransferRefusedError
from node.exchange.transport.libp2p import within_open_files
from node.exchange.transport.receiver import StreamAdmission
from node.exchange.transport.serving import Server
from protocol.wire.rounds import NodeId
from tests.integration.sending_scene import PART, Wire
from tests.integration.transport_peers import Desk, make_payload

NUM_CONTRIBUTORS, NUM_BODIES = 200, 2
FEW = Limits(max_streams=16, idle_seconds=60)


@pytest.mark.parametrize("num_parts", [2, 0.1])  # 0.1: it goes whole
async def test_two_hundred_contributors_get_in_by_turns_and_none_asks_again(
    num_parts: float,
) -> None:
    desk = Desk()
    server = Server(desk, limits=FEW)
    links = [
        Wire(limits=FEW, num_streams=2, sender=NodeId(f"node-{number:03}"), server=server)
        for number in range(NUM_CONTRIBUTORS)
    ]
    body = os.urandom(int(num_parts * PART))
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(
                link.push(make_payload(body=body, round=number))
                for link in links
                for number in range(NUM_BODIES)
            )
        )
    came = [(sender, payload.header.round) for sender, payload in desk.received]
    assert sorted(came) == [(link.sender, n) for link in links for n in range(NUM_BODIES)]
    # For each body that of its offer, and two for parts: before the offer is in these are refused once.
    num_streams = sum(link.num_streams for link in links)
    assert num_streams <= NUM_CONTRIBUTORS * NUM_BODIES * (1 + (2 * 2 if num_parts > 1 else 0))
    assert sum(link.num_refused for link in links) == 0
    if num_parts < 1:
        return
    # A peer that is in goes on: its last body comes soon after its first.
    places = {sender: [i for i, (one, _) in enumerate(came) if one == sender] for sender, _ in came}
    at_once = FEW.max_streams
    assert all(last - first <= 2 * NUM_BODIES * at_once for first, last in places.values())


async def test_an_offer_in_line_goes_in_when_a_place_is_free_and_in_its_order() -> None:
    admission, came = StreamAdmission(Limits(max_streams=4)), list[str]()

    async def offer(peer: str, until: asyncio.Event) -> None:
        async with admission.offer(peer, is_in_parts=True):
            came.append(peer)
            await until.wait()

    ends = {peer: asyncio.Event() for peer in "abcd"}
    tasks = {peer: asyncio.create_task(offer(peer, ends[peer])) for peer in ends}
    await asyncio.sleep(0.01)
    assert came == ["a", "b"]  # with a place for the parts of each
    tasks["c"].cancel()
    ends["b"].set()
    await asyncio.sleep(0.01)
    assert came == ["a", "b", "d"]
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    async with admission.offer("a", is_in_parts=True):
        pass  # all places are free again


async def test_who_is_in_goes_on_before_who_waits() -> None:
    admission, came = StreamAdmission(Limits(max_streams=4)), list[str]()
    async with AsyncExitStack() as places:
        for peer in "ab":
            await places.enter_async_context(admission.offer(peer, is_in_parts=True))
        places.enter_context(admission.parts("a"))

        async def offer(peer: str) -> None:
            async with admission.offer(peer, is_in_parts=True):
                came.append(peer)

        waiting = [asyncio.create_task(offer(peer)) for peer in ("late", "a")]
        await asyncio.sleep(0.01)
        assert not came
        with admission.parts("b"):  # it was kept
            pass
    await asyncio.gather(*waiting)
    assert came == ["a", "late"]


async def test_parts_of_who_waits_are_refused_and_of_who_is_in_are_not() -> None:
    admission = StreamAdmission(Limits(max_streams=4))
    with admission.parts("early"):
        pass  # there is room, and its offer is on its way
    async with (
        admission.offer("a", is_in_parts=True),
        admission.offer("b", is_in_parts=True),
    ):
        with admission.parts("a"), admission.parts("b"):
            for peer in ("a", "c"):
                with pytest.raises(TransferRefusedError, match="busy"), admission.parts(peer):
                    pass
        with pytest.raises(TransferRefusedError, match="busy"), admission.parts("c"):
            pass  # the free ones are kept
        with pytest.raises(TransferRefusedError), admission.fetch("c", is_large=False):
            pass


async def test_streams_of_parts_that_overtook_their_offers_do_not_keep_these_out() -> None:
    admission = StreamAdmission(Limits(max_streams=4))
    async with AsyncExitStack() as places, asyncio.timeout(10):
        for peer in "abcd":
            places.enter_context(admission.parts(peer))
        for peer in "abcd":
            await places.enter_async_context(admission.offer(peer, is_in_parts=True))
        with pytest.raises(TransferRefusedError), admission.fetch("e", is_large=False):
            pass


async def test_an_offer_whose_sender_is_gone_takes_no_place() -> None:
    admission = StreamAdmission(Limits(max_streams=2))
    is_gone = False

    async def offer() -> None:
        async with admission.offer("gone", is_in_parts=True, is_gone=lambda: is_gone):
            raise AssertionError("it was let in")

    async with admission.offer("a", is_in_parts=True):
        waiting = asyncio.create_task(offer())
        await asyncio.sleep(0.01)
        is_gone = True
    with pytest.raises(EOFError, match="dropped its offer"):
        await waiting


@pytest.mark.parametrize(
    ("allowed", "waiting"), [(256, 0), (1024, 384), (20_000, 1024), (resource.RLIM_INFINITY, 1024)]
)
def test_the_line_leaves_half_of_the_open_files_to_all_else(
    monkeypatch: pytest.MonkeyPatch, allowed: int, waiting: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (allowed, allowed))
    assert within_open_files(Limits()).max_waiting_streams == waiting


def test_the_line_is_as_long_as_the_limits_say() -> None:
    admission = StreamAdmission(Limits(max_streams=2, max_waiting_streams=1))
    with (
        admission.let_in("a"),
        admission.let_in("b"),
        admission.let_in("c"),
        pytest.raises(TransferRefusedError, match="busy with 3 transfers"),
        admission.let_in("d"),
    ):
        pass
    with suppress(TransferRefusedError), admission.let_in("d"):
        return
    raise AssertionError("places that were left are not free")
