"""The facts of a host for `pyshim check`: files below `root`, and the answers of programs. It decides nothing.

`root` is empty for this host; tests pass the tree of a made-up host.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from pyshim.host.fds import open_error
from pyshim.host.kernel_image import boot_file_architecture, kernel_release
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.confinement import has_filter
from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HostFacts
from pyshim.node.install import runtime
from pyshim.node.install.containerd_config import merged, runtimes_in, snapshotter_in, table_at
from pyshim.node.install.runtime import CRIO, ContainerRuntime, container_runtime
from pyshim.resources.probe import create_kvm_vm, probe_host
from pyshim.start.dialect import BINARY, RUNTIME

MODULES = ("kvm", "vhost_net", "vhost_vsock", "tun", "sch_ingress", "cls_u32", "act_mirred")
"""Modules that a pod's VM and network use. Each may be part of the kernel instead."""
_SHIM_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""systemd's default PATH, on which containerd looks for shims. Source: systemd.exec(5)."""
_PROGRAM_TIMEOUT_S = 20.0

RunProgram = Callable[[Sequence[str]], str]
"""The first line that a program prints. Raises OSError or subprocess.SubprocessError."""


class ProgramOutput(Struct, frozen=True, kw_only=True):
    """The output of a program, or the error in its place."""

    path: str
    text: str = ""
    error: str = ""


class ModuleFacts(Struct, frozen=True, kw_only=True):
    name: str
    is_there: bool
    """Loaded, or part of the kernel."""
    is_loadable: bool


class ShimHandler(Struct, frozen=True, kw_only=True):
    """A handler of the container runtime that is this shim."""

    name: str
    runtime_path: str
    snapshotter: str
    config_path: str


class RuntimeFacts(Struct, frozen=True, kw_only=True):
    runtime: ContainerRuntime
    version: ProgramOutput
    config_path: str
    config_version: int = 0
    """containerd's; 0: there is no file, so containerd runs with its defaults."""
    error: str = ""
    """The error with which reading the configuration failed."""
    runtimes: tuple[str, ...] = ()
    """All handlers that the configuration names."""
    handlers: tuple[ShimHandler, ...] = ()
    snapshotter: str = ""
    socket_error: str = ""
    """The error at its socket; empty when it answers."""


class HostReport(Struct, frozen=True, kw_only=True):
    machine: str
    is_root: bool
    facts: HostFacts
    device_errors: Mapping[str, str]
    """The error of opening a device, by its path; devices that open are absent."""
    modules: tuple[ModuleFacts, ...]
    config: Config | None
    config_error: str
    qemu: ProgramOutput
    virtiofsd: ProgramOutput
    kernel_release: str
    """The release of the guest's kernel; empty if its file does not say."""
    missing_files: tuple[str, ...]
    """Files of the guest that the configuration names and that are not there."""
    foreign_files: tuple[str, ...]
    """Kernel and initrd, if they are for another processor than the machine type's."""
    runtime: RuntimeFacts
    has_filter: bool
    """The shim finds libseccomp."""
    shim_path: str
    """The path at which containerd finds the shim; empty if it finds none."""


def run_program(argv: Sequence[str]) -> str:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_PROGRAM_TIMEOUT_S,
        check=True,
    )
    return next(iter(done.stdout.splitlines()), "").strip()


def host_report(
    config: Config | None,
    config_error: str = "",
    *,
    root: str = "",
    run: RunProgram = run_program,
    create_vm: Callable[[int], int] = create_kvm_vm,
) -> HostReport:
    """The facts of this host, or of the one whose tree is below `root`.

    `config` is None if it cannot be read, for the reason `config_error`.
    """
    devices = ("/dev/kvm", "/dev/vhost-vsock", "/dev/vhost-net", "/dev/net/tun")
    errors = {path: open_error(f"{root}{path}") for path in devices}
    hypervisor = None if config is None or config.is_remote else config.hypervisor
    files = () if hypervisor is None else (hypervisor.kernel, hypervisor.image, hypervisor.initrd, hypervisor.firmware)
    shares = hypervisor is not None and hypervisor.shared_fs != "none"
    return HostReport(
        machine=platform.machine(),
        is_root=os.geteuid() == 0,
        facts=probe_host(
            proc_root=f"{root}/proc",
            sys_root=f"{root}/sys",
            dev_root=f"{root}/dev",
            run_root=f"{root}/run",
            create_vm=create_vm,
        ),
        device_errors={path: describe_os_error(error) for path, error in errors.items() if error is not None},
        modules=_modules(root),
        config=config,
        config_error=config_error,
        qemu=_ask(run, root, hypervisor.path if hypervisor else "", "--version"),
        virtiofsd=_ask(run, root, hypervisor.virtio_fs_daemon if hypervisor and shares else "", "--version"),
        kernel_release=_kernel_release(f"{root}{hypervisor.kernel}" if hypervisor else ""),
        missing_files=tuple(path for path in files if path and not os.path.exists(f"{root}{path}")),
        foreign_files=_foreign_files(hypervisor, root) if hypervisor else (),
        runtime=_runtime(container_runtime(root=root), root, run),
        has_filter=has_filter(),
        shim_path=next(
            (d for each in _SHIM_DIRECTORIES if os.access(f"{root}{(d := f'{each}/{BINARY}')}", os.X_OK)), ""
        ),
    )


