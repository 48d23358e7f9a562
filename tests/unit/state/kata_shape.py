"""Every key of Kata's persist.json and its type, as data: what its readers take.

Source: kata-containers src/runtime/virtcontainers/persist/api of Kata 4.x, PersistVersion 2. Keys are Go's field names.
A key may be left out: encoding/json of Go leaves its zero value then.
"""

from collections.abc import Mapping
from typing import NamedTuple


class ListOf(NamedTuple):
    item: object


class MapOf(NamedTuple):
    item: object


class Maybe(NamedTuple):
    """A pointer, which may be null."""

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
    "ParentID": "",  # since Kata 4.0; a number before
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
    "Process": {"Token": "", "Pid": 0, "StartTime": ""},
    "DeviceMaps": ListOf(DEVICE_MAP),
    "Mounts": ListOf(MOUNT),
}


def check(value: object, shape: object, where: str = "document") -> None:
    """Fails naming the first key of `value` that Kata does not have, or has with another type."""
    match shape:
        case None:
            return
        case Maybe(item):
            if value is not None:
                check(value, item, where)
        case ListOf(item):
            assert isinstance(value, list | tuple), f"{where} is not a list"
            for index, one in enumerate(value):
                check(one, item, f"{where}[{index}]")
        case MapOf(item):
            assert isinstance(value, Mapping), f"{where} is not an object"
            for key, one in value.items():
                check(one, item, f"{where}.{key}")
        case dict():
            assert isinstance(value, Mapping), f"{where} is not an object"
            assert value.keys() <= shape.keys(), f"{where} has keys that Kata does not have"
            for key, one in value.items():
                check(one, shape[key], f"{where}.{key}")
        case _:
            is_right = type(value) is type(shape) or (isinstance(shape, float) and type(value) is int)
            assert is_right, f"{where} is not a {type(shape).__name__}"
