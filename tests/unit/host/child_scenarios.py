"""Helpers of the tests of children."""

from typing import Any

from pyshim.host.processes.children import Child, Children

ENV = {"PATH": "/usr/bin:/bin"}


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


async def finished(children: Children, script: str, **options: Any) -> Child:
    child = await children.spawn(shell(script), env=ENV, **options)
    await child.wait()
    return child
