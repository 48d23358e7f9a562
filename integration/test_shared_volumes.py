"""One volume in two containers of a pod is one: sockets, locks, mappings, pipes and inotify work across, as with runc.

`pair_check.py` runs in both, by the host's Python.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework import load
from .framework.cri import Container, Pod
from .framework.images import BINDS_LOW_PORTS
from .framework.kubelet_volumes import PodDirectory, volume
from .framework.pod_python import run_python, start_python
from .framework.runtime import Runtime
from .framework.waiting import eventually

_CHECK = Path(__file__).with_name("pair_check.py").read_text()
_RESTARTS = load.amount(4, 300)
_ALL = ["mapping read", "socket", "mapping written", "flock", "fcntl", "inotify", "pipe"]


def serving(pod: Pod, mount: pb.Mount, below: str = "") -> Container:
    server = start_python(pod, _CHECK, "serve", mount.container_path + below, mounts=[mount])
    eventually(lambda: "ready" in server.log(), what="the server is ready")
    return server


def met(pod: Pod, mount: pb.Mount, below: str = "") -> list[str]:
    """What works for a client in another container."""
    client = start_python(pod, "import time; time.sleep(10000)", mounts=[mount])
    found = run_python(client, _CHECK, "meet", mount.container_path + below).splitlines()
    client.stop(0)
    client.remove()
    return found


def test_two_containers_with_an_empty_dir_meet_in_it(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("data")
    server = serving(pod, volume(directory, "/d"))

    assert met(pod, volume(directory, "/e")) == _ALL
    # That container has been removed: the next one finds the server's ends as it did.
    assert met(pod, volume(directory, "/e")) == _ALL
    assert server.is_running


def test_a_restarted_server_is_met_again_by_a_client_that_stayed(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("data")
    client = start_python(pod, "import time; time.sleep(10000)", mounts=[volume(directory, "/e")])
    for _ in range(2):
        server = serving(pod, volume(directory, "/d"))
        assert run_python(client, _CHECK, "meet", "/e").splitlines() == _ALL
        server.stop(0)
        server.remove()
        for entry in directory.iterdir():
            entry.unlink()


@pytest.mark.parametrize("readers", [False, True], ids=["both write", "one reads"])
def test_two_containers_with_a_directory_of_the_host_meet_in_it(pod: Pod, scratch: Path, readers: bool) -> None:
    (scratch / "srv").mkdir()
    server = serving(pod, volume(scratch / "srv", "/d"))
    if readers:
        reader = pod.start(mounts=[volume(scratch / "srv", "/e", readonly=True)])
        assert reader.exec("sh", "-c", "echo no > /e/new").code != 0
        # The socket's file is there, and its other end, which no client of it may write to.
        assert "refused" not in reader.exec("sh", "-c", "echo | nc local:/e/socket").err.lower()
    else:
        assert met(pod, volume(scratch / "srv", "/e")) == _ALL
    assert server.is_running


def test_a_sub_path_is_met_in_its_volume(pod: Pod, kubelet: PodDirectory, scratch: Path) -> None:
    """Of an emptyDir whichever comes first; of another volume if that came first."""
    empty = kubelet.empty_dir("data")
    (empty / "a/b").mkdir(parents=True)
    part = kubelet.sub_path("data", empty / "a/b")
    (scratch / "claim/c").mkdir(parents=True)
    part_of_claim = kubelet.sub_path("claim", scratch / "claim/c")

    inner = serving(pod, volume(part, "/d"))
    assert met(pod, volume(empty, "/e"), "/a/b") == _ALL
    outer = serving(pod, volume(scratch / "claim", "/d"), "/c")
    assert met(pod, volume(part_of_claim, "/e")) == _ALL
    assert inner.is_running
    assert outer.is_running


def test_a_source_made_anew_is_the_new_one_for_the_next_container(pod: Pod, scratch: Path) -> None:
    """As with runc: who has the old directory keeps it."""
    source = scratch / "srv"
    source.mkdir()
    (source / "age").write_text("old\n")
    first = pod.start(mounts=[volume(source, "/d")])
    os.rename(source, scratch / "moved")
    source.mkdir()
    (source / "age").write_text("new\n")
    second = pod.start(mounts=[volume(source, "/d")])

    assert (first.sh("cat /d/age"), second.sh("cat /d/age")) == ("old\n", "new\n")
    subprocess.run(["rm", "-r", scratch / "moved"], check=True)
    third = pod.start(mounts=[volume(source, "/d", readonly=True)])
    first.stop(0)
    first.remove()
    second.sh("echo newer > /d/age")
    assert third.sh("cat /d/age") == "newer\n"
    assert third.exec("sh", "-c", "echo no > /d/age").code != 0


@pytest.mark.timeout(load.amount(300, 3600))
def test_restarts_of_a_container_take_neither_disk_nor_descriptors(runtime: Runtime, pod: Pod, scratch: Path) -> None:
    """While another container keeps the pod: what an ended one wrote is free, and virtiofsd holds none of it."""
    (scratch / "srv").mkdir()
    pod.start(mounts=[volume(scratch / "srv", "/other")])

    def restart() -> None:
        container = pod.start("sh", "-c", "head -c 20000000 /dev/zero > /big", mounts=[volume(scratch / "srv", "/d")])
        eventually(lambda: not container.is_running, what="the container's end")
        container.remove()

    def held() -> tuple[int, list[str]]:
        """How many descriptors virtiofsd has, and those of removed files."""
        entries = [fd for daemon in runtime.virtiofsds(pod.id) for fd in Path(f"/proc/{daemon.pid}/fd").iterdir()]
        links = []
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it closes some meanwhile
                links.append(os.readlink(entry))
        return len(links), [link for link in links if link.endswith(" (deleted)")]

    restart()
    before, _ = held()
    for _ in range(_RESTARTS):
        restart()

    # The last one's directories of the share may be within virtiofsd's cache time.
    gone = "/big (deleted)"
    eventually(lambda: gone not in "".join(held()[1]), what=lambda: f"removed files that are held: {held()[1]}")
    assert held()[0] <= before + 3


def test_capabilities_set_in_a_volume_are_the_files_on_both_sides(pod: Pod, scratch: Path) -> None:
    (scratch / "srv").mkdir()
    (scratch / "srv/program").write_bytes(b"")
    script = "import os, sys; os.setxattr('/d/program', 'security.capability', bytes.fromhex(sys.argv[1]))"
    container = start_python(pod, "import time; time.sleep(10000)", mounts=[volume(scratch / "srv", "/d")])

    run_python(container, script, BINDS_LOW_PORTS.hex())

    assert os.getxattr(scratch / "srv/program", "security.capability") == BINDS_LOW_PORTS
