"""What a host offers confidential guests, from made-up /sys and /dev and a made-up CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host.confidential import probe_tee
from pyshim.host.cpuid import Registers, cpuid, executed
from pyshim.model.confidential import Tee, TeeFacts

SNP_CPU = Registers(eax=0b11011, ebx=5 << 6 | 51, ecx=0, edx=0)
SEV_CPU = Registers(eax=0b00010, ebx=1 << 6 | 47, ecx=0, edx=0)


def no_cpuid(_leaf: int) -> Registers:
    raise OSError("no CPUID here")


def probed(
    root: Path, modules: dict[str, str], *, sev_device: bool = True, read: Callable[[int], Registers] = no_cpuid
) -> TeeFacts:
    for name, value in modules.items():
        file = root / "sys/module" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    (root / "dev").mkdir()
    if sev_device:
        (root / "dev/sev").write_text("")
    return probe_tee(
        sys_root=str(root / "sys"), dev_root=str(root / "dev"), quote_socket=str(root / "qgs.socket"), read_cpuid=read
    )


AMD = {"sev": "Y", "sev_es": "Y", "sev_snp": "Y"}


@pytest.mark.parametrize(
    ("parameters", "cpu", "found"),
    [
        (AMD, SNP_CPU, {Tee.SEV, Tee.SEV_ES, Tee.SNP}),
        ({**AMD, "sev_snp": "N"}, SNP_CPU, {Tee.SEV, Tee.SEV_ES}),
        (AMD, SEV_CPU, {Tee.SEV}),
        ({"sev": "1", "sev_es": "0"}, SEV_CPU, {Tee.SEV}),
        ({"sev": "N"}, SNP_CPU, set()),
    ],
    ids=["snp", "snp-off", "old-cpu", "old-kernel", "off"],
)
def test_what_module_and_cpu_agree_on_is_there(
    tmp_path: Path, parameters: dict[str, str], cpu: Registers, found: set[Tee]
) -> None:
    modules = {f"kvm_amd/parameters/{name}": value for name, value in parameters.items()}

    facts = probed(tmp_path, modules, read=lambda _leaf: cpu)

    assert facts.available == found
    wanted = (cpu.ebx & 63, cpu.ebx >> 6) if found else (0, 0)
    assert (facts.cbitpos, facts.reduced_phys_bits) == wanted


def test_without_its_device_or_cpuid_sev_is_not_there_and_the_facts_say_why(tmp_path: Path) -> None:
    modules = {"kvm_amd/parameters/sev": "Y"}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    without_device = probed(tmp_path / "a", modules, sev_device=False, read=lambda _leaf: SEV_CPU)
    without_cpuid = probed(tmp_path / "b", modules)

    assert (without_device.available, without_cpuid.available) == (frozenset(), frozenset())
    assert f"'{tmp_path}/a/dev/sev': ENOENT (no such file or directory)" in without_device.probed
    assert "CPUID 0x8000001f: no CPUID here" in without_cpuid.probed


def test_tdx_is_the_modules_word_and_its_quote_socket_is_found(tmp_path: Path) -> None:
    (tmp_path / "qgs.socket").write_text("")

    facts = probed(tmp_path, {"kvm_intel/parameters/tdx": "Y"})

    assert (facts.available, facts.quote_socket) == ({Tee.TDX}, str(tmp_path / "qgs.socket"))


def test_a_host_that_shows_nothing_has_nothing_and_says_what_was_probed(tmp_path: Path) -> None:
    facts = probed(tmp_path, {})

    assert (facts.available, facts.cbitpos, facts.quote_socket) == (frozenset(), 0, "")
    assert any("kvm_intel/parameters/tdx': ENOENT" in text for text in facts.probed)
    assert any("kvm_amd/parameters/sev_snp': ENOENT" in text for text in facts.probed)


def test_the_instruction_names_the_same_vendor_as_the_kernel() -> None:
    vendor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id"))

    eax, ebx, ecx, edx = executed(0)

    assert b"".join(word.to_bytes(4, "little") for word in (ebx, edx, ecx)).decode() == vendor.split(":")[1].strip()
    assert eax > 0


def test_the_kernels_device_is_preferred_to_the_instruction(tmp_path: Path) -> None:
    device = tmp_path / "cpuid"
    device.write_bytes(bytes(32) + (7).to_bytes(4, "little") * 4)

    assert cpuid(32, device=str(device)) == Registers(7, 7, 7, 7)
