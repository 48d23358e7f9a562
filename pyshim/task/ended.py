"""The Task API of a sandbox whose shim died: its containers have ended, and can be stopped and deleted.

CRI-O never executes `delete`. It asks the socket that the bundle's file `address` names, and cannot remove a pod while
that does not answer. Source: CRI-O 1.36.3, internal/oci/runtime_vm.go, updateContainerStatus, deleteContainer.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from pyshim.model.errors import ErrorCode
from pyshim.model.ids import ContainerId
from pyshim.model.task import ExitStatus, ProcessState
from pyshim.task import translate
from pyshim.task.service import SERVICES
from pyshim.ttrpc import CallContext, Handler, ImmediateHandler, TtrpcError


class EndedContainers:
    """Answers for the containers of a sandbox, which have all ended, until each is deleted."""

    def __init__(self, containers: Iterable[ProcessState], unknown: ProcessState) -> None:
        """`unknown` answers for a container that began after the sandbox's state was last saved."""
        self._known = {container.container_id: container for container in containers}
        self._unknown = unknown
        self._deleted: set[ContainerId] = set()

    def services(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers for a ttrpc server; it refuses the other methods."""
        handlers: dict[str, Handler] = {
            "State": self._about(translate.process_ref, translate.state_reply),
            "Wait": self._about(translate.process_ref, lambda found: translate.wait_reply(_exit(found))),
            "Kill": self._about(translate.kill_request, lambda _: translate.empty_reply(None)),
            "Delete": self._about(translate.process_ref, self._delete),
            "Connect": ImmediateHandler(lambda *_: translate.connect_reply(os.getpid(), 0)),
            "Shutdown": ImmediateHandler(lambda *_: translate.empty_reply(None)),
        }
        return dict.fromkeys(SERVICES, handlers)

    def _about(self, decode: Callable[[bytes], Any], answer: Callable[[ProcessState], bytes]) -> ImmediateHandler:
        def handle(payload: bytes, _: CallContext) -> bytes:
            return answer(self._found(decode(payload).container_id))

        return ImmediateHandler(handle)

    def _found(self, container_id: ContainerId) -> ProcessState:
        if container_id in self._deleted:
            raise TtrpcError(ErrorCode.NOT_FOUND, f"find container {container_id!r}: it is deleted")
        return self._known.get(container_id) or replace(self._unknown, container_id=container_id)

    def _delete(self, found: ProcessState) -> bytes:
        self._deleted.add(found.container_id)
        return translate.delete_reply((0, _exit(found)))


def _exit(found: ProcessState) -> ExitStatus:
    assert found.exit is not None, "the containers have ended"
    return found.exit
