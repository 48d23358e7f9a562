from google.protobuf import empty_pb2 as _empty_pb2
from protos.agent import oci_pb2 as _oci_pb2
from protos.agent import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateContainerRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "string_user", "devices", "storages", "OCI", "sandbox_pidns", "shared_mounts", "stdin_port", "stdout_port", "stderr_port")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    STRING_USER_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    OCI_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_PIDNS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MOUNTS_FIELD_NUMBER: _ClassVar[int]
    STDIN_PORT_FIELD_NUMBER: _ClassVar[int]
    STDOUT_PORT_FIELD_NUMBER: _ClassVar[int]
    STDERR_PORT_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    string_user: StringUser
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    OCI: _oci_pb2.Spec
    sandbox_pidns: bool
    shared_mounts: _containers.RepeatedCompositeFieldContainer[SharedMount]
    stdin_port: int
    stdout_port: int
    stderr_port: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., string_user: _Optional[_Union[StringUser, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ..., OCI: _Optional[_Union[_oci_pb2.Spec, _Mapping]] = ..., sandbox_pidns: _Optional[bool] = ..., shared_mounts: _Optional[_Iterable[_Union[SharedMount, _Mapping]]] = ..., stdin_port: _Optional[int] = ..., stdout_port: _Optional[int] = ..., stderr_port: _Optional[int] = ...) -> None: ...

class StartContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class RemoveContainerRequest(_message.Message):
    __slots__ = ("container_id", "timeout")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    timeout: int
    def __init__(self, container_id: _Optional[str] = ..., timeout: _Optional[int] = ...) -> None: ...

class ExecProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "string_user", "process", "stdin_port", "stdout_port", "stderr_port")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    STRING_USER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STDIN_PORT_FIELD_NUMBER: _ClassVar[int]
    STDOUT_PORT_FIELD_NUMBER: _ClassVar[int]
    STDERR_PORT_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    string_user: StringUser
    process: _oci_pb2.Process
    stdin_port: int
    stdout_port: int
    stderr_port: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., string_user: _Optional[_Union[StringUser, _Mapping]] = ..., process: _Optional[_Union[_oci_pb2.Process, _Mapping]] = ..., stdin_port: _Optional[int] = ..., stdout_port: _Optional[int] = ..., stderr_port: _Optional[int] = ...) -> None: ...

class SignalProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "signal")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    signal: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., signal: _Optional[int] = ...) -> None: ...

class WaitProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ...) -> None: ...

class WaitProcessResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...

class UpdateContainerRequest(_message.Message):
    __slots__ = ("container_id", "resources")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    resources: _oci_pb2.LinuxResources
    def __init__(self, container_id: _Optional[str] = ..., resources: _Optional[_Union[_oci_pb2.LinuxResources, _Mapping]] = ...) -> None: ...

class StatsContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class PauseContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class ResumeContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class CpuUsage(_message.Message):
    __slots__ = ("total_usage", "percpu_usage", "usage_in_kernelmode", "usage_in_usermode")
    TOTAL_USAGE_FIELD_NUMBER: _ClassVar[int]
    PERCPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_IN_KERNELMODE_FIELD_NUMBER: _ClassVar[int]
    USAGE_IN_USERMODE_FIELD_NUMBER: _ClassVar[int]
    total_usage: int
    percpu_usage: _containers.RepeatedScalarFieldContainer[int]
    usage_in_kernelmode: int
    usage_in_usermode: int
    def __init__(self, total_usage: _Optional[int] = ..., percpu_usage: _Optional[_Iterable[int]] = ..., usage_in_kernelmode: _Optional[int] = ..., usage_in_usermode: _Optional[int] = ...) -> None: ...

class ThrottlingData(_message.Message):
    __slots__ = ("periods", "throttled_periods", "throttled_time")
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_PERIODS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_TIME_FIELD_NUMBER: _ClassVar[int]
    periods: int
    throttled_periods: int
    throttled_time: int
    def __init__(self, periods: _Optional[int] = ..., throttled_periods: _Optional[int] = ..., throttled_time: _Optional[int] = ...) -> None: ...

