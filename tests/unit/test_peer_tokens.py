"""Members give each other pieces of the run's tokens; what is false or private does not pass."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lab.simulation.memory_transport import MemoryNetwork
from node.assembly import _takes_tokens_of_peers, _tokens_of
from node.config import NodeSettings
from node.exchange.peers import PIECES_AT_ONCE, NotHeldError, TransferRefusedError, WantTokens
from node.exchange.tokens import GIVE_WAY_SECONDS, MAP_SECONDS
from node.island.data.held import TokensHere
from node.island.data.manifest import read_manifest
from node.island.data.opening import open_dataset
from node.island.data.places import DataPlaces
from protocol.errors import NoInputError
from protocol.run.run_spec import DataSection, RunSpec
from protocol.wire.payload import PIECE, PIECE_MAP, TOKENS_MANIFEST
from protocol.wire.rounds import Digest, NodeId
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import in_virtual_time
from tests.unit.peer_tokens_scene import PIECE as PIECE_BYTES
from tests.unit.peer_tokens_scene import (
    Member,
    content_of,
    copied,
    files_of,
    flipped,
    from_peers,
    introduce,
    piece_for,
    pieces_of,
)
from tests.unit.tokens_scene import small_shards, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shards(tmp_path_factory.mktemp("tokens"), piece_bytes=PIECE_BYTES)


@pytest.fixture
def spec(folder: Path) -> RunSpec:
    return from_peers(spec_of(folder))


@in_virtual_time
async def test_a_node_without_anything_gets_manifest_and_pieces_and_gives_them_on(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    has = Member("has", network, spec, tmp_path, own=folder)
    lacks = Member("lacks", network, spec, tmp_path)
    third = Member("third", network, spec, tmp_path)
    await introduce(has, lacks)
    assert not await lacks.supply.has_manifest()
    await lacks.supply.fetch_manifest(lacks.tokens)
    assert await lacks.supply.has_manifest()
    for piece in pieces_of(folder):
        content = await piece_for(lacks, piece)
        assert content == content_of(folder, piece)
        lacks.held.keep(piece, content)
    assert open_dataset(spec, lacks.places).num_samples > 100
    await has.transport.stop()
    await introduce(lacks, third)
    await third.supply.fetch_manifest(third.tokens)
    for piece in pieces_of(folder)[::5]:
        assert await piece_for(third, piece) == content_of(folder, piece)


@in_virtual_time
async def test_only_who_has_a_piece_is_asked_for_it(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    shards = [shard.tokens for shard in read_manifest(folder).training]
    even = copied(folder, tmp_path / "even", ["manifest.json", *shards[::2]])
    odd = copied(folder, tmp_path / "odd", ["manifest.json", *shards[1::2]])
    one, other = (
        Member(name, network, spec, tmp_path, own=own) for name, own in (("e", even), ("o", odd))
    )
    asks = Member("asks", network, spec, tmp_path)
    await introduce(one, other, asks)
    for piece in pieces_of(folder):
        found = await piece_for(asks, piece)
        assert (found is not None) == (piece.file in shards)
    for member, files in ((one, shards[::2]), (other, shards[1::2])):
        digests = {p.digest for p in pieces_of(folder) if p.file in files}
        asked = [w for w in member.asked if isinstance(w, WantTokens) and w.kind == PIECE]
        assert {want.digest.hex() for want in asked} == digests


@in_virtual_time
async def test_a_member_that_gives_false_bytes_is_named_and_never_asked_again(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    asks = Member("asks", network, spec, tmp_path)
    liar = Member("liar", network, spec, tmp_path, own=folder)
    liar.held.piece = lambda digest: b"false"  # type: ignore[method-assign]
    await introduce(asks, liar)
    first, second, *_ = pieces_of(folder)
    with capture_logs() as logs:
        assert await piece_for(asks, first) is None
    [told] = [entry for entry in logs if "false tokens" in entry["event"]]
    assert told["peer"] == "liar-name (liar)"
    number = len(liar.asked)
    assert await piece_for(asks, second) is None
    assert len(liar.asked) == number
    honest = Member("honest", network, spec, tmp_path, own=folder)
    await introduce(asks, liar, honest)
    await asyncio.sleep(MAP_SECONDS)
    assert await piece_for(asks, first) == content_of(folder, first)
    assert len(liar.asked) == number


@in_virtual_time
async def test_a_false_manifest_is_refused_and_the_next_member_asked(
    folder: Path, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork()
    asks = Member("asks", network, spec, tmp_path)
    liar = Member("a-liar", network, spec, tmp_path, own=folder)
    right = liar.held.manifest() or b""
    honest = Member("honest", network, spec, tmp_path, own=folder)
    for false in (right.replace(b'"vocab_size": 2', b'"vocab_size": 3'), b"{", b"[]"):
        monkeypatch.setattr(liar.held, "manifest", partial(bytes, false))
        asks.tokens._false.clear()
        await introduce(asks, liar, honest)
        with capture_logs() as logs:
            await asks.supply.fetch_manifest(asks.tokens)
        assert [entry["peer"] for entry in logs if "false tokens" in entry["event"]] == [
            "a-liar-name (a-liar)"
        ]
        kept = asks.held.cache.folder / f"{spec.data.digest}.manifest"
        assert kept.read_bytes() == right
        kept.unlink()
        asks.held.found = None


@in_virtual_time
async def test_a_flipped_byte_of_a_shard_is_named_where_it_lies_and_where_it_was_asked_for(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    own = copied(folder, tmp_path / "own", files_of(folder))
    piece = next(p for p in pieces_of(folder) if p.file == "00001.tokens" and p.number == 1)
    flipped(own / piece.file, piece.start + 3)
    has = Member("has", network, spec, tmp_path, own=own)
    asks = Member("asks", network, spec, tmp_path)
    await introduce(has, asks)
    with capture_logs() as logs:
        assert await piece_for(asks, piece) is None
    [at_home] = [entry for entry in logs if entry["event"] == "not given to a peer"]
    [asked] = [entry for entry in logs if entry["event"] == "a member refuses to give tokens"]
    for told in (at_home, asked):
        assert f"{own}/00001.tokens is damaged: piece 1, from byte 512 on" in told["why"]
    assert asked["peer"] == "has-name (has)"
    with capture_logs() as logs:  # from now on it is none that the member has
        await asyncio.sleep(MAP_SECONDS)
        assert await piece_for(asks, piece) is None
    assert not logs
    after = next(p for p in pieces_of(folder) if p.file == piece.file and p.number == 2)
    assert await piece_for(asks, after) == content_of(folder, after)


@in_virtual_time
async def test_an_owner_who_does_not_give_is_obeyed_and_may_ask(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    keeps = Member("keeps", network, spec, tmp_path, own=folder, is_given=False)
    asks = Member("asks", network, spec, tmp_path)
    await introduce(keeps, asks)
    piece = pieces_of(folder)[0]
    assert await piece_for(asks, piece) is None
    for kind in (TOKENS_MANIFEST, PIECE_MAP, PIECE):
        for digest in (bytes.fromhex(piece.digest), bytes.fromhex(str(spec.data.digest))):
            with pytest.raises(TransferRefusedError, match="owner does not let it give tokens"):
                await keeps.tokens.supply(
                    asks.node_id, WantTokens(kind=kind, digest=Digest(digest))
                )
    assert keeps.counts.totals()["data"][0] == 0


@in_virtual_time
async def test_pieces_wait_for_an_exchange_but_not_for_ever_and_few_are_given_at_once(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    clock = asyncio.get_running_loop().time
    network = MemoryNetwork()
    has = Member("has", network, spec, tmp_path, own=folder)
    asks = Member("asks", network, spec, tmp_path)
    await introduce(has, asks)
    pieces = pieces_of(folder)
    began_at = clock()
    has.is_exchanging = True

    def ends() -> None:
        has.is_exchanging = False

    asyncio.get_running_loop().call_later(9.0, ends)
    assert await piece_for(asks, pieces[0])
    assert 9.0 <= clock() - began_at < 10.0
    began_at, has.is_exchanging = clock(), True
    assert await piece_for(asks, pieces[1])
    assert GIVE_WAY_SECONDS <= clock() - began_at < GIVE_WAY_SECONDS + 1
    began_at = clock()
    await asyncio.gather(*(piece_for(asks, piece) for piece in pieces[: 2 * PIECES_AT_ONCE]))
    assert 2 * GIVE_WAY_SECONDS <= clock() - began_at < 2 * GIVE_WAY_SECONDS + 1


@in_virtual_time
async def test_a_member_that_goes_in_the_middle_is_replaced_by_another(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    network = MemoryNetwork()
    one, other = (Member(name, network, spec, tmp_path, own=folder) for name in ("one", "other"))
    asks = Member("asks", network, spec, tmp_path)
    await introduce(one, other, asks)
    assert await piece_for(asks, pieces_of(folder)[0])
    await one.transport.stop()
    for piece in pieces_of(folder)[1:9]:
        assert await piece_for(asks, piece) == content_of(folder, piece)


@in_virtual_time
async def test_a_member_that_does_not_deliver_is_not_waited_for_where_another_has_the_piece(
    folder: Path, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.exchange.tokens.OVERDUE_SECONDS", 30.0)  # small pieces end after 60
    clock = asyncio.get_running_loop().time
    network = MemoryNetwork()
    hangs, other = (
        Member(name, network, spec, tmp_path, own=folder) for name in ("hangs", "other")
    )
    asks = Member("asks", network, spec, tmp_path)
    await introduce(hangs, other, asks)
    assert await piece_for(asks, pieces_of(folder)[0])
    network.slow_down(hangs.node_id, 0)
    took = []
    for piece in pieces_of(folder)[1:9]:
        began_at = clock()
        assert await piece_for(asks, piece) == content_of(folder, piece)
        took.append(clock() - began_at)
    assert set(map(round, took)) == {0, 30}


# Private data

PRIVATE = DataSection(source="tokens", private=True)


def test_of_private_data_there_is_nothing_to_give_whoever_puts_the_node_together(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    private = spec.model_copy(update={"data": PRIVATE})
    places = DataPlaces(folder=tmp_path, own=str(folder), cache=tmp_path / "cache")
    assert _tokens_of(private, places) is None
    assert _tokens_of(spec, places) is not None  # else the line above says nothing
    # Nor with a digest that somebody put into the run file by another way than ours.
    smuggled = spec.model_copy(update={"data": spec.data.model_copy(update={"private": True})})
    for run in (private, smuggled):
        with pytest.raises(ValueError, match="only tokens that the run file names"):
            TokensHere(run, places)
    text = spec.model_copy(update={"data": DataSection(source="text", paths=("x",))})
    assert _tokens_of(text, places) is None


@in_virtual_time
async def test_a_node_with_private_data_holds_nothing_that_a_member_can_ask_for(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    """Every digest of its own tokens, as everything that can be asked for."""
    private = spec.model_copy(update={"data": PRIVATE})
    places = DataPlaces(folder=tmp_path, own=str(folder), cache=tmp_path / "cache")
    assert open_dataset(private, places).num_samples > 100  # it trains on them
    digests = {bytes.fromhex(piece.digest) for piece in pieces_of(folder)}
    digests.add(read_manifest(folder).digest())
    async with Life(spec=private) as life:
        exchange = life.daemon._exchange
        for kind in (TOKENS_MANIFEST, PIECE_MAP, PIECE):
            for digest in digests:
                want = WantTokens(kind=kind, digest=Digest(digest))
                assert await exchange.supply(NodeId("b"), want) is None


@in_virtual_time
async def test_what_the_runs_manifest_does_not_name_is_never_given_though_it_lies_in_the_folder(
    folder: Path, spec: RunSpec, tmp_path: Path
) -> None:
    """Tokens of another, private run, beside and in the cache: asked for by digest they are not found."""
    (tmp_path / "other").mkdir()
    other = small_shards(tmp_path / "other", piece_bytes=PIECE_BYTES - 12)
    own = copied(folder, tmp_path / "own", files_of(folder))
    for name in files_of(other):
        (own / f"x-{name}").write_bytes((other / name).read_bytes())
    network = MemoryNetwork()
    has = Member("has", network, spec, tmp_path, own=own)
    asks = Member("asks", network, spec, tmp_path)
    await introduce(has, asks)
    ours = {piece.digest for piece in pieces_of(folder)}
    foreign = [piece for piece in pieces_of(other) if piece.digest not in ours]
    assert len(foreign) > 10
    for piece in foreign:
        has.held.cache.put(piece.digest, content_of(other, piece))
        want = WantTokens(kind=PIECE, digest=Digest(bytes.fromhex(piece.digest)))
        with pytest.raises(NotHeldError):
            await asks.transport.fetch(
                has.node_id, want, max_body_bytes=1 << 20, timeout_seconds=60
            )


# Whether peers are asked at all


def test_a_folder_that_is_named_and_not_there_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    places = DataPlaces(folder=tmp_path, own="tokns", cache=tmp_path / "cache")
    with pytest.raises(NoInputError, match="tokns holds no tokens: it is no folder"):
        TokensHere(spec, places)


@pytest.mark.parametrize(
    ("settings", "path", "expected"),
    [
        ({}, "folder", True),
        ({"data": "some-shards"}, "folder", True),
        ({"data": "https://x/tokens"}, "folder", False),
        ({}, "s3://bucket/tokens", False),
        ({"loop": True}, "folder", False),
        ({"hosts": 2}, "folder", False),
    ],
)
def test_peers_supply_the_ranks_of_one_machine_where_no_address_is_named(
    settings: dict[str, object], path: str, expected: bool, spec: RunSpec
) -> None:
    run = spec.model_copy(update={"data": spec.data.model_copy(update={"paths": (path,)})})
    node = NodeSettings.model_validate({"name": "attic", **settings})
    assert _takes_tokens_of_peers(node, run) is expected
