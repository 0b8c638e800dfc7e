"""What strangers say to the leader's desk before it knows them."""

import asyncio
import json
import ssl
import struct
from pathlib import Path
from typing import Any

import pytest

from node.hosts.leading import HostDesk
from node.hosts.wire import LeaderKey, connect
from node.island.ranks.faults import RankDiedError

PATIENCE_SECONDS = 60.0


def framed(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


SAYINGS = {
    "half a character": framed(json.dumps({"secret": "\ud800"}).encode()),
    "a number": framed(b'{"secret": 7}'),
    "no object": framed(b'["secret"]'),
    "a thousand lists": framed(b"[" * 1024),
    "no text": framed(b"\xff\xfe"),
    "a gigabyte": struct.pack(">I", 1 << 30),
    "nothing": b"",
}


@pytest.mark.parametrize("saying", SAYINGS)
async def test_a_stranger_is_hung_up_on_and_the_desk_says_no_more_than_that(
    saying: str, tmp_path: Path
) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
    key = LeaderKey.of_folder(tmp_path)
    desk = HostDesk(key=key, version="1", device_kind="cpu")
    port = await desk.open("127.0.0.1", 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(SAYINGS[saying])
        if not SAYINGS[saying]:
            writer.close()
        assert await reader.read() == b""
        writer.close()
        wire = await connect(key.token("127.0.0.1", port))  # and it goes on listening
        await wire.send({"version": "1", "device_kind": "cpu", "name": "two"})
        assert await wire.receive() == {"welcome": True}
        (host,) = await desk.hosts(1, within_seconds=PATIENCE_SECONDS)
        assert host.name == "two"
        wire.close()
        with pytest.raises(RankDiedError):
            while True:
                await desk.hosts(1, within_seconds=0.01)
                await asyncio.sleep(0.01)
        await desk.close()
    assert not unhandled
