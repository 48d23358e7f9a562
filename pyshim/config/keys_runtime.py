"""Keys of [agent.kata], [runtime] and [factory], and those that Kata has removed."""

from collections.abc import Mapping

from pyshim.config.keys import Dialect, Key, Rows, Table
from pyshim.config.values import (
    BASE64_TEXT,
    BOOL,
    HTTP_URL,
    MILLISECONDS,
    MODULES,
    PATH,
    SECONDS,
    TEXT,
    WORDS,
    choice,
    tables,
    whole,
)
from pyshim.model.sizing import PLACEMENT_SOCKET

_A = Rows(table=Table.AGENT)
_A_RS = Rows(table=Table.AGENT, dialect=Dialect.RUST)
_M = Rows(table=Table.MEM_AGENT, dialect=Dialect.RUST)
_R = Rows(table=Table.RUNTIME)
_R_RS = Rows(table=Table.RUNTIME, dialect=Dialect.RUST)
_F = Rows(table=Table.FACTORY)
OTHER_VMMS = ("clh", "cloud-hypervisor", "dragonball", "firecracker", "openvmm", "stratovirt")
"""The hypervisors of Kata's runtimes that pyshim does not support."""
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_PORT = whole(1, _U32)
_FIXED_PORT = "the agent's ports are fixed"
_JAEGER = "spans are sent as OTLP, which Jaeger accepts on port 4318 (otlp_endpoint)"

AGENT: tuple[Key, ...] = (
    _A.used("enable_debug", BOOL, False, "The agent logs more: agent.log=debug."),
    _A.used(
        "enable_tracing",
        BOOL,
        False,
        "kata-agent sends spans to port 10240 of the host's vsock, where Kata's trace forwarder listens: agent.trace.",
        ann=True,
    ),
    _A.used("debug_console_enabled", BOOL, False, "A shell in the guest on vsock port 1026."),
    _A.used(
        "kernel_modules",
        MODULES,
        (),
        "Modules that the agent loads; in an annotation, semicolons separate them.",
        ann=True,
    ),
    _A.used(
        "dial_timeout",
        SECONDS,
        30.0,
        "Seconds within which the agent must answer for the first time.",
        aliases=(("reconnect_timeout_ms", Table.AGENT, MILLISECONDS),),
    ),
    _A_RS.never(
        "dial_timeout_ms",
        whole(1, 86_400_000),
        10,
        "Milliseconds of one attempt to reach the agent.",
        "the shim adapts its attempts to the guest's boot",
    ),
    _A.used(
        "request_timeout",
        SECONDS,
        60.0,
        "Seconds within which the agent must answer a request.",
        own=True,
        aliases=(("request_timeout_ms", Table.AGENT, MILLISECONDS),),
    ),
    _A.used(
        "hotplug_timeout",
        whole(1, 86_400),
        30,
        "Seconds that the agent waits for a device to appear in the guest: agent.hotplug_timeout.",
        own=True,
        field="hotplug_timeout_s",
    ),
    _A.used(
        "cdh_api_timeout",
        SECONDS,
        50.0,
        "Seconds for a call to the guest's data hub.",
        aliases=(("cdh_api_timeout_ms", Table.AGENT, MILLISECONDS),),
        also=("config.agent.cdh_api_timeout_ms",),
    ),
    _A.used("launch_process_timeout", SECONDS, 6.0, "Seconds for the agent to start the guest's other services."),
    _A.used(
        "visible_cdi_devices", BOOL, False, "A container may choose devices by VISIBLE_CDI_DEVICES in its environment."
    ),
    _A_RS.used(
        "policy", BASE64_TEXT, "", "The agent's policy, in Rego, which is sent before any other call.", ann=True
    ),
    _A_RS.never("server_port", _PORT, 1024, "The agent's vsock port.", _FIXED_PORT),
    _A_RS.never("log_port", _PORT, 1025, "The agent's vsock port for logs.", _FIXED_PORT),
    _A_RS.never("log_level", TEXT, "", "How much the agent logs, as the name of a level.", "enable_debug decides"),
    _A_RS.later(
        "passfd_listener_port",
        _PORT,
        1027,
        "The agent's vsock port for process streams.",
        aliases=(("passfd_listener_port", Table.RUNTIME, _PORT),),
    ),
    _A_RS.later("health_check_request_timeout_ms", whole(1, 86_400_000), 90_000, "Milliseconds for a health check."),
    _A_RS.later("container_pipe_size", whole(0, _U32), 0, "Size of the pipes of a container's streams in the guest."),
)

