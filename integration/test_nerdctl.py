"""nerdctl on containerd, in a VM and beside it with runc: `make peers WHAT=nerdctl`.

docs/CALLERS.md names what differs.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from .framework import nerdctl
from .framework.containerd import Containerd
from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(not nerdctl.is_chosen(), reason="needs nerdctl (make peers WHAT=nerdctl)"),
]

NAMED = f"docker.io/{IMAGE}"
"""As nerdctl completes the image's name."""
PORT = 18080
RUNC = "io.containerd.runc.v2"
SERVE = "echo it works > /index.html; echo started; echo went wrong >&2; httpd -f -p 80"
ENDS_BY_TERM = "trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.2; done"


@pytest.fixture(scope="module")
def client(
    containerd: Containerd, module_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ctr]:
    containerd.ctr("images", "tag", IMAGE, NAMED)
    with nerdctl.nerdctl(containerd, containerd.directories.root.parent / "nerdctl") as made:
        yield made
    containerd.ctr("images", "rm", NAMED)


@pytest.fixture(params=["vm", "runc"])
def handler(request: pytest.FixtureRequest, runtime: Runtime) -> str:
    return runtime.name if request.param == "vm" else RUNC


@pytest.fixture
def container(client: Ctr, name: str) -> Iterator[str]:
    yield name
    client("rm", "--force", name, check=False)


def start(client: Ctr, handler: str, name: str, *words: str | Path) -> None:
    client("run", "--detach", "--runtime", handler, "--name", name, *words)


def logs(client: Ctr, name: str) -> Result:
    return client("logs", name)


def wait_for_logs(client: Ctr, name: str, *texts: str) -> None:
    def there() -> bool:
        said = logs(client, name)
        return all(text in said.out + said.err for text in texts)

    eventually(there, what=lambda: f"{texts} in the logs: {logs(client, name)}", every_s=0.5)


def state(client: Ctr, name: str) -> str:
    (found,) = json.loads(client("inspect", name).out)
    return str(found["State"]["Status"])


def test_what_run_is_given_reaches_the_process_and_its_status_comes_back(
    client: Ctr, handler: str, container: str, scratch: Path
) -> None:
    (scratch / "file").write_text("from the host\n")
    scratch.chmod(0o777)
    script = "echo $GREETING; id -u; id -g; pwd; cat /data/file; echo back > /data/back; exit 7"
    words = ("-e", "GREETING=hello", "-u", "1000:50", "-w", "/tmp", "-v", f"{scratch}:/data", "--net", "none")

    done = client(
        "run", "--rm", "--runtime", handler, "--name", container, *words, NAMED, "sh", "-c", script, check=False
    )

    assert done.code == 7, done
    assert done.lines == ["hello", "1000", "50", "/tmp", "from the host"]
    assert (scratch / "back").read_text() == "back\n"
    assert client("ps", "--all", "--quiet").lines == []


def test_a_detached_container_is_seen_reached_and_stopped(client: Ctr, handler: str, container: str) -> None:
    start(client, handler, container, "-m", "128m", "--cpus", "0.5", "-p", f"{PORT}:80", NAMED, "sh", "-c", SERVE)

    wait_for_logs(client, container, "started", "went wrong")
    assert client("exec", "-e", "A=b", "-w", "/tmp", container, "sh", "-c", "echo $A; pwd").lines == ["b", "/tmp"]
    assert "exit code 3" in client("exec", container, "sh", "-c", "exit 3", check=False).err
    links = client("exec", container, "ls", "/sys/class/net").lines
    assert {"lo", "eth0"} <= set(links)
    assert "10.4.0." in client("exec", container, "ip", "addr", "show", "dev", "eth0").out
    assert fetched() == "it works\n"
    assert client("port", container).lines == [f"80/tcp -> 0.0.0.0:{PORT}"]
    (usage,) = json.loads("[" + client("stats", "--no-stream", "--format", "{{json .}}", container).out + "]")
    assert usage["MemUsage"].endswith("/ 128MiB")
    assert usage["MemUsage"].split()[0] != "0B"
    client("pause", container)
    assert state(client, container) == "paused"
    client("unpause", container)
    assert client("exec", container, "echo", "again").out == "again\n"
    client("kill", container)
    assert client("wait", container).lines == ["137"]
    assert state(client, container) == "exited"
    client("rm", container)
    assert client("ps", "--all", "--quiet").lines == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", PORT), timeout=5).close()


