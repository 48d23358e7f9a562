"""Model values to the agent's protobuf messages and back; the only place of this room that builds them."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf.message import Message
from msgspec.structs import asdict

from protos.agent import agent_pb2 as pb
from protos.agent import oci_pb2, types_pb2
from pyshim.model.errors import InvalidArgument
from pyshim.model.guest import (
    AgentDetails,
    BlockIoEntry,
    BlockIoStats,
    ContainerStats,
    CpuStats,
    GuestContainer,
    GuestSandbox,
    HugetlbStats,
    MemoryStats,
    MemoryUse,
    NetworkInterface,
    NetworkNeighbour,
    NetworkRoute,
    Storage,
)
from pyshim.model.volumes import CopiedPiece, FsGroup, VolumeStats, VolumeUsage

Row = TypeVar("Row", bound=msgspec.Struct)
_MAX_ROWS = 1024
"""Rows of one table that are taken from a reply (interfaces, disks, CPUs, counters); the rest is dropped."""


def create_sandbox(sandbox: GuestSandbox) -> pb.CreateSandboxRequest:
    return pb.CreateSandboxRequest(
        hostname=sandbox.hostname,
        dns=sandbox.dns,
        storages=[storage(item) for item in sandbox.storages],
        sandbox_pidns=sandbox.shared_pid_namespace,
        sandbox_id=sandbox.sandbox_id,
        guest_hook_path=sandbox.guest_hook_path,
        kernel_modules=[pb.KernelModule(**asdict(module)) for module in sandbox.kernel_modules],
    )


def copy_file(piece: CopiedPiece) -> pb.CopyFileRequest:
    return pb.CopyFileRequest(**asdict(piece))


def create_container(container: GuestContainer) -> pb.CreateContainerRequest:
    return pb.CreateContainerRequest(
        container_id=container.container_id,
        exec_id=container.container_id,
        storages=[storage(item) for item in container.storages],
        devices=[pb.Device(**asdict(device)) for device in container.devices],
        OCI=spec(container.spec, container.container_id),
        sandbox_pidns=container.shared_pid_namespace,
    )


def storage(value: Storage) -> pb.Storage:
    return pb.Storage(
        driver=value.driver,
        driver_options=value.driver_options,
        source=value.source,
        fstype=value.fs_type,
        options=value.options,
        mount_point=value.mount_point,
        shared=value.shared,
        fs_group=_fs_group(value.fs_group) if value.fs_group else None,
    )


def _fs_group(value: FsGroup) -> pb.FSGroup:
    policy = types_pb2.OnRootMismatch if value.only_on_root_mismatch else types_pb2.Always
    return pb.FSGroup(group_id=value.group_id, group_change_policy=policy)


def spec(raw: Mapping[str, Any], owner: str) -> oci_pb2.Spec:
    """The OCI JSON object as the agent's Spec; members the message does not have are left out.

    Raises InvalidArgument naming the member whose value does not fit its field.
    """
    message = oci_pb2.Spec()
    _fill(message, {**raw, "version": raw.get("ociVersion")}, f"spec of '{owner}'")
    return message


def process(raw: Mapping[str, Any], owner: str) -> oci_pb2.Process:
    message = oci_pb2.Process()
    _fill(message, raw, f"process of '{owner}'")
    return message


def linux_resources(raw: Mapping[str, Any], owner: str) -> oci_pb2.LinuxResources:
    message = oci_pb2.LinuxResources()
    _fill(message, raw, f"resources of '{owner}'")
    return message


def interface(value: NetworkInterface) -> types_pb2.Interface:
    return types_pb2.Interface(
        device=value.name,
        name=value.name,
        IPAddresses=[
            types_pb2.IPAddress(family=_family(item.address), address=item.address, mask=str(item.prefix_length))
            for item in value.addresses
        ],
        mtu=value.mtu,
        hwAddr=value.mac,
        devicePath=value.device_path,
        type=value.type,
        raw_flags=value.flags,
    )


def route(value: NetworkRoute) -> types_pb2.Route:
    return types_pb2.Route(
        dest=value.destination,
        gateway=value.gateway,
        device=value.device,
        source=value.source,
        scope=value.scope,
        family=types_pb2.v6 if value.family == 6 else types_pb2.v4,
        flags=value.flags,
        mtu=value.mtu,
    )


def neighbour(value: NetworkNeighbour) -> types_pb2.ARPNeighbor:
    return types_pb2.ARPNeighbor(
        toIPAddress=types_pb2.IPAddress(family=_family(value.address), address=value.address),
        device=value.device,
        lladdr=value.mac,
        state=value.state,
        flags=value.flags,
    )


def agent_details(reply: pb.GuestDetailsResponse) -> AgentDetails:
    details = reply.agent_details
    return AgentDetails(
        version=details.version[:200],
        memory_block_bytes=reply.mem_block_size_bytes,
        supports_seccomp=details.supports_seccomp,
        storage_handlers=tuple(details.storage_handlers[:_MAX_ROWS]),
        device_handlers=tuple(details.device_handlers[:_MAX_ROWS]),
        extra_features=tuple(details.extra_features[:_MAX_ROWS]),
    )


def volume_stats(reply: pb.VolumeStatsResponse) -> VolumeStats:
    return VolumeStats(
        usages=_rows(reply.usage, VolumeUsage),
        abnormal=reply.volume_condition.abnormal,
        message=reply.volume_condition.message[:200],
    )


def container_stats(reply: pb.StatsContainerResponse) -> ContainerStats:
    """Without the counters of the interfaces, which kata-agent sends for each container though they are the pod's."""
    return _container_stats(reply.cgroup_stats)


