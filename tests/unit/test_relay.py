"""A relay carries coordinators that dial out, over real TLS on loopback, and nobody else."""

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.relay.doors import Limits, Pace, Places, listening_socket, source_of
from coordinator.relay.line import PORTS_FILE, THROUGH_FILE, Carriage, KeptPorts, RelayKey
from coordinator.relay.server import STRANGERS
from coordinator.relay.through import SPARES, Through
from protocol.errors import (
    AtollError,
    BadDataError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    SystemRefusedError,
)
from protocol.files.durable import FolderLock
from protocol.terminal import cli, console
from tests.relay_scene import AT_HOME, HOST, World, echo, free_port, said, until

BIG = 8 << 20


async def is_closed(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_streams_pass_both_ways_more_of_them_than_connections_wait(world: World) -> None:
    port = free_port()
    async with world.relay() as relay, world.coordinator(port) as through:
        assert through.in_words() == f"through relay 127.0.0.1:{world.port}"
        words = [bytes([number]) * 100_000 for number in range(5 * SPARES)]
        assert await asyncio.gather(*(said(port, word) for word in words)) == words
        assert f"carries run on {port}" in relay.in_words()


async def test_who_reads_slowly_is_sent_slowly(world: World) -> None:
    port, sent = free_port(), 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _piece in range(16 * BIG >> 16):
            writer.write(bytes(1 << 16))
            sent += 1 << 16
            await writer.drain()
        writer.close()

    async with world.relay(), world.coordinator(port, serve=pour):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"x")
        before = -1
        while sent != before:  # it stands still while nobody reads
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 8 * BIG, sent  # the kernel's buffers on the way, and no more
        assert await said(port, b"y") == bytes(1), "other streams go on"
        arrived = 0
        async with asyncio.timeout(30):
            while data := await reader.read(1 << 20):
                arrived += len(data)
        assert arrived == 16 * BIG
        writer.close()


async def test_a_relay_that_starts_again_has_its_coordinators_back_on_their_ports(
    world: World,
) -> None:
    port = free_port()
    async with world.relay() as first, world.coordinator(port) as through:
        assert await said(port) == b"hello"
        await first.stop()
        await until(lambda: "is away" in through.in_words())
        assert await is_closed(port)
        async with world.relay():
            await until(lambda: "is away" not in through.in_words())
            assert await said(port) == b"hello"


async def test_a_coordinator_waits_for_a_relay_that_is_not_there_yet(world: World) -> None:
    port = free_port()
    async with world.coordinator(port) as through:
        assert "no relay answers" in through.in_words()
        async with world.relay():
            await until(lambda: "is away" not in through.in_words())
            assert await said(port) == b"hello"


async def test_nobody_listens_for_a_coordinator_that_is_gone(world: World) -> None:
    port = free_port()
    async with world.relay() as relay:
        async with world.coordinator(port):
            assert not await is_closed(port)
        await until(lambda: "nobody" in relay.in_words())
        assert await is_closed(port)


async def test_a_port_stays_its_coordinators_also_when_the_relay_starts_again(world: World) -> None:
    port, ours = free_port(), world.carriage()
    async with world.relay(), world.coordinator(port, carriage=ours):
        pass
    async with world.relay():
        with pytest.raises(NotPermittedError, match=f"another coordinator has port {port}"):
            async with world.coordinator(port):
                pass
        async with world.coordinator(port, carriage=ours):
            assert await said(port) == b"hello"
    assert list(json.loads((world.folder / PORTS_FILE).read_text())) == [str(port)]


async def test_a_second_process_of_a_folder_waits_until_the_first_is_gone(world: World) -> None:
    port, other_port, ours = free_port(), free_port(), world.carriage()
    async with world.relay():
        async with (
            world.coordinator(port, carriage=ours),
            world.coordinator(other_port, carriage=ours) as second,
        ):
            assert "another coordinator of this folder is here" in second.in_words()
            assert await is_closed(other_port)
        async with world.coordinator(other_port, carriage=ours) as second:
            await until(lambda: "is away" not in second.in_words())
            assert await is_closed(port)


