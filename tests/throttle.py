"""A TCP proxy with a limit of bytes per second for each direction.

    python tests/throttle.py 127.0.0.1 9000 20000000       prints the port that it listens on

It is a separate process, so that it takes no CPU time from the process that is measured.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from s3_server import DIES_WITH_PARENT, Server

CHUNK_BYTES = 1 << 16


@contextmanager
def throttled(server: Server, bytes_per_second: float) -> Iterator[Server]:
    """Give a server a second port, which is slow, for the time of the block."""
    words = [__file__, server.ip, str(server.port), str(bytes_per_second)]
    with subprocess.Popen(
        [*DIES_WITH_PARENT, sys.executable, *words], stdout=subprocess.PIPE, text=True
    ) as proxy:
        try:
            assert proxy.stdout
            yield replace(server, port=int(proxy.stdout.readline()))
        finally:
            proxy.kill()


@dataclass
class Direction:
    """Forwards data in one direction, for all connections."""

    bytes_per_second: float
    free_at: float = 0
    """When the next byte may pass, on the clock of the event loop."""

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        try:
            while data := await reader.read(CHUNK_BYTES):
                self.free_at = max(self.free_at, now()) + len(data) / self.bytes_per_second
                await asyncio.sleep(self.free_at - now())
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one side has closed the connection, so the other side is closed too
        finally:
            writer.close()


async def serve(ip: str, port: int, bytes_per_second: float) -> None:
    """Listen on a free port of the server's address, until the process is killed."""
    there, back = Direction(bytes_per_second), Direction(bytes_per_second)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(ip, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            there.forward(reader, server_writer), back.forward(server_reader, writer)
        )

    listener = await asyncio.start_server(connect, ip, 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
