"""Confidential guests: what their argv adds to the plain one, and what is refused before QEMU is asked."""

import base64
import json
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import check_config, fd_table, qemu_argv
from hypervisors.qemu.guards.sev import Encryption, encryption_of
from hypervisors.qemu.hotplug import capabilities_of
from pyshim.model.confidential import Guard, SevGuard, SnpGuard, TdxGuard, VsockQuotes
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver, MemoryBacking, VmConfig, VsockChannel
from tests.fakes.vm_config import vm_config, with_boot, with_memory

TDX = TdxGuard(mrconfigid=b"", quotes=VsockQuotes(cid=2, port=4050))
SNP = SnpGuard(policy=0x30000, id_block="", id_auth="", host_data=b"")
SEV = SevGuard(policy=1, launch_hook="")
SEV_ES = replace(SEV, policy=5)
GUARDS = {"tdx": TDX, "snp": SNP, "sev": SEV, "sev-es": SEV_ES}


def confidential(guard: Guard | None, **changes: Any) -> VmConfig:
    base = vm_config(share=None, agent_channel=VsockChannel(port=1024), entropy_source="", guard=guard)
    model = "EPYC-v4,pmu=off" if isinstance(guard, SnpGuard) else "host,pmu=off"
    return replace(
        base,
        boot=replace(base.boot, firmware="/opt/OVMF,1.fd"),
        cpu=replace(base.cpu, accelerator=Accelerator.KVM, model=model, max_vcpus=1),
        memory=replace(base.memory, backing=MemoryBacking.PRIVATE, max_mib=256, slots=0),
        **changes,
    )


def argv(config: VmConfig) -> tuple[str, ...]:
    return qemu_argv(config, fd_table(config, guest_cid=42, image_bytes=1 << 20, encryption=Encryption(51, 1)))


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


def _cpu(config: VmConfig, **changes: Any) -> VmConfig:
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


def test_the_encryption_bit_is_what_qemu_says_of_the_host() -> None:
    answer = {"pdh": "AA==", "cert-chain": "AA==", "cpu0-id": "AA==", "cbitpos": 51, "reduced-phys-bits": 1}

    assert encryption_of(answer) == Encryption(cbitpos=51, reduced_phys_bits=1)


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"cbitpos": 51}, {"cbitpos": 0, "reduced-phys-bits": 1}, {"cbitpos": 51, "reduced-phys-bits": 64}]
    + [{"cbitpos": wrong, "reduced-phys-bits": 1} for wrong in (True, "51", None, 51.0, -1)],
)
def test_an_answer_that_is_no_cpus_is_refused(answer: object) -> None:
    with pytest.raises(FailedPrecondition, match="are not a CPU's"):
        encryption_of(answer)
