"""The key table compared with Kata's keys, with the structs of the configuration, and with the code that reads them."""

import ast
from pathlib import Path

import pytest

from pyshim.config.annotations import PATH_LISTS
from pyshim.config.catalogue import KEYS, annotated, nearest, spellings
from pyshim.config.keys import Key, Table, Verdict
from pyshim.config.values import PATH
from pyshim.model.config import AgentConfig, FactoryConfig, HypervisorConfig, RuntimeConfig

PACKAGE = Path(__file__).parents[3] / "pyshim"
NOUNS = {
    Table.HYPERVISOR: HypervisorConfig,
    Table.AGENT: AgentConfig,
    Table.RUNTIME: RuntimeConfig,
    Table.FACTORY: FactoryConfig,
}

KATA_KEYS = {
    "hypervisor": """path jailer_path kernel image initrd rootfs_type kernel_params kernel_verity_params firmware
        firmware_volume machine_type cpu_features machine_accelerators default_vcpus default_maxvcpus default_memory
        default_maxmemory memory_slots memory_offset default_bridges enable_virtio_mem enable_mem_prealloc
        enable_hugepages reclaim_guest_freed_memory enable_iommu enable_iommu_platform enable_numa numa_mapping
        shared_fs virtio_fs_daemon virtio_fs_cache virtio_fs_cache_size virtio_fs_queue_size msize_9p
        virtio_fs_extra_args disable_block_device_use block_device_driver block_device_aio block_device_cache_set
        block_device_cache_direct block_device_cache_noflush block_device_logical_sector_size
        block_device_physical_sector_size enable_iothreads indep_iothreads disk_rate_limiter_bw_max_rate
        disk_rate_limiter_bw_one_time_burst disk_rate_limiter_ops_max_rate disk_rate_limiter_ops_one_time_burst
        net_rate_limiter_bw_max_rate net_rate_limiter_bw_one_time_burst net_rate_limiter_ops_max_rate
        net_rate_limiter_ops_one_time_burst rx_rate_limiter_max_rate tx_rate_limiter_max_rate disable_vhost_net
        entropy_source enable_vhost_user_store vhost_user_store_path vhost_user_reconnect_timeout_sec hot_plug_vfio
        cold_plug_vfio pcie_root_port pcie_switch_port disable_image_nvdimm disable_nesting_checks confidential_guest
        sev_snp_guest snp_guest_policy snp_id_block snp_id_auth measurement_algo
        tdx_quote_generation_service_socket_port guest_extension_images seccompsandbox disable_seccomp rootless
        disable_selinux disable_guest_selinux guest_hook_path guest_memory_dump_path guest_memory_dump_paging pflashes
        use_legacy_serial extra_monitor_socket hypervisor_loglevel enable_debug enable_guest_swap enable_annotations
        valid_hypervisor_paths valid_jailer_paths valid_virtio_fs_daemon_paths valid_vhost_user_store_paths
        valid_entropy_sources remote_hypervisor_socket remote_hypervisor_timeout hypervisor_socket hypervisor_timeout
        overhead_vcpus overhead_memory vm_rootfs_driver queue_size num_queues network_queues hugepage_type
        virtio_fs_is_dax ctlpath valid_ctlpaths prefetch_list_path guest_swap_path guest_swap_size_percent
        guest_swap_create_threshold_secs rootless_user initdata disable_nested_virtualization seccomp_sandbox
        log_level""",
    "agent.kata": """enable_debug enable_tracing debug_console_enabled kernel_modules dial_timeout dial_timeout_ms
        reconnect_timeout_ms cdh_api_timeout launch_process_timeout visible_cdi_devices create_container_timeout
        passfd_listener_port server_port log_port health_check_request_timeout_ms container_pipe_size policy
        log_level""",
    "runtime": """internetworking_model disable_new_netns sandbox_cgroup_only static_sandbox_resource_mgmt
        enable_vcpus_pinning vfio_mode pod_resource_api_sock kubelet_root_dir create_container_timeout
        disable_guest_seccomp disable_guest_empty_dir emptydir_mode sandbox_bind_mounts experimental
        experimental_force_guest_pull dan_conf guest_selinux_label enable_debug enable_tracing jaeger_endpoint
        jaeger_user jaeger_password enable_pprof name hypervisor_name agent_name keep_abnormal shared_mounts
        use_passfd_io passfd_listener_port""",
    "factory": "enable_template template_path vm_cache_number vm_cache_endpoint",
}
"""The keys of Kata 4.1's two runtimes that a file for QEMU or remote VMs may hold."""

