"""Client of the remote hypervisor service, with one connection for each call, like Kata's runtime.

When the deadline of a call passes or its connection closes, a service stops the call, and some services then forget the
VM that they were making. So the client waits for CreateVM and StartVM beyond their deadline, and sends StopVM without
one. Source: Kata's hypervisor.proto, and the cloud adaptor's answers.
"""

import asyncio
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protos import hypervisor_pb2 as pb
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal, NotFound, ShimError, Unavailable
from pyshim.model.remote_vms import MAX_REPLY_BYTES, SERVICE, is_unknown_vm, shown
from pyshim.ttrpc import (
    CallTimedOut,
    Client,
    ConnectionClosed,
    OutcomeUnknown,
    RemoteError,
    TtrpcError,
    connected_unix_socket,
)

Reply = TypeVar("Reply", bound=Message)

CONNECT_TIMEOUT_S = 10.0
VERSION_TIMEOUT_S = 10.0
OUR_VERSION = "0.0.0"
"""The only version of the protocol so far. Cloud adaptors answer with it, too."""


class ServiceUnreachable(Unavailable):
    """The service did not get the call, and so did not carry it out."""


class ReplyLost(Unavailable):
    """The connection ended between request and reply. Whether the call was carried out is unknown."""


class ServiceRefused(FailedPrecondition):
    """The service answered with a status other than OK."""

    def __init__(self, text: str, reply: RemoteError) -> None:
        super().__init__(text)
        self.status = reply.code
        self.message = reply.message


class RemoteService:
    """The service that listens at `socket_path`. Methods raise ShimError with the VM's id and the service's text."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path

    async def version(self) -> str:
        """The version that the service reports."""
        reply = await self._call(
            f"ask version of '{self._path}'",
            "Version",
            pb.VersionRequest(version=OUR_VERSION),
            pb.VersionResponse,
            VERSION_TIMEOUT_S,
        )
        return shown(reply.version)

    async def create_vm(
        self, vm_id: str, annotations: dict[str, str], netns_path: str, timeout_s: float, late_s: float
    ) -> str:
        """The path, unchecked, of the socket at which the VM's agent will answer.

        The request has the deadline `timeout_s`; an answer is accepted up to `late_s` after that.
        """
        request = pb.CreateVMRequest(id=vm_id, annotations=annotations, networkNamespacePath=netns_path)
        action = f"create remote vm {vm_id!r}"
        reply = await self._call(action, "CreateVM", request, pb.CreateVMResponse, timeout_s, late_s)
        return reply.agentSocketPath

    async def start_vm(self, vm_id: str, timeout_s: float, late_s: float) -> None:
        """The VM runs, and its agent can be reached. Times as for `create_vm`."""
        request = pb.StartVMRequest(id=vm_id)
        await self._call(f"start remote vm {vm_id!r}", "StartVM", request, pb.StartVMResponse, timeout_s, late_s)

    async def stop_vm(self, vm_id: str, timeout_s: float) -> None:
        """The service has answered OK. Raises NotFound when it has no such VM. The request has no deadline.

        A cloud adaptor answers OK even when the cloud refused to delete the instance.
        """
        action = f"stop remote vm {vm_id!r}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(action, "StopVM", pb.StopVMRequest(id=vm_id), pb.StopVMResponse, None)
        except ServiceRefused as exc:
            if is_unknown_vm(vm_id, exc.status, exc.message):
                raise NotFound(str(exc)) from exc
            raise
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{action}: '{self._path}' has not answered within {timeout_s:g} s") from exc

    async def _call(
        self,
        action: str,
        method: str,
        request: Message,
        reply_type: type[Reply],
        timeout_s: float | None,
        late_s: float = 0.0,
    ) -> Reply:
        client = await self._connect(action)
        try:
            payload = await client.call(
                SERVICE,
                method,
                request.SerializeToString(),
                timeout_s=timeout_s,
                late_s=late_s,
                max_reply_bytes=MAX_REPLY_BYTES,
            )
        except TtrpcError as exc:
            raise self._error(action, exc, timeout_s) from exc
        finally:
            client.close()
            await client.closed()
        try:
            reply = reply_type()
            reply.ParseFromString(payload)
        except DecodeError as exc:
            raise Internal(f"{action}: the answer of '{self._path}' is not a {reply_type.__name__}") from exc
        return reply

    async def _connect(self, action: str) -> Client:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                sock = await connected_unix_socket(self._path)
        except (OSError, ValueError) as exc:  # TimeoutError is an OSError; a path too long or with NUL a ValueError
            cause = getattr(exc, "strerror", None) or str(exc) or "no answer"
            raise ServiceUnreachable(
                f"{action}: connect remote hypervisor '{self._path}': {cause} "
                "(hint: does the service of remote_hypervisor_socket run on this node?)"
            ) from exc
        return Client(sock)

    def _error(self, action: str, exc: TtrpcError, timeout_s: float | None) -> ShimError:
        match exc:
            case CallTimedOut():
                return DeadlineExceeded(f"{action}: '{self._path}' has not answered within {timeout_s or 0:g} s")
            case OutcomeUnknown():
                return ReplyLost(f"{action}: '{self._path}' closed the connection before it answered: {exc}")
            case ConnectionClosed():
                return ServiceUnreachable(f"{action}: '{self._path}': {exc}")
            case RemoteError():
                return ServiceRefused(f"{action}: '{self._path}' says: {shown(exc.message)}", exc)
        return Internal(f"{action}: '{self._path}': {shown(str(exc))}")
