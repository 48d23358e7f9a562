"""`pyshim check`: verdicts on made-up hosts, each a tree of files, and the command on this one."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.units import MIB
from pyshim.node.cli.check_host import HostReport, host_report
from pyshim.node.cli.check_verdicts import HostVerdict, VerdictLevel, verdicts
from pyshim.node.cli.command import run
from pyshim.node.install import handlers
from pyshim.node.install.drop_ins import crio_text
from pyshim.node.install.handlers import HANDLERS
from tests.fakes.inputs import config

RELEASE = "6.1.0-test"
MODULES = "kernel/net/{0}.ko.xz: \n"
CPU = "flags\t\t: fpu vmx sse4_1\n"
CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.pykata]
runtime_type = "io.containerd.pykata.v2"
"""
CONTAINERD_2 = """version = 3
imports = ["conf.d/*.toml"]
[plugins."io.containerd.cri.v1.images"]
snapshotter = "erofs"
"""
DROP_IN = """version = 3
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.pykata]
runtime_path = "/opt/pyshim/bin/containerd-shim-pykata-v2"
options.ConfigPath = "/etc/pyshim/c.toml"
"""
CRIO: dict[str, str | None] = {
    "etc/containerd/config.toml": None,
    "run/containerd/containerd.sock": None,
    "run/crio/crio.sock": "",
    "etc/crio/crio.conf": '[crio.runtime]\n[crio.runtime.runtimes.crun]\nruntime_path = "/c"\n',
    "etc/crio/crio.conf.d/99-pyshim.conf": crio_text(HANDLERS[:1], "/opt/pyshim/bin/containerd-shim-pykata-v2"),
}
"""Changes that make the node one of CRI-O."""
GOOD: dict[str, str] = {
    "proc/cpuinfo": CPU,
    "proc/sys/kernel/osrelease": f"{RELEASE}\n",
    "proc/meminfo": "MemTotal: 8388608 kB\n",
    "sys/devices/system/cpu/online": "0-3\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "run/systemd/system/.keep": "",
    "dev/kvm": "",
    "dev/vhost-vsock": "",
    "dev/vhost-net": "",
    "dev/net/tun": "",
    f"lib/modules/{RELEASE}/modules.builtin": "kernel/drivers/net/tun.ko\n",
    f"lib/modules/{RELEASE}/modules.dep": "".join(
        MODULES.format(name) for name in ("sch_ingress", "cls_u32", "act_mirred", "vhost_net", "vhost-vsock")
    ),
    "k": "",
    "i": "",
    "etc/containerd/config.toml": CONTAINERD,
    "run/containerd/containerd.sock": "",
    "usr/local/bin/containerd-shim-pykata-v2": "#!/bin/sh\n",
}
"""A node on which nothing is amiss, as files; a test leaves some out or replaces them."""
SAYS = {
    "qemu": "QEMU emulator version 9.2.1",
    "v": "virtiofsd 1.13.0",
    "containerd": "containerd containerd.io 1.7.27 abc",
    "crio": "crio version 1.36.3",
}


def programs(**changes: str | OSError | Exception) -> Callable[[Sequence[str]], str]:
    answers: dict[str, str | Exception] = {**SAYS, **changes}

    def answer(argv: Sequence[str]) -> str:
        found = answers[os.path.basename(argv[0])]
        if isinstance(found, Exception):
            raise found
        return found

    return answer


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., HostReport]:
    def make(
        files: dict[str, str | None] | None = None,
        qemu: dict[str, Any] | None = None,
        says: dict[str, Any] | None = None,
        **more: Any,
    ) -> HostReport:
        for name, text in {**GOOD, **(files or {})}.items():
            if text is not None:
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                path.chmod(0o755)
        read = config(**(qemu or {}))
        good = replace(read, runtime=replace(read.runtime, sandbox_cgroup_only=True))
        report = host_report(
            good,
            root=str(tmp_path),
            run=programs(**(says or {})),
            create_vm=lambda _fd: os.open("/dev/null", os.O_RDONLY),
        )
        return replace(report, **{"machine": "x86_64", "is_root": True, "has_filter": True, **more})

    return make


def of(found: Sequence[HostVerdict], subject: str) -> HostVerdict:
    return next(each for each in found if each.subject == subject)


