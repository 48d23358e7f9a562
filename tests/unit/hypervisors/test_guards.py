"""Confidential guests: their argv, the refusals before QEMU is asked, and the launch of SEV."""

import asyncio
import base64
import json
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import check_config, qemu_argv
from hypervisors.qemu.guards import Encryption, attest, parse_encryption, parse_secret, query_encryption
from hypervisors.qemu.hotplug import capabilities_of
from hypervisors.qemu.qmp import QmpCommandFailed, QmpError
from pyshim.host.processes.children import Children
from pyshim.model.confidential import Guard, SevGuard, SnpGuard, TdxGuard, UnixQuotes, VsockQuotes
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver, LocalVm, MemoryBacking, VsockChannel
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import vm_config, with_boot, with_memory

TDX = TdxGuard(mrconfigid=b"", quotes=VsockQuotes(cid=2, port=4050))
SNP = SnpGuard(policy=0x30000, id_block="", id_auth="", host_data=b"")
SEV = SevGuard(policy=1, launch_hook="")
SEV_ES = replace(SEV, policy=5)
GUARDS = {"tdx": TDX, "snp": SNP, "sev": SEV, "sev-es": SEV_ES}


def confidential(guard: Guard | None, **changes: Any) -> LocalVm:
    base = vm_config(share=None, agent_channel=VsockChannel(port=1024), entropy_source="", guard=guard)
    model = "EPYC-v4,pmu=off" if isinstance(guard, SnpGuard) else "host,pmu=off"
    return replace(
        base,
        boot=replace(base.boot, firmware="/opt/OVMF,1.fd"),
        cpu=replace(base.cpu, accelerator=Accelerator.KVM, model=model, max_vcpus=1),
        memory=replace(base.memory, backing=MemoryBacking.PRIVATE, max_mib=256, slots=0),
        **changes,
    )


def argv(config: LocalVm) -> tuple[str, ...]:
    return qemu_argv(config, guest_cid=42, image_bytes=1 << 20, encryption=Encryption(51, 1))


def test_quotes_can_come_by_a_unix_socket() -> None:
    words = argv(confidential(replace(TDX, quotes=UnixQuotes(path="/run/tdx-qgs/qgs.socket"))))
    document = json.loads(next(word for word in words if "tdx-guest" in word))
    assert document["quote-generation-socket"] == {"type": "unix", "path": "/run/tdx-qgs/qgs.socket"}


def test_the_digest_of_the_owners_document_is_in_the_object() -> None:
    tdx = json.loads(
        next(word for word in argv(confidential(replace(TDX, mrconfigid=b"m" * 48))) if "tdx-guest" in word)
    )
    snp = next(word for word in argv(confidential(replace(SNP, host_data=b"h" * 32))) if "sev-snp-guest" in word)

    assert base64.b64decode(tdx["mrconfigid"]) == b"m" * 48
    assert snp.endswith(f",host-data={base64.b64encode(b'h' * 32).decode()}")


def test_quotes_can_come_over_vsock() -> None:
    document = json.loads(next(word for word in argv(confidential(TDX)) if "tdx-guest" in word))

    assert document["quote-generation-socket"] == {"type": "vsock", "cid": "2", "port": "4050"}


def test_id_block_and_its_authentication_go_together() -> None:
    block, auth = base64.b64encode(bytes(96)).decode(), base64.b64encode(bytes(4096)).decode()

    words = argv(confidential(replace(SNP, id_block=block, id_auth=auth)))

    assert any(f",id-block={block},id-auth={auth}" in word for word in words)


@pytest.mark.parametrize("name", GUARDS)
def test_nothing_can_be_added_but_disks_and_nics(name: str) -> None:
    can = capabilities_of(confidential(GUARDS[name]))

    assert (can.cpu_hotplug, can.memory_hotplug) == (False, False)
    assert not any("maxmem" in word or "virtio-rng" in word for word in argv(confidential(GUARDS[name])))


@pytest.mark.parametrize("name", GUARDS)
def test_a_nested_host_does_not_turn_the_modern_protocol_off(name: str) -> None:
    assert not any("disable-modern" in word for word in argv(confidential(GUARDS[name], nested=True)))


def _cpu(config: LocalVm, **changes: Any) -> LocalVm:
    return replace(config, cpu=replace(config.cpu, **changes))


