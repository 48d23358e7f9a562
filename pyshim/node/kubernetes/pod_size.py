"""A pod as Kubernetes counts it: the aggregation that scheduler and kubelet share, on exact numbers.

Source: Kubernetes, component-helpers/resource (PodRequests, PodLimits) and the API server's defaults for a pod. What
kubelet passes to the container runtime (`sandbox_annotations`) and what it writes into the pod's cgroup
(`cgroup_limits`) follow from the same figures.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

import msgspec

from pyshim.model.errors import InvalidArgument
from pyshim.model.sizing import decimal
from pyshim.model.units import MIN_SHARES, SHARES_PER_CPU

CPU, MEMORY, HUGEPAGES = "cpu", "memory", "hugepages-"
PERIOD_US = 100_000
_MIN_QUOTA_US = 1000
_QUANTITY = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)([a-zA-Z]*)([+-]?[0-9]+)?", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_MAX_LENGTH = 64
_MAX_EXPONENT = 30

Amounts = Mapping[str, Fraction]
"""Resource name -> amount, CPUs or bytes."""


class PodContainer(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` include the API server's defaults: where a limit has no request, the limit is the request."""

    name: str
    requests: Amounts
    limits: Amounts
    restartable: bool = False
    """An init container that keeps running beside the others: a sidecar."""


