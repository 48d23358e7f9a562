"""Every argv of the shipped configurations, on four kinds of hosts, against what each version of QEMU understands.

After a wanted change: `PYSHIM_UPDATE_GOLDEN=1 pytest tests/unit/hypervisors/test_grammar.py`, then read the diff.
"""

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import check_config, qemu_argv
from hypervisors.qemu.guards import Encryption
from pyshim.config.load import build_config
from pyshim.config.sources import read_source
from pyshim.model.confidential import NO_TEE, Tee, TeeFacts
from pyshim.model.errors import ShimError
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import SandboxId
from pyshim.model.oci import ContainerKind, parse_spec
from pyshim.model.task import RuntimeOptions
from pyshim.model.vm import ExtensionDisk, LocalVm
from pyshim.pod.plan.sandbox import sandbox_plan
from tests.fakes.facts import PLENTY, host_facts
from tests.fakes.vm_config import nic, vm_config
from tests.grammar.check import minimum_version, problems, tables
from tests.grammar.introspect import introspected

from .test_cmdline import CONFIGS, argv_of, as_text
from .test_guards import GUARDS, confidential

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/qemu/shipped"
QEMU = "/usr/bin/qemu-system-x86_64"
SPEC = b'{"ociVersion": "1.1.0", "process": {"args": ["sh"], "cwd": "/"}, "root": {"path": "rootfs"}}'
SHIPPED = ("qemu", "qemu-nvidia-gpu", "qemu-tdx", "qemu-snp", "qemu-sev")
AMD = TeeFacts(
    available=frozenset({Tee.SEV_ES, Tee.SEV}),
    probed=("'/sys/module/kvm_amd/parameters/sev_snp' says 'N'",),
    quote_socket="",
)
HOSTS = {
    "tdx-host": TeeFacts(available=frozenset({Tee.TDX}), probed=(), quote_socket="/run/tdx-qgs/qgs.socket"),
    "snp-host": replace(AMD, available=AMD.available | {Tee.SNP}),
    "sev-es-host": AMD,
    "plain-host": replace(NO_TEE, probed=("'/sys/module/kvm_intel/parameters/tdx' says 'N'",)),
}
needs_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")


def planned(shipped: str, facts: TeeFacts) -> LocalVm:
    """The VM of a shipped file on a KVM host with `facts`, with one NIC of two queues."""
    path = str(ROOT / f"configs/configuration-{shipped}.toml")
    host = host_facts(
        kvm_usable=True,
        kvm_reason="the CPU shows vmx",
        vhost_vsock=True,
        vhost_net=True,
        cgroup_mode=CgroupMode.V2,
        systemd=True,
        tee=facts,
    )
    plan = sandbox_plan(
        sandbox_id=SandboxId("pod1"),
        kind=ContainerKind.SINGLE_CONTAINER,
        uuid="6f9619ff-8b86-4011-b42d-00c04fc964ff",
        spec=parse_spec(SPEC, "config.json"),
        config=build_config(read_source(RuntimeOptions(config_path=path, config_body=b""), {})),
        host=host,
        capacity=PLENTY,
        sources={},
    )
    # An empty `path` is looked for on this machine.
    return replace(plan.vm, hypervisor_path="qemu-system-x86_64", nics=(nic(0, taps=(40, 41), vhosts=(50, 51)),))


def argv(config: LocalVm) -> tuple[str, ...]:
    check_config(config)
    return qemu_argv(config, guest_cid=4242, image_bytes=64 << 20, encryption=Encryption(51, 1))


def described(shipped: str, host: str) -> str:
    """The argv and the oldest QEMU that understands it; or why there is none."""
    try:
        words = argv(planned(shipped, HOSTS[host]))
    except ShimError as error:
        return f"# refused: {error}\n".replace(f"{ROOT}/", "@ROOT@/")
    minimum = minimum_version(words)
    return f"# QEMU {minimum} or later\n{as_text(words)}".replace(f"{ROOT}/", "@ROOT@/")


CELLS = [(shipped, host) for shipped in SHIPPED for host in HOSTS]


@pytest.mark.parametrize(("shipped", "host"), CELLS, ids=lambda value: value)
def test_argv_of_a_shipped_file_on_a_host_is_the_golden_one(shipped: str, host: str) -> None:
    file = GOLDEN / f"{shipped}.{host}.txt"
    text = described(shipped, host)
    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        file.write_text(text)

    assert text == file.read_text()


