"""POSIX promises on a container's file systems: `posix_check.py` run inside, by the host's Python. For disks, see
`test_disks.py`."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework import pjdfstest
from .framework.cri import HANDLER, Container, Cri, Pod
from .framework.cri_session import RUNC_HANDLER
from .framework.kubelet_volumes import PodDirectory, volume
from .framework.pod_python import LINKS
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

_CHECK = Path(__file__).with_name("posix_check.py")
_HOSTS = ("/usr", "/lib", "/lib64")
SHARED_LACKS = {"unsupported: extended_attributes"}
"""Where the test's directory is on a tmpfs of the host: it has those of users since Linux 6.6."""
MEMORY_LACKS = {"unsupported: extended_attributes", "unsupported: direct_io"}
"""tmpfs has them since Linux 6.6, both."""


def checked(container: Container, directory: str) -> set[str]:
    done = container.exec(os.path.realpath(sys.executable), "-I", "-S", "/check.py", directory, timeout=120)
    assert done.code == 0, done
    *notes, last = done.out.splitlines()
    assert last.startswith("checked "), done.out
    return set(notes)


def test_posix_promises_hold_on_shared_directories_and_in_the_guests_memory(pod: Pod, scratch: Path) -> None:
    (scratch / "shared").mkdir()
    mounts = [pb.Mount(host_path=path, container_path=path, readonly=True) for path in _HOSTS if Path(path).is_dir()]
    mounts.append(pb.Mount(host_path=str(scratch / "shared"), container_path="/shared"))
    mounts.append(pb.Mount(host_path=str(_CHECK), container_path="/check.py", readonly=True))
    container = pod.start(mounts=mounts)

    assert checked(container, "/shared") <= SHARED_LACKS
    assert checked(container, "/dev/shm") <= MEMORY_LACKS


_ON_DEVICES = ("::block", "::char")
"""The ends of names of pjdfstest's tests on device nodes, which cannot be made on a shared directory."""


def _suite_in_two_containers(pod: Pod, mounts: list[pb.Mount]) -> list[dict[str, str]]:
    run = "mkdir /v/$0; /pjdfstest -c /settings.toml -p /v/$0; rm -r /v/$0"
    script = f"{LINKS}{pjdfstest.ADD_USERS}{run}"
    both = [pod.start("sh", "-c", script, name, mounts=mounts) for name in ("one", "other")]
    eventually(lambda: not any(each.is_running for each in both), what="the suite's end", within_s=1400)
    return [pjdfstest.results(container.log()) for container in both]


@pytest.mark.skipif(not pjdfstest.is_chosen(), reason="needs `make peers WHAT=inside`")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("memory", ["", "64m"], ids=["disk", "memory"])
def test_pjdfstest_in_two_containers_fails_where_it_does_with_runc(
    cri: Cri, kubelet: PodDirectory, scratch: Path, leaves_nothing: None, memory: str
) -> None:
    """Both run the whole suite at the same time, in the same volume."""
    (scratch / "settings.toml").write_text(pjdfstest.SETTINGS)
    mounts = [
        volume(Path("/usr"), "/usr", readonly=True),
        volume(pjdfstest.PROGRAM, "/pjdfstest", readonly=True),
        volume(scratch / "settings.toml", "/settings.toml", readonly=True),
        volume(kubelet.empty_dir("data", memory=memory), "/v"),
    ]
    seen: dict[str, list[dict[str, str]]] = {}
    for handler in (RUNC_HANDLER, HANDLER):
        with cri.pod(handler=handler) as pod:
            seen[handler] = _suite_in_two_containers(pod, mounts)

    counts = {handler: [Counter(found.values()) for found in each] for handler, each in seen.items()}
    pjdfstest.FIGURES.mkdir(exist_ok=True)
    (pjdfstest.FIGURES / f"{memory or 'disk'}.json").write_text(json.dumps({"counts": counts, "seen": seen}, indent=1))
    failed = {
        handler: [{test for test in found if found[test] == "FAILED"} for found in each]
        for handler, each in seen.items()
    }
    assert all(count["ok"] > 100 for each in counts.values() for count in each), counts
    for with_runc, here in zip(failed[RUNC_HANDLER], failed[HANDLER], strict=True):
        assert [test for test in here - with_runc if memory or not test.endswith(_ON_DEVICES)] == []
