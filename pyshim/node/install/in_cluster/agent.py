"""Installs pyshim on one node of a cluster, verifies, labels and watches it, and removes it when the chart is
uninstalled. `wait_removed` runs before the chart's objects are deleted.

The order matters. A handler gets its label after a test pod has run through it with the present installation. The
start-up taint is removed last. `pyshim install` undoes a failed installation itself; handlers whose test pod still runs
keep their labels. SIGTERM undoes the step under way and leaves the installation in place, because a DaemonSet replaces
its pods at every upgrade. Only the file `remove_when` leads to removal.
"""

import asyncio
import json
import logging
import os
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.node.install.handlers import config_path_of, handler_name
from pyshim.node.install.in_cluster.payload import PYSHIM, NodeHost, install, remove_copies, stage_on
from pyshim.node.install.in_cluster.plan import (
    MESSAGE,
    STATE,
    NodeReport,
    State,
    report_of,
    report_patch,
    untainted_patch,
)
from pyshim.node.kubernetes.api import Api, Conflict

log = logging.getLogger(__name__)

_COMMAND_S = 60.0
_VERIFY_S = 420.0
"""Seconds for `pyshim verify`: containerd may just have been restarted, and the guest has three minutes."""
_CONFLICTS = 5


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two tries."""

    first_retry_s: float = 15.0
    longest_retry_s: float = 1800.0
    """A try may restart containerd twice: for the test pod, and in its undo."""
    check_s: float = 5.0
    """Between two checks for the file `remove_when`."""
    status_s: float = 300.0
    """Between two checks of the installation and the pods that run with it."""
    removal_retry_s: float = 15.0


class NodeAgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    payload: str
    handlers: tuple[str, ...]
    """In the form of `pyshim install --handler`, with files of the agent's pod. The first one has to work; the label of
    each other one depends on its own test pod only."""
    taint: str
    """Key of the start-up taint; empty for none."""
    remove_when: str
    """While this file exists, pyshim is taken off the node."""
    ready_file: str
    """A file that exists while the node has the payload's installation."""
    containerd_config: str
    kind: str
    socket: str
    """Options of `pyshim install`; empty for what it finds itself."""
    sandboxer: str
    snapshotter: str
    """Options of `pyshim install`; empty for its default."""
    python: str


