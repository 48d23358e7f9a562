"""Reading config.json and the kind of its container: what is wrong is named, whatever it is."""

import json
from typing import Any

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId
from pyshim.model.oci import (
    NO_HOOKS,
    Caller,
    ContainerKind,
    PodName,
    caller_of,
    container_name,
    keys_of,
    membership,
    parse_spec,
    pod_of,
)

WHERE = "/b/config.json"


def parse(**members: Any) -> Any:
    spec = {"process": {"args": ["sh"]}, "root": {"path": "rootfs"}, **members}
    return parse_spec(json.dumps(spec).encode(), WHERE)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"process": None}, "process is missing"),
        ({"process": {"args": []}}, "process.args is empty"),
        ({"process": {"args": "sh"}}, "process.args is not a list of str"),
        ({"process": {"args": ["sh"], "terminal": 1}}, "process.terminal is not true or false"),
        ({"root": None}, "root is missing"),
        ({"root": {"path": ""}}, "root.path is empty"),
        ({"root": {"path": "a\0b"}}, "root.path is not text"),
        ({"root": {"path": "\ud800"}}, "root.path is not text"),
        ({"hostname": 3}, "hostname is not a str"),
        ({"mounts": {}}, "mounts is not a list"),
        ({"mounts": [{"destination": "data"}]}, r"mounts\[0\].destination is not absolute"),
        ({"mounts": [{"destination": "/d"}] * 100_000}, "mounts has 100000 entries, at most 4096"),
        ({"linux": [1]}, "linux is not an object"),
        ({"linux": {"namespaces": [{"type": "soul"}]}}, "is not a known namespace"),
        (
            {"linux": {"devices": [{"path": "/d", "type": "b", "major": True}]}},
            r"devices\[0\].major is not a whole number",
        ),
        ({"linux": {"resources": [1]}}, "linux.resources is not an object"),
        ({"linux": {"resources": {"cpu": "all"}}}, "linux.resources.cpu is not an object"),
        ({"linux": {"resources": {"memory": [1]}}}, "linux.resources.memory is not an object"),
        ({"linux": {"resources": {"devices": [7]}}}, r"linux.resources.devices\[0\] is not an object"),
        ({"linux": {"resources": {"devices": [{"access": 7}]}}}, r"devices\[0\].access is not a str"),
        ({"linux": {"sysctl": [5]}}, "linux.sysctl is not an object of strings"),
        ({"hooks": {"prestart": [{}]}}, r"hooks.prestart\[0\].path is missing"),
        ({"hooks": {"createRuntime": [{"path": "sh"}]}}, r"hooks.createRuntime\[0\].path is not absolute: 'sh'"),
        ({"hooks": {"poststop": [{"path": "/h", "timeout": 0}]}}, r"hooks.poststop\[0\].timeout is not above zero: 0"),
        (
            {"hooks": {"poststart": [{"path": "/h", "env": ["A"]}]}},
            r"hooks.poststart\[0\].env has an entry that is not",
        ),
        ({"hooks": {"poststart": [{"path": "/h", "args": "a"}]}}, r"hooks.poststart\[0\].args is not a list"),
        ({"annotations": {"a": 1}}, "annotations is not an object of strings"),
    ],
)
def test_a_wrong_member_is_named_with_its_file(members: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"read spec '{WHERE}': .*{named}"):
        parse(**members)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"{", b"[" * 100_000, b'{"process": {}}'])
def test_what_is_no_spec_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=WHERE):
        parse_spec(data, WHERE)


def test_null_members_are_as_if_missing() -> None:
    spec = parse(linux=None, mounts=None, annotations=None, hooks={"prestart": None})

    assert (spec.mounts, spec.devices, dict(spec.annotations), spec.hooks) == ((), (), {}, NO_HOOKS)


@pytest.mark.parametrize(
    ("process", "named"),
    [
        pytest.param({"args": []}, "process.args is empty", id="no-args"),
        pytest.param({"args": ["a"], "cwd": "relative"}, "process.cwd is not absolute: 'relative'", id="relative-cwd"),
        pytest.param({"args": ["a"], "cwd": ""}, "process.cwd is not absolute: ''", id="empty-cwd"),
        pytest.param({"args": ["a"], "cwd": 3}, "process.cwd", id="cwd-of-another-type"),
    ],
)
def test_an_invalid_process_is_refused_by_name(process: dict[str, object], named: str) -> None:
    data = json.dumps({"process": process, "root": {"path": "rootfs"}}).encode()

    with pytest.raises(InvalidArgument, match=r"^read spec '/b/config\.json': ") as refused:
        parse_spec(data, "/b/config.json")

    assert named in str(refused.value)


def test_an_absolute_directory_and_a_missing_one_are_accepted() -> None:
    for process in ({"args": ["a"], "cwd": "/x"}, {"args": ["a"]}):
        spec = parse_spec(json.dumps({"process": process, "root": {"path": "rootfs"}}).encode(), "/b/config.json")
        assert spec.root_path == "rootfs"


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
        ({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "../../etc"}, "sandbox-id"),
    ],
)
def test_a_bad_annotation_is_named(annotations: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        membership(annotations, ContainerId("me"))


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
