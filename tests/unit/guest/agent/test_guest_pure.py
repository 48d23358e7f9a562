"""The guest agent's pure parts: spec translation, option words, paths, netlink bytes, numbers of a cgroup."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from guest.agent import settings
from guest.agent.container import cgroup, spec, users
from guest.agent.errors import AgentError, InvalidArgument
from guest.agent.net import links, netlink
from guest.agent.storage import block, devices, files, mounts, ownership, table, watch
from guest.agent.storage import syscalls as sys
from guest.agent.transport import find_port
from guest.agent.wire.codec import Message

M = Message


def a_spec(**linux: Any) -> Message:
    return M(
        "Spec",
        Version="1.1.0",
        Process=M("Process", Args=["a"], Cwd="/w", User=M("User", UID=3, GID=4)),
        Root=M("Root", Path="/r"),
        Linux=M("Linux", **linux),
    )


def config_of(message: Message, **fields: Any) -> Any:
    given: dict[str, Any] = {"rootfs": "/b/rootfs", "cgroup": "/g", "namespace_paths": {"pid": ""}, "hooks": {}}
    given |= {"online_cpus": "0-3", "limits_devices": True}
    return spec.oci_config(message, **(given | fields))


# -- spec ------------------------------------------------------------------------------------------------------------


def test_the_bundles_root_and_cgroup_replace_the_specs() -> None:
    config = config_of(a_spec(CgroupsPath="/host/path"))

    assert config["root"] == {"path": "/b/rootfs", "readonly": False}
    assert config["linux"]["cgroupsPath"] == "/g"
    assert config["ociVersion"] == "1.1.0"


def test_namespaces_lose_host_paths_and_network_and_get_the_sandboxs() -> None:
    given = [
        M("LinuxNamespace", Type=kind, Path=f"/proc/1/ns/{kind}") for kind in ("network", "ipc", "uts", "mount", "pid")
    ]

    config = config_of(a_spec(Namespaces=given), namespace_paths={"pid": "", "ipc": "/run/ipc", "uts": "/run/uts"})

    assert config["linux"]["namespaces"] == [
        {"type": "mount"},
        {"type": "pid"},
        {"type": "cgroup"},
        {"type": "ipc", "path": "/run/ipc"},
        {"type": "uts", "path": "/run/uts"},
    ]


def test_a_shared_pid_namespace_is_joined() -> None:
    config = config_of(a_spec(), namespace_paths={"pid": "/proc/9/ns/pid"})

    assert {"type": "pid", "path": "/proc/9/ns/pid"} in config["linux"]["namespaces"]


@pytest.mark.parametrize(("kinds", "has_hostname"), [(["uts"], True), ([], False)], ids=["own uts", "guest's uts"])
def test_a_hostname_is_set_only_where_it_is_not_the_guests(kinds: list[str], has_hostname: bool) -> None:
    message = a_spec(Namespaces=[M("LinuxNamespace", Type=kind) for kind in kinds])
    message._values["Hostname"] = "h"

    assert ("hostname" in config_of(message)) is has_hostname


def test_annotations_that_give_crun_orders_are_dropped() -> None:
    message = a_spec()
    message._values["Annotations"] = {"run.oci.hooks.stdout": "/etc/x", "io.kubernetes.x": "y"}

    assert config_of(message)["annotations"] == {"io.kubernetes.x": "y"}


def test_host_security_labels_are_dropped() -> None:
    process = M("Process", Args=["a"], ApparmorProfile="docker-default", SelinuxLabel="x:y:z")

    assert not {"apparmorProfile", "selinuxLabel"} & set(spec.oci_process(process))


def test_limits_without_a_file_in_cgroup_v2_and_zeros_are_left_out() -> None:
    resources = M(
        "LinuxResources",
        Memory=M("LinuxMemory", Limit=100, Swap=-1, Kernel=5, Swappiness=60, DisableOOMKiller=True),
        CPU=M("LinuxCPU", Shares=2, RealtimeRuntime=5, Cpus="2-9"),
        Network=M("LinuxNetwork", ClassID=4),
    )

    assert spec.oci_resources(resources, "0-3") == {
        "memory": {"limit": 100, "swap": -1},
        "cpu": {"shares": 2, "cpus": "2,3"},
    }


def test_a_cpuset_the_guest_has_nothing_of_is_left_out() -> None:
    assert spec.oci_resources(M("LinuxResources", CPU=M("LinuxCPU", Cpus="8-9")), "0-3") == {}


def test_without_device_rules_only_the_specs_devices_are_allowed() -> None:
    device = M("LinuxDevice", Path="/dev/x", Type="b", Major=254, Minor=16)

    rules = config_of(a_spec(Devices=[device]))["linux"]["resources"]["devices"]

    assert rules == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "b", "major": 254, "minor": 16, "access": "rwm"},
    ]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"Allow": True, "Access": "rwm"}, {"allow": True, "type": "a", "access": "rwm"}),
        ({"Allow": True, "Type": "a", "Major": -1, "Minor": -1}, {"allow": True, "type": "a", "access": "rwm"}),
        (
            {"Allow": True, "Type": "c", "Major": 1, "Minor": 3, "Access": "r"},
            {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "r"},
        ),
        (
            {"Allow": True, "Type": "c", "Major": 136, "Minor": -1, "Access": "rw"},
            {"allow": True, "type": "c", "major": 136, "access": "rw"},
        ),
        (
            {"Allow": False, "Type": "b", "Major": 8, "Minor": 0, "Access": "m"},
            {"allow": False, "type": "b", "major": 8, "minor": 0, "access": "m"},
        ),
    ],
    ids=["all", "any by -1", "one", "any minor", "minor 0"],
)
def test_a_device_rule_keeps_its_meaning(rule: dict[str, Any], expected: dict[str, Any]) -> None:
    message = a_spec(Resources=M("LinuxResources", Devices=[M("LinuxDeviceCgroup", **rule)]))

    assert config_of(message)["linux"]["resources"]["devices"] == [expected]


def test_seccomp_keeps_arguments_and_tells_errno_zero_from_none() -> None:
    argument = M("LinuxSeccompArg", Index=1, Value=2, ValueTwo=3, Op="SCMP_CMP_EQ")
    rules = [
        M("LinuxSyscall", Names=["x"], Action="SCMP_ACT_ERRNO", errnoret=0, Args=[argument]),
        M("LinuxSyscall", Names=["y"], Action="SCMP_ACT_ALLOW"),
    ]

    found = config_of(a_spec(Seccomp=M("LinuxSeccomp", DefaultAction="SCMP_ACT_LOG", Syscalls=rules)))["linux"][
        "seccomp"
    ]

    assert found["syscalls"][0]["errnoRet"] == 0
    assert found["syscalls"][0]["args"] == [{"index": 1, "value": 2, "valueTwo": 3, "op": "SCMP_CMP_EQ"}]
    assert "errnoRet" not in found["syscalls"][1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "/cid"),
        ("/", "/cid"),
        ("/kubepods/pod1/c", "/kubepods/pod1/c"),
        ("relative/c", "/relative/c"),
        ("/../../x", "/x"),
        ("/a/./b/..", "/a/b"),
        ("system.slice:crio:abc", "/system.slice/crio-abc.scope"),
        (
            "kubepods-burstable-pod1.slice:cri-containerd:abc",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope",
        ),
        ("::name", "/name"),
    ],
)
def test_a_cgroup_path_stays_below_the_root(path: str, expected: str) -> None:
    assert spec.guest_cgroup(path, "cid") == expected


@pytest.mark.parametrize(("text", "numbers"), [("", set()), ("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("3-3\n", {3})])
def test_cpu_lists_are_read(text: str, numbers: set[int]) -> None:
    assert spec.cpu_set(text) == numbers


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-x", "0-99999999", "0-99999"])
def test_a_cpu_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        spec.cpu_set(text)


# -- users -----------------------------------------------------------------------------------------------------------


def test_a_passwd_that_is_a_symlink_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("app:x:77:88::/:/bin/sh\n")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").symlink_to(outside)
    user = M("User")

    with pytest.raises(InvalidArgument, match="'app'"):
        users.apply_string_user(user, M("StringUser", uid="app"), str(root))


def test_numbers_need_no_passwd_and_groups_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("wheel:x:10:\n")
    user = M("User", UID=1, AdditionalGids=[5])

    users.apply_string_user(user, M("StringUser", uid="99", gid="wheel", additionalGids=["wheel"]), str(tmp_path))

    assert (user.UID, user.GID, user.AdditionalGids) == (99, 10, [5, 10])


# -- mount options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags", "propagation", "data"),
    [
        (["ro", "nosuid"], sys.MS_RDONLY | sys.MS_NOSUID, 0, ""),
        (["ro", "rw"], 0, 0, ""),
        (["rbind", "rprivate"], sys.MS_BIND | sys.MS_REC, sys.MS_PRIVATE | sys.MS_REC, ""),
        (["size=1m,mode=755", "noexec"], sys.MS_NOEXEC, 0, "size=1m,mode=755"),
        (["", "defaults"], 0, 0, ""),
    ],
)
def test_option_words_become_flags_propagation_and_data(
    words: list[str], flags: int, propagation: int, data: str
) -> None:
    options = mounts.MountOptions(words)

    assert (options.flags, options.propagation, options.data) == (flags, propagation, data)


def test_more_mount_data_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="4096 bytes"):
        mounts.MountOptions(["lowerdir=" + "x" * 4087])


def test_hugepage_options_need_size_and_page_size() -> None:
    for words in ([], ["pagesize=0,size=1"], ["pagesize=x,size=1"]):
        with pytest.raises(InvalidArgument):
            table.allocate_hugepages(words)


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("02", ("00", ["02.0"])),
        ("02/01", ("00", ["02.0", "01.0"])),
        ("1f.7", ("00", ["1f.7"])),
        ("02/00/01", ("00", ["02.0", "00.0", "01.0"])),
        ("20/00/02", ("20", ["00.0", "02.0"])),
    ],
)
def test_pci_paths_are_read(path: str, expected: tuple[str, list[str]]) -> None:
    assert block.pci_slots(path) == expected


@pytest.mark.parametrize("path", ["", "/", "20", "02/", "zz", "02.8", "02.", "../02", "+2", "02/0x1"])
def test_a_pci_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="PCI path"):
        block.pci_slots(path)


def test_a_function_behind_a_bridge_is_found_by_its_secondary_bus(tmp_path: Path) -> None:
    function = tmp_path / "devices/pci0000:00/0000:00:02.0/0000:05:01.0"
    function.mkdir(parents=True)
    (tmp_path / "devices/pci0000:00/0000:00:02.0/pci_bus/0000:05").mkdir(parents=True)

    assert block.pci_folder(str(tmp_path), "02/01") == str(function)
    assert block.pci_folder(str(tmp_path), "02/02") is None
    assert block.pci_folder(str(tmp_path), "03/01") is None


def test_an_interface_is_found_under_its_virtio_device(tmp_path: Path) -> None:
    (tmp_path / "virtio3/net/eth7").mkdir(parents=True)

    assert links.interface_of(str(tmp_path)) == "eth7"
    assert links.interface_of(str(tmp_path / "none")) is None


def test_device_numbers_and_their_cgroup_rules_change_together() -> None:
    message = a_spec(
        Devices=[M("LinuxDevice", Path="/dev/x", Type="b", Major=8, Minor=1)],
        Resources=M(
            "LinuxResources",
            Devices=[
                M("LinuxDeviceCgroup", Allow=True, Type="b", Major=8, Minor=1),
                M("LinuxDeviceCgroup", Allow=True, Type="c", Major=8, Minor=1),
            ],
        ),
    )

    devices.update_spec(message, {"/dev/x": ("b", 254, 16)})

    assert (message.Linux.Devices[0].Major, message.Linux.Devices[0].Minor) == (254, 16)
    assert [(one.Type, one.Major, one.Minor) for one in message.Linux.Resources.Devices] == [
        ("b", 254, 16),
        ("c", 8, 1),
    ]


def test_a_device_the_spec_does_not_have_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'/dev/y'"):
        devices.update_spec(a_spec(), {"/dev/y": ("b", 1, 1)})


# -- files -----------------------------------------------------------------------------------------------------------


def chunk(share: Path, path: str, data: bytes = b"x", **fields: Any) -> Message:
    values = {"file_size": len(data), "file_mode": 0o100644, "dir_mode": 0o755, "uid": os.getuid(), "gid": os.getgid()}
    return M("CopyFileRequest", path=f"{share}/{path}", data=data, **(values | fields))


@pytest.mark.parametrize("link", ["/etc", "../../outside", "../share/../outside"])
def test_a_symlink_that_leads_out_is_not_followed(tmp_path: Path, link: str) -> None:
    share, outside = tmp_path / "share", tmp_path / "outside"
    share.mkdir()
    outside.mkdir()
    (share / "link").symlink_to(link)

    with pytest.raises(InvalidArgument):
        files.copy_file(chunk(share, "link/new"), str(share))

    assert list(outside.iterdir()) == []
    assert not Path("/etc/new").exists()


def test_a_symlink_that_stays_inside_is_followed_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    files.copy_file(chunk(tmp_path, "link/file"), str(tmp_path))

    assert (tmp_path / "real/file").read_bytes() == b"x"


def test_a_symlink_in_the_files_place_is_replaced_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    share = tmp_path / "share"
    share.mkdir()
    (share / "file").symlink_to(victim)

    files.copy_file(chunk(share, "file"), str(share))

    assert victim.read_text() == "kept"
    assert not (share / "file").is_symlink()


def test_directories_keep_their_content_and_links_and_files_replace_each_other(tmp_path: Path) -> None:
    files.copy_file(chunk(tmp_path, "d", b"", file_mode=0o040750), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/f"), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d", b"", file_mode=0o040700), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/l", b"../target", file_mode=0o120777, file_size=9), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/l", b"now a file"), str(tmp_path))
    files.copy_file(chunk(tmp_path, "e/l", b"link", file_mode=0o120777), str(tmp_path))

    assert (tmp_path / "d/f").read_bytes() == b"x"
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "d/l").read_bytes() == b"now a file"
    assert os.readlink(tmp_path / "e/l") == "link"


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": -1},
        {"file_size": -1},
        {"file_size": 0},
        {"offset": 5},
        {"file_mode": 0o020644},
        {"file_mode": 0o010644},
    ],
    ids=["offset", "size", "longer than size", "chunk past size", "device", "fifo"],
)
def test_a_copy_that_cannot_be_meant_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        files.copy_file(chunk(tmp_path, "f", **fields), str(tmp_path))

    assert not (tmp_path / "f").exists()


def test_removing_a_tree_does_not_follow_symlinks(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/link").symlink_to(outside)

    files.remove_tree(str(tree))

    assert not tree.exists()
    assert (outside / "kept").exists()


def test_a_copy_is_synchronized_by_difference_and_refuses_what_is_too_big(tmp_path: Path) -> None:
    source, copy = tmp_path / "s", tmp_path / "c"
    (source / "sub").mkdir(parents=True)
    (source / "sub/f").write_text("1")
    seen = watch.synchronize(str(source), str(copy), {})
    untouched = (copy / "sub/f").stat().st_ino
    (source / "g").write_text("2")

    seen = watch.synchronize(str(source), str(copy), seen)
    (source / "sub/f").unlink()
    (source / "sub").rmdir()
    seen = watch.synchronize(str(source), str(copy), seen)

    assert untouched
    assert sorted(path.name for path in copy.iterdir()) == ["g"]
    (source / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(watch.TooBig):
        watch.synchronize(str(source), str(copy), seen)
    assert sorted(path.name for path in copy.iterdir()) == ["g"]


@pytest.mark.root
def test_a_volumes_group_is_set_all_the_way_down_and_read_only_adds_no_write(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d/f").write_text("x")
    (tmp_path / "d/f").chmod(0o600)
    (tmp_path / "l").symlink_to("/nowhere")

    ownership.set_group(str(tmp_path), M("FSGroup", group_id=4242), read_only=True)

    modes = {path: (tmp_path / path).lstat() for path in ("d", "d/f", "l")}
    assert {found.st_gid for found in modes.values()} == {4242}
    assert modes["d"].st_mode & 0o7777 == 0o2750
    assert modes["d/f"].st_mode & 0o7777 == 0o640


# -- netlink ---------------------------------------------------------------------------------------------------------


def test_an_attribute_is_padded_but_its_length_is_not() -> None:
    assert netlink.attribute(3, b"eth0\0") == b"\x09\x00\x03\x00eth0\0\0\0\0"


def test_attributes_read_back_and_a_cut_one_ends_the_list() -> None:
    data = netlink.attribute(1, b"a") + netlink.attribute(2, b"bcd")

    assert netlink.parse_attributes(data) == {1: b"a", 2: b"bcd"}
    assert netlink.parse_attributes(data[:-3]) == {1: b"a"}
    assert netlink.parse_attributes(b"\x02\x00\x01\x00") == {}


def test_messages_in_a_datagram_are_told_apart() -> None:
    data = netlink.message(16, 5, 1, b"abc") + b"\0" + netlink.message(3, 0, 1, b"")

    found = [(kind, flags, body) for kind, flags, _serial, body in netlink.split(data)]
    assert found == [(16, 5, b"abc"), (3, 0, b"")]
    assert list(netlink.split(data[:10])) == []


def test_a_default_route_has_no_destination_and_a_gateway() -> None:
    body = links.route_body(M("Route", gateway="10.0.0.1", device="eth0"), 7)

    found = netlink.parse_attributes(body[netlink.ROUTE.size :])
    assert found == {netlink.RTA_OIF: b"\x07\0\0\0", netlink.RTA_GATEWAY: bytes([10, 0, 0, 1])}
    assert netlink.ROUTE.unpack_from(body)[:2] == (netlink.AF_INET, 0)


def test_a_route_of_mixed_families_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="address family"):
        links.route_body(M("Route", dest="fd00::/8", gateway="10.0.0.1"), 1)


@pytest.mark.parametrize("text", ["", "10.0.0", "10.0.0.256", "fd00::zz", "10.0.0.1 "])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        links.packed_ip(text)


# -- cgroup ----------------------------------------------------------------------------------------------------------


def test_cgroup_files_become_the_apis_statistics(tmp_path: Path) -> None:
    contents = {
        "cpu.stat": "usage_usec 1000\nuser_usec 700\nsystem_usec 300\nnr_periods 5\nthrottled_usec 40\n",
        "memory.current": "4096\n",
        "memory.max": "max\n",
        "memory.peak": "8192\n",
        "memory.stat": "anon 10\nfile 20\nbad line here\n",
        "memory.events": "low 0\nmax 3\noom_kill 1\n",
        "pids.current": "2\n",
        "pids.max": "max\n",
        "io.stat": "8:0 rbytes=100 wbytes=200 rios=3 wios=4 dbytes=0\nnonsense\n",
        "hugetlb.2MB.current": "2097152\n",
        "hugetlb.2MB.events": "max 1\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)

    stats = cgroup.cgroup_stats(str(tmp_path))

    assert stats.cpu_stats.cpu_usage.total_usage == 1_000_000
    assert stats.cpu_stats.throttling_data.throttled_time == 40_000
    assert (stats.memory_stats.usage.usage, stats.memory_stats.usage.max_usage) == (4096, 8192)
    assert stats.memory_stats.usage.limit == 2**64 - 1
    assert stats.memory_stats.stats == {"anon": 10, "file": 20}
    assert (stats.pids_stats.current, stats.pids_stats.limit) == (2, 0)
    entries = [(one.major, one.op, one.value) for one in stats.blkio_stats.io_service_bytes_recursive]
    assert entries == [(8, "Read", 100), (8, "Write", 200)]
    assert stats.hugetlb_stats["2MB"].usage == 2097152


def test_a_cgroup_that_is_gone_counts_zero(tmp_path: Path) -> None:
    stats = cgroup.cgroup_stats(str(tmp_path / "gone"))

    assert stats.memory_stats.usage.usage == 0
    assert stats.hugetlb_stats == {}


# -- settings and addresses ------------------------------------------------------------------------------------------


def test_settings_come_from_the_command_line_and_bad_ones_are_listed() -> None:
    words = "quiet agent.log=debug agent.server_addr=unix:///x agent.debug_console agent.hotplug_timeout=7".split()

    found = settings.parse([*words, "agent.container_pipe_size=lots", "agent.debug_console_vport=-1"])

    assert (found.log_level, found.server_addr, found.debug_console) == ("debug", "unix:///x", True)
    assert found.hotplug_timeout_s == 7
    assert found.problems == ["agent.container_pipe_size=lots", "agent.debug_console_vport=-1"]
    assert (found.container_pipe_size, found.debug_console_vport) == (262144, 1026)


def test_the_default_address_is_katas() -> None:
    assert settings.parse([]).server_addr == "vsock://-1:1024"


def test_a_port_node_is_taken_as_it_is_and_an_unknown_one_is_not_there(tmp_path: Path) -> None:
    node = tmp_path / "port"
    node.touch()

    assert find_port(str(node)) == str(node)
    assert find_port(str(tmp_path / "no.such.port")) is None


def test_every_error_has_a_code_that_is_a_status() -> None:
    kinds = AgentError.__subclasses__()

    assert {kind.code for kind in kinds} <= set(range(1, 17))
    assert len(kinds) >= 7
