"""Pods on the network as the kubelet and CNI have it: the guest gets what was set, pods talk, ports forward."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .framework.cri import Container, Cri, Pod
from .framework.cri_session import GATEWAY, GATEWAY6, MTU, NEIGHBOURS, settled
from .framework.pod_python import ECHO, run_python, start_python
from .framework.spdy import PORT_FORWARD, SpdyConnection
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

_UDP_PORT, _TCP_PORT = 7007, 7008
_LOOPBACKS = {"127.0.0.1": 8004, "::1": 8006, "0.0.0.0": 8010, "::": 8012}


@pytest.fixture(scope="module")
def server(shared_pod: Pod) -> Iterator[Container]:
    """In the file's pod: echoes over TCP and UDP on the pod's addresses, over TCP on each kind of loopback."""
    places = [f"{address}:{port}" for address, port in _LOOPBACKS.items()]
    places += [f"{address}:{_TCP_PORT}" for address in shared_pod.addresses]
    container = start_python(shared_pod, ECHO, f":{_UDP_PORT}", *places)
    _wait_until_ready(container)
    yield container
    shared_pod.remove_containers()


@pytest.fixture(scope="module")
def neighbour(cri: Cri, module_leaves_nothing: None) -> Iterator[Container]:
    """The same in another pod on the same bridge."""
    with cri.pod() as pod:
        settled(pod)
        places = [f"{address}:{_TCP_PORT}" for address in pod.addresses]
        container = start_python(pod, ECHO, f":{_UDP_PORT}", *places)
        _wait_until_ready(container)
        yield container


def _wait_until_ready(container: Container) -> None:
    eventually(
        lambda: "ready" in container.log(),
        what=lambda: f"the echo server listens: {container.log('stderr')}",
        within_s=60,
    )


class Forwarded(SpdyConnection):
    """A pod's port, forwarded as the kubelet does it: each connection to it has a stream for its data and one for what
    went wrong. Source: Kubernetes' portforward package.
    """

    def __init__(self, pod: Pod, port: int) -> None:
        super().__init__(pod.cri.call("PortForward", pod_sandbox_id=pod.id, port=[port]).url, PORT_FORWARD)
        self._port, self._connections = port, 0

    def connect(self) -> tuple[int, int]:
        asked = {"port": str(self._port), "requestid": str(self._connections)}
        self._connections += 1
        error = self.open({"streamtype": "error", **asked})
        self.send(error, b"", end=True)
        return self.open({"streamtype": "data", **asked}), error

    def is_echoed(self, text: bytes) -> bool:
        data, _ = self.connect()
        self.send(data, text)
        return self.read(data, len(text)) == text


@pytest.mark.parametrize("address", _LOOPBACKS)
def test_a_forwarded_port_is_answered_by_who_listens_in_the_pod(
    shared_pod: Pod, server: Container, address: str
) -> None:
    with Forwarded(shared_pod, _LOOPBACKS[address]) as port:
        assert port.is_echoed(b"hello")


def test_two_connections_are_forwarded_over_one(shared_pod: Pod, server: Container) -> None:
    with Forwarded(shared_pod, _LOOPBACKS["127.0.0.1"]) as port:
        forwarded = {port.connect()[0]: f"{number}".encode() * 50_000 for number in range(2)}
        for data, text in forwarded.items():
            port.send(data, text)
        for data, text in forwarded.items():
            assert port.read(data, len(text)) == text
            port.send(data, b"", end=True)
        for data, text in forwarded.items():
            assert port.read_to_end(data) == text


def test_many_forwarded_connections_carry_much_at_once_and_end_with_their_listeners(
    shared_pod: Pod, server: Container
) -> None:
    def one(number: int) -> bool:
        with Forwarded(shared_pod, _LOOPBACKS["127.0.0.1"]) as port:
            return port.is_echoed(f"{number}".encode() * 40_000)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))

    server_threads = "sum(1 for _ in __import__('pathlib').Path('/proc/1/task').iterdir())"
    resting = 1 + len(_LOOPBACKS) + len(shared_pod.addresses) + 2
    eventually(
        lambda: run_python(server, f"print({server_threads})") == f"{resting}\n",
        what="the listener has seen the end of every connection",
    )


def test_a_forwarded_port_without_a_listener_is_an_error_and_the_next_one_is_served(
    shared_pod: Pod, server: Container
) -> None:
    with Forwarded(shared_pod, 9) as nobody:
        data, error = nobody.connect()
        # containerd 1.7 closes the stream without a word.
        assert (said := nobody.read_to_end(error)) == b"" or b"reset by peer" in said
        assert nobody.data[data] == b""
    with Forwarded(shared_pod, _LOOPBACKS["127.0.0.1"]) as somebody:
        assert somebody.is_echoed(b"still here")


def test_port_forward_changes_nothing_in_the_pods_namespace(shared_pod: Pod, server: Container) -> None:
    """No address, route, rule of routing, qdisc or sysctl."""
    before = _visible_in(shared_pod.namespace)
    with Forwarded(shared_pod, _LOOPBACKS["::1"]) as port:
        assert port.is_echoed(b"hello")
        assert _visible_in(shared_pod.namespace) == before


def _visible_in(namespace: Path) -> list[str]:
    commands = ("ip address", "ip rule", "ip route show table all", "ip -6 route show table all", "tc qdisc show")
    shown = [
        subprocess.run(
            ["nsenter", f"--net={namespace}", *command.split()], check=True, capture_output=True, text=True
        ).stdout
        for command in commands
    ]
    sysctls = sorted(Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet"))
    shown += subprocess.run(
        ["nsenter", f"--net={namespace}", "cat", *map(str, sysctls)], check=False, capture_output=True, text=True
    ).stdout.splitlines()
    return shown


_CLIENT = """
import socket, sys
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with socket.create_connection((address, port), timeout=60) as connection:
    data = b"m" * size
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: connection.recv(65536), b""))
print(answer == data + b"<end>")
"""
_DATAGRAM = """
import socket, sys
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as client:
    client.settimeout(5)
    level, option = (41, 23) if family == socket.AF_INET6 else (0, 10)
    client.setsockopt(level, option, 2)  # never fragment: IP(V6)_MTU_DISCOVER, IP_PMTUDISC_DO
    client.connect((address, port))
    for attempt in range(5):
        try:
            client.send(b"d" * size)
            print(client.recv(65536) == b"d" * size)
            break
        except TimeoutError:
            continue
        except OSError as error:
            print(error.strerror)
            break
