"""Confidential VMs: the options of their guards, and the launch of SEV, SEV-ES and SNP guests.

A guard is an object, two machine properties and the firmware. The rest (private memory, no shared file system, no
growth) is decided in the VM's plan; a VM that contradicts its guard is refused here. Sources of the rules: QEMU's
docs/system/i386/amd-memory-encryption.rst, docs/system/i386/tdx.rst and target/i386/kvm/tdx.c (10.1 and later).

The argv of all SEV guests needs the host's encryption bit, which a QEMU without a machine reports. The launch of SEV
and SEV-ES is measured before the guest's first instruction. The operator's hook gets the measurement and asks the
guest's owner. It prints a secret, encrypted for this launch, or nothing. When it fails, the guest never runs.
"""

import asyncio
import base64
import binascii
import json
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from hypervisors.qemu.qmp import Monitor, QmpError, QmpGone
from pyshim.host.processes.children import PROGRAM_ENV, Children
from pyshim.model.confidential import (
    SNP_HOST_DATA_BYTES,
    TDX_CONFIG_ID_BYTES,
    Guard,
    SevGuard,
    SnpGuard,
    TdxGuard,
    UnixQuotes,
    VsockQuotes,
)
from pyshim.model.decoding import json_value
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import Accelerator
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.vm import ImageDriver, LocalVm, MemoryBacking

log = logging.getLogger(__name__)


SEV_ID = "sev"
SNP_ID = "snp"
_ID_BLOCK_BYTES = 96
_MAX_ID_AUTH_BYTES = 4096
"""Source: AMD's SEV-SNP firmware ABI, ID block and ID authentication information structure."""


class Encryption(NamedTuple):
    """The host CPU's parameters of memory encryption, for QEMU's argv."""

    cbitpos: int
    """The page table bit that marks an encrypted page."""
    reduced_phys_bits: int
    """The number of physical address bits that the guest loses."""


NO_ENCRYPTION = Encryption(0, 0)
QUERY_CAPABILITIES = "query-sev-capabilities"


def guard_object(guard: Guard, encryption: Encryption) -> tuple[str, ...]:
    """The -object that the machine's `confidential-guest-support` refers to."""
    match guard:
        case TdxGuard():
            return tdx_object(guard)
        case SevGuard():
            return sev_object(guard, encryption)
        case SnpGuard():
            return snp_object(guard, encryption)


def machine_properties(guard: Guard) -> dict[str, str]:
    """The split irqchip is the only one that TDX accepts; Kata uses it for all guards."""
    return {"kernel-irqchip": "split", "confidential-guest-support": guard_id(guard)}


def guard_id(guard: Guard) -> str:
    match guard:
        case TdxGuard():
            return TDX_ID
        case SevGuard():
            return SEV_ID
        case SnpGuard():
            return SNP_ID


def firmware(guard: Guard, path: str) -> tuple[str, ...]:
    """SEV's firmware is flash, which every QEMU measures. TDX and SNP lack flash's read-only memory slots."""
    if isinstance(guard, SevGuard):
        return ("-drive", f"if=pflash,format=raw,read-only=on,file={path.replace(',', ',,')}")
    return ("-bios", path)


def problem(config: LocalVm, guard: Guard) -> str:
    """The reason why this VM cannot be confidential; empty if it can.

    Without this check it would start with less protection than requested, or fail without the cause.
    """
    if refusal := config.machine.refuses_confidential:
        return f"a confidential guest needs machine type q35, not {config.machine_type!r}: {refusal}"
    if config.cpu.accelerator is not Accelerator.KVM:
        return "a confidential guest needs KVM"
    if config.boot.firmware is None:
        return "a confidential guest needs firmware: its first code is measured"
    if config.share is not None:
        return "a confidential guest shares no files with the host"
    if config.memory.backing is not MemoryBacking.PRIVATE or config.memory.virtio_mem:
        return "a confidential guest has private memory of fixed size"
    if config.memory.max_mib > config.memory.boot_mib or config.cpu.max_vcpus > config.cpu.boot_vcpus:
        return "a confidential guest cannot grow"
    if config.boot.image is not None and config.boot.image_driver is ImageDriver.PMEM:
        return "a confidential guest's root image cannot be persistent memory"
    if isinstance(guard, TdxGuard):
        return _tdx_problem(config, guard)
    return _sev_problem(guard)


def capabilities_argv(program: str, name: str, qmp_fd: int) -> tuple[str, ...]:
    """The argv of a QEMU without a machine, which answers QUERY_CAPABILITIES on the connected socket `qmp_fd`."""
    machine = ("-nodefaults", "-no-user-config", "-display", "none", "-machine", "none", "-accel", "kvm")
    control = ("-chardev", f"socket,id=qmp,fd={qmp_fd}", "-mon", "chardev=qmp,mode=control")
    return (program, "-name", name, *machine, *control)


