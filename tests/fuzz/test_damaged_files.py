"""Files of ours with random damage: each is read, or refused by a declared error; what has a digest is never obeyed."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pyshim import cdi
from pyshim.cdi.files import document_of
from pyshim.cleanup.lost_vms import LostVm
from pyshim.config.sources import named_file, read_source
from pyshim.host.processes.identity import start_ticks
from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.oci import parse_spec
from pyshim.model.sizing import Placement
from pyshim.model.task import ExitStatus
from pyshim.node.dra.claims import Claims, Prepared
from pyshim.node.install.daemon_json import members_in
from pyshim.node.install.disk import Disk
from pyshim.node.install.manifest import Manifest, ManifestEntry, encoded, manifest_path, read_manifest
from pyshim.resources.confidential.plan import initdata
from pyshim.resources.devices.plan.instances import read_instances
from pyshim.resources.network.plan.direct import direct_network
from pyshim.resources.templates.plan import Template
from pyshim.resources.volumes.host.sources import parse_mount_info
from pyshim.resources.volumes.plan.layers import layer_verity
from pyshim.start.delete import served_answer
from pyshim.start.invocation import Invocation
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore
from tests.fuzz.targets import CORPUS
from tests.unit.state import states

MUTATIONS = 2_000
"""Of each kind; seventeen kinds make 34,000."""
SHIM = ShimRecord(pid=7, start_ticks=8, socket="unix:///s", namespace="k8s.io", pid_namespace=9)
TEMPLATE = Template(key="k", kernel="/k", vcpus=1, memory_mib=2, state_bytes=3, made_ns=4, files=(("/k", "1-2"),))
PLACEMENT = Placement(
    vcpu_cpus=(0, 1), service_cpus=(2,), cpu_nodes=(0,), memory_nodes=(0,), exclusive=True, why="near its memory"
)
PREPARED = Prepared(requests=("gpu",), pool="p", device="gpu-1", cdi="pyshim.dev/gpu=gpu-1")
CONFIG = b'[hypervisor.qemu]\npath = "/usr/bin/qemu"\ndefault_vcpus = 1.5\n[runtime]\nenable_debug = true\n'
INSTANCES = b"""[device.gpu]
kind = "nvidia.com/gpu"
[[type]]
name = "a"
device = "gpu"
vcpus = 1
memory_mib = 2
devices = 1
"""
DIRECT = b"""{"devices": [{"name": "eth0", "guest_mac": "02:00:00:00:00:01", "network_info": {"interface": {}},
"device": {"type": "vfio", "pci_device_id": "0000:01:00.0"}}]}"""
MOUNT_INFO = (
    b'{"volume-type": "block", "device": "/dev/sda", "fstype": "ext4", "options": ["ro"], "metadata": {"a": "b"}}'
)

SPEC, CDI, INITDATA = (
    (CORPUS / name).read_bytes()
    for name in (
        "oci-spec/everything.json",
        "cdi/everything.json",
        "initdata/document.toml",
    )
)

Read = Callable[[bytes], object]


def _json(kind: type) -> Read:
    return lambda data: from_json(data, kind, damaged("/run/x"))


def _write(path: Path, data: bytes) -> None:
    """As a new file: ext4 waits for the disk where one is truncated, written and closed."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _state(root: Path) -> tuple[bytes, Read]:
    store = StateStore(root=str(root))
    store.save(SandboxState(shim=SHIM, sandbox_id=SandboxId("s1"), ledger=(), snapshot=None))
    path = root / "s1" / "persist.json"

    def read(data: bytes) -> object:
        _write(path, data)
        return store.load("s1")

    return path.read_bytes(), read