def fetched() -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=20) as answer:
        return str(answer.read().decode())


def test_stop_sends_term_and_wait_and_logs_know_how_it_ended(client: Ctr, handler: str, container: str) -> None:
    start(client, handler, container, "--net", "none", NAMED, "sh", "-c", ENDS_BY_TERM)
    wait_for_logs(client, container, "ready")
    assert client("exec", container, "ls", "/sys/class/net").lines == ["lo"]

    client("stop", container)

    assert client("wait", container).lines == ["9"]
    assert logs(client, container).lines == ["ready", "term"]


GATEWAY = "10.90.0.1"


@pytest.fixture
def parent(client: Ctr) -> Iterator[str]:
    """A link of the host on which networks can lie; a neighbour of theirs is behind it."""
    name, behind = "parent0", "parent1"
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "name", behind], check=True)
    for end in (name, behind):
        subprocess.run(["ip", "link", "set", end, "up"], check=True)
    yield name
    subprocess.run(["ip", "link", "delete", name], check=True)


def can_make_ipvlan(parent: str) -> bool:
    """Whether the kernel knows such links."""
    add = ["ip", "link", "add", "link", parent, "name", "tried0", "type", "ipvlan"]
    if subprocess.run(add, check=False, capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "link", "delete", "tried0"], check=True)
    return True


@pytest.mark.parametrize("drivers", [("bridge", "bridge"), ("ipvlan",), ("macvlan",)], ids=" ".join)
def test_a_container_has_an_interface_in_each_network_that_it_is_given_and_reaches_a_server_there(
    client: Ctr, handler: str, container: str, parent: str, drivers: tuple[str, ...]
) -> None:
    if "ipvlan" in drivers and not can_make_ipvlan(parent):
        pytest.skip("needs a kernel with ipvlan")
    made: list[str] = []
    with socket.create_server(("", 0)) as server:
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        script = f"ip -o -4 address; nc {GATEWAY} {server.getsockname()[1]}"
        try:
            for number, driver in enumerate(drivers):
                on_parent = () if driver == "bridge" else ("-o", f"parent={parent}")
                name = f"{container}-{number}"
                client("network", "create", name, "--driver", driver, "--subnet", f"10.90.{number}.0/24", *on_parent)
                made.append(name)
            if "bridge" not in drivers:
                subprocess.run(["ip", "address", "add", f"{GATEWAY}/24", "dev", "parent1"], check=True)
            networks = [word for name in made for word in ("--net", name)]
            shown = client("run", "--rm", "--runtime", handler, *networks, NAMED, "sh", "-c", script).out
        finally:
            for name in made:
                client("network", "rm", name)

    for number in range(len(drivers)):
        assert re.search(rf" eth{number} +inet 10\.90\.{number}\.", shown), shown
    assert shown.endswith("\ngreeted\n"), shown


def greet(server: socket.socket) -> None:
    """Its first client, unless the server is closed before one comes."""
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"greeted\n")


def test_the_hosts_network_is_refused_as_cri_refuses_it(client: Ctr, runtime: Runtime, container: str) -> None:
    words = ("--runtime", runtime.name, "--name", container, "--net", "host", NAMED, "true")

    refused = client("run", *words, check=False)

    assert refused.code != 0
    assert "a VM cannot have the host's network" in refused.err


def test_cp_and_top_look_at_the_host_and_not_into_the_guest(client: Ctr, runtime: Runtime, container: str) -> None:
    start(client, runtime.name, container, "--net", "none", NAMED, "sleep", "100000")

    copied = client("cp", f"{container}:/etc/passwd", "/run/copied", check=False)
    seen = client("top", container)

    assert "source does not exist" in copied.err
    assert "qemu-system" in seen.out
    assert "sleep" not in seen.out
