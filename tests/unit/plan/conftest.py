"""Configurations, host facts and specs as plain values."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.model.oci import OciSpec, parse_spec
from tests.fakes.facts import host_facts


@pytest.fixture
def host() -> Callable[..., HostFacts]:
    return host_facts


@pytest.fixture
def config() -> Callable[..., Config]:
    def make(**qemu: Any) -> Config:
        base = {"path": "/bin/qemu", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}
        tables = {"hypervisor": {"qemu": {**base, **qemu}}, "agent": {}, "runtime": {}}
        return build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))

    return make


@pytest.fixture
def spec() -> Callable[..., OciSpec]:
    def make(**members: Any) -> OciSpec:
        document = {"ociVersion": "1.1.0", "process": {"args": ["sh"], "cwd": "/"}, "root": {"path": "rootfs"}}
        return parse_spec(json.dumps({**document, **members}).encode(), "config.json")

    return make


@pytest.fixture
def configured() -> Callable[..., Config]:
    """As `config`, with keys of [runtime] too."""

    def make(qemu: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None) -> Config:
        tables = {"hypervisor": {"qemu": qemu or {}}, "agent": {}, "runtime": runtime or {}}
        return build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))

    return make
