"""The webhook's answers: bytes in, AdmissionReview out."""

import base64
import copy
import json
from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from msgspec.structs import replace

from protos.containerd import sandbox_pb2
from protos.cri import pod_sandbox_pb2 as cri
from pyshim.config.load import for_pod, typed
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import HostPath
from pyshim.model.oci import ContainerKind
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import Disagreement
from pyshim.node.kubernetes.manifest import PodManifest, pod_sizing, pods_in
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.node.kubernetes.pod_vm import sizes_by_policy
from pyshim.node.webhook.judge import MARK, PodClass
from pyshim.node.webhook.review import MAX_WARNING_CHARS, TEMPLATES, Action, ReviewOutcome, answer
from pyshim.pod.plan.pod_spec import RESOLV_CONF, pod_spec
from pyshim.resources.sizing.plan.static import static_size
from pyshim.resources.sizing.plan.workload import workload
from pyshim.task.translate_sandbox import create_request
from tests.unit.node.webhook import kubernetes_oracle as oracle
from tests.unit.node.webhook.reviews import HYPERVISOR, annotations_of, answered, mutated, pod, pod_class, review, sizes

SUM = {"sizing_policy": "sum"}
LIMITED = {"limits": {"cpu": "1", "memory": "1Gi"}}
REQUESTS = {"requests": {"cpu": "3", "memory": "4Gi"}}


def memory_volumes(*limits: str | None) -> list[dict[str, Any]]:
    """An emptyDir of medium Memory for each limit, and volumes that take no memory."""
    volumes = [{"medium": "Memory", **({} if limit is None else {"sizeLimit": limit})} for limit in limits]
    others = [{"name": "disk", "emptyDir": {"sizeLimit": "9Ti"}}, {"name": "host", "hostPath": {"path": "/"}}]
    return [{"name": f"m{n}", "emptyDir": each} for n, each in enumerate(volumes)] + others


def warnings(found: dict[str, Any], chosen: PodClass | None = None) -> list[str]:
    response = answered(found, Action.VALIDATE, chosen).document["response"]
    assert response["allowed"] is True, response
    given: list[str] = response.get("warnings", [])
    return given


