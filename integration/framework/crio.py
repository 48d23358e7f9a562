"""A private CRI-O: own storage, state, socket and configuration, with the handlers of the tests as runtimes of type vm.

CRI names its generation: `CRI=crio make integration FILES=integration/test_cri_life.py`. `build` makes CRI-O from the
Go module proxy the first time, and pinns from the C sources of the same module; conmon is Debian's. Its two images come
from a registry on 127.0.0.1, because CRI-O has no import.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pyshim.node.install.drop_ins import crio_text
from pyshim.node.install.handlers import Handler

from . import zygote
from .containerd import missing_programs
from .ctr import Ctr
from .daemon import Daemon, Directories
from .images import write_archive
from .registry import registry
from .releases import PROJECT, go_build, run_go

CHOICE = "CRI"
VERSION = "v1.36.3"
MODULE = "github.com/cri-o/cri-o"
PROGRAMS = PROJECT / ".build" / "cache" / "crio" / VERSION
_AT_CREATE = "CRI-O makes the task in CreateContainer, which fails then: internal/oci/runtime_vm.go, CreateContainer"
_NO_PORT_FORWARD = "CRI-O forwards no port of a VM: internal/oci/runtime_vm.go, PortForwardContainer"
_NO_SECCOMP = "CRI-O is built without libseccomp here, and gives no profile"
DIFFERENCES = {
    "test_a_program_that_does_not_exist_fails_the_start_and_leaves_the_pod_usable": _AT_CREATE,
    "test_an_exec_that_exceeds_its_time_is_ended": "CRI-O answers -1 and a text: runtime_vm.go, ExecSyncContainer",
    "test_a_pods_end_is_what_kubernetes_users_expect[no-program]": _AT_CREATE,
    "test_a_byte_is_counted_once_in_the_network_figures_of_a_pod[pykata-False]": "with CRI-O the kubelet counts the "
    "processes of a pod in a VM as well",
    "test_an_unknown_sysctl_is_refused_by_its_name": "CRI-O sets sysctls in its pinned namespaces itself: pinns",
    "test_a_capability_the_guest_does_not_know_gives_nothing": "CRI-O refuses a capability that it does not know",
    "test_a_volume_that_is_not_there[dangling]": "CRI-O resolves the link, and the refusal names its target",
    "test_a_pod_reaches_its_gateway_and_the_host_reaches_the_pod": "CRI-O gives no NET_RAW, which ping needs",
    "test_figures_of_a_container_are_those_of_its_cgroup_in_the_guest": "CRI-O reads no page faults of a VM: "
    "internal/oci/runtime_vm_linux.go, metricsV1ToCgroupStats",
    "test_figures_of_the_pod_are_those_of_its_vm": "CRI-O's cgroupfs manager reads a pod's cgroup as a systemd slice: "
    "internal/config/cgmgr/cgroupfs_linux.go, SandboxCgroupManager",
    "test_a_pod_whose_guest_hangs_is_stopped_and_removed": "CRI-O waits for SIGTERM as long as the call may last: "
    "server/utils.go, stopTimeoutFromContext",
    "test_a_local_seccomp_profile_denies_what_it_says_and_survives_unknown_calls": _NO_SECCOMP,
    "test_a_seccomp_profile_that_is_no_profile_is_refused": _NO_SECCOMP,
    "test_a_forwarded_port_is_answered_by_who_listens_in_the_pod": _NO_PORT_FORWARD,
    "test_two_connections_are_forwarded_over_one": _NO_PORT_FORWARD,
    "test_many_forwarded_connections_carry_much_at_once_and_end_with_their_listeners": _NO_PORT_FORWARD,
    "test_a_forwarded_port_without_a_listener_is_an_error_and_the_next_one_is_served": _NO_PORT_FORWARD,
    "test_port_forward_changes_nothing_in_the_pods_namespace": _NO_PORT_FORWARD,
}
"""Tests of what CRI-O does in another way than containerd, by name, without parameters where they hold for all."""
_REGISTRIES = ".config/containers/registries.conf"
"""Below HOME; CRI-O reads it before the system's."""
# Without the C libraries of signatures, btrfs and seccomp.
_TAGS = "containers_image_openpgp exclude_graphdriver_btrfs"
# runc's processes are the first that the OOM killer takes: a lower score takes a capability that this machine may lack.
# It may lack the controller of huge pages as well, for which the kubelet gives limits of 0.
_RUNC = """\
#!/bin/sh
for word; do
    case $before in
    --bundle) spec=$word/config.json ;;
    --process) spec=$word ;;
    *) spec= ;;
    esac
    [ -z "$spec" ] || sed -i 's/"oomScoreAdj": *-*[0-9]*/"oomScoreAdj":1000/; s/"hugepageLimits/"ignored/' "$spec"
    before=$word
done
exec runc "$@"
"""
_CONFIG = """\
[crio]
root = "{root}/storage"
runroot = "{state}/storage"
log_dir = "{root}/log"
version_file = "{state}/version"
version_file_persist = "{root}/version"
clean_shutdown_file = "{root}/clean.shutdown"
storage_driver = "overlay"
[crio.api]
listen = "{socket}"
stream_address = "127.0.0.1"
stream_port = "0"
[crio.runtime]
default_runtime = "runc"
conmon = "/usr/bin/conmon"
conmon_cgroup = "pod"
cgroup_manager = "cgroupfs"
pinns_path = "{programs}/pinns"
namespaces_dir = "{state}/ns"
container_exits_dir = "{state}/exits"
container_attach_socket_dir = "{state}/attach"
log_level = "debug"
hooks_dir = []
[crio.runtime.runtimes.runc]
runtime_path = "{root}/runc"
runtime_type = "oci"
runtime_root = "{state}/runc"
monitor_path = "/usr/bin/conmon"
[crio.image]
pause_image = "{pause}"
pause_command = ""
signature_policy = "{root}/policy.json"
[crio.network]
network_dir = "{cni}/net.d"
plugin_dirs = ["{cni}/bin"]
[crio.nri]
enable_nri = true
nri_listen = "{nri}/nri.sock"
nri_plugin_dir = "{nri}/plugins"
nri_plugin_config_dir = "{nri}/conf.d"
"""


