"""Waits on the event loop for a descriptor."""

import asyncio
import socket


async def until_readable(file: int | socket.socket) -> None:
    """The file can be read without waiting, or is at its end."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
