"""`pyshim debug topology`: the drawing of a configuration's ports."""

from pathlib import Path

import pytest

from pyshim.node.cli.command import run


def config(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "c.toml"
    path.write_text("\n".join(["[hypervisor.qemu]", *lines, ""]))
    return str(path)


def test_ports_and_devices_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, 'cold_plug_vfio = "root-port"')

    assert run(["debug", "topology", path, "--devices", "2"]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "pcie.0",
        "├─ 02 pci-bridge-0",
        "├─ 1d rp0, root port",
        "│  └─ 00 device0 (any), path 1d/00",
        "└─ 1e rp1, root port",
        "   └─ 00 device1 (any), path 1e/00",
    ]


@pytest.mark.parametrize(
    ("lines", "words", "text"),
    [
        (('machine_type = "microvm"',), (), "microvm has none"),
        (
            ('cold_plug_vfio = "root-port"', "pcie_root_port = 1"),
            ("--devices", "2"),
            "place 2 devices: pcie_root_port = 1",
        ),
        ((), ("--devices", "1"), "cold_plug_vfio in"),
        (('cold_plug_vfio = "root-port"',), ("--node", "/dev/vfio/999999"), "this host has no IOMMU group 999999"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    lines: tuple[str, ...], words: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["debug", "topology", config(tmp_path, *lines), *words]) == 1
    assert text in capsys.readouterr().err