class CpuStats(_message.Message):
    __slots__ = ("cpu_usage", "throttling_data")
    CPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    THROTTLING_DATA_FIELD_NUMBER: _ClassVar[int]
    cpu_usage: CpuUsage
    throttling_data: ThrottlingData
    def __init__(self, cpu_usage: _Optional[_Union[CpuUsage, _Mapping]] = ..., throttling_data: _Optional[_Union[ThrottlingData, _Mapping]] = ...) -> None: ...

class PidsStats(_message.Message):
    __slots__ = ("current", "limit")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    current: int
    limit: int
    def __init__(self, current: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class MemoryData(_message.Message):
    __slots__ = ("usage", "max_usage", "failcnt", "limit")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILCNT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    usage: int
    max_usage: int
    failcnt: int
    limit: int
    def __init__(self, usage: _Optional[int] = ..., max_usage: _Optional[int] = ..., failcnt: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class MemoryStats(_message.Message):
    __slots__ = ("cache", "usage", "swap_usage", "kernel_usage", "use_hierarchy", "stats")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CACHE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SWAP_USAGE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_USAGE_FIELD_NUMBER: _ClassVar[int]
    USE_HIERARCHY_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    cache: int
    usage: MemoryData
    swap_usage: MemoryData
    kernel_usage: MemoryData
    use_hierarchy: bool
    stats: _containers.ScalarMap[str, int]
    def __init__(self, cache: _Optional[int] = ..., usage: _Optional[_Union[MemoryData, _Mapping]] = ..., swap_usage: _Optional[_Union[MemoryData, _Mapping]] = ..., kernel_usage: _Optional[_Union[MemoryData, _Mapping]] = ..., use_hierarchy: _Optional[bool] = ..., stats: _Optional[_Mapping[str, int]] = ...) -> None: ...

class BlkioStatsEntry(_message.Message):
    __slots__ = ("major", "minor", "op", "value")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    op: str
    value: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ..., op: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class BlkioStats(_message.Message):
    __slots__ = ("io_service_bytes_recursive", "io_serviced_recursive", "io_queued_recursive", "io_service_time_recursive", "io_wait_time_recursive", "io_merged_recursive", "io_time_recursive", "sectors_recursive")
    IO_SERVICE_BYTES_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_SERVICED_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_QUEUED_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_SERVICE_TIME_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_WAIT_TIME_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_MERGED_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    IO_TIME_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    SECTORS_RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    io_service_bytes_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_serviced_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_queued_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_service_time_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_wait_time_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_merged_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    io_time_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    sectors_recursive: _containers.RepeatedCompositeFieldContainer[BlkioStatsEntry]
    def __init__(self, io_service_bytes_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_serviced_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_queued_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_service_time_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_wait_time_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_merged_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., io_time_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ..., sectors_recursive: _Optional[_Iterable[_Union[BlkioStatsEntry, _Mapping]]] = ...) -> None: ...

class HugetlbStats(_message.Message):
    __slots__ = ("usage", "max_usage", "failcnt")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILCNT_FIELD_NUMBER: _ClassVar[int]
    usage: int
    max_usage: int
    failcnt: int
    def __init__(self, usage: _Optional[int] = ..., max_usage: _Optional[int] = ..., failcnt: _Optional[int] = ...) -> None: ...

class CgroupStats(_message.Message):
    __slots__ = ("cpu_stats", "memory_stats", "pids_stats", "blkio_stats", "hugetlb_stats")
    class HugetlbStatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HugetlbStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HugetlbStats, _Mapping]] = ...) -> None: ...
    CPU_STATS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_STATS_FIELD_NUMBER: _ClassVar[int]
    PIDS_STATS_FIELD_NUMBER: _ClassVar[int]
    BLKIO_STATS_FIELD_NUMBER: _ClassVar[int]
    HUGETLB_STATS_FIELD_NUMBER: _ClassVar[int]
    cpu_stats: CpuStats
    memory_stats: MemoryStats
    pids_stats: PidsStats
    blkio_stats: BlkioStats
    hugetlb_stats: _containers.MessageMap[str, HugetlbStats]
    def __init__(self, cpu_stats: _Optional[_Union[CpuStats, _Mapping]] = ..., memory_stats: _Optional[_Union[MemoryStats, _Mapping]] = ..., pids_stats: _Optional[_Union[PidsStats, _Mapping]] = ..., blkio_stats: _Optional[_Union[BlkioStats, _Mapping]] = ..., hugetlb_stats: _Optional[_Mapping[str, HugetlbStats]] = ...) -> None: ...