async def test_only_ports_of_the_relays_range_are_had(world: World) -> None:
    world.allowed = range(7700, 7720)
    async with world.relay():
        with pytest.raises(NotPermittedError, match="none of the relay's, which has 7700 to 7719"):
            async with world.coordinator(free_port()):
                pass


async def test_who_has_not_the_lines_secret_is_not_carried(world: World) -> None:
    port, ours = free_port(), world.carriage()
    stranger = replace(ours, line=replace(ours.line, secret=bytes(32)))
    async with world.relay():
        with pytest.raises(NotPermittedError, match="the secret of the relay's line"):
            async with world.coordinator(port, carriage=stranger):
                pass
        assert await is_closed(port)


async def test_a_coordinator_gives_its_secret_to_no_other_than_the_lines_relay(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = replace(world.carriage().line, pin=bytes(32))
    async with world.relay() as relay:
        with pytest.raises(ProtocolMismatchError, match="is not the relay that the line is of"):
            async with world.coordinator(
                free_port(), carriage=replace(world.carriage(), line=asked)
            ):
                pass
        assert "nobody" in relay.in_words()


async def test_what_is_no_relay_is_said_to_be_none(world: World) -> None:
    async def chat(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org\r\n")

    async with await asyncio.start_server(chat, HOST, world.port):
        with pytest.raises(ProtocolMismatchError, match="is no relay"):
            async with world.coordinator(free_port()):
                pass


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[]\n",
        b'{"secret": 1}\n',
        b'{"secret": "' + b"9" * 100_000 + b'"}\n',
        b"x" * 300_000,
    ],
)
async def test_nonsense_ends_its_own_connection_and_nothing_else(
    world: World, first: bytes
) -> None:
    port = free_port()
    async with world.relay(), world.coordinator(port):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(HOST, world.port, ssl=context)
        writer.write(first)
        answer = b""
        with suppress(ConnectionResetError):  # it does not read on
            async with asyncio.timeout(20):
                answer = await reader.read()
        assert answer == b"" or b"refused" in answer
        writer.close()
        assert await said(port) == b"hello"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("owner", "zz"),
        ("owner", 3),
        ("ports", []),
        ("ports", ["7700"]),
        ("ports", [0]),
        ("ports", [7700, 7701, 7702, 7703]),
        ("process", None),
        ("name", "n" * 10_000),
    ],
)
async def test_a_hello_that_cannot_be_right_is_not_answered(
    world: World, key: str, value: object
) -> None:
    port = free_port()
    async with world.relay() as relay:
        through = Through(world.carriage(), name="run", host=AT_HOME, ports={port: port})
        through._hello[key] = value  # type: ignore[assignment]
        await through.start()
        assert "no relay answers" in through.in_words()
        await through.stop()
        assert "nobody" in relay.in_words()


async def test_who_says_nothing_goes_and_has_taken_no_connection(world: World) -> None:
    port = free_port()
    async with world.relay(first_bytes_seconds=0.2, most_per_address=100), world.coordinator(port):
        silent = [await asyncio.open_connection(HOST, port) for _ in range(3 * SPARES)]
        assert await said(port) == b"hello"
        async with asyncio.timeout(20):
            assert [await reader.read() for reader, _ in silent] == [b""] * len(silent)
        for _, writer in silent:
            writer.close()


async def test_a_stream_that_nothing_moves_on_ends(world: World) -> None:
    port = free_port()
    async with world.relay(idle_seconds=0.3), world.coordinator(port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"a")
        async with asyncio.timeout(20):
            assert await reader.read() == b"a"
        writer.close()


async def test_one_address_cannot_take_all_places_and_the_log_says_who_was_refused(
    world: World,
) -> None:
    port = free_port()
    async with world.relay(most_per_address=2) as relay, world.coordinator(port):
        kept = [await asyncio.open_connection(HOST, port) for _ in range(2)]
        for reader, writer in kept:
            writer.write(b"a")
            assert await reader.readexactly(1) == b"a"
        with capture_logs() as logs:
            for _ in range(3):
                reader, writer = await asyncio.open_connection(HOST, port)
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()
        (line,) = (line for line in logs if line["event"] == "connections are refused")
        assert line["why"] == f"{HOST} has 2 connections open" and line["num"] == 1
        assert "--connections-per-address" in line["next_step"]
        kept.pop()[1].close()
        await until(lambda: "1 connections" in relay.in_words())
        assert await said(port) == b"hello"
        kept.pop()[1].close()


