"""The promises of a pod's specification to its containers, beside those that critest asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Container, Cri, Pod, Security, refusal
from .framework.pod_python import start_python

pytestmark = pytest.mark.vm


def test_dev_shm_is_shared_in_the_pod(pod: Pod) -> None:
    first, second = pod.start(), pod.start()

    first.sh("echo hello > /dev/shm/note")

    assert second.sh("cat /dev/shm/note") == "hello\n"
    assert "size=65536k" in second.sh("mount | grep /dev/shm")


def test_mount_namespaces_are_each_containers_own(pod: Pod) -> None:
    first, second = pod.start(), pod.start()

    first.sh("echo mine > /file")

    assert second.exec("cat", "/file").code != 0


def test_an_unknown_sysctl_is_refused_by_its_name(cri: Cri) -> None:
    with cri.pod(sysctls={"net.ipv4.no_such_setting": "1"}) as pod:
        assert "no_such_setting" in refusal(pod.start)


def test_masked_and_read_only_paths(pod: Pod) -> None:
    security = Security(masked_paths=["/proc/kcore", "/sys/firmware"], readonly_paths=["/proc/sys"])
    container = pod.start(security=security)

    assert container.sh("cat /proc/kcore | wc -c; ls /sys/firmware | wc -l") == "0\n0\n"
    assert "Read-only" in container.exec("sh", "-c", "echo 1 > /proc/sys/kernel/panic").err


def test_a_local_seccomp_profile_denies_what_it_says_and_survives_unknown_calls(pod: Pod, scratch: Path) -> None:
    profile = scratch / "profile.json"
    profile.write_text(
        '{"defaultAction":"SCMP_ACT_ALLOW","syscalls":['
        '{"names":["mkdir","mkdirat","no_such_call_ever"],"action":"SCMP_ACT_ERRNO","errnoRet":38},'
        '{"names":["another_unknown_call"],"action":"SCMP_ACT_ERRNO"}]}'
    )
    local = pb.SecurityProfile(profile_type=pb.SecurityProfile.Localhost, localhost_ref=str(profile))
    container = pod.start(security=Security(seccomp=local))

    denied = container.exec("mkdir", "/tmp/directory")
    assert denied.code != 0
    assert "not implemented" in denied.err
    assert container.sh("touch /tmp/file && echo made") == "made\n"


def test_a_privileged_pod_is_privileged_in_its_guest_only(cri: Cri) -> None:
    """All capabilities and a writable /proc/sys, and none of the host's devices."""
    with cri.pod(privileged=True) as pod:
        container = pod.start(security=Security(privileged=True))

        effective = container.sh("sed -n 's/CapEff:\\t//p' /proc/self/status")
        assert int(effective, 16) & (1 << 21)
        container.sh("echo 3 > /proc/sys/kernel/panic")
        container.sh("mkdir /mnt && mount -t tmpfs none /mnt")
        host_disks = {path.name for path in Path("/sys/class/block").iterdir()}
        assert not host_disks & set(container.sh("ls /dev").split())
        assert container.sh("mknod /fuse c 10 229; exec 5<>/fuse && echo opened") == "opened\n"


@pytest.mark.parametrize("path", ["/dev/net/tun", "/dev/kmsg", "/dev/fuse"])
def test_a_device_of_the_guest_that_a_pod_mounts_can_be_opened(pod: Pod, path: str) -> None:
    container = pod.start(mounts=[pb.Mount(container_path=path, host_path=path)])

    assert container.sh(f"exec 5<{path} && echo opened") == "opened\n"


def test_another_device_of_the_guest_cannot_be_opened(pod: Pod) -> None:
    made = pod.start().exec("sh", "-c", "mknod /fuse c 10 229 && exec 5</fuse && echo opened")

    assert "not permitted" in made.err


def test_cgroup_files_of_the_specification_hold_in_the_guest(pod: Pod) -> None:
    files = {"memory.high": str(80 << 20), "pids.max": "50"}
    container = pod.start(resources=pb.LinuxContainerResources(memory_limit_in_bytes=100 << 20, unified=files))

    assert container.sh("cd /sys/fs/cgroup; cat memory.high pids.max") == f"{80 << 20}\n50\n"


def test_a_container_starts_with_the_cgroup_files_that_a_kubelet_sets_on_cgroup_v2(pod: Pod) -> None:
    """Those of each container, by Kubernetes 1.37 with and without its gate MemoryQoS."""
    files = {
        "memory.oom.group": "1",
        "memory.min": "0",
        "memory.low": "0",
        "memory.high": "max",
        "memory.swap.max": "0",
    }
    container = pod.start(resources=pb.LinuxContainerResources(memory_limit_in_bytes=100 << 20, unified=files))

    assert container.sh("cat /sys/fs/cgroup/memory.max") == f"{100 << 20}\n"


_RULES = (
    "-t raw -A OUTPUT -p udp --dport 53 -j CT --zone 1",
    "-t mangle -A PREROUTING -p tcp -m socket -j MARK --set-mark 1",
    "-t nat -A OUTPUT -p tcp -m owner --uid-owner 1337 -j REDIRECT --to-ports 15001",
    "-A INPUT -m limit --limit 5/min -j LOG",
    "-A INPUT -m recent --name probe --set",
)
"""Of a service mesh, a DNS proxy and rate limits. Each has modules of the guest's kernel beside those of iptables."""
_IPTABLES = Path("/usr/sbin/iptables-nft")


@pytest.fixture
def network_admin(pod: Pod) -> Container:
    """A container that may change its network, with the host's programs."""
    security = Security(capabilities=pb.Capability(add_capabilities=["NET_ADMIN", "NET_RAW"]))
    container = start_python(pod, "import time; time.sleep(10000)", security=security)
    container.sh("mkdir -p /run")
    return container


@pytest.mark.skipif(not _IPTABLES.exists(), reason=f"needs {_IPTABLES} (hint: apt install iptables)")
def test_rules_of_netfilter_are_added_in_the_guest(network_admin: Container) -> None:
    for rule in _RULES:
        network_admin.sh(f"{_IPTABLES} {rule}")
        network_admin.sh(f"{_IPTABLES} {rule.replace('-A', '-C')}")


def test_tunnels_of_the_guests_kernel_can_be_made(network_admin: Container) -> None:
    for kind in ("wireguard", "ipip remote 192.0.2.1"):
        network_admin.sh(f"/usr/bin/ip link add probe type {kind}; /usr/bin/ip link delete probe")


def test_resource_limits_are_those_of_containerds_unit(pod: Pod) -> None:
    """Of its init and of an exec, as with runc: the kernel's own for a guest's init are 1024 and 4096 files."""
    container = pod.start()
    read = "awk '/open files|processes|core file/ {print $(NF-2), $(NF-1)}'"

    assert container.sh(f"{read} /proc/1/limits /proc/self/limits").splitlines() == [
        *("unlimited unlimited", "unlimited unlimited", "1048576 1048576") * 2,
    ]


def test_limits_hold_and_are_changed_while_the_container_runs(pod: Pod) -> None:
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=64 << 20, cpu_quota=20000, cpu_period=100000)
    container = pod.start(resources=resources)
    read = "cd /sys/fs/cgroup; cat memory.max cpu.max"
    before = container.sh(read).split()

    more = pb.LinuxContainerResources(memory_limit_in_bytes=96 << 20)
    pod.cri.call("UpdateContainerResources", container_id=container.id, linux=more)

    assert before == [str(64 << 20), "20000", "100000"]
    assert container.sh(read).split()[0] == str(96 << 20)