PLAIN = confidential(TDX)
CONTRADICTIONS = {
    "needs KVM": _cpu(PLAIN, accelerator=Accelerator.TCG),
    "needs firmware": with_boot(PLAIN, firmware=None),
    "needs machine type q35": replace(PLAIN, machine_type="microvm"),
    "private memory": with_memory(PLAIN, backing=MemoryBacking.SHARED_MEMFD),
    "cannot grow": with_memory(PLAIN, max_mib=512),
    "a confidential guest cannot grow": _cpu(PLAIN, max_vcpus=2),
    "cannot be persistent memory": with_boot(PLAIN, image_driver=ImageDriver.PMEM),
    "-cpu host only, not 'EPYC-v4'": _cpu(PLAIN, model="EPYC-v4"),
    "mrconfigid is 1 bytes, not 48": replace(PLAIN, guard=replace(TDX, mrconfigid=b"x")),
    "host data is 1 bytes, not 32": confidential(replace(SNP, host_data=b"x")),
    "snp_id_block is not base64": confidential(replace(SNP, id_block="%", id_auth="AA==")),
    "snp_id_block is 1 bytes, not 96": confidential(replace(SNP, id_block="AA==", id_auth="AA==")),
    "only of use together": confidential(replace(SNP, id_block="AA==")),
    "has more than 32 bits": confidential(replace(SEV, policy=1 << 32)),
}


@pytest.mark.parametrize("problem", CONTRADICTIONS)
def test_what_contradicts_a_guard_is_refused(problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_config(CONTRADICTIONS[problem])

    assert problem in str(caught.value)


@pytest.mark.parametrize("name", GUARDS)
def test_a_consistent_guard_passes(name: str) -> None:
    check_config(confidential(GUARDS[name]))


def test_the_encryption_bit_is_the_one_qemu_reports() -> None:
    answer = {"pdh": "AA==", "cert-chain": "AA==", "cpu0-id": "AA==", "cbitpos": 51, "reduced-phys-bits": 1}

    assert parse_encryption(answer) == Encryption(cbitpos=51, reduced_phys_bits=1)


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"cbitpos": 51}, {"cbitpos": 0, "reduced-phys-bits": 1}, {"cbitpos": 51, "reduced-phys-bits": 64}]
    + [{"cbitpos": wrong, "reduced-phys-bits": 1} for wrong in (True, "51", None, 51.0, -1)],
)
def test_impossible_encryption_parameters_are_refused(answer: object) -> None:
    with pytest.raises(FailedPrecondition, match="are not a CPU's"):
        parse_encryption(answer)


QEMU = Path("/usr/bin/qemu-system-x86_64")
SECRET = {"packet-header": base64.b64encode(b"header").decode(), "secret": base64.b64encode(b"secret").decode()}
LAUNCH = {
    "enabled": True,
    "api-major": 1,
    "api-minor": 55,
    "build-id": 24,
    "policy": 5,
    "handle": 3,
    "state": "launch-secret",
}


class ScriptedMonitor:
    """Answers the three commands of a launch; `asked` is what it was asked."""

    def __init__(self, measurement: object) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._answers = {"query-sev-launch-measure": measurement, "query-sev": LAUNCH, "sev-inject-launch-secret": {}}

    async def execute(self, command: str, arguments: Any = None) -> object:
        self.asked.append((command, arguments))
        return self._answers[command]


def hook_in(directory: Path, body: str) -> str:
    path = directory / "hook"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


def launched(hook: str, measurement: object = "bWVhc3VyZQ==") -> ScriptedMonitor:
    monitor = ScriptedMonitor({"data": measurement})
    guard = SevGuard(policy=5, launch_hook=hook)
    asyncio.run(attest(monitor, Children(), guard, "pod1"))  # type: ignore[arg-type]
    return monitor


def test_the_hook_gets_the_measurement_and_its_secret_is_injected(tmp_path: Path) -> None:
    hook = hook_in(tmp_path, f"env | grep ^PYSHIM_ | sort > {tmp_path}/environment; echo '{json.dumps(SECRET)}'")

    monitor = launched(hook)

    assert (tmp_path / "environment").read_text().splitlines() == [
        "PYSHIM_SANDBOX=pod1",
        "PYSHIM_SEV_API_MAJOR=1",
        "PYSHIM_SEV_API_MINOR=55",
        "PYSHIM_SEV_BUILD_ID=24",
        "PYSHIM_SEV_HANDLE=3",
        "PYSHIM_SEV_MEASUREMENT=bWVhc3VyZQ==",
        "PYSHIM_SEV_POLICY=5",
        "PYSHIM_SEV_STATE=launch-secret",
    ]
    assert monitor.asked[-1] == ("sev-inject-launch-secret", SECRET)


def test_a_hook_without_an_answer_lets_the_guest_run_without_a_secret(tmp_path: Path) -> None:
    monitor = launched(hook_in(tmp_path, "true"))

    assert [command for command, _ in monitor.asked] == ["query-sev-launch-measure", "query-sev"]


def test_without_a_hook_the_launch_is_only_measured() -> None:
    assert [command for command, _ in launched("").asked] == ["query-sev-launch-measure"]


