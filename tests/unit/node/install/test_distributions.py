"""Installations on nodes of each kind, as trees: what is written where, and that nothing of ours stays."""

import os
import tomllib
from functools import partial
from pathlib import Path

import msgspec
import pytest

from integration.framework.containerd import DEBIAN
from protos.cri import v1_pb2 as pb
from pyshim.model.errors import FailedPrecondition
from pyshim.node.install import runtime
from pyshim.node.install.apply import apply, at_link_targets, remove
from pyshim.node.install.containerd_config import runtimes_in
from pyshim.node.install.cri import verify
from pyshim.node.install.disk import Disk
from pyshim.node.install.handlers import HANDLERS, Handler
from pyshim.node.install.manifest import Manifest, read_manifest
from pyshim.node.install.node_check import require_handlers
from pyshim.node.install.plan import PREFIX, Release, install_plan
from tests.unit.node.install.test_apply import CONFIGS, everything, make_release
from tests.unit.node.install.test_cri import Runtime, serving

NAMES = {handler.name for handler in HANDLERS}
FIRST, SECOND = (Release(id=f"0.1.0-{letter * 12}", python="3.11") for letter in "ab")
K3S = "var/lib/rancher/k3s/agent/etc/containerd"
RKE2 = "var/lib/rancher/rke2/agent/etc/containerd"
# Files as k3s renders them on a node without private registries.
RENDERED_2 = """\
version = 2

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/rancher/k3s/agent/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "10010"
  enable_selinux = false
  sandbox_image = "rancher/mirrored-pause:3.6"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
  disable_snapshot_annotations = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
RENDERED_3 = """\
version = 3
root = "/var/lib/rancher/k3s/agent/containerd"
state = "/run/k3s/containerd"

[grpc]
  address = "/run/k3s/containerd/containerd.sock"
[plugins.'io.containerd.internal.v1.opt']
  path = "/var/lib/rancher/k3s/agent/containerd"
[plugins.'io.containerd.cri.v1.runtime']
  enable_selinux = false
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "rancher/mirrored-pause:3.6"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
IMPORTING_2 = RENDERED_2.replace("\n", f'\nimports = ["/{K3S}/config.toml.d/*.toml"]\n', 1)
IMPORTING_3 = RENDERED_3.replace("\n", f'\nimports = ["/{K3S}/config-v3.toml.d/*.toml"]\n', 1)


MINE_3 = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mine]
  runtime_type = "io.containerd.runc.v2"
"""
MINE = '{{ template "base" . }}\n' + MINE_3.partition("\n")[2]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A node before the installation, and what becomes of it."""

    files: dict[str, str]
    version: str
    name: str = "containerd"
    unit: str = "containerd"
    socket: str = "/run/containerd/containerd.sock"
    written: str
    """The file that has the handlers."""
    starts: str = ""
    """The text that this file begins with."""


def k3s(files: dict[str, str], unit: str = "k3s", **more: str) -> Kind:
    socket = "/run/k3s/containerd/containerd.sock"
    return Kind(files=files, name=unit.partition("-")[0], unit=unit, socket=socket, **more)


