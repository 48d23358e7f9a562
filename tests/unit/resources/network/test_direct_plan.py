"""Files of directly attachable network: what Kata's CNI plugins write, and every way to write it wrong."""

import json
from typing import Any

import pytest

from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.guest import NetworkAddress
from pyshim.model.network import DirectNetwork
from pyshim.resources.network.plan.direct import direct_network

PATH = "/run/kata-containers/dans/pod1.json"
VFIO: dict[str, Any] = {
    "name": "eth0",
    "guest_mac": "0A:58:0a:c0:03:35",
    "device": {"type": "vfio", "pci_device_id": "0000:41:08.0"},
    "network_info": {
        "interface": {"ip_addresses": ["10.192.3.53/24"], "mtu": 1500},
        "routes": [{"gateway": "10.192.3.1"}, {"dest": "10.192.0.0/15", "gateway": "10.192.3.1"}],
    },
}
SOCKET: dict[str, Any] = {
    "name": "net1",
    "guest_mac": "02:00:00:00:00:07",
    "device": {"type": "vhost-user", "path": "/run/ovs/vhost 1,a.sock", "queue_num": 2, "queue_size": 1024},
    "network_info": {
        "interface": {
            "ip_addresses": ["192.168.0.1/24", "fd00::7/64"],
            "mtu": 9000,
            "ntype": "tuntap",
            "flags": 0x80 | 0x1,
        },
        "routes": [
            {
                "dest": "172.18.0.0/16",
                "source": "172.18.0.1",
                "gateway": "172.18.31.1",
                "scope": 0,
                "flags": 4,
                "mtu": 1450,
            },
            {"dest": "::/0", "gateway": "fd00::1"},
        ],
        "neighbors": [
            {"ip_address": "192.168.0.3/16", "device": "", "state": 0, "flags": 0, "hardware_addr": "02:00:00:00:00:09"}
        ],
    },
}


def parsed(*devices: Any, **top: Any) -> DirectNetwork:
    content = json.dumps({"devices": list(devices), **top}).encode()
    return direct_network(content, PATH, sandbox_id="pod1", queues=3)


def test_a_function_as_a_plugin_writes_it() -> None:
    direct = parsed(VFIO, netns="/var/run/netns/cni-1")

    assert direct.functions == {"0a:58:0a:c0:03:35": "0000:41:08.0"}
    assert direct.vhost_user == ()
    (interface,) = direct.interfaces
    assert (interface.name, interface.mac, interface.mtu) == ("eth0", "0a:58:0a:c0:03:35", 1500)
    assert interface.addresses == (NetworkAddress(address="10.192.3.53", prefix_length=24),)
    assert [(item.destination, item.gateway, item.device, item.family) for item in direct.routes] == [
        ("", "10.192.3.1", "eth0", 4),
        ("10.192.0.0/15", "10.192.3.1", "eth0", 4),
    ]


def test_a_socket_with_everything_that_can_be_said() -> None:
    direct = parsed(SOCKET)

    (nic,) = direct.vhost_user
    assert (nic.socket_path, nic.queues, nic.queue_size, nic.mtu) == ("/run/ovs/vhost 1,a.sock", 2, 1024, 9000)
    (interface,) = direct.interfaces
    assert (interface.type, interface.flags) == ("tuntap", 0x80)
    assert [(item.address, item.prefix_length) for item in interface.addresses] == [
        ("192.168.0.1", 24),
        ("fd00::7", 64),
    ]
    first, second = direct.routes
    assert (first.source, first.flags, first.mtu, first.family) == ("172.18.0.1", 4, 1450, 4)
    assert (second.destination, second.gateway, second.family) == ("", "fd00::1", 6)
    (neighbour,) = direct.neighbours
    assert (neighbour.address, neighbour.device, neighbour.state) == ("192.168.0.3", "net1", 0x80)


def test_several_devices_are_told_in_the_files_order_with_ids_of_their_own() -> None:
    other = {**SOCKET, "name": "net2", "guest_mac": None, "device": {"type": "vhost-user", "path": "/b"}}

    direct = parsed(SOCKET, VFIO, other)

    assert [item.name for item in direct.interfaces] == ["net1", "eth0", "net2"]
    assert [(item.id, item.queues, item.queue_size) for item in direct.vhost_user] == [
        ("direct-0", 2, 1024),
        ("direct-1", 3, 0),
    ]


def test_a_mac_of_our_own_is_local_and_the_same_each_time() -> None:
    nameless = {key: value for key, value in SOCKET.items() if key != "guest_mac"}

    (first,), (again,) = parsed(nameless).interfaces, parsed(nameless).interfaces
    (other,) = parsed({**nameless, "name": "net9"}).interfaces

    assert first.mac == again.mac != other.mac
    assert int(first.mac[:2], 16) & 3 == 2


def test_what_a_file_leaves_out_is_ethernets_usual() -> None:
    given = {"name": "eth0", "guest_mac": VFIO["guest_mac"], "device": VFIO["device"]}
    neighbour = {"ip_address": "10.0.0.3", "hardware_addr": "02:00:00:00:00:09"}
    info = {
        "interface": {"ip_addresses": ["10.0.0.2/24"]},
        "neighbors": [neighbour],
        "routes": [{"gateway": "10.0.0.1"}],
    }

    direct = parsed({**given, "network_info": info})

    (made,), (route,), (found,) = direct.interfaces, direct.routes, direct.neighbours
    assert (made.mtu, made.flags, made.type) == (1500, 0, "")
    assert (route.scope, route.flags, route.mtu, found.flags) == (0, 0, 0, 0)


