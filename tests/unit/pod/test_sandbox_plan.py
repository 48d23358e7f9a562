"""Decisions of the sandbox plan, and the integrity of the guest's root image."""

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import kernel_command_line
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.oci import ContainerKind
from pyshim.model.plans import SandboxPlan
from pyshim.model.vm import MemoryBacking, SerialChannel, VhostUserVsockChannel, VsockChannel, split_params
from pyshim.pod.plan.guest_sandbox import dns_lines, resolv_conf
from pyshim.pod.plan.sandbox import EMULATED_BOOT_S, KVM_BOOT_S, accelerator, agent_channel
from tests.fakes.inputs import config, configured, host, spec
from tests.fakes.sandbox_plans import planned


@pytest.mark.parametrize(
    ("wanted", "usable", "chosen"),
    [
        ("auto", True, Accelerator.KVM),
        ("auto", False, Accelerator.TCG),
        ("tcg", True, Accelerator.TCG),
        ("kvm", True, Accelerator.KVM),
    ],
)
def test_the_accelerator_is_detected_unless_demanded(wanted: str, usable: bool, chosen: Accelerator) -> None:
    assert accelerator(config(accelerator=wanted), host(kvm_usable=usable)) is chosen


def test_kvm_that_is_configured_and_not_usable_is_refused_with_the_reason() -> None:
    with pytest.raises(FailedPrecondition, match="neither vmx nor svm"):
        accelerator(config(accelerator="kvm"), host())


def test_the_agent_is_reached_over_vsock_where_the_host_has_it() -> None:
    assert isinstance(agent_channel(config(), host(vhost_vsock=True), "/vm"), VsockChannel)
    assert isinstance(agent_channel(config(), host(), "/vm"), SerialChannel)
    assert isinstance(agent_channel(config(agent_channel="serial"), host(vhost_vsock=True), "/vm"), SerialChannel)
    with pytest.raises(FailedPrecondition, match="vhost-vsock"):
        agent_channel(config(agent_channel="vhost-vsock"), host(), "/vm")


@pytest.mark.parametrize("shared_fs", ["virtio-fs", "none"])
def test_a_vsock_program_shares_the_guests_memory_and_leaves_the_agent_on_its_usual_port(shared_fs: str) -> None:
    wanted = config(agent_channel="vhost-user", vhost_user_vsock_daemon="/opt/vsock", shared_fs=shared_fs)

    vm = planned(wanted, host(vhost_vsock=True), spec()).vm

    assert vm.agent_channel == VhostUserVsockChannel(
        port=1024,
        program="/opt/vsock",
        device_path="/run/vc/vm/s1/vsock/device.sock",
        socket_path="/run/vc/vm/s1/vsock/vsock.sock",
    )
    assert vm.memory.backing is MemoryBacking.SHARED_MEMFD
    assert [param for param in vm.boot.kernel_params if param.startswith("agent.server_addr")] == []


def test_an_operators_kernel_parameter_replaces_ours_of_the_same_name() -> None:
    plan = planned(config(kernel_params='root=/dev/vda panic=5 dyndbg="file a +p"'), host(), spec())

    params = plan.vm.boot.kernel_params
    assert [p for p in params if p.startswith(("root=", "panic="))] == ["root=/dev/vda", "panic=5"]
    assert params[-1] == 'dyndbg="file a +p"'
    assert "agent.server_addr=serial:///dev/virtio-ports/org.pykata.agent.0" in params


def test_an_unclosed_quote_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="double quote"):
        split_params('a "b')


