"""The sizing of a pod as text (tables, bars, sentences) and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import msgspec

from pyshim.model.sizing import Dimension, SizingRecord, decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import LETTERS, Explanation, PolicyView
from pyshim.node.kubernetes.overhead import HOST_SIDE, Overhead, OverheadPart, total
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing, cpu_text, memory_text
from pyshim.resources.sizing.plan.static import DYNAMIC

BAR_WIDTH = 40


def record_lines(record: SizingRecord) -> Iterator[str]:
    """A sandbox's record, dimension by dimension."""
    yield f"policy: {record.policy}"
    for title, unit, dimension in (("vCPUs", "vCPU", record.vcpus), ("memory", "MiB", record.memory_mib)):
        yield f"{title}: {dimension.granted} {unit}"
        yield from (f"  {line}" for line in dimension_lines(dimension, unit))
    for warning in record.warnings:
        yield f"warning: {warning}"


def dimension_lines(dimension: Dimension, unit: str) -> Iterator[str]:
    """The arithmetic, one figure a line, each with its source."""
    rounding = f"up to a multiple of {dimension.unit} {unit}" if dimension.unit > 1 else f"up to whole {unit}"
    rows = [
        ("base", decimal(dimension.base), dimension.base_source),
        ("requested", decimal(dimension.requested), dimension.requested_source),
        ("exact sum", decimal(dimension.exact), ""),
        ("rounded", str(dimension.rounded), rounding),
    ]
    if dimension.granted != dimension.rounded:
        verb = "raised by" if dimension.granted > dimension.rounded else "limited by"
        rows.append(("granted", str(dimension.granted), f"{verb} {dimension.limited_by}"))
    width = max(len(number) for _, number, _ in rows)
    for name, number, note in rows:
        yield f"{name:<10}{number:>{width}}  {note}".rstrip()


def explanation_lines(title: str, explanation: Explanation, *, full_block: str) -> Iterator[str]:
    """The text of `pyshim sizing explain` about one pod. Bars consist of `full_block`."""
    pod = explanation.pod
    yield title
    yield ""
    yield from _kubernetes(pod)
    for view in explanation.views:
        yield ""
        force = " (in force)" if view.record.policy == explanation.in_force else ""
        yield f"Policy {view.record.policy}{force}: {_size(view)}"
        yield from (f"  {line}".rstrip() for line in _view(explanation, view, full_block))


def explanation_json(title: str, explanation: Explanation) -> dict[str, object]:
    """The explanation as JSON. Kubernetes' amounts are quantities, the VM's are exact fractions, as in a sandbox's
    record."""
    pod = explanation.pod
    return {
        "pod": title,
        "kubernetes": {
            "requests": _quantities(pod.effective_requests()),
            "limits": _quantities(pod.effective_limits()),
            "overhead": _quantities(pod.overhead),
            "reserved": _quantities(pod.reserved()),
            "annotations": pod.sandbox_annotations(),
        },
        "host_side_mib": explanation.host_side_mib,
        "policy_in_force": explanation.in_force,
        "policies": {
            view.record.policy: {
                **view.record.as_json(),
                "disagreements": [
                    {"letter": LETTERS[found.kind], "name": found.kind.value, "text": found.text}
                    for found in view.findings
                ],
                "pod_fixed": _overhead(view.pod_fixed),
                "class_fixed": _overhead(view.class_fixed),
            }
            for view in explanation.views
        },
    }


class HostSide(msgspec.Struct, frozen=True, kw_only=True):
    """MiB that VMM, file server and shim take, and the source of the figure."""

    mib: int
    source: str


def pod_fixed_lines(parts: Sequence[OverheadPart], policy: str, beside: HostSide) -> Iterator[str]:
    """The text of `pyshim sizing podfixed`."""
    yield f"podFixed of pods that state their limits, policy {policy}"
    yield ""
    yield f"  {'':<30}{'CPU':>8}{'memory':>12}"
    for each in parts:
        yield _part_line(each.name, each.cpus, each.memory_mib, _note(each, beside))
    whole = total(parts)
    yield _part_line("podFixed", whole.cpus, whole.memory_mib, "")


def _part_line(name: str, cpus: Fraction, memory_mib: Fraction, note: str) -> str:
    cpu, memory = (_cell({kind: amount}, kind) for kind, amount in ((CPU, cpus), (MEMORY, memory_mib * MIB)))
    return f"  {name:<30}{cpu:>8}{memory:>12}  {note}".rstrip()


def _note(part: OverheadPart, beside: HostSide) -> str:
    return beside.source if part.name == HOST_SIDE else ""


def pod_fixed_json(parts: Sequence[OverheadPart], policy: str, beside: HostSide) -> dict[str, object]:
    """The same as JSON."""
    return {
        "policy": policy,
        "pod_fixed": _overhead(total(parts)),
        "summands": [
            {
                "name": each.name,
                **_overhead(each),
                "source": _note(each, beside),
            }
            for each in parts
        ],
    }


