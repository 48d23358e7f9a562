"""Roots that are pulled in the guest, and by which request; volumes where nothing is shared."""

import base64
import json
from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.mounts import SourceKind
from pyshim.model.oci import OciSpec
from pyshim.model.plans import ContainerPlan
from pyshim.model.task import RootfsMount
from pyshim.model.volumes import SourceFacts
from pyshim.pod.plan.container import container_plan, without_image
from pyshim.resources.volumes.plan.guest_pull import root_pulled_in_guest
from pyshim.resources.volumes.plan.share import no_share
from pyshim.resources.volumes.plan.virtual_volume import virtual_volume
from tests.fakes.inputs import configured, spec
from tests.unit.resources.volumes.test_plan import bind

FORCED = {"experimental_force_guest_pull": True}
NAMED = {"io.kubernetes.cri.image-name": "docker.io/library/busybox:1"}
CID = ContainerId("c1")


def overlay(*options: str) -> tuple[RootfsMount, ...]:
    return (RootfsMount(type="overlay", source="overlay", target="", options=("lowerdir=/a:/b", *options)),)


def volume(**members: Any) -> str:
    return "io.katacontainers.volume=" + base64.b64encode(json.dumps(members).encode()).decode()


def pulled(config: Config, spec: OciSpec, rootfs: tuple[RootfsMount, ...] = ()) -> Storage | None:
    return root_pulled_in_guest(virtual_volume(rootfs or overlay(), CID), spec, config, CID)


def test_a_forced_pull_goes_by_the_pods_own_name_for_the_image() -> None:
    storage = pulled(configured(runtime=FORCED), spec(annotations=NAMED))

    assert storage is not None
    assert (storage.driver, storage.fs_type) == ("image_guest_pull", "overlay")
    assert storage.source == "docker.io/library/busybox:1"
    assert storage.mount_point == "/run/kata-containers/c1/rootfs"
    assert storage.driver_options == ('image_guest_pull={"metadata":' + json.dumps(NAMED, separators=(",", ":")) + "}",)


def test_a_snapshotter_may_ask_for_it() -> None:
    option = volume(volume_type="image_guest_pull", source="quay.io/a:b", image_pull={"metadata": {"k": "v"}})

    storage = pulled(configured(), spec(), overlay(option))

    assert storage is not None
    assert (storage.source, storage.driver_options) == ("quay.io/a:b", ('image_guest_pull={"metadata":{"k":"v"}}',))


def test_a_pods_sandbox_has_the_guests_own_image() -> None:
    annotations = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}

    storage = pulled(configured(runtime=FORCED), spec(annotations=annotations))

    assert storage is not None
    assert storage.source == "pause"


def test_nothing_is_pulled_unless_somebody_asks() -> None:
    assert pulled(configured(), spec(annotations=NAMED)) is None


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ((), FailedPrecondition, "needs the image's name in annotation"),
        (("io.katacontainers.volume=%",), InvalidArgument, "not base64 of JSON"),
        (("io.katacontainers.volume=QUJD",), InvalidArgument, "not base64 of JSON"),
        ((volume(volume_type="image_nydus_fs"),), Unimplemented, "volume type 'image_nydus_fs' is not supported"),
        ((volume(volume_type="image_guest_pull"),), InvalidArgument, "names no image"),
        ((volume(volume_type="image_guest_pull", source="a"),) * 2, InvalidArgument, "2 volumes of its root"),
        ((volume(volume_type="image_guest_pull", source="a", image_pull=[1]),), InvalidArgument, "names no image"),
    ],
)
def test_what_cannot_be_pulled_is_said(options: tuple[str, ...], kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        pulled(configured(runtime=FORCED), spec(), overlay(*options))


def planned(config: Config, spec: OciSpec, kinds: dict[str, SourceKind]) -> ContainerPlan:
    return container_plan(
        container_id=CID,
        bundle=HostPath("/bundle"),
        rootfs=overlay(),
        spec=spec,
        config=config,
        share=no_share(SandboxId("s1")),
        sources={path: SourceFacts(kind=kind) for path, kind in kinds.items()},
        hostname="h",
        sysctls={},
        terminal=False,
    )


CONFIGMAP = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~configmap/v"


def test_without_a_share_volumes_are_copied_and_the_host_mounts_nothing() -> None:
    kinds = {CONFIGMAP: SourceKind.DIRECTORY, "/etc/file": SourceKind.FILE}
    mounts = [bind("/config", CONFIGMAP, "ro"), bind("/file", "/etc/file", "ro"), bind("/again", "/etc/file", "ro")]

    plan = planned(configured({"shared_fs": "none"}, FORCED), spec(annotations=NAMED, mounts=mounts), kinds)

    assert (plan.rootfs_mounts, plan.share_mounts, plan.share_points) == ((), (), ())
    assert [(copy.source, copy.follows) for copy in plan.copies] == [(CONFIGMAP, True), ("/etc/file", False)]
    sources = [mount["source"] for mount in plan.guest.spec["mounts"]]
    assert sources == [plan.copies[0].guest_path, plan.copies[1].guest_path, plan.copies[1].guest_path]
    assert all(source.startswith("/run/kata-containers/shared/containers/copy-") for source in sources)
    assert plan.guest.spec["root"]["path"] == "/run/kata-containers/c1/rootfs"
    assert plan.guest.storages[0].driver == "image_guest_pull"
    assert without_image(plan).copies == ()


def test_a_socket_cannot_be_copied() -> None:
    config = configured({"shared_fs": "none"}, FORCED)

    with pytest.raises(FailedPrecondition, match=r"'/run/x\.sock' on '/s'.*copies directories and files only"):
        planned(
            config, spec(annotations=NAMED, mounts=[bind("/s", "/run/x.sock", "ro")]), {"/run/x.sock": SourceKind.OTHER}
        )


def test_a_root_that_cannot_reach_the_guest_is_refused_with_the_ways_out() -> None:
    with pytest.raises(FailedPrecondition, match=r"block snapshotter.*experimental_force_guest_pull"):
        planned(configured({"shared_fs": "none"}), spec(), {})