def parse_encryption(capabilities: object) -> Encryption:
    """The parameters in QEMU's answer to QUERY_CAPABILITIES. Raises FailedPrecondition for a malformed answer."""
    members = capabilities if isinstance(capabilities, dict) else {}
    found = Encryption(members.get("cbitpos", 0), members.get("reduced-phys-bits", 0))
    # `type` and not isinstance: JSON's true would count as 1.
    if not all(type(bits) is int and 0 < bits < 64 for bits in found):
        raise FailedPrecondition(
            f"ask qemu {QUERY_CAPABILITIES!r}: encryption bit {found.cbitpos!r} and {found.reduced_phys_bits!r} reduced"
            " address bits are not a CPU's"
        )
    return found


def sev_object(guard: SevGuard, encryption: Encryption) -> tuple[str, ...]:
    return ("-object", f"sev-guest,id={SEV_ID},{_common(encryption)},policy={guard.policy}")


def snp_object(guard: SnpGuard, encryption: Encryption) -> tuple[str, ...]:
    text = f"sev-snp-guest,id={SNP_ID},{_common(encryption)},policy={guard.policy}"
    if guard.id_block:
        text += f",id-block={guard.id_block},id-auth={guard.id_auth}"
    if guard.host_data:
        text += f",host-data={base64.b64encode(guard.host_data).decode()}"
    return ("-object", text)


def _common(encryption: Encryption) -> str:
    """Without `kernel-hashes` the launch measurement does not cover kernel, initrd and command line."""
    return f"cbitpos={encryption.cbitpos},reduced-phys-bits={encryption.reduced_phys_bits},kernel-hashes=on"


def _sev_problem(guard: SevGuard | SnpGuard) -> str:
    if isinstance(guard, SevGuard):
        return "" if 0 <= guard.policy < 1 << 32 else f"SEV policy {guard.policy:#x} has more than 32 bits"
    if bool(guard.id_block) != bool(guard.id_auth):
        return "snp_id_block and snp_id_auth are only of use together"
    if guard.id_block:
        for name, text, least, most in (
            ("snp_id_block", guard.id_block, _ID_BLOCK_BYTES, _ID_BLOCK_BYTES),
            ("snp_id_auth", guard.id_auth, 1, _MAX_ID_AUTH_BYTES),
        ):
            try:
                found = len(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError):
                return f"{name} is not base64"
            if not least <= found <= most:
                return f"{name} is {found} bytes, not {least if least == most else f'{least} to {most}'}"
    if len(guard.host_data) not in (0, SNP_HOST_DATA_BYTES):
        return f"host data is {len(guard.host_data)} bytes, not {SNP_HOST_DATA_BYTES}"
    return ""


TDX_ID = "tdx"


def tdx_object(guard: TdxGuard) -> tuple[str, ...]:
    """In JSON, since the quote socket is a nested object. cid and port are strings in QEMU's qapi."""
    fields: dict[str, object] = {"qom-type": "tdx-guest", "id": TDX_ID}
    if guard.mrconfigid:
        fields["mrconfigid"] = base64.b64encode(guard.mrconfigid).decode()
    match guard.quotes:
        case VsockQuotes(cid=cid, port=port):
            fields["quote-generation-socket"] = {"type": "vsock", "cid": str(cid), "port": str(port)}
        case UnixQuotes(path=path):
            fields["quote-generation-socket"] = {"type": "unix", "path": path}
    return ("-object", json.dumps(fields, separators=(",", ":")))


def _tdx_problem(config: LocalVm, guard: TdxGuard) -> str:
    if config.cpu.model.partition(",")[0] != "host":
        return f"TDX runs with -cpu host only, not {config.cpu.model!r}"
    if len(guard.mrconfigid) not in (0, TDX_CONFIG_ID_BYTES):
        return f"mrconfigid is {len(guard.mrconfigid)} bytes, not {TDX_CONFIG_ID_BYTES}"
    return ""


HOOK_TIMEOUT_S = 20.0
"""Seconds for the hook; less than the deadline of the VM's start."""
_MAX_ANSWER_BYTES = 64 << 10
_MAX_SECRET_BYTES = 16 << 10
"""LAUNCH_SECRET takes 16 KiB at most. Source: AMD's SEV API specification."""
_FIELDS = frozenset({"packet-header", "secret", "gpa"})
_QMP_FD = 3
_EXIT_S = 2.0
"""Seconds for a QEMU that has closed its connection to exit."""


