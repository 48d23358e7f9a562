"""`pyshim config`: what it finds, what it shows, what it exits with."""

import tomllib
from pathlib import Path

import pytest

from pyshim.__main__ import operator_main
from pyshim.config.load import build_config
from pyshim.config.sources import read_source
from pyshim.model.task import RuntimeOptions

PROJECT = Path(__file__).parents[4]
PLANTED = """\
[hypervisor.qemu]
initrd = "/initrd"
kernal = "/vmlinuz"
default_vcpus = "two"
default_memory = -1
default_maxmemory = 1e400
machine_type = "pc"
enable_annotations = ["(broken"]
block_device_logical_sector_size = 1000
hotplug_vfio_on_root_bus = true
[agent.kata]
dial_timeout = 30
reconnect_timeout_ms = 3000
[runtme]
enable_debug = true
"""
FOUND = [
    "3: warning: hypervisor.qemu.kernal: is not a known key (did you mean kernel?)",
    "4: error: hypervisor.qemu.default_vcpus: expected a number",
    "5: error: hypervisor.qemu.default_memory: -1 is not between 64 and 4294967296",
    "6: error: hypervisor.qemu.default_maxmemory: 1e400 is not a usable number",
    '7: error: hypervisor.qemu.machine_type: \'pc\' is not one of "", "q35", "microvm", "virt"',
    "8: error: hypervisor.qemu.enable_annotations: '(broken' is not a regular expression: missing ), unterminated "
    "subpattern at position 0",
    "9: error: hypervisor.qemu.block_device_logical_sector_size: 1000 is neither 0 nor a power of two between 512 and "
    "65536",
    "10: warning: hypervisor.qemu.hotplug_vfio_on_root_bus: was removed from Kata: hot_plug_vfio decides where "
    "devices are plugged",
    "13: error: agent.kata.reconnect_timeout_ms: contradicts agent.kata.dial_timeout, which is the same key",
    "14: warning: runtme: is not a known table (did you mean runtime?)",
]
STARTS = "[hypervisor.qemu]\nkernel = '/bin/true'\ninitrd = '/bin/true'\nshared_fs = 'none'\npath = '/bin/true'\n"
"""A file of which nothing is missing on this host."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.toml"


def test_check_finds_ten_planted_mistakes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(PLANTED)

    assert operator_main(["config", "check", "--elsewhere", str(file)]) == 1

    *lines, summary = capsys.readouterr().out.splitlines()
    mistakes = [line for line in lines if ": note: " not in line]
    assert mistakes == [f"{file}:{line}" for line in FOUND]
    assert summary == f"{file}: 3 honoured, 0 no effect, 0 refused, 1 removed, 2 unknown; 7 errors"


def test_check_of_a_clean_file_is_quiet_and_exits_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"{STARTS}default_vcpus = 2\n")

    assert operator_main(["config", "check", "--strict", str(file)]) == 0

    assert capsys.readouterr().out == f"{file}: 5 honoured, 0 no effect, 0 refused, 0 removed, 0 unknown; 0 errors\n"


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--strict"], 1)])
def test_an_unknown_key_is_an_error_only_when_strict(file: Path, words: list[str], code: int) -> None:
    file.write_text(f"{STARTS}[runtime]\nenable_debgu = true\n")

    assert operator_main(["config", "check", *words, str(file)]) == code


def test_check_gives_every_verdict_and_its_reason(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        "[hypervisor.qemu]\ndefault_vcpus = 1\nenable_iommu_platform = true\n"
        "disable_guest_selinux = false\nrootless = true\n"
        "kernel = '/no/such/kernel'\nimage = '/bin/true'\n"
    )

    assert operator_main(["config", "check", "--all", str(file)]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert f"{file}:2: fine: hypervisor.qemu.default_vcpus: honoured" in lines
    why = "not implemented yet: virtio devices reach all of the guest's memory"
    assert f"{file}:3: note: hypervisor.qemu.enable_iommu_platform: no effect: {why}" in lines
    assert (
        f"{file}:4: error: hypervisor.qemu.disable_guest_selinux:"
        " not implemented yet: no sandbox starts with this value" in lines
    )
    assert f"{file}:5: fine: hypervisor.qemu.rootless: honoured" in lines
    kernel = "'/no/such/kernel' does not exist on this host: no sandbox starts"
    assert f"{file}:6: error: hypervisor.qemu.kernel: {kernel}" in lines


CONFIDENTIAL = f"{STARTS}confidential_guest = true\nfirmware = '/bin/true'\n"
NO_SANDBOX_STARTS = [
    (
        "[hypervisor.clh]\n",
        ":1: error: hypervisor.clh: is not supported, only qemu and remote: the file is for another VMM",
    ),
    (
        f"{STARTS}disable_guest_selinux = false\n",
        "disable_guest_selinux: not implemented yet: no sandbox starts with this value",
    ),
    (
        f'{STARTS}[runtime]\ninternetworking_model = "l3forwarding"\n',
        "internetworking_model: not supported: no sandbox starts with this value",
    ),
    ('[hypervisor.qemu]\nimage = "/i"\n', "read kernel in"),
    ('[hypervisor.qemu]\nkernel = "/k"\n', "neither image nor initrd is set"),
    (CONFIDENTIAL.replace("none", "virtio-fs"), 'confidential_guest needs "none"'),
    (f"{STARTS}sev_snp_guest = true\n", "needs confidential_guest = true"),
    (f"{STARTS}[runtime]\nvfio_device_kinds = ['x']\n", "'x' is neither VENDOR:CLASS=KIND nor"),
]


@pytest.mark.parametrize(("text", "said"), NO_SANDBOX_STARTS, ids=[row[1] for row in NO_SANDBOX_STARTS])
def test_check_fails_for_a_file_with_which_no_sandbox_starts(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file.write_text(text)

    assert operator_main(["config", "check", "--elsewhere", str(file)]) == 1

    errors = [line for line in capsys.readouterr().out.splitlines() if ": error: " in line]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{CONFIDENTIAL}", "confidential_guest in"),
        (f"{STARTS}default_memory = 4294967296\n", "do not fit on this host"),
    ],
)
def test_check_asks_this_host_unless_the_file_is_anothers(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """No host has so much, and where tests run there are no confidential guests."""
    file.write_text(text)

    assert operator_main(["config", "check", "--elsewhere", str(file)]) == 0
    assert operator_main(["config", "check", str(file)]) == 1

    errors = [line for line in capsys.readouterr().out.splitlines() if ": error: " in line]
    assert len(errors) == 1
    assert said in errors[0]


def test_show_names_the_origin_of_each_value(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        '[hypervisor.qemu]\nenable_annotations = ["default_vcpus"]\ndefault_memory = 512\nmemory_slots = 2\n'
        "enable_iommu_platform = true\n"
    )
    (file.parent / "config.d").mkdir()
    drop_in = file.parent / "config.d/10.toml"
    drop_in.write_text("[hypervisor.qemu]\nmemory_slots = 3\n")
    name = "io.katacontainers.config.hypervisor.default_vcpus"

    assert operator_main(["config", "show", str(file), "--annotation", f"{name}=1.5"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"# {file}"
    assert f"default_vcpus = 1.5  # annotation {name}" in lines
    assert f"default_memory = 512  # {file}:3" in lines
    assert f"memory_slots = 3  # {drop_in}:2" in lines
    assert "default_maxvcpus = 0  # default" in lines
    why = "not implemented yet: virtio devices reach all of the guest's memory"
    assert f"enable_iommu_platform = true  # {file}:5; no effect: {why}" in lines
    assert not any(line.startswith("kubelet_root_dir") for line in lines)


@pytest.mark.parametrize("words", [[], ["--all"]], ids=["what counts", "all"])
def test_what_show_prints_is_the_same_configuration(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    file.write_text(
        '[hypervisor.qemu]\ndefault_vcpus = 0.1\nkernel = "../k"\nkernel_params = "a=\\"b c\\" \\u007f \\\\"\n'
        '[agent.kata]\nkernel_modules = ["a b=1", "ü"]\nreconnect_timeout_ms = 1500\n'
    )
    original = build_config(read_source(RuntimeOptions(config_path=str(file), config_body=b""), {}))

    assert operator_main(["config", "show", *words, str(file)]) == 0

    shown = capsys.readouterr().out
    tomllib.loads(shown)
    again = build_config(read_source(RuntimeOptions(config_path="", config_body=shown.encode()), {}))
    assert again.hypervisor == original.hypervisor
    assert again.runtime == original.runtime
    assert again.agent == original.agent


@pytest.mark.parametrize(
    ("annotation", "error"),
    [
        ("novalue", "expected NAME=VALUE"),
        ("io.katacontainers.config.hypervisor.path=/bin/sh", "not enabled by enable_annotations"),
    ],
)
def test_show_refuses_what_a_sandbox_would(
    file: Path, capsys: pytest.CaptureFixture[str], annotation: str, error: str
) -> None:
    file.write_text("")

    assert operator_main(["config", "show", str(file), "--annotation", annotation]) == 1

    assert error in capsys.readouterr().err


def test_show_warns_of_values_no_sandbox_starts_with(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[hypervisor.qemu]\ndisable_guest_selinux = false\n")

    assert operator_main(["config", "show", str(file)]) == 0

    captured = capsys.readouterr()
    assert f"disable_guest_selinux = false  # {file}:2; refused: not implemented yet" in captured.out
    assert captured.err == (
        f"pyshim: no sandbox starts with hypervisor.qemu.disable_guest_selinux = false ({file}:2):"
        " not implemented yet\n"
    )
