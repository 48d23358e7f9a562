"""A container must not notice that it runs in a VM: what a process sees with pyshim and with runc, compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protos.cri import v1_pb2 as pb

from .comparison.allowed import unexplained, unneeded
from .framework import boots, cgroups, erofs, images, kata_agent, releases, shim_config
from .framework.cri import CRI_IMAGE, HANDLER, Cri, Pod, Security
from .framework.cri_session import LAYERS_CONFIG, LAYERS_HANDLER, RUNC_HANDLER, settled
from .framework.kubelet_volumes import PodDirectory, volume

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

_PROBE = Path(__file__).parent / "comparison" / "probe.py"
_REPORTS = Path(__file__).parents[1] / ".build" / "differences"
_LAYERS_IMAGE = "docker.io/local/inside:layers"
_INTERPRETER = ("/usr", "/lib", "/lib64")
_PLACES = ("/", "/dev/shm", "/disk", "/host", "/memory", "/settings")
"""Directories whose file system is tried."""
_MASKED = (
    *("/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware"),
    "/sys/devices/virtual/powercap",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Both as the kubelet has them."""
MIB = 1 << 20
# runc refuses a limit whose controller the host lacks, as it lacks this one where its kernel is told so.
_MEMORY = {"memory_limit_in_bytes": 256 * MIB} if cgroups.has("memory") else {}


@dataclass(frozen=True)
class Scene:
    """One description of a container, given to both runtimes."""

    name: str
    security: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    privileged: bool = False
    terminal: bool = False


SCENES = (
    Scene("root"),
    Scene(
        "user",
        security={
            "run_as_user": pb.Int64Value(value=1000),
            "run_as_group": pb.Int64Value(value=1000),
            "supplemental_groups": [50, 2000],
            "no_new_privs": True,
            "capabilities": pb.Capability(drop_capabilities=["ALL"], add_capabilities=["NET_BIND_SERVICE"]),
        },
        resources={"cpu_period": 100_000, "cpu_quota": 50_000, **_MEMORY},
    ),
    Scene("read-only", security={"readonly_rootfs": True}, terminal=True),
)


_differ: dict[str, list[str]] = {}
"""The facts that differ, by scene: of the tests that have run."""


@pytest.fixture(scope="module")
def pods(cri: Cri, module_leaves_nothing: None) -> Iterator[dict[str, Pod]]:
    """A pod of each runtime, for all scenes that a pod without privileges can have."""
    with cri.pod(handler=RUNC_HANDLER) as runc, cri.pod(handler=HANDLER) as vm:
        yield {"runc": runc, "pyshim": settled(vm)}


@pytest.fixture
def volumes(scratch: Path) -> Iterator[list[pb.Mount]]:
    """A disk emptyDir, one in memory, a host directory and a ConfigMap."""
    of_pod = PodDirectory(scratch / "kubelet")
    (scratch / "host").mkdir(mode=0o777)
    (scratch / "host").chmod(0o777)
    settings = of_pod.payload("configmap", "settings")
    settings.write({"key": "value"})
    try:
        yield [
            volume(of_pod.empty_dir("disk"), "/disk"),
            volume(of_pod.empty_dir("memory", memory="16m"), "/memory"),
            volume(scratch / "host", "/host"),
            volume(settings.path, "/settings", readonly=True),
            *(volume(Path(path), path, readonly=True) for path in _INTERPRETER if Path(path).is_dir()),
            volume(_PROBE, "/probe.py", readonly=True),
        ]
    finally:
        of_pod.remove()