_NO_RECLAIM = "the shim does not use the agent's memory reclaim"
MEM_AGENT: tuple[Key, ...] = tuple(
    _M.never(name, BOOL if default is False else whole(0, _U64), default, meaning, _NO_RECLAIM)
    for name, default, meaning in (
        ("mem_agent_enable", False, "Memory reclaim and compaction by the agent."),
        ("memcg_disable", False, "No reclaim."),
        ("memcg_swap", False, "Reclaim may swap."),
        ("memcg_swappiness_max", 50, "Highest swappiness."),
        ("memcg_period_secs", 600, "Seconds between rounds of reclaim."),
        ("memcg_period_psi_percent_limit", 1, "Pressure that delays a round, percent."),
        ("memcg_eviction_psi_percent_limit", 1, "Pressure that ends a round, percent."),
        ("memcg_eviction_run_aging_count_min", 3, "Agings before an eviction."),
        ("compact_disable", False, "No compaction."),
        ("compact_period_secs", 600, "Seconds between rounds of compaction."),
        ("compact_period_psi_percent_limit", 1, "Pressure that delays a round, percent."),
        ("compact_psi_percent_limit", 5, "Pressure that ends a round, percent."),
        ("compact_sec_max", 300, "Longest round, seconds."),
        ("compact_order", 9, "Order of the blocks wanted."),
        ("compact_threshold", 0, "Free blocks below which a round begins."),
        ("compact_force_times", 0, "Rounds after which one is forced."),
    )
)