@pytest.mark.parametrize(
    ("qemu", "named"), [({"kernel": ""}, "kernel"), ({"image": "", "initrd": ""}, "neither image nor initrd")]
)
def test_a_configuration_that_cannot_boot_is_named(qemu: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        planned(config(**qemu), host(), spec())


@pytest.mark.parametrize(
    ("namespaces", "path"),
    [
        ([], None),
        ([{"type": "network"}], "/run/netns/pyshim-s1"),
        ([{"type": "network", "path": "/run/netns/x"}], "/run/netns/x"),
        ([{"type": "network", "path": "/proc/0/ns/net"}], "/run/netns/pyshim-s1"),
    ],
)
def test_a_named_network_namespace_is_joined_and_one_without_a_path_is_the_sandboxs_own(
    namespaces: list[dict[str, str]], path: str | None
) -> None:
    assert planned(config(), host(), spec(linux={"namespaces": namespaces})).netns_path == path


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ([], 64 << 20),
        *((["size=128m"], 128 << 20), (["size=65536k"], 64 << 20), (["size=5"], 5), (["size=2G"], 2 << 30)),
        *(([f"size={no_size}"], 64 << 20) for no_size in ("", "m", "-1", "1T", "50%", "1m2m", "\u0665", "1" * 13)),
    ],
)
def test_the_size_of_dev_shm_is_that_of_the_spec(options: list[str], size: int) -> None:
    mounts = [{"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": options}]

    storages = planned(config(), host(), spec(mounts=mounts)).guest.storages

    assert f"size={size}" in storages[1].options


def test_memory_is_shared_where_another_process_works_on_it() -> None:
    assert planned(config(), host(), spec()).vm.memory.backing == "shared-memfd"
    assert planned(config(enable_hugepages=True), host(), spec()).vm.memory.backing == "hugepages"
    alone = {"shared_fs": "none"}
    assert planned(config(**alone), host(), spec()).vm.memory.backing == "private"
    assert planned(config(**alone, enable_vhost_user_store=True), host(), spec()).vm.memory.backing == "shared-memfd"


@pytest.mark.parametrize("asked", [True, False])
def test_a_guest_reports_its_free_pages_where_the_configuration_asks_for_it(asked: bool) -> None:
    vm = planned(config(reclaim_guest_freed_memory=asked), host(), spec()).vm

    assert vm.memory.reclaim is asked


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param("web-0", "web-0", id="as given"),
        pytest.param("", "s1", id="none: the sandbox's id"),
        pytest.param("x" * 80, "x" * 64, id="longer than the kernel takes"),
    ],
)
def test_the_sandbox_always_has_a_host_name(given: str, name: str) -> None:
    assert planned(config(), host(), spec(hostname=given)).guest.hostname == name


@pytest.mark.parametrize(
    ("given", "name"),
    [pytest.param("", "node-7", id="none: the node's"), pytest.param("web-0", "web-0", id="as given")],
)
def test_a_sandbox_on_the_hosts_network_has_the_nodes_host_name_unless_it_has_one(given: str, name: str) -> None:
    """containerd writes the same name into such a pod's /etc/hostname and HOSTNAME."""
    asked = spec(hostname=given, linux={"namespaces": [{"type": "mount"}, {"type": "ipc"}]})
    allowing = configured({"kernel": "/k", "image": "/i", "rootfs_type": "erofs"}, {"allow_host_network": True})

    assert planned(allowing, host(hostname="node-7"), asked).guest.hostname == name


@pytest.mark.parametrize("given", [{"net.core.somaxconn": 1}, ["net.core.somaxconn"], "net.core.somaxconn=1", 1, True])
def test_sysctls_that_are_not_strings_are_refused(given: object) -> None:
    with pytest.raises(InvalidArgument, match="sysctl"):
        planned(config(), host(), spec(linux={"sysctl": given}))


@pytest.mark.parametrize(
    ("kvm_usable", "dial_timeout", "seconds"),
    [(True, 3, 3.0), (False, 3, EMULATED_BOOT_S), (False, KVM_BOOT_S, KVM_BOOT_S)],
)
def test_an_emulated_guest_has_time_to_boot_where_the_file_is_written_for_kvm(
    kvm_usable: bool, dial_timeout: float, seconds: float
) -> None:
    asked = replace(config(), agent=replace(config().agent, dial_timeout_s=dial_timeout))

    assert planned(asked, host(kvm_usable=kvm_usable), spec()).agent_timeout_s == seconds


