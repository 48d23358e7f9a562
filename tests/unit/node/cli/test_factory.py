"""`pyshim factory` without a VM: what is listed, found and removed."""

import json
import os
from pathlib import Path

import pytest

from pyshim.node.cli.command import run
from pyshim.resources.templates.plan import MachineFacts
from pyshim.resources.templates.store import TemplateStore, write_record
from tests.fakes.vm_config import vm_config, with_memory


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with templates, whose guest is three small files."""
    keys = {name: str(tmp_path / name) for name in ("path", "kernel", "initrd")}
    for path in keys.values():
        Path(path).write_bytes(b"x")
    lines = [f'{name} = "{path}"' for name, path in keys.items()]
    text = "\n".join(
        ["[hypervisor.qemu]", *lines, 'accelerator = "tcg"', 'virtio_fs_daemon = "/bin/true"', "[factory]"]
    )
    path = tmp_path / "configuration.toml"
    path.write_text(f'{text}\nenable_template = true\ntemplate_path = "{tmp_path}/templates"\n')
    return path


def asked(verb: str, config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["factory", verb, "--config", str(config), *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def stored(config: Path, key: str) -> None:
    store = TemplateStore(str(config.parent / "templates"))
    with store.locked(), store.making(key, 1) as directory:
        for name in ("memory", "state"):
            with open(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(b"x" * (1 << 20))
        facts = MachineFacts(files=(), cpu="", host_kernel="")
        write_record(directory, key, with_memory(vm_config(), boot_mib=1), facts)


def test_no_template_is_made_unless_enabled(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("enable_template = true", "enable_template = false"))

    assert "templates are not enabled" in asked("status", config, capsys)
    assert run(["factory", "init", "--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert f"make template: templates are not enabled: enable_template in [factory] of '{config}'" in error
    assert "/etc/pyshim/warm/configuration.toml" in error
    assert not (config.parent / "templates").exists()


def test_status_says_whether_vms_of_the_configuration_continue(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no template" in asked("status", config, capsys)
    key = json.loads(asked("status", config, capsys, "--json"))["key"]
    stored(config, key)
    stored(config, "0" * 32)

    table = asked("status", config, capsys).splitlines()
    found = json.loads(asked("status", config, capsys, "--json"))

    assert "there is no template" not in table[0]
    current = {line.split()[0]: line.split()[1] for line in table[1:]}
    assert current == {key: "yes", "0" * 32: "no"}
    assert {each["template"]["key"] for each in found["templates"]} == set(current)
    assert found["damaged"] == []


def test_status_names_what_cannot_be_used(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(config, "0" * 32)
    os.truncate(config.parent / "templates" / ("0" * 32) / "state", 5)

    assert "its files have other sizes" in asked("status", config, capsys)
    assert len(json.loads(asked("status", config, capsys, "--json"))["damaged"]) == 1


def test_an_existing_template_stays(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = json.loads(asked("status", config, capsys, "--json"))["key"]
    stored(config, key)

    assert "is there already" in asked("init", config, capsys)


def test_a_machine_that_has_to_boot_gets_no_template(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text().replace("[factory]", "enable_mem_prealloc = true\n[factory]"))

    assert run(["factory", "init", "--config", str(config)]) == 1
    assert "enable_mem_prealloc, enable_hugepages" in capsys.readouterr().err


def test_destroy_removes_all(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(config, "0" * 32)

    assert "1 templates removed" in asked("destroy", config, capsys)
    assert "0 templates removed" in asked("destroy", config, capsys)
