"""The promises of a pod's specification to its containers: names, namespaces, files, users, privileges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Cri, Pod, Security, refusal

pytestmark = pytest.mark.vm


def test_hostname_and_dns_reach_every_container(cri: Cri) -> None:
    with cri.pod("web", hostname="web-0", dns=["192.0.2.53"]) as pod:
        for container in (pod.start(), pod.start()):
            assert container.sh("hostname; cat /etc/hostname") == "web-0\nweb-0\n"
            assert "nameserver 192.0.2.53" in container.sh("cat /etc/resolv.conf")


def test_dev_shm_is_shared_in_the_pod(pod: Pod) -> None:
    first, second = pod.start(), pod.start()

    first.sh("echo hello > /dev/shm/note")

    assert second.sh("cat /dev/shm/note") == "hello\n"
    assert "size=65536k" in second.sh("mount | grep /dev/shm")


def test_processes_are_each_containers_own_by_default(pod: Pod) -> None:
    first, second = pod.start("sleep", "1111"), pod.start("sleep", "2222")

    assert "1111" not in second.sh("ps")
    assert first.sh("cat /proc/1/cmdline").replace("\0", " ") == "sleep 1111 "


def test_processes_are_the_pods_when_it_shares_them(cri: Cri) -> None:
    with cri.pod(share_processes=True) as pod:
        first, second = pod.start("sleep", "1111"), pod.start("sleep", "2222")

        seen = second.sh("ps")
        assert "sleep 1111" in seen
        assert "sleep 2222" in seen
        assert "sleep 1111" not in second.sh("tr '\\0' ' ' < /proc/1/cmdline")
        first.stop(0)
        first.remove()
        third = pod.start("sleep", "3333")
        assert "sleep 3333" in second.sh("ps")
        assert "sleep 2222" in third.sh("ps")


def test_mount_namespaces_are_each_containers_own(pod: Pod) -> None:
    first, second = pod.start(), pod.start()

    first.sh("echo mine > /file")

    assert second.exec("cat", "/file").code != 0


def test_sysctls_of_the_pod_hold_in_its_containers(cri: Cri) -> None:
    wanted = {"net.ipv4.ip_unprivileged_port_start": "81", "kernel.shmmax": "1234567", "net.core.somaxconn": "77"}
    with cri.pod(sysctls=wanted) as pod:
        for container in (pod.start(), pod.start()):
            for name, value in wanted.items():
                assert container.sh(f"cat /proc/sys/{name.replace('.', '/')}").strip() == value


def test_an_unknown_sysctl_is_refused_by_its_name(cri: Cri) -> None:
    with cri.pod(sysctls={"net.ipv4.no_such_setting": "1"}) as pod:
        assert "no_such_setting" in refusal(pod.start)


@pytest.mark.parametrize(
    ("security", "expected"),
    [
        (Security(), "0 0 0"),
        (Security(run_as_user=pb.Int64Value(value=1234)), "1234 0 0"),
        (Security(run_as_user=pb.Int64Value(value=1234), run_as_group=pb.Int64Value(value=5678)), "1234 5678 5678"),
        (Security(run_as_username="alice"), "1000 1000 1000 50"),
        (Security(run_as_user=pb.Int64Value(value=7), supplemental_groups=[20, 30]), "7 0 0 20 30"),
    ],
    ids=["root", "user", "user-group", "username", "supplemental"],
)
def test_user_and_groups(pod: Pod, security: Security, expected: str) -> None:
    container = pod.start(security=security)

    assert container.sh("echo $(id -u) $(id -g) $(id -G)").strip() == expected


def test_an_exec_runs_as_the_containers_user(pod: Pod) -> None:
    container = pod.start(security=Security(run_as_user=pb.Int64Value(value=1234)))

    assert container.exec("id", "-u").out == "1234\n"


def _caps(container_sh: str) -> int:
    return int(container_sh.strip(), 16)


def test_capabilities_are_added_and_dropped(pod: Pod) -> None:
    net_admin, chown = 1 << 12, 1 << 0
    # containerd's "ALL" is what it has itself.
    (containerds,) = re.findall(r"CapEff:\t(\w+)", Path("/proc/self/status").read_text())
    read = "sed -n 's/CapEff:\\t//p' /proc/self/status"

    plain = _caps(pod.start().sh(read))
    added = _caps(pod.start(security=Security(capabilities=pb.Capability(add_capabilities=["NET_ADMIN"]))).sh(read))
    dropped = _caps(pod.start(security=Security(capabilities=pb.Capability(drop_capabilities=["CHOWN"]))).sh(read))
    none = _caps(pod.start(security=Security(capabilities=pb.Capability(drop_capabilities=["ALL"]))).sh(read))
    every = _caps(pod.start(security=Security(capabilities=pb.Capability(add_capabilities=["ALL"]))).sh(read))

    assert added == plain | net_admin
    assert dropped == plain & ~chown
    assert none == 0
    assert every == int(containerds, 16)


def test_a_read_only_root_takes_no_files_but_its_volumes_do(pod: Pod, scratch: Path) -> None:
    volume = pb.Mount(container_path="/data", host_path=str(scratch))
    container = pod.start(security=Security(readonly_rootfs=True), mounts=[volume])

    assert "Read-only file system" in container.exec("touch", "/file").err
    container.sh("echo kept > /data/file")
    assert (scratch / "file").read_text() == "kept\n"


def test_masked_and_read_only_paths(pod: Pod) -> None:
    security = Security(masked_paths=["/proc/kcore", "/sys/firmware"], readonly_paths=["/proc/sys"])
    container = pod.start(security=security)

    assert container.sh("cat /proc/kcore | wc -c; ls /sys/firmware | wc -l") == "0\n0\n"
    assert "Read-only" in container.exec("sh", "-c", "echo 1 > /proc/sys/kernel/panic").err


@pytest.mark.parametrize("wanted", [True, False])
def test_no_new_privileges(pod: Pod, wanted: bool) -> None:
    container = pod.start(security=Security(no_new_privs=wanted))

    assert container.sh("sed -n 's/NoNewPrivs:\\t//p' /proc/1/status").strip() == str(int(wanted))


_SECCOMP = "sed -n 's/Seccomp:\\t//p' /proc/1/status"


@pytest.mark.parametrize(
    ("profile", "mode"),
    [(pb.SecurityProfile.RuntimeDefault, "2"), (pb.SecurityProfile.Unconfined, "0")],
    ids=["runtime-default", "unconfined"],
)
def test_seccomp_holds_inside_the_guest(pod: Pod, profile: pb.SecurityProfile.ProfileType, mode: str) -> None:
    container = pod.start(security=Security(seccomp=pb.SecurityProfile(profile_type=profile)))

    assert container.sh(_SECCOMP).strip() == mode


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

        assert _caps(container.sh("sed -n 's/CapEff:\\t//p' /proc/self/status")) & (1 << 21)
        container.sh("echo 3 > /proc/sys/kernel/panic")
        container.sh("mkdir /mnt && mount -t tmpfs none /mnt")
        host_disks = {path.name for path in Path("/sys/class/block").iterdir()}
        assert not host_disks & set(container.sh("ls /dev").split())


def test_the_cgroup_limits_are_the_containers(pod: Pod) -> None:
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=64 << 20, cpu_quota=20000, cpu_period=100000)
    container = pod.start(resources=resources)

    assert container.sh("cat /sys/fs/cgroup/memory.max").strip() == str(64 << 20)
    assert container.sh("cat /sys/fs/cgroup/cpu.max").split() == ["20000", "100000"]


def test_limits_are_changed_while_it_runs(pod: Pod) -> None:
    container = pod.start(resources=pb.LinuxContainerResources(memory_limit_in_bytes=64 << 20))

    pod.cri.call(
        "UpdateContainerResources",
        container_id=container.id,
        linux=pb.LinuxContainerResources(memory_limit_in_bytes=96 << 20),
    )

    assert container.sh("cat /sys/fs/cgroup/memory.max").strip() == str(96 << 20)
