"""A volume with mounts below it, in virtiofsd's mount namespace: the guest sees it, and the host can remove it."""

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host import syscalls
from pyshim.host.file_answers import FileAnswers
from pyshim.host.mounts.mounting import perform_mount
from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import HostPath
from pyshim.model.volumes import HostMount, Propagation, TargetKind, VirtiofsdPlan
from pyshim.resources.volumes.host.share_namespace import ShareNamespace, share_namespace
from pyshim.resources.volumes.host.virtiofsd import start_virtiofsd
from pyshim.resources.volumes.host.virtiofsd_flavours import VirtiofsdFlavours
from tests.fakes.ledger import FakeLedger

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("private_mounts")]

REAL_C = "/usr/lib/qemu/virtiofsd"


def bind(source: Path, target: Path, *options: str, beneath: Path | None = None, shared: str = "") -> HostMount:
    return HostMount(
        type="bind",
        source=str(source),
        target=HostPath(str(target)),
        target_kind=TargetKind.DIRECTORY,
        options=options,
        propagation=Propagation(shared) if shared else None,
        beneath=HostPath(str(beneath)) if beneath else None,
        for_guest_only=beneath is not None,
    )


class Scene:
    """A share as a sandbox has it, and a host directory with a file system mounted below it."""

    def __init__(self, root: Path) -> None:
        self.mounts, self.exported, self.volume = root / "mounts", root / "shared", root / "volume"
        self.below = self.volume / "below"
        for path in (self.mounts, self.exported, self.below):
            path.mkdir(parents=True)
        perform_mount(bind(self.mounts, self.mounts, "bind", shared="shared"))
        perform_mount(bind(self.mounts, self.exported, "bind", "ro", shared="slave"))
        syscalls.mount("below", str(self.below), "tmpfs", 0, "")
        (self.below / "file").write_text("x")
        self.request = bind(self.volume, self.mounts / "volume", "rbind", "rprivate", beneath=self.mounts)

    def namespace(self) -> ShareNamespace:
        made = self.namespace_of("/bin/true")
        assert made is not None
        return made

    def namespace_of(self, binary: str) -> ShareNamespace | None:
        plan = self.plan(binary)
        made: list[ShareNamespace | None] = []
        in_thread(lambda: made.append(share_namespace(plan)))
        return made[0]

    def plan(self, binary: str) -> VirtiofsdPlan:
        return VirtiofsdPlan(
            binary=HostPath(binary),
            shared_dir=HostPath(str(self.exported)),
            listen_path=HostPath(str(self.mounts.parent / "fs.sock")),
            cache="",
            extra_args=(),
            debug=False,
        )

    def remove_below(self) -> None:
        syscalls.umount2(str(self.below), 0)
        self.below.rmdir()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class ServingChild:
    """A copy of the namespace, made before any volume: virtiofsd serves from one."""

    def __init__(self, namespace: ShareNamespace, exported: Path) -> None:
        self._namespace, self._exported = namespace, exported
        self._questions: list[str] = []
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._names: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()
        self._answered.acquire()

    def names(self, path: str) -> list[str]:
        self._questions.append(path)
        self._asked.release()
        self._answered.acquire()
        return self._names

    def _serve(self) -> None:
        self._namespace.view.enter()
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
        self._answered.release()
        while True:
            self._asked.acquire()
            self._names = sorted(os.listdir(self._exported / self._questions.pop()))
            self._answered.release()


def served(root: Path) -> tuple[Scene, ShareNamespace, ServingChild]:
    scene = Scene(root)
    namespace = scene.namespace()
    return scene, namespace, ServingChild(namespace, scene.exported)


def test_in_the_hosts_namespace_a_private_volume_keeps_the_directory_busy(tmp_path: Path) -> None:
    """The control of the next test."""

    scene = Scene(tmp_path)
    perform_mount(scene.request)

    with pytest.raises(OSError, match="busy") as caught:
        scene.remove_below()

    assert caught.value.errno == errno.EBUSY


def test_the_host_removes_what_was_mounted_below_a_volume_of_the_namespace(tmp_path: Path) -> None:
    scene, namespace, child = served(tmp_path)

    namespace.mount(scene.request)

    assert child.names("volume/below") == ["file"]
    assert os.listdir(scene.mounts / "volume") == [], "the host's share has the mount point only"
    scene.remove_below()
    assert child.names("volume") == []
    later = scene.volume / "later"
    later.mkdir()
    syscalls.mount("later", str(later), "tmpfs", 0, "")
    (later / "file").write_text("x")
    assert child.names("volume/later") == [], "a private volume gets no later mount"


def test_an_unmount_reaches_the_serving_child_and_is_idempotent(tmp_path: Path) -> None:
    scene, namespace, child = served(tmp_path)
    namespace.mount(scene.request)

    namespace.unmount(scene.request.target)
    namespace.unmount(scene.request.target)

    assert child.names("volume") == []
    assert child.names("") == ["volume"]
    namespace.close()


def test_a_volume_that_cannot_be_mounted_is_named_and_mounts_of_the_host_reach_the_child(tmp_path: Path) -> None:
    scene, namespace, child = served(tmp_path)
    gone = bind(tmp_path / "gone", scene.mounts / "gone", "rbind", "rprivate", beneath=scene.mounts)

    with pytest.raises(FailedPrecondition, match=f"mount '{gone.target}'.*{tmp_path}/gone"):
        namespace.mount(gone)
    perform_mount(bind(scene.volume, scene.mounts / "seen", "rbind", "rslave", beneath=scene.mounts))

    assert child.names("seen/below") == ["file"]


def test_a_script_has_no_namespace_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "virtiofsd"
    script.write_text("#!/bin/sh\n")

    assert Scene(tmp_path).namespace_of(str(script)) is None


def await_chroot(pid: int) -> None:
    """Its root is the share: it has got its client."""
    while os.path.exists(f"/proc/{pid}/root/usr"):
        time.sleep(0.01)


@pytest.mark.skipif(not os.access(REAL_C, os.X_OK), reason=f"needs {REAL_C}")
def test_the_process_that_serves_the_guest_sees_the_volume_and_the_host_does_not(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        children, host_view = Children(), os.stat("/proc/self/ns/mnt").st_ino
        plan = scene.plan(REAL_C)
        flavours = VirtiofsdFlavours(children, FileAnswers(str(tmp_path / "answers")))
        virtiofsd = await start_virtiofsd(plan, FakeLedger(), children, flavours=flavours)
        assert virtiofsd.namespace is not None
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(plan.listen_path)
            await asyncio.to_thread(await_chroot, virtiofsd.pid)
            root = f"/proc/{virtiofsd.pid}/root"

            virtiofsd.namespace.mount(scene.request)

            assert os.stat(f"/proc/{virtiofsd.pid}/ns/mnt").st_ino != host_view
            assert os.listdir(f"{root}/volume/below") == ["file"]
            scene.remove_below()
            assert os.listdir(f"{root}/volume") == []
            virtiofsd.namespace.unmount(scene.request.target)
            assert os.stat(f"{root}/volume").st_dev == os.stat(root).st_dev
        await virtiofsd.stop()

    asyncio.run(scenario(Scene(tmp_path)))
