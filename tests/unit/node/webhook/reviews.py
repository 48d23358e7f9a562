"""AdmissionReviews for tests, and classes to answer them with."""

import base64
import copy
import json
from fractions import Fraction
from typing import Any

import jsonpatch

from pyshim.config.sources import Source
from pyshim.model.host_facts import unbounded
from pyshim.node.webhook.judge import PodClass
from pyshim.node.webhook.review import Action, ReviewAnswer, answer
from tests.fakes.facts import host_facts

HOST_SIDE = 110
ENABLED = ["default_vcpus", "default_memory", "requested_vcpus", "requested_memory"]
HYPERVISOR = "io.katacontainers.config.hypervisor."


def pod_class(*, node: dict[str, int] | None = None, runtime: dict[str, Any] | None = None, **qemu: Any) -> PodClass:
    """Policy `overhead` with small figures, sized before the boot, unless a test says otherwise."""
    usual = {
        "enable_annotations": ENABLED,
        "default_vcpus": 1,
        "default_memory": 512,
        "overhead_vcpus": Fraction(1, 4),
        "overhead_memory": 112,
    }
    document = {
        "hypervisor": {"qemu": {**usual, **qemu}},
        "runtime": {"static_sandbox_resource_mgmt": True, "sizing_policy": "overhead", **(runtime or {})},
    }
    facts = host_facts(kvm_usable=True)
    return PodClass(
        source=Source(path="/etc/pyshim/configuration.toml", directory="/etc/pyshim", document=document),
        node=host_facts(kvm_usable=True, **node) if node else unbounded(facts),
        host_side_mib=HOST_SIDE,
    )


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Each container is given as its `resources`."""
    metadata: dict[str, Any] = {"name": "web", "namespace": "shop"}
    if annotations is not None:
        metadata["annotations"] = annotations
    listed = [{"name": f"c{n}", "image": "busybox", "resources": each} for n, each in enumerate(containers)]
    overhead = {"cpu": "250m", "memory": "320Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"runtimeClassName": "pykata", "containers": listed, "overhead": overhead, **spec},
    }


def review(found: object, **request: Any) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "shop",
            "operation": "CREATE",
            "userInfo": {"username": "admin"},
            "object": found,
            "oldObject": None,
            "dryRun": False,
            **request,
        },
    }


def answered(found: object, action: Action, chosen: PodClass | None = None, **request: Any) -> ReviewAnswer:
    body = json.dumps(review(found, **request)).encode()
    return answer(body, {"pykata": chosen or pod_class()}, action)


def mutated(found: dict[str, Any], chosen: PodClass | None = None) -> dict[str, Any]:
    """The pod as the API server has it afterwards; a library applies the patch."""
    response = answered(found, Action.MUTATE, chosen).document["response"]
    assert response["allowed"] is True
    if "patch" not in response:
        return copy.deepcopy(found)
    assert response["patchType"] == "JSONPatch"
    changed: dict[str, Any] = jsonpatch.apply_patch(found, base64.b64decode(response["patch"]).decode())
    return changed


def annotations_of(found: dict[str, Any]) -> dict[str, str]:
    annotations: dict[str, str] = found["metadata"].get("annotations") or {}
    return annotations


def sizes(found: dict[str, Any]) -> dict[str, str]:
    """The annotations that set a size, by their short names."""
    return {
        name.removeprefix(HYPERVISOR): text
        for name, text in annotations_of(found).items()
        if name.startswith(HYPERVISOR)
    }
