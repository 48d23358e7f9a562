"""Variants of the shipped configuration file, for tests that point `--runtime-config-path` at a broken or
different one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from pyshim.resources.probe import probe_host

_PROJECT = Path(__file__).resolve().parents[2]
_CONFIGS = _PROJECT / "configs"
SHIPPED = _CONFIGS / "configuration-qemu.toml"
SHIPPED_REMOTE = _CONFIGS / "configuration-remote.toml"
OVMF = Path(os.environ.get("PYSHIM_TEST_FIRMWARE", "/usr/share/ovmf/OVMF.fd"))
"""The firmware, as Debian's package ovmf has it."""
COMPRESSED_KERNEL = _PROJECT / ".build" / "guest" / "vmlinuz"
"""The guest's kernel for OVMF, which boots no plain ELF file."""
BOOKWORM_GUEST = _PROJECT / ".build" / "guest-bookworm"
"""The guest of Debian 12, which `make test` builds beside the default one."""
VSOCK_PROGRAM = "vhost-device-vsock"
Keys = Mapping[str, object]
_TABLES = {"hypervisor": "hypervisor.qemu", "runtime": "runtime", "agent": "agent.kata"}


def reach_agents_over_vsock(directory: Path) -> None:
    """In this mount namespace the shipped file, and each `variant` of it, has a vhost-device-vsock for each VM."""
    program = shutil.which(VSOCK_PROGRAM)
    assert program is not None, f"needs {VSOCK_PROGRAM}"
    changed = variant(directory, agent_channel="vhost-user", vhost_user_vsock_daemon=program)
    bind(changed, SHIPPED)


def with_templates(directory: Path, templates: Path, **changes: object) -> Path:
    """A variant of the shipped file, whose VMs continue from templates in `templates`."""
    return variant(directory, enable_template=True, template_path=templates, **changes)


def with_keys(directory: Path, changes: Keys = MappingProxyType({}), **tables: Keys) -> Path:
    """A variant of the shipped file with `changes`, and a drop-in file of keys that it does not set, by their table:
    `hypervisor`, `runtime` or `agent`.
    """
    add_keys(directory, **tables)
    return variant(directory, **changes)


def add_keys(directory: Path, **tables: Keys) -> None:
    """The drop-in file of the configuration file in `directory`."""
    lines = []
    for name, keys in tables.items():
        lines += [f"[{_TABLES[name]}]", *(f"{key} = {_literal(value)}" for key, value in keys.items())]
    (directory / "config.d").mkdir(parents=True)
    (directory / "config.d" / "50-keys.toml").write_text("\n".join([*lines, ""]))


def guest_that_takes_vcpus() -> dict[str, object]:
    """Keys of a guest whose vCPUs can be plugged: the shipped one's, or under emulation Debian 12's (docs/GUEST.md)."""
    if probe_host().kvm_usable:
        return {}
    if os.environ.get("KATA_GUEST"):
        pytest.skip("needs KVM: Debian 12's guest does not stand for the given one")
    if not (BOOKWORM_GUEST / "manifest.json").exists():
        hint = f"python -m guest.image build --suite bookworm --out {BOOKWORM_GUEST}"
        pytest.skip(f"needs {BOOKWORM_GUEST} (hint: {hint})")
    files = {"kernel": "vmlinux", "initrd": "initrd.img", "image": "rootfs.img"}
    return {key: BOOKWORM_GUEST / name for key, name in files.items()}


def bind(source: Path, target: Path) -> None:
    """Within this mount namespace `target` is `source`."""
    subprocess.run(["mount", "--bind", source, target], check=True)


def variant(directory: Path, shipped: Path = SHIPPED, /, **changes: object) -> Path:
    """The shipped file with keys replaced, in `directory`. Its relative paths stay true: they become absolute.

    A change names a key that the shipped file sets; naming any other is a mistake of the test. VMs of a variant boot,
    unless it asks for templates.
    """
    if shipped == SHIPPED:
        changes = {"enable_template": False, **changes}
    text = re.sub(r'"\.\./', f'"{shipped.parents[1]}/', shipped.read_text())
    for key, value in changes.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {_literal(value)}", text)
        if count != 1:
            raise AssertionError(f"{shipped.name} sets {key!r} {count} times")
    path = directory / "configuration.toml"
    path.write_text(text)
    return path


def with_hypervisor_keys(directory: Path, keys: Keys) -> Path:
    """A variant of the shipped file with `keys` of the hypervisor, also ones that it does not set."""
    shipped = SHIPPED.read_text()
    changes = {key: value for key, value in keys.items() if re.search(rf"(?m)^{key} = ", shipped)}
    path = variant(directory, **changes)
    added = "".join(f"{key} = {_literal(value)}\n" for key, value in keys.items() if key not in changes)
    path.write_text(path.read_text().replace("[hypervisor.qemu]\n", f"[hypervisor.qemu]\n{added}", 1))
    return path


def _literal(value: object) -> str:
    return json.dumps(value, default=str)


def with_firmware(directory: Path) -> Path:
    """The shipped file, changed so that VMs boot with OVMF."""
    return with_keys(directory, {"kernel": COMPRESSED_KERNEL}, hypervisor={"firmware": OVMF})
