"""The paths of the monitor socket, which are Kata's, and the answer of each.

`kata-runtime` and CSI drivers rely on these formats: `direct-volume stats` gives the agent's answer as JSON, `resize`
takes {"VolumePath", "Size"}, `iptables` and `ip6tables` take and give the text of iptables-restore and iptables-save,
`policy` takes the text of a policy.
"""

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import msgspec

from pyshim.host.threads import in_thread
from pyshim.model.decoding import from_json
from pyshim.model.errors import InvalidArgument, NotFound, ShimError
from pyshim.model.observation import FRESH_S, AgentCalls, Durations, Health
from pyshim.model.seams import MonitorRpc
from pyshim.model.volumes import VolumeStats
from pyshim.monitor.exposition import CONTENT_TYPE, GUEST_PREFIXES, filtered_text, text_of
from pyshim.monitor.shim_metrics import guest_family, shim_families
from pyshim.monitor.socket import HttpReply, HttpRequest

log = logging.getLogger(__name__)

QUESTIONS = ("/metrics", "/agent-url", "/pod")
"""The paths of the socket in METRICS_DIRECTORY."""
CHECK_S = 1.0
"""Seconds for the agent's answer to a health check."""
Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


class ShimAnswers:
    """The answers of one pod's monitor socket."""

    def __init__(
        self,
        pod: MonitorRpc,
        *,
        calls: Durations,
        agent_calls: AgentCalls,
        debug: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        """`calls` are containerd's to the shim, `agent_calls` the shim's to the agent; `debug` are texts about the shim
        itself, by their path below /debug/."""
        self._pod = pod
        self._calls = calls
        self._agent_calls = agent_calls
        self._paths: Mapping[str, Mapping[str, Handler]] = {
            "/metrics": {"GET": self._metrics},
            "/agent-url": {"GET": self._agent_url},
            "/pod": {"GET": self._pod_name},
            "/health": {"GET": self._health},
            "/direct-volume/stats": {"GET": self._volume_stats},
            "/direct-volume/resize": {"POST": self._resize_volume},
            "/iptables": {"GET": self._iptables, "PUT": self._set_iptables},
            "/ip6tables": {"GET": self._iptables, "PUT": self._set_iptables},
            "/policy": {"PUT": self._set_policy},
            **{f"/debug/{name}": {"GET": _text(text)} for name, text in debug.items()},
        }

    async def answer_question(self, request: HttpRequest) -> HttpReply:
        """`answer` for QUESTIONS only, which change nothing and show only figures and names."""
        if urlsplit(request.target).path not in QUESTIONS:
            return HttpReply(HTTPStatus.NOT_FOUND, b"no such path")
        return await self.answer(request)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to any request; an error has its status and its text."""
        path = urlsplit(request.target).path
        methods = self._paths.get(path)
        if methods is None:
            hint = b" (hint: enable_pprof in [runtime])" if path.startswith("/debug/") else b""
            return HttpReply(HTTPStatus.NOT_FOUND, b"no such path" + hint)
        handler = methods.get(request.method)
        if handler is None:
            allow = ", ".join(methods)
            return HttpReply(HTTPStatus.METHOD_NOT_ALLOWED, f"want {allow}".encode(), allow=allow)
        try:
            return await handler(request)
        except ShimError as error:
            log.info("monitor request failed", extra={"path": path, "error": str(error)})
            return HttpReply(_status(error), str(error).encode())
        except Exception as error:  # a failed answer must not end the connection's task
            log.error("monitor request failed unexpectedly", extra={"path": path}, exc_info=error)
            return HttpReply(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__.encode())

    async def _metrics(self, _: HttpRequest) -> HttpReply:
        """Metrics of shim and guest; a comment says if the guest did not answer, or which lines are malformed."""
        try:
            # In a thread: the largest text that a guest may send takes some 50 ms.
            guest, problem = await in_thread(filtered_text, await self._pod.agent.metrics(), GUEST_PREFIXES)
        except ShimError as error:
            guest, problem = "", str(error)
        families = shim_families(
            calls=self._calls.all(), agent_calls=self._agent_calls, pod=self._pod.observe(), pid=os.getpid()
        )
        text = text_of([*families, guest_family(not problem)])
        if problem:
            text += f"# pyshim: {' '.join(problem.split())}\n"
        return HttpReply(HTTPStatus.OK, (text + guest).encode(errors="replace"), CONTENT_TYPE)

    async def _agent_url(self, _: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK, self._pod.agent_url().encode())

    async def _pod_name(self, _: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK, msgspec.json.encode(self._pod.name()), "application/json")

    async def _health(self, _: HttpRequest) -> HttpReply:
        """Calls the agent only if its last answer is old, so that frequent requests do not wake idle guests."""
        age_s, problem = self._agent_calls.age_s(), ""
        if age_s is None or age_s > FRESH_S:
            try:
                await self._pod.agent.check(CHECK_S)
            except ShimError as error:
                problem = str(error)
        health = Health(agent_age_s=self._agent_calls.age_s(), problem=problem)
        return HttpReply(HTTPStatus.OK, msgspec.json.encode(health), "application/json")

    async def _volume_stats(self, request: HttpRequest) -> HttpReply:
        paths = parse_qs(urlsplit(request.target).query).get("path", [])
        if len(paths) != 1:
            raise InvalidArgument("read monitor request: parameter 'path' is missing")
        return HttpReply(HTTPStatus.OK, stats_json(await self._pod.volume_stats(paths[0])), "application/json")

    async def _resize_volume(self, request: HttpRequest) -> HttpReply:
        wanted = resize_request(request.body)
        await self._pod.resize_volume(wanted.volume_path, wanted.size)
        return HttpReply(HTTPStatus.OK)

    async def _iptables(self, request: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK, await self._pod.agent.iptables(ipv6=_is_ipv6(request)))

    async def _set_iptables(self, request: HttpRequest) -> HttpReply:
        await self._pod.agent.set_iptables(request.body, ipv6=_is_ipv6(request))
        return HttpReply(HTTPStatus.OK)

    async def _set_policy(self, request: HttpRequest) -> HttpReply:
        try:
            policy = request.body.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"read monitor request: the policy is not UTF-8: {error}") from error
        await self._pod.agent.set_policy(policy)
        return HttpReply(HTTPStatus.OK)


def _text(text: Callable[[], str]) -> Handler:
    async def handler(_: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK, text().encode(errors="replace"))

    return handler


def _is_ipv6(request: HttpRequest) -> bool:
    return urlsplit(request.target).path == "/ip6tables"


class Resize(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    volume_path: str
    size: int


def resize_request(body: bytes) -> Resize:
    """Raises InvalidArgument naming what is wrong."""
    return from_json(body, Resize, lambda problem: InvalidArgument(f"read monitor request: {problem}"))


def stats_json(stats: VolumeStats) -> bytes:
    """The agent's VolumeStatsResponse as Go prints it: members of value zero are left out."""
    usages = [
        {"available": item.available, "total": item.total, "used": item.used, "unit": item.unit}
        for item in stats.usages
    ]
    condition = {"abnormal": stats.abnormal, "message": stats.message}
    raw = {
        "usage": [{key: value for key, value in usage.items() if value} for usage in usages],
        "volume_condition": {key: value for key, value in condition.items() if value},
    }
    return json.dumps(raw, separators=(",", ":")).encode()


def _status(error: ShimError) -> HTTPStatus:
    if isinstance(error, NotFound):
        return HTTPStatus.NOT_FOUND
    return HTTPStatus.BAD_REQUEST if isinstance(error, InvalidArgument) else HTTPStatus.INTERNAL_SERVER_ERROR
