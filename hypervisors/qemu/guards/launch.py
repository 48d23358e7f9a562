"""Prepares the launch of SEV, SEV-ES and SNP guests.

The argv of all three needs the host's encryption bit, which a QEMU without a machine reports. The launch of SEV and
SEV-ES is measured before the guest's first instruction. The operator's hook gets the measurement and asks the guest's
owner. It prints a secret, encrypted for this launch, or nothing. When it fails, the guest never runs.
"""

import asyncio
import base64
import binascii
import json
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress

from hypervisors.qemu.guards.sev import QUERY_CAPABILITIES, Encryption, capabilities_argv, parse_encryption
from hypervisors.qemu.qmp import Monitor, QmpError, QmpGone
from pyshim.host.processes.children import PROGRAM_ENV, Children
from pyshim.model.confidential import SevGuard
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind

log = logging.getLogger(__name__)

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
    try:
        members = json.loads(answer)
    except (ValueError, RecursionError) as exc:
        raise wrong("not JSON") from exc
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
