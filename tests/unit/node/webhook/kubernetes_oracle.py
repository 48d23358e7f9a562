"""Kubernetes' sums of a pod, written from its documentation alone: nothing of the product is used here.

Sources: kubernetes.io, "Init Containers: resource sharing within containers", "Sidecar Containers", "Assign Pod-level
CPU and memory resources", "Pod Overhead", "Resource Management for Pods and Containers". Whole numbers: milli-CPUs and
bytes.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

MI = 1 << 20
_BYTES = {"Ki": 1 << 10, "Mi": MI, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9, "": 1}


@dataclass
class Container:
    """Amounts by resource name; None is not set."""

    requests: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    sidecar: bool = False

    def amount(self, kind: str, name: str) -> int | None:
        if kind == "limits":
            return self.limits.get(name)
        return self.requests.get(name, self.limits.get(name))


@dataclass
class Pod:
    app: list[Container]
    init: list[Container]
    requests: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    overhead: dict[str, int] = field(default_factory=dict)


def highest(pod: Pod, kind: str, name: str) -> int | None:
    """The larger of what runs together in the end, and the worst moment of initialization; None when none sets it."""
    everything = [each.amount(kind, name) for each in (*pod.app, *pod.init)]
    if all(amount is None for amount in everything):
        return None
    steady = sum(each.amount(kind, name) or 0 for each in (*pod.app, *(one for one in pod.init if one.sidecar)))
    moments = [
        (each.amount(kind, name) or 0)
        + sum(before.amount(kind, name) or 0 for before in pod.init[:index] if before.sidecar)
        for index, each in enumerate(pod.init)
    ]
    return max([steady, *moments])


def request(pod: Pod, name: str) -> int:
    """Without the overhead. A pod-level limit is the pod-level request where nothing requests the resource."""
    if name in pod.requests:
        return pod.requests[name]
    summed = highest(pod, "requests", name)
    return pod.limits.get(name, 0) if summed is None else summed


def limit(pod: Pod, name: str) -> int:
    """Without the overhead; 0 for none."""
    return pod.limits[name] if name in pod.limits else highest(pod, "limits", name) or 0


# ---- random pods, and how they are written


def random_pod(random: Random) -> Pod:
    pod = Pod(app=[_container(random) for _ in range(random.randint(1, 4))], init=[])
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        one = _container(random)
        one.sidecar = random.random() < 0.4
        pod.init.append(one)
    if random.random() < 0.2:
        for name in ("cpu", "memory"):
            if random.random() < 0.6:
                # The API server demands that a pod-level request covers its containers' sum.
                pod.requests[name] = (highest(pod, "requests", name) or 0) + _amount(random, name)
            if random.random() < 0.5:
                least = max(pod.requests.get(name, 0), highest(pod, "requests", name) or 0)
                pod.limits[name] = least + _amount(random, name)
    if random.random() < 0.7:
        pod.overhead = {"cpu": random.choice((0, 250, 1000)), "memory": random.choice((64, 320, 2400)) * MI}
    return pod


def _container(random: Random) -> Container:
    found = Container()
    for name in ("cpu", "memory"):
        shape = random.choice(("none", "request", "limit", "both"))
        amount = _amount(random, name)
        if shape in ("request", "both"):
            found.requests[name] = amount
        if shape in ("limit", "both"):
            found.limits[name] = amount + random.choice((0, 0, _amount(random, name)))
    return found


def _amount(random: Random, name: str) -> int:
    if name == "cpu":
        return random.choice((random.randint(1, 4000), 1000 * random.randint(1, 8)))
    return random.choice((random.randint(1, 1 << 32), MI * random.randint(1, 4096), 10**6 * random.randint(1, 4000)))


def as_object(pod: Pod, random: Random) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "runtimeClassName": "pykata",
        "containers": [_written(each, f"app{n}", random) for n, each in enumerate(pod.app)],
    }
    if pod.init:
        spec["initContainers"] = [_written(each, f"init{n}", random) for n, each in enumerate(pod.init)]
    if pod.requests or pod.limits:
        spec["resources"] = _resources(pod.requests, pod.limits, random)
    if pod.overhead:
        spec["overhead"] = _amounts(pod.overhead, random)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "shop"}, "spec": spec}


def _written(container: Container, name: str, random: Random) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "image": "busybox"}
    if container.requests or container.limits:
        found["resources"] = _resources(container.requests, container.limits, random)
    return {**found, "restartPolicy": "Always"} if container.sidecar else found


def _resources(requests: dict[str, int], limits: dict[str, int], random: Random) -> dict[str, Any]:
    return {
        kind: _amounts(amounts, random) for kind, amounts in (("requests", requests), ("limits", limits)) if amounts
    }


def _amounts(amounts: dict[str, int], random: Random) -> dict[str, str]:
    return {name: _quantity(name, amount, random) for name, amount in amounts.items()}


def _quantity(name: str, amount: int, random: Random) -> str:
    """One of the spellings of exactly this amount."""
    if name == "cpu":
        return str(amount // 1000) if amount % 1000 == 0 and random.random() < 0.5 else f"{amount}m"
    fitting = [(unit, size) for unit, size in _BYTES.items() if amount % size == 0]
    unit, size = random.choice(fitting)
    return f"{amount // size}{unit}"
