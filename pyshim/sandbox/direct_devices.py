"""Directly attached network devices, as a file describes them for a sandbox: refused, as there is no way for them."""

from pyshim.model.errors import NotFound, Unimplemented
from pyshim.plan.sandbox import SandboxPlan
from pyshim.sandbox.seams import Host

MAX_FILE_BYTES = 1 << 20


async def refuse_direct_devices(plan: SandboxPlan, host: Host) -> None:
    """No file describes such devices for this sandbox: they would come instead of CNI's. Raises Unimplemented."""
    path = f"{plan.config.runtime.dan_conf}/{plan.sandbox_id}.json"
    try:
        await host.read_bytes(path, MAX_FILE_BYTES)
    except NotFound:
        return
    raise Unimplemented(f"connect network: directly attached devices, as {path!r} describes, are not available")
