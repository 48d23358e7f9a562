"""Calls per second and throughput of pyshim.ttrpc: client and server, a process each, on a unix socket pair.

    python bench/ttrpc_calls.py

Prints medians of several rounds. The figures depend on the machine and on what else it does: compare runs, not places.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyshim.ttrpc import CallContext, Client, Server

ROUNDS = 7


async def echo(payload: bytes, call: CallContext) -> bytes:
    return payload


def serve(sock: socket.socket) -> None:
    """Run the server until the client closes."""
    asyncio.run(Server(services={"bench": {"Echo": echo}}).serve_connection(sock))


async def median_s(work: Callable[[], Awaitable[object]]) -> float:
    """Median duration of `work` over the rounds, after one round that does not count."""
    durations = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        await work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:])


async def measure(sock: socket.socket) -> None:
    client = await Client.connect_socket(sock)
    small = bytes(100)

    async def one_by_one() -> None:
        for _ in range(2000):
            await client.call("bench", "Echo", small, timeout_s=30)

    async def together() -> None:
        for _ in range(20):
            await asyncio.gather(*(client.call("bench", "Echo", small, timeout_s=30) for _ in range(100)))

    print(f"one call at a time    {2000 / await median_s(one_by_one):10.0f} calls/s")
    print(f"100 calls at a time   {2000 / await median_s(together):10.0f} calls/s")
    for size_kib in (64, 1024, 3072):
        payload = bytes(size_kib << 10)
        count = 64 * 1024 // size_kib

        async def large(payload: bytes = payload, count: int = count) -> None:
            for _ in range(count):
                await client.call("bench", "Echo", payload, timeout_s=30)

        duration_s = await median_s(large)
        print(f"echo of {size_kib:5} KiB     {duration_s / count * 1e3:10.2f} ms/call {128 / duration_s:8.0f} MiB/s")
    client.close()


def main() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve(theirs)
        os._exit(0)
    theirs.close()
    asyncio.run(measure(ours))
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