class NetworkStats(_message.Message):
    __slots__ = ("name", "rx_bytes", "rx_packets", "rx_errors", "rx_dropped", "tx_bytes", "tx_packets", "tx_errors", "tx_dropped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RX_PACKETS_FIELD_NUMBER: _ClassVar[int]
    RX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    RX_DROPPED_FIELD_NUMBER: _ClassVar[int]
    TX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TX_PACKETS_FIELD_NUMBER: _ClassVar[int]
    TX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TX_DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int
    def __init__(self, name: _Optional[str] = ..., rx_bytes: _Optional[int] = ..., rx_packets: _Optional[int] = ..., rx_errors: _Optional[int] = ..., rx_dropped: _Optional[int] = ..., tx_bytes: _Optional[int] = ..., tx_packets: _Optional[int] = ..., tx_errors: _Optional[int] = ..., tx_dropped: _Optional[int] = ...) -> None: ...

class StatsContainerResponse(_message.Message):
    __slots__ = ("cgroup_stats", "network_stats")
    CGROUP_STATS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_STATS_FIELD_NUMBER: _ClassVar[int]
    cgroup_stats: CgroupStats
    network_stats: _containers.RepeatedCompositeFieldContainer[NetworkStats]
    def __init__(self, cgroup_stats: _Optional[_Union[CgroupStats, _Mapping]] = ..., network_stats: _Optional[_Iterable[_Union[NetworkStats, _Mapping]]] = ...) -> None: ...

class StatsContainersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsContainersResponse(_message.Message):
    __slots__ = ("containers",)
    class ContainersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CgroupStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CgroupStats, _Mapping]] = ...) -> None: ...
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    containers: _containers.MessageMap[str, CgroupStats]
    def __init__(self, containers: _Optional[_Mapping[str, CgroupStats]] = ...) -> None: ...

class WriteStreamRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "data")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    data: bytes
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteStreamResponse(_message.Message):
    __slots__ = ("len",)
    LEN_FIELD_NUMBER: _ClassVar[int]
    len: int
    def __init__(self, len: _Optional[int] = ...) -> None: ...

class ReadStreamRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "len")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    len: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., len: _Optional[int] = ...) -> None: ...

class ReadStreamResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class CloseStdinRequest(_message.Message):
    __slots__ = ("container_id", "exec_id")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ...) -> None: ...

class TtyWinResizeRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "row", "column")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    row: int
    column: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., row: _Optional[int] = ..., column: _Optional[int] = ...) -> None: ...

