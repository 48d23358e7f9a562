"""Edits change an OCI spec: one by one, together, twice, and in another order."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_files import CountedText

from pyshim.cdi import ContainerEdits, DeviceNode, Hook, InjectionFailed, IntelRdt, Mount, NetDevice, inject
from pyshim.cdi.inject import HostNode, host_node

HOST = {
    "/dev/char": HostNode("c", 240, 7, 0o620),
    "/dev/block": HostNode("b", 8, 0, 0o660),
    "/dev/fifo": HostNode("p", 0, 0, 0o600),
}


def look_at(path: str) -> HostNode:
    if path not in HOST:
        raise InjectionFailed(f"look at device node '{path}': ENOENT (no such file or directory)")
    return HOST[path]


def injected(edits: ContainerEdits, spec: dict[str, Any] | None = None) -> dict[str, Any]:
    result = copy.deepcopy(spec or {})
    inject(result, edits, look_at=look_at)
    return result


def rule(kind: str, major: int, minor: int, access: str = "rwm") -> dict[str, Any]:
    return {"allow": True, "type": kind, "major": major, "minor": minor, "access": access}


def test_env_replaces_in_place_or_is_appended() -> None:
    spec = {"process": {"env": ["A=1", "B=2", "C=3"]}}

    result = injected(ContainerEdits(env=("B=new", "D=4", "D=5", "A=")), spec)

    assert result == {"process": {"env": ["A=", "B=new", "C=3", "D=5"]}}


@pytest.mark.parametrize(
    ("node", "device", "rules"),
    [
        (
            DeviceNode(path="/dev/char"),
            {"path": "/dev/char", "type": "c", "major": 240, "minor": 7, "fileMode": 0o620},
            [rule("c", 240, 7)],
        ),
        (
            DeviceNode(path="/dev/in", host_path="/dev/block", permissions="r"),
            {"path": "/dev/in", "type": "b", "major": 8, "minor": 0, "fileMode": 0o660},
            [rule("b", 8, 0, "r")],
        ),
        (
            DeviceNode(path="/dev/gone", type="c", major=1, minor=2),
            {"path": "/dev/gone", "type": "c", "major": 1, "minor": 2},
            [rule("c", 1, 2)],
        ),
        (
            DeviceNode(path="/dev/char", type="c", major=1, minor=2),
            {"path": "/dev/char", "type": "c", "major": 1, "minor": 2, "fileMode": 0o620},
            [rule("c", 1, 2)],
        ),
        (
            DeviceNode(path="/dev/gone", type="c", major=1, file_mode=0, uid=0, gid=0),
            {"path": "/dev/gone", "type": "c", "major": 1, "minor": 0, "fileMode": 0, "uid": 0, "gid": 0},
            [rule("c", 1, 0)],
        ),
        (DeviceNode(path="/dev/gone", type="p"), {"path": "/dev/gone", "type": "p"}, None),
        (DeviceNode(path="/dev/fifo"), {"path": "/dev/fifo", "type": "p", "fileMode": 0o600}, None),
        (
            DeviceNode(path="/dev/char", type="u", major=1, minor=2),
            {"path": "/dev/char", "type": "u", "major": 1, "minor": 2, "fileMode": 0o620},
            None,
        ),
        (
            DeviceNode(path="/dev/char", type="b", major=1, minor=2),
            {"path": "/dev/char", "type": "b", "major": 1, "minor": 2, "fileMode": 0o620},
            [rule("b", 1, 2)],
        ),
        (
            DeviceNode(path="/dev/char", permissions="none"),
            {"path": "/dev/char", "type": "c", "major": 240, "minor": 7, "fileMode": 0o620},
            [rule("c", 240, 7, "")],
        ),
    ],
    ids=lambda value: getattr(value, "path", None),
)
def test_device_nodes_are_filled_from_the_host(
    node: DeviceNode, device: dict[str, Any], rules: list[dict[str, Any]] | None
) -> None:
    linux = injected(ContainerEdits(device_nodes=(node,)))["linux"]

    assert linux["devices"] == [device]
    assert linux.get("resources", {}).get("devices") == rules


def test_device_nodes_belong_to_the_process_unless_they_say_otherwise() -> None:
    spec = {"process": {"user": {"uid": 1000, "gid": 0}}}
    nodes = (DeviceNode(path="/dev/char"), DeviceNode(path="/dev/block", uid=0, gid=6))

    devices = injected(ContainerEdits(device_nodes=nodes), spec)["linux"]["devices"]

    assert [(device.get("uid"), device.get("gid")) for device in devices] == [(1000, None), (0, 6)]


def test_a_device_of_the_same_path_is_replaced() -> None:
    spec = {"linux": {"devices": [{"path": "/dev/char", "type": "c", "major": 9}, {"path": "/dev/z", "type": "p"}]}}

    linux = injected(ContainerEdits(device_nodes=(DeviceNode(path="/dev/char"),)), spec)["linux"]

    assert [(device["path"], device.get("major")) for device in linux["devices"]] == [
        ("/dev/z", None),
        ("/dev/char", 240),
    ]


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (DeviceNode(path="/dev/gone"), "look at device node '/dev/gone': ENOENT"),
        (DeviceNode(path="/dev/in", host_path="/dev/gone"), "look at device node '/dev/gone'"),
        (DeviceNode(path="/dev/gone", type="c"), "look at device node '/dev/gone'"),
        (DeviceNode(path="/dev/gone", type="c", major=0), "look at device node '/dev/gone'"),
        (DeviceNode(path="/dev/in", host_path="/dev/char", type="b"), "'/dev/char' is of type c, not b"),
        (DeviceNode(path="/dev/char", type="u"), "'/dev/char' is of type c, not u"),
    ],
)
def test_a_node_that_is_not_there_leaves_the_spec_untouched(node: DeviceNode, text: str) -> None:
    spec = {"process": {"env": ["A=1"]}}

    with pytest.raises(InjectionFailed, match=text):
        inject(spec, ContainerEdits(env=("A=2",), device_nodes=(node,)), look_at=look_at)
    assert spec == {"process": {"env": ["A=1"]}}


@pytest.mark.parametrize("member", ["process", "linux", "hooks"])
def test_a_spec_that_is_none_is_refused_untouched(member: str) -> None:
    spec: dict[str, Any] = {member: []}

    with pytest.raises(InjectionFailed, match=f"member '{member}' of the spec is not an object"):
        inject(spec, ContainerEdits(env=("A=2",)), look_at=look_at)
    assert spec == {member: []}


def test_mounts_are_sorted_by_depth_and_replace_those_of_the_same_place() -> None:
    spec = {"mounts": [{"destination": "/a/b/c"}, {"destination": "/x"}, {"destination": "/a", "type": "tmpfs"}]}
    mounts = (
        Mount(host_path="/h/1", container_path="/a/b", options=("ro",), type="bind"),
        Mount(host_path="/h/2", container_path="/a"),
        Mount(host_path="/h/3", container_path="//y//"),
    )

    result = injected(ContainerEdits(mounts=mounts), spec)["mounts"]

    assert result == [
        {"destination": "/x"},
        {"destination": "/a", "source": "/h/2"},
        {"destination": "//y//", "source": "/h/3"},
        {"destination": "/a/b", "source": "/h/1", "type": "bind", "options": ["ro"]},
        {"destination": "/a/b/c"},
    ]


@pytest.mark.parametrize(
    ("kind", "options", "mapped"),
    [
        ("bind", (), ["idmap"]),
        ("", ("ro", "bind"), ["ro", "bind", "idmap"]),
        ("bind", ("rbind",), ["rbind", "ridmap"]),
        ("", ("rbind", "bind"), ["rbind", "bind", "idmap"]),
        ("bind", ("ridmap", "ro"), ["ridmap", "ro"]),
        ("tmpfs", ("size=1m",), ["size=1m"]),
        ("", (), None),
    ],
    ids=str,
)
def test_bind_mounts_of_a_container_with_users_of_its_own_are_id_mapped(
    kind: str, options: tuple[str, ...], mapped: list[str] | None
) -> None:
    edits = ContainerEdits(mounts=(Mount(host_path="/h", container_path="/c", options=options, type=kind),))
    own_users = {"linux": {"namespaces": [{"type": "mount"}, {"type": "user"}]}}

    (with_own,) = injected(edits, own_users)["mounts"]
    (without,) = injected(edits, {"linux": {"namespaces": [{"type": "mount"}]}})["mounts"]

    assert with_own.get("options") == mapped
    assert without.get("options", []) == list(options)


def test_the_cost_of_an_injection_grows_with_the_edits_and_not_with_their_square() -> None:
    count = 2000
    texts = [CountedText(f"/dev/{number}") for number in range(count)]
    edits = ContainerEdits.joined(
        ContainerEdits(
            device_nodes=(DeviceNode(path=text, type="c", major=number + 1, minor=0, file_mode=0),),
            mounts=(Mount(host_path="/h", container_path=text),),
            hooks=(Hook(hook_name="prestart", path="/1"),),
        )
        for number, text in enumerate(texts)
    )
    CountedText.compared = 0

    spec = injected(edits, injected(edits))

    assert CountedText.compared < 20 * count
    assert (len(spec["linux"]["devices"]), len(spec["mounts"])) == (count, count)
    assert len(spec["linux"]["resources"]["devices"]) == count


def test_hooks_are_appended_by_kind_in_order() -> None:
    hooks = (
        Hook(hook_name="prestart", path="/1", args=("a",), env=("E=1",), timeout=3),
        Hook(hook_name="createContainer", path="/2"),
        Hook(hook_name="prestart", path="/3", timeout=0),
    )

    result = injected(ContainerEdits(hooks=hooks), {"hooks": {"prestart": [{"path": "/0"}], "poststop": []}})

    assert result["hooks"] == {
        "prestart": [
            {"path": "/0"},
            {"path": "/1", "args": ["a"], "env": ["E=1"], "timeout": 3},
            {"path": "/3", "timeout": 0},
        ],
        "poststop": [],
        "createContainer": [{"path": "/2"}],
    }


def test_the_last_rdt_wins() -> None:
    first = ContainerEdits(intel_rdt=IntelRdt(clos_id="a", mem_bw_schema="MB:0=1"))
    last = ContainerEdits(intel_rdt=IntelRdt(clos_id="b", schemata=("L3:0=f",), enable_monitoring=True))

    result = injected(
        ContainerEdits.joined((first, last, ContainerEdits())), {"linux": {"intelRdt": {"closID": "old"}}}
    )

    assert result["linux"]["intelRdt"] == {"closID": "b", "schemata": ["L3:0=f"], "enableMonitoring": True}


def test_gids_come_once_and_never_zero() -> None:
    spec = {"process": {"user": {"uid": 5, "additionalGids": [10]}}}

    result = injected(ContainerEdits(additional_gids=(0, 20, 10, 20)), spec)

    assert result == {"process": {"user": {"uid": 5, "additionalGids": [10, 20]}}}
    assert injected(ContainerEdits(additional_gids=(0,))) == {}


def test_network_devices_are_kept_by_their_host_name() -> None:
    edits = ContainerEdits(net_devices=(NetDevice(host_interface_name="eth7", name="net0"),))

    result = injected(edits, {"linux": {"netDevices": {"eth7": {"name": "old"}, "eth8": {"name": "x"}}}})

    assert result["linux"]["netDevices"] == {"eth7": {"name": "net0"}, "eth8": {"name": "x"}}


def test_no_edits_change_nothing() -> None:
    assert injected(ContainerEdits(), {"mounts": [{"destination": "/b/c"}, {"destination": "/a"}]}) == {
        "mounts": [{"destination": "/b/c"}, {"destination": "/a"}]
    }


NAMES = st.sampled_from(["A", "B", "C", "PATH"])
ENV = st.lists(st.builds(lambda name, value: f"{name}={value}", NAMES, st.integers(0, 3)), max_size=5)
NODES = st.lists(
    st.builds(
        lambda path, host, mode: DeviceNode(path=path, host_path=host, permissions=mode),
        st.sampled_from(["/dev/a", "/dev/b", "/dev/c"]),
        st.sampled_from(sorted(HOST)),
        st.sampled_from(["", "r", "rw"]),
    ),
    max_size=4,
    unique_by=lambda node: node.path,
)
EDITS = st.builds(
    lambda env, nodes, gids, mounts: ContainerEdits(
        env=tuple(env),
        device_nodes=tuple(nodes),
        additional_gids=tuple(gids),
        mounts=tuple(Mount(host_path="/h", container_path=path) for path in mounts),
    ),
    ENV,
    NODES,
    st.lists(st.integers(0, 4), max_size=4),
    st.lists(st.sampled_from(["/a", "/a/b", "/c", "/c/d/e"]), max_size=3, unique=True),
)
SPECS = st.builds(
    lambda env, mounts: {"process": {"env": env}, "mounts": [{"destination": path} for path in mounts]},
    ENV,
    st.lists(st.sampled_from(["/a/b", "/z", "/c/d"]), max_size=3, unique=True),
)


@given(EDITS, SPECS)
def test_injected_twice_is_injected_once(edits: ContainerEdits, spec: dict[str, Any]) -> None:
    once = injected(edits, spec)

    assert injected(edits, once) == once


@given(EDITS, EDITS, SPECS)
def test_edits_one_after_the_other_are_edits_together(
    first: ContainerEdits, second: ContainerEdits, spec: dict[str, Any]
) -> None:
    assert injected(second, injected(first, spec)) == injected(ContainerEdits.joined((first, second)), spec)


@given(st.lists(st.tuples(NAMES, st.integers()), unique_by=lambda item: item[0]), st.randoms(), SPECS)
def test_the_order_of_disjoint_edits_decides_order_only(
    variables: list[tuple[str, int]], random: Any, spec: dict[str, Any]
) -> None:
    edits = [
        ContainerEdits(env=(f"{name}={value}",), mounts=(Mount(host_path="/h", container_path=f"/{name}"),))
        for name, value in variables
    ]
    shuffled = list(edits)
    random.shuffle(shuffled)

    def result(parts: list[ContainerEdits]) -> tuple[set[str], list[str]]:
        done = injected(ContainerEdits.joined(parts), spec)
        return set(done["process"]["env"]), sorted(mount["destination"] for mount in done["mounts"])

    assert result(edits) == result(shuffled)


@given(EDITS, SPECS)
def test_an_outer_mount_comes_before_those_inside_it(edits: ContainerEdits, spec: dict[str, Any]) -> None:
    depths = [mount["destination"].count("/") for mount in injected(edits, spec)["mounts"]]

    assert not edits.mounts or depths == sorted(depths)


def test_a_node_of_this_machine(tmp_path: Any) -> None:
    assert host_node("/dev/null")[:3] == ("c", 1, 3)
    with pytest.raises(InjectionFailed, match="ENOENT"):
        host_node(str(tmp_path / "none"))
    with pytest.raises(InjectionFailed, match="neither a device nor a fifo"):
        host_node(str(tmp_path))
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(InjectionFailed, match="neither a device nor a fifo"):
        host_node(str(tmp_path / "link"))
