"""Neighbours of a pod that are not there."""

from collections.abc import Mapping

from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.ids import SandboxId
from pyshim.model.observation import Trace
from pyshim.model.sizing import Placement, PlacementRequest


async def no_devices(question: DeviceQuestion) -> PodDevices:
    """Raises FailedPrecondition for a question about any."""
    if not question.is_empty:
        raise FailedPrecondition("find devices: no finder is set")
    return PodDevices()


async def no_plugin(path: str, _need: PlacementRequest) -> Placement:
    """Raises NotFound."""
    raise NotFound(f"ask '{path}' for a placement: no plugin runs")


def no_export(trace: Trace, endpoint: str, sandbox_id: SandboxId, annotations: Mapping[str, str]) -> None:
    """The spans are dropped."""
