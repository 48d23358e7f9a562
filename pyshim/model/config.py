"""The effective configuration of a sandbox, from TOML file, drop-ins and annotations. `config/` builds it.

A field has the name of its key, with the unit added where the key's name has none. A key without effect has no field,
unless Kata's state has it. `config/keys_*.py` and docs/CONFIGURATION.md have each key's meaning.
"""

from collections.abc import Mapping
from fractions import Fraction

import msgspec

from pyshim.model.architecture import MACHINE_TYPES, MachineType

HYPERVISOR_PREFIX = "io.katacontainers.config.hypervisor."
"""Prefix of the annotations that set keys of the hypervisor's table."""
FILE_SYSTEM_OPTION_PREFIX = "io.katacontainers.fs-opt."
"""Prefix of the annotations and mount options by which a block snapshotter describes layers. Source: Kata."""
SWAPPINESS_ANNOTATION = "io.katacontainers.container.resource.swappiness"
SWAP_IN_BYTES_ANNOTATION = "io.katacontainers.container.resource.swap_in_bytes"
"""Swap annotations of a container, read with `enable_guest_swap`."""


class HypervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    # Boot files.
    path: str
    kernel: str
    kernel_hz: int
    """0: not known."""
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
    """`auto`, `kvm` or `tcg`."""
    cpu_model: str
    """QEMU's -cpu model; empty: `host` with KVM, else a model fit for emulation."""
    guest_hook_path: str
    guest_extension_images: tuple[Mapping[str, str], ...]
    """Each with `name`, `path` and optionally `verity_params`."""
    # Size.
    default_vcpus: Fraction
    """Negative: the host's CPU count."""
    default_maxvcpus: int
    """0: the host's CPU count."""
    default_memory_mib: int
    default_maxmemory_mib: int
    """0: the host's memory."""
    overhead_vcpus: Fraction
    """Sizing policy `overhead`: vCPUs for the VM itself, added to the CPU limits of the pod."""
    overhead_memory_mib: int
    requested_vcpus: Fraction
    """The pod's request, for container runtimes that do not pass it on in full; mostly set by an annotation."""
    requested_memory_mib: int
    memory_slots: int
    enable_virtio_mem: bool
    enable_mem_prealloc: bool
    enable_hugepages: bool
    reclaim_guest_freed_memory: bool
    enable_numa: bool
    numa_mapping: tuple[str, ...]
    """For each guest node its host nodes, as text such as `0-1`; empty: as many guest nodes as the VM needs."""
    enable_guest_swap: bool
    guest_swap_path: str
    guest_memory_dump_path: str
    guest_memory_dump_paging: bool
    # Safety.
    confidential_guest: bool
    sev_snp_guest: bool
    confidential_technology: str
    """`auto`, `tdx`, `snp` or `sev`."""
    sev_guest_policy: int
    """0: chosen by the host's support."""
    sev_launch_hook: str
    snp_guest_policy: int
    snp_id_block: str
    snp_id_auth: str
    tdx_quote_generation_service_socket_port: int
    initdata: str
    seccompsandbox: str
    privileged_vmm: bool
    """QEMU keeps the shim's capabilities."""
    enable_core_dumps: bool
    rootless: bool
    rootless_first_id: int
    disable_selinux: bool
    selinux_vmm_type: str
    apparmor_profile: str
    """Empty: none."""
    disable_nesting_checks: bool
    # Shared directories.
    shared_fs: str
    virtio_fs_daemon: str
    virtio_fs_cache: str
    virtio_fs_cache_size_mib: int
    virtio_fs_queue_size: int
    virtio_fs_extra_args: tuple[str, ...]
    virtio_fs_xattr: bool
    # Disks.
    disable_block_device_use: bool
    privileged_host_disks: bool
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
    agent_channel: str
    """`auto`, `vhost-vsock`, `serial` or `vhost-user`: how the agent is reached."""
    vhost_user_vsock_daemon: str
    start_timeout_s: float
    """Seconds within which the VMM must answer after its start."""
    # Debugging.
    enable_debug: bool
    extra_monitor_socket: str
    # Remote VMs.
    remote_hypervisor_socket: str
    remote_hypervisor_timeout_s: float
    default_gpus: int
    default_gpu_model: str

    @property
    def machine(self) -> MachineType:
        """Of a VM on this host: a remote VM's `machine_type` is the service's name for a kind of instance."""
        return MACHINE_TYPES[self.machine_type]


AGENT_CDH_API_TIMEOUT_S = 50.0
AGENT_LAUNCH_PROCESS_TIMEOUT_S = 6.0
"""Seconds: kata-agent's defaults, which apply without a kernel parameter."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    enable_debug: bool
    enable_tracing: bool
    debug_console_enabled: bool
    kernel_modules: tuple[str, ...]
    dial_timeout_s: float
    hotplug_timeout_s: int
    """Seconds that the guest's agent waits for a device."""
    request_timeout_s: float
    cdh_api_timeout_s: float
    launch_process_timeout_s: float
    visible_cdi_devices: bool
    policy: str


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    enable_debug: bool
    enable_tracing: bool
    otlp_endpoint: str
    """Base URL of an OTLP receiver."""
    enable_pprof: bool
    internetworking_model: str
    disable_new_netns: bool
    allow_host_network: bool
    """A pod with hostNetwork starts, with a loopback interface only."""
    pod_annotations: tuple[str, ...]
    """Patterns of the annotations that a pod's author may ask for something with."""
    sandbox_cgroup_only: bool
    sandbox_cgroup_limits: bool
    """The sandbox's cgroups get limits, computed from the sizing record."""
    static_sandbox_resource_mgmt: bool
    sizing_policy: str
    """`sum` or `overhead`."""
    strict_memory: bool
    """A VM that does not fit the memory limit of the pod's cgroup is refused; otherwise it is a warning."""
    enable_vcpus_pinning: bool
    placement_socket: str
    """Socket of the plugin that places VMs; empty: no plugin is asked."""
    vfio_mode: str
    vfio_device_kinds: tuple[str, ...]
    """Each `VENDOR:CLASS=KIND` or `HOST-KIND=KIND`."""
    pod_resource_api_sock: str
    instance_types: str
    """Path of the table of instance types; empty: none."""
    create_container_timeout_s: float
    confine_shim: bool
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


REMOTE_SET_UP_TIMEOUT_S = 300.0
"""Kata's value: two proxies between shim and remote agent try to reach each other for up to five minutes."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """The path of the main file, for messages."""
    annotated: Mapping[str, str] = {}
    """The name of the annotation that set a key, by the key's name."""
    hypervisor_name: str
    hypervisor: HypervisorConfig
    agent: AgentConfig
    runtime: RuntimeConfig
    factory: FactoryConfig

    def origin(self, key: str) -> str:
        """Where `key` was set, quoted, for messages: the pod's annotation or the file."""
        annotation = self.annotated.get(key)
        return f"annotation '{annotation}'" if annotation else f"'{self.source}'"

    @property
    def is_remote(self) -> bool:
        """A service makes the VM, outside this host."""
        return self.hypervisor_name == "remote"

    @property
    def set_up_timeout_s(self) -> float:
        """The deadline of each of the agent's first calls, which set up the sandbox."""
        usual_s = self.agent.request_timeout_s
        return max(usual_s, REMOTE_SET_UP_TIMEOUT_S) if self.is_remote else usual_s