@pytest.mark.parametrize("body", ["exit 3", "kill -9 $$"])
def test_a_hook_that_fails_keeps_the_guest_from_running(tmp_path: Path, body: str) -> None:
    with pytest.raises(FailedPrecondition, match="the guest may not run"):
        launched(hook_in(tmp_path, body))


def test_a_missing_hook_keeps_the_guest_from_running(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="no such file"):
        launched(str(tmp_path / "absent"))


def test_a_malformed_measurement_is_an_error_of_qemu() -> None:
    with pytest.raises(QmpError, match="lacks the text 'data'"):
        launched("", measurement=3)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "not an object"),
        (json.dumps({**SECRET, "more": 1}).encode(), "not an object"),
        (json.dumps({**SECRET, "secret": "%"}).encode(), "secret is not base64"),
        (json.dumps({**SECRET, "secret": 3}).encode(), "secret is not base64"),
        (json.dumps({**SECRET, "secret": ""}).encode(), "secret is 0 bytes"),
        (json.dumps({**SECRET, "gpa": "1"}).encode(), "gpa is not an address"),
        (b" " * (65 << 10) + b"x", "more than"),
    ],
)
def test_a_malformed_answer_of_the_hook_is_refused(answer: bytes, named: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        parse_secret(answer, "/hook")

    assert named in str(caught.value)
    assert "'/hook'" in str(caught.value)


SCRIPTED_QEMU = """#!{python}
import json, socket, sys
assert sys.argv[1:3] == ["-name", "sev-of-vm1"], sys.argv
connection = socket.socket(fileno=3)
version = {{"qemu": {{"major": 8, "minor": 2, "micro": 0}}, "package": ""}}
connection.sendall(json.dumps({{"QMP": {{"version": version, "capabilities": []}}}}).encode() + b"\\n")
for answer in ({{"return": {{}}}}, {answer!r}):
    question = json.loads(connection.recv(65536))  # each comes alone, after the answer before it
    identity = {{key: value for key, value in question.items() if key == "id"}}
    connection.sendall(json.dumps({{**answer, **identity}}).encode() + b"\\n")
connection.recv(1)
"""
CAPABLE = {"return": {"pdh": "", "cert-chain": "", "cpu0-id": "", "cbitpos": 51, "reduced-phys-bits": 1}}


def asked(program: str) -> tuple[Encryption, FakeLedger]:
    """The answer of the QEMU of that name; the ledger has had it and no process is left of it."""
    ledger, children = FakeLedger(), Children()

    async def main() -> Encryption:
        try:
            return await query_encryption(program, children, ledger, name="sev-of-vm1", timeout_s=20)
        finally:
            assert (children.alive, ledger.held) == ((), {})

    return asyncio.run(main()), ledger


def scripted_qemu(directory: Path, body: str) -> str:
    path = directory / "qemu"
    path.write_text(body)
    path.chmod(stat.S_IRWXU)
    return str(path)


def test_a_qemu_without_a_machine_is_asked_for_the_hosts_encryption_bit(tmp_path: Path) -> None:
    program = scripted_qemu(tmp_path, SCRIPTED_QEMU.format(python=sys.executable, answer=CAPABLE))

    found, ledger = asked(program)

    assert found == Encryption(cbitpos=51, reduced_phys_bits=1)
    assert [verb for verb, _ in ledger.history] == ["acquire", "acquire", "release"]


def test_a_host_without_sev_raises_qemus_error(tmp_path: Path) -> None:
    refusal = {"error": {"class": "GenericError", "desc": "SEV is not enabled in KVM"}}
    program = scripted_qemu(tmp_path, SCRIPTED_QEMU.format(python=sys.executable, answer=refusal))

    with pytest.raises(QmpCommandFailed, match="ask qemu 'query-sev-capabilities': SEV is not enabled in KVM"):
        asked(program)


def test_a_qemu_that_does_not_start_is_an_error_with_its_output(tmp_path: Path) -> None:
    program = scripted_qemu(tmp_path, "#!/bin/sh\necho 'no kvm here' >&2\nexit 1\n")

    with pytest.raises(FailedPrecondition, match=r"qemu .* exited with status 1: no kvm here"):
        asked(program)


@pytest.mark.skipif(not QEMU.exists(), reason=f"needs {QEMU}")
def test_the_installed_qemu_answers_the_query() -> None:
    """Its answer is that of this host; a word of our argv or question that it did not take would be an error."""
    try:
        said = f"cbitpos {asked(str(QEMU))[0].cbitpos}"
    except ShimError as error:
        said = str(error)

    assert re.search("cbitpos|SEV is not|(?i:kvm)", said), said