RUNTIME: tuple[Key, ...] = (
    _R_RS.used(
        "hypervisor_name",
        choice("", "qemu", "remote", *OTHER_VMMS),
        "",
        "The table [hypervisor.NAME] to use. Empty: the only one of the file.",
        ann=True,
        field="",
    ),
    _R_RS.never("name", TEXT, "virt_container", "Kind of runtime.", "there is only one", ann=True),
    _R_RS.never("agent_name", TEXT, "kata", "The table [agent.NAME] to use.", "there is only one", ann=True),
    _R.used("enable_debug", BOOL, False, "The shim logs more."),
    _R_RS.never("log_level", TEXT, "", "How much the shim logs, as the name of a level.", "enable_debug decides"),
    _R.used(
        "internetworking_model",
        choice("tcfilter", "macvtap", "none", refused=("l3forwarding",)),
        "tcfilter",
        "How the pod's interfaces are connected to the VM.",
        ann=True,
        blank="",
    ),
    _R.used(
        "disable_new_netns",
        BOOL,
        False,
        'The VM stays in the host\'s network namespace. Needs internetworking_model = "none".',
        ann=True,
    ),
    _R.used(
        "allow_host_network",
        BOOL,
        False,
        "true: a pod with hostNetwork starts, with a loopback interface only; false: it is refused.",
        own=True,
    ),
    _R.used(
        "sandbox_cgroup_only",
        BOOL,
        False,
        "true: the sandbox is in the pod's cgroup; false: only the vCPU threads are, the rest in /kata_overhead.",
        ann=True,
    ),
    _R.used(
        "pod_annotations",
        WORDS,
        ("io.katacontainers.*",),
        "Annotations of a pod that count, besides those of the container runtime, as patterns: `*` is any text. Others,"
        " such as `cdi.k8s.io/*`, ask for nothing, whatever the runtime passes on.",
        own=True,
    ),
    _R.used(
        "enable_wall_annotations",
        WORDS,
        (),
        "The annotations io.katacontainers.config.runtime.NAME that a pod may set to what takes a wall around its VM"
        " down: `disable_new_netns`, `sandbox_cgroup_only`.",
        own=True,
        field="",
    ),
    _R.used(
        "sandbox_cgroup_limits",
        BOOL,
        False,
        "The sandbox's cgroups are limited to the VM's size and what the VMM, virtiofsd and the shim need.",
        own=True,
    ),
    _R.used(
        "static_sandbox_resource_mgmt",
        BOOL,
        True,
        "true: the VM has one size, for the whole pod; false: it boots with the default size and is resized for its"
        " containers.",
    ),
    _R.used(
        "sizing_policy",
        choice("sum", "overhead"),
        "sum",
        "`sum`: default_* plus the pod's limits. `overhead`: overhead_* plus the pod's limits, or default_* without"
        " limits. The default is `overhead` in a file that sets overhead_vcpus or overhead_memory.",
        own=True,
    ),
    _R.used(
        "strict_memory",
        BOOL,
        False,
        "A VM that does not fit the memory limit of the pod's cgroup: true: it is refused; false: it is a warning.",
        own=True,
    ),
    _R.used(
        "enable_vcpus_pinning",
        BOOL,
        False,
        "The containers' vCPUs are pinned, each to its own CPU, if all containers have CPU sets and no other sandbox"
        " has pinned these CPUs.",
        ann=True,
        also=("enable_vcpus_pinning",),
    ),
    _R.used(
        "placement_socket",
        PATH,
        PLACEMENT_SOCKET,
        "Socket of `pyshim nri run`, which chooses the CPUs and NUMA nodes of a VM before the boot. If none answers,"
        " the VM boots without a placement. Empty: no plugin is asked.",
        own=True,
    ),
    _R.used(
        "vfio_mode",
        choice("guest-kernel", "vfio"),
        "guest-kernel",
        "`guest-kernel`: the guest's kernel drives a passed-through device; `vfio`: a container does, by VFIO.",
        ann=True,
        blank="",
    ),
    _R.used(
        "vfio_device_kinds",
        WORDS,
        (
            "nvidia.com/pgpu=nvidia.com/gpu",
            "10de:03=nvidia.com/gpu",
            "8086:03=intel.com/gpu",
            "1002:03=amd.com/gpu",
            "1002:12=amd.com/gpu",
            "15b3:02=nvidia.com/nic",
        ),
        "The CDI kind of a device in the guest: by its kind on the host (`HOST-KIND=KIND`), else by its PCI vendor and"
        " class (`VENDOR:CLASS=KIND`). `HOST-KIND=KIND:MODEL` also names the GPU model that a remote VM must have.",
        own=True,
    ),
    _R.used(
        "pod_resource_api_sock",
        PATH,
        "",
        "Socket of the kubelet's PodResources service, which lists a pod's devices. Empty: it is not asked.",
    ),
    _R.used(
        "instance_types",
        PATH,
        "",
        "The table of instance types whose devices `pyshim dra run` offers. A remote VM's type is chosen from it by the"
        " devices that the pod was given (docs/DRA.md). Empty: the remote hypervisor chooses.",
        own=True,
    ),
    _R.later("kubelet_root_dir", PATH, "/var/lib/kubelet", "Where the kubelet keeps volumes."),
    _R.used(
        "create_container_timeout",
        SECONDS,
        60.0,
        "Seconds within which the guest must create a container.",
        ann=True,
        aliases=(("create_container_timeout", Table.AGENT, SECONDS),),
    ),
    _R.used(
        "confine_shim",
        BOOL,
        True,
        "The shim drops the capabilities and system calls that neither it nor its children need, OCI hooks included."
        " false: for hooks that load kernel modules or set the clock.",
        own=True,
    ),
    _R.used("disable_guest_seccomp", BOOL, True, "false: the pod's seccomp profile is applied in the guest.", ann=True),
    _R.used(
        "disable_guest_empty_dir",
        BOOL,
        True,
        "true: emptyDir volumes on disk are directories of the host; false: directories in the guest's memory.",
    ),
    _R.used(
        "emptydir_mode",
        choice("shared-fs", "block-encrypted", "block-plain"),
        "shared-fs",
        "What an emptyDir volume on disk is. `shared-fs`: see disable_guest_empty_dir. `block-plain`: a disk whose file"
        " is in the volume's directory. `block-encrypted`: such a disk, encrypted with a key that only the guest has.",
        blank="",
    ),
    _R.used(
        "sandbox_bind_mounts",
        WORDS,
        (),
        "Host directories or files that every guest sees below `sandbox-mounts` of the share. `PATH` or `PATH:ro`:"
        " read-only; `PATH:rw`: writable. The annotation is always refused.",
        ann=True,
    ),
    _R_RS.later(
        "shared_mounts",
        tables("name", "src_ctr", "src_path", "dst_ctr", "dst_path"),
        (),
        "Mounts that the containers of a pod share.",
        ann=True,
    ),
    _R.used(
        "experimental",
        WORDS,
        (),
        "Names of features. The only one is `force_guest_pull`, the same as experimental_force_guest_pull = true.",
        ann=True,
        field="",
    ),
    _R.used(
        "experimental_force_guest_pull",
        BOOL,
        False,
        "The guest pulls the images, by the names in the pod, whatever the snapshotter is.",
        ann=True,
    ),
    _R.used(
        "dan_conf",
        PATH,
        "/run/kata-containers/dans",
        "Directory of files `<sandbox>.json`, whose network devices a VM gets in place of its namespace's links.",
    ),
    _R.refused(
        "guest_selinux_label",
        TEXT,
        "",
        "SELinux label of containers in the guest.",
        field="guest_selinux_label",  # Kata's state has it
        ann=True,
    ),
    _R.used("enable_tracing", BOOL, False, "Each shim sends spans to `otlp_endpoint`."),
    _R.used(
        "otlp_endpoint",
        HTTP_URL,
        "http://localhost:4318",
        "Base URL of a receiver of OTLP over HTTP, such as an OpenTelemetry Collector, Jaeger or Tempo. Spans go to"
        " `/v1/traces`.",
        own=True,
    ),
    _R.never("jaeger_endpoint", TEXT, "", "Receiver of Jaeger's old protocol.", _JAEGER),
    _R.never("jaeger_user", TEXT, "", "User for it.", _JAEGER),
    _R.never("jaeger_password", TEXT, "", "Password for it.", _JAEGER),
    _R.used("enable_pprof", BOOL, False, "The monitor socket reports what the shim is doing at `/debug/`.", ann=True),
    _R_RS.later("keep_abnormal", BOOL, False, "The resources of a failed sandbox are kept."),
    _R_RS.later("use_passfd_io", BOOL, False, "The process streams are passed to the VMM."),
)

