"""A Kubernetes API server over TLS, as far as programs of a node ask: nodes, runtime classes, offers and claims."""

from __future__ import annotations

import copy
import datetime
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web

from pyshim.node.kubernetes.api import Access
from tests.fakes.self_signed import self_signed

TOKEN = "of-the-service-account"


class FakeApiServer:
    """`patches` are those that were taken, in order. `faults` are statuses for the next calls."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.classes: dict[str, dict[str, Any]] = {}
        self.slices: dict[str, dict[str, Any]] = {}
        self.claims: dict[str, dict[str, Any]] = {}
        """By `namespace/name`."""
        self.dropped_fields: tuple[str, ...] = ()
        """Of a slice's spec, as a server without a feature's gate does."""
        self.before_create: Callable[[], None] = lambda: None
        """Somebody else who is quicker."""
        self.patches: list[dict[str, Any]] = []
        self.faults: list[int] = []
        self.before_patch: Callable[[dict[str, Any]], None] = lambda _patch: None
        """Somebody else who is quicker; given the patch that has just arrived."""

    def add_node(
        self, name: str, *, taints: Sequence[dict[str, str]] = (), labels: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        node = {
            "metadata": {"name": name, "resourceVersion": "1", "labels": {"kubernetes.io/hostname": name, **labels}},
            "spec": {"taints": list(taints)} if taints else {},
        }
        self.nodes[name] = node
        return node

    def touch(self, name: str) -> None:
        """The object has changed."""
        metadata = self.nodes[name]["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)

    @asynccontextmanager
    async def serving(self, directory: Path) -> AsyncIterator[Access]:
        pair = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
        for name, content in (("ca.crt", pair.authority), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
            (directory / name).write_bytes(content)
        (directory / "token").write_text(TOKEN)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        app = web.Application()
        app.router.add_route("GET", "/api/v1/nodes", self._list)
        app.router.add_route("GET", "/api/v1/nodes/{name}", self._get)
        app.router.add_route("PATCH", "/api/v1/nodes/{name}", self._patch)
        app.router.add_route("GET", "/apis/node.k8s.io/v1/runtimeclasses/{name}", self._class)
        resource = "/apis/resource.k8s.io/v1"
        app.router.add_route("GET", f"{resource}/resourceslices", self._list_slices)
        app.router.add_route("POST", f"{resource}/resourceslices", self._create_slice)
        app.router.add_route("DELETE", f"{resource}/resourceslices/{{name}}", self._delete_slice)
        app.router.add_route("GET", f"{resource}/namespaces/{{namespace}}/resourceclaims/{{name}}", self._claim)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        try:
            port = runner.addresses[0][1]
            yield Access(
                server=f"https://127.0.0.1:{port}", token=str(directory / "token"), authority=str(directory / "ca.crt")
            )
        finally:
            await runner.cleanup()

    def _refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        return _status(self.faults.pop(0), "Fault") if self.faults else None

    async def _list(self, request: web.Request) -> web.Response:
        label = request.query["labelSelector"]
        found = [node for node in self.nodes.values() if label in node["metadata"]["labels"]]
        return self._refused(request) or web.json_response({"kind": "NodeList", "items": found})

    async def _get(self, request: web.Request) -> web.Response:
        return self._refused(request) or _found(self.nodes, request.match_info["name"])

    async def _class(self, request: web.Request) -> web.Response:
        return self._refused(request) or _found(self.classes, request.match_info["name"])

    async def _patch(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        assert request.content_type == "application/merge-patch+json"
        name = request.match_info["name"]
        patch = await request.json()
        self.before_patch(patch)
        if name not in self.nodes:
            return _status(404, "NotFound")
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != self.nodes[name]["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        self.patches.append(copy.deepcopy(patch))
        self.nodes[name] = _merged(self.nodes[name], patch)
        self.touch(name)
        return web.json_response(self.nodes[name])

    async def _list_slices(self, request: web.Request) -> web.Response:
        driver = request.query["fieldSelector"].removeprefix("spec.driver=")
        found = [each for each in self.slices.values() if each["spec"]["driver"] == driver]
        return self._refused(request) or web.json_response({"kind": "ResourceSliceList", "items": found})

    async def _create_slice(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        assert request.content_type == "application/json"
        created = await request.json()
        self.before_create()
        name = created["metadata"]["name"]
        if name in self.slices:
            return _status(409, "AlreadyExists")
        for field in self.dropped_fields:
            created["spec"].pop(field, None)
        self.slices[name] = created
        return web.json_response(created, status=201)

    async def _delete_slice(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        answer = _found(self.slices, request.match_info["name"])
        self.slices.pop(request.match_info["name"], None)
        return answer

    async def _claim(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['namespace']}/{request.match_info['name']}"
        return self._refused(request) or _found(self.claims, name)


def _found(objects: dict[str, dict[str, Any]], name: str) -> web.Response:
    return web.json_response(objects[name]) if name in objects else _status(404, "NotFound")


def _status(code: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": reason, "message": "as told", "code": code}, status=code)


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, each in patch.items():
        if each is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), each)
    return merged