def test_the_agent_waits_for_a_device_as_long_as_the_file_says_unless_the_kernel_line_does() -> None:
    def words(asked: Config) -> list[str]:
        params = planned(asked, host(), spec()).vm.boot.kernel_params
        return [param for param in params if param.startswith("agent.hotplug_timeout")]

    asked = replace(config(), agent=replace(config().agent, hotplug_timeout_s=90))

    assert words(asked) == ["agent.hotplug_timeout=90"]
    assert words(config(kernel_params="agent.hotplug_timeout=5")) == ["agent.hotplug_timeout=5"]


@pytest.mark.parametrize("traced", [True, False])
def test_the_agent_is_traced_where_its_own_key_says_so(traced: bool) -> None:
    asked = replace(config(), agent=replace(config().agent, enable_tracing=traced))

    assert ("agent.trace=true" in planned(asked, host(), spec()).vm.boot.kernel_params) is traced


def test_qemu_has_the_time_that_the_file_gives_it() -> None:
    assert planned(config(), host(), spec()).vm.start_timeout_s == 60
    assert planned(config(start_timeout=7), host(), spec()).vm.start_timeout_s == 7


def test_the_guest_gets_its_hooks_and_the_pods_name_servers() -> None:
    lines = dns_lines(b"nameserver 10.0.0.10\n\nsearch a.svc b\noptions ndots:5")

    guest = planned(config(guest_hook_path="/usr/share/hooks"), host(), spec(), dns=lines).guest

    assert guest.dns == ("nameserver 10.0.0.10", "search a.svc b", "options ndots:5")
    assert guest.guest_hook_path == "/usr/share/hooks"


@pytest.mark.parametrize(
    ("mounts", "path"),
    [
        ([], ""),
        ([{"destination": "/etc/resolv.conf", "type": "bind", "source": "/run/p/resolv.conf"}], "/run/p/resolv.conf"),
        ([{"destination": "/etc/resolv.conf", "type": "tmpfs", "source": "tmpfs"}], ""),
    ],
)
def test_the_sandboxes_resolv_conf_is_the_one_bound_there(mounts: list[dict[str, str]], path: str) -> None:
    assert resolv_conf(spec(mounts=mounts)) == path


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("kind", "asked_for"),
    [
        (ContainerKind.POD_SANDBOX, "hostNetwork is true"),
        (ContainerKind.SINGLE_CONTAINER, "the spec is for the host's network"),
    ],
)
@pytest.mark.parametrize(
    "on_hosts_network",
    [
        pytest.param({"linux": {"namespaces": [{"type": "mount"}, {"type": "ipc"}]}}, id="containerd"),
        pytest.param(
            {
                "linux": {"namespaces": [{"type": "network", "path": "/run/crio/ns/netns/1"}]},
                "annotations": {
                    "io.kubernetes.cri-o.ContainerType": "sandbox",
                    "io.kubernetes.cri-o.HostNetwork": "true",
                },
            },
            id="cri-o",
        ),
    ],
)
def test_a_sandbox_on_the_hosts_network_is_refused_unless_a_key_allows_it(
    kind: ContainerKind, asked_for: str, allowed: bool, on_hosts_network: dict[str, object]
) -> None:
    asked = spec(**on_hosts_network)
    config = configured({"kernel": "/k", "image": "/i", "rootfs_type": "erofs"}, {"allow_host_network": allowed})

    def plan() -> SandboxPlan:
        return planned(config, host(), asked, kind=kind)

    if allowed:
        assert plan().netns_path is None
    else:
        with pytest.raises(InvalidArgument, match=rf"{asked_for}.*hint: allow_host_network = true"):
            plan()


PARTS = {
    "root_hash": "ab" * 32,
    "salt": "cd" * 32,
    "data_blocks": "100",
    "data_block_size": "4096",
    "hash_block_size": "4096",
}