def test_a_node_on_which_nothing_is_amiss_is_ok_in_every_line(made_up: Callable[..., HostReport]) -> None:
    found = verdicts(made_up())

    assert [(each.subject, each.level, each.text) for each in found if each.level is not VerdictLevel.OK] == []
    assert {each.subject for each in found} == {
        *("cpu", "kvm", "vhost-vsock", "vhost-net", "modules", "cgroups", "configuration", "qemu", "virtiofsd"),
        *("guest", "tee", "seccomp", "containerd", "handler", "shim", "snapshotter", "overhead"),
    }
    assert of(found, "cpu").text == "x86_64, 4 CPUs, 8192 MiB"
    assert of(found, "snapshotter").text == "overlayfs (runtime pykata)"


@pytest.mark.parametrize(
    ("files", "qemu", "says", "subject", "level", "text"),
    [
        ({"proc/cpuinfo": "flags: fpu\n"}, {}, {}, "kvm", "warning", "neither vmx nor svm: QEMU emulates"),
        ({"proc/cpuinfo": "flags: fpu\n"}, {"accelerator": "kvm"}, {}, "kvm", "missing", "neither vmx nor svm"),
        ({"dev/kvm": None}, {}, {}, "kvm", "warning", "kvm': ENOENT"),
        ({"dev/vhost-vsock": None}, {}, {}, "vhost-vsock", "warning", "the agent is reached over a serial port"),
        ({"dev/vhost-vsock": None}, {"agent_channel": "vhost-vsock"}, {}, "vhost-vsock", "missing", "ENOENT"),
        ({"dev/vhost-net": None}, {}, {}, "vhost-net", "warning", "QEMU copies packets itself"),
        ({"dev/vhost-net": None}, {"disable_vhost_net": True}, {}, "vhost-net", "ok", "not needed"),
        ({f"lib/modules/{RELEASE}/modules.dep": ""}, {}, {}, "modules", "warning", "sch_ingress, cls_u32, act_mirred"),
        (
            {"dev/net/tun": None, f"lib/modules/{RELEASE}/modules.builtin": ""},
            *({}, {}, "tun", "missing", "pods have no network card"),
        ),
        ({"sys/fs/cgroup/cgroup.controllers": None}, {}, {}, "cgroups", "missing", "none is mounted"),
        (
            {"sys/fs/cgroup/cgroup.controllers": None, "sys/fs/cgroup/memory/cgroup.procs": ""},
            *({}, {}, "cgroups", "warning", "version 1, systemd manages them"),
        ),
        ({}, {}, {"qemu": "QEMU emulator version 6.2.0"}, "qemu", "missing", "6.2.0: older than 7.2"),
        ({}, {}, {"qemu": FileNotFoundError(2, "x")}, "qemu", "missing", "'/bin/qemu': ENOENT"),
        ({}, {}, {"qemu": subprocess.CalledProcessError(127, "q")}, "qemu", "missing", "it exited 127"),
        ({}, {}, {"qemu": subprocess.TimeoutExpired("q", 20)}, "qemu", "missing", "it did not answer within 20 s"),
        ({}, {}, {"v": FileNotFoundError(2, "x")}, "virtiofsd", "missing", "'/v': ENOENT"),
        ({}, {}, {"v": "virtiofsd version 7.2.22 (Debian)"}, "virtiofsd", "warning", "supplementary groups"),
        (
            {"k": "\x7fELF Linux version 6.1.0-56-cloud-amd64 (debian)"},
            *({}, {}, "virtiofsd", "warning", "Linux 6.1.0-56-cloud-amd64 in the guest: supplementary groups"),
        ),
        ({"k": "\x7fELF Linux version 6.12.57 (debian)"}, {}, {}, "virtiofsd", "ok", "virtiofsd 1.13.0"),
        ({}, {"shared_fs": "none"}, {"v": FileNotFoundError(2, "x")}, "virtiofsd", "ok", "not needed"),
        ({"k": None}, {}, {}, "guest", "missing", "not there: /k"),
        ({"k": "\0" * 0x38 + "ARMd"}, {}, {}, "guest", "missing", "of another processor than q35's: /k"),
        ({}, {"machine_type": "virt"}, {}, "machine type", "missing", "is of aarch64, and this host's processor is"),
        ({}, {"confidential_guest": True, "confidential_technology": "tdx"}, {}, "tee", "missing", "kvm_intel"),
        ({}, {}, {"containerd": FileNotFoundError(2, "x")}, "containerd", "missing", "ENOENT"),
        ({}, {}, {"containerd": "containerd x 1.5.9"}, "containerd", "missing", "older than 1.6"),
        ({"run/containerd/containerd.sock": None}, {}, {}, "containerd", "warning", "there is no '/run"),
        ({"etc/containerd/config.toml": None}, {}, {}, "handler", "missing", "no runtime of type"),
        ({"etc/containerd/config.toml": "version = "}, {}, {}, "handler", "missing", "Invalid value"),
        ({"etc/containerd/config.toml": "[plugins]\n"}, {}, {}, "handler", "missing", "has version 1"),
        ({"etc/containerd/config.toml": "version = 'x'\n"}, {}, {}, "handler", "missing", "version is not a number"),
        ({"etc/containerd/config.toml": "imports = 3\n"}, {}, {}, "handler", "missing", "imports is not a list"),
        ({"etc/containerd/config.toml": "version = 3\n"}, {}, {}, "handler", "missing", "1.x reads up to 2"),
        (
            {"etc/containerd/config.toml": CONTAINERD.replace("runtimes.runc", "x.runc")},
            *({}, {}, "handler", "missing", "but not runc"),
        ),
        ({"usr/local/bin/containerd-shim-pykata-v2": None}, {}, {}, "shim", "missing", "not on the PATH"),
        ({}, {"shared_fs": "none"}, {}, "snapshotter", "missing", "has to be on a disk"),
    ],
)
def test_a_missing_part_of_a_host_is_named_with_a_hint(
    made_up: Callable[..., HostReport],
    files: dict[str, str | None],
    qemu: dict[str, Any],
    says: dict[str, Any],
    subject: str,
    level: str,
    text: str,
) -> None:
    found = [each for each in verdicts(made_up(files, qemu, says)) if each.subject == subject]

    assert (found[-1].level, text in found[-1].text) == (level, True), found
    assert (found[-1].hint == "") == (level == "ok")


