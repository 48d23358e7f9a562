"""Every key of Kata's persist.json and its type, as data: what a reader of those files may count on.

Source: kata-containers src/runtime/virtcontainers/persist/api of Kata 4.x, PersistVersion 2. Keys are Go's field names.
Go writes an empty list or map as null and leaves a pointer out; both are read here as the zero value of the key. Files
of Kata 3.x are read, too.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pyshim.state.errors import StateDamaged

PERSIST_VERSION = 2
NO_TIME = "0001-01-01T00:00:00Z"
"""Go's zero time; an empty string would not parse as one."""


class ListOf(NamedTuple):
    item: object


class MapOf(NamedTuple):
    item: object


class OneOf(NamedTuple):
    """A key whose type has changed: the first is what is written, all are read."""

    items: tuple[object, ...]


class Maybe(NamedTuple):
    """A pointer: null, or left out."""

    item: object


ANY_OBJECT = Maybe(MapOf(None))
"""An object of another project's types (libcontainer's, OCI's), passed through."""


def _texts(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), "")


def _numbers(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), 0)


def _truths(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), False)


def _lists(names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), ListOf(""))


BRIDGE = {
    "DeviceAddr": MapOf(""),
    **_texts("Type ID"),
    **_numbers("Addr ParentAddr"),
    "ParentID": OneOf(("", 0)),  # a string since Kata 4.0, a number before
}

HYPERVISOR_STATE = {
    "BlockIndexMap": MapOf(ANY_OBJECT),
    **_texts("Type UUID APISocket HotPlugVFIO ColdPlugVFIO"),
    "Bridges": ListOf(BRIDGE),
    "HotpluggedVCPUs": ListOf(_texts("ID")),
    **_numbers("HotpluggedMemory VirtiofsDaemonPid Pid PCIeRootPort PCIeSwitchPort"),
}

VHOST_USER_DEVICE = {
    **_texts("DevID SocketPath MacAddress Tag Cache Type"),
    "PCIPath": ANY_OBJECT,
    **_numbers("Index CacheSize QueueSize ReconnectTime"),
}
BLOCK_DRIVE = {
    **_texts("File Format ID MmioAddr SCSIAddr NvdimmID VirtPath DevNo"),
    "PCIPath": ANY_OBJECT,
    "Index": 0,
    **_truths("ShareRW ReadOnly DiscardUnmap Pmem Swap"),
}
VFIO_DEVICE = {
    **_texts("ID BDF SysfsDev DevfsDev VendorID DeviceID Class Bus HostPath Port"),
    "GuestPciPath": ANY_OBJECT,
    **_numbers("Type NUMANode"),
    "IsPCIe": False,
    "APDevices": ListOf(""),
}
DEVICE_STATE = {
    **_texts("ID Type DevType"),
    "DriverOptions": MapOf(""),
    **_numbers("RefCount AttachCount Major Minor"),
    "ColdPlug": False,
    "VhostUserDev": Maybe(VHOST_USER_DEVICE),
    "BlockDrive": Maybe(BLOCK_DRIVE),
    "VFIODevs": Maybe(ListOf(VFIO_DEVICE)),
}

INTERFACE = {**_texts("Name HardAddr"), "Addrs": ListOf(ANY_OBJECT)}
TAP_INTERFACE = {**_texts("ID Name"), "TAPIface": INTERFACE}
PAIR = {"NetPair": {**TAP_INTERFACE, "VirtIface": INTERFACE, "NetInterworkingModel": 0}}
ENDPOINT = {
    "Type": "",
    "Physical": Maybe(_texts("BDF Driver VendorDeviceID")),
    **dict.fromkeys(("Veth", "Netkit", "Macvlan", "IPVlan"), Maybe(PAIR)),
    "Macvtap": Maybe({"PCIPath": ANY_OBJECT}),
    "Tap": Maybe({"TapInterface": TAP_INTERFACE}),
    "Tuntap": Maybe({"TuntapInterface": {"Name": "", "TAPIface": INTERFACE}}),
    "VhostUser": Maybe({"IfaceName": "", "PCIPath": ANY_OBJECT}),
    "Vfio": Maybe(_texts("IfaceName")),
}

HYPERVISOR_CONFIG = {
    **_texts("KernelPath ImagePath InitrdPath FirmwarePath MachineAccelerators CPUFeatures HypervisorPath JailerPath"),
    **_texts("BlockDeviceDriver HypervisorMachineType MemoryPath DevicesStatePath EntropySource SharedFS"),
    **_texts("VirtioFSDaemon VirtioFSCache VhostUserStorePath SeccompSandbox GuestHookPath VMid HotPlugVFIO"),
    **_texts("ColdPlugVFIO"),
    **_lists("HypervisorPathList JailerPathList EntropySourceList VirtioFSDaemonList VirtioFSExtraArgs"),
    **_lists("VhostUserStorePathList EnableAnnotations"),
    "NumVCPUsF": 0.0,
    **_numbers("MemOffset RxRateLimiterMaxRate TxRateLimiterMaxRate SGXEPCSize DefaultMaxVCPUs MemorySize"),
    **_numbers("DefaultBridges Msize9p MemSlots VirtioFSCacheSize BlockDeviceLogicalSectorSize"),
    **_numbers("BlockDevicePhysicalSectorSize IndepIOThreads PCIeRootPort PCIeSwitchPort"),
    **_truths("BlockDeviceCacheSet BlockDeviceCacheDirect BlockDeviceCacheNoflush DisableBlockDeviceUse"),
    **_truths("EnableIOThreads Debug MemPrealloc HugePages VirtioMem DisableNestingChecks DisableImageNvdimm"),
    **_truths("BootToBeTemplate BootFromTemplate DisableVhostNet EnableVhostUserStore"),
}

