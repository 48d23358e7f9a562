"""Devices passed through: questions about them, their places, and the message to the guest's agent. Pure.

A container owns a device when its spec has the device's VFIO node, or when the device was requested under its name. In
guest-kernel mode it gets, instead of the node, an inner annotation `cdi.k8s.io/vfio<N> = <kind>=<index>`, which the
guest's CDI specs resolve. The index counts the devices of the kind in the whole VM, in guest PCI order, as drivers in
the guest do.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.devices import (
    VFIO_DIR,
    DeviceQuestion,
    FoundDevice,
    HostFunction,
    PodDevices,
    VfioNode,
    is_vfio_node,
)
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import GuestContainer, GuestDevice
from pyshim.model.oci import ContainerKind, OciDevice, OciSpec, pod_of
from pyshim.model.vm import PciLayout, VfioDevice
from pyshim.resources.devices.plan.pci_topology import pci_layout

CDI_PREFIX = "cdi.k8s.io/"
GUEST_KERNEL = "guest-kernel"
_COMPANIONS = ("0x0403", "0x0c03", "0x0c80")
"""Audio, USB and other bus functions of a graphics card: they travel along and are not counted."""
_KIND_ROW = re.compile(
    r"(?:[0-9a-f]{4}:[0-9a-f]{0,6}=[^/:]*/[^/:]*|[^/=]*/[^/=]*=[^/:]*/[^/:]*(?::.+)?)",
    re.DOTALL,
)
"""`VENDOR:CLASS=KIND` or `HOST-KIND=KIND[:MODEL]`, where kinds are VENDOR/CLASS."""
PASSING_TIMEOUT_S = 120.0
"""With devices passed through QEMU pins all of the guest's memory before it answers."""
_VFIO_PCI = 1
"""Kata's VFIODeviceType of a whole function."""


def is_enabled(config: Config) -> bool:
    """This configuration passes devices through."""
    return {config.hypervisor.cold_plug_vfio, config.hypervisor.hot_plug_vfio} != {"no-port"}


def sandbox_question(kind: ContainerKind, spec: OciSpec, config: Config) -> DeviceQuestion:
    """The devices needed before the VM is made: those cold plugged, or those by which a remote VM is chosen.

    Raises Unimplemented for a device of this host asked for a remote VM.
    """
    if not config.is_remote and config.hypervisor.cold_plug_vfio == "no-port":
        return DeviceQuestion()
    if config.is_remote:
        asked = remote_question(spec)
    else:
        asked = DeviceQuestion(annotations=_cdi_annotations(spec), nodes=_vfio_nodes(spec))
    socket = config.runtime.pod_resource_api_sock
    if kind is not ContainerKind.POD_SANDBOX or not socket:
        return asked
    pod = pod_of(spec.annotations)
    if not pod.name:
        raise InvalidArgument("ask kubelet for the pod's devices: the sandbox's annotations do not name the pod")
    return replace(asked, pod_name=pod.name, pod_namespace=pod.namespace, kubelet_socket=socket)


def remote_question(spec: OciSpec) -> DeviceQuestion:
    """The devices that a remote VM's container asks for itself. Raises Unimplemented naming devices of this host."""
    hardware = [f"'{each.path}'" for each in spec.devices if not (each.type == "p" or _is_everywhere(each))]
    if hardware:
        raise Unimplemented(f"pass {', '.join(hardware)} through: a remote vm has no devices of this host")
    return DeviceQuestion(annotations=_cdi_annotations(spec), names_only=True)


def _is_everywhere(device: OciDevice) -> bool:
    """True for a device with the same number on every kernel: memory, terminals, and fixed numbers of `misc`."""
    return device.type in ("c", "u") and (device.major in (1, 5) or (device.major == 10 and device.minor < 240))


def container_question(spec: OciSpec, config: Config, known: PodDevices) -> DeviceQuestion:
    """The question about devices not found yet. Raises FailedPrecondition if the configuration allows no devices."""
    nodes = _vfio_nodes(spec)
    if not is_enabled(config):
        if nodes:
            raise FailedPrecondition(
                f"pass '{nodes[0]}' through: cold_plug_vfio and hot_plug_vfio in '{config.source}' are \"no-port\""
            )
        return DeviceQuestion()
    have = {node.path for node in known.nodes()}
    return DeviceQuestion(annotations=_cdi_annotations(spec), nodes=tuple(path for path in nodes if path not in have))