KATA_ANNOTATIONS = {
    "hypervisor": """path jailer_path kernel image initrd kernel_params kernel_verity_params firmware firmware_volume
        machine_type cpu_features machine_accelerators default_vcpus default_max_vcpus default_memory memory_slots
        memory_offset enable_virtio_mem enable_mem_prealloc enable_hugepages reclaim_guest_freed_memory enable_iommu
        enable_iommu_platform numa_mapping shared_fs virtio_fs_daemon virtio_fs_cache virtio_fs_cache_size msize_9p
        virtio_fs_extra_args disable_block_device_use block_device_driver block_device_aio block_device_cache_set
        block_device_cache_direct block_device_cache_noflush blk_logical_sector_size blk_physical_sector_size
        enable_iothreads indep_iothreads rx_rate_limiter_max_rate tx_rate_limiter_max_rate disable_vhost_net
        entropy_source enable_vhost_user_store vhost_user_store_path vhost_user_reconnect_timeout_sec hot_plug_vfio
        cold_plug_vfio pcie_root_port pcie_switch_port disable_image_nvdimm rootless guest_hook_path use_legacy_serial
        enable_guest_swap block_device_num_queues block_device_queue_size network_queues hugepage_type
        prefetch_files.list""",
    "agent": "enable_tracing kernel_modules",
    "runtime": """internetworking_model disable_new_netns sandbox_cgroup_only enable_vcpus_pinning vfio_mode
        create_container_timeout disable_guest_seccomp experimental experimental_force_guest_pull enable_pprof name
        hypervisor_name agent_name shared_mounts sandbox_bind_mounts""",
}


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, names in KATA_KEYS.items() for name in names.split()]
)
def test_every_key_of_kata_is_known(table: str, name: str) -> None:
    assert (Table(table), name) in spellings()


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in KATA_ANNOTATIONS.items() for name in names.split()]
)
def test_every_annotation_of_kata_is_known(group: str, name: str) -> None:
    assert f"io.katacontainers.config.{group}.{name}" in annotated()


def test_an_annotation_outside_the_groups_is_known() -> None:
    assert annotated()["io.katacontainers.enable_vcpus_pinning"].name == "enable_vcpus_pinning"


def test_no_spelling_belongs_to_two_keys() -> None:
    places = [(table, name) for table, name in spellings()]
    written = sum(1 + len(key.aliases) for key in KEYS)

    assert len(places) == written
    assert len(annotated()) == sum(len(key.annotations) for key in KEYS)


@pytest.mark.parametrize("table", NOUNS, ids=str)
def test_the_struct_of_a_table_has_the_fields_of_its_keys(table: Table) -> None:
    from_keys = {key.field for key in KEYS if key.table is table and key.field}

    assert {*NOUNS[table].__struct_fields__} == from_keys


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_a_keys_default_is_a_value_it_takes(key: Key) -> None:
    as_toml = list(key.default) if isinstance(key.default, tuple) else key.default
    if isinstance(as_toml, float):
        as_toml = int(as_toml)

    assert key.kind.convert(as_toml) == key.default
    assert key.meaning.endswith(".")
    assert bool(key.why) == (key.verdict is not Verdict.HONOURED)


def test_a_key_is_honoured_exactly_when_the_code_reads_it() -> None:
    read = {name for path in _readers() for name in _fields_read(path)}

    pretended = [key.dotted for key in KEYS if key.field and key.verdict is Verdict.HONOURED and key.field not in read]
    unsung = [key.dotted for key in KEYS if key.verdict is Verdict.NO_EFFECT and key.field in read]

    assert (pretended, unsung) == ([], [])


def test_a_key_without_effect_has_a_field_only_for_katas_state() -> None:
    copied = {
        name for file in ("kata_config.py", "kata_state.py") for name in _fields_read(PACKAGE / "pod/plan" / file)
    }

    assert {key.field for key in KEYS if key.field and key.verdict is not Verdict.HONOURED} <= copied


def _readers() -> list[Path]:
    """The sources that act on the configuration: not `config/`, not the state file's copy."""
    rooms = ("pod", "resources", "agent", "host", "task")
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py") if path.name != "kata_config.py"]
    return [*files, PACKAGE / "serve.py"]


def _fields_read(path: Path) -> set[str]:
    """Attributes of values called config or by the name of a table."""
    nouns = {"config", "hypervisor", "agent", "runtime", "factory"}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in nouns:
                found.add(node.attr)
    return found


def test_every_honoured_path_with_an_annotation_has_a_list() -> None:
    opened = {key.name for key in KEYS if key.kind is PATH and key.annotations and key.verdict is Verdict.HONOURED}

    assert opened <= set(PATH_LISTS)
    assert all((Table.HYPERVISOR, name) in spellings() for name in PATH_LISTS.values())


@pytest.mark.parametrize(
    ("table", "wrong", "right"),
    [
        (Table.HYPERVISOR, "kernal", "kernel"),
        (Table.HYPERVISOR, "default_vcpu", "default_vcpus"),
        (Table.HYPERVISOR, "create_container_timeout", "runtime.create_container_timeout"),
        (Table.RUNTIME, "sandbox_cgroups_only", "sandbox_cgroup_only"),
        (Table.AGENT, "xyzzy", ""),
    ],
)
def test_the_nearest_known_key_is_found(table: Table, wrong: str, right: str) -> None:
    assert nearest(table, wrong) == right
