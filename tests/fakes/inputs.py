"""What a plan is made of: configurations, host facts and specs as plain values."""

import json
from typing import Any

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.oci import OciSpec, parse_spec
from tests.fakes.facts import host_facts as host

__all__ = ["config", "configured", "host", "spec"]

BOOTABLE = {"path": "/bin/qemu", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}


def config(**qemu: Any) -> Config:
    """A VM that can boot, with these keys of [hypervisor.qemu]."""
    return configured({**BOOTABLE, **qemu})


def configured(qemu: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None) -> Config:
    """These keys of [hypervisor.qemu] and [runtime] alone."""
    tables = {"hypervisor": {"qemu": qemu or {}}, "agent": {}, "runtime": runtime or {}}
    return build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))


def spec(**members: Any) -> OciSpec:
    document = {"ociVersion": "1.1.0", "process": {"args": ["sh"], "cwd": "/"}, "root": {"path": "rootfs"}}
    return parse_spec(json.dumps({**document, **members}).encode(), "config.json")