def is_chosen() -> bool:
    return os.environ.get(CHOICE) == "crio"


def mark(items: list[pytest.Item]) -> None:
    """Tests of what CRI-O does in another way are skipped, with the reason."""
    for item in items:
        names = (item.name, item.name.partition("[")[0])
        if reason := next((DIFFERENCES[name] for name in names if name in DIFFERENCES), ""):
            item.add_marker(pytest.mark.skip(reason=reason))


def build() -> None:
    """CRI-O and pinns are in PROGRAMS. Raises OSError saying what failed."""
    if missing := missing_programs("conmon"):
        raise FileNotFoundError(f"run CRI-O: no program {missing[0]!r} (hint: Debian's package conmon)")
    with go_build(PROGRAMS, f"CRI-O {VERSION}", "some minutes") as work:
        if work is None:
            return
        run_go(work, "mod", "init", "pyshim.test/crio")
        run_go(work, "get", "-tool", f"{MODULE}/cmd/crio@{VERSION}")
        run_go(work, "build", "-trimpath", "-tags", _TAGS, "-o", "bin/", f"{MODULE}/cmd/crio")
        sources = Path(run_go(work, "list", "-m", "-f", "{{.Dir}}", MODULE).strip()) / "pinns" / "src"
        files = [str(path) for path in sorted(sources.glob("*.c"))]
        command = ["gcc", "-std=c99", "-Os", "-static", f'-DVERSION="{VERSION}"', "-o", str(work / "bin/pinns"), *files]
        subprocess.run(command, check=True)


class CrioDirectories(Directories):
    """Where one CRI-O lives."""

    @property
    def socket(self) -> Path:
        return self.state / "crio.sock"

    @property
    def log(self) -> Path:
        return self.root / "crio.log"

    def bundle(self, container: str, namespace: str = "default") -> Path:
        return self.state / "storage" / "overlay-containers" / container / "userdata"


class Crio(Daemon):
    def __init__(
        self,
        directories: CrioDirectories,
        *,
        handlers: tuple[Handler, ...],
        shim: Path,
        cni: Path,
        nri: Path,
        pause: str,
    ) -> None:
        super().__init__("CRI-O", directories)
        self._handlers = handlers
        self._shim = shim
        self._cni = cni
        self._nri = nri
        self._pause = pause

    @property
    def ctr(self) -> Ctr:
        pytest.skip("needs containerd's ctr, and CRI-O serves no such client")

    def start(self) -> None:
        zygote.keep_away()
        where = self.directories
        (where.root / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        text = _CONFIG.format(
            root=where.root,
            state=where.state,
            socket=where.socket,
            programs=PROGRAMS,
            cni=self._cni,
            pause=self._pause,
            nri=self._nri,
        )
        (where.root / "crio.conf").write_text(text)
        (where.root / "runc").write_text(_RUNC)
        (where.root / "runc").chmod(0o755)
        # runc makes it with its first container, and keeps it.
        (where.state / "runc").mkdir(parents=True, exist_ok=True)
        drop_ins = where.root / "crio.conf.d"
        drop_ins.mkdir(exist_ok=True)
        (drop_ins / "99-pyshim.conf").write_text(crio_text(self._handlers, str(self._shim)))
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(where.root),
            **zygote.PATIENT,
        }
        self._run(
            [PROGRAMS / "crio", "--config", where.root / "crio.conf", "--config-dir", drop_ins], environment=environment
        )

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        status = super().stop(number)
        self.directories.socket.unlink(missing_ok=True)
        return status


@contextlib.contextmanager
def image_source(root: Path, images: Mapping[str, tuple[str, ...]], others: Mapping[str, str]) -> Iterator[None]:
    """CRI-O can pull these images (name: entry point) from docker.io, which is a registry of ours within the block.

    `others` are registries by the name under which CRI-O is asked for them, with their addresses.
    """
    with contextlib.ExitStack() as end:
        tables = [_table(name, address) for name, address in others.items()]
        for name, entrypoint in images.items():
            archive = root / "image.tar"
            write_archive(archive, name, entrypoint)
            repository = name.removeprefix("docker.io/").rpartition(":")[0]
            served = end.enter_context(registry("127.0.0.1", archive, repository))
            archive.unlink()
            tables.append(_table(f"docker.io/{repository}", f"{served.url.removeprefix('http://')}/{repository}"))
        path = root / _REGISTRIES
        path.parent.mkdir(parents=True)
        path.write_text("".join(tables))
        yield


def _table(prefix: str, location: str) -> str:
    return f'[[registry]]\nprefix = "{prefix}"\nlocation = "{location}"\ninsecure = true\n'


def remove_daemon_files(where: CrioDirectories) -> None:
    """CRI-O's own files and FIFOs are gone, those of its crun, and the mount that its storage makes."""
    subprocess.run(["umount", "--lazy", where.root / "storage" / "overlay"], check=False, capture_output=True)
    for directory in (where.root, where.state, Path("/run/vc/crio"), Path("/run/crun")):
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"crio: {error}")
