"""The objects by which the API server calls the webhook. Pure; the CLI prints them as YAML for `kubectl apply`."""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.node.webhook.self_signed import SelfSigned

NAME = "pyshim-webhook"
PORT = 8443
TIMEOUT_S = 5
"""Seconds that the API server waits for an answer, which takes milliseconds; then `failurePolicy` decides."""
MEMORY_LIMIT_MIB = 256
"""The server stays below it, whatever is sent to it (`server.py`, "Bounds")."""
CERTIFICATES, CONFIGURATIONS = "/etc/pyshim/webhook/tls", "/etc/pyshim/webhook/classes"
_LABELS = {"app.kubernetes.io/name": NAME}
_NOBODY = 65534

Object = dict[str, Any]


class InCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment behind a Service."""

    namespace: str
    image: str
    configurations: Mapping[str, str]
    """Runtime class -> text of the configuration file its nodes have."""
    options: tuple[str, ...]
    """Of `pyshim webhook serve`, beside the files."""

    @property
    def host(self) -> str:
        """The API server expects this name in the certificate."""
        return f"{NAME}.{self.namespace}.svc"


class AtUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A server that something else starts, such as systemd on a host that the API server reaches."""

    url: str


def manifests(
    place: InCluster | AtUrl, pair: SelfSigned, classes: tuple[str, ...], *, failure_policy: str
) -> list[Object]:
    """In the order in which they are to be applied."""
    if isinstance(place, AtUrl):
        return _calls({"url": place.url.rstrip("/")}, pair.authority, classes, failure_policy)
    at = {"service": {"name": NAME, "namespace": place.namespace, "port": 443}}
    return [*_in_cluster(place, pair), *_calls(at, pair.authority, classes, failure_policy)]


def _in_cluster(place: InCluster, pair: SelfSigned) -> list[Object]:
    metadata = {"name": NAME, "namespace": place.namespace, "labels": _LABELS}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": place.namespace}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "kubernetes.io/tls",
            "data": {"tls.crt": _encoded(pair.certificate), "tls.key": _encoded(pair.key)},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {f"{name}.toml": text for name, text in place.configurations.items()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": _LABELS, "ports": [{"name": "https", "port": 443, "targetPort": "https"}]},
        },
        {
            # The API server is no pod, so no policy can name it. The webhook itself calls nothing.
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": {
                "podSelector": {"matchLabels": _LABELS},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"ports": [{"port": "https"}]}],
                "egress": [],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _pod(place)},
            },
        },
    ]


def _pod(place: InCluster) -> Object:
    command = [
        *("pyshim", "webhook", "serve", "--certificate", f"{CERTIFICATES}/tls.crt", "--key", f"{CERTIFICATES}/tls.key"),
        *("--listen", f"0.0.0.0:{PORT}"),
        *(word for name in place.configurations for word in ("--class", f"{name}={CONFIGURATIONS}/{name}.toml")),
        *place.options,
    ]
    container = {
        "name": "webhook",
        "image": place.image,
        "command": command,
        "ports": [{"name": "https", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "https", "scheme": "HTTPS"}},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "https", "scheme": "HTTPS"}, "periodSeconds": 30},
        # The Service forwards calls for a moment after the pod was asked to end.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": f"{MEMORY_LIMIT_MIB}Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": _NOBODY,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "tls", "mountPath": CERTIFICATES, "readOnly": True},
            {"name": "classes", "mountPath": CONFIGURATIONS, "readOnly": True},
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "securityContext": {"fsGroup": _NOBODY},
        "containers": [container],
        "volumes": [
            {"name": "tls", "secret": {"secretName": NAME, "defaultMode": 0o440}},
            {"name": "classes", "configMap": {"name": NAME}},
        ],
    }


def _calls(at: Object, authority: bytes, classes: tuple[str, ...], failure_policy: str) -> list[Object]:
    """Both webhook configurations. The API server calls for pods of the classes only; that needs Kubernetes 1.28."""
    listed = ", ".join(f"'{name}'" for name in classes)
    is_ours = f"has(object.spec.runtimeClassName) && object.spec.runtimeClassName in [{listed}]"

    def webhook(action: str, **more: object) -> Object:
        if "url" in at:
            client: Object = {"url": f"{at['url']}/{action}"}
        else:
            client = {"service": {**at["service"], "path": f"/{action}"}}
        return {
            "name": f"{action}.webhook.pyshim.io",
            "clientConfig": {**client, "caBundle": _encoded(authority)},
            "rules": [
                {
                    "operations": ["CREATE"],
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods"],
                    "scope": "Namespaced",
                }
            ],
            "matchConditions": [{"name": "runtime-class", "expression": is_ours}],
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": TIMEOUT_S,
            "failurePolicy": failure_policy,
            **more,
        }

    group = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": group,
            "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": NAME},
            "webhooks": [webhook(action, **more)],
        }
        for kind, action, more in (
            ("Mutating", "mutate", {"reinvocationPolicy": "IfNeeded"}),
            ("Validating", "validate", {}),
        )
    ]


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
