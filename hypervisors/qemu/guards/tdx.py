"""Intel TDX. Source of the rules: QEMU's docs/system/i386/tdx.rst and target/i386/kvm/tdx.c (10.1 and later)."""

import base64
import json

from pyshim.model.confidential import TDX_CONFIG_ID_BYTES, TdxGuard, UnixQuotes, VsockQuotes
from pyshim.model.vm import VmConfig

ID = "tdx"


def tdx_object(guard: TdxGuard) -> tuple[str, ...]:
    """In JSON, since the quote socket is a nested object. cid and port are strings in QEMU's qapi."""
    fields: dict[str, object] = {"qom-type": "tdx-guest", "id": ID}
    if guard.mrconfigid:
        fields["mrconfigid"] = base64.b64encode(guard.mrconfigid).decode()
    match guard.quotes:
        case VsockQuotes(cid=cid, port=port):
            fields["quote-generation-socket"] = {"type": "vsock", "cid": str(cid), "port": str(port)}
        case UnixQuotes(path=path):
            fields["quote-generation-socket"] = {"type": "unix", "path": path}
    return ("-object", json.dumps(fields, separators=(",", ":")))


def problem(config: VmConfig, guard: TdxGuard) -> str:
    if config.cpu.model.partition(",")[0] != "host":
        return f"TDX runs with -cpu host only, not {config.cpu.model!r}"
    if len(guard.mrconfigid) not in (0, TDX_CONFIG_ID_BYTES):
        return f"mrconfigid is {len(guard.mrconfigid)} bytes, not {TDX_CONFIG_ID_BYTES}"
    return ""
