"""The files in configs/: without mistakes, and honest about what is not there yet."""

from pathlib import Path

import pytest

from pyshim.__main__ import operator_main
from pyshim.config.catalogue import KEYS
from pyshim.config.effective import Level
from pyshim.config.keys import Table, Verdict
from pyshim.config.load import build_config, load_config
from pyshim.config.sources import Source
from pyshim.node.cli.config_reference import commented_toml, markdown

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
def test_files_for_confidential_guests_ask_for_nothing_that_is_not_there(name: str) -> None:
    config = load_config(options(ROOT / "configs" / name), {}, {})

    assert config.hypervisor.confidential_guest
    assert config.hypervisor.shared_fs == "none"
    assert config.runtime.emptydir_mode == "block-encrypted"


def test_the_file_for_remote_vms_starts_sandboxes_and_sets_nothing_in_vain() -> None:
    path = ROOT / "configs" / "configuration-remote.toml"
    config = load_config(options(path), {}, {})

    assert config.hypervisor_name == "remote"
    assert config.runtime.experimental_force_guest_pull
    assert {finding.verdict for finding in examined(path).findings} == {Verdict.HONOURED}


def test_the_plain_file_sets_nothing_in_vain() -> None:
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
    verb = "pyshim config reference" + (" --toml" if path.endswith("toml") else "")

    assert (ROOT / path).read_text() == text, f"write it anew: {verb} > {path}"


@pytest.mark.parametrize("path", [path for path in FILES if "reference" not in path.name], ids=lambda path: path.name)
def test_a_shipped_file_lets_pods_set_no_annotation_that_only_contains_a_permitted_name(path: Path) -> None:
    effective = examined(path)

    if effective.of(Table.HYPERVISOR, "enable_annotations").value:
        assert effective.of(Table.HYPERVISOR, "annotation_match").value == "anchored"