FACTORY: tuple[Key, ...] = (
    _F.used(
        "enable_template",
        BOOL,
        False,
        "VMs continue from a template of their machine, which is made with the first of them (docs/WARM_PODS.md).",
    ),
    _F.used("template_path", PATH, "/run/vc/vm/template", "Directory of the templates, on a file system in memory."),
    _F.later("vm_cache_number", whole(0, _U32), 0, "Number of VMs to start in advance."),
    _F.later(
        "vm_cache_endpoint", PATH, "/var/run/kata-containers/cache.sock", "Socket of the service that holds these VMs."
    ),
)

REMOVED: Mapping[tuple[Table, str], str] = {
    (Table.HYPERVISOR, "hotplug_vfio_on_root_bus"): "hot_plug_vfio decides where devices are plugged",
    (Table.HYPERVISOR, "enable_swap"): "guest memory follows the host's swap settings",
    (Table.HYPERVISOR, "use_vsock"): "`true` and `false` are ignored, agent_channel decides how the agent is reached",
}
"""Keys that Kata has removed, and what replaces them."""
EXPECTED: Mapping[str, str] = {"enable_kvm": "accelerator"}
"""Names that operators try and no runtime has, and the key that decides this."""

REMOVED_TABLES: Mapping[str, str] = {
    "proxy": "the shim speaks to the agent itself",
    "shim": "the shim is this program",
    "netmon": "the shim watches the network itself",
    "image": "the container runtime handles images",
}
"""Tables that Kata has removed, and what replaces them."""
