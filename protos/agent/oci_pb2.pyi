from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Spec(_message.Message):
    __slots__ = ("Version", "Process", "Root", "Hostname", "Mounts", "Hooks", "Annotations", "Linux", "Solaris", "Windows")
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    HOOKS_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    LINUX_FIELD_NUMBER: _ClassVar[int]
    SOLARIS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    Version: str
    Process: Process
    Root: Root
    Hostname: str
    Mounts: _containers.RepeatedCompositeFieldContainer[Mount]
    Hooks: Hooks
    Annotations: _containers.ScalarMap[str, str]
    Linux: Linux
    Solaris: Solaris
    Windows: Windows
    def __init__(self, Version: _Optional[str] = ..., Process: _Optional[_Union[Process, _Mapping]] = ..., Root: _Optional[_Union[Root, _Mapping]] = ..., Hostname: _Optional[str] = ..., Mounts: _Optional[_Iterable[_Union[Mount, _Mapping]]] = ..., Hooks: _Optional[_Union[Hooks, _Mapping]] = ..., Annotations: _Optional[_Mapping[str, str]] = ..., Linux: _Optional[_Union[Linux, _Mapping]] = ..., Solaris: _Optional[_Union[Solaris, _Mapping]] = ..., Windows: _Optional[_Union[Windows, _Mapping]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("Terminal", "ConsoleSize", "User", "Args", "Env", "Cwd", "Capabilities", "Rlimits", "NoNewPrivileges", "ApparmorProfile", "OOMScoreAdj", "SelinuxLabel", "NoStdin")
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    CONSOLESIZE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RLIMITS_FIELD_NUMBER: _ClassVar[int]
    NONEWPRIVILEGES_FIELD_NUMBER: _ClassVar[int]
    APPARMORPROFILE_FIELD_NUMBER: _ClassVar[int]
    OOMSCOREADJ_FIELD_NUMBER: _ClassVar[int]
    SELINUXLABEL_FIELD_NUMBER: _ClassVar[int]
    NOSTDIN_FIELD_NUMBER: _ClassVar[int]
    Terminal: bool
    ConsoleSize: Box
    User: User
    Args: _containers.RepeatedScalarFieldContainer[str]
    Env: _containers.RepeatedScalarFieldContainer[str]
    Cwd: str
    Capabilities: LinuxCapabilities
    Rlimits: _containers.RepeatedCompositeFieldContainer[POSIXRlimit]
    NoNewPrivileges: bool
    ApparmorProfile: str
    OOMScoreAdj: int
    SelinuxLabel: str
    NoStdin: bool
    def __init__(self, Terminal: _Optional[bool] = ..., ConsoleSize: _Optional[_Union[Box, _Mapping]] = ..., User: _Optional[_Union[User, _Mapping]] = ..., Args: _Optional[_Iterable[str]] = ..., Env: _Optional[_Iterable[str]] = ..., Cwd: _Optional[str] = ..., Capabilities: _Optional[_Union[LinuxCapabilities, _Mapping]] = ..., Rlimits: _Optional[_Iterable[_Union[POSIXRlimit, _Mapping]]] = ..., NoNewPrivileges: _Optional[bool] = ..., ApparmorProfile: _Optional[str] = ..., OOMScoreAdj: _Optional[int] = ..., SelinuxLabel: _Optional[str] = ..., NoStdin: _Optional[bool] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("Height", "Width")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    Height: int
    Width: int
    def __init__(self, Height: _Optional[int] = ..., Width: _Optional[int] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("UID", "GID", "AdditionalGids", "Username")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    ADDITIONALGIDS_FIELD_NUMBER: _ClassVar[int]
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    UID: int
    GID: int
    AdditionalGids: _containers.RepeatedScalarFieldContainer[int]
    Username: str
    def __init__(self, UID: _Optional[int] = ..., GID: _Optional[int] = ..., AdditionalGids: _Optional[_Iterable[int]] = ..., Username: _Optional[str] = ...) -> None: ...

class LinuxCapabilities(_message.Message):
    __slots__ = ("Bounding", "Effective", "Inheritable", "Permitted", "Ambient")
    BOUNDING_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    INHERITABLE_FIELD_NUMBER: _ClassVar[int]
    PERMITTED_FIELD_NUMBER: _ClassVar[int]
    AMBIENT_FIELD_NUMBER: _ClassVar[int]
    Bounding: _containers.RepeatedScalarFieldContainer[str]
    Effective: _containers.RepeatedScalarFieldContainer[str]
    Inheritable: _containers.RepeatedScalarFieldContainer[str]
    Permitted: _containers.RepeatedScalarFieldContainer[str]
    Ambient: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, Bounding: _Optional[_Iterable[str]] = ..., Effective: _Optional[_Iterable[str]] = ..., Inheritable: _Optional[_Iterable[str]] = ..., Permitted: _Optional[_Iterable[str]] = ..., Ambient: _Optional[_Iterable[str]] = ...) -> None: ...

class POSIXRlimit(_message.Message):
    __slots__ = ("Type", "Hard", "Soft")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    Type: str
    Hard: int
    Soft: int
    def __init__(self, Type: _Optional[str] = ..., Hard: _Optional[int] = ..., Soft: _Optional[int] = ...) -> None: ...

class Mount(_message.Message):
    __slots__ = ("destination", "source", "type", "options")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    destination: str
    source: str
    type: str
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, destination: _Optional[str] = ..., source: _Optional[str] = ..., type: _Optional[str] = ..., options: _Optional[_Iterable[str]] = ...) -> None: ...

class Root(_message.Message):
    __slots__ = ("Path", "Readonly")
    PATH_FIELD_NUMBER: _ClassVar[int]
    READONLY_FIELD_NUMBER: _ClassVar[int]
    Path: str
    Readonly: bool
    def __init__(self, Path: _Optional[str] = ..., Readonly: _Optional[bool] = ...) -> None: ...

class Hooks(_message.Message):
    __slots__ = ("Prestart", "Poststart", "Poststop", "CreateRuntime", "CreateContainer", "StartContainer")
    PRESTART_FIELD_NUMBER: _ClassVar[int]
    POSTSTART_FIELD_NUMBER: _ClassVar[int]
    POSTSTOP_FIELD_NUMBER: _ClassVar[int]
    CREATERUNTIME_FIELD_NUMBER: _ClassVar[int]
    CREATECONTAINER_FIELD_NUMBER: _ClassVar[int]
    STARTCONTAINER_FIELD_NUMBER: _ClassVar[int]
    Prestart: _containers.RepeatedCompositeFieldContainer[Hook]
    Poststart: _containers.RepeatedCompositeFieldContainer[Hook]
    Poststop: _containers.RepeatedCompositeFieldContainer[Hook]
    CreateRuntime: _containers.RepeatedCompositeFieldContainer[Hook]
    CreateContainer: _containers.RepeatedCompositeFieldContainer[Hook]
    StartContainer: _containers.RepeatedCompositeFieldContainer[Hook]
    def __init__(self, Prestart: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ..., Poststart: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ..., Poststop: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ..., CreateRuntime: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ..., CreateContainer: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ..., StartContainer: _Optional[_Iterable[_Union[Hook, _Mapping]]] = ...) -> None: ...

class Hook(_message.Message):
    __slots__ = ("Path", "Args", "Env", "Timeout")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    Path: str
    Args: _containers.RepeatedScalarFieldContainer[str]
    Env: _containers.RepeatedScalarFieldContainer[str]
    Timeout: int
    def __init__(self, Path: _Optional[str] = ..., Args: _Optional[_Iterable[str]] = ..., Env: _Optional[_Iterable[str]] = ..., Timeout: _Optional[int] = ...) -> None: ...

class Linux(_message.Message):
    __slots__ = ("UIDMappings", "GIDMappings", "Sysctl", "Resources", "CgroupsPath", "Namespaces", "Devices", "Seccomp", "RootfsPropagation", "MaskedPaths", "ReadonlyPaths", "MountLabel", "IntelRdt")
    class SysctlEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UIDMAPPINGS_FIELD_NUMBER: _ClassVar[int]
    GIDMAPPINGS_FIELD_NUMBER: _ClassVar[int]
    SYSCTL_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    CGROUPSPATH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_FIELD_NUMBER: _ClassVar[int]
    ROOTFSPROPAGATION_FIELD_NUMBER: _ClassVar[int]
    MASKEDPATHS_FIELD_NUMBER: _ClassVar[int]
    READONLYPATHS_FIELD_NUMBER: _ClassVar[int]
    MOUNTLABEL_FIELD_NUMBER: _ClassVar[int]
    INTELRDT_FIELD_NUMBER: _ClassVar[int]
    UIDMappings: _containers.RepeatedCompositeFieldContainer[LinuxIDMapping]
    GIDMappings: _containers.RepeatedCompositeFieldContainer[LinuxIDMapping]
    Sysctl: _containers.ScalarMap[str, str]
    Resources: LinuxResources
    CgroupsPath: str
    Namespaces: _containers.RepeatedCompositeFieldContainer[LinuxNamespace]
    Devices: _containers.RepeatedCompositeFieldContainer[LinuxDevice]
    Seccomp: LinuxSeccomp
    RootfsPropagation: str
    MaskedPaths: _containers.RepeatedScalarFieldContainer[str]
    ReadonlyPaths: _containers.RepeatedScalarFieldContainer[str]
    MountLabel: str
    IntelRdt: LinuxIntelRdt
    def __init__(self, UIDMappings: _Optional[_Iterable[_Union[LinuxIDMapping, _Mapping]]] = ..., GIDMappings: _Optional[_Iterable[_Union[LinuxIDMapping, _Mapping]]] = ..., Sysctl: _Optional[_Mapping[str, str]] = ..., Resources: _Optional[_Union[LinuxResources, _Mapping]] = ..., CgroupsPath: _Optional[str] = ..., Namespaces: _Optional[_Iterable[_Union[LinuxNamespace, _Mapping]]] = ..., Devices: _Optional[_Iterable[_Union[LinuxDevice, _Mapping]]] = ..., Seccomp: _Optional[_Union[LinuxSeccomp, _Mapping]] = ..., RootfsPropagation: _Optional[str] = ..., MaskedPaths: _Optional[_Iterable[str]] = ..., ReadonlyPaths: _Optional[_Iterable[str]] = ..., MountLabel: _Optional[str] = ..., IntelRdt: _Optional[_Union[LinuxIntelRdt, _Mapping]] = ...) -> None: ...

class Windows(_message.Message):
    __slots__ = ("dummy",)
    DUMMY_FIELD_NUMBER: _ClassVar[int]
    dummy: str
    def __init__(self, dummy: _Optional[str] = ...) -> None: ...

class Solaris(_message.Message):
    __slots__ = ("dummy",)
    DUMMY_FIELD_NUMBER: _ClassVar[int]
    dummy: str
    def __init__(self, dummy: _Optional[str] = ...) -> None: ...

class LinuxIDMapping(_message.Message):
    __slots__ = ("HostID", "ContainerID", "Size")
    HOSTID_FIELD_NUMBER: _ClassVar[int]
    CONTAINERID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HostID: int
    ContainerID: int
    Size: int
    def __init__(self, HostID: _Optional[int] = ..., ContainerID: _Optional[int] = ..., Size: _Optional[int] = ...) -> None: ...

class LinuxNamespace(_message.Message):
    __slots__ = ("Type", "Path")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    Type: str
    Path: str
    def __init__(self, Type: _Optional[str] = ..., Path: _Optional[str] = ...) -> None: ...

class LinuxDevice(_message.Message):
    __slots__ = ("Path", "Type", "Major", "Minor", "FileMode", "UID", "GID")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    FILEMODE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    Path: str
    Type: str
    Major: int
    Minor: int
    FileMode: int
    UID: int
    GID: int
    def __init__(self, Path: _Optional[str] = ..., Type: _Optional[str] = ..., Major: _Optional[int] = ..., Minor: _Optional[int] = ..., FileMode: _Optional[int] = ..., UID: _Optional[int] = ..., GID: _Optional[int] = ...) -> None: ...

class LinuxResources(_message.Message):
    __slots__ = ("Devices", "Memory", "CPU", "Pids", "BlockIO", "HugepageLimits", "Network", "Unified")
    class UnifiedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKIO_FIELD_NUMBER: _ClassVar[int]
    HUGEPAGELIMITS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    Devices: _containers.RepeatedCompositeFieldContainer[LinuxDeviceCgroup]
    Memory: LinuxMemory
    CPU: LinuxCPU
    Pids: LinuxPids
    BlockIO: LinuxBlockIO
    HugepageLimits: _containers.RepeatedCompositeFieldContainer[LinuxHugepageLimit]
    Network: LinuxNetwork
    Unified: _containers.ScalarMap[str, str]
    def __init__(self, Devices: _Optional[_Iterable[_Union[LinuxDeviceCgroup, _Mapping]]] = ..., Memory: _Optional[_Union[LinuxMemory, _Mapping]] = ..., CPU: _Optional[_Union[LinuxCPU, _Mapping]] = ..., Pids: _Optional[_Union[LinuxPids, _Mapping]] = ..., BlockIO: _Optional[_Union[LinuxBlockIO, _Mapping]] = ..., HugepageLimits: _Optional[_Iterable[_Union[LinuxHugepageLimit, _Mapping]]] = ..., Network: _Optional[_Union[LinuxNetwork, _Mapping]] = ..., Unified: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LinuxMemory(_message.Message):
    __slots__ = ("Limit", "Reservation", "Swap", "Kernel", "KernelTCP", "Swappiness", "DisableOOMKiller")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    KERNELTCP_FIELD_NUMBER: _ClassVar[int]
    SWAPPINESS_FIELD_NUMBER: _ClassVar[int]
    DISABLEOOMKILLER_FIELD_NUMBER: _ClassVar[int]
    Limit: int
    Reservation: int
    Swap: int
    Kernel: int
    KernelTCP: int
    Swappiness: int
    DisableOOMKiller: bool
    def __init__(self, Limit: _Optional[int] = ..., Reservation: _Optional[int] = ..., Swap: _Optional[int] = ..., Kernel: _Optional[int] = ..., KernelTCP: _Optional[int] = ..., Swappiness: _Optional[int] = ..., DisableOOMKiller: _Optional[bool] = ...) -> None: ...

class LinuxCPU(_message.Message):
    __slots__ = ("Shares", "Quota", "Period", "RealtimeRuntime", "RealtimePeriod", "Cpus", "Mems")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    REALTIMERUNTIME_FIELD_NUMBER: _ClassVar[int]
    REALTIMEPERIOD_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMS_FIELD_NUMBER: _ClassVar[int]
    Shares: int
    Quota: int
    Period: int
    RealtimeRuntime: int
    RealtimePeriod: int
    Cpus: str
    Mems: str
    def __init__(self, Shares: _Optional[int] = ..., Quota: _Optional[int] = ..., Period: _Optional[int] = ..., RealtimeRuntime: _Optional[int] = ..., RealtimePeriod: _Optional[int] = ..., Cpus: _Optional[str] = ..., Mems: _Optional[str] = ...) -> None: ...

class LinuxWeightDevice(_message.Message):
    __slots__ = ("Major", "Minor", "Weight", "LeafWeight")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LEAFWEIGHT_FIELD_NUMBER: _ClassVar[int]
    Major: int
    Minor: int
    Weight: int
    LeafWeight: int
    def __init__(self, Major: _Optional[int] = ..., Minor: _Optional[int] = ..., Weight: _Optional[int] = ..., LeafWeight: _Optional[int] = ...) -> None: ...

class LinuxThrottleDevice(_message.Message):
    __slots__ = ("Major", "Minor", "Rate")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    Major: int
    Minor: int
    Rate: int
    def __init__(self, Major: _Optional[int] = ..., Minor: _Optional[int] = ..., Rate: _Optional[int] = ...) -> None: ...

class LinuxBlockIO(_message.Message):
    __slots__ = ("Weight", "LeafWeight", "WeightDevice", "ThrottleReadBpsDevice", "ThrottleWriteBpsDevice", "ThrottleReadIOPSDevice", "ThrottleWriteIOPSDevice")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LEAFWEIGHT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTDEVICE_FIELD_NUMBER: _ClassVar[int]
    THROTTLEREADBPSDEVICE_FIELD_NUMBER: _ClassVar[int]
    THROTTLEWRITEBPSDEVICE_FIELD_NUMBER: _ClassVar[int]
    THROTTLEREADIOPSDEVICE_FIELD_NUMBER: _ClassVar[int]
    THROTTLEWRITEIOPSDEVICE_FIELD_NUMBER: _ClassVar[int]
    Weight: int
    LeafWeight: int
    WeightDevice: _containers.RepeatedCompositeFieldContainer[LinuxWeightDevice]
    ThrottleReadBpsDevice: _containers.RepeatedCompositeFieldContainer[LinuxThrottleDevice]
    ThrottleWriteBpsDevice: _containers.RepeatedCompositeFieldContainer[LinuxThrottleDevice]
    ThrottleReadIOPSDevice: _containers.RepeatedCompositeFieldContainer[LinuxThrottleDevice]
    ThrottleWriteIOPSDevice: _containers.RepeatedCompositeFieldContainer[LinuxThrottleDevice]
    def __init__(self, Weight: _Optional[int] = ..., LeafWeight: _Optional[int] = ..., WeightDevice: _Optional[_Iterable[_Union[LinuxWeightDevice, _Mapping]]] = ..., ThrottleReadBpsDevice: _Optional[_Iterable[_Union[LinuxThrottleDevice, _Mapping]]] = ..., ThrottleWriteBpsDevice: _Optional[_Iterable[_Union[LinuxThrottleDevice, _Mapping]]] = ..., ThrottleReadIOPSDevice: _Optional[_Iterable[_Union[LinuxThrottleDevice, _Mapping]]] = ..., ThrottleWriteIOPSDevice: _Optional[_Iterable[_Union[LinuxThrottleDevice, _Mapping]]] = ...) -> None: ...

class LinuxPids(_message.Message):
    __slots__ = ("Limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    Limit: int
    def __init__(self, Limit: _Optional[int] = ...) -> None: ...

class LinuxDeviceCgroup(_message.Message):
    __slots__ = ("Allow", "Type", "Major", "Minor", "Access")
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    Allow: bool
    Type: str
    Major: int
    Minor: int
    Access: str
    def __init__(self, Allow: _Optional[bool] = ..., Type: _Optional[str] = ..., Major: _Optional[int] = ..., Minor: _Optional[int] = ..., Access: _Optional[str] = ...) -> None: ...

class LinuxNetwork(_message.Message):
    __slots__ = ("ClassID", "Priorities")
    CLASSID_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    ClassID: int
    Priorities: _containers.RepeatedCompositeFieldContainer[LinuxInterfacePriority]
    def __init__(self, ClassID: _Optional[int] = ..., Priorities: _Optional[_Iterable[_Union[LinuxInterfacePriority, _Mapping]]] = ...) -> None: ...

class LinuxHugepageLimit(_message.Message):
    __slots__ = ("Pagesize", "Limit")
    PAGESIZE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    Pagesize: str
    Limit: int
    def __init__(self, Pagesize: _Optional[str] = ..., Limit: _Optional[int] = ...) -> None: ...

class LinuxInterfacePriority(_message.Message):
    __slots__ = ("Name", "Priority")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    Name: str
    Priority: int
    def __init__(self, Name: _Optional[str] = ..., Priority: _Optional[int] = ...) -> None: ...

class LinuxSeccomp(_message.Message):
    __slots__ = ("DefaultAction", "Architectures", "Flags", "Syscalls")
    DEFAULTACTION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURES_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    SYSCALLS_FIELD_NUMBER: _ClassVar[int]
    DefaultAction: str
    Architectures: _containers.RepeatedScalarFieldContainer[str]
    Flags: _containers.RepeatedScalarFieldContainer[str]
    Syscalls: _containers.RepeatedCompositeFieldContainer[LinuxSyscall]
    def __init__(self, DefaultAction: _Optional[str] = ..., Architectures: _Optional[_Iterable[str]] = ..., Flags: _Optional[_Iterable[str]] = ..., Syscalls: _Optional[_Iterable[_Union[LinuxSyscall, _Mapping]]] = ...) -> None: ...

class LinuxSeccompArg(_message.Message):
    __slots__ = ("Index", "Value", "ValueTwo", "Op")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VALUETWO_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    Index: int
    Value: int
    ValueTwo: int
    Op: str
    def __init__(self, Index: _Optional[int] = ..., Value: _Optional[int] = ..., ValueTwo: _Optional[int] = ..., Op: _Optional[str] = ...) -> None: ...

class LinuxSyscall(_message.Message):
    __slots__ = ("Names", "Action", "errnoret", "Args")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ERRNORET_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    Names: _containers.RepeatedScalarFieldContainer[str]
    Action: str
    errnoret: int
    Args: _containers.RepeatedCompositeFieldContainer[LinuxSeccompArg]
    def __init__(self, Names: _Optional[_Iterable[str]] = ..., Action: _Optional[str] = ..., errnoret: _Optional[int] = ..., Args: _Optional[_Iterable[_Union[LinuxSeccompArg, _Mapping]]] = ...) -> None: ...

class LinuxIntelRdt(_message.Message):
    __slots__ = ("L3CacheSchema",)
    L3CACHESCHEMA_FIELD_NUMBER: _ClassVar[int]
    L3CacheSchema: str
    def __init__(self, L3CacheSchema: _Optional[str] = ...) -> None: ...