KINDS = {
    "debian": Kind(
        files={"etc/containerd/config.toml": DEBIAN},
        version="1.6.20",
        written="etc/containerd/config.toml",
        starts=DEBIAN,
    ),
    "ubuntu-without-a-file": Kind(
        files={"usr/lib/containerd": ""}, version="2.1.3", written="etc/containerd/conf.d/pyshim.toml"
    ),
    "k3s-before-2025": k3s(
        files={f"{K3S}/config.toml": RENDERED_2},
        version="1.7.23",
        written=f"{K3S}/config.toml.tmpl",
        starts='{{ template "base" . }}\n',
    ),
    "k3s-with-a-template-of-the-operator": k3s(
        files={f"{K3S}/config.toml": RENDERED_3, f"{K3S}/config-v3.toml.tmpl": "# mine\n"},
        version="2.0.4",
        written=f"{K3S}/config-v3.toml.tmpl",
        starts="# mine\n",
    ),
    "k3s-with-a-linked-template": k3s(
        files={
            f"{K3S}/config.toml": RENDERED_3,
            f"{K3S}/config-v3.toml.tmpl": "-> /store/tmpl",
            "store/tmpl": MINE,
        },
        version="2.0.4",
        written="store/tmpl",
        starts=MINE,
    ),
    "k3s-agent-with-imports": k3s(
        files={f"{K3S}/config.toml": IMPORTING_3, "etc/systemd/system/k3s-agent.service": ""},
        version="2.1.5",
        unit="k3s-agent",
        written=f"{K3S}/config-v3.toml.d/pyshim.toml",
    ),
    "k3s-of-containerd-1-with-imports": k3s(
        files={f"{K3S}/config.toml": IMPORTING_2},
        version="1.7.27",
        written=f"{K3S}/config.toml.tmpl",
        starts='{{ template "base" . }}\n',
    ),
    "k3s-of-containerd-2-with-a-file-of-version-2": k3s(
        files={f"{K3S}/config.toml": IMPORTING_2}, version="2.1.5", written=f"{K3S}/config.toml.d/pyshim.toml"
    ),
    "rke2-server": k3s(
        files={f"{RKE2}/config.toml": RENDERED_2, "usr/local/lib/systemd/system/rke2-server.service": ""},
        version="1.7.23",
        unit="rke2-server",
        written=f"{RKE2}/config.toml.tmpl",
        starts='{{ template "base" . }}\n',
    ),
    "k0s": Kind(
        files={"etc/k0s/containerd.d/.keep": ""},
        version="1.7.23",
        name="k0s",
        unit="k0sworker",
        socket="/run/k0s/containerd.sock",
        written="etc/k0s/containerd.d/pyshim.toml",
    ),
    "microk8s": Kind(
        files={"var/snap/microk8s/current/args/containerd-template.toml": RENDERED_2},
        version="1.6.36",
        name="microk8s",
        unit="snap.microk8s.daemon-containerd",
        socket="/var/snap/microk8s/common/run/containerd.sock",
        written="var/snap/microk8s/current/args/containerd-template.toml",
        starts=RENDERED_2,
    ),
    "containerd-2-with-imports": Kind(
        files={"etc/containerd/config.toml": 'version = 3\nimports = ["conf.d/*.toml"]\n'},
        version="2.1.3",
        written="etc/containerd/conf.d/pyshim.toml",
    ),
    "containerd-2-without-imports": Kind(
        files={"etc/containerd/config.toml": "version = 3\n"},
        version="2.1.3",
        written="etc/containerd/conf.d/pyshim.toml",
    ),
    "containerd-2-whose-imports-do-not-reach-below": Kind(
        files={"etc/containerd/config.toml": f'imports = ["/etc/containerd/*.toml"]\n{MINE_3}'},
        version="2.1.3",
        written="etc/containerd/config.toml",
        starts=f'imports = ["/etc/containerd/*.toml"]\n{MINE_3}',
    ),
    "linked-directory": Kind(
        files={"etc/containerd": "-> /site", "site/config.toml": DEBIAN},
        version="1.6.20",
        written="site/config.toml",
        starts=DEBIAN,
    ),
    "containerd-2-with-other-imports": Kind(
        files={
            "etc/containerd/config.toml": 'version = 3\nimports = ["/etc/site/*.toml"]\n',
            "etc/site/cri.toml": "version = 3\n",
        },
        version="2.3.4",
        written="etc/containerd/config.toml",
        starts='version = 3\nimports = ["/etc/site/*.toml"]\n',
    ),
    "cri-o": Kind(
        files={"run/crio/crio.sock": "", "etc/crio/crio.conf": "[crio]\n", "etc/containerd/config.toml": DEBIAN},
        version="1.36.3",
        name="CRI-O",
        unit="crio",
        socket="/run/crio/crio.sock",
        written="etc/crio/crio.conf.d/99-pyshim.conf",
    ),
    "linked-configuration": Kind(
        files={"etc/containerd/config.toml": "-> ../site/containerd.toml", "etc/site/containerd.toml": DEBIAN},
        version="1.6.20",
        written="etc/site/containerd.toml",
        starts=DEBIAN,
    ),
}
Installed = tuple[Disk, Kind]


