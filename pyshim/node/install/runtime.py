"""The node's container runtime: finds it, reads its version and configuration, and restarts it."""

import os
import re
import shutil
import socket as sockets
from collections.abc import Iterable
from typing import Any, NamedTuple

from pyshim.model.decoding import damaged, toml_value
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.node.install.apply import foreign_text
from pyshim.node.install.containerd_config import combined, merged, parsed, read_document, replacing_import, runtimes_in
from pyshim.node.install.daemon_json import DAEMON_JSON, daemon_json_write
from pyshim.node.install.disk import Disk
from pyshim.node.install.drop_ins import CONTAINERD_DROP_IN, Containerd, Layout
from pyshim.node.install.handlers import SETTINGS, Handler
from pyshim.node.install.manifest import Manifest
from pyshim.node.install.running import run_command
from pyshim.node.install.writes import MembersWrite, block_in


class ContainerRuntime(NamedTuple):
    """The program that the kubelet calls, and that calls the shims."""

    name: str
    program: str
    socket: str
    unit: str
    config: str
    """The file that it reads, or that its distribution of Kubernetes makes it from."""
    layout: Layout = Layout.FILE
    directory: str = ""
    """A directory that exists where this distribution of Kubernetes is installed."""
    reads_again: str = "restart"
    """systemctl's verb by which it reads changed files."""


_RANCHER_SOCKET = "/run/k3s/containerd/containerd.sock"


def _rancher(name: str, unit: str, program: str) -> ContainerRuntime:
    directory = f"/var/lib/rancher/{name}/agent/etc/containerd"
    config = f"{directory}/config.toml"
    return ContainerRuntime(name, program, _RANCHER_SOCKET, unit, config, Layout.RENDERED, directory)


CONTAINERD = ContainerRuntime(
    "containerd", "containerd", "/run/containerd/containerd.sock", "containerd", "/etc/containerd/config.toml"
)
CRIO_CONFIG = "/etc/crio/crio.conf"
CRIO_DROP_INS = "/etc/crio/crio.conf.d"
CRIO = ContainerRuntime("CRI-O", "crio", "/run/crio/crio.sock", "crio", CRIO_CONFIG)
DOCKER = ContainerRuntime("Docker", "dockerd", "/run/docker.sock", "docker", DAEMON_JSON, reads_again="reload")
"""Its containerd is left as it is: Docker names a shim itself."""
_DISTRIBUTIONS = (
    _rancher("k3s", "k3s", "/var/lib/rancher/k3s/data/current/bin/containerd"),
    _rancher("rke2", "rke2-server", "/var/lib/rancher/rke2/bin/containerd"),
    ContainerRuntime(
        *("k0s", "/var/lib/k0s/bin/containerd", "/run/k0s/containerd.sock", "k0sworker", "/etc/k0s/containerd.toml"),
        layout=Layout.DIRECTORY,
        directory="/etc/k0s/containerd.d",
    ),
    ContainerRuntime(
        *("microk8s", "/snap/microk8s/current/bin/containerd", "/var/snap/microk8s/common/run/containerd.sock"),
        *("snap.microk8s.daemon-containerd", "/var/snap/microk8s/current/args/containerd-template.toml"),
        layout=Layout.SOURCE,
        directory="/var/snap/microk8s/current/args",
    ),
)
"""Sources: the documentation of each on containerd's configuration, and kata-deploy's config.rs for the first two."""
_OURS = (".toml", ".tmpl")
"""Files that may have our handlers."""
KINDS = {each.name.lower(): each for each in (CONTAINERD, CRIO, DOCKER, *_DISTRIBUTIONS)}
_OTHER_UNITS = {"k3s": "k3s-agent", "rke2-server": "rke2-agent", "k0sworker": "k0scontroller"}
"""The unit on nodes of the other role, by the unit in `_DISTRIBUTIONS`."""


