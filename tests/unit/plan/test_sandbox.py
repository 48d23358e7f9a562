"""Decisions of the sandbox plan."""

from collections.abc import Callable

import pytest

from hypervisors.base import SerialChannel, VsockChannel
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.host_facts import Accelerator, HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.kernel_line import split_params
from pyshim.model.oci import OciSpec
from pyshim.plan.kind import ContainerKind
from pyshim.plan.sandbox import SandboxPlan, accelerator, agent_channel, sandbox_plan
from tests.fakes.facts import PLENTY


def make(config: Config, host: HostFacts, spec: OciSpec) -> SandboxPlan:
    return sandbox_plan(
        sandbox_id=SandboxId("s1"),
        kind=ContainerKind.SINGLE_CONTAINER,
        uuid="u",
        spec=spec,
        config=config,
        host=host,
        capacity=PLENTY,
        sources={},
    )


@pytest.mark.parametrize(
    ("wanted", "usable", "chosen"),
    [
        ("auto", True, Accelerator.KVM),
        ("auto", False, Accelerator.TCG),
        ("tcg", True, Accelerator.TCG),
        ("kvm", True, Accelerator.KVM),
    ],
)
def test_the_accelerator_is_detected_unless_demanded(
    config: Callable[..., Config], host: Callable[..., HostFacts], wanted: str, usable: bool, chosen: Accelerator
) -> None:
    assert accelerator(config(accelerator=wanted), host(kvm_usable=usable)) is chosen


def test_kvm_demanded_in_vain_says_what_was_probed(
    config: Callable[..., Config], host: Callable[..., HostFacts]
) -> None:
    with pytest.raises(FailedPrecondition, match="neither vmx nor svm"):
        accelerator(config(accelerator="kvm"), host())


def test_the_agent_is_reached_over_vsock_where_the_host_has_it(
    config: Callable[..., Config], host: Callable[..., HostFacts]
) -> None:
    assert isinstance(agent_channel(config(), host(vhost_vsock=True), "/vm"), VsockChannel)
    assert isinstance(agent_channel(config(), host(), "/vm"), SerialChannel)
    assert isinstance(agent_channel(config(use_vsock="false"), host(vhost_vsock=True), "/vm"), SerialChannel)
    with pytest.raises(FailedPrecondition, match="vhost-vsock"):
        agent_channel(config(use_vsock="true"), host(), "/vm")


def test_an_operators_kernel_parameter_replaces_ours_of_the_same_name(
    config: Callable[..., Config], host: Callable[..., HostFacts], spec: Callable[..., OciSpec]
) -> None:
    plan = make(config(kernel_params='root=/dev/vda panic=5 dyndbg="file a +p"'), host(), spec())

    params = plan.vm.boot.kernel_params
    assert [p for p in params if p.startswith(("root=", "panic="))] == ["root=/dev/vda", "panic=5"]
    assert params[-1] == 'dyndbg="file a +p"'
    assert "agent.server_addr=serial:///dev/virtio-ports/org.pykata.agent.0" in params


def test_an_unclosed_quote_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="double quote"):
        split_params('a "b')


@pytest.mark.parametrize(
    ("qemu", "error", "named"),
    [
        ({"kernel": ""}, InvalidArgument, "kernel"),
        ({"image": "", "initrd": ""}, InvalidArgument, "neither image nor initrd"),
        ({"shared_fs": "virtio-9p"}, FailedPrecondition, "shared_fs"),
    ],
)
def test_a_configuration_that_cannot_boot_is_named(
    config: Callable[..., Config],
    host: Callable[..., HostFacts],
    spec: Callable[..., OciSpec],
    qemu: dict[str, str],
    error: type[ShimError],
    named: str,
) -> None:
    with pytest.raises(error, match=named):
        make(config(**qemu), host(), spec())


@pytest.mark.parametrize(
    ("namespaces", "path"),
    [
        ([], None),
        ([{"type": "network"}], None),
        ([{"type": "network", "path": "/run/netns/x"}], "/run/netns/x"),
        ([{"type": "network", "path": "/proc/0/ns/net"}], None),
    ],
)
def test_only_a_named_network_namespace_is_joined(
    config: Callable[..., Config],
    host: Callable[..., HostFacts],
    spec: Callable[..., OciSpec],
    namespaces: list[dict[str, str]],
    path: str | None,
) -> None:
    assert make(config(), host(), spec(linux={"namespaces": namespaces})).netns_path == path


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ([], 64 << 20),
        *((["size=128m"], 128 << 20), (["size=65536k"], 64 << 20), (["size=5"], 5), (["size=2G"], 2 << 30)),
        *(([f"size={no_size}"], 64 << 20) for no_size in ("", "m", "-1", "1T", "50%", "1m2m", "\u0665", "1" * 13)),
    ],
)
def test_the_shared_memory_of_the_spec_decides_the_guests(
    config: Callable[..., Config],
    host: Callable[..., HostFacts],
    spec: Callable[..., OciSpec],
    options: list[str],
    size: int,
) -> None:
    mounts = [{"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": options}]

    storages = make(config(), host(), spec(mounts=mounts)).guest.storages

    assert f"size={size}" in storages[1].options


def test_memory_is_shared_for_whoever_works_on_it(
    config: Callable[..., Config], host: Callable[..., HostFacts], spec: Callable[..., OciSpec]
) -> None:
    assert make(config(), host(), spec()).vm.memory.backing == "shared-memfd"
    assert make(config(enable_hugepages=True), host(), spec()).vm.memory.backing == "hugepages"
    alone = {"shared_fs": "none"}
    assert make(config(**alone), host(), spec()).vm.memory.backing == "private"
    assert make(config(**alone, enable_vhost_user_store=True), host(), spec()).vm.memory.backing == "shared-memfd"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param("web-0", "web-0", id="as given"),
        pytest.param("", "s1", id="none: the sandbox's id"),
        pytest.param("x" * 80, "x" * 64, id="longer than the kernel takes"),
    ],
)
def test_the_sandbox_always_has_a_host_name(
    config: Callable[..., Config],
    host: Callable[..., HostFacts],
    spec: Callable[..., OciSpec],
    given: str,
    name: str,
) -> None:
    assert make(config(), host(), spec(hostname=given)).guest.hostname == name


def test_sysctls_that_are_no_texts_are_refused(
    config: Callable[..., Config], host: Callable[..., HostFacts], spec: Callable[..., OciSpec]
) -> None:
    with pytest.raises(InvalidArgument, match="sysctl"):
        make(config(), host(), spec(linux={"sysctl": {"net.core.somaxconn": 1}}))
