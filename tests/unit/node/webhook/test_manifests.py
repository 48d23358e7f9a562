"""`pyshim webhook`: the manifests it prints, and a server that they describe."""

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from cryptography import x509

from pyshim.node.cli.command import run
from tests.unit.node.webhook.reviews import pod, review

PROJECT = Path(__file__).parents[4]
CLASS = f"pykata={PROJECT}/configs/configuration-qemu.toml"
GENEROUS_S = 60.0
REQUESTS = {"requests": {"cpu": "3", "memory": "4Gi"}}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """Kind -> object."""
    assert run(["webhook", "manifests", "--class", CLASS, *words]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}


def certificate_names(pem: bytes) -> list[str]:
    extension = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def webhooks(objects: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    return [webhook for kind in kinds for webhook in objects[kind]["webhooks"]]


def test_a_cluster_gets_all_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys, "--image", "r/pyshim:1", "--namespace", "vm", "--", "--node-cpus", "64")

    assert list(objects) == [
        *("Namespace", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment"),
        *("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"),
    ]
    assert {each["metadata"]["namespace"] for kind, each in objects.items() if "namespace" in each["metadata"]} == {
        "vm"
    }
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["--node-cpus", "64"]
    assert "pykata=/etc/pyshim/webhook/classes/pykata.toml" in container["command"]
    assert objects["ConfigMap"]["data"]["pykata.toml"] == (PROJECT / "configs/configuration-qemu.toml").read_text()
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert (policy["ingress"], policy["egress"]) == ([{"ports": [{"port": "https"}]}], [])


def test_the_api_server_calls_for_the_creation_of_pods_of_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys, "--image", "r/pyshim:1", "--failure-policy", "Fail")

    for webhook, path in zip(webhooks(objects), ("/mutate", "/validate"), strict=True):
        assert webhook["clientConfig"]["service"] == {
            "name": "pyshim-webhook",
            "namespace": "pyshim-system",
            "port": 443,
            "path": path,
        }
        assert webhook["matchConditions"][0]["expression"].endswith("object.spec.runtimeClassName in ['pykata']")
        assert (webhook["sideEffects"], webhook["failurePolicy"]) == ("None", "Fail")
    assert [webhook.get("reinvocationPolicy") for webhook in webhooks(objects)] == ["IfNeeded", None]


def test_the_certificate_is_for_the_service_and_signed_by_the_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys, "--image", "r/pyshim:1")

    certificate = base64.b64decode(objects["Secret"]["data"]["tls.crt"])
    (bundle,) = {webhook["clientConfig"]["caBundle"] for webhook in webhooks(objects)}
    assert certificate_names(certificate) == ["pyshim-webhook.pyshim-system.svc"]
    authority = x509.load_pem_x509_certificate(base64.b64decode(bundle))
    x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(authority)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give either --image, or --url with --tls-dir"),
        (["--image", "i", "--url", "https://h"], "give either --image, or --url with --tls-dir"),
        (["--url", "https://h"], "give either --image, or --url with --tls-dir"),
        (["--url", "http://h"], "is not https://HOST"),
        (["--image", "i", "--class", CLASS], "is not NAME=FILE with a name of its own"),
        (["--image", "i", "--class", "other"], "is not NAME=FILE"),
    ],
)
def test_wrong_use_is_named(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["webhook", "manifests", "--class", CLASS, *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_configuration_that_starts_no_pod_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[hypervisor.qemu]\ndefault_memory = 'lots'\n")

    assert run(["webhook", "manifests", "--class", f"a={tmp_path}/c.toml", "--image", "i"]) == 1
    assert "default_memory" in capsys.readouterr().err


def test_a_configuration_in_several_files_does_not_fit_a_config_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("[hypervisor.qemu]\n")
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d/1.toml").write_text("[hypervisor.qemu]\n")

    assert run(["webhook", "manifests", "--class", f"a={tmp_path}/c.toml", "--image", "i"]) == 1
    assert "config.d' changes it" in capsys.readouterr().err


def test_the_command_serves_with_what_it_wrote_until_it_is_asked_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = printed(capsys, "--url", "https://127.0.0.1:8443", "--tls-dir", str(tmp_path))
    (bundle,) = {webhook["clientConfig"]["caBundle"] for webhook in webhooks(objects)}
    assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o600
    words = ["--class", CLASS, "--listen", "127.0.0.1:0", "--certificate", f"{tmp_path}/tls.crt"]
    command = [sys.executable, "-m", "pyshim", "webhook", "serve", *words, "--key", f"{tmp_path}/tls.key"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=PROJECT, env=dict(os.environ), text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert "webhook serves" in line, line
            port = line.split("port=")[1].split()[0]
            answer = asyncio.run(asked(f"https://127.0.0.1:{port}/mutate", base64.b64decode(bundle)))
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=GENEROUS_S) == 0

    assert answer["response"]["patchType"] == "JSONPatch"


async def asked(url: str, authority: bytes) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority.decode()))
    async with asyncio.timeout(GENEROUS_S), aiohttp.ClientSession(connector=connector) as session:
        data = json.dumps(review(pod(REQUESTS))).encode()
        async with session.post(url, data=data) as response:
            found: dict[str, Any] = await response.json()
            return found
