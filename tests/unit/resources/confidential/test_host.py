"""A host's guards for confidential guests, from made-up /sys and /dev."""

from pathlib import Path

import pytest

from pyshim.model.confidential import Tee, TeeFacts
from pyshim.resources.confidential.host import probe_tee


def probed(root: Path, modules: dict[str, str], *, sev_device: bool = True) -> TeeFacts:
    for name, value in modules.items():
        file = root / "sys/module" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    (root / "dev").mkdir()
    if sev_device:
        (root / "dev/sev").write_text("")
    return probe_tee(sys_root=str(root / "sys"), dev_root=str(root / "dev"), quote_socket=str(root / "qgs.socket"))


AMD = {"sev": "Y", "sev_es": "Y", "sev_snp": "Y"}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (AMD, {Tee.SEV, Tee.SEV_ES, Tee.SNP}),
        ({**AMD, "sev_snp": "N"}, {Tee.SEV, Tee.SEV_ES}),
        ({**AMD, "sev_es": "N", "sev_snp": "N"}, {Tee.SEV}),
        ({"sev": "1", "sev_es": "0"}, {Tee.SEV}),
        ({"sev": "N"}, set()),
    ],
    ids=["snp", "snp-off", "old-cpu", "old-kernel", "off"],
)
def test_what_the_module_says_is_there(tmp_path: Path, parameters: dict[str, str], found: set[Tee]) -> None:
    modules = {f"kvm_amd/parameters/{name}": value for name, value in parameters.items()}

    assert probed(tmp_path, modules).available == found


def test_without_its_device_sev_is_not_there_and_the_facts_say_why(tmp_path: Path) -> None:
    modules = {"kvm_amd/parameters/sev": "Y", "kvm_intel/parameters/tdx": "Y"}

    facts = probed(tmp_path, modules, sev_device=False)

    assert facts.available == {Tee.TDX}
    assert f"'{tmp_path}/dev/sev': ENOENT (no such file or directory)" in facts.probed


def test_tdx_is_the_modules_word_and_its_quote_socket_is_found(tmp_path: Path) -> None:
    (tmp_path / "qgs.socket").write_text("")

    facts = probed(tmp_path, {"kvm_intel/parameters/tdx": "Y"})

    assert (facts.available, facts.quote_socket) == ({Tee.TDX}, str(tmp_path / "qgs.socket"))


def test_a_host_that_shows_nothing_has_nothing_and_says_what_was_probed(tmp_path: Path) -> None:
    facts = probed(tmp_path, {})

    assert (facts.available, facts.quote_socket) == (frozenset(), "")
    assert any("kvm_intel/parameters/tdx': ENOENT" in text for text in facts.probed)
    assert any("kvm_amd/parameters/sev_snp': ENOENT" in text for text in facts.probed)