async def query_encryption(
    program: str, children: Children, ledger: Ledger, *, name: str, timeout_s: float
) -> Encryption:
    """The host's encryption, as the QEMU at `program` reports it. The QEMU started for this, called `name`, has ended.

    Raises FailedPrecondition when QEMU does not start or its answer has another shape, QmpCommandFailed with QEMU's
    text when KVM has no SEV, QmpTimeout, SpawnFailed.
    """
    ours, theirs = socket.socketpair()
    monitor = Monitor(name=name, on_event=lambda _event: None)
    try:
        with theirs:
            child = await children.spawn(
                capabilities_argv(program, name, _QMP_FD),
                fds={_QMP_FD: theirs.fileno()},
                ledger=ledger,
                ledger_key=name,
            )
    except BaseException:
        ours.close()
        raise
    try:
        await monitor.connect(ours, timeout_s)
        return parse_encryption(await monitor.execute(QUERY_CAPABILITIES))
    except QmpGone as error:
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await child.wait()
        raise FailedPrecondition(f"ask qemu {QUERY_CAPABILITIES!r}: {child.describe_exit()}") from error
    finally:
        await monitor.close()
        await child.end()
        await ledger.release(LedgerEntry(kind=ResourceKind.PROCESS, key=name))


async def attest(monitor: Monitor, children: Children, guard: SevGuard, sandbox_id: str) -> None:
    """The hook has got the launch measurement, and its secret, if any, is in the guest, which has not run yet.

    Raises FailedPrecondition when the hook fails or its answer is malformed, QmpError when QEMU's answer is.
    """
    measured = await monitor.execute("query-sev-launch-measure")
    measurement = measured.get("data") if isinstance(measured, dict) else None
    if not isinstance(measurement, str):
        raise QmpError("ask qemu 'query-sev-launch-measure': its answer lacks the text 'data'")
    log.info("sev launch measured", extra={"sandbox": sandbox_id, "measurement": measurement})
    if not guard.launch_hook:
        return
    launch = await monitor.execute("query-sev")
    env = {**PROGRAM_ENV, **hook_environment(measurement, launch if isinstance(launch, dict) else {}, sandbox_id)}
    ended, answer = await children.output(
        [guard.launch_hook], env=env, timeout_s=HOOK_TIMEOUT_S, max_bytes=_MAX_ANSWER_BYTES + 1
    )
    if ended.code or ended.signal:
        raise FailedPrecondition(f"run sev_launch_hook {guard.launch_hook!r}: it {ended}: the guest may not run")
    secret = parse_secret(answer, guard.launch_hook)
    if secret:
        await monitor.execute("sev-inject-launch-secret", secret)
        log.info("sev secret injected", extra={"sandbox": sandbox_id})


def hook_environment(measurement: str, launch: Mapping[str, object], sandbox_id: str) -> dict[str, str]:
    """The hook's environment: the measurement, and the other inputs of its digest that QEMU reports."""
    environment = {"PYSHIM_SANDBOX": sandbox_id, "PYSHIM_SEV_MEASUREMENT": measurement}
    for member in ("api-major", "api-minor", "build-id", "policy", "handle", "state"):
        if member in launch:
            environment[f"PYSHIM_SEV_{member.upper().replace('-', '_')}"] = str(launch[member])
    return environment


def parse_secret(answer: bytes, hook: str) -> dict[str, object]:
    """The arguments of sev-inject-launch-secret, which the hook printed as JSON; empty for an empty answer."""
    if not answer.strip():
        return {}

    def wrong(text: str) -> FailedPrecondition:
        return FailedPrecondition(f"read the answer of sev_launch_hook {hook!r}: {text}")

    if len(answer) > _MAX_ANSWER_BYTES:
        raise wrong(f"more than {_MAX_ANSWER_BYTES} bytes")
    members = json_value(answer, wrong)
    if not isinstance(members, dict) or not {"packet-header", "secret"} <= members.keys() <= _FIELDS:
        raise wrong("not an object with packet-header and secret, and gpa if need be")
    for name in ("packet-header", "secret"):
        try:
            size = len(base64.b64decode(members[name], validate=True))
        except (TypeError, ValueError, binascii.Error) as exc:
            raise wrong(f"{name} is not base64") from exc
        if not 0 < size <= _MAX_SECRET_BYTES:
            raise wrong(f"{name} is {size} bytes, not 1 to {_MAX_SECRET_BYTES}")
    gpa = members.get("gpa", 0)
    if not isinstance(gpa, int) or isinstance(gpa, bool) or gpa < 0:
        raise wrong("gpa is not an address")
    return members