def runtime_class_lines(
    manifest: Mapping[str, object], parts: Sequence[OverheadPart], beside: HostSide
) -> Iterator[str]:
    """The manifest as YAML, below a comment that adds the figures up."""
    import yaml

    cpus = [f"{cpu_text(each.cpus)} ({each.name})" for each in parts if each.cpus]
    memory = [f"{memory_text(each.memory_mib)} ({each.name})" for each in parts]
    yield "# What a VM takes beyond its pod's limits, computed by `pyshim sizing podfixed`."
    if cpus:
        yield f"# cpu: {' + '.join(cpus)}"
    yield f"# memory: {' + '.join(memory)}"
    yield f"# The host side: {beside.source}."
    yield yaml.safe_dump(manifest, sort_keys=False).rstrip()


def bar(value: Fraction, most: Fraction, full_block: str) -> str:
    """`value` of `most` as a bar; anything above zero shows at least one block."""
    blocks = -(-value * BAR_WIDTH // most) if most else 0
    return full_block * int(blocks)


def _kubernetes(pod: PodSizing) -> Iterator[str]:
    """Kubernetes' own figures as a table."""
    rows = {
        "requests": pod.effective_requests(),
        "limits": pod.effective_limits(),
        "overhead (podFixed)": dict(pod.overhead),
        "reserved on the node": pod.reserved(),
    }
    yield f"{'Kubernetes':<24}{'CPU':>8}{'memory':>12}"
    for name, found in rows.items():
        yield f"  {name:<22}{_cell(found, CPU):>8}{_cell(found, MEMORY):>12}"
    allowed = {name: pod.cgroup_limit(name) for name in (CPU, MEMORY)}
    cpu, memory = ("none" if limit is None else _cell({name: limit}, name) for name, limit in allowed.items())
    yield f"  {'limit of its cgroup':<22}{cpu:>8}{memory:>12}"


def _view(explanation: Explanation, view: PolicyView, full_block: str) -> Iterator[str]:
    record = view.record
    for title, unit, dimension in (("vCPUs", "vCPU", record.vcpus), ("memory", "MiB", record.memory_mib)):
        yield f"{title}: {dimension.explain(unit)}"
    yield ""
    yield from _bars(explanation, record, full_block)
    yield ""
    if not view.findings:
        yield "Kubernetes and the VM agree."
    for found in view.findings:
        yield f"({LETTERS[found.kind]}) {found.kind.value}: {found.text}"
    yield f"podFixed that makes them agree for this pod: {_fixed(view.pod_fixed)}"
    yield f"podFixed that covers every pod with limits: {_fixed(view.class_fixed)}"


def _bars(explanation: Explanation, record: SizingRecord, full_block: str) -> Iterator[str]:
    reserved = explanation.pod.reserved()
    cpu, memory = reserved.get(CPU, Fraction(0)), reserved.get(MEMORY, Fraction(0)) / MIB
    vm_mib = Fraction(record.memory_mib.granted + explanation.host_side_mib)
    rows = (
        ("CPU", (("reserved", cpu, cpu_text(cpu)), ("VM", Fraction(record.vcpus.granted), str(record.vcpus.granted)))),
        ("memory", (("reserved", memory, memory_text(memory)), ("VM + host side", vm_mib, memory_text(vm_mib)))),
    )
    for title, pair in rows:
        most = max(value for _, value, _ in pair)
        for name, value, text in pair:
            yield f"{title:<7}{name:<15}{bar(value, most, full_block):<{BAR_WIDTH}} {text}"


def _size(view: PolicyView) -> str:
    when = ", once all containers run" if view.record.policy == DYNAMIC else ""
    return f"{view.record.vcpus.granted} vCPU, {view.record.memory_mib.granted} MiB{when}"


def _cell(found: Mapping[str, Fraction], name: str) -> str:
    amount = found.get(name)
    if not amount:
        return "-"
    return cpu_text(amount) if name == CPU else memory_text(amount / MIB)


def _fixed(overhead: Overhead) -> str:
    return f"cpu: {cpu_text(overhead.cpus)}, memory: {memory_text(overhead.memory_mib)}"


def _overhead(overhead: Overhead) -> dict[str, str]:
    return {CPU: cpu_text(overhead.cpus), MEMORY: memory_text(overhead.memory_mib)}


def _quantities(found: Mapping[str, Fraction]) -> dict[str, str]:
    """Every resource, in its own unit."""
    return {name: _quantity(name, amount) for name, amount in sorted(found.items())}


def _quantity(name: str, amount: Fraction) -> str:
    if name == CPU:
        return cpu_text(amount)
    return str(amount) if amount.denominator == 1 else decimal(amount)
