"""A client of the API server for the node's programs: Nodes, RuntimeClasses, ResourceSlices and claims."""

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp

from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError, Unavailable

_REQUEST_S = 30.0
_MERGE = "application/merge-patch+json"
_RESOURCE = "/apis/resource.k8s.io/v1"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The directory of the service account's token and the API server's authority, which the kubelet writes."""


class Conflict(Unavailable):
    """Another client has changed the object meanwhile: read it and try again."""


class Access(NamedTuple):
    """The API server's address and credentials. `token` and `authority` are files; the kubelet renews the token."""

    server: str
    token: str
    authority: str


def in_cluster(environment: Mapping[str, str]) -> Access:
    """The access of this pod. Raises FailedPrecondition outside a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise FailedPrecondition(
            "find the API server: KUBERNETES_SERVICE_HOST is not set (hint: this verb runs in a pod)"
        )
    name = f"[{host}]" if ":" in host else host
    return Access(server=f"https://{name}:{port}", token=f"{_ACCOUNT}/token", authority=f"{_ACCOUNT}/ca.crt")


class Api:
    """Calls raise Unavailable if another try may succeed, else another ShimError."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Api":
        try:
            tls = ssl.create_default_context(cafile=self._access.authority)
        except OSError as error:
            raise FailedPrecondition(
                f"read the API server's authority '{self._access.authority}': {error.strerror or error}"
            ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls), timeout=aiohttp.ClientTimeout(total=_REQUEST_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def node(self, name: str) -> dict[str, Any]:
        return await self._call("GET", f"/api/v1/nodes/{name}")

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Conflict if the patch names a version of the object that is not the present one."""
        return await self._call("PATCH", f"/api/v1/nodes/{name}", patch)

    async def runtime_class(self, name: str) -> dict[str, Any]:
        return await self._call("GET", f"/apis/node.k8s.io/v1/runtimeclasses/{name}")

    async def nodes_with(self, label: str) -> list[dict[str, Any]]:
        """All nodes with the label, whatever its value."""
        return await self._listed(f"/api/v1/nodes?labelSelector={label}")

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """The ResourceClaim of this name."""
        return await self._call("GET", f"{_RESOURCE}/namespaces/{namespace}/resourceclaims/{name}")

    async def slices_of(self, driver: str) -> list[dict[str, Any]]:
        """All ResourceSlices of a driver."""
        return await self._listed(f"{_RESOURCE}/resourceslices?fieldSelector=spec.driver%3D{driver}")

    async def create_slice(self, resource_slice: Mapping[str, Any]) -> dict[str, Any]:
        """The object as the API server has stored it. Raises Conflict if the name is taken."""
        return await self._call("POST", f"{_RESOURCE}/resourceslices", resource_slice)

    async def delete_slice(self, name: str) -> None:
        """Raises NotFound."""
        await self._call("DELETE", f"{_RESOURCE}/resourceslices/{name}")

    async def _listed(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more = ""
        while True:
            page = await self._call("GET", f"{path}&limit=200&continue={more}")
            found += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return found

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert self._session is not None, "used within its context"
        what = f"{method} {path.partition('?')[0]}"
        try:
            headers = {"Authorization": f"Bearer {_text(self._access.token)}"}
        except (OSError, ValueError) as error:
            raise Unavailable(f"{what}: token '{self._access.token}': {error}") from error
        if body is not None:
            headers["Content-Type"] = _MERGE if method == "PATCH" else "application/json"
        try:
            async with self._session.request(
                method, self._access.server.rstrip("/") + path, json=body, headers=headers, allow_redirects=False
            ) as reply:
                answer = await reply.json(content_type=None)
                status = reply.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{what}: {str(error) or type(error).__name__}") from error
        if not isinstance(answer, dict):
            raise Unavailable(f"{what}: status {status}, and the answer is not an object")
        if status >= 400:
            raise _refusal(status)(f"{what}: {answer.get('reason') or status}: {answer.get('message') or ''}")
        return answer


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _refusal(status: int) -> type[ShimError]:
    if status == 409:
        return Conflict
    if status in (401, 408, 429) or status >= 500:
        return Unavailable
    return {403: FailedPrecondition, 404: NotFound}.get(status, InvalidArgument)
