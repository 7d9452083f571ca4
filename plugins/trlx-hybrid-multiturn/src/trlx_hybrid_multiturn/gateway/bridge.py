"""The program in a box that carries connections from a port of the box to the socket of a gateway, and runs another.

    python bridge.py SOCKET PORT PROGRAM ARGUMENT…

A box has a network of its own, with nothing in it. It is started by its path, in any Python, and imports nothing else.
"""

import asyncio
import subprocess
import sys

CHUNK = 1 << 16


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes one way until they end."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(socket: str, port: str, *program: str) -> int:
    """Run the program beside the bridge, and return its exit code."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(socket)
        await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

    async with await asyncio.start_server(connected, "127.0.0.1", int(port)):
        process = await asyncio.create_subprocess_exec(*program)
        return await process.wait()


if __name__ == "__main__":
    try:
        code = asyncio.run(main(*sys.argv[1:]))
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    sys.exit(code if code >= 0 else 128 - code)