def test_other_machines_and_users_are_named(made_up: Callable[..., HostReport]) -> None:
    found = verdicts(made_up(machine="s390x", is_root=False))

    assert (of(found, "cpu").level, of(found, "user").level) == (VerdictLevel.MISSING, VerdictLevel.WARNING)


def test_a_node_without_libseccomp_is_named_where_it_is_used(made_up: Callable[..., HostReport]) -> None:
    node = made_up(has_filter=False)
    assert node.config is not None
    unconfined = replace(node.config, runtime=replace(node.config.runtime, confine_shim=False))

    lacking = of(verdicts(node), "seccomp")
    assert (lacking.level, lacking.hint) == (VerdictLevel.WARNING, "install libseccomp2")
    assert of(verdicts(replace(node, config=unconfined)), "seccomp").level is VerdictLevel.OK


def test_containerd_2_is_read_with_its_imports(made_up: Callable[..., HostReport]) -> None:
    files = {
        "etc/containerd/config.toml": CONTAINERD_2,
        "etc/containerd/conf.d/pykata.toml": DROP_IN,
        "usr/local/bin/containerd-shim-pykata-v2": None,
    }

    found = verdicts(made_up(files, says={"containerd": "containerd x v2.1.0"}))

    assert of(found, "handler").text == "pykata, configuration '/etc/pyshim/c.toml'"
    assert of(found, "shim").text == "/opt/pyshim/bin/containerd-shim-pykata-v2"
    assert of(found, "snapshotter").text == "erofs (runtime pykata)"


@pytest.mark.parametrize(
    ("qemu", "version", "problem"),
    [
        ({}, "v2.3.4", ""),
        ({"shared_fs": "none"}, "v2.3.4", ""),
        ({"shared_fs": "none"}, "v2.1.9", "erofs: shared_fs is"),
        ({"machine_type": "microvm"}, "v2.3.4", "erofs: an image's layers are disks"),
        ({"machine_type": "microvm"}, "v2.1.9", ""),
    ],
)
def test_a_snapshotter_whose_roots_do_not_reach_the_vm_is_named(
    qemu: dict[str, Any], version: str, problem: str, made_up: Callable[..., HostReport]
) -> None:
    files = {"etc/containerd/config.toml": CONTAINERD_2, "etc/containerd/conf.d/pykata.toml": DROP_IN}

    verdict = of(verdicts(made_up(files, qemu, says={"containerd": f"containerd x {version}"})), "snapshotter")

    assert verdict.level is (VerdictLevel.MISSING if problem else VerdictLevel.OK)
    assert verdict.text.startswith(problem)