def container_runtime(socket: str = "", *, root: str = "", kind: str | None = None) -> ContainerRuntime:
    """The node's container runtime: the one of this `kind`, or of `socket`, else the one that `root` has.

    CRI-O if its socket exists, even beside containerd's: CRI-O serves only kubelets, and Docker brings a containerd.
    Else a distribution of Kubernetes whose directory exists.
    """
    found = KINDS[kind] if kind else _of_socket(socket) if socket else _of_node(root)
    other = _OTHER_UNITS.get(found.unit, "")
    if other and not _has_unit(root, found.unit) and _has_unit(root, other):
        found = found._replace(unit=other)
    return found._replace(socket=socket or found.socket)


def _of_socket(socket: str) -> ContainerRuntime:
    for each in (CRIO, DOCKER):
        if os.path.basename(socket) == os.path.basename(each.socket):
            return each
    return next((each for each in _DISTRIBUTIONS if each.socket == socket), CONTAINERD)


def _of_node(root: str) -> ContainerRuntime:
    if os.path.exists(f"{root}{CRIO.socket}"):
        return CRIO
    for each in _DISTRIBUTIONS:
        if os.path.isdir(f"{root}{each.directory}"):
            return each
    has_containerd = os.path.exists(f"{root}{CONTAINERD.socket}") or shutil.which(CONTAINERD.program) is not None
    return CRIO if not has_containerd and has_crio(root) else CONTAINERD


def installed_kind(manifest: Manifest) -> str | None:
    """The kind of an installation that serves Docker alone; None for others, whose kind the node shows."""
    places = [entry.path for entry in manifest.entries if not entry.path.startswith(f"{SETTINGS}/")]
    is_named = any(path.endswith((*_OURS, ".conf")) for path in places)
    return None if is_named or not places else DOCKER.name.lower()


def _has_unit(root: str, unit: str) -> bool:
    directories = ("etc/systemd/system", "usr/lib/systemd/system", "usr/local/lib/systemd/system")
    return any(os.path.exists(f"{root}/{each}/{unit}.service") for each in directories)


def has_crio(root: str = "") -> bool:
    return shutil.which(CRIO.program) is not None or os.path.isdir(f"{root}/etc/crio")


def program_of(runtime: ContainerRuntime, root: str = "") -> str:
    """The path of the runtime's program. Raises NotFound."""
    found = shutil.which(f"{root}{runtime.program}" if os.path.isabs(runtime.program) else runtime.program)
    if found is None:
        raise NotFound(f"find the program of {runtime.name}: there is no '{runtime.program}' (hint: --kind NAME)")
    return found


def version(program: str) -> tuple[int, int]:
    """The program's major and minor version. Raises FailedPrecondition if it prints none."""
    said = run_command([program, "--version"])
    found = re.search(r"\bv?(\d+)\.(\d+)\.\d+", said)
    if found is None:
        raise FailedPrecondition(f"ask '{program}' for its version: {said.strip()[:200]!r} is not understood")
    return int(found[1]), int(found[2])


def effective(program: str, config: str) -> dict[str, Any]:
    """The configuration as containerd reads it, imported files included. Raises FailedPrecondition with its error text.

    Without a file, as in Ubuntu's package, containerd runs with its defaults.
    """
    words = ["--config", config, "config", "dump"] if os.path.exists(config) else ["config", "default"]
    return toml_value(run_command([program, *words]), damaged(f"configuration of {program}", FailedPrecondition))


def present(caller: ContainerRuntime, root: str, release: tuple[int, int]) -> dict[str, Any]:
    """containerd's configuration with its imports; empty where its distribution has not made it yet.

    Only the operator's own file on this node comes with containerd's defaults. Raises FailedPrecondition, NotFound.
    """
    if not root and caller.layout is Layout.FILE:
        return effective(program_of(caller), caller.config)
    there = os.path.exists(f"{root}{caller.config}")
    return merged(caller.config, root=root, containerd=release)[0] if there else {}


