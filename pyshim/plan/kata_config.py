"""Kata's HypervisorConfig as this sandbox was started with, by Kata's key names, for its state file's readers."""

from collections.abc import Mapping

from pyshim.plan.sandbox import SandboxPlan


def kata_hypervisor_config(plan: SandboxPlan) -> Mapping[str, object]:
    """A JSON object; NumVCPUsF is the exact sum before the ceil, as a float."""
    config, vm = plan.config.hypervisor, plan.vm
    return {
        "NumVCPUsF": float(plan.sizing.vcpus.exact),
        "DefaultMaxVCPUs": vm.cpu.max_vcpus,
        "MemorySize": vm.memory.boot_mib,
        "MemSlots": config.memory_slots,
        "DefaultBridges": vm.bridges,
        "HypervisorPath": config.path,
        "KernelPath": config.kernel,
        "ImagePath": config.image,
        "InitrdPath": config.initrd,
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
    }
