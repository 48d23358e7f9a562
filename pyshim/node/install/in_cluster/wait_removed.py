"""Waits until the agents of all nodes have removed pyshim, before the chart's objects are deleted."""

import asyncio
import logging
from typing import Any

from pyshim.model.errors import DeadlineExceeded
from pyshim.node.install.in_cluster.plan import MESSAGE, STATE
from pyshim.node.kubernetes.api import Api

log = logging.getLogger(__name__)


async def wait_removed(api: Api, *, timeout_s: float, check_s: float = 5.0) -> None:
    """No node has pyshim any more. Raises DeadlineExceeded naming those that still have it, and what they wait for."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    before: list[str] | None = None
    while True:
        left = [_described(node) for node in await api.nodes_with(STATE)]
        if not left:
            return
        if left != before:
            log.info("waiting", extra={"nodes": len(left), "first": "; ".join(left[:10])})
            before = left
        if loop.time() > end_s:
            raise DeadlineExceeded(f"remove pyshim: {len(left)} nodes have it still: {'; '.join(left[:10])}")
        await asyncio.sleep(check_s)


def _described(node: dict[str, Any]) -> str:
    metadata = node.get("metadata") or {}
    message = (metadata.get("annotations") or {}).get(MESSAGE, "")
    return f"{metadata.get('name')} ({metadata.get('labels', {}).get(STATE)}{': ' * bool(message)}{message})"
