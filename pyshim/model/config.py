"""The effective configuration: what TOML, drop-ins and annotations come to, typed and in named units.

Field names are Kata's key names, a unit added where Kata's name has none. `config/` builds it, the other rooms read it.
Keys that decide nothing have no field. `config/keys_*.py` has each key's meaning.
"""

from collections.abc import Mapping
from fractions import Fraction

import msgspec

HYPERVISOR_PREFIX = "io.katacontainers.config.hypervisor."
"""Of annotations that set keys of the hypervisor's table."""
FILE_SYSTEM_OPTION_PREFIX = "io.katacontainers.fs-opt."
"""Of annotations and mount options by which a block snapshotter describes layers to the guest. Source: Kata."""
SWAPPINESS_ANNOTATION = "io.katacontainers.container.resource.swappiness"
SWAP_IN_BYTES_ANNOTATION = "io.katacontainers.container.resource.swap_in_bytes"
"""Swap annotations of a container, read where `enable_guest_swap` is set."""


class HypervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Boot files.
    path: str
    kernel: str
    kernel_hz: int
    """Our own key; 0 when not known."""
    image: str
    initrd: str
    rootfs_type: str
    kernel_params: str
    kernel_verity_params: str
    firmware: str
    machine_type: str
    machine_accelerators: str
    cpu_features: str
    accelerator: str
    """`auto`, `kvm` or `tcg`; our own key."""
    cpu_model: str
    """QEMU's -cpu model; empty: `host` with KVM, a model fit for emulation without. Our own key."""
    guest_hook_path: str
    guest_extension_images: tuple[Mapping[str, str], ...]
    """Each with `name`, `path` and, if it has, `verity_params`."""
    # Size.
    default_vcpus: Fraction
    default_maxvcpus: int
    """0: the host's CPU count."""
    default_memory_mib: int
    default_maxmemory_mib: int
    """0: the host's memory."""
    overhead_vcpus: Fraction
    """Sizing policy `overhead`: what the VM itself needs beside a workload that states its CPUs."""
    overhead_memory_mib: int
    requested_vcpus: Fraction
    """The pod's request, for runtimes that do not pass it on in full; our own key, mostly an annotation."""
    requested_memory_mib: int
    memory_slots: int
    enable_virtio_mem: bool
    enable_mem_prealloc: bool
    enable_hugepages: bool
    reclaim_guest_freed_memory: bool
    enable_numa: bool
    numa_mapping: tuple[str, ...]
    """Host nodes of each guest node, as they were written; empty: as many as the VM needs."""
    enable_guest_swap: bool
    guest_swap_path: str
    guest_memory_dump_path: str
    guest_memory_dump_paging: bool
    # Safety.
    confidential_guest: bool
    sev_snp_guest: bool
    confidential_technology: str
    """`auto`, `tdx`, `snp` or `sev`; our own key."""
    sev_guest_policy: int
    """0: by host; our own key."""
    sev_launch_hook: str
    """Our own key."""
    snp_guest_policy: int
    snp_id_block: str
    snp_id_auth: str
    tdx_quote_generation_service_socket_port: int
    initdata: str
    seccompsandbox: str
    privileged_vmm: bool
    """QEMU keeps the shim's capabilities; our own key."""
    enable_core_dumps: bool
    """Our own key."""
    rootless: bool
    rootless_first_id: int
    """Our own key."""
    disable_selinux: bool
    selinux_vmm_type: str
    """Our own key."""
    apparmor_profile: str
    """Of the VMM and its servers; empty for none. Our own key."""
    disable_nesting_checks: bool
    # Shared directories.
    shared_fs: str
    virtio_fs_daemon: str
    virtio_fs_cache: str
    virtio_fs_cache_size_mib: int
    virtio_fs_queue_size: int
    virtio_fs_extra_args: tuple[str, ...]
    # Disks.
    disable_block_device_use: bool
    block_device_driver: str
    block_device_aio: str
    block_device_cache_set: bool
    block_device_cache_direct: bool
    block_device_cache_noflush: bool
    block_device_logical_sector_size: int
    block_device_physical_sector_size: int
    enable_iothreads: bool
    indep_iothreads: int
    queue_size: int
    num_queues: int
    disable_image_nvdimm: bool
    # Devices.
    default_bridges: int
    enable_iommu: bool
    disable_vhost_net: bool
    network_queues: int
    rx_rate_limiter_max_rate: int
    tx_rate_limiter_max_rate: int
    entropy_source: str
    enable_vhost_user_store: bool
    vhost_user_store_path: str
    vhost_user_reconnect_timeout_s: int
    hot_plug_vfio: str
    cold_plug_vfio: str
    pcie_root_port: int
    pcie_switch_port: int
    use_vsock: str
    """`auto`, `true`, `false` or `vhost-user`: how the agent is reached; our own key."""
    vhost_user_vsock_daemon: str
    start_timeout_s: float
    """Seconds until the VMM must answer; our own key."""
    # Debugging.
    enable_debug: bool
    extra_monitor_socket: str
    # Remote VMs.
    remote_hypervisor_socket: str
    remote_hypervisor_timeout_s: float
    default_gpus: int
    default_gpu_model: str


