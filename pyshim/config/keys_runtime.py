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
from pyshim.model.placement import SOCKET as PLACEMENT_SOCKET

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
_JAEGER = "spans leave as OTLP, which Jaeger takes at port 4318: otlp_endpoint"

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
        "Modules the agent loads; an annotation separates them with semicolons.",
        ann=True,
    ),
    _A.used(
        "dial_timeout",
        SECONDS,
        30.0,
        "Seconds until the guest's agent must have answered; reconnect_timeout_ms is the same in milliseconds.",
        aliases=(("reconnect_timeout_ms", Table.AGENT, MILLISECONDS),),
    ),
    _A_RS.never(
        "dial_timeout_ms",
        whole(1, 86_400_000),
        10,
        "Milliseconds of one attempt to reach the agent.",
        "attempts follow each other as fast as the guest boots",
    ),
    _A.used(
        "request_timeout",
        SECONDS,
        60.0,
        "Seconds until the agent must have answered a request.",
        own=True,
        aliases=(("request_timeout_ms", Table.AGENT, MILLISECONDS),),
    ),
    _A.used(
        "hotplug_timeout",
        whole(1, 86_400),
        30,
        "Seconds that the guest's agent waits for a device to show up: agent.hotplug_timeout.",
        own=True,
        field="hotplug_timeout_s",
    ),
    _A.used(
        "cdh_api_timeout",
        SECONDS,
        50.0,
        "Seconds for a call of the guest's data hub; cdh_api_timeout_ms is the same in milliseconds.",
        aliases=(("cdh_api_timeout_ms", Table.AGENT, MILLISECONDS),),
        also=("config.agent.cdh_api_timeout_ms",),
    ),
    _A.used("launch_process_timeout", SECONDS, 6.0, "Seconds for the start of the guest's helpers."),
    _A.used(
        "visible_cdi_devices", BOOL, False, "A container may choose devices by VISIBLE_CDI_DEVICES in its environment."
    ),
    _A_RS.used("policy", BASE64_TEXT, "", "The agent's policy, in Rego: sent before any other call.", ann=True),
    _A_RS.never("server_port", _PORT, 1024, "The agent's vsock port.", _FIXED_PORT),
    _A_RS.never("log_port", _PORT, 1025, "The agent's vsock port for logs.", _FIXED_PORT),
    _A_RS.never("log_level", TEXT, "", "How much the agent logs, as a word.", "enable_debug decides"),
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