class KernelModule(_message.Message):
    __slots__ = ("name", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateSandboxRequest(_message.Message):
    __slots__ = ("hostname", "dns", "storages", "sandbox_pidns", "sandbox_id", "guest_hook_path", "kernel_modules")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    DNS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_PIDNS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    GUEST_HOOK_PATH_FIELD_NUMBER: _ClassVar[int]
    KERNEL_MODULES_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    dns: _containers.RepeatedScalarFieldContainer[str]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    sandbox_pidns: bool
    sandbox_id: str
    guest_hook_path: str
    kernel_modules: _containers.RepeatedCompositeFieldContainer[KernelModule]
    def __init__(self, hostname: _Optional[str] = ..., dns: _Optional[_Iterable[str]] = ..., storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ..., sandbox_pidns: _Optional[bool] = ..., sandbox_id: _Optional[str] = ..., guest_hook_path: _Optional[str] = ..., kernel_modules: _Optional[_Iterable[_Union[KernelModule, _Mapping]]] = ...) -> None: ...

class DestroySandboxRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveStaleVirtiofsShareMountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Interfaces(_message.Message):
    __slots__ = ("Interfaces",)
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    Interfaces: _containers.RepeatedCompositeFieldContainer[_types_pb2.Interface]
    def __init__(self, Interfaces: _Optional[_Iterable[_Union[_types_pb2.Interface, _Mapping]]] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("Routes",)
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    Routes: _containers.RepeatedCompositeFieldContainer[_types_pb2.Route]
    def __init__(self, Routes: _Optional[_Iterable[_Union[_types_pb2.Route, _Mapping]]] = ...) -> None: ...

class UpdateInterfaceRequest(_message.Message):
    __slots__ = ("interface",)
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    interface: _types_pb2.Interface
    def __init__(self, interface: _Optional[_Union[_types_pb2.Interface, _Mapping]] = ...) -> None: ...

class UpdateRoutesRequest(_message.Message):
    __slots__ = ("routes",)
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    routes: Routes
    def __init__(self, routes: _Optional[_Union[Routes, _Mapping]] = ...) -> None: ...

class UpdateEphemeralMountsRequest(_message.Message):
    __slots__ = ("storages",)
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    def __init__(self, storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ...) -> None: ...

class ListInterfacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRoutesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ARPNeighbors(_message.Message):
    __slots__ = ("ARPNeighbors",)
    ARPNEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    ARPNeighbors: _containers.RepeatedCompositeFieldContainer[_types_pb2.ARPNeighbor]
    def __init__(self, ARPNeighbors: _Optional[_Iterable[_Union[_types_pb2.ARPNeighbor, _Mapping]]] = ...) -> None: ...

class AddARPNeighborsRequest(_message.Message):
    __slots__ = ("neighbors",)
    NEIGHBORS_FIELD_NUMBER: _ClassVar[int]
    neighbors: ARPNeighbors
    def __init__(self, neighbors: _Optional[_Union[ARPNeighbors, _Mapping]] = ...) -> None: ...

class GetIPTablesRequest(_message.Message):
    __slots__ = ("is_ipv6",)
    IS_IPV6_FIELD_NUMBER: _ClassVar[int]
    is_ipv6: bool
    def __init__(self, is_ipv6: _Optional[bool] = ...) -> None: ...

class GetIPTablesResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class SetIPTablesRequest(_message.Message):
    __slots__ = ("is_ipv6", "data")
    IS_IPV6_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    is_ipv6: bool
    data: bytes
    def __init__(self, is_ipv6: _Optional[bool] = ..., data: _Optional[bytes] = ...) -> None: ...

class SetIPTablesResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class OnlineCPUMemRequest(_message.Message):
    __slots__ = ("wait", "nb_cpus", "cpu_only")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    NB_CPUS_FIELD_NUMBER: _ClassVar[int]
    CPU_ONLY_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    nb_cpus: int
    cpu_only: bool
    def __init__(self, wait: _Optional[bool] = ..., nb_cpus: _Optional[int] = ..., cpu_only: _Optional[bool] = ...) -> None: ...

class ReseedRandomDevRequest(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class AgentDetails(_message.Message):
    __slots__ = ("version", "init_daemon", "device_handlers", "storage_handlers", "supports_seccomp", "extra_features")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INIT_DAEMON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HANDLERS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_HANDLERS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_SECCOMP_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FEATURES_FIELD_NUMBER: _ClassVar[int]
    version: str
    init_daemon: bool
    device_handlers: _containers.RepeatedScalarFieldContainer[str]
    storage_handlers: _containers.RepeatedScalarFieldContainer[str]
    supports_seccomp: bool
    extra_features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., init_daemon: _Optional[bool] = ..., device_handlers: _Optional[_Iterable[str]] = ..., storage_handlers: _Optional[_Iterable[str]] = ..., supports_seccomp: _Optional[bool] = ..., extra_features: _Optional[_Iterable[str]] = ...) -> None: ...

class GuestDetailsRequest(_message.Message):
    __slots__ = ("mem_block_size", "mem_hotplug_probe")
    MEM_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEM_HOTPLUG_PROBE_FIELD_NUMBER: _ClassVar[int]
    mem_block_size: bool
    mem_hotplug_probe: bool
    def __init__(self, mem_block_size: _Optional[bool] = ..., mem_hotplug_probe: _Optional[bool] = ...) -> None: ...

class GuestDetailsResponse(_message.Message):
    __slots__ = ("mem_block_size_bytes", "agent_details", "support_mem_hotplug_probe")
    MEM_BLOCK_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGENT_DETAILS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_MEM_HOTPLUG_PROBE_FIELD_NUMBER: _ClassVar[int]
    mem_block_size_bytes: int
    agent_details: AgentDetails
    support_mem_hotplug_probe: bool
    def __init__(self, mem_block_size_bytes: _Optional[int] = ..., agent_details: _Optional[_Union[AgentDetails, _Mapping]] = ..., support_mem_hotplug_probe: _Optional[bool] = ...) -> None: ...

class MemHotplugByProbeRequest(_message.Message):
    __slots__ = ("memHotplugProbeAddr",)
    MEMHOTPLUGPROBEADDR_FIELD_NUMBER: _ClassVar[int]
    memHotplugProbeAddr: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, memHotplugProbeAddr: _Optional[_Iterable[int]] = ...) -> None: ...

class SetGuestDateTimeRequest(_message.Message):
    __slots__ = ("Sec", "Usec")
    SEC_FIELD_NUMBER: _ClassVar[int]
    USEC_FIELD_NUMBER: _ClassVar[int]
    Sec: int
    Usec: int
    def __init__(self, Sec: _Optional[int] = ..., Usec: _Optional[int] = ...) -> None: ...

class FSGroup(_message.Message):
    __slots__ = ("group_id", "group_change_policy")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_CHANGE_POLICY_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    group_change_policy: _types_pb2.FSGroupChangePolicy
    def __init__(self, group_id: _Optional[int] = ..., group_change_policy: _Optional[_Union[_types_pb2.FSGroupChangePolicy, str]] = ...) -> None: ...

class SharedMount(_message.Message):
    __slots__ = ("name", "src_ctr", "src_path", "dst_ctr", "dst_path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SRC_CTR_FIELD_NUMBER: _ClassVar[int]
    SRC_PATH_FIELD_NUMBER: _ClassVar[int]
    DST_CTR_FIELD_NUMBER: _ClassVar[int]
    DST_PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    src_ctr: str
    src_path: str
    dst_ctr: str
    dst_path: str
    def __init__(self, name: _Optional[str] = ..., src_ctr: _Optional[str] = ..., src_path: _Optional[str] = ..., dst_ctr: _Optional[str] = ..., dst_path: _Optional[str] = ...) -> None: ...

class Storage(_message.Message):
    __slots__ = ("driver", "driver_options", "source", "fstype", "options", "mount_point", "fs_group", "shared")
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    DRIVER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FSTYPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MOUNT_POINT_FIELD_NUMBER: _ClassVar[int]
    FS_GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    driver: str
    driver_options: _containers.RepeatedScalarFieldContainer[str]
    source: str
    fstype: str
    options: _containers.RepeatedScalarFieldContainer[str]
    mount_point: str
    fs_group: FSGroup
    shared: bool
    def __init__(self, driver: _Optional[str] = ..., driver_options: _Optional[_Iterable[str]] = ..., source: _Optional[str] = ..., fstype: _Optional[str] = ..., options: _Optional[_Iterable[str]] = ..., mount_point: _Optional[str] = ..., fs_group: _Optional[_Union[FSGroup, _Mapping]] = ..., shared: _Optional[bool] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "type", "vm_path", "container_path", "options")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VM_PATH_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    type: str
    vm_path: str
    container_path: str
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., type: _Optional[str] = ..., vm_path: _Optional[str] = ..., container_path: _Optional[str] = ..., options: _Optional[_Iterable[str]] = ...) -> None: ...

class StringUser(_message.Message):
    __slots__ = ("uid", "gid", "additionalGids")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    ADDITIONALGIDS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    gid: str
    additionalGids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, uid: _Optional[str] = ..., gid: _Optional[str] = ..., additionalGids: _Optional[_Iterable[str]] = ...) -> None: ...