AGENT_CDH_API_TIMEOUT_S = 50.0
AGENT_LAUNCH_PROCESS_TIMEOUT_S = 6.0
"""Seconds: kata-agent's own values, which a guest has without a kernel parameter."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    enable_debug: bool
    enable_tracing: bool
    debug_console_enabled: bool
    kernel_modules: tuple[str, ...]
    dial_timeout_s: float
    hotplug_timeout_s: int
    """Seconds that the guest's agent waits for a device; our own key."""
    request_timeout_s: float
    cdh_api_timeout_s: float
    launch_process_timeout_s: float
    visible_cdi_devices: bool
    policy: str


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    enable_debug: bool
    enable_tracing: bool
    otlp_endpoint: str
    """Base URL of an OTLP receiver; our own key."""
    enable_pprof: bool
    internetworking_model: str
    disable_new_netns: bool
    allow_host_network: bool
    """A pod with hostNetwork starts, without any network of the host; our own key."""
    sandbox_cgroup_only: bool
    sandbox_cgroup_limits: bool
    """The sandbox's cgroups have limits of their own, from the sizing record; our own key."""
    static_sandbox_resource_mgmt: bool
    sizing_policy: str
    """`sum` or `overhead`; our own key."""
    strict_memory: bool
    """Overcommitting the pod's cgroup is an error, not a warning; our own key."""
    enable_vcpus_pinning: bool
    placement_socket: str
    """Socket of the plugin that places VMs; empty without one. Our own key."""
    vfio_mode: str
    vfio_device_kinds: tuple[str, ...]
    """`VENDOR:CLASS=KIND` and `HOST-KIND=KIND`; our own key."""
    pod_resource_api_sock: str
    instance_types: str
    """Path of the table of instance types; empty without one. Our own key."""
    create_container_timeout_s: float
    confine_shim: bool
    """Our own key."""
    disable_guest_seccomp: bool
    disable_guest_empty_dir: bool
    emptydir_mode: str
    sandbox_bind_mounts: tuple[str, ...]
    experimental_force_guest_pull: bool
    dan_conf: str
    guest_selinux_label: str


class FactoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    enable_template: bool
    template_path: str
    """The directory of the templates."""


REMOTE_SET_UP_TIMEOUT_S = 300.0
"""Kata's: between a remote VM's agent and us are two proxies that try to reach each other for up to five minutes."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """The file it was read from, for messages."""
    annotated: Mapping[str, str] = {}
    """The pod's annotation that set a key, by the key's name."""
    hypervisor_name: str
    hypervisor: HypervisorConfig
    agent: AgentConfig
    runtime: RuntimeConfig
    factory: FactoryConfig

    def origin(self, key: str) -> str:
        """The source of `key`, for messages: the pod's annotation, or the file."""
        annotation = self.annotated.get(key)
        return f"annotation '{annotation}'" if annotation else f"'{self.source}'"

    @property
    def is_remote(self) -> bool:
        """The VM is not made on this host."""
        return self.hypervisor_name == "remote"

    @property
    def set_up_timeout_s(self) -> float:
        """For each of the agent's calls that set up the sandbox, the first ones that do anything in the guest."""
        usual_s = self.agent.request_timeout_s
        return max(usual_s, REMOTE_SET_UP_TIMEOUT_S) if self.is_remote else usual_s