def node_containerd(disk: Disk, caller: ContainerRuntime, manifest: Manifest) -> Containerd:
    """The node's containerd, and its configuration without our part."""
    release, config = version(program_of(caller, disk.root)), caller.config
    text = foreign_text(disk, config)
    owned = manifest.by_path()
    if config in owned and (not owned[config].is_block or owned[config].before is not None):
        text = None  # the file is ours
    if text is not None:
        parsed(text, config)
    drop_in = f"{caller.directory}/pyshim.toml" if caller.layout is Layout.DIRECTORY else CONTAINERD_DROP_IN
    ours = {name for path, entry in owned.items() if path.endswith(_OURS) for name in _handlers_of_ours(disk, path)}
    found = effective_runtimes(present(caller, disk.root, release)) - ours
    return Containerd(
        version=release,
        config_path=config,
        config_text=text,
        layout=caller.layout,
        drop_in=drop_in,
        effective_runtimes=found,
    )


def node_daemon_json(disk: Disk, handlers: Iterable[Handler], manifest: Manifest) -> MembersWrite:
    """The handlers as runtimes of the node's daemon.json. Raises ShimError for a file that cannot take them."""
    path = disk.resolved(DAEMON_JSON)
    found = disk.read(path)
    try:
        text = found[0].decode() if isinstance(found, tuple) else None
    except UnicodeDecodeError as error:
        raise FailedPrecondition(f"add runtimes to '{path}': not UTF-8 at byte {error.start}") from error
    entry = manifest.by_path().get(path)
    return daemon_json_write(path, text, handlers, entry.members if entry else ())


def _handlers_of_ours(disk: Disk, path: str) -> set[str]:
    """The handlers that a file or block of ours names."""
    found = disk.read(path)
    text = found[0].decode(errors="replace") if isinstance(found, tuple) else ""
    try:
        block = block_in(text)
        return set(runtimes_in(toml_value(text if block is None else block, ValueError)))
    except ValueError:
        return set()


def effective_runtimes(document: dict[str, Any]) -> frozenset[str]:
    return frozenset(runtimes_in(document))


def require_handlers(document: dict[str, Any], before: frozenset[str], wanted: frozenset[str], config: str) -> None:
    """Raises FailedPrecondition unless the document has the handlers `wanted` and those that it had `before`."""
    lacking = sorted((before | wanted) - effective_runtimes(document))
    if lacking:
        file = replacing_import(config)
        cause = f": '{config}' imports '{file}', whose CRI table replaces all of its own" if file else ""
        hint = " (hint: move that table's settings into the first file)" if file else ""
        raise FailedPrecondition(
            f"configure containerd: with the new files it has no runtime {', '.join(lacking)}{cause}{hint}"
        )


def require_answer(caller: ContainerRuntime) -> None:
    """Raises Unavailable if the runtime does not listen at its socket."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
        connection.settimeout(5)
        try:
            connection.connect(caller.socket)
        except OSError as error:
            raise Unavailable(
                f"connect to {caller.name} at '{caller.socket}': {error.strerror or error} (hint: is it running?)"
            ) from error


def read_again(caller: ContainerRuntime) -> None:
    """The runtime reads its files again; pods keep running. Raises FailedPrecondition with systemd's error text."""
    run_command(["systemctl", caller.reads_again, caller.unit])


def crio_document(*, root: str = "") -> dict[str, Any]:
    """The merged configuration; empty if CRI-O runs with its defaults. Raises OSError, FailedPrecondition naming the
    file."""
    found: dict[str, Any] = {}
    for path in _crio_files(root):
        found = combined(found, read_document(path, root))
    return found


def _crio_files(root: str) -> list[str]:
    files = [CRIO_CONFIG] if os.path.exists(f"{root}{CRIO_CONFIG}") else []
    if os.path.isdir(f"{root}{CRIO_DROP_INS}"):
        files += [f"{CRIO_DROP_INS}/{name}" for name in sorted(os.listdir(f"{root}{CRIO_DROP_INS}"))]
    return files
