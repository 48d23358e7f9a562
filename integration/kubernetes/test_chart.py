"""The Helm chart before a real API server: every object is valid, the policy holds, an agent gets its node labelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.framework.waiting import eventually
from pyshim.node.kubernetes.api import Access
from tests.fakes.api_server import FakeApiServer
from tests.unit.configs.test_chart import SETS
from tests.unit.node.install import test_node_agent as played

from . import helm
from .cluster import ADDRESS, GROUND, NODE, SERVER, TOKEN, Cluster

_AGENT = "system:serviceaccount:default:pyshim-node"
_TAINT = {"key": played.TAINT, "effect": "NoSchedule"}
_MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def program() -> str:
    found = helm.find()
    assert found is not None, "helm is missing (hint: .venv/bin/python -m integration.kubernetes.helm)"
    return found


def plural(value: dict[str, Any], resources: dict[str, tuple[str, bool]]) -> str:
    """The path under which an object is created."""
    version = value["apiVersion"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    name, namespaced = resources[f"{version}/{value['kind']}"]
    return f"{root}/namespaces/{value['metadata']['namespace']}/{name}" if namespaced else f"{root}/{name}"


def resources_of(kube: Cluster, versions: set[str]) -> dict[str, tuple[str, bool]]:
    """The API server's objects of these versions."""
    found = {}
    for version in versions:
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        for each in kube.call("GET", root)["resources"]:
            if "/" not in each["name"]:
                found[f"{version}/{each['kind']}"] = (each["name"], each["namespaced"])
    return found


_OF_OPERATORS = ("cert-manager.io/", "monitoring.coreos.com/", "nfd.k8s-sigs.io/")
"""Objects of programs that this cluster has not."""


@pytest.mark.parametrize("name", list(SETS))
def test_the_api_server_takes_every_object(kube: Cluster, program: str, name: str) -> None:
    """But the pod of `helm test`, whose class has to be there first."""
    objects = [
        each
        for each in yaml.safe_load_all(helm.template(program, "--namespace=default", *SETS[name]))
        if each and each["kind"] != "Pod" and not each["apiVersion"].startswith(_OF_OPERATORS)
    ]
    resources = resources_of(kube, {each["apiVersion"] for each in objects})

    for each in objects:
        path = plural(each, resources)
        if each["kind"] == "RuntimeClass" and each["metadata"]["name"] == "pykata":
            each["metadata"]["name"] = "pykata-of-the-chart"  # the cluster has the shipped one
        kube.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", each)
    assert len(objects) > 8


@contextlib.contextmanager
def tainted(kube: Cluster) -> Iterator[None]:
    path = f"/api/v1/nodes/{NODE}"
    kube.call("PATCH", path, {"spec": {"taints": [_TAINT]}}, _MERGE)
    try:
        yield
    finally:
        kube.call("PATCH", path, {"spec": {"taints": None}}, _MERGE)


@pytest.fixture
def policy(kube: Cluster, program: str) -> Iterator[None]:
    """It is in force."""
    made = []
    group = "/apis/admissionregistration.k8s.io/v1"
    try:
        for each in yaml.safe_load_all(
            helm.template(program, "--namespace=default", "--show-only=templates/policy.yaml")
        ):
            name = (
                "validatingadmissionpolicies"
                if each["kind"].endswith("Policy")
                else "validatingadmissionpolicybindings"
            )
            kube.call("POST", f"{group}/{name}", each)
            made.append(f"{group}/{name}/{each['metadata']['name']}")
        eventually(lambda: refusal(kube, {"metadata": {"labels": {"other": "x"}}}) != "", what="the policy is in force")
        yield
    finally:
        for path in reversed(made):
            kube.call("DELETE", path)


def refusal(kube: Cluster, patch: dict[str, Any], node: str = NODE) -> str:
    """The API server's refusal of a patch by the agent of `node`; empty when it takes it. Nothing is changed."""
    request = urllib.request.Request(
        f"{SERVER}/api/v1/nodes/{NODE}?dryRun=All",
        method="PATCH",
        data=json.dumps(patch).encode(),
        headers={
            "Authorization": f"Bearer {TOKEN}",
            "Content-Type": _MERGE,
            "Impersonate-User": _AGENT,
            "Impersonate-Extra-authentication.kubernetes.io%2Fnode-name": node,
        },
    )
    tls = ssl.create_default_context()
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(request, timeout=30, context=tls):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["message"])


OURS = {"metadata": {"labels": {"pyshim.io/pykata": "true"}, "annotations": {"pyshim.io/message": "m"}}}
POLICY: dict[str, tuple[dict[str, Any], str, str]] = {
    "its-own": (OURS, NODE, ""),
    "untaint": ({"spec": {"taints": None}}, NODE, ""),
    "another-node": (OURS, "node2", "its own node only"),
    "a-label": ({"metadata": {"labels": {"zone": "x"}}}, NODE, "labels of pyshim.io only"),
    "no-label": ({"metadata": {"labels": {"kubernetes.io/hostname": None}}}, NODE, "labels of pyshim.io only"),
    "an-annotation": ({"metadata": {"annotations": {"a": "b"}}}, NODE, "annotations of pyshim.io only"),
    "a-taint": (
        {"spec": {"taints": [_TAINT, {"key": "mine", "effect": "NoExecute"}]}},
        NODE,
        "removes its start-up taint only",
    ),
    "cordon": ({"spec": {"unschedulable": True}}, NODE, "neither cordons nor uncordons"),
}


def test_an_agent_may_change_what_is_its_own_and_nothing_else(kube: Cluster, policy: None) -> None:
    with tainted(kube):
        said = {name: refusal(kube, patch, node) for name, (patch, node, _wanted) in POLICY.items()}

    wrong = {
        name: said[name]
        for name, (_patch, _node, wanted) in POLICY.items()
        if (said[name] == "") != (wanted == "") or wanted not in said[name]
    }
    assert wrong == {}


def test_an_agent_labels_a_real_node_and_takes_all_of_it_back(kube: Cluster, scratch: Path) -> None:
    """The API server and the node's object are real; what it would run on the host is played."""
    (scratch / "token").write_text(TOKEN)
    access = Access(
        server=f"https://{ADDRESS}",
        token=str(scratch / "token"),
        authority=str(GROUND / "api-server" / "apiserver.crt"),
    )
    node = played.Node(scratch, FakeApiServer(), name=NODE)

    def ours(kind: str) -> dict[str, str]:
        found = kube.call("GET", f"/api/v1/nodes/{NODE}")["metadata"].get(kind, {})
        return {key: text for key, text in found.items() if key.startswith("pyshim.io/")}

    async def scene() -> None:
        async with node.running(access):
            await played.until(node.ready.exists)
            labels = ours("labels")
            taints = kube.call("GET", f"/api/v1/nodes/{NODE}")["spec"].get("taints")
            assert (labels["pyshim.io/state"], labels["pyshim.io/pykata"], taints) == ("ready", "true", None)
            # The overhead of the class was read, and the remark about it is shown.
            assert ours("annotations")["pyshim.io/message"] == "pykata: too little (hint: more)"
            node.wish.touch()
            await played.until(lambda: not ours("labels"))

    verdict = {"subject": "overhead", "level": "warning", "text": "too little", "hint": "more"}
    (node.root / "check.json").write_text(json.dumps({"verdicts": [verdict]}))
    with tainted(kube):
        asyncio.run(scene())

    assert (ours("labels"), ours("annotations")) == ({}, {})