def text(**changes: str) -> str:
    return ",".join(f"{key}={value}" for key, value in {**PARTS, **changes}.items() if value)


def test_the_root_is_checked_block_by_block_and_the_line_can_be_parsed() -> None:
    keys = {"kernel_verity_params": text(), "disable_image_nvdimm": True, "rootfs_type": "ext4"}

    params = planned(config(**keys), host(), spec()).vm.boot.kernel_params

    line = kernel_command_line(params)
    wanted = (
        'dm-mod.create="dm-verity,,,ro,0 800 verity 1 /dev/vda1 /dev/vda2 4096 4096 100 0 sha256 '
        f'{PARTS["root_hash"]} {PARTS["salt"]}" '
        "root=/dev/dm-0 rootfstype=ext4 rootflags=data=ordered,errors=remount-ro ro"
    )
    assert wanted in line
    assert "dax" not in line


def test_a_root_in_persistent_memory_has_its_own_device_names() -> None:
    line = kernel_command_line(planned(config(kernel_verity_params=text()), host(), spec()).vm.boot.kernel_params)

    assert "verity 1 /dev/pmem0p1 /dev/pmem0p2" in line
    assert "dax" not in line


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (text(salt=""), "salt is missing"),
        (text(root_hash="xy"), "root_hash = 'xy' is not hexadecimal"),
        (text(root_hash="abc"), "root_hash = 'abc' is not hexadecimal"),
        (text(data_blocks="0"), "data_blocks = '0'"),
        (text(data_blocks="-1"), "data_blocks = '-1'"),
        (text(data_block_size="1000"), "data_block_size = 1000 is not a multiple of 512"),
        (text(data_blocks="9" * 18, data_block_size="9" * 15 + "000"), "data_block_size"),
        (text() + ",salt=00", "salt is given twice"),
        ("nonsense", "'nonsense' is not one of"),
        (text() + ",x=1", "'x=1' is not one of"),
    ],
)
def test_wrong_verity_parameters_are_refused_by_name(params: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match="read kernel_verity_params: ") as caught:
        planned(config(kernel_verity_params=params), host(), spec())

    assert named in str(caught.value)


def extension(**changes: str) -> dict[str, str]:
    return {"name": "coco", "path": "/images/coco.img", "verity_params": "", **changes}


def test_an_extension_is_a_disk_by_its_name_and_a_parameter_that_has_the_guest_mount_it() -> None:
    images = [extension(verity_params=text()), extension(name="gpu", path="/images/gpu.img")]

    vm = planned(config(guest_extension_images=images), host(), spec()).vm

    assert [(disk.name, disk.path) for disk in vm.extensions] == [
        ("coco", "/images/coco.img"),
        ("gpu", "/images/gpu.img"),
    ]
    params = vm.boot.kernel_params
    assert f"kata.extension.coco.verity_params={text()}" in params
    assert "kata.extension.gpu.verity_params" in params


def test_a_mistake_in_an_extensions_verity_is_named() -> None:
    images = [extension(verity_params="root_hash=12")]

    with pytest.raises(InvalidArgument, match="verity_params in guest_extension_images of 'coco': salt is missing"):
        planned(config(guest_extension_images=images), host(), spec())


@pytest.mark.parametrize(
    ("cdh_s", "launch_s", "params"),
    [(50.0, 6.0, set()), (0.5, 15.0, {"agent.cdh_api_timeout=1", "agent.launch_process_timeout=15"})],
)
def test_the_agent_gets_timeouts_that_are_not_its_defaults(cdh_s: float, launch_s: float, params: set[str]) -> None:
    asked = config()
    agent = replace(asked.agent, cdh_api_timeout_s=cdh_s, launch_process_timeout_s=launch_s)

    params_of_kernel = planned(replace(asked, agent=agent), host(), spec()).vm.boot.kernel_params

    assert {param for param in params_of_kernel if "_timeout=" in param and "hotplug" not in param} == params