def denial(found: dict[str, Any], chosen: PodClass | None = None) -> str:
    answer_ = answered(found, Action.VALIDATE, chosen)
    assert answer_.outcome is ReviewOutcome.DENIED
    response = answer_.document["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 422)
    message: str = response["status"]["message"]
    return message


# ---- which size is written


@pytest.mark.parametrize(
    ("containers", "written", "size"),
    [
        pytest.param([LIMITED], {}, "2 vCPU, 1136 MiB", id="limits-reach-the-shim"),
        pytest.param(
            [REQUESTS],
            {"requested_vcpus": "3", "requested_memory": "4096"},
            "4 vCPU, 4208 MiB",
            id="requests-without-limits",
        ),
        pytest.param(
            [{"requests": {"cpu": "100m", "memory": "64Mi"}}],
            {"requested_vcpus": "0.1", "requested_memory": "64"},
            "1 vCPU, 512 MiB",
            id="never-less-than-a-pod-that-asks-for-nothing",
        ),
    ],
)
def test_a_vm_has_what_its_pod_requests(containers: list[dict[str, Any]], written: dict[str, str], size: str) -> None:
    after = mutated(pod(*containers))

    assert sizes(after) == written
    assert vm_size(after, pod_class()) == size
    assert answered(after, Action.VALIDATE).document["response"]["auditAnnotations"]["vm-size"] == size


def test_a_pod_without_requests_needs_no_patch() -> None:
    response = answered(pod(LIMITED), Action.MUTATE).document["response"]

    assert response == {"uid": review(None)["request"]["uid"], "allowed": True}


def sizing_of(found: dict[str, Any]) -> PodSizing:
    manifest = PodManifest(title="p", runtime_class="pykata", annotations={}, spec=found["spec"])
    return pod_sizing(manifest, "p", None)


def vm_size(found: dict[str, Any], chosen: PodClass) -> str:
    """The VM that a shim boots for this pod, by the shim's own functions: the same however containerd makes the pod."""
    size, of_sandbox_api = (
        booted_size(annotations, chosen) for annotations in (of_pause_container(found), of_sandbox(found))
    )
    assert of_sandbox_api == size
    return size


def booted_size(annotations: Mapping[str, str], chosen: PodClass) -> str:
    config = typed(for_pod(chosen.source, annotations))
    record = static_size(config, chosen.node, workload(ContainerKind.POD_SANDBOX, annotations, {}))
    return f"{record.vcpus.granted} vCPU, {record.memory_mib.granted} MiB"


def of_pause_container(found: dict[str, Any]) -> dict[str, str]:
    """The annotations of the pod's pause container: containerd's figures, and those of the pod that it passes on."""
    passed = {name: text for name, text in annotations_of(found).items() if name.startswith("io.katacontainers.")}
    return {**passed, **sizing_of(found).sandbox_annotations()}


def of_sandbox(found: dict[str, Any]) -> Mapping[str, str]:
    """The annotations that the shim makes of containerd's CreateSandbox, which has the kubelet's configuration."""
    figures = {
        name.rpartition("sandbox-")[2]: int(text) for name, text in sizing_of(found).sandbox_annotations().items()
    }
    resources = cri.LinuxContainerResources(
        cpu_period=figures["cpu-period"],
        cpu_quota=figures["cpu-quota"],
        cpu_shares=figures["cpu-shares"],
        memory_limit_in_bytes=figures["memory"],
    )
    pod_config = cri.PodSandboxConfig(
        annotations=annotations_of(found), linux=cri.LinuxPodSandboxConfig(resources=resources)
    )
    options = AnyMessage(type_url="runtime.v1.PodSandboxConfig", value=pod_config.SerializeToString())
    message = sandbox_pb2.CreateSandboxRequest(sandbox_id="p1", bundle_path="/b/p1", options=options)
    request = create_request(message.SerializeToString())
    assert request.pod is not None
    return pod_spec(request, request.pod, {RESOLV_CONF: HostPath("/b/p1/resolv.conf")}).annotations


def check_against_the_oracle(seed: int, *, is_written: bool, whole_answer: bool) -> None:
    """The sums of a generated pod; if `is_written` those of its annotations, too."""
    random = Random(seed)
    model = oracle.random_pod(random)
    found = oracle.as_object(model, random)
    chosen = pod_class(runtime={"sizing_policy": random.choice(("sum", "overhead"))})

    sizing = sizing_of(found)
    unit = {CPU: 1000, MEMORY: 1}
    for name in (CPU, MEMORY):
        assert sizing.effective_requests().get(name, 0) * unit[name] == oracle.request(model, name), seed
        assert sizing.effective_limits().get(name, 0) * unit[name] == oracle.limit(model, name), seed
        reserved = oracle.request(model, name) + model.overhead.get(name, 0)
        assert sizing.reserved().get(name, 0) * unit[name] == reserved, seed
    if not is_written:
        return

    after = mutated(found, chosen)
    written = sizes(after)
    for name, key, step in ((CPU, "requested_vcpus", Fraction(1, 1000)), (MEMORY, "requested_memory", oracle.MI)):
        needed = oracle.request(model, name) > oracle.limit(model, name)
        assert (key in written) is needed, seed
        if needed:
            asked = oracle.request(model, name)
            assert Fraction(written[key]) == (asked * step if name == CPU else -(-asked // step)), seed
    if whole_answer:
        assert mutated(after, chosen) == after, seed
        judged = answered(after, Action.VALIDATE, chosen).document["response"]
        assert judged["auditAnnotations"]["vm-size"] == vm_size(after, chosen), seed


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_generated_pods_are_counted_as_kubernetes_counts_them(block: int) -> None:
    for seed in range(block * 1000, (block + 1) * 1000):
        # The sums are the subject; an answer takes several times as long and makes no sum of its own.
        check_against_the_oracle(seed, is_written=seed % 10 == 0, whole_answer=seed % 50 == 0)


# ---- called again


def test_a_sidecar_of_another_webhook_is_counted_in_the_next_call() -> None:
    once = mutated(pod(REQUESTS))
    injected = copy.deepcopy(once)
    injected["spec"]["containers"].append({"name": "proxy", "resources": {"requests": {"memory": "1Gi"}}})

    assert sizes(mutated(injected))["requested_memory"] == "5120"


def test_annotations_no_longer_needed_are_taken_back() -> None:
    once = mutated(pod(REQUESTS, annotations={"team": "a"}))
    limited = copy.deepcopy(once)
    limited["spec"]["containers"][0]["resources"] = LIMITED

    assert annotations_of(mutated(limited)) == {"team": "a"}


def test_annotations_of_the_pods_owner_stay() -> None:
    found = pod(REQUESTS, annotations={f"{HYPERVISOR}requested_memory": "6000"})

    once = mutated(found)

    assert sizes(once) == {"requested_vcpus": "3", "requested_memory": "6000"}
    assert sizes(mutated(once)) == sizes(once)


def test_an_annotation_that_the_owner_changed_after_the_first_call_stays() -> None:
    once = mutated(pod(REQUESTS))
    annotations_of(once)[f"{HYPERVISOR}requested_memory"] = "6000"

    assert sizes(mutated(once))["requested_memory"] == "6000"


@pytest.mark.parametrize("mark", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_an_unreadable_mark_counts_as_empty(mark: str) -> None:
    assert sizes(mutated(pod(REQUESTS, annotations={MARK: mark})))["requested_vcpus"] == "3"


def test_an_annotation_that_the_file_does_not_enable_is_not_written() -> None:
    chosen = pod_class(enable_annotations=["requested_memory"])

    after = mutated(pod(REQUESTS), chosen)

    assert sizes(after) == {"requested_memory": "4096"}
    assert any("VM below requests: CPU: the pod requests 3 CPUs" in text for text in warnings(after, chosen))


METADATA: list[dict[str, Any] | None] = [
    {},
    {"annotations": None},
    {"annotations": {}},
    {"annotations": {"a/b~c": "1"}},
]


@pytest.mark.parametrize("there", [*({"metadata": each} for each in (*METADATA, None)), {}], ids=str)
def test_the_patch_applies_whatever_is_there(there: dict[str, Any]) -> None:
    found = {key: value for key, value in pod(REQUESTS).items() if key != "metadata"} | there

    assert sizes(mutated(found)) == {"requested_vcpus": "3", "requested_memory": "4096"}


@pytest.mark.parametrize("action", Action)
def test_a_dry_run_has_the_same_answer(action: Action) -> None:
    wet = answered(pod(REQUESTS), action)

    assert answered(pod(REQUESTS), action, dryRun=True) == wet


# ---- what is warned about


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        pytest.param(pod(LIMITED), [], id="in-order"),
        pytest.param(pod(LIMITED, overhead={}), ["base not covered"] * 2 + ["cgroup below VM"], id="no-overhead"),
        pytest.param(
            pod({"requests": {"cpu": "500m", "memory": "512Mi"}, **LIMITED}),
            ["requests below limits"] * 2,
            id="limits-above-requests",
        ),
        pytest.param(pod({}), ["defaults not reserved"], id="no-limits"),
        pytest.param(
            pod(LIMITED, volumes=memory_volumes("1Gi", "7Gi", None)), ["volumes above VM"], id="large-volumes"
        ),
        pytest.param(pod(LIMITED, volumes=memory_volumes("64Mi", None)), [], id="small-volumes"),
        pytest.param(pod(LIMITED, {}), ["container without limit"] * 2, id="one-without"),
        pytest.param(
            pod({"limits": {**LIMITED["limits"], "hugepages-2Mi": "64Mi"}}),
            ["huge pages not reported"],
            id="huge-pages",
        ),
    ],
)
def test_each_inconsistency_is_a_warning(found: dict[str, Any], kinds: list[str]) -> None:
    assert [text.split(": ")[1] for text in warnings(found)] == kinds
    assert list(answered(found, Action.VALIDATE).kinds) == kinds


def test_limits_above_the_largest_node_are_a_warning() -> None:
    chosen = pod_class(node={"cpu_count": 2, "memory_mib": 4096})
    found = pod({"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}})

    assert any("more than the node" in text for text in warnings(found, chosen))


def test_the_webhooks_own_annotations_give_no_warning() -> None:
    assert warnings(mutated(pod(REQUESTS))) == []
    assert [text.split(": ")[1] for text in warnings(pod(REQUESTS))] == ["VM below requests"] * 2


def test_the_vm_has_room_for_huge_pages_and_sizing_explains_the_same_sum() -> None:
    pages = pod({"limits": {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "512Mi", "hugepages-1Gi": "1Gi"}})
    found = mutated(pages)

    assert sizes(found) == {"requested_memory": "2560"}
    assert "huge pages not reported" not in " ".join(warnings(found))
    (explained,) = pods_in([found], "pod")
    sizing = pod_sizing(explained, "pod", None)
    chosen = pod_class()
    records = sizes_by_policy(sizing, chosen.config(explained.annotations), chosen.node).values()
    assert {record.memory_mib.requested for record in records} == {sizing.vm_memory() / MIB} == {2560}


def test_warnings_fit_what_the_api_server_shows() -> None:
    names = [{"name": "a" * 60 + str(n), "resources": {}} for n in range(9)]
    found = pod(LIMITED)
    found["spec"]["containers"] += names

    assert max(map(len, warnings(found))) == MAX_WARNING_CHARS


# ---- what is denied


def test_a_disagreement_that_the_operator_denies_is_no_warning() -> None:
    found = pod({"requests": {"cpu": "500m", "memory": "512Mi"}, **LIMITED})
    strict = replace(pod_class(), denied=frozenset({Disagreement.REQUESTS_BELOW_LIMITS}))

    refused = answered(found, Action.VALIDATE, chosen=strict)
    assert refused.outcome is ReviewOutcome.DENIED
    assert "admit Pod shop/web: requests below limits: CPU: the scheduler counts 0.5 CPUs" in refused.message
    assert answered(found, Action.MUTATE, chosen=strict).outcome is not ReviewOutcome.DENIED
    assert answered(pod(LIMITED), Action.VALIDATE, chosen=strict).outcome is ReviewOutcome.PASSED


@pytest.mark.parametrize(
    ("found", "text"),
    [
        pytest.param(pod({"limits": {"cpu": "many"}}), "not a quantity: 'many'", id="unknown-quantity"),
        pytest.param(pod(LIMITED, volumes=memory_volumes("big")), "emptyDir.sizeLimit", id="unknown-size-limit"),
        pytest.param(pod({"limits": {"memory": "1Gb"}}), "unknown suffix 'Gb'", id="unknown-unit"),
        pytest.param(pod({"limits": {"memory": "-1Gi"}}), "negative", id="negative"),
        pytest.param(pod(), "containers: there is none", id="no-container"),
        pytest.param(pod(LIMITED, hostNetwork=True), "hostNetwork is true", id="host-network"),
        pytest.param(
            pod(LIMITED, annotations={f"{HYPERVISOR}kernel": "/boot/vmlinuz"}),
            "not enabled",
            id="annotation-not-enabled",
        ),
        pytest.param(
            pod(LIMITED, annotations={f"{HYPERVISOR}default_memory": "lots"}), "default_memory'", id="annotation-wrong"
        ),
        pytest.param(
            {**pod(LIMITED), "metadata": {"annotations": {"a": True}}}, "annotation 'a': not text", id="odd-text"
        ),
        pytest.param({**pod(LIMITED), "spec": {"runtimeClassName": "pykata", "containers": 1}}, "not a list", id="odd"),
        pytest.param({**pod(LIMITED), "metadata": []}, "metadata: not an object", id="odd-metadata"),
        pytest.param([], "request.object: not an object", id="odd-object"),
    ],
)
def test_a_pod_that_cannot_start_is_denied_by_the_validating_call_only(found: Any, text: str) -> None:
    assert text in denial(found)
    assert answered(found, Action.MUTATE).document["response"]["allowed"] is True
    assert "patch" not in answered(found, Action.MUTATE).document["response"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"cpu": "2", "memory": "1Gi"}, "requests + overhead are 2.25 CPUs, the largest node has 2"),
        ({"cpu": "1", "memory": "4Gi"}, "requests + overhead are 4416 MiB, the largest node has 4096"),
    ],
)
def test_a_pod_that_no_node_can_hold_is_denied(asked: dict[str, str], text: str) -> None:
    small = pod_class(node={"cpu_count": 2, "memory_mib": 4096})

    assert text in denial(pod({"requests": asked}), small)
    assert warnings(mutated(pod({"requests": asked}))) == []


def test_a_base_above_every_nodes_cpus_is_denied() -> None:
    found = pod(LIMITED, annotations={f"{HYPERVISOR}default_vcpus": "64"})

    assert "default_vcpus = 64" in denial(found, pod_class(node={"cpu_count": 8, "memory_mib": 16384}))
    assert warnings(found) == []


def test_host_network_passes_where_the_configuration_allows_it() -> None:
    assert warnings(pod(LIMITED, hostNetwork=True), pod_class(runtime={"allow_host_network": True})) == []


def test_a_path_in_an_annotation_is_the_nodes_business() -> None:
    chosen = pod_class(enable_annotations=["kernel"])

    assert warnings(pod(LIMITED, annotations={f"{HYPERVISOR}kernel": "/only/on/the/node"}), chosen) == []


def test_a_quantity_may_be_a_number() -> None:
    assert sizes(mutated(pod({"requests": {"cpu": 3, "memory": 4294967296}}))) == sizes(mutated(pod(REQUESTS)))


# ---- templates of pods


def template(kind: str, *containers: dict[str, Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object of this kind, as `kubectl apply` sends it: its pods get their overhead later."""
    made = pod(*containers)
    del made["spec"]["overhead"]
    inner = {"metadata": {"labels": {"app": "web"}}, "spec": made["spec"]}
    spec = {"template": inner, "replicas": 3} if kind != "CronJob" else {"jobTemplate": {"spec": {"template": inner}}}
    return {"kind": kind, "metadata": {"name": "web", "namespace": "shop", **(metadata or {})}, "spec": spec}


def of_kind(kind: str) -> dict[str, Any]:
    group = "batch" if kind in ("Job", "CronJob") else "apps"
    return {"kind": {"group": group, "version": "v1", "kind": kind}}


def template_warnings(kind: str, found: object, chosen: PodClass | None = None, **request: Any) -> list[str]:
    response = answered(found, Action.VALIDATE, chosen, **of_kind(kind), **request).document["response"]
    assert response["allowed"] is True, response
    given: list[str] = response.get("warnings", [])
    return given


BELOW = {"requests": {"cpu": "500m", "memory": "512Mi"}, **LIMITED}
ALL_KINDS = [kind for kinds in TEMPLATES.values() for kind in sorted(kinds)]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_template_is_warned_about_as_its_pods_would_be(kind: str) -> None:
    given = template_warnings(kind, template(kind, BELOW))

    assert [text.split(": ")[1] for text in given] == ["requests below limits"] * 2
    # What the webhook writes on the pods later, and the class's overhead, are taken into account.
    assert template_warnings(kind, template(kind, REQUESTS)) == []
    assert template_warnings(kind, template(kind, LIMITED)) == []


def test_the_reason_to_deny_each_pod_is_a_warning_at_their_template() -> None:
    small = pod_class(node={"cpu_count": 2, "memory_mib": 4096})
    strict = replace(pod_class(), denied=frozenset({Disagreement.REQUESTS_BELOW_LIMITS}))

    for given in (
        template_warnings("Deployment", template("Deployment", REQUESTS), small),
        template_warnings("Deployment", template("Deployment", BELOW), strict),
        template_warnings("Deployment", template("Deployment", {"limits": {"cpu": "many"}})),
        template_warnings("Deployment", {"kind": "Deployment", "spec": {"template": {"spec": 1}}}),
    ):
        assert [text.split(": ")[1] for text in given] == ["pods denied"]


@pytest.mark.parametrize(
    ("found", "request_"),
    [
        pytest.param(template("Deployment", BELOW, metadata={"ownerReferences": [{"uid": "u"}]}), {}, id="owned"),
        pytest.param(
            template("Deployment", BELOW),
            {"operation": "UPDATE", "oldObject": {**template("Deployment", BELOW), "status": {}}},
            id="unchanged",
        ),
        pytest.param(template("Deployment", BELOW), {"subResource": "scale", "operation": "UPDATE"}, id="scaled"),
        pytest.param(template("Deployment", BELOW), {"operation": "DELETE"}, id="deleted"),
    ],
)
def test_a_template_is_judged_once(found: dict[str, Any], request_: dict[str, Any]) -> None:
    given = answered(found, Action.VALIDATE, **of_kind("Deployment"), **request_)

    assert given.outcome is ReviewOutcome.IGNORED


def test_a_changed_template_is_judged_again() -> None:
    given = template_warnings(
        "Deployment", template("Deployment", BELOW), operation="UPDATE", oldObject=template("Deployment", LIMITED)
    )

    assert len(given) == 2


# ---- what is not the webhook's


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize(
    ("found", "request_"),
    [
        pytest.param({**pod(REQUESTS), "spec": {"containers": []}}, {}, id="no-class"),
        pytest.param(pod(REQUESTS, runtimeClassName="runc"), {}, id="another-class"),
        pytest.param(pod(REQUESTS), {"operation": "UPDATE"}, id="update"),
        pytest.param(pod(REQUESTS), {"subResource": "resize"}, id="sub-resource"),
        pytest.param(pod(REQUESTS), {"kind": {"group": "", "version": "v1", "kind": "Service"}}, id="no-pod"),
        pytest.param(pod(REQUESTS), {"kind": None}, id="no-kind"),
        pytest.param(None, {"operation": "DELETE"}, id="delete"),
    ],
)
def test_everything_else_passes_untouched(action: Action, found: object, request_: dict[str, Any]) -> None:
    given = answered(found, action, **request_)

    assert given.outcome is ReviewOutcome.IGNORED
    assert given.document["response"] == {"uid": review(None)["request"]["uid"], "allowed": True}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut"),
        pytest.param(b"\xff\xfe\x00", "not JSON", id="bytes"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        pytest.param(b'{"a": NaN}', "not JSON", id="nan"),
        pytest.param(b"[]", "not an object", id="list"),
        pytest.param({**review({}), "kind": "Pod"}, "kind 'Pod' of 'admission.k8s.io/v1'", id="kind"),
        pytest.param({**review({}), "apiVersion": "admission.k8s.io/v1beta1"}, "v1beta1", id="version"),
        pytest.param({**review({}), "request": None}, "request: not an object", id="no-request"),
        pytest.param(review({}, uid=""), "uid: none is given", id="empty-uid"),
        pytest.param(review({}, uid=True), "uid: none is given", id="odd-uid"),
    ],
)
def test_a_body_without_a_review_is_an_error_of_the_caller(body: object, text: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    with pytest.raises(InvalidArgument, match=r"^read AdmissionReview: ") as caught:
        answer(data, {"pykata": pod_class()}, Action.MUTATE)
    assert text in str(caught.value)


def test_the_answer_echoes_the_uid_and_encodes_the_patch() -> None:
    document = answered(pod(REQUESTS), Action.MUTATE, uid="u-1").document

    assert (document["apiVersion"], document["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert document["response"]["uid"] == "u-1"
    assert [operation["op"] for operation in json.loads(base64.b64decode(document["response"]["patch"]))] == ["add"]
