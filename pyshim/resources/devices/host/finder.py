"""The daemon's side: starts a child for one question and reads its answer."""

import asyncio

import msgspec

from pyshim.host.processes.children import PROGRAM_ENV, Children
from pyshim.host.python_child import PythonChild, spawn_python
from pyshim.model import errors
from pyshim.model.decoding import damaged, decoded
from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.errors import DeadlineExceeded, Internal, ShimError

TIMEOUT_S = 25.0
"""For start, the kubelet's answer (which has a shorter limit of its own) and the specs."""
_CHILD = "pyshim.resources.devices.host.child"
_ENV = {**PROGRAM_ENV, "GRPC_ENABLE_FORK_SUPPORT": "0"}


class DeviceFinder:
    def __init__(self, children: Children, *, timeout_s: float = TIMEOUT_S) -> None:
        self._children = children
        self._timeout_s = timeout_s

    async def find(self, question: DeviceQuestion) -> PodDevices:
        """The answer; nothing is started for an empty question. Raises the child's ShimError, or DeadlineExceeded."""
        if question.is_empty:
            return PodDevices()
        child = PythonChild(*await spawn_python(self._children, _CHILD, env=_ENV))
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, _ = await child.ask("find devices", msgspec.to_builtins(question))
        except TimeoutError:
            raise DeadlineExceeded(f"find devices: no answer within {self._timeout_s:g} s") from None
        finally:
            await child.close()
        if "ok" in answer:
            return decoded(answer["ok"], PodDevices, damaged("answer of the devices' child", Internal))
        kind = getattr(errors, str(answer.get("kind")), Internal)
        raise (kind if isinstance(kind, type) and issubclass(kind, ShimError) else Internal)(str(answer.get("error")))