CONTAINER_CONFIG = {"ID": "", "Annotations": MapOf(""), "RootFs": "", "Resources": MapOf(None)}

SANDBOX_CONFIG = {
    "HypervisorType": "",
    "HypervisorConfig": HYPERVISOR_CONFIG,
    "KataAgentConfig": Maybe({"LongLiveConn": False}),
    "KataShimConfig": Maybe({"Path": "", "Debug": False}),
    "NetworkConfig": {"NetworkID": "", **_truths("NetworkCreated DisableNewNetwork"), "InterworkingModel": 0},
    "ShmSize": 0,
    **_truths("SharePidNs Stateful SystemdCgroup SandboxCgroupOnly DisableGuestSeccomp EnableVCPUsPinning"),
    **_lists("SandboxBindMounts Experimental"),
    "GuestSeLinuxLabel": "",
    "ContainerConfigs": ListOf(CONTAINER_CONFIG),
    "cgroups": ANY_OBJECT,
}

SANDBOX_STATE = {
    "PersistVersion": 0,
    **_texts("State SandboxContainer SandboxCgroupPath OverheadCgroupPath"),
    "GuestMemoryBlockSizeMB": 0,
    "GuestMemoryHotplugProbe": False,
    "CgroupPaths": MapOf(""),
    "Devices": ListOf(DEVICE_STATE),
    "HypervisorState": HYPERVISOR_STATE,
    "AgentState": {"URL": ""},
    "Network": {"NetworkID": "", "Endpoints": ListOf(ENDPOINT), "NetworkCreated": False},
    "Config": SANDBOX_CONFIG,
}

DEVICE_MAP = {**_texts("ID ContainerPath"), **_numbers("FileMode UID GID"), "Shared": False}
MOUNT = {**_texts("Source Destination Type HostPath BlockDeviceID"), **_lists("Options"), "ReadOnly": False}
CONTAINER_STATE = {
    **_texts("State CgroupPath BundlePath"),
    "Rootfs": _texts("BlockDeviceID FsType"),
    "Process": {"Token": "", "Pid": 0, "StartTime": NO_TIME},
    "DeviceMaps": ListOf(DEVICE_MAP),
    "Mounts": ListOf(MOUNT),
}


def filled(value: object, shape: object, where: str) -> object:
    """`value` with every key of `shape`, zero where it says nothing. Raises StateDamaged naming a wrong value.

    Keys that `shape` does not know are kept: a later Kata may have written them.
    """
    if type(shape) in _TYPES:
        holds = type(value) is type(shape) or (isinstance(shape, float) and type(value) is int)
        _check(holds, where, _TYPES[type(shape)])
        return value
    match shape:
        case dict():
            _check(isinstance(value, Mapping), where, "an object")
            assert isinstance(value, Mapping)
            return _filled_object(value, shape, where)
        case Maybe(item):
            return None if value is None else filled(value, item, where)
        case OneOf(items):
            _check(any(type(value) is type(item) for item in items), where, _TYPES[type(items[0])])
            return value
        case ListOf(item):
            _check(value is None or isinstance(value, list), where, "a list")
            assert value is None or isinstance(value, list)
            return [filled(one, item, f"{where}[{index}]") for index, one in enumerate(value or ())]
        case MapOf(item):
            _check(value is None or isinstance(value, Mapping), where, "an object")
            assert value is None or isinstance(value, Mapping)
            return {str(key): filled(one, item, f"{where}.{key}") for key, one in (value or {}).items()}
    return value


_TYPES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _filled_object(value: Mapping[str, object], shape: Mapping[str, object], where: str) -> dict[str, object]:
    """Every state that is written goes through here with some two hundred keys, most of them plain and right."""
    found = dict(value)
    for key, below in shape.items():
        plain = type(below) in _TYPES
        if key not in found:
            if plain:
                found[key] = below
            elif not isinstance(below, Maybe):
                found[key] = zero(below)
        elif not plain or type(found[key]) is not type(below):
            found[key] = filled(found[key], below, f"{where}.{key}" if where else key)
    return found


def zero(shape: object) -> object:
    """The value Go writes for a key without a value, lists and maps being empty rather than null."""
    if type(shape) in _TYPES:
        return shape
    match shape:
        case dict():
            return {
                key: below if type(below) in _TYPES else zero(below)
                for key, below in shape.items()
                if not isinstance(below, Maybe)
            }
        case ListOf():
            return []
        case MapOf():
            return {}
        case OneOf(items):
            return zero(items[0])
    return None


def _check(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise StateDamaged(f"read state: {where} is not {expected}")
