"""Kata's configuration files for QEMU boot a pod with kata-agent, with only the node's paths set in a drop-in file.

The files are made from the table of their settings, as in tests/unit/config/test_shipped_files.py. `KATA_CONFIG=A:B`
names files as Kata installs them, to be used instead.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import read_source
from pyshim.config.values import toml_value

from .framework import kata_agent, shim_config
from .framework.ctr import Ctr

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(not kata_agent.is_chosen(), reason="needs KATA_AGENT=/path of a kata-agent"),
]

TABLE = Path(__file__).parents[1] / "tests" / "golden" / "config" / "kata-4.1.json"
DIALECTS = ("go/configuration-qemu", "rust/configuration-qemu-runtime-rs")
GIVEN = os.environ.get("KATA_CONFIG", "")
PATHS = ("path", "kernel", "initrd", "image", "rootfs_type", "virtio_fs_daemon")
VSOCK = ("agent_channel", "vhost_user_vsock_daemon")
SCRIPT = "cat /proc/cmdline; echo; cat /proc/self/cgroup; echo; cat /proc/mounts"


def _put(file: str, path: Path) -> None:
    """The file, as it is or made from the table, is at `path`."""
    if GIVEN:
        shutil.copyfile(file, path)
        return
    settings = json.loads(TABLE.read_text())["files"][file]["settings"]
    settings["hypervisor.qemu.kernel_params"] = kata_agent.KERNEL_PARAMS  # filled in where Kata is built
    path.write_text("".join(f"{dotted} = {toml_value(value)}\n" for dotted, value in settings.items()))


def _node() -> dict[str, object]:
    """This node's paths, and the way to the agent where the host has no vhost-vsock."""
    hypervisor = build_config(read_source(None, {}, (str(shim_config.SHIPPED),))).hypervisor
    names = PATHS + (VSOCK if hypervisor.agent_channel == "vhost-user" else ())
    return {name: getattr(hypervisor, name) for name in names}


@pytest.mark.parametrize("file", GIVEN.split(":") if GIVEN else DIALECTS)
def test_a_file_of_katas_boots_a_pod(ctr: Ctr, name: str, scratch: Path, file: str) -> None:
    path = scratch / "configuration.toml"
    _put(file, path)
    shim_config.add_keys(scratch, hypervisor=_node())

    result = ctr.run(name, "sh", "-c", SCRIPT, config=path, check=False, within_s=200)

    assert result.code == 0, result
    cmdline, cgroup, mounts = result.out.split("\n\n")
    assert {"root=/dev/pmem0p1", "cgroup_no_v1=all", "systemd.unified_cgroup_hierarchy=1"} <= set(cmdline.split())
    assert "0::/" in cgroup.splitlines()
    assert ["/", "virtiofs"] in [line.split()[1:3] for line in mounts.splitlines()]