"""
_HEADERS = {4: 20 + 8, 6: 40 + 8}


@pytest.mark.parametrize("version", [4, 6])
def test_two_pods_on_one_bridge_talk_tcp_both_ways(
    shared_pod: Pod, server: Container, neighbour: Container, version: int
) -> None:
    here, there = _address(shared_pod, version), _address_of(neighbour, version)

    assert run_python(server, _CLIENT, there, str(_TCP_PORT), "300000") == "True\n"
    assert run_python(neighbour, _CLIENT, here, str(_TCP_PORT), "300000") == "True\n"


@pytest.mark.parametrize("version", [4, 6])
def test_two_pods_on_one_bridge_exchange_datagrams_as_large_as_the_mtu_and_no_larger(
    shared_pod: Pod, server: Container, neighbour: Container, version: int
) -> None:
    here, there = _address(shared_pod, version), _address_of(neighbour, version)
    full = MTU - _HEADERS[version]

    assert run_python(server, _DATAGRAM, there, str(_UDP_PORT), str(full)) == "True\n"
    assert run_python(neighbour, _DATAGRAM, here, str(_UDP_PORT), str(full)) == "True\n"
    assert run_python(server, _DATAGRAM, there, str(_UDP_PORT), str(full + 1)) == "Message too long\n"


def _address(pod: Pod, version: int) -> str:
    return next(address for address in pod.addresses if (":" in address) == (version == 6))


def _address_of(container: Container, version: int) -> str:
    family = "inet6" if version == 6 else "inet"
    shown = container.sh(f"ip addr show dev eth0 | sed -n 's/.*{family} \\([^/]*\\).*scope global.*/\\1/p'")
    return shown.split()[0]


def test_a_pod_reaches_its_gateway_and_the_host_reaches_the_pod(shared_pod: Pod, server: Container) -> None:
    for gateway in (GATEWAY, GATEWAY6):
        assert " 0% packet loss" in server.sh(f"ping -c 2 -W 5 {gateway}")
    for address in shared_pod.addresses:
        shown = subprocess.run(
            ["/bin/busybox", "ping", "-c", "2", "-W", "5", address], capture_output=True, text=True, check=False
        )
        assert " 0% packet loss" in shown.stdout


def test_the_guests_addresses_routes_and_link_are_what_cni_gave(shared_pod: Pod, server: Container) -> None:
    """Compared with the namespace as the plugin left it, which the pod's own links still show."""
    outside = _given_by_cni(shared_pod.namespace)

    link = server.sh("ip link show dev eth0").split()
    addresses = server.sh("ip addr show dev eth0")
    routes = server.sh("ip route; ip -6 route")

    assert link[link.index("mtu") + 1] == str(outside.mtu)
    assert link[link.index("link/ether") + 1] == outside.mac
    inside = {line.split()[1] for line in addresses.splitlines() if line.strip().startswith("inet")}
    assert inside == outside.addresses
    assert {_route_words(line) for line in routes.splitlines()} - {("multicast", "", "eth0")} >= outside.routes
    assert server.sh("ls /sys/class/net").split() == ["eth0", "lo"]


def test_the_guests_permanent_neighbours_are_what_cni_gave(shared_pod: Pod, server: Container) -> None:
    shown = server.sh("ip neigh show nud permanent").splitlines()

    entries = {words[0]: words[words.index("lladdr") + 1] for words in (line.split() for line in shown)}
    assert entries == NEIGHBOURS


def _route_words(line: str) -> tuple[str, str, str]:
    """Destination, gateway, device."""
    words = line.split()
    return words[0], words[words.index("via") + 1] if "via" in words else "", words[words.index("dev") + 1]


@dataclass(frozen=True, kw_only=True)
class _Given:
    mtu: int
    mac: str
    addresses: set[str]
    routes: set[tuple[str, str, str]]


def _given_by_cni(namespace: Path) -> _Given:
    def show(*words: str) -> list[dict[str, Any]]:
        shown = subprocess.run(
            ["nsenter", f"--net={namespace}", "ip", "-json", *words], check=True, capture_output=True
        ).stdout
        decoded: list[dict[str, Any]] = json.loads(shown)
        return decoded

    (link,) = show("address", "show", "dev", "eth0")
    return _Given(
        mtu=link["mtu"],
        mac=link["address"],
        addresses={f"{item['local']}/{item['prefixlen']}" for item in link["addr_info"]},
        routes={
            (str(route["dst"]), str(route.get("gateway", "")), "eth0")
            for route in (*show("route"), *show("-6", "route"))
            if route["dev"] == "eth0"
        },
    )