def facts(pod: Pod, scene: Scene, mounts: list[pb.Mount], image: str = CRI_IMAGE) -> dict[str, Any]:
    security = Security(privileged=scene.privileged, **scene.security)
    if not scene.privileged:
        security.masked_paths.extend(_MASKED)
        security.readonly_paths.extend(_READ_ONLY)
    security.namespace_options.CopyFrom(pod.config.linux.security_context.namespace_options)
    container = pod.start(
        os.path.realpath(sys.executable),
        "-I",
        "-S",
        "/probe.py",
        *_PLACES,
        security=security,
        resources=pb.LinuxContainerResources(oom_score_adj=500, **scene.resources),
        mounts=mounts,
        tty=scene.terminal,
        image=image,
    )
    try:
        found: dict[str, Any] = json.loads(container.run_to_end())
        return found
    finally:
        pod.remove_containers()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_process_sees_what_it_sees_with_runc(
    pods: dict[str, Pod], scene: Scene, leaves_nothing: None, volumes: list[pb.Mount]
) -> None:
    assert compared(pods, scene, volumes) == {}


def test_a_privileged_process_sees_what_it_sees_with_runc(
    cri: Cri, leaves_nothing: None, volumes: list[pb.Mount]
) -> None:
    with (
        cri.pod(handler=RUNC_HANDLER, privileged=True) as runc,
        cri.pod(handler=HANDLER, privileged=True) as vm,
    ):
        assert compared({"runc": runc, "pyshim": vm}, Scene("privileged", privileged=True), volumes) == {}


@pytest.mark.skipif(kata_agent.is_chosen(), reason="some rows are of crun, with which our agent makes containers")
def test_the_table_allows_nothing_that_no_scene_needs() -> None:
    if _differ.keys() != {"privileged", *(scene.name for scene in SCENES)}:
        pytest.skip("needs the tests of all scenes to have run before")

    assert unneeded(_differ) == []


@pytest.mark.skipif(
    not releases.chosen().leaves_mounts_to_shims,
    reason="needs a containerd that leaves layers to a shim (CONTAINERD=2.3)",
)
def test_a_process_whose_image_is_disks_sees_what_it_sees_with_runc(
    cri: Cri, leaves_nothing: None, volumes: list[pb.Mount]
) -> None:
    """The image's layers are EROFS disks of the VM; volumes are shared."""
    archive = LAYERS_CONFIG.parent / "image.tar"
    archive.parent.mkdir()
    images.write_archive(archive, _LAYERS_IMAGE)
    imported = ("--namespace", "k8s.io", "images", "import", *releases.chosen().client_import)
    for words in ((), ("--snapshotter", erofs.SNAPSHOTTER)):
        cri.daemon.ctr(*imported, *words, archive)
    archive.unlink()
    shim_config.variant(LAYERS_CONFIG.parent)
    try:
        with cri.pod(handler=RUNC_HANDLER) as runc, cri.pod(handler=LAYERS_HANDLER) as vm:
            assert compared({"runc": runc, "pyshim": vm}, Scene("disks"), volumes, _LAYERS_IMAGE) == {}
    finally:
        cri.daemon.ctr("--namespace", "k8s.io", "images", "rm", "--sync", _LAYERS_IMAGE)


def compared(
    pods: Mapping[str, Pod], scene: Scene, mounts: list[pb.Mount], image: str = CRI_IMAGE
) -> dict[str, tuple[object, object]]:
    """The facts that differ and that the table does not allow. All that differ are in `_REPORTS`."""
    seen = {name: facts(pod, scene, mounts, image) for name, pod in pods.items()}
    names = sorted(seen["runc"].keys() | seen["pyshim"].keys())
    pairs = {name: (seen["runc"].get(name, "absent"), seen["pyshim"].get(name, "absent")) for name in names}
    different = {name: values for name, values in pairs.items() if values[0] != values[1]}
    _differ[scene.name] = list(different)
    directory = _REPORTS / (
        "kata-agent" if kata_agent.is_chosen() else "warm" if boots.is_warm("test_differences") else "booted"
    )
    directory.mkdir(parents=True, exist_ok=True)
    report = {"facts": len(names), "different": different}
    (directory / f"{scene.name}.json").write_text(json.dumps(report, indent=1))
    assert len(names) > 300, "the probe has lost facts"
    return {name: different[name] for name in unexplained(scene.name, different)}
