"""Only the keys of the runtime that wrote a spec are read: a pod's own annotations never pass for its runtime's."""

import pytest

from pyshim.model.caller import Caller, PodName, caller_of, container_name, keys_of, pod_of
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId
from pyshim.model.kind import membership

CONTAINERDS = {
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": "u1",
    "io.kubernetes.cri.container-name": "app",
}
KUBELETS = {
    "io.kubernetes.pod.name": "db",
    "io.kubernetes.pod.namespace": "bank",
    "io.kubernetes.pod.uid": "u2",
    "io.kubernetes.container.name": "sql",
}
CONTAINERD = {"io.kubernetes.cri.container-type": "container"}
CRIO = {"io.kubernetes.cri-o.ContainerType": "container"}
DOCKER = {"io.kubernetes.docker.type": "container"}


@pytest.mark.parametrize(
    ("written", "caller", "pod", "name"),
    [
        (CONTAINERD, Caller.CONTAINERD, PodName("web", "shop", "u1"), "app"),
        (CRIO, Caller.CRI_O, PodName("db", "bank", "u2"), "sql"),
        (DOCKER, Caller.CRI_DOCKERD, PodName("db", "bank", "u2"), "sql"),
        ({}, Caller.CONTAINERD, PodName("web", "shop", "u1"), "app"),
    ],
)
def test_only_the_callers_own_names_are_read(written: dict[str, str], caller: Caller, pod: PodName, name: str) -> None:
    annotations = {**CONTAINERDS, **KUBELETS, **written}

    assert caller_of(annotations) is caller
    assert (pod_of(annotations), container_name(annotations)) == (pod, name)


def test_a_pods_names_under_crio_are_labels_which_it_cannot_write_over() -> None:
    """CRI-O writes a pod's annotations over its own keys, and the labels last."""
    forged = {"io.kubernetes.cri-o.KubeName": "kube-proxy", "io.kubernetes.cri-o.Namespace": "kube-system"}

    assert pod_of({**CRIO, **KUBELETS, **forged, **CONTAINERDS}) == PodName("db", "bank", "u2")
    assert pod_of({**CRIO, **forged}) == PodName("", "", "")


@pytest.mark.parametrize("both", [CRIO | CONTAINERD, CRIO | DOCKER, CONTAINERD | DOCKER])
def test_the_types_of_two_runtimes_are_refused_by_name(both: dict[str, str]) -> None:
    for read in (caller_of, keys_of, pod_of, container_name, lambda found: membership(found, ContainerId("c1"))):
        with pytest.raises(InvalidArgument, match="container runtimes") as refused:
            read(both)
        assert all(f"'{key}'" in str(refused.value) for key in both)
