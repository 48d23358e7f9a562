"""The guard of each configuration and host; features that a confidential VM's plan leaves out."""

from typing import Any

import pytest

from pyshim.model.confidential import NO_TEE, SevGuard, SnpGuard, TdxGuard, Tee, TeeFacts, UnixQuotes, VsockQuotes
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.vm import ImageDriver, MemoryBacking
from pyshim.resources.confidential.plan.guard import guard_of
from pyshim.resources.confidential.plan.initdata import encode, parse
from tests.fakes.inputs import config, host, spec
from tests.fakes.sandbox_plans import planned

CONFIDENTIAL = {"confidential_guest": True, "shared_fs": "none", "firmware": "/OVMF.fd"}
DOCUMENT = b'version = "0.1.0"\nalgorithm = "sha384"\n[data]\n"policy.rego" = "package agent_policy"\n'


def tee(*available: Tee, quote_socket: str = "") -> TeeFacts:
    return TeeFacts(available=frozenset(available), probed=("'/sys/x' says 'N'",), quote_socket=quote_socket)


AMD = tee(Tee.SNP, Tee.SEV_ES, Tee.SEV)
INTEL = tee(Tee.TDX)


@pytest.mark.parametrize(
    ("keys", "facts", "kind"),
    [
        ({}, INTEL, TdxGuard),
        ({"confidential_technology": "tdx"}, INTEL, TdxGuard),
        ({"sev_snp_guest": True}, AMD, SnpGuard),
        ({"confidential_technology": "snp"}, AMD, SnpGuard),
        ({}, AMD, SevGuard),
        ({"confidential_technology": "sev"}, AMD, SevGuard),
    ],
)
def test_the_guard_follows_configuration_and_host(keys: dict[str, Any], facts: TeeFacts, kind: type) -> None:
    assert type(guard_of(config(**CONFIDENTIAL, **keys), host(kvm_usable=True, tee=facts), None)) is kind


@pytest.mark.parametrize(
    ("keys", "facts", "named"),
    [
        ({"confidential_technology": "tdx"}, AMD, "this host has no TDX: probed: '/sys/x' says 'N'"),
        ({"sev_snp_guest": True}, INTEL, "this host has no SEV-SNP"),
        ({"confidential_technology": "sev"}, INTEL, "this host has no SEV-ES or SEV"),
        ({}, NO_TEE, "this host has no TDX or SEV-ES or SEV: probed: nothing"),
        ({"sev_guest_policy": 5}, tee(Tee.SEV), "asks for SEV-ES"),
    ],
)
def test_what_the_host_lacks_is_an_error_that_says_what_was_probed(
    keys: dict[str, Any], facts: TeeFacts, named: str
) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        guard_of(config(**CONFIDENTIAL, **keys), host(kvm_usable=True, tee=facts), None)

    assert named in str(caught.value)
    assert "/etc/test.toml" in str(caught.value)


def test_without_kvm_nothing_is_confidential() -> None:
    with pytest.raises(FailedPrecondition, match="needs KVM: the CPU shows neither vmx nor svm"):
        guard_of(config(**CONFIDENTIAL), host(tee=INTEL), None)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"shared_fs": "virtio-fs"}, "shared_fs"),
        ({"firmware": ""}, "firmware is not set"),
        ({"machine_type": "microvm"}, "machine_type"),
        ({"enable_hugepages": True}, "enable_hugepages"),
        ({"enable_virtio_mem": True}, "enable_virtio_mem"),
        ({"reclaim_guest_freed_memory": True}, "reclaim_guest_freed_memory"),
        ({"enable_guest_swap": True}, "enable_guest_swap"),
        ({"accelerator": "tcg"}, "accelerator"),
        ({"sev_snp_guest": True, "confidential_technology": "tdx"}, "contradicts confidential_technology"),
        ({"sev_snp_guest": True, "snp_id_block": "AA=="}, "snp_id_block and snp_id_auth"),
        ({"confidential_guest": False, "sev_snp_guest": True}, "sev_snp_guest"),
    ],
)
def test_what_contradicts_confidentiality_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        guard_of(config(**{**CONFIDENTIAL, **keys}), host(kvm_usable=True, tee=AMD), None)