def _state_of_delete(root: Path) -> tuple[bytes, Read]:
    """As `delete` answers from it for a container that has exited, of a pod whose shim lives."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    shim = replace(SHIM, pid=os.getpid(), start_ticks=ticks, pid_namespace=os.stat("/proc/self/ns/pid").st_ino)
    call = Invocation()
    call.id, call.bundle, call.namespace = "app", str(root / "bundle"), SHIM.namespace
    (root / "bundle" / "rootfs").mkdir(parents=True)
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "sb1"}
    (root / "bundle" / "config.json").write_text(json.dumps({"annotations": pod}))
    exited = states.container("app", ExitStatus(status=3, exited_at_ns=5))
    StateStore(root=str(root)).save(replace(states.state(exited), shim=shim))
    path = root / "sb1" / "persist.json"

    def read(data: bytes) -> object:
        _write(path, data)
        answer = served_answer(call, state_root=str(root))
        if answer is None:
            raise InvalidArgument("left to the whole delete")
        return answer

    return path.read_bytes(), read


def _register(root: Path) -> tuple[bytes, Read]:
    """A damaged entry counts as none."""
    store = StateStore(root=str(root / "sbs"), register=str(root / "register"))
    store.enter("s1", SHIM)
    path = root / "register" / "s1"

    def read(data: bytes) -> object:
        _write(path, data)
        return store.entered("s1")

    return path.read_bytes(), read


def _claim(root: Path) -> tuple[bytes, Read]:
    """A damaged record is made anew from the API server's claim."""
    claims = Claims(specs=root / "cdi", records=root)
    claims.prepare("u1", "c", (PREPARED,))
    path = root / "u1.json"

    def read(data: bytes) -> object:
        _write(path, data)
        if not (devices := claims.recorded("u1")):
            raise InvalidArgument("made anew")
        return devices

    return path.read_bytes(), read


def _manifest(root: Path) -> tuple[bytes, Read]:
    manifest = Manifest(release="0.2.0", entries=(ManifestEntry(path="/etc/x", digests=("0" * 64,)),))
    path = Path(manifest_path(str(root)))
    found = encoded(manifest)
    assert isinstance(found, tuple)

    def read(data: bytes) -> object:
        _write(path, data)
        return read_manifest(Disk(), str(root))

    return found[0], read


def _cdi(data: bytes) -> object:
    """The library's own error: it imports none of ours."""
    try:
        return cdi.parse_spec(document_of(data, "x.yaml"), "x.yaml")
    except cdi.CdiError as error:
        raise InvalidArgument(str(error)) from error


def _runtimes(data: bytes) -> object:
    """dockerd's own configuration; `install` names the file in its error."""
    try:
        return members_in(data.decode(errors="replace"), ("pykata",))
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


def _config(root: Path) -> tuple[bytes, Read]:
    path = root / "c.toml"

    def read(data: bytes) -> object:
        _write(path, data)
        return read_source(named_file(str(path)), {})

    return CONFIG, read


KINDS: dict[str, Callable[[Path], tuple[bytes, Read]]] = {
    "state": _state,
    "state of delete": _state_of_delete,
    "register": _register,
    "manifest": _manifest,
    "configuration": _config,
    "template": lambda _: (msgspec.json.encode(TEMPLATE), _json(Template)),
    "tombstone": lambda _: (msgspec.json.encode(LostVm(id="v", service="/s", found_s=5)), _json(LostVm)),
    "claim": _claim,
    "placement": lambda _: (msgspec.json.encode(PLACEMENT), _json(Placement)),
    "instances": lambda _: (INSTANCES, lambda data: read_instances(data, "/i")),
    "direct network": lambda _: (DIRECT, lambda data: direct_network(data, "/d", sandbox_id="s", queues=1)),
    "mount info": lambda _: (MOUNT_INFO, lambda data: parse_mount_info(data, "/v", "/d")),
    "verity": lambda _: (b'{"roothash": "00", "hashoffset": 4096}', lambda data: layer_verity("/l", data)),
    "spec": lambda _: (SPEC, lambda data: parse_spec(data, "config.json")),
    "devices": lambda _: (CDI, _cdi),
    "initdata": lambda _: (INITDATA, lambda data: initdata.parse(data, "annotation")),
    "runtimes": lambda _: (b'{"runtimes": {"pykata": {"runtimeType": "x"}}}\n', _runtimes),
}
SEALED = frozenset({"state", "state of delete", "manifest", "claim"})


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_by_a_declared_error_and_never_obeyed(kind: str, tmp_path: Path) -> None:
    good, read = KINDS[kind](tmp_path)
    chance = random.Random(kind)
    whole = None
    if kind in SEALED:
        whole = read(good)
    obeyed = []
    for _ in range(MUTATIONS):
        data = _damaged(good, chance)
        try:
            found = read(data)
        except ShimError:
            continue
        if whole is not None and found != whole:
            obeyed.append(data)

    assert obeyed == []


def _damaged(good: bytes, chance: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 1, 4))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                data[at : at + 1] = b"\xff"
            case 3:
                data[at:at] = chance.choice((b"[" * 3000, b"9" * 5000, b'"', b"\\ud800", b"null", b"\0", b"NaN", b"-1"))
            case 4:
                del data[at : at + chance.randrange(9)]
            case _:
                data[at : at + 4] = data[:4]
    return bytes(data)
