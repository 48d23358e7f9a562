"""Kata's HypervisorConfig of a sandbox, for programs that read Kata's state file. Pure."""

from collections.abc import Mapping

from pyshim.model.plans import SandboxPlan
from pyshim.model.vm import LocalVm


def kata_hypervisor_config(plan: SandboxPlan) -> Mapping[str, object]:
    """A JSON object under Kata's key names. NumVCPUsF is the exact number before it is rounded up.

    InitrdPath is empty if there is an image: Kata refuses a state with both, and its `delete` then removes it.
    """
    config, vm = plan.config.hypervisor, plan.vm
    bridges = vm.bridges if isinstance(vm, LocalVm) else 0
    return {
        "NumVCPUsF": float(plan.sizing.vcpus.exact),
        "DefaultMaxVCPUs": vm.cpu.max_vcpus,
        "MemorySize": vm.memory.boot_mib,
        "MemSlots": config.memory_slots,
        "DefaultBridges": bridges,
        "HypervisorPath": config.path,
        "KernelPath": config.kernel,
        "ImagePath": config.image,
        "InitrdPath": "" if config.image else config.initrd,
        "FirmwarePath": config.firmware,
        "HypervisorMachineType": config.machine_type,
        "MachineAccelerators": config.machine_accelerators,
        "CPUFeatures": config.cpu_features,
        "BlockDeviceDriver": config.block_device_driver,
        "EntropySource": config.entropy_source,
        "SharedFS": config.shared_fs,
        "VirtioFSDaemon": config.virtio_fs_daemon,
        "VirtioFSCache": config.virtio_fs_cache,
        "VirtioFSExtraArgs": list(config.virtio_fs_extra_args),
        "SeccompSandbox": config.seccompsandbox,
        "VMid": str(plan.sandbox_id),
        "Debug": config.enable_debug,
        "MemPrealloc": config.enable_mem_prealloc,
        "HugePages": config.enable_hugepages,
        "DisableNestingChecks": config.disable_nesting_checks,
        "DisableImageNvdimm": config.disable_image_nvdimm,
        "DisableVhostNet": config.disable_vhost_net,
        "VirtioMem": vm.memory.virtio_mem,
        "VirtioFSCacheSize": config.virtio_fs_cache_size_mib,
        "GuestHookPath": config.guest_hook_path,
        "DisableBlockDeviceUse": config.disable_block_device_use,
        "BlockDeviceCacheSet": config.block_device_cache_set,
        "BlockDeviceCacheDirect": config.block_device_cache_direct,
        "BlockDeviceCacheNoflush": config.block_device_cache_noflush,
        "BlockDeviceLogicalSectorSize": config.block_device_logical_sector_size,
        "BlockDevicePhysicalSectorSize": config.block_device_physical_sector_size,
        "EnableIOThreads": config.enable_iothreads,
        "IndepIOThreads": config.indep_iothreads,
        "EnableVhostUserStore": config.enable_vhost_user_store,
        "VhostUserStorePath": config.vhost_user_store_path,
        "RxRateLimiterMaxRate": config.rx_rate_limiter_max_rate,
        "TxRateLimiterMaxRate": config.tx_rate_limiter_max_rate,
        "HotPlugVFIO": config.hot_plug_vfio,
        "ColdPlugVFIO": config.cold_plug_vfio,
        "PCIeRootPort": config.pcie_root_port,
        "PCIeSwitchPort": config.pcie_switch_port,
    }
