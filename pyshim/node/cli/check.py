"""`pyshim check`: can this host run pods in virtual machines, and what is to be done about it.

`--env` prints the same host in the shape of `kata-runtime env`. Names and their meaning are those of Kata's format
1.0.27, so that programs that read it read this.
"""

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import click
import psutil
from msgspec import to_builtins

import pyshim
from pyshim.config.effective import Effective, examine
from pyshim.config.keys import Table
from pyshim.config.load import build_config
from pyshim.config.sources import named_file, read_source
from pyshim.config.values import toml_value
from pyshim.model.architecture import go_architecture
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.host_facts import HostFacts
from pyshim.node.cli.check_host import RunProgram, host_report, run_program
from pyshim.node.cli.check_verdicts import HostVerdict, VerdictLevel, verdicts
from pyshim.node.cli.output import config_option, examples, json_option, print_json, print_table
from pyshim.node.install.handlers import config_path_of
from pyshim.node.kubernetes.manifest import overhead_of, read_documents
from pyshim.pod.plan.kernel_params import kernel_params
from pyshim.resources.probe import probe_host

_FORMAT = "1.0.27"
_OCI = "1.1.0"
"""The version of the OCI runtime specification that specs are read by."""
Document = dict[str, Any]


@click.command(
    epilog=examples(
        "pyshim check",
        "pyshim check --handler pykata-tdx",
        "pyshim check --runtimeclass runtimeclass.yaml --strict",
        "pyshim check --json | jq '.verdicts[] | select(.level != \"ok\")'",
        "pyshim check --env --json | jq -r .Hypervisor.Version",
    )
)
@config_option
@click.option("--handler", metavar="NAME", help="In place of --config: what 'pyshim install' gave this handler.")
@click.option("--runtimeclass", "class_path", metavar="FILE", help="Compare the overhead of this RuntimeClass.")
@click.option("--strict", is_flag=True, help="Exit 1 for warnings, too.")
@click.option("--env", is_flag=True, help="Print host and configuration in the shape of 'kata-runtime env' instead.")
@json_option
def command(
    config_path: str | None, handler: str | None, class_path: str | None, strict: bool, env: bool, as_json: bool
) -> int:
    """Say whether this host can run pods in virtual machines.

    A line per thing that pods need: ok, warning (they run, but slower, or with less), missing (they do not run), with
    what to do. Exit code 1 when something is missing.
    """
    if handler is not None:
        if config_path is not None:
            raise click.UsageError("--handler and --config name a configuration each")
        config_path = config_path_of(handler)
        if not os.path.exists(config_path):
            raise NotFound(f"check handler '{handler}': no '{config_path}' (hint: 'pyshim status' lists handlers)")
    if env:
        return _print_env(config_path, as_json=as_json)
    pod_fixed = _pod_fixed(class_path) if class_path else None
    config, problem = _config(config_path)
    found = verdicts(host_report(config, problem), pod_fixed)
    counted = Counter(each.level for each in found)
    failed = bool(counted[VerdictLevel.MISSING] or (strict and counted[VerdictLevel.WARNING]))
    if as_json:
        print_json({"ok": not failed, "verdicts": to_builtins(found)})
    else:
        print_table(("", "WHAT", "FOUND"), [(each.level, each.subject, _words(each)) for each in found], wrap="FOUND")
        print(", ".join(f"{counted[level]} {level}" for level in VerdictLevel))
    return 1 if failed else 0


def _words(verdict: HostVerdict) -> str:
    return f"{verdict.text} (hint: {verdict.hint})" if verdict.hint else verdict.text


def _config(path: str | None) -> tuple[Config | None, str]:
    """The configuration, or None and the error, which becomes a verdict."""
    try:
        return build_config(read_source(named_file(path), dict(os.environ))), ""
    except (ShimError, OSError) as error:
        return None, str(error)


def _pod_fixed(path: str) -> Mapping[str, Fraction]:
    found = overhead_of(read_documents(path), "", path)
    if found is None:
        raise FailedPrecondition(f"find RuntimeClass in '{path}': the file does not hold exactly one")
    return found


def _print_env(config_path: str | None, *, as_json: bool) -> int:
    """Prints TOML, or JSON."""
    effective = examine(read_source(named_file(config_path), dict(os.environ)))
    found = document(effective, probe_host(), run=run_program)
    if as_json:
        print_json(found)
    else:
        print("\n".join(toml_lines(found)))
    return 0