@pytest.mark.parametrize(
    ("policy", "facts", "expected"),
    [(0, AMD, 5), (0, tee(Tee.SEV), 1), (1, AMD, 1), (0xD, AMD, 0xD)],
    ids=["es", "plain", "plain-wanted", "own"],
)
def test_sev_encrypts_registers_where_it_can_unless_told_otherwise(policy: int, facts: TeeFacts, expected: int) -> None:
    guard = guard_of(config(**CONFIDENTIAL, sev_guest_policy=policy), host(kvm_usable=True, tee=facts), None)

    assert isinstance(guard, SevGuard)
    assert guard.policy == expected


@pytest.mark.parametrize(
    ("port", "socket", "quotes"),
    [
        (0, "", VsockQuotes(cid=2, port=4050)),
        (0, "/run/q", UnixQuotes(path="/run/q")),
        (99, "/run/q", VsockQuotes(cid=2, port=99)),
    ],
)
def test_quotes_are_asked_of_the_port_given_else_of_the_services_socket(port: int, socket: str, quotes: object) -> None:
    keys = {**CONFIDENTIAL, "tdx_quote_generation_service_socket_port": port}

    guard = guard_of(config(**keys), host(kvm_usable=True, tee=tee(Tee.TDX, quote_socket=socket)), None)

    assert isinstance(guard, TdxGuard)
    assert guard.quotes == quotes


@pytest.mark.parametrize("facts", [INTEL, AMD], ids=["tdx", "snp"])
def test_the_digest_of_initdata_fills_the_field_of_the_technology(facts: TeeFacts) -> None:
    document = parse(DOCUMENT, "test")
    keys = {**CONFIDENTIAL, "sev_snp_guest": facts is AMD, "initdata": encode(document)}

    plan = planned(config(**keys), host(kvm_usable=True, tee=facts), spec())

    guard = plan.vm.guard
    field = guard.host_data if isinstance(guard, SnpGuard) else guard.mrconfigid if isinstance(guard, TdxGuard) else b""
    assert field == document.digest[: 32 if facts is AMD else 48]
    assert (plan.vm.initdata, plan.initdata) == ("/run/vc/vm/s1/initdata.img", document)


def test_initdata_that_sev_cannot_measure_starts_nothing() -> None:
    with pytest.raises(FailedPrecondition, match="no field for a digest"):
        guard_of(config(**CONFIDENTIAL), host(kvm_usable=True, tee=AMD), parse(DOCUMENT, "test"))


@pytest.mark.parametrize("text", ["%%%", "QUJD", '"'], ids=["base64", "gzip", "toml"])
def test_initdata_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ShimError, match="read initdata of cc_init_data"):
        planned(config(initdata=text), host(), spec())


def test_a_confidential_vm_shares_nothing_and_cannot_grow() -> None:
    asked = {"cpu": {"quota": 150_000, "period": 100_000}, "memory": {"limit": 300 << 20}}
    plan = planned(config(**CONFIDENTIAL), host(kvm_usable=True, tee=INTEL), spec(linux={"resources": asked}))

    vm = plan.vm
    assert (vm.cpu.boot_vcpus, vm.memory.boot_mib) == (3, 2348), "sized once, its workload included"
    assert (vm.share, vm.entropy_source, vm.memory.backing) == (None, "", MemoryBacking.PRIVATE)
    assert (vm.memory.max_mib, vm.memory.slots) == (vm.memory.boot_mib, 0)
    assert vm.cpu.max_vcpus == vm.cpu.boot_vcpus
    assert (vm.cpu.model, vm.boot.image_driver) == ("host,pmu=off", ImageDriver.VIRTIO_BLK)
    assert not any(param.startswith("nr_cpus") for param in vm.boot.kernel_params)


def test_snp_has_a_named_cpu_model() -> None:
    plan = planned(config(**CONFIDENTIAL, sev_snp_guest=True), host(kvm_usable=True, tee=AMD), spec())

    assert plan.vm.cpu.model == "EPYC-v4,pmu=off"