def made(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The tree of such a node."""
    directories = ("opt", "usr/local/bin", "etc/containerd", "etc/systemd/system")
    for name in (each for each in directories if each not in kind.files):
        (tmp_path / name).mkdir(parents=True)
    for name, text in kind.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            (tmp_path / name).symlink_to(text[3:])
        else:
            (tmp_path / name).write_text(text)
    program = tmp_path / "containerd"
    program.write_text(f"#!/bin/sh\necho containerd example.org/containerd v{kind.version} 0\n")
    program.chmod(0o755)
    monkeypatch.setattr(runtime, "program_of", lambda _caller, _root="": str(program))
    return Disk(str(tmp_path))


@pytest.fixture(params=list(KINDS))
def node(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    kind = KINDS[request.param]
    return made(kind, tmp_path, monkeypatch), kind


def install(disk: Disk, release: Release = FIRST, handlers: tuple[Handler, ...] = HANDLERS) -> None:
    caller = runtime.container_runtime(root=disk.root)
    caller = caller._replace(config=disk.resolved(caller.config))
    is_crio = caller.name == runtime.CRIO.name
    manifest = read_manifest(disk, PREFIX) or Manifest()
    containerd = None if is_crio else runtime.node_containerd(disk, caller, manifest)
    plan = install_plan(
        prefix=PREFIX,
        release=release,
        handlers=handlers,
        configs=CONFIGS,
        manual="",
        containerd=containerd,
        has_crio=is_crio,
    )
    plan = at_link_targets(plan, disk)
    names = frozenset(handler.name for handler in handlers)
    check = partial(require_handlers, caller, containerd, names, root=disk.root)
    apply(plan, disk, make_release=make_release(disk, plan), check=check)


def handlers_in(text: str) -> set[str]:
    """Names of the handlers of a file, as the runtime that reads it has them."""
    document = tomllib.loads(text.removeprefix('{{ template "base" . }}\n'))
    return set(document["crio"]["runtime"]["runtimes"] if "crio" in document else runtimes_in(document))


def test_each_kind_is_recognized_and_has_the_handlers_until_it_is_uninstalled(node: Installed) -> None:
    disk, kind = node
    root = Path(disk.root)
    before = everything(root)
    caller = runtime.container_runtime(root=disk.root)
    assert (caller.name, caller.unit, caller.socket) == (kind.name, kind.unit, kind.socket)

    install(disk)
    text = (root / kind.written).read_text()
    assert text.startswith(kind.starts)
    assert handlers_in(text) >= NAMES
    installed = everything(root)
    install(disk)
    assert everything(root) == installed

    install(disk, SECOND)
    assert (root / kind.written).read_text() == text
    remove(disk, PREFIX)
    assert everything(root) == before


class OnReadOnlyStore(Disk):
    """What is below /store is on a read-only file system."""

    def is_read_only(self, path: str) -> bool:
        return path.startswith("/store/") or super().is_read_only(path)


def test_a_link_into_a_read_only_store_is_refused_by_name_before_any_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = made(KINDS["k3s-with-a-linked-template"], tmp_path, monkeypatch)
    before = everything(tmp_path)

    with pytest.raises(FailedPrecondition, match=r"change '/store/tmpl': EROFS \(read-only file system\)"):
        install(OnReadOnlyStore(disk.root))

    assert everything(tmp_path) == before


def test_a_mount_that_is_read_only_is_seen_as_such(tmp_path: Path) -> None:
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    read_only = [row[1] for row in rows if "ro" in row[3].split(",") and os.access(f"{row[1]}/.", os.X_OK)]

    assert not Disk().is_read_only(f"{tmp_path}/not/there")
    if not read_only:
        pytest.skip("no file system here is mounted read-only")
    assert Disk().is_read_only(f"{read_only[0]}/not/there")


def test_verify_runs_a_pod_where_the_runtime_has_read_what_was_written(node: Installed, tmp_path: Path) -> None:
    disk, kind = node
    file = Path(disk.root) / kind.written
    with serving(f"{tmp_path}/cri.sock", Runtime(pb.StatusResponse())) as restarted_before:
        install(disk)
        with pytest.raises(FailedPrecondition, match="has not been restarted since"):
            verify(f"{tmp_path}/cri.sock", frozenset(NAMES), pod="pykata")
    assert restarted_before.handler == ""

    listing = pb.StatusResponse(
        runtime_handlers=[pb.RuntimeHandler(name=each) for each in handlers_in(file.read_text())]
    )
    with serving(f"{tmp_path}/cri.sock", Runtime(listing)) as restarted:
        verify(f"{tmp_path}/cri.sock", frozenset(NAMES), pod="pykata")
    assert (restarted.handler, restarted.pods) == ("pykata", [])


@pytest.mark.parametrize("node", ["ubuntu-without-a-file"], indirect=True)
def test_a_configuration_that_install_made_and_the_operator_edited_is_the_operators(node: Installed) -> None:
    disk, _kind = node
    file = Path(disk.root) / "etc/containerd/config.toml"
    install(disk)
    file.write_text(file.read_text() + "[debug]\n  level = 'debug'\n")

    install(disk, SECOND)
    assert tomllib.loads(file.read_text())["debug"] == {"level": "debug"}
    remove(disk, PREFIX)
    assert file.read_text() == "[debug]\n  level = 'debug'\n"


def test_handlers_that_k3s_rendered_from_our_block_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["k3s-before-2025"]
    (tmp_path / K3S).mkdir(parents=True)
    config = tmp_path / K3S / "config.toml"
    config.write_text(RENDERED_2)
    for name in ("opt", "usr/local/bin", "etc/systemd/system"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(runtime, "program_of", lambda _caller, _root="": "containerd")
    monkeypatch.setattr(runtime, "version", lambda _program: (1, 7))
    disk = Disk(str(tmp_path))
    install(disk)
    template = (tmp_path / kind.written).read_text()
    config.write_text(template.replace('{{ template "base" . }}\n', RENDERED_2))

    install(disk, SECOND)
    assert (tmp_path / kind.written).read_text() == template


def test_k3s_that_never_ran_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / K3S).mkdir(parents=True)
    monkeypatch.setattr(runtime, "program_of", lambda _caller, _root="": "containerd")
    monkeypatch.setattr(runtime, "version", lambda _program: (2, 1))

    with pytest.raises(FailedPrecondition, match=r"it is not there \(hint: start the node's Kubernetes once"):
        install(Disk(str(tmp_path)))


@pytest.mark.parametrize(
    ("files", "version", "error"),
    [
        (
            {
                "etc/containerd/config.toml": 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\n'
                'runtimes = {runc = {runtime_type = "io.containerd.runc.v2"}}\n'
            },
            "1.6.20",
            "add to '/etc/containerd/config.toml': with our part it would not be TOML: .*an inline table",
        ),
        (
            {
                "etc/containerd/config.toml": "-> other.toml",
                "etc/containerd/other.toml": "-> config.toml",
            },
            "1.6.20",
            "follow '/etc/containerd/config.toml': its links are a loop",
        ),
        (
            {f"{K3S}/config.toml": RENDERED_2, f"{K3S}/config.toml.tmpl": "-> config.toml.tmpl"},
            "1.7.23",
            f"follow '/{K3S}/config.toml.tmpl': its links are a loop",
        ),
        (
            {"etc/containerd/config.toml": "version = 3\nimports = ['conf.d/[*.toml']\n"},
            "2.1.3",
            r"read '/etc/containerd/config.toml': imports has a bad pattern '\[\*",
        ),
    ],
    ids=["inline-table", "linked-loop", "linked-template-loop", "bad-pattern"],
)
def test_what_cannot_take_our_part_is_refused_and_nothing_is_changed(
    files: dict[str, str], version: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = made(Kind(files=files, version=version, written=""), tmp_path, monkeypatch)
    before = everything(tmp_path)

    with pytest.raises(FailedPrecondition, match=error):
        install(disk)
    assert everything(tmp_path) == before


def test_a_runtime_that_is_gone_after_the_restart_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["k3s-with-a-linked-template"]
    rendered = RENDERED_3 + MINE_3.partition("\n")[2]
    disk = made(kind, tmp_path, monkeypatch)
    (tmp_path / K3S / "config.toml").write_text(rendered)
    caller = runtime.container_runtime(root=disk.root)
    containerd = runtime.node_containerd(disk, caller, Manifest())
    assert containerd.effective_runtimes == {"runc", "mine"}

    require_handlers(caller, containerd, frozenset(NAMES), root=disk.root)
    (tmp_path / K3S / "config.toml").write_text(RENDERED_3)
    with pytest.raises(FailedPrecondition, match="it has no runtime mine"):
        require_handlers(caller, containerd, frozenset(NAMES), root=disk.root)