def containers_stats(reply: pb.StatsContainersResponse) -> Mapping[str, ContainerStats]:
    """By container id."""
    return {found: _container_stats(cgroup) for found, cgroup in islice(reply.containers.items(), _MAX_ROWS)}


def _container_stats(cgroup: pb.CgroupStats) -> ContainerStats:
    usage, throttling = cgroup.cpu_stats.cpu_usage, cgroup.cpu_stats.throttling_data
    return ContainerStats(
        cpu=CpuStats(
            total_ns=usage.total_usage,
            user_ns=usage.usage_in_usermode,
            kernel_ns=usage.usage_in_kernelmode,
            per_cpu_ns=tuple(usage.percpu_usage[:_MAX_ROWS]),
            periods=throttling.periods,
            throttled_periods=throttling.throttled_periods,
            throttled_ns=throttling.throttled_time,
        ),
        memory=MemoryStats(
            cache_bytes=cgroup.memory_stats.cache,
            usage=_memory_use(cgroup.memory_stats.usage),
            swap=_memory_use(cgroup.memory_stats.swap_usage),
            kernel=_memory_use(cgroup.memory_stats.kernel_usage),
            detail=dict(islice(cgroup.memory_stats.stats.items(), _MAX_ROWS)),
        ),
        pids_current=cgroup.pids_stats.current,
        pids_limit=cgroup.pids_stats.limit,
        block_io=_block_io(cgroup.blkio_stats),
        hugetlb=tuple(
            HugetlbStats(page_size=size, usage_bytes=item.usage, max_usage_bytes=item.max_usage, failures=item.failcnt)
            for size, item in sorted(islice(cgroup.hugetlb_stats.items(), _MAX_ROWS), key=itemgetter(0))
        ),
    )


def _memory_use(value: pb.MemoryData) -> MemoryUse:
    return MemoryUse(
        usage_bytes=value.usage, max_usage_bytes=value.max_usage, failures=value.failcnt, limit_bytes=value.limit
    )


def _block_io(value: pb.BlkioStats) -> BlockIoStats:
    return BlockIoStats(
        service_bytes=_rows(value.io_service_bytes_recursive, BlockIoEntry),
        serviced=_rows(value.io_serviced_recursive, BlockIoEntry),
        queued=_rows(value.io_queued_recursive, BlockIoEntry),
        service_time=_rows(value.io_service_time_recursive, BlockIoEntry),
        wait_time=_rows(value.io_wait_time_recursive, BlockIoEntry),
        merged=_rows(value.io_merged_recursive, BlockIoEntry),
        time=_rows(value.io_time_recursive, BlockIoEntry),
        sectors=_rows(value.sectors_recursive, BlockIoEntry),
    )


def _rows(rows: Iterable[Message], kind: type[Row]) -> tuple[Row, ...]:
    """The first of the rows; each message has the fields of `kind` under their names."""
    return tuple(msgspec.convert(row, kind, from_attributes=True) for row in islice(rows, _MAX_ROWS))


def _family(address: str) -> types_pb2.IPFamily:
    return types_pb2.v6 if ":" in address else types_pb2.v4


def _fill(message: Message, raw: Mapping[str, Any], where: str) -> None:
    """Fields of `message` set from JSON members of the same name; the wire's names differ from OCI's in case only."""
    fields = _fields(message.DESCRIPTOR)
    for name, (key, value) in {key.lower(): (key, value) for key, value in raw.items()}.items():
        field = fields.get(name)
        if field is None or value is None:
            continue
        try:
            _set(message, field, value, f"{where}: {key}")
        except (TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise InvalidArgument(f"read {where}: {key} does not fit: {str(exc)[:200]}") from exc


class _Field(NamedTuple):
    """The properties of a field that `_set` needs; reading them from the descriptor is slow."""

    name: str
    is_repeated: bool
    is_message: bool


@cache
def _fields(descriptor: Any) -> Mapping[str, _Field]:
    """The fields of a kind of message, by their names in lower case."""
    return {
        field.name.lower(): _Field(field.name, field.is_repeated, field.message_type is not None)
        for field in descriptor.fields
    }


def _set(message: Message, field: _Field, value: Any, where: str) -> None:
    if field.is_repeated:
        _set_repeated(getattr(message, field.name), field, value, where)
    elif field.is_message:
        target = getattr(message, field.name)
        target.SetInParent()
        _fill(target, _object(value), where)
    else:
        setattr(message, field.name, value)


def _set_repeated(target: Any, field: _Field, value: Any, where: str) -> None:
    is_map = not hasattr(target, "extend")  # asking the descriptor would import 2 ms of modules
    if not isinstance(value, dict if is_map else list):
        raise TypeError(f"found {type(value).__name__}")
    if is_map:
        target.update(value)
    elif field.is_message:
        for item in value:
            _fill(target.add(), _object(item), where)
    else:
        target.extend(value)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return value


def stream_data(payload: bytes) -> bytes | memoryview:
    """The data of a ReadStreamResponse, not copied where the message is just that field. Raises DecodeError."""
    # Field 1, length-delimited, its length a varint of up to four bytes (a message has four MiB at most), and no more.
    size = at = 0
    if payload[:1] == b"\x0a":
        for at in range(1, min(5, len(payload))):
            size |= (payload[at] & 0x7F) << (7 * (at - 1))
            if payload[at] < 0x80:
                break
        if at and at + 1 + size == len(payload) and payload[at] < 0x80:
            return memoryview(payload)[at + 1 :]
    return pb.ReadStreamResponse.FromString(payload).data
