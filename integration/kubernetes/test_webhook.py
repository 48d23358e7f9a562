"""The admission webhook behind a real API server: what it writes, what it warns of, what it denies."""

from __future__ import annotations

import base64
import datetime
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.framework.waiting import eventually
from tests.fakes.self_signed import self_signed

from .cluster import GROUND, PROJECT, Cluster, Refused, container, manifest

pytestmark = pytest.mark.vm

PYSHIM = (str(PROJECT / "bin" / "pyshim"), "webhook")
SHIPPED = PROJECT / "configs" / "configuration-qemu.toml"
PODS = "/api/v1/namespaces/default/pods"
MEMORY = "io.katacontainers.config.hypervisor.requested_memory"
UNEQUAL = {"requests": {"cpu": "500m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "1Gi"}}


@pytest.fixture(scope="module")
def webhook(kube: Cluster) -> Iterator[None]:
    """It serves on the node with a certificate of its own, and the API server has the file for a webhook on a host."""
    files = GROUND / "webhook"
    of_class = f"--class=pykata={SHIPPED}"
    files.mkdir()
    pair = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
    (files / "tls.crt").write_bytes(pair.certificate)
    (files / "tls.key").write_bytes(pair.key)
    calls = (PROJECT / "configs" / "kubernetes" / "webhook-on-a-host.yaml").read_text()
    calls = calls.replace("HOST", "127.0.0.1").replace("CA_BUNDLE", base64.b64encode(pair.authority).decode())
    words = ["--listen=127.0.0.1:8443", f"--certificate={files}/tls.crt", f"--key={files}/tls.key", of_class]
    with (GROUND / "webhook.log").open("wb") as log:
        server = subprocess.Popen([*PYSHIM, "serve", *words], stdout=log, stderr=log)
    made = []
    try:
        for value in yaml.safe_load_all(calls):
            plural = f"/apis/{value['apiVersion']}/{value['kind'].lower()}s"
            kube.call("POST", plural, value)
            made.append(f"{plural}/{value['metadata']['name']}")
        assert len(made) == 2, calls
        # The API server learns of its webhooks a moment later, and the webhook is asked once it listens.
        pod = manifest("probe", container("true"), hostNetwork=True)
        eventually(lambda: _is_denied(kube, pod), what=lambda: f"the webhook answers: {_log()}")
        yield
    finally:
        for path in made:
            kube.call("DELETE", path)
        eventually(
            lambda: not _is_denied(kube, manifest("probe", container("true"), hostNetwork=True)), what="it is gone"
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, _log()


def _log() -> str:
    return Path(GROUND / "webhook.log").read_text()[-2000:]


def _is_denied(kube: Cluster, pod: Any) -> bool:
    try:
        kube.call("POST", f"{PODS}?dryRun=All", pod)
    except Refused:
        return True
    return False


def requests_only(script: str) -> dict[str, Any]:
    return container(script, resources={"requests": {"cpu": "500m", "memory": "700Mi"}})


def test_a_pod_without_limits_gets_a_vm_for_its_requests(kube: Cluster, webhook: None) -> None:
    tried = kube.call("POST", f"{PODS}?dryRun=All", manifest("asked", requests_only("true")))
    with kube.running("asked", requests_only("awk '/MemTotal/ {print $2}' /proc/meminfo")):
        pod = kube.phase("asked", "Succeeded", "Failed")
        memory_kib = int(kube.log("asked"))

    written = pod["metadata"]["annotations"]
    assert tried["metadata"]["annotations"] == written
    assert int(written[MEMORY]) == 700
    assert memory_kib / 1024 >= 700


def test_what_does_not_fit_is_a_warning(kube: Cluster, webhook: None) -> None:
    kube.call("POST", f"{PODS}?dryRun=All", manifest("unequal", container("true", resources=UNEQUAL)))

    assert any("pyshim" in each and "memory" in each for each in kube.warnings), kube.warnings


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_a_template_is_warned_about_and_taken(kube: Cluster, webhook: None, kind: str) -> None:
    labels = {"app": "unequal"}
    pod = manifest("unequal", container("true", resources=UNEQUAL), restartPolicy="Always")["spec"]
    spec: dict[str, Any] = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    group = "apps"
    if kind == "CronJob":
        group, pod["restartPolicy"] = "batch", "Never"
        spec = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": {"spec": pod}}}}

    made = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": "unequal"}, "spec": spec}
    kube.call("POST", f"/apis/{group}/v1/namespaces/default/{kind.lower()}s?dryRun=All", made)

    assert any("requests below limits: memory" in each for each in kube.warnings), kube.warnings


def test_pods_of_other_classes_are_not_looked_at(kube: Cluster, webhook: None) -> None:
    made = kube.call(
        "POST", f"{PODS}?dryRun=All", manifest("other", container("true"), hostNetwork=True, runtimeClassName=None)
    )

    assert made["spec"]["hostNetwork"] is True