def _cdi_annotations(spec: OciSpec) -> dict[str, str]:
    return {key: value for key, value in spec.annotations.items() if key.startswith(CDI_PREFIX)}


def _vfio_nodes(spec: OciSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(device.path for device in spec.devices if is_vfio_node(device.path)))


def device_layout(config: Config, found: PodDevices, network: Sequence[VfioDevice] = ()) -> PciLayout:
    """Ports, and on them every function of `found` and, when those are cold plugged, of the pod's network; the guest's
    IOMMU, if it has one. Raises what `pci_layout` does.
    """
    devices = vfio_devices(found.nodes())
    new = tuple(device for device in network if device.id not in {known.id for known in devices})
    if config.hypervisor.cold_plug_vfio != "no-port":
        layout = pci_layout(config, (*devices, *new))
    else:
        layout = pci_layout(config, devices, later=len(new))
    return replace(layout, iommu=config.hypervisor.enable_iommu)


def memory_nodes(found: PodDevices) -> tuple[int, ...]:
    """The NUMA nodes on which the kubelet keeps memory for the pod's containers; empty where it keeps none."""
    named = {node for sizes in found.memory.values() for nodes in sizes for node in nodes.split(",") if node}
    return tuple(sorted(map(int, named)))


def vfio_devices(nodes: Iterable[VfioNode]) -> tuple[VfioDevice, ...]:
    """The VMM's devices for the nodes: every function, once."""
    devices = {
        function.address: VfioDevice(
            id=function.address,
            host_address=function.address,
            iommufd=node.iommufd,
            vendor_id=function.vendor,
            device_id=function.device,
        )
        for node in nodes
        for function in node.functions
    }
    return tuple(devices.values())


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose functions are in the VM."""

    node: VfioNode
    pci_paths: Mapping[str, str]
    """Guest PCI path by host address."""
    host_kind: str
    """The kind of the device's name on the host; empty for a node without one."""


def passed_nodes(found: Iterable[FoundDevice], pci_paths: Mapping[str, str]) -> tuple[Passed, ...]:
    """Each node once, with the first name it was found under."""
    passed: dict[str, Passed] = {}
    for device in found:
        for node in device.nodes:
            known = passed.get(node.path)
            if known is None or not known.host_kind:
                paths = {function.address: pci_paths[function.address] for function in node.functions}
                kind = device.request.name.partition("=")[0]
                passed[node.path] = Passed(node=node, pci_paths=paths, host_kind=kind)
    return tuple(passed.values())


def guest_kind(function: HostFunction, host_kind: str, table: Sequence[str]) -> str:
    """The function's kind in the guest's specs; empty if unknown.

    The host's own kind counts first, under the name the table gives it (`HOST-KIND=KIND`); then the first row for the
    function's vendor and the head of its class (`10de:03=KIND`).
    """
    if host_kind:
        return named_kind(host_kind, table)[0]
    for row in table:
        match, _, kind = row.partition("=")
        vendor, colon, class_head = match.partition(":")
        if colon and function.vendor == f"0x{vendor}" and function.class_code.startswith(f"0x{class_head}"):
            return kind
    return ""


def named_kind(host_kind: str, table: Sequence[str]) -> tuple[str, str]:
    """(the guest's kind, the model) that the table's row `HOST-KIND=KIND[:MODEL]` gives a kind of the host's.

    Without a row the kind is the same in the guest and the model empty.
    """
    rows = (row.partition("=") for row in table)
    value = next((value for match, _, value in rows if match == host_kind), host_kind)
    kind, _, model = value.partition(":")
    return kind, model


def check_kind_table(table: Sequence[str], where: str) -> None:
    """Raises InvalidArgument for a row that is neither `VENDOR:CLASS=KIND` nor `HOST-KIND=KIND[:MODEL]`."""
    for row in table:
        if not _KIND_ROW.fullmatch(row):
            raise InvalidArgument(
                f"read vfio_device_kinds in '{where}': {row!r} is neither VENDOR:CLASS=KIND nor HOST-KIND=KIND[:MODEL]"
            )