class NodeAgent:
    def __init__(self, config: NodeAgentConfig, *, api: Api, host: NodeHost, pauses: Pauses) -> None:
        self._config = config
        self._api = api
        self._host = host
        self._pauses = pauses

    async def run(self) -> None:
        """Runs until it is cancelled. Once pyshim is off the node it is not installed again."""
        self._set_ready(False)
        retry_s = self._pauses.first_retry_s
        while True:
            try:
                if self._is_to_be_removed():
                    await self._remove()
                    await asyncio.Event().wait()
                await self._install()
                retry_s = self._pauses.first_retry_s
                await self._watch()
            except (ShimError, OSError) as error:
                log.error("try failed", extra={"error": str(error), "retry_s": retry_s})
                if self._is_to_be_removed():
                    await asyncio.sleep(self._pauses.removal_retry_s)
                else:
                    await self._pause(retry_s)
                retry_s = min(2 * retry_s, self._pauses.longest_retry_s)

    # ---- installation

    async def _install(self) -> None:
        """The node has the payload's release, and its Node object says so. Raises ShimError."""
        config = self._config
        former = report_of(await self._api.node(config.node))
        await self._publish(replace(former, state=State.INSTALLING, message=""))
        given = _given(
            containerd_config=config.containerd_config, sandboxer=config.sandboxer, snapshotter=config.snapshotter
        )
        options = (*given, *self._of_runtime())
        try:
            printed = await install(
                self._host, config.payload, python=config.python, handlers=config.handlers, options=options
            )
        except ShimError as error:
            await self._publish_failure(str(error))
            raise
        log.info("installed", extra={"printed": printed.strip()})
        status = await self._status()
        works, problems = await self._verified(status)
        found = NodeReport(
            state=State.READY if handler_name(config.handlers[0]) in works else State.FAILED,
            handlers=works,
            release=status["release"],
            message="; ".join(problems),
            older_pods=_older_pods(status),
        )
        await self._publish(found)
        if found.state is State.FAILED:
            raise FailedPrecondition(found.message)
        await self._untaint()
        self._set_ready(True)
        log.info("ready", extra={"handlers": ",".join(sorted(works)), "problems": found.message})

    async def _publish_failure(self, message: str) -> None:
        """A handler keeps its label as long as the present installation runs a test pod through it."""
        try:
            status = await self._status()
            works, _problems = await self._verified(status)
        except ShimError:
            status, works = {"release": ""}, frozenset()
        await self._publish(
            NodeReport(
                state=State.FAILED,
                handlers=works,
                release=status["release"],
                message=message,
                older_pods=_older_pods(status),
            )
        )

    async def _verified(self, status: dict[str, Any]) -> tuple[frozenset[str], list[str]]:
        """The handlers through which a test pod runs now, and the problems of the others and of RuntimeClasses."""
        works, problems = set(), []
        for handler in status["handlers"]:
            try:
                command = (PYSHIM, "verify", *self._of_runtime(), "--handler", handler)
                await self._host.run(*command, timeout_s=_VERIFY_S)
            except ShimError as error:
                problems.append(f"{handler}: {error}")
                continue
            works.add(handler)
            problems += [f"{handler}: {problem}" for problem in await self._overhead_problems(handler)]
        return frozenset(works), problems

    async def _overhead_problems(self, handler: str) -> list[str]:
        """The verdict of `pyshim check` on the overhead of the RuntimeClass of this name, if it exists."""
        try:
            found = await self._api.runtime_class(handler)
        except NotFound:
            return []
        with stage_on(self._host) as (made, stage):
            _write(f"{made}/class.json", json.dumps(found))
            files = ("--config", config_path_of(handler), "--runtimeclass", f"{stage}/class.json")
            printed = await self._host.run(PYSHIM, "check", "--json", *files, timeout_s=_COMMAND_S, codes=(0, 1))
        verdicts = _decoded(printed).get("verdicts", [])
        return [
            f"{each['text']} (hint: {each['hint']})"
            for each in verdicts
            if each["subject"] == "overhead" and each["level"] != "ok"
        ]

    async def _untaint(self) -> None:
        """The start-up taint is gone. Raises Conflict if other clients keep changing the node's taints."""
        for left in reversed(range(_CONFLICTS if self._config.taint else 0)):
            patch = untainted_patch(await self._api.node(self._config.node), self._config.taint)
            if patch is None:
                return
            try:
                await self._api.patch_node(self._config.node, patch)
                log.info("taint removed", extra={"taint": self._config.taint})
                return
            except Conflict:
                if not left:
                    raise

    # ---- afterwards

    async def _watch(self) -> None:
        """Returns when pyshim is to be removed, or when the last pod of an earlier release has ended."""
        while True:
            await self._pause(self._pauses.status_s)
            if self._is_to_be_removed():
                return
            try:
                if await self._has_last_older_pod_ended():
                    return  # the next installation removes their release
            except Unavailable as error:
                # All nodes lose the API server at the same time; another installation would not help.
                log.warning("check failed", extra={"error": str(error)})

    async def _has_last_older_pod_ended(self) -> bool:
        """The Node object has the result of `pyshim status`."""
        status = await self._status()
        former = report_of(await self._api.node(self._config.node))
        report = replace(former, older_pods=_older_pods(status))
        if bad := [path for path, state in status["files"].items() if state != "ok"]:
            report = replace(report, message=f"not as installed: {', '.join(bad)}")
        await self._publish(report)
        return bool(former.older_pods) and not report.older_pods

    async def _remove(self) -> None:
        """pyshim is removed from the node and from its Node object. Raises ShimError while pods run with it."""
        self._set_ready(False)
        former = report_of(await self._api.node(self._config.node))
        # The labels first, so that no further pods are scheduled here.
        await self._publish(replace(former, state=State.REMOVING, handlers=frozenset()))
        remove_copies(self._host)
        try:
            status = await self._status()
        except NotFound:
            status = {}
        if status:
            if pods := sorted(name for names in status["pods"].values() for name in names):
                message = f"waits for the end of pods {', '.join(pods)}"
                await self._publish(NodeReport(state=State.REMOVING, release=status["release"], message=message))
                raise FailedPrecondition(f"remove pyshim from node '{self._config.node}': {message}")
            try:
                command = (PYSHIM, "uninstall", "--restart", *self._of_runtime())
                log.info("removed", extra={"printed": await self._host.run(*command, timeout_s=_VERIFY_S)})
            except ShimError as error:
                await self._publish(NodeReport(state=State.REMOVING, release=status["release"], message=str(error)))
                raise
        await self._publish(NodeReport())

    # ---- parts

    def _of_runtime(self) -> tuple[str, ...]:
        return _given(kind=self._config.kind, socket=self._config.socket)

    async def _status(self) -> dict[str, Any]:
        """The document of `pyshim status --json`. Raises NotFound where nothing is installed."""
        if not self._host.has(PYSHIM):
            raise NotFound(f"ask for the installation: there is no '{PYSHIM}'")
        return _decoded(await self._host.run(PYSHIM, "status", "--json", timeout_s=_COMMAND_S, codes=(0, 1)))

    async def _publish(self, report: NodeReport) -> None:
        patch = report_patch(await self._api.node(self._config.node), report)
        if patch is not None:
            await self._api.patch_node(self._config.node, patch)

    async def _pause(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until pyshim is to be removed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while True:  # a change of a mounted ConfigMap gives no event
            left_s = end_s - loop.time()
            if left_s <= 0 or self._is_to_be_removed():
                return
            await asyncio.sleep(min(left_s, self._pauses.check_s))

    def _is_to_be_removed(self) -> bool:
        return os.path.exists(self._config.remove_when)

    def _set_ready(self, ready: bool) -> None:
        if ready:
            _write(self._config.ready_file, "")
        else:
            with suppress(FileNotFoundError):
                os.unlink(self._config.ready_file)


def _given(**options: str) -> tuple[str, ...]:
    """The options that are not empty, as words."""
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _older_pods(status: dict[str, Any]) -> tuple[str, ...]:
    current = status["release"]
    pods: dict[str, list[str]] = status.get("pods") or {}
    return tuple(sorted(name for release, names in pods.items() if release != current for name in names))


def _decoded(printed: str) -> dict[str, Any]:
    return from_json(printed, dict[str, Any], damaged("output of pyshim", FailedPrecondition))


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
