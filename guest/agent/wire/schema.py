"""The agent API's messages as text, one line each, parsed when a message is first used.

A field is `name:number:type`. Types: s string, y bytes, b bool, i int32, I int64, u uint32, U uint64, e enum, or a
message's name. Before the type: `*` repeated, `%` map from string, `?` explicit presence (proto3 optional or oneof).
"""

from __future__ import annotations

_TEXT: dict[str, str] = {
    # grpc.Health
    "CheckRequest": "service:1:s",
    "HealthCheckResponse": "status:1:e",
    "VersionCheckResponse": "grpc_version:1:s agent_version:2:s",
    # the OCI spec
    "Spec": "Version:1:s Process:2:Process Root:3:Root Hostname:4:s Mounts:5:*Mount Hooks:6:Hooks Annotations:7:%s"
    " Linux:8:Linux"
    " Solaris:9:Solaris Windows:10:Windows",
    "Process": "Terminal:1:b ConsoleSize:2:Box User:3:User Args:4:*s Env:5:*s Cwd:6:s Capabilities:7:LinuxCapabilities"
    " Rlimits:8:*POSIXRlimit NoNewPrivileges:9:b ApparmorProfile:10:s OOMScoreAdj:11:I SelinuxLabel:12:s",
    "Box": "Height:1:u Width:2:u",
    "User": "UID:1:u GID:2:u AdditionalGids:3:*u Username:4:s",
    "LinuxCapabilities": "Bounding:1:*s Effective:2:*s Inheritable:3:*s Permitted:4:*s Ambient:5:*s",
    "POSIXRlimit": "Type:1:s Hard:2:U Soft:3:U",
    "Mount": "destination:1:s source:2:s type:3:s options:4:*s",
    "Root": "Path:1:s Readonly:2:b",
    "Hooks": "Prestart:1:*Hook Poststart:2:*Hook Poststop:3:*Hook CreateRuntime:4:*Hook CreateContainer:5:*Hook"
    " StartContainer:6:*Hook",
    "Hook": "Path:1:s Args:2:*s Env:3:*s Timeout:4:I",
    "Linux": "UIDMappings:1:*LinuxIDMapping GIDMappings:2:*LinuxIDMapping Sysctl:3:%s Resources:4:LinuxResources"
    " CgroupsPath:5:s"
    " Namespaces:6:*LinuxNamespace Devices:7:*LinuxDevice Seccomp:8:LinuxSeccomp RootfsPropagation:9:s"
    " MaskedPaths:10:*s"
    " ReadonlyPaths:11:*s MountLabel:12:s IntelRdt:13:LinuxIntelRdt",
    "Windows": "dummy:1:s",
    "Solaris": "dummy:1:s",
    "LinuxIDMapping": "HostID:1:u ContainerID:2:u Size:3:u",
    "LinuxNamespace": "Type:1:s Path:2:s",
    "LinuxDevice": "Path:1:s Type:2:s Major:3:I Minor:4:I FileMode:5:u UID:6:u GID:7:u",
    "LinuxResources": "Devices:1:*LinuxDeviceCgroup Memory:2:LinuxMemory CPU:3:LinuxCPU Pids:4:LinuxPids"
    " BlockIO:5:LinuxBlockIO"
    " HugepageLimits:6:*LinuxHugepageLimit Network:7:LinuxNetwork",
    "LinuxMemory": "Limit:1:I Reservation:2:I Swap:3:I Kernel:4:I KernelTCP:5:I Swappiness:6:U DisableOOMKiller:7:b",
    "LinuxCPU": "Shares:1:U Quota:2:I Period:3:U RealtimeRuntime:4:I RealtimePeriod:5:U Cpus:6:s Mems:7:s",
    "LinuxWeightDevice": "Major:1:I Minor:2:I Weight:3:u LeafWeight:4:u",
    "LinuxThrottleDevice": "Major:1:I Minor:2:I Rate:3:U",
    "LinuxBlockIO": "Weight:1:u LeafWeight:2:u WeightDevice:3:*LinuxWeightDevice"
    " ThrottleReadBpsDevice:4:*LinuxThrottleDevice"
    " ThrottleWriteBpsDevice:5:*LinuxThrottleDevice ThrottleReadIOPSDevice:6:*LinuxThrottleDevice"
    " ThrottleWriteIOPSDevice:7:*LinuxThrottleDevice",
    "LinuxPids": "Limit:1:I",
    "LinuxDeviceCgroup": "Allow:1:b Type:2:s Major:3:I Minor:4:I Access:5:s",
    "LinuxNetwork": "ClassID:1:u Priorities:2:*LinuxInterfacePriority",
    "LinuxHugepageLimit": "Pagesize:1:s Limit:2:U",
    "LinuxInterfacePriority": "Name:1:s Priority:2:u",
    "LinuxSeccomp": "DefaultAction:1:s Architectures:2:*s Flags:3:*s Syscalls:4:*LinuxSyscall",
    "LinuxSeccompArg": "Index:1:U Value:2:U ValueTwo:3:U Op:4:s",
    "LinuxSyscall": "Names:1:*s Action:2:s errnoret:3:?u Args:4:*LinuxSeccompArg",
    "LinuxIntelRdt": "L3CacheSchema:1:s",
    # types
    "IPAddress": "family:1:e address:2:s mask:3:s",
    "Interface": "device:1:s name:2:s IPAddresses:3:*IPAddress mtu:4:U hwAddr:5:s devicePath:6:s type:7:s"
    " raw_flags:8:u",
    "Route": "dest:1:s gateway:2:s device:3:s source:4:s scope:5:u family:6:e flags:7:u mtu:8:u",
    "ARPNeighbor": "toIPAddress:1:IPAddress device:2:s lladdr:3:s state:4:i flags:5:i",
    # grpc.AgentService: containers and processes
    "Empty": "",
    "CreateContainerRequest": "container_id:1:s exec_id:2:s string_user:3:StringUser devices:4:*Device"
    " storages:5:*Storage OCI:6:Spec"
    " sandbox_pidns:7:b shared_mounts:8:*SharedMount stdin_port:9:u stdout_port:10:u stderr_port:11:u",
    "StartContainerRequest": "container_id:1:s",
    "RemoveContainerRequest": "container_id:1:s timeout:2:u",
    "ExecProcessRequest": "container_id:1:s exec_id:2:s string_user:3:StringUser process:4:Process stdin_port:5:u"
    " stdout_port:6:u"
    " stderr_port:7:u",
    "SignalProcessRequest": "container_id:1:s exec_id:2:s signal:3:u",
    "WaitProcessRequest": "container_id:1:s exec_id:2:s",
    "WaitProcessResponse": "status:1:i",
    "UpdateContainerRequest": "container_id:1:s resources:2:LinuxResources",
    "StatsContainerRequest": "container_id:1:s",
    "PauseContainerRequest": "container_id:1:s",
    "ResumeContainerRequest": "container_id:1:s",
    "CpuUsage": "total_usage:1:U percpu_usage:2:*U usage_in_kernelmode:3:U usage_in_usermode:4:U",
    "ThrottlingData": "periods:1:U throttled_periods:2:U throttled_time:3:U",
    "CpuStats": "cpu_usage:1:CpuUsage throttling_data:2:ThrottlingData",
    "PidsStats": "current:1:U limit:2:U",
    "MemoryData": "usage:1:U max_usage:2:U failcnt:3:U limit:4:U",
    "MemoryStats": "cache:1:U usage:2:MemoryData swap_usage:3:MemoryData kernel_usage:4:MemoryData use_hierarchy:5:b"
    " stats:6:%U",
    "BlkioStatsEntry": "major:1:U minor:2:U op:3:s value:4:U",
    "BlkioStats": "io_service_bytes_recursive:1:*BlkioStatsEntry io_serviced_recursive:2:*BlkioStatsEntry"
    " io_queued_recursive:3:*BlkioStatsEntry io_service_time_recursive:4:*BlkioStatsEntry"
    " io_wait_time_recursive:5:*BlkioStatsEntry"
    " io_merged_recursive:6:*BlkioStatsEntry io_time_recursive:7:*BlkioStatsEntry sectors_recursive:8:*BlkioStatsEntry",
    "HugetlbStats": "usage:1:U max_usage:2:U failcnt:3:U",
    "CgroupStats": "cpu_stats:1:CpuStats memory_stats:2:MemoryStats pids_stats:3:PidsStats blkio_stats:4:BlkioStats"
    " hugetlb_stats:5:%HugetlbStats",
    "NetworkStats": "name:1:s rx_bytes:2:U rx_packets:3:U rx_errors:4:U rx_dropped:5:U tx_bytes:6:U tx_packets:7:U"
    " tx_errors:8:U"
    " tx_dropped:9:U",
    "StatsContainerResponse": "cgroup_stats:1:CgroupStats network_stats:2:*NetworkStats",
    "WriteStreamRequest": "container_id:1:s exec_id:2:s data:3:y",
    "WriteStreamResponse": "len:1:u",
    "ReadStreamRequest": "container_id:1:s exec_id:2:s len:3:u",
    "ReadStreamResponse": "data:1:y",
    "CloseStdinRequest": "container_id:1:s exec_id:2:s",
    "TtyWinResizeRequest": "container_id:1:s exec_id:2:s row:3:u column:4:u",
    # grpc.AgentService: the sandbox and the guest
    "KernelModule": "name:1:s parameters:2:*s",
    "CreateSandboxRequest": "hostname:1:s dns:2:*s storages:3:*Storage sandbox_pidns:4:b sandbox_id:5:s"
    " guest_hook_path:6:s"
    " kernel_modules:7:*KernelModule",
    "DestroySandboxRequest": "",
    "RemoveStaleVirtiofsShareMountsRequest": "",
    "Interfaces": "Interfaces:1:*Interface",
    "Routes": "Routes:1:*Route",
    "UpdateInterfaceRequest": "interface:1:Interface",
    "UpdateRoutesRequest": "routes:1:Routes",
    "UpdateEphemeralMountsRequest": "storages:1:*Storage",
    "ListInterfacesRequest": "",
    "ListRoutesRequest": "",
    "ARPNeighbors": "ARPNeighbors:1:*ARPNeighbor",
    "AddARPNeighborsRequest": "neighbors:1:ARPNeighbors",
    "GetIPTablesRequest": "is_ipv6:1:b",
    "GetIPTablesResponse": "data:1:y",
    "SetIPTablesRequest": "is_ipv6:1:b data:2:y",
    "SetIPTablesResponse": "data:1:y",
    "OnlineCPUMemRequest": "wait:1:b nb_cpus:2:u cpu_only:3:b",
    "ReseedRandomDevRequest": "data:2:y",
    "AgentDetails": "version:1:s init_daemon:2:b device_handlers:3:*s storage_handlers:4:*s supports_seccomp:5:b"
    " extra_features:6:*s",
    "GuestDetailsRequest": "mem_block_size:1:b mem_hotplug_probe:2:b",
    "GuestDetailsResponse": "mem_block_size_bytes:1:U agent_details:2:AgentDetails support_mem_hotplug_probe:3:b",
    "MemHotplugByProbeRequest": "memHotplugProbeAddr:1:*U",
    "SetGuestDateTimeRequest": "Sec:1:I Usec:2:I",
    "FSGroup": "group_id:2:u group_change_policy:3:e",
    "SharedMount": "name:1:s src_ctr:2:s src_path:3:s dst_ctr:4:s dst_path:5:s",
    "Storage": "driver:1:s driver_options:2:*s source:3:s fstype:4:s options:5:*s mount_point:6:s fs_group:7:FSGroup"
    " shared:8:b",
    "Device": "id:1:s type:2:s vm_path:3:s container_path:4:s options:5:*s",
    "StringUser": "uid:1:s gid:2:s additionalGids:3:*s",
    "CopyFileRequest": "path:1:s file_size:2:I file_mode:3:u dir_mode:4:u uid:5:i gid:6:i offset:7:I data:8:y",
    "GetOOMEventRequest": "",
    "OOMEvent": "container_id:1:s",
    "AddSwapRequest": "PCIPath:1:*u",
    "AddSwapPathRequest": "path:1:s",
    "GetMetricsRequest": "",
    "Metrics": "metrics:1:s",
    "VolumeStatsRequest": "volume_guest_path:1:s",
    "VolumeStatsResponse": "usage:1:*VolumeUsage volume_condition:2:VolumeCondition",
    "VolumeUsage": "available:1:U total:2:U used:3:U unit:4:e",
    "VolumeCondition": "abnormal:1:b message:2:s",
    "ResizeVolumeRequest": "volume_guest_path:1:s size:2:U",
    "SetPolicyRequest": "policy:1:s",
    "GetDiagnosticDataRequest": "log_type:1:s container_id:2:s",
    "GetDiagnosticDataResponse": "data:1:s",
    "MemAgentMemcgConfig": "disabled:1:?b swap:2:?b swappiness_max:3:?u period_secs:4:?U period_psi_percent_limit:5:?u"
    " eviction_psi_percent_limit:6:?u eviction_run_aging_count_min:7:?U",
    "MemAgentCompactConfig": "disabled:1:?b period_secs:2:?U period_psi_percent_limit:3:?u"
    " compact_psi_percent_limit:4:?u"
    " compact_sec_max:5:?I compact_order:6:?u compact_threshold:7:?U compact_force_times:8:?U",
}


class Field:
    """One field: `kind` is a scalar's letter or a message's name; `label` is "", "*", "%" or "?"."""

    __slots__ = ("kind", "label", "name", "number")

    def __init__(self, name: str, number: int, label: str, kind: str) -> None:
        self.name = name
        self.number = number
        self.label = label
        self.kind = kind


class MessageType:
    """A message's fields by name and by number."""

    __slots__ = ("by_name", "by_number", "name")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.by_name: dict[str, Field] = {}
        self.by_number: dict[int, Field] = {}
        for item in text.split():
            field_name, number, kind = item.split(":")
            label = kind[0] if kind[0] in "*%?" else ""
            field = Field(field_name, int(number), label, kind[len(label) :])
            self.by_name[field_name] = field
            self.by_number[field.number] = field


_parsed: dict[str, MessageType] = {}


def message_type(name: str) -> MessageType:
    """The type called `name`; KeyError if the API has none."""
    known = _parsed.get(name)
    if known is None:
        known = _parsed[name] = MessageType(name, _TEXT[name])
    return known


def names() -> list[str]:
    """Every message of the API."""
    return list(_TEXT)