def inner_names(all_passed: Sequence[Passed], table: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`<kind>=<index>` of each node, by its path; none for a node of no known kind."""
    counted = []
    for passed in all_passed:
        functions = _counted(passed.node)
        counted += [(_order(passed.pci_paths[each.address]), passed, each) for each in functions]
    names: dict[str, tuple[str, ...]] = {passed.node.path: () for passed in all_passed}
    next_index: dict[str, int] = {}
    for _, passed, function in sorted(counted, key=lambda entry: entry[0]):
        kind = guest_kind(function, passed.host_kind, table)
        if kind:
            index = next_index[kind] = next_index.get(kind, -1) + 1
            names[passed.node.path] += (f"{kind}={index}",)
    return names


def _counted(node: VfioNode) -> tuple[HostFunction, ...]:
    main = [each for each in node.functions if not each.class_code.startswith(_COMPANIONS)] or list(node.functions)
    return tuple(each for each in main if each.class_code[:4] == main[0].class_code[:4])


def _order(pci_path: str) -> tuple[tuple[int, int], ...]:
    """The key of guest PCI order: slot and function at each level."""
    parts = (part.partition(".") for part in pci_path.split("/"))
    return tuple((int(slot, 16), int(function or "0")) for slot, _, function in parts)


def device_message(passed: Passed, mode: str) -> GuestDevice:
    """The agent's map for one node: each function's host address and its guest address."""
    return GuestDevice(
        id=passed.node.path.rpartition("/")[2],
        type="vfio-pci-gk" if mode == GUEST_KERNEL else "vfio-pci",
        vm_path="",
        container_path=passed.node.path,
        options=tuple(f"{address}={path}" for address, path in passed.pci_paths.items()),
    )


def with_passed(
    guest: GuestContainer,
    own: Sequence[Passed],
    names: Mapping[str, tuple[str, ...]],
    env: Sequence[str],
    mode: str,
) -> GuestContainer:
    """`guest` with its devices: messages, and in guest-kernel mode annotations in place of VFIO nodes.

    `env` is what the devices' specs set, in the guest's terms.
    """
    spec: dict[str, Any] = dict(guest.spec)
    if mode == GUEST_KERNEL:
        linux = dict(spec.get("linux") or {})
        linux["devices"] = [each for each in linux.get("devices") or [] if not each["path"].startswith(VFIO_DIR)]
        spec["linux"] = linux
        inner = {
            f"{CDI_PREFIX}vfio{passed.node.number}": ",".join(names[passed.node.path])
            for passed in own
            if names[passed.node.path]
        }
        spec["annotations"] = {**(spec.get("annotations") or {}), **inner}
    if env:
        process = dict(spec["process"])
        process["env"] = _with_env(process.get("env") or [], env)
        spec["process"] = process
    messages = tuple(device_message(passed, mode) for passed in own)
    return replace(guest, spec=spec, devices=(*guest.devices, *messages))


def _with_env(env: Sequence[str], more: Sequence[str]) -> list[str]:
    """`env` and, of `more`, the variables that the container's own spec does not set."""
    have = {text.partition("=")[0] for text in env}
    new = {text.partition("=")[0]: text for text in more}
    return [*env, *(text for name, text in new.items() if name not in have)]


def kata_vfio_device(passed: Passed, *, cold: bool) -> Mapping[str, object]:
    """A node passed through, with all its functions. The guest's paths are reported as those of disks are."""
    return {
        "ID": passed.node.path,
        "Type": "vfio",
        "DevType": "c",
        "DriverOptions": dict(passed.pci_paths),
        "RefCount": 1,
        "AttachCount": 1,
        "ColdPlug": cold,
        "VFIODevs": [
            {
                "ID": each.address,
                "Type": _VFIO_PCI,
                "BDF": each.address,
                "VendorID": each.vendor,
                "DeviceID": each.device,
                "Class": each.class_code,
                "HostPath": passed.node.path,
            }
            for each in passed.node.functions
        ],
    }