def test_no_devices_are_no_network() -> None:
    assert parsed().interfaces == ()


def changed(device: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    """A deep copy with one member set, or taken away with `value` of `...`."""
    copy: Any = json.loads(json.dumps(device))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return dict(copy)


INFO = ("network_info",)
WRONG: list[tuple[dict[str, Any], str]] = [
    (changed(VFIO, "name", value=...), "devices[0].name is missing"),
    (changed(VFIO, "name", value=""), "devices[0]: name '' is not a name"),
    (changed(VFIO, "name", value="a" * 16), "devices[0]: name "),
    (changed(VFIO, "name", value="a b"), "devices[0]: name "),
    (changed(VFIO, "name", value="a/b"), "devices[0]: name "),
    (changed(VFIO, "name", value="\ud800"), "it has a string that is not text"),
    (changed(VFIO, "name", value=7), "devices[0].name is not a string"),
    (changed(VFIO, "guest_mac", value=...), "devices[0]: guest_mac is missing"),
    (changed(VFIO, "guest_mac", value="xx:xx:xx:xx:xx"), "devices[0]: guest_mac 'xx:xx:xx:xx:xx' is not a MAC"),
    (changed(VFIO, "guest_mac", value="01:00:5e:00:00:01"), "is not a MAC address of a device"),
    (changed(VFIO, "guest_mac", value="00:00:00:00:00:00"), "is not a MAC address of a device"),
    (changed(VFIO, "gest_mac", value="02:00:00:00:00:01"), "devices[0]: object contains unknown field `gest_mac`"),
    (changed(VFIO, "device", "type", value="tap"), "'tap'"),
    (changed(VFIO, "device", "pci_device_id", value="../../x"), "'../../x' is not a PCI address"),
    (changed(VFIO, "device", "path", value="/x"), "devices[0].device: object contains unknown field `path`"),
    (changed(SOCKET, "device", "path", value="run/x"), "devices[0]: path 'run/x' is not an absolute path"),
    (changed(SOCKET, "device", "path", value="/x\n"), "is not an absolute path"),
    (changed(SOCKET, "device", "queue_num", value=257), "devices[0].device.queue_num: expected `int` <= 256"),
    (
        changed(SOCKET, "device", "queue_num", value=True),
        "queue_num: expected `int | null`, got `bool`",
    ),
    (changed(SOCKET, "device", "queue_size", value=1), "devices[0]: queue_size 1 is not one of 256, 512, 1024"),
    (changed(VFIO, *INFO, "interface", "ip_addresses", value=...), "interface.ip_addresses is missing"),
    (changed(VFIO, *INFO, "interface", "ip_addresses", value=["10.0.0.1"]), "'10.0.0.1' is not an address of"),
    (changed(VFIO, *INFO, "interface", "ip_addresses", value=["10.0.0.1/33"]), "'10.0.0.1/33' is not an address"),
    (changed(VFIO, *INFO, "interface", "ip_addresses", value=["127.0.0.1/8"]), "'127.0.0.1/8' is not an address"),
    (changed(VFIO, *INFO, "interface", "mtu", value=10), "devices[0].network_info.interface.mtu: expected `int` >= 68"),
    (changed(VFIO, *INFO, "interface", "vlan", value=7), "unknown field `vlan`"),
    (changed(VFIO, *INFO, "routes", 0, value={}), "devices[0]: route to default has no address at all"),
    (changed(VFIO, *INFO, "routes", 1, "gateway", value="fd00::1"), "route to 10.192.0.0/15 has addresses of both"),
    (changed(VFIO, *INFO, "routes", 1, "dest", value="10.0.0.0/99"), "dest '10.0.0.0/99' is not a network"),
    (
        changed(VFIO, *INFO, "routes", 1, "via", value="10.0.0.1"),
        "routes[1]: object contains unknown field `via`",
    ),
    (changed(SOCKET, *INFO, "neighbors", 0, "ip_address", value="x"), "ip_address 'x' is not an IP"),
    (changed(SOCKET, *INFO, "neighbours", value=[]), "unknown field `neighbours`"),
]


@pytest.mark.parametrize(("device", "text"), WRONG, ids=[text for _, text in WRONG])
def test_an_error_names_file_and_member(device: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parsed(device)
    assert str(refused.value).startswith(f"read '{PATH}': ")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (SOCKET | {"name": "eth0"}, "devices[1]: name 'eth0' is another device's as well"),
        (SOCKET | {"guest_mac": VFIO["guest_mac"].upper()}, "devices[1]: guest_mac 0a:58:0a:c0:03:35 is another"),
        (VFIO | {"name": "b", "guest_mac": "02:00:00:00:00:0b"}, "devices[1]: pci_device_id 0000:41:08.0 is another"),
    ],
)
def test_two_devices_that_are_one_are_refused(second: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parsed(VFIO, second)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"\xff\xfe{}", "not JSON: not UTF-8 at byte 0"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (json.dumps({"devices": [VFIO] * 33}).encode(), "length <= 32"),
    ],
)
def test_what_is_no_such_file_at_all(content: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        direct_network(content, PATH, sandbox_id="pod1", queues=1)
    assert f"read '{PATH}': " in str(refused.value)
    assert text in str(refused.value)


def test_a_type_of_device_without_a_way_is_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match=r"devices\[0\]\.device\.type: 'host-tap' is not available"):
        parsed(VFIO | {"device": {"type": "host-tap", "tap_name": "tap7"}})
