"""An HTTP proxy as a process: tunnels by CONNECT to the allowed port alone, and a line for each request.

python connect_proxy.py HOST PORT ALLOWED_PORT [USER:PASSWORD]
"""

import asyncio
import base64
import sys

CHUNK_BYTES = 1 << 16


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.close()


async def serve(host: str, port: int, allowed: int, login: str) -> None:
    wanted = f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, to, _ = head[0].split(" ")
            shown = [line.partition(": ")[2] for line in head if line.startswith("Proxy-Auth")]
            name, _, number = to.rpartition(":")
            verdict = "200 Connection established"
            if wanted and shown != [wanted]:
                verdict = "407 Proxy Authentication Required"
            elif method != "CONNECT" or int(number) != allowed:
                verdict = "403 Forbidden"
            say(f"{method} {to}: {verdict}")
            if verdict.startswith("200"):
                back, there = await asyncio.open_connection(name.strip("[]"), int(number))
            writer.write(f"HTTP/1.1 {verdict}\r\n\r\n".encode())
            if there is not None:
                await asyncio.gather(carry(reader, there), carry(back, writer))
        except (OSError, EOFError, ValueError, asyncio.IncompleteReadError) as error:
            say(f"broken: {error!r}")
        finally:
            for each in (writer, there):
                if each is not None:
                    each.close()

    server = await asyncio.start_server(tunnel, host, port, limit=CHUNK_BYTES)
    say(f"proxy ready: {server.sockets[0].getsockname()[1]}")
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5] or [""]))