async def test_strangers_who_take_all_their_places_keep_no_coordinator_out_that_is_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(STRANGERS, most=3, most_per_address=3)
    monkeypatch.setattr("coordinator.relay.server.STRANGERS", few)
    port = free_port()

    async def silent() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, world.port, local_addr=("127.0.0.9", 0))

    async with world.relay(), world.coordinator(port):
        held = [await silent() for _ in range(3)]
        reader, writer = await silent()
        assert await reader.read() == b"", "there is no place for a fourth"
        words = [bytes([number]) for number in range(5 * SPARES)]
        assert await asyncio.gather(*(said(port, word) for word in words)) == words
        for _, each in (*held, (reader, writer)):
            each.close()


async def test_a_connection_that_has_died_unseen_is_passed_over(world: World) -> None:
    """Its coordinator does not answer when somebody comes by it: the next one is taken."""
    port = free_port()
    async with world.relay():
        through = Through(world.carriage(), name="run", host=AT_HOME, ports={port: port})
        dead = await through._dial()
        dead.writer.transport.pause_reading()  # type: ignore[attr-defined]
        server = await asyncio.start_server(echo, AT_HOME, port)
        await through.start()
        asking = asyncio.ensure_future(said(port))
        await asyncio.sleep(0.3)
        assert not asking.done(), "the first that waits is asked first"
        dead.abort()
        assert await asking == b"hello"
        await through.stop()
        server.close()


async def test_what_a_coordinator_has_no_room_for_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.relay.through.MOST_CARRIED", 0)
    port = free_port()
    async with world.relay(wait_seconds=0.5), world.coordinator(port):
        assert await said(port) == b""


def test_places_are_counted_by_address_and_by_time() -> None:
    places = Places(
        Limits(most=5, most_per_address=3, burst_per_address=4, per_second_per_address=0.5)
    )
    assert [places.enter("a", 0.0) for _ in range(3)] == [""] * 3
    assert "3 connections open" in places.enter("a", 0.0)
    places.leave("a")
    assert places.enter("a", 0.0) == ""
    places.leave("a")
    assert "more often than 0.5" in places.enter("a", 1.0)
    assert places.enter("a", 2.0) == ""
    assert [places.enter(other, 2.0) for other in "bc"] == [""] * 2
    assert "5 connections are open" in places.enter("d", 2.0)
    assert (places.num_open, places.num_refused) == (5, 3)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("?", "?"),
    ],
)
def test_a_network_of_ipv6_is_one_address(address: str, source: str) -> None:
    assert source_of(address) == source


