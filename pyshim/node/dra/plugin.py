"""The driver's service for the kubelet: it registers there, and prepares and unprepares claims when the kubelet asks.

Source: Kubernetes, k8s.io/kubelet/pkg/apis/pluginregistration and dra/v1. The kubelet finds the registration's socket
in its registry, asks for the plugin's own socket, and calls there, again after each of its restarts.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc

from protos.kubelet import dra_v1_pb2 as pb
from protos.kubelet import pluginregistration_v1_pb2 as registration_pb
from protos.kubelet.dra_v1_pb2_grpc import DRAPluginServicer, add_DRAPluginServicer_to_server
from protos.kubelet.pluginregistration_v1_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.node.dra.claims import Claims, Prepared, allocated
from pyshim.node.dra.slices import DRIVER
from pyshim.node.kubernetes.api import Api

log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Seconds for calls under way when the plugin ends."""


class Registration(RegistrationServicer):
    def __init__(self, endpoint: Path) -> None:
        self._endpoint = endpoint

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return registration_pb.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._endpoint), supported_versions=["v1.DRAPlugin"]
        )

    async def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:
        if request.plugin_registered:
            log.info("registered at the kubelet")
        else:
            log.error("kubelet refuses the driver", extra={"error": request.error})
        return registration_pb.RegistrationStatusResponse()


class DraPlugin(DRAPluginServicer):
    def __init__(self, api: Api, claims: Claims) -> None:
        self._api = api
        self._claims = claims

    async def NodePrepareResources(self, request: Any, context: Any) -> Any:
        answer = pb.NodePrepareResourcesResponse()
        for claim in request.claims:
            try:
                devices = await self._prepare(claim)
            except ShimError as error:
                log.warning("claim not prepared", extra={"claim": claim.uid, "error": str(error)})
                answer.claims[claim.uid].error = str(error)
            else:
                answer.claims[claim.uid].devices.extend(_devices(devices))
        return answer

    async def _prepare(self, claim: Any) -> tuple[Prepared, ...]:
        devices = self._claims.recorded(claim.uid)
        if not devices:
            devices = allocated(await self._api.claim(claim.namespace, claim.name), claim.uid)
        self._claims.prepare(claim.uid, claim.name, devices)
        return devices

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:
        answer = pb.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].error = ""
            try:
                self._claims.unprepare(claim.uid)
            except ShimError as error:
                log.warning("claim not removed", extra={"claim": claim.uid, "error": str(error)})
                answer.claims[claim.uid].error = str(error)
        return answer


def _devices(prepared: Iterable[Prepared]) -> list[Any]:
    return [
        pb.Device(request_names=each.requests, pool_name=each.pool, device_name=each.device, cdi_device_ids=[each.cdi])
        for each in prepared
    ]


@contextlib.asynccontextmanager
async def registered(plugin: DraPlugin, kubelet_root: Path) -> AsyncIterator[None]:
    """The kubelet finds the plugin within the block.

    Raises OSError for a directory that cannot be made, FailedPrecondition for a socket.
    """
    own = kubelet_root / "plugins" / DRIVER
    registry = kubelet_root / "plugins_registry"
    for directory in (own, registry):
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    endpoint, found = own / "dra.sock", registry / f"{DRIVER}-reg.sock"
    server, announcer = grpc.aio.server(), grpc.aio.server()
    add_DRAPluginServicer_to_server(plugin, server)
    add_RegistrationServicer_to_server(Registration(endpoint), announcer)
    async with contextlib.AsyncExitStack() as end:
        for each, path in ((server, endpoint), (announcer, found)):  # the endpoint first: the kubelet calls at once
            path.unlink(missing_ok=True)
            try:
                each.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:  # the path is too long, or the directory is read-only
                raise FailedPrecondition(f"serve '{path}': {error}") from error
            await each.start()
            end.callback(path.unlink, missing_ok=True)
            end.push_async_callback(each.stop, _GRACE_S)
        yield