def _kernel_release(path: str) -> str:
    try:
        return kernel_release(path) if path else ""
    except OSError:
        return ""


def _foreign_files(hypervisor: HypervisorConfig, root: str) -> tuple[str, ...]:
    found = []
    for path in filter(None, (hypervisor.kernel, hypervisor.initrd)):
        with suppress(OSError):
            if boot_file_architecture(f"{root}{path}") not in ("", hypervisor.machine.architecture.name):
                found.append(path)
    return tuple(found)


def _ask(run: RunProgram, root: str, path: str, *words: str) -> ProgramOutput:
    if not path:
        return ProgramOutput(path="")
    try:
        return ProgramOutput(path=path, text=run([f"{root}{path}" if path.startswith("/") else path, *words]))
    except subprocess.CalledProcessError as error:
        return ProgramOutput(path=path, error=f"it exited {error.returncode}")
    except subprocess.TimeoutExpired:
        return ProgramOutput(path=path, error=f"it did not answer within {_PROGRAM_TIMEOUT_S:g} s")
    except OSError as error:
        return ProgramOutput(path=path, error=describe_os_error(error))


def _modules(root: str) -> tuple[ModuleFacts, ...]:
    release = "".join(_lines(f"{root}/proc/sys/kernel/osrelease"))
    builtin = _names(f"{root}/lib/modules/{release}/modules.builtin")
    loadable = _names(f"{root}/lib/modules/{release}/modules.dep")
    return tuple(
        ModuleFacts(
            name=name,
            is_there=name in builtin or os.path.isdir(f"{root}/sys/module/{name}"),
            is_loadable=name in loadable,
        )
        for name in MODULES
    )


def _names(path: str) -> frozenset[str]:
    """Module names in a file with a path of a module on each line, as the kernel spells them."""
    paths = (line.partition(":")[0] for line in _lines(path))
    return frozenset(os.path.basename(each).partition(".ko")[0].replace("-", "_") for each in paths)


def _lines(path: str) -> list[str]:
    """The lines of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _runtime(runtime: ContainerRuntime, root: str, run: RunProgram) -> RuntimeFacts:
    version = _ask(run, "", runtime.program, "--version")
    socket_error = "" if os.path.exists(f"{root}{runtime.socket}") else f"there is no '{runtime.socket}'"
    seen = RuntimeFacts(runtime=runtime, version=version, config_path=runtime.config, socket_error=socket_error)
    try:
        return _with_crio(seen, root) if runtime.name == CRIO.name else _with_containerd(seen, root)
    except OSError as error:
        return replace(seen, error=f"read '{runtime.config}': {describe_os_error(error)}")
    except FailedPrecondition as error:
        return replace(seen, error=str(error))


def _with_containerd(seen: RuntimeFacts, root: str) -> RuntimeFacts:
    try:
        document, config_version = merged(seen.config_path, root=root)
    except FileNotFoundError:
        document, config_version = {}, 0
    runtimes = runtimes_in(document)
    handlers = [
        ShimHandler(
            name=name,
            runtime_path=str(each.get("runtime_path", "")),
            snapshotter=str(each.get("snapshotter", "")),
            config_path=str(table_at(each, "options").get("ConfigPath", "")),
        )
        for name, each in runtimes.items()
        if isinstance(each, dict) and (each.get("runtime_type") == RUNTIME or _is_shim(each))
    ]
    return replace(
        seen,
        config_version=config_version,
        runtimes=tuple(runtimes),
        handlers=tuple(handlers),
        snapshotter=snapshotter_in(document) or "overlayfs",
    )


def _with_crio(seen: RuntimeFacts, root: str) -> RuntimeFacts:
    document = runtime.crio_document(root=root)
    runtimes = table_at(document, "crio", "runtime", "runtimes")
    handlers = [
        ShimHandler(
            name=name,
            runtime_path=str(each["runtime_path"]),
            snapshotter="",
            config_path=str(each.get("runtime_config_path", "")),
        )
        for name, each in runtimes.items()
        if isinstance(each, dict) and each.get("runtime_type") == "vm" and _is_shim(each)
    ]
    driver = str(table_at(document, "crio").get("storage_driver") or "overlay")
    return replace(seen, runtimes=tuple(runtimes), handlers=tuple(handlers), snapshotter=driver)


def _is_shim(runtime: Mapping[str, object]) -> bool:
    return os.path.basename(str(runtime.get("runtime_path", ""))) == BINARY