_AGENT_RECLAIMS = "the agent's memory reclaim is not driven"
MEM_AGENT: tuple[Key, ...] = tuple(
    _M.never(name, BOOL if default is False else whole(0, _U64), default, meaning, _AGENT_RECLAIMS)
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
        "Which [hypervisor.NAME] is used. Empty: the only one of the file.",
        ann=True,
        field="",
    ),
    _R_RS.never("name", TEXT, "virt_container", "Kind of runtime.", "there is one", ann=True),
    _R_RS.never("agent_name", TEXT, "kata", "Which [agent.NAME] is used.", "there is one", ann=True),
    _R.used("enable_debug", BOOL, False, "The shim logs more."),
    _R_RS.never("log_level", TEXT, "", "How much the shim logs, as a word.", "enable_debug decides"),
    _R.used(
        "internetworking_model",
        choice("tcfilter", "macvtap", "none", refused=("l3forwarding",)),
        "tcfilter",
        "How the pod's interfaces reach the VM.",
        ann=True,
    ),
    _R.used(
        "disable_new_netns", BOOL, False, "The VM stays in the host's network namespace; needs model none.", ann=True
    ),
    _R.used(
        "allow_host_network",
        BOOL,
        False,
        "true: a pod with hostNetwork starts, with a loopback of its own only; false: it is refused.",
        own=True,
    ),
    _R.used(
        "sandbox_cgroup_only",
        BOOL,
        False,
        "true: all of the sandbox is in the pod's cgroup; false: only its vCPUs, the rest in /kata_overhead.",
        ann=True,
    ),
    _R.used(
        "sandbox_cgroup_limits",
        BOOL,
        False,
        "The sandbox's cgroups are limited to the VM's size plus what the VMM and its servers need.",
        own=True,
    ),
    _R.used(
        "static_sandbox_resource_mgmt",
        BOOL,
        True,
        "true: one size, from what the pod asks for; false: the VM boots at the defaults and follows its containers.",
    ),
    _R.used(
        "sizing_policy",
        choice("sum", "overhead"),
        "sum",
        "`sum`: default_* plus the pod's own. `overhead`: overhead_* plus the pod's own, default_* where it has none. "
        "Without this key a file has `overhead` when it names overhead_vcpus or overhead_memory.",
        own=True,
    ),
    _R.used(
        "strict_memory",
        BOOL,
        False,
        "true: a VM that does not fit the pod's cgroup is refused; false: it is a warning.",
        own=True,
    ),
    _R.used(
        "enable_vcpus_pinning",
        BOOL,
        False,
        "Each vCPU of the containers' work gets a CPU of its own, when all have CPU sets that no other sandbox pins.",
        ann=True,
        also=("enable_vcpus_pinning",),
    ),
    _R.used(
        "placement_socket",
        PATH,
        PLACEMENT_SOCKET,
        "Socket of `pyshim nri run`, which is asked before the VM boots on which CPUs and NUMA nodes it is to run. A VM"
        " boots unplaced when no plugin answers there. Empty: none is asked.",
        own=True,
    ),
    _R.used(
        "vfio_mode",
        choice("guest-kernel", "vfio"),
        "guest-kernel",
        "Who owns a device passed through in the guest.",
        ann=True,
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
        "The kind of a device in the guest's device specs: by its kind on the host, else by its vendor and class. "
        "`HOST-KIND=KIND:MODEL` also says which GPUs a remote VM must have.",
        own=True,
    ),
    _R.used(
        "pod_resource_api_sock",
        PATH,
        "",
        "Socket of the kubelet's PodResources service, which lists the devices of a pod. Empty: it is not asked.",
    ),
    _R.used(
        "instance_types",
        PATH,
        "",
        "The table that `pyshim dra run` offers devices by: a remote VM's type is chosen from it by the devices that "
        "the pod was given (docs/DRA.md). Empty: the remote hypervisor chooses.",
        own=True,
    ),
    _R.later("kubelet_root_dir", PATH, "/var/lib/kubelet", "Where the kubelet keeps volumes."),
    _R.used(
        "create_container_timeout",
        SECONDS,
        60.0,
        "Seconds for one container's creation in the guest; also accepted in [agent.kata].",
        ann=True,
        aliases=(("create_container_timeout", Table.AGENT, SECONDS),),
    ),
    _R.used(
        "confine_shim",
        BOOL,
        True,
        "The shim gives up capabilities and system calls that neither it nor what it starts needs, OCI hooks among it. "
        "false: for a hook that loads kernel modules or sets the clock.",
        own=True,
    ),
    _R.used("disable_guest_seccomp", BOOL, True, "false: the pod's seccomp profile is applied in the guest.", ann=True),
    _R.used(
        "disable_guest_empty_dir",
        BOOL,
        True,
        "emptyDir volumes on disk stay on the host; false: they are directories in the guest's memory.",
    ),
    _R.used(
        "emptydir_mode",
        choice("shared-fs", "block-encrypted", "block-plain"),
        "shared-fs",
        "What an emptyDir volume on disk is. `shared-fs`: what disable_guest_empty_dir says. The others: a disk in a"
        " file of the volume's directory, with `block-encrypted` under a key that only the guest has.",
    ),
    _R.used(
        "sandbox_bind_mounts",
        WORDS,
        (),
        "Host directories or files, `PATH` or `PATH:ro`, shown to every guest below `sandbox-mounts` of the share, "
        "read-only; `PATH:rw`: writable. Its annotation is always refused.",
        ann=True,
    ),
    _R_RS.later(
        "shared_mounts",
        tables("name", "src_ctr", "src_path", "dst_ctr", "dst_path"),
        (),
        "Mounts that containers of a pod share.",
        ann=True,
    ),
    _R.used(
        "experimental",
        WORDS,
        (),
        "Names of features. `force_guest_pull` is the same as experimental_force_guest_pull = true; no other is known.",
        ann=True,
        field="",
    ),
    _R.used(
        "experimental_force_guest_pull",
        BOOL,
        False,
        "Images are pulled in the guest, by the pod's names for them, whatever the snapshotter says.",
        ann=True,
    ),
    _R.used(
        "dan_conf",
        PATH,
        "/run/kata-containers/dans",
        "Folder of files `<sandbox>.json`, which describe the devices that a VM gets instead of its namespace's links.",
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
        "Receiver of OTLP over HTTP, of which `/v1/traces` is asked: an OpenTelemetry Collector, Jaeger, Tempo.",
        own=True,
    ),
    _R.never("jaeger_endpoint", TEXT, "", "Receiver of Jaeger's old protocol.", _JAEGER),
    _R.never("jaeger_user", TEXT, "", "User for it.", _JAEGER),
    _R.never("jaeger_password", TEXT, "", "Password for it.", _JAEGER),
    _R.used("enable_pprof", BOOL, False, "The monitor socket answers `/debug/`: what the shim is doing.", ann=True),
    _R_RS.later("keep_abnormal", BOOL, False, "Keep what is left of a sandbox that failed."),
    _R_RS.later("use_passfd_io", BOOL, False, "Give process streams to the VMM."),
)

FACTORY: tuple[Key, ...] = (
    _F.used(
        "enable_template",
        BOOL,
        False,
        "VMs continue from a template of their machine, which the first of them has made: docs/WARM_PODS.md.",
    ),
    _F.used("template_path", PATH, "/run/vc/vm/template", "Directory of the templates, on a file system in memory."),
    _F.later("vm_cache_number", whole(0, _U32), 0, "VMs started ahead."),
    _F.later(
        "vm_cache_endpoint", PATH, "/var/run/kata-containers/cache.sock", "Socket of the service that keeps them."
    ),
)

REMOVED: Mapping[tuple[Table, str], str] = {
    (Table.HYPERVISOR, "hotplug_vfio_on_root_bus"): "hot_plug_vfio says where devices are added",
    (Table.HYPERVISOR, "enable_swap"): "guest memory follows the host's swap settings",
}
"""Keys that Kata had once, and what takes their place."""

REMOVED_TABLES: Mapping[str, str] = {
    "proxy": "the shim speaks to the agent itself",
    "shim": "the shim is this program",
    "netmon": "the shim watches the network itself",
    "image": "images are the runtime's business",
}
