"""Which annotations make which kind of container."""

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId
from pyshim.model.kind import ContainerKind, membership

CASES = [
    ({}, ContainerKind.SINGLE_CONTAINER, "me"),
    ({"io.kubernetes.cri.container-type": "sandbox"}, ContainerKind.POD_SANDBOX, "me"),
    (
        {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod"},
        ContainerKind.POD_CONTAINER,
        "pod",
    ),
    (
        {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": "pod"},
        ContainerKind.POD_CONTAINER,
        "pod",
    ),
    (
        {"io.kubernetes.cri-o.ContainerType": "sandbox", "io.kubernetes.cri-o.SandboxID": "me"},
        ContainerKind.POD_SANDBOX,
        "me",
    ),
    ({"io.kubernetes.docker.type": "podsandbox"}, ContainerKind.POD_SANDBOX, "me"),
]


@pytest.mark.parametrize(("annotations", "kind", "sandbox"), CASES)
def test_annotations_place_a_container(annotations: dict[str, str], kind: ContainerKind, sandbox: str) -> None:
    member = membership(annotations, ContainerId("me"))

    assert (member.kind, member.sandbox_id) == (kind, sandbox)


@pytest.mark.parametrize(
    ("annotations", "named"),
    [
        ({"io.kubernetes.cri.container-type": "vm"}, "container-type"),
        ({"io.kubernetes.cri.container-type": "container"}, "sandbox-id"),
        ({"io.kubernetes.cri-o.ContainerType": "container"}, "SandboxID"),
        ({"io.kubernetes.cri-o.ContainerType": "pod"}, "ContainerType"),
        (
            {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "../../etc"},
            "sandbox-id",
        ),
    ],
)
def test_a_bad_annotation_is_named(annotations: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        membership(annotations, ContainerId("me"))