def test_a_node_of_crio_is_judged_by_crios_files(made_up: Callable[..., HostReport]) -> None:
    found = verdicts(made_up(CRIO))

    assert [(each.subject, each.level, each.text) for each in found if each.level is not VerdictLevel.OK] == []
    assert of(found, "CRI-O").text == "crio version 1.36.3"
    assert of(found, "handler").text == "pykata, configuration '/etc/pyshim/configuration.toml'"
    assert of(found, "shim").text == "/opt/pyshim/bin/containerd-shim-pykata-v2"
    assert of(found, "snapshotter").text == "overlay (runtime pykata)"


@pytest.mark.parametrize(
    ("files", "says", "subject", "text"),
    [
        ({}, {"crio": FileNotFoundError(2, "x")}, "CRI-O", "'crio': ENOENT"),
        ({"etc/crio/crio.conf.d/99-pyshim.conf": None}, {}, "handler", "name no runtime of type vm"),
        (
            {"etc/crio/crio.conf.d/99-pyshim.conf": "[crio"},
            {},
            "handler",
            "parse '/etc/crio/crio.conf.d/99-pyshim.conf'",
        ),
        ({"etc/crio/crio.conf.d/a/b": ""}, {}, "handler", "read '/etc/crio/crio.conf': EISDIR"),
    ],
)
def test_a_missing_part_of_a_node_with_crio_is_named(
    made_up: Callable[..., HostReport], files: dict[str, str | None], says: dict[str, Any], subject: str, text: str
) -> None:
    found = of(verdicts(made_up({**CRIO, **files}, says=says)), subject)

    assert (found.level, text in found.text, bool(found.hint)) == (VerdictLevel.MISSING, True, True), found


def test_an_import_of_containerd_1_hides_the_plugins_settings_of_the_file(made_up: Callable[..., HostReport]) -> None:
    importing = 'imports = ["/etc/containerd/x.toml"]\n' + CONTAINERD
    other = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".cni]\nbin_dir = "/x"\n'

    found = verdicts(made_up({"etc/containerd/config.toml": importing, "etc/containerd/x.toml": other}))

    assert of(found, "handler").level is VerdictLevel.MISSING


def test_a_configuration_that_cannot_be_read_is_a_verdict(made_up: Callable[..., HostReport]) -> None:
    found = verdicts(made_up(config=None, config_error="read x in 'y': z"))

    assert (of(found, "configuration").level, of(found, "configuration").text) == (
        VerdictLevel.MISSING,
        "read x in 'y': z",
    )


@pytest.mark.parametrize(
    ("cpus", "memory_mib", "level", "text"),
    [
        (1, 2600, "ok", "the configuration needs cpu: 1"),
        (1, 100, "warning", "less than VMs of the configuration take"),
        (0, 2600, "warning", "less than VMs"),
        (1, 90000, "warning", "more than twice"),
    ],
)
def test_the_overhead_is_compared_with_the_configuration(
    made_up: Callable[..., HostReport], cpus: int, memory_mib: int, level: str, text: str
) -> None:
    stated = {"cpu": Fraction(cpus), "memory": Fraction(memory_mib * MIB)}

    verdict = of(verdicts(made_up(), stated), "overhead")

    assert (verdict.level, text in verdict.text) == (level, True), verdict


def test_the_command_judges_this_host_and_says_the_same_to_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[hypervisor.qemu]\npath = '/none/qemu'\nkernel = '/k'\ninitrd = '/i'\nshared_fs = 'none'\n")

    assert run(["check", "--config", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert run(["check", "--config", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)

    qemu = next(each for each in document["verdicts"] if each["subject"] == "qemu")
    assert (document["ok"], qemu["level"]) == (False, "missing")
    assert any(line.startswith("missing  qemu") and qemu["hint"] in line for line in lines)
    assert lines[-1].endswith("missing")


def test_the_configuration_of_a_handler_is_judged_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_OWN_CONFIGS", str(tmp_path))
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "configuration.toml").write_text("[hypervisor")

    assert run(["check", "--handler", "gpu"]) == 1
    assert f"{tmp_path}/gpu/configuration.toml" in "".join(capsys.readouterr().out.split())
    assert run(["check", "--handler", "none"]) == 1
    assert "check handler 'none': " in capsys.readouterr().err
    assert run(["check", "--handler", "gpu", "--config", "x"]) == 2


def test_a_runtimeclass_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("kind: Pod\n")

    assert run(["check", "--runtimeclass", f"{tmp_path}/p.yaml"]) == 1

    assert capsys.readouterr().err == (
        f"pyshim: find RuntimeClass in '{tmp_path}/p.yaml': the file does not hold exactly one\n"
    )