def document(effective: Effective, facts: HostFacts, *, run: RunProgram) -> Document:
    """Raises InvalidArgument for a configuration with which no sandbox starts."""
    config = build_config(effective.source)
    hypervisor, runtime, agent = config.hypervisor, config.runtime, config.agent

    def raw(table: Table, name: str) -> Any:
        return effective.of(table, name).value

    params = "" if config.is_remote else " ".join(_kernel_params(config, facts))
    return {
        "Kernel": {"Path": hypervisor.kernel, "Parameters": params},
        "Meta": {"Version": _FORMAT},
        "Image": {"Path": hypervisor.image},
        "Initrd": {"Path": hypervisor.initrd},
        "Hypervisor": {
            "MachineType": hypervisor.machine_type,
            "Version": "" if config.is_remote else _version(hypervisor.path, run),
            "Path": hypervisor.path,
            "BlockDeviceDriver": hypervisor.block_device_driver,
            "EntropySource": hypervisor.entropy_source,
            "SharedFS": hypervisor.shared_fs,
            "VirtioFSDaemon": hypervisor.virtio_fs_daemon,
            "SocketPath": hypervisor.remote_hypervisor_socket if config.is_remote else "",
            "Msize9p": raw(Table.HYPERVISOR, "msize_9p"),
            "MemorySlots": hypervisor.memory_slots,
            "HotPlugVFIO": hypervisor.hot_plug_vfio,
            "ColdPlugVFIO": hypervisor.cold_plug_vfio,
            "PCIeRootPort": hypervisor.pcie_root_port,
            "PCIeSwitchPort": hypervisor.pcie_switch_port,
            "Debug": hypervisor.enable_debug,
            "SecurityInfo": {
                "Rootless": raw(Table.HYPERVISOR, "rootless"),
                "DisableSeccomp": raw(Table.HYPERVISOR, "disable_seccomp"),
                "GuestHookPath": hypervisor.guest_hook_path,
                "EnableAnnotations": list(raw(Table.HYPERVISOR, "enable_annotations")),
                "ConfidentialGuest": hypervisor.confidential_guest,
            },
        },
        "Runtime": {
            "Path": sys.argv[0],
            "GuestSeLinuxLabel": runtime.guest_selinux_label,
            "Experimental": [],
            "Debug": runtime.enable_debug,
            "Trace": raw(Table.RUNTIME, "enable_tracing"),
            "DisableGuestSeccomp": runtime.disable_guest_seccomp,
            "DisableNewNetNs": runtime.disable_new_netns,
            "SandboxCgroupOnly": runtime.sandbox_cgroup_only,
            "Config": {"Path": config.source},
            "Version": {"OCI": _OCI, "Version": _semver(pyshim.__version__)},
        },
        "Host": {
            "AvailableGuestProtections": sorted(facts.tee.available) or ["none"],
            "Kernel": platform.release(),
            "Architecture": go_architecture(facts.architecture),
            "VMContainerCapable": facts.kvm_usable,
            "SupportVSocks": facts.vhost_vsock,
            "Distro": _distribution(),
            "CPU": {**_cpu(), "CPUs": facts.cpu_count},
            "Memory": _memory_kib(),
        },
        "Agent": {"Debug": agent.enable_debug, "Trace": raw(Table.AGENT, "enable_tracing")},
    }


def _kernel_params(config: Config, facts: HostFacts) -> Iterable[str]:
    """The parameters of every sandbox of the configuration; only the number of CPUs differs."""
    return kernel_params(
        config,
        max_vcpus=facts.cpu_count,
        root_on_pmem=bool(config.hypervisor.image) and not config.hypervisor.disable_image_nvdimm,
        serial_agent=not facts.vhost_vsock,
        emulated=not facts.kvm_usable,
        tsc_khz=facts.tsc_khz,
    )


def _version(path: str, run: RunProgram) -> str:
    """The first line of the hypervisor's `--version`, or Kata's `unknown`."""
    try:
        return run([path, "--version"])
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _semver(text: str) -> Document:
    numbers = [int(part) if part.isdecimal() else 0 for part in (*text.split("."), "0", "0", "0")[:3]]
    return {"Semver": text, "Commit": "", "Major": numbers[0], "Minor": numbers[1], "Patch": numbers[2]}


def _distribution() -> Document:
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        found = {}
    return {"Name": found.get("NAME", ""), "Version": found.get("VERSION_ID", "")}


def _cpu() -> Document:
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return {"Vendor": fields.get("vendor_id", ""), "Model": fields.get("model name", "")}


def _memory_kib() -> Document:
    memory = psutil.virtual_memory()
    return {"Total": memory.total >> 10, "Free": memory.free >> 10, "Available": memory.available >> 10}


def toml_lines(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The document as TOML: a table's values before its tables."""
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{path}.{key}" if path else key
            yield f"\n[{name}]" if path or next(iter(table)) != key else f"[{name}]"
            yield from toml_lines(value, name)
