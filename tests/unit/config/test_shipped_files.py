"""The files in configs/, which have no mistakes and set nothing that is not supported; Kata's files, and users'."""

import json
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pyshim.__main__ import operator_main
from pyshim.config.catalogue import KEYS, spellings
from pyshim.config.effective import Level
from pyshim.config.keys import Table, Verdict
from pyshim.config.load import build_config, load_config, warnings
from pyshim.config.sources import Source, read_source
from pyshim.config.values import toml_value
from pyshim.model.errors import ShimError
from scripts.config_reference import commented_toml, markdown

from .documents import examined, options

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs").glob("configuration-*.toml"))
CONFIDENTIAL = ("configuration-qemu-tdx.toml", "configuration-qemu-snp.toml", "configuration-qemu-sev.toml")


def test_every_kind_of_vm_has_its_file() -> None:
    names = {path.name for path in FILES}

    others = {"configuration-qemu.toml", "configuration-qemu-nvidia-gpu.toml", "configuration-reference.toml"}
    assert names == {"configuration-remote.toml", *CONFIDENTIAL, *others}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_file_has_neither_errors_nor_unknown_keys(path: Path) -> None:
    assert [finding for finding in examined(path).findings if finding.level > Level.NOTE] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_file_passes_config_check(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["config", "check", "--elsewhere", str(path)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIDENTIAL)
def test_files_for_confidential_guests_set_nothing_unsupported(name: str) -> None:
    config = load_config(options(ROOT / "configs" / name), {}, {})

    assert config.hypervisor.confidential_guest
    assert config.hypervisor.shared_fs == "none"
    assert config.runtime.emptydir_mode == "block-encrypted"


def test_every_key_of_the_file_for_remote_vms_has_an_effect() -> None:
    path = ROOT / "configs" / "configuration-remote.toml"
    config = load_config(options(path), {}, {})

    assert config.hypervisor_name == "remote"
    assert config.runtime.experimental_force_guest_pull
    assert {finding.verdict for finding in examined(path).findings} == {Verdict.HONOURED}


def test_every_key_of_the_plain_file_is_honoured() -> None:
    findings = examined(ROOT / "configs/configuration-qemu.toml").findings

    assert {finding.verdict for finding in findings} == {Verdict.HONOURED}


def test_the_reference_file_sets_every_key_to_its_default_but_the_guests_files() -> None:
    path = ROOT / "configs/configuration-reference.toml"
    effective = examined(path)

    assert {setting.key.name: setting.is_default for setting in effective.settings.values()} == dict.fromkeys(
        (key.name for key in KEYS), False
    )
    guest_files = {key: effective.source.document["hypervisor"]["qemu"][key] for key in ("kernel", "image")}
    rest = Source(path=str(path), directory=str(path.parent), document={"hypervisor": {"qemu": guest_files}})
    assert build_config(rest) == build_config(effective.source)


@pytest.mark.parametrize(
    ("path", "text"),
    [("docs/CONFIGURATION.md", markdown()), ("configs/configuration-reference.toml", commented_toml())],
    ids=["docs/CONFIGURATION.md", "configs/configuration-reference.toml"],
)
def test_what_is_generated_is_current(path: str, text: str) -> None:
    verb = "python -m scripts.config_reference" + (" --toml" if path.endswith("toml") else "")

    assert (ROOT / path).read_text() == text, f"write it anew: {verb} > {path}"


@pytest.mark.parametrize("path", [path for path in FILES if "reference" not in path.name], ids=lambda path: path.name)
def test_a_shipped_file_lets_pods_set_no_annotation_that_only_contains_a_permitted_name(path: Path) -> None:
    effective = examined(path)

    if effective.of(Table.HYPERVISOR, "enable_annotations").value:
        assert effective.of(Table.HYPERVISOR, "annotation_match").value == "anchored"


KATA = json.loads((Path(__file__).parents[2] / "golden" / "config" / "kata-4.1.json").read_text(), parse_float=Fraction)
KATA_FILES: dict[str, dict[str, Any]] = KATA["files"]
STARTS = [name for name, file in KATA_FILES.items() if file["starts"]]


def written(directory: Path, name: str) -> Path:
    lines = [f"hypervisor.{KATA_FILES[name]['hypervisor']}.enable_debug = false"]
    lines += [f"{dotted} = {toml_value(value)}" for dotted, value in KATA_FILES[name]["settings"].items()]
    path = directory / "configuration.toml"
    path.write_text("\n".join([*lines, ""]))
    return path


def test_no_key_of_katas_is_unknown() -> None:
    tables = {str(table): table for table in Table}
    unknown = []
    for dotted in KATA["names"]:
        table, _, name = dotted.replace("hypervisor.factory", "factory").rpartition(".")
        if (tables[table], name) not in spellings():
            unknown.append(dotted)

    assert unknown == []
    assert len(KATA_FILES) == 29


@pytest.mark.parametrize("name", KATA_FILES)
def test_the_verdict_on_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = KATA_FILES[name]
    path = written(tmp_path, name)

    code = operator_main(["config", "check", "--elsewhere", str(path)])

    errors = [line for line in capsys.readouterr().out.splitlines() if ": error: " in line]
    assert (code, len(errors)) == (0 if file["starts"] else 1, len(file["errors"]))
    assert all(f": error: {name}: " in line for name, line in zip(file["errors"], errors, strict=True))
    effective = examined(path)
    named = {warning.partition(" ")[0] for warning in warnings(effective)}
    assert named == set(file["in_vain"])
    assert all(finding.level < Level.WARNING for finding in effective.findings if finding.verdict is not None)


KATAS_ARM64 = {
    "machine_type": "virt",
    "machine_accelerators": "",
    "cpu_features": "pmu=off",
    "kernel_params": "cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1",
    "path": "/opt/kata/bin/qemu-system-aarch64",
    "valid_hypervisor_paths": ["/opt/kata/bin/qemu-system-aarch64"],
    "firmware": "/opt/kata/share/aavmf/AAVMF_CODE.fd",
    "firmware_volume": "/opt/kata/share/aavmf/AAVMF_VARS.fd",
    "pflashes": [],
}
"""Where Kata's configuration-qemu.toml of arm64 differs from that of x86-64. Source: Kata's arch/arm64-options.mk and
Makefile."""


def test_katas_file_for_arm64_has_the_verdicts_of_that_for_x86(tmp_path: Path) -> None:
    file = KATA_FILES["go/configuration-qemu"]
    settings = {**file["settings"], **{f"hypervisor.qemu.{key}": value for key, value in KATAS_ARM64.items()}}
    text = "\n".join(f"{dotted} = {toml_value(value)}" for dotted, value in settings.items())

    effective = examined(tmp_path / "configuration.toml", text)

    assert effective.errors() == ()
    named = {warning.partition(" ")[0] for warning in warnings(effective)}
    assert named == {*file["in_vain"], "hypervisor.qemu.firmware_volume"}
    assert effective.of(Table.HYPERVISOR, "machine_type").value == "virt"


def _qemu(keys: str) -> str:
    return f'[hypervisor.qemu]\npath = "/bin/true"\nkernel = "/etc/passwd"\nimage = "/etc/passwd"\n{keys}\n'


USERS_FILES = {
    "a key of their own": _qemu("my_key = 1"),
    "use_vsock of Kata 1": _qemu("use_vsock = true\n[proxy.kata]\npath = '/p'"),
    "use_vsock of pyshim 0.1": _qemu("use_vsock = 'vhost-user'"),
    "bridges above five": _qemu("default_bridges = 7"),
    "all CPUs": _qemu("default_vcpus = -1"),
    "more CPUs than any host": _qemu("default_vcpus = 4095"),
    "no memory": _qemu("default_memory = 0"),
    "empty choices": _qemu("machine_type = ''\nshared_fs = ''\n[runtime]\nvfio_mode = ''\nemptydir_mode = ''"),
    "Firecracker's": "[hypervisor.firecracker]\npath = '/f'\nkernel = '/k'\nblock_device_driver = 'virtio-mmio'\n",
    "a choice that is refused": _qemu("shared_fs = 'virtio-9p'\nmy_key = 1"),
    "two mistakes": _qemu("default_vcpus = 'two'\ndefault_memory = -1"),
    "a contradiction": _qemu("hot_plug_vfio = 'root-port'\ncold_plug_vfio = 'root-port'"),
}
"""Habits that users' files show, each alone."""


@pytest.mark.parametrize("name", [*KATA_FILES, *USERS_FILES])
def test_config_check_says_what_a_start_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = written(tmp_path, name) if name in KATA_FILES else tmp_path / "configuration.toml"
    if name in USERS_FILES:
        path.write_text(USERS_FILES[name])

    code = operator_main(["config", "check", "--elsewhere", "--json", str(path)])
    checked = json.loads(capsys.readouterr().out)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pyshim.config"):
        error = _error_of_start(path)

    errors = [each for each in checked if each["level"] == "error"]
    assert (code, bool(errors)) == ((1, True) if error else (0, False))
    assert not errors or (errors[0]["key"] in error and errors[0]["text"].split(":")[0] in error)
    said = {(vars(record)["file"], vars(record)["problem"]) for record in caplog.records}
    remarks = {(each["place"], f"{each['key']} {each['text']}") for each in checked if each["level"] == "warning"}
    in_vain = {
        (each["place"], f"{each['key']} has no effect: {each['text']}")
        for each in checked
        if each["verdict"] == "no effect"
    }
    assert error or remarks <= said <= remarks | in_vain


def _error_of_start(path: Path) -> str:
    try:
        load_config(options(path), {}, {})
    except ShimError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", STARTS)
def test_a_file_of_the_rust_runtime_is_sized_by_its_overheads(tmp_path: Path, name: str) -> None:
    config = build_config(read_source(options(written(tmp_path, name)), {}))

    by_overhead = any(".overhead_" in key for key in KATA_FILES[name]["settings"])
    assert config.runtime.sizing_policy == ("overhead" if by_overhead else "sum")