class CopyFileRequest(_message.Message):
    __slots__ = ("path", "file_size", "file_mode", "dir_mode", "uid", "gid", "offset", "data")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_FIELD_NUMBER: _ClassVar[int]
    FILE_MODE_FIELD_NUMBER: _ClassVar[int]
    DIR_MODE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    file_size: int
    file_mode: int
    dir_mode: int
    uid: int
    gid: int
    offset: int
    data: bytes
    def __init__(self, path: _Optional[str] = ..., file_size: _Optional[int] = ..., file_mode: _Optional[int] = ..., dir_mode: _Optional[int] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetOOMEventRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OOMEvent(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class AddSwapRequest(_message.Message):
    __slots__ = ("PCIPath",)
    PCIPATH_FIELD_NUMBER: _ClassVar[int]
    PCIPath: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, PCIPath: _Optional[_Iterable[int]] = ...) -> None: ...

class AddSwapPathRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: str
    def __init__(self, metrics: _Optional[str] = ...) -> None: ...

class VolumeStatsRequest(_message.Message):
    __slots__ = ("volume_guest_path",)
    VOLUME_GUEST_PATH_FIELD_NUMBER: _ClassVar[int]
    volume_guest_path: str
    def __init__(self, volume_guest_path: _Optional[str] = ...) -> None: ...

class VolumeStatsResponse(_message.Message):
    __slots__ = ("usage", "volume_condition")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VOLUME_CONDITION_FIELD_NUMBER: _ClassVar[int]
    usage: _containers.RepeatedCompositeFieldContainer[VolumeUsage]
    volume_condition: VolumeCondition
    def __init__(self, usage: _Optional[_Iterable[_Union[VolumeUsage, _Mapping]]] = ..., volume_condition: _Optional[_Union[VolumeCondition, _Mapping]] = ...) -> None: ...

class VolumeUsage(_message.Message):
    __slots__ = ("available", "total", "used", "unit")
    class Unit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[VolumeUsage.Unit]
        BYTES: _ClassVar[VolumeUsage.Unit]
        INODES: _ClassVar[VolumeUsage.Unit]
    UNKNOWN: VolumeUsage.Unit
    BYTES: VolumeUsage.Unit
    INODES: VolumeUsage.Unit
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    available: int
    total: int
    used: int
    unit: VolumeUsage.Unit
    def __init__(self, available: _Optional[int] = ..., total: _Optional[int] = ..., used: _Optional[int] = ..., unit: _Optional[_Union[VolumeUsage.Unit, str]] = ...) -> None: ...

class VolumeCondition(_message.Message):
    __slots__ = ("abnormal", "message")
    ABNORMAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    abnormal: bool
    message: str
    def __init__(self, abnormal: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class ResizeVolumeRequest(_message.Message):
    __slots__ = ("volume_guest_path", "size")
    VOLUME_GUEST_PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    volume_guest_path: str
    size: int
    def __init__(self, volume_guest_path: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class GetDiagnosticDataRequest(_message.Message):
    __slots__ = ("log_type", "container_id")
    LOG_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    log_type: str
    container_id: str
    def __init__(self, log_type: _Optional[str] = ..., container_id: _Optional[str] = ...) -> None: ...

class GetDiagnosticDataResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: str
    def __init__(self, data: _Optional[str] = ...) -> None: ...

class MemAgentMemcgConfig(_message.Message):
    __slots__ = ("disabled", "swap", "swappiness_max", "period_secs", "period_psi_percent_limit", "eviction_psi_percent_limit", "eviction_run_aging_count_min")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    SWAPPINESS_MAX_FIELD_NUMBER: _ClassVar[int]
    PERIOD_SECS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_PSI_PERCENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    EVICTION_PSI_PERCENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    EVICTION_RUN_AGING_COUNT_MIN_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    swap: bool
    swappiness_max: int
    period_secs: int
    period_psi_percent_limit: int
    eviction_psi_percent_limit: int
    eviction_run_aging_count_min: int
    def __init__(self, disabled: _Optional[bool] = ..., swap: _Optional[bool] = ..., swappiness_max: _Optional[int] = ..., period_secs: _Optional[int] = ..., period_psi_percent_limit: _Optional[int] = ..., eviction_psi_percent_limit: _Optional[int] = ..., eviction_run_aging_count_min: _Optional[int] = ...) -> None: ...

class MemAgentCompactConfig(_message.Message):
    __slots__ = ("disabled", "period_secs", "period_psi_percent_limit", "compact_psi_percent_limit", "compact_sec_max", "compact_order", "compact_threshold", "compact_force_times")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    PERIOD_SECS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_PSI_PERCENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    COMPACT_PSI_PERCENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    COMPACT_SEC_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPACT_ORDER_FIELD_NUMBER: _ClassVar[int]
    COMPACT_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FORCE_TIMES_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    period_secs: int
    period_psi_percent_limit: int
    compact_psi_percent_limit: int
    compact_sec_max: int
    compact_order: int
    compact_threshold: int
    compact_force_times: int
    def __init__(self, disabled: _Optional[bool] = ..., period_secs: _Optional[int] = ..., period_psi_percent_limit: _Optional[int] = ..., compact_psi_percent_limit: _Optional[int] = ..., compact_sec_max: _Optional[int] = ..., compact_order: _Optional[int] = ..., compact_threshold: _Optional[int] = ..., compact_force_times: _Optional[int] = ...) -> None: ...
