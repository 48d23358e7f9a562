"""The request to a service outside the node, and the host's part in it."""

from fractions import Fraction
from typing import Any

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import HostFacts
from pyshim.model.oci import ContainerKind, OciSpec
from pyshim.model.plans import SandboxPlan
from pyshim.model.vm import RemoteVm
from pyshim.pod.plan.remote_vm import LEAST_STOP_TIMEOUT_S
from pyshim.resources.confidential.plan.initdata import encode, parse
from tests.fakes.inputs import host, spec
from tests.fakes.sandbox_plans import planned

PREFIX = "io.katacontainers.config.hypervisor."
CRI = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": "1-2-3",
    "io.kubernetes.cri.sandbox-cpu-quota": "150000",
    "io.kubernetes.cri.sandbox-cpu-period": "100000",
    "io.kubernetes.cri.sandbox-memory": str(512 << 20),
}
NETWORK = {"namespaces": [{"type": "network", "path": "/run/netns/pod"}]}


def remote(hypervisor: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None) -> Config:
    document = {"hypervisor": {"remote": hypervisor or {}}, "runtime": runtime or {}}
    return build_config(Source(path="/etc/remote.toml", directory="/etc", document=document))


def make(
    config: Config, host: HostFacts, spec: OciSpec, kind: ContainerKind = ContainerKind.POD_SANDBOX
) -> SandboxPlan:
    return planned(config, host, spec, kind=kind)


def annotations_of(plan: SandboxPlan) -> dict[str, str]:
    assert isinstance(plan.vm, RemoteVm)
    return dict(plan.vm.service.annotations)


def test_the_annotations_describe_the_vm_to_the_service() -> None:
    initdata = parse(b'version = "0.1.0"\nalgorithm = "sha256"\n', "test")
    config = remote(
        {
            "machine_type": "m5.large",
            "image": "podvm-7",
            "default_gpus": 2,
            "default_gpu_model": "H100",
            "initdata": encode(initdata),
        }
    )

    plan = make(config, host(), spec(annotations=CRI, linux=NETWORK))

    assert annotations_of(plan) == {
        "io.kubernetes.cri.sandbox-name": "web",
        "io.kubernetes.cri.sandbox-namespace": "shop",
        "io.kubernetes.cri.sandbox-uid": "1-2-3",
        f"{PREFIX}machine_type": "m5.large",
        f"{PREFIX}image": "podvm-7",
        f"{PREFIX}default_vcpus": "3",
        f"{PREFIX}default_memory": "2560",
        f"{PREFIX}cc_init_data": initdata.document.decode(),
        f"{PREFIX}default_gpus": "2",
        f"{PREFIX}default_gpu_model": "H100",
    }
    assert plan.initdata is None, "the service shows it to the guest"


def test_every_key_of_katas_is_present_without_a_value() -> None:
    plan = make(remote(), host(), spec(linux=NETWORK), ContainerKind.SINGLE_CONTAINER)

    assert annotations_of(plan) == {
        "io.kubernetes.cri.sandbox-name": "s1",
        "io.kubernetes.cri.sandbox-namespace": "default",
        f"{PREFIX}machine_type": "",
        f"{PREFIX}image": "",
        f"{PREFIX}default_vcpus": "1",
        f"{PREFIX}default_memory": "2048",
        f"{PREFIX}cc_init_data": "",
        f"{PREFIX}default_gpus": "0",
        f"{PREFIX}default_gpu_model": "",
    }


def test_a_pod_of_crio_is_known_by_its_name() -> None:
    annotations = {
        "io.kubernetes.cri-o.ContainerType": "sandbox",
        "io.kubernetes.pod.name": "web",
        "io.kubernetes.pod.namespace": "shop",
        "io.kubernetes.cri.sandbox-name": "not its runtime's",
    }

    found = annotations_of(make(remote(), host(), spec(annotations=annotations, linux=NETWORK)))

    assert (found["io.kubernetes.cri.sandbox-name"], found["io.kubernetes.cri.sandbox-namespace"]) == ("web", "shop")


@pytest.mark.parametrize(
    ("vcpus", "whole"), [(Fraction(3, 2), "2"), (Fraction(2), "2"), (Fraction(1, 10), "1")], ids=str
)
def test_a_fraction_of_a_vcpu_is_told_rounded_up(vcpus: Fraction, whole: str) -> None:
    plan = make(remote({"default_vcpus": vcpus}), host(), spec(linux=NETWORK), ContainerKind.SINGLE_CONTAINER)

    assert annotations_of(plan)[f"{PREFIX}default_vcpus"] == whole


def test_a_remote_vm_is_limited_by_the_configuration_and_not_by_this_host() -> None:
    large = {"default_vcpus": 64, "default_memory": 1 << 20}
    small_host = host(cpu_count=2, memory_mib=1024)

    plan = make(remote(large), small_host, spec(annotations=CRI, linux=NETWORK))
    held = make(
        remote({**large, "default_maxvcpus": 48, "default_maxmemory": 65536}),
        small_host,
        spec(annotations=CRI, linux=NETWORK),
    )

    assert (plan.sizing.vcpus.granted, plan.sizing.memory_mib.granted) == (66, (1 << 20) + 512)
    assert (held.sizing.vcpus.granted, held.sizing.memory_mib.granted) == (48, 65536)
    assert held.sizing.vcpus.limited_by == "default_maxvcpus"


def test_the_policy_overhead_counts_as_for_any_vm() -> None:
    config = remote({"overhead_vcpus": 0, "overhead_memory": 0}, {"sizing_policy": "overhead"})

    plan = make(config, host(), spec(annotations=CRI, linux=NETWORK))

    assert (plan.sizing.vcpus.granted, plan.sizing.memory_mib.granted) == (2, 512)


@pytest.mark.parametrize("no_new", [True, False])
def test_the_service_gets_the_namespace_whatever_disable_new_netns_says(no_new: bool) -> None:
    plan = make(remote(runtime={"disable_new_netns": no_new}), host(), spec(linux=NETWORK))

    assert plan.vm.netns_path == plan.netns_path == "/run/netns/pod"


def test_a_new_network_namespace_is_none_and_the_hosts_is_refused() -> None:
    fresh = make(remote(), host(), spec(linux={"namespaces": [{"type": "network"}]}))

    assert fresh.vm.netns_path is None
    with pytest.raises(FailedPrecondition, match="host's network"):
        make(remote(), host(), spec())


def test_nothing_of_this_host_is_in_the_plan() -> None:
    plan = make(remote(), host(), spec(linux=NETWORK))

    assert plan.share.virtiofsd is None
    assert (plan.warm_vm, plan.initdata, plan.new_netns) == (None, None, False)
    assert [storage.driver for storage in plan.guest.storages] == ["ephemeral"]
    assert plan.config.runtime.experimental_force_guest_pull


def test_a_short_timeout_for_the_start_does_not_shorten_the_end() -> None:
    plan = make(remote({"remote_hypervisor_timeout": 20}), host(), spec(linux=NETWORK))

    assert isinstance(plan.vm, RemoteVm)
    assert plan.vm.service.timeout_s == 20
    assert plan.vm.service.stop_timeout_s == LEAST_STOP_TIMEOUT_S
    assert min(plan.vm.start_timeout_s, plan.vm.stop_timeout_s) > 20 + LEAST_STOP_TIMEOUT_S, "all of it fits in there"


def test_a_socket_whose_path_is_not_absolute_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"remote_hypervisor_socket in '/etc/remote.toml': 'x.sock' is not"):
        make(remote({"remote_hypervisor_socket": "x.sock"}), host(), spec(linux=NETWORK))