class PodSizing(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a pod's spec that decide its size."""

    containers: tuple[PodContainer, ...]
    init_containers: tuple[PodContainer, ...]
    requests: Amounts
    """Of the pod as a whole; a resource named here replaces the containers' sum."""
    limits: Amounts
    overhead: Amounts
    """The RuntimeClass's podFixed."""
    memory_volumes: Fraction = Fraction(0)
    """Bytes that emptyDir volumes of medium Memory may hold together, those without a limit left out."""
    has_quotas: bool = True
    """The node's kubelet limits CPUs by quotas. False: `cpuCFSQuota: false`."""

    def effective_requests(self) -> dict[str, Fraction]:
        """Without the overhead. A missing pod-level request gets its default from the pod-level limit."""
        summed = aggregate(self, "requests")
        found = {**summed, **_pod_level(self.requests)}
        for name, limit in _pod_level(self.limits).items():
            if name not in self.requests and (name not in summed or name.startswith(HUGEPAGES)):
                found[name] = limit
        return found

    def effective_limits(self) -> dict[str, Fraction]:
        """Without the overhead. A container without a limit adds nothing: the sum is then no limit of the pod."""
        return {**aggregate(self, "limits"), **_pod_level(self.limits)}

    def huge_pages(self) -> Fraction:
        """Bytes of huge pages of all sizes. In the guest they are taken from its memory, beside the memory limit."""
        return sum((each for name, each in self.effective_limits().items() if name.startswith(HUGEPAGES)), Fraction(0))

    def vm_memory(self) -> Fraction:
        """Bytes that the pod's processes may use in the VM: the greater of limit and request, and huge pages."""
        stated = (self.effective_limits(), self.effective_requests())
        return max(found.get(MEMORY, Fraction(0)) for found in stated) + self.huge_pages()

    def reserved(self) -> dict[str, Fraction]:
        """The scheduler's reservation on a node: requests + overhead."""
        return _plus(self.effective_requests(), self.overhead)

    def unlimited(self, name: str) -> tuple[str, ...]:
        """The containers without a limit of `name`; none if the pod as a whole has one."""
        if self.limits.get(name):
            return ()
        return tuple(each.name for each in (*self.init_containers, *self.containers) if not each.limits.get(name))

    def is_guaranteed(self) -> bool:
        """CPU and memory are limited everywhere, and requests equal limits. Source: Kubernetes' ComputePodQOS."""
        if any(_pod_level(amounts) for amounts in (self.requests, self.limits)):
            levels: tuple[tuple[Amounts, Amounts], ...] = ((self.effective_requests(), self.limits),)
        else:
            levels = tuple((each.requests, each.limits) for each in (*self.init_containers, *self.containers))
        return all(
            limits.get(name) and requests.get(name) == limits[name]
            for requests, limits in levels
            for name in (CPU, MEMORY)
        )

    def cgroup_limit(self, name: str) -> Fraction | None:
        """The limit of the pod's cgroup: limits + overhead if every container has one, else None.

        Source: kubelet's ResourceConfigForPod.
        """
        if name == CPU and not self.has_quotas:
            return None
        limit = self.effective_limits().get(name, Fraction(0))
        return None if self.unlimited(name) or not limit else limit + self.overhead.get(name, Fraction(0))

    def sandbox_annotations(self) -> dict[str, str]:
        """The kubelet's figures as containerd's annotations of the sandbox. A shim gets no other figures."""
        requests, limits = self.effective_requests(), self.effective_limits()
        milli_limit = _ceil(limits.get(CPU, Fraction(0)) * 1000)
        milli_request = _ceil(requests.get(CPU, Fraction(0)) * 1000)
        quota = max(_MIN_QUOTA_US, milli_limit * PERIOD_US // 1000) if milli_limit and self.has_quotas else 0
        prefix = "io.kubernetes.cri.sandbox-"
        return {
            f"{prefix}cpu-period": str(PERIOD_US if self.has_quotas else 0),
            f"{prefix}cpu-quota": str(quota),
            f"{prefix}cpu-shares": str(max(MIN_SHARES, milli_request * SHARES_PER_CPU // 1000)),
            f"{prefix}memory": str(_ceil(limits.get(MEMORY, Fraction(0)))),
        }


def aggregate(pod: PodSizing, kind: str) -> dict[str, Fraction]:
    """For each resource, the sum over containers and sidecars, or what the start needs at any moment, if that is more.

    Init containers run one after another, each beside the sidecars started before it.
    """
    together: dict[str, Fraction] = {}
    for container in pod.containers:
        together = _plus(together, _amounts(container, kind))
    sidecars: dict[str, Fraction] = {}
    starting: dict[str, Fraction] = {}
    for container in pod.init_containers:
        now = _plus(sidecars, _amounts(container, kind))
        if container.restartable:
            together = _plus(together, _amounts(container, kind))
            sidecars = now
        starting = _greatest(starting, now)
    return _greatest(together, starting)


def with_defaults(requests: Amounts, limits: Amounts) -> dict[str, Fraction]:
    """A container's requests with the API server's defaults: its limits where it states no request."""
    return {**limits, **requests}


def _amounts(container: PodContainer, kind: str) -> Amounts:
    return container.requests if kind == "requests" else container.limits


def _pod_level(amounts: Amounts) -> dict[str, Fraction]:
    """The resources that a pod can state for itself, as a whole."""
    return {name: amount for name, amount in amounts.items() if name in (CPU, MEMORY) or name.startswith(HUGEPAGES)}


def _plus(left: Amounts, right: Amounts) -> dict[str, Fraction]:
    return {name: left.get(name, Fraction(0)) + right.get(name, Fraction(0)) for name in {**left, **right}}


def _greatest(left: Amounts, right: Amounts) -> dict[str, Fraction]:
    return {name: max(left.get(name, Fraction(0)), right.get(name, Fraction(0))) for name in {**left, **right}}


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def quantity(text: str, where: str) -> Fraction:
    """The number that `text` denotes. Raises InvalidArgument naming `where` for a malformed or negative quantity."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise InvalidArgument(f"read {where}: not a quantity: {text[:100]!r}")
    sign, number, suffix, exponent = match.groups()
    if sign == "-" and Fraction(number):
        raise InvalidArgument(f"read {where}: negative: {text!r}")
    if exponent is not None:
        if suffix not in ("e", "E") or abs(int(exponent)) > _MAX_EXPONENT:
            raise InvalidArgument(f"read {where}: not a quantity: {text!r}")
        return Fraction(number) * _power_of_ten(int(exponent))
    if suffix in _DECIMAL:
        return Fraction(number) * _power_of_ten(_DECIMAL[suffix])
    if suffix in _BINARY:
        return Fraction(number) * (1 << 10 * _BINARY[suffix])
    raise InvalidArgument(f"read {where}: unknown suffix {suffix!r} in {text!r}")


def _power_of_ten(exponent: int) -> Fraction:
    power = Fraction(int(10 ** abs(exponent)))
    return power if exponent >= 0 else 1 / power


def cpu_text(cpus: Fraction) -> str:
    """A quantity of CPUs, rounded up to milli-CPUs: `250m`, `2`."""
    milli = -(-cpus * 1000 // 1)
    return decimal(cpus) if milli % 1000 == 0 and milli == cpus * 1000 else f"{milli}m"


def memory_text(mib: Fraction) -> str:
    """A quantity of memory, rounded up to whole MiB."""
    return f"{-(-mib // 1)}Mi"