def test_every_golden_file_belongs_to_a_cell() -> None:
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted(f"{one}.{host}.txt" for one, host in CELLS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_version_accepts_the_plain_argvs(name: str) -> None:
    words = argv_of(CONFIGS[name])

    assert not [problem for grammar in tables().values() for problem in problems(words, grammar)]


@needs_qemu
def test_the_installed_qemu_accepts_every_argv_of_its_version() -> None:
    grammar = introspected(QEMU)
    version = tuple(map(int, grammar.version.split(".")))
    everything = {
        **{name: argv_of(config) for name, config in CONFIGS.items()},
        **{name: argv(confidential(guard)) for name, guard in GUARDS.items()},
    }

    found = {
        name: problems(words, grammar)
        for name, words in everything.items()
        if tuple(map(int, minimum_version(words).split("."))) <= version
    }

    assert len(found) > len(CONFIGS)
    assert not any(found.values()), found


@needs_qemu
def test_introspection_gives_what_its_table_holds() -> None:
    grammar = introspected(QEMU)
    if grammar.version not in tables():
        pytest.skip(f"no table of QEMU {grammar.version}")

    known = tables()[grammar.version]

    assert (grammar.objects, grammar.devices) == (known.objects, known.devices)
    assert (grammar.tap, grammar.vhost_user) == (known.tap, known.vhost_user)


def started(words: tuple[str, ...], *, asked: str = "quit") -> subprocess.CompletedProcess[str]:
    """A QEMU without guest that reads `words`, is `asked` and then quits; -S keeps it from running anything.

    An abort leaves no core file.
    """
    base = ("prlimit", "--core=0", QEMU, "-nodefaults", "-display", "none", "-S", "-monitor", "stdio")
    text = f"{asked}\nquit\n"
    return subprocess.run([*base, *words], input=text, capture_output=True, text=True, timeout=60, check=False)


def devices_of(machine: str) -> set[str]:
    """The types of the devices that the installed QEMU gives that machine, without any of ours."""
    ended = started(("-machine", machine), asked="info qtree")
    assert ended.returncode == 0, ended.stderr
    return set(re.findall(r"dev: ([\w.-]+)", ended.stdout))


@needs_qemu
def test_a_guest_has_no_device_of_the_board_that_it_does_not_use() -> None:
    words = argv_of(CONFIGS["q35-virtiofs-serial-tcg"])
    machine = words[words.index("-machine") + 1].removesuffix(",memory-backend=ram0")
    unused = {"ich9-ahci", "ICH9-SMB", "smbus-eeprom", "vmport", "vmmouse", "hpet"}

    assert unused <= devices_of("q35,accel=tcg")  # the control
    assert not unused & devices_of(machine)
    assert not unused & devices_of("microvm,accel=tcg")
    assert "hpet" in devices_of(f"{machine},hpet=on")  # as `machine_accelerators` would say


@needs_qemu
@pytest.mark.parametrize("name", ["sev", "sev-es"])
def test_the_installed_qemu_takes_the_sev_object_and_stops_at_the_hardware(name: str) -> None:
    """Accepted by the parser on a machine without protection; with it, what is missing is the hardware, not a word.

    Releases before 9 abort there under emulation instead of saying so, after the object has been accepted.
    """
    words = argv(confidential(GUARDS[name]))
    text = words[words.index("-object") + 1]

    alone = started(("-machine", "none", "-object", text))
    wrong = started(("-machine", "none", "-object", f"{text},no-such=1"))

    assert (alone.returncode, alone.stderr) == (0, "")
    assert wrong.returncode != 0
    assert "no-such" in wrong.stderr
    machine = "q35,accel=tcg,kernel-irqchip=split,confidential-guest-support=sev"
    protected = started(("-machine", machine, "-object", text))
    assert protected.returncode != 0
    assert "no-such" not in protected.stderr
    assert "sev" in protected.stderr.lower() or protected.returncode < 0 or "confidential" in protected.stderr


@needs_qemu
@pytest.mark.parametrize("name", ["initdata", "extension-coco"])
def test_a_read_only_disk_beside_the_image_is_realized_with_its_serial_number(tmp_path: Path, name: str) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes(bytes(512))
    extension = ExtensionDisk(name="coco", path=str(disk))
    config = vm_config(initdata=str(disk)) if name == "initdata" else vm_config(extensions=(extension,))
    words = argv_of(config)
    node, device = [(option, value) for option, value in pairwise(words) if name in value]

    ended = started(("-machine", "q35,accel=tcg", *node, *device))

    assert f"serial={name}" in device[1]
    assert "read-only=on" in node[1]
    assert (ended.returncode, ended.stderr) == (0, "")