def test_bytes_wait_for_their_turn_at_the_rate_that_the_owner_set() -> None:
    pace = Pace(1000.0)
    assert pace.wait_seconds(100, 10.0) == pytest.approx(0.0)
    assert [pace.wait_seconds(500, 10.0) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert pace.wait_seconds(100, 60.0) == pytest.approx(0.0), "what was not used is not saved up"
    assert Pace(None).wait_seconds(BIG, 0.0) == 0.0


def test_a_line_says_where_and_whom(world: World) -> None:
    line = world.key.line("relay.example.org", 7720)
    read = Carriage.new(f"  {line.encode().upper()} \n").line
    assert (read, read.endpoint) == (line, "relay.example.org:7720")
    assert RelayKey.of_folder(world.folder) == world.key


def test_a_folder_keeps_its_relay_and_its_own_secret(world: World, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert Carriage.chosen(home, None) is None
    text = world.key.line("relay.example.org", 7720).encode()
    (tmp_path / "relay.line").write_text(text + "\n")
    first = Carriage.chosen(home, str(tmp_path / "relay.line"))
    assert first is not None and Carriage.chosen(home, None) == first
    assert (home / THROUGH_FILE).stat().st_mode & 0o777 == 0o600
    moved = Carriage.chosen(home, world.key.line("other.example.org", 7720).encode())
    assert moved is not None and (moved.owner, moved.line.host) == (
        first.owner,
        "other.example.org",
    )
    assert Carriage.chosen(home, "none") is None and Carriage.chosen(home, None) is None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda text: text[:-5], BadDataError, "the relay line is truncated"),
        (lambda text: text[:-1] + ("a" if text[-1] != "a" else "b"), BadDataError, "is wrong"),
        (
            lambda text: text.replace("relay1", "relay2"),
            BadDataError,
            "another version of Atoll: atoll-relay2",
        ),
        (lambda text: text[:-1] + "!", BadDataError, "'!' occurs in none"),
        (lambda text: "relay.example.org:7720", NoInputError, "neither a relay line nor a file"),
    ],
)
def test_a_wrong_line_is_refused_in_a_sentence(
    world: World, change: Callable[[str], str], error: type[AtollError], words: str
) -> None:
    text = world.key.line("relay.example.org", 7720).encode()
    with pytest.raises(error, match=words):
        Carriage.new(change(text))


def test_damaged_files_are_named(world: World, tmp_path: Path) -> None:
    (tmp_path / THROUGH_FILE).write_text("{}")
    (tmp_path / THROUGH_FILE).chmod(0o600)
    with pytest.raises(BadDataError, match=THROUGH_FILE):
        Carriage.of_folder(tmp_path)
    (world.folder / PORTS_FILE).write_text("[7700]")
    with pytest.raises(BadDataError, match=PORTS_FILE):
        KeptPorts(world.folder / PORTS_FILE)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--ports", "7719-7700"), 64, "'7719-7700' are no ports"),
        (("--ports", "ssh"), 64, "'ssh' are no ports"),
        (("--max-rate", "fast"), 64, "'fast' is no rate"),
        (("--max-connections", "0"), 64, "0 is not in the range"),
        (("--advertise", "http://relay", "--port", "0"), 64, "'http://relay' is not a host"),
    ],
)
def test_a_relay_that_cannot_be_started_says_so_in_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    assert console.run(cli.root, ["relay", "start", str(tmp_path / "relay"), *arguments]) == code
    told = capsys.readouterr().err
    assert words in told and "next:" in told


def test_an_address_or_port_that_cannot_be_listened_on_is_named() -> None:
    with pytest.raises(SystemRefusedError, match=r"192\.0\.2\.1 is not an address of this machine"):
        listening_socket("192.0.2.1", 7720)
    with (
        listening_socket("0.0.0.0", 0) as taken,
        pytest.raises(SystemRefusedError, match="is in use"),
    ):
        listening_socket("0.0.0.0", taken.getsockname()[1])


def test_two_relays_cannot_have_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = FolderLock.take(tmp_path, holder="relay", next_step="")
    assert console.run(cli.root, ["relay", "start", str(tmp_path)]) == 71
    assert "another relay" in capsys.readouterr().err
    held.release()


def test_a_coordinator_is_not_started_by_a_wrong_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "run"
    assert console.run(cli.root, ["init", str(home), "--host", HOST]) == 0
    start = ["coordinator", "start", str(home), "--through"]
    assert console.run(cli.root, [*start, "relay.example.org"]) == 66
    assert console.run(cli.root, [*start, "atoll-relay1-aaaa"]) == 65
    told = capsys.readouterr().err
    assert (
        "neither a relay line nor a file with one" in told
        and "a character of the relay line" in told
    )
    assert not (home / THROUGH_FILE).exists()


def test_the_relays_service_starts_it_as_it_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--", "--advertise", "relay.example.org"]
    service = ["relay", "install-service", str(tmp_path), "--print", *options]
    assert console.run(cli.root, service) == 0
    unit = capsys.readouterr().out
    assert f"relay start --advertise relay.example.org {tmp_path}" in unit
    assert console.run(cli.root, ["relay", "install-service", str(tmp_path / "none")]) == 64
