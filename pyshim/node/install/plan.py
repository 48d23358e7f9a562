"""The files of an installation: a value that can be printed, compared and applied. Pure.

`/opt/pyshim/releases/<id>` has one release, code and guest, and never changes; the other files refer to it. So pods
that run during an upgrade keep the code that they started with. `id` is a digest of the contents: installing the same
again changes nothing.
"""

import posixpath
import re
from collections.abc import Mapping

import msgspec

from pyshim.node.install.drop_ins import Containerd, containerd_writes, crio_text
from pyshim.node.install.handlers import Handler
from pyshim.node.install.launcher import launcher_text
from pyshim.node.install.writes import FileWrite, LinkWrite, MembersWrite, Write
from pyshim.start.dialect import BINARY

PREFIX = "/opt/pyshim"
CRIO_DROP_IN = "/etc/crio/crio.conf.d/99-pyshim.conf"
_LAUNCHERS = "/usr/local/bin"
_MANUAL = "/usr/local/share/man/man1/pyshim.1"
_SYSTEMD = "/etc/systemd/system"
_UNITS = ("pyshim-cleanup.service", "pyshim-cleanup.timer", "pyshim-zygote.service")
_WANTED_BY = {"pyshim-cleanup.timer": "timers.target", "pyshim-zygote.service": "multi-user.target"}
_SETTINGS_FILE = "config.d/10-install.toml"
"""The operator's own files have names that sort after it."""
_CONFIG_HEAD = (
    "# Written by `pyshim install`. Settings of your own: {directory}/config.d/*.toml, read on top of this file.\n"
)


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One version of code and guest."""

    id: str
    python: str
    """Major and minor number of the interpreter, as in the path of its packages."""

    @property
    def version(self) -> str:
        return version_of(self.id)


def version_of(release_id: str) -> str:
    return release_id.rpartition("-")[0]


def is_earlier(version: str, other: str) -> bool:
    """`version` comes before `other`: 0.2.0.dev0, 0.2.0rc1, 0.2.0, as of PEP 440. False if one of them is not ours."""
    one, two = _order(version), _order(other)
    return one is not None and two is not None and one < two


def _order(version: str) -> tuple[int, ...] | None:
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:(\.dev|rc)(\d+))?", version)
    if found is None:
        return None
    stage = {".dev": 0, "rc": 1, None: 2}[found[4]]
    return (*(int(found[number]) for number in (1, 2, 3)), stage, int(found[5] or 0))


class InstallPlan(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str
    release: Release
    writes: tuple[Write, ...]
    """In the order of writing: a file comes before those that refer to it."""

    @property
    def release_path(self) -> str:
        return release_path(self.prefix, self.release)


def release_path(prefix: str, release: Release) -> str:
    return f"{prefix}/releases/{release.id}"


def python_path(home: str) -> str:
    """The interpreter of the release that is in `home`."""
    return f"{home}/venv/bin/python"


def release_of(program: str) -> str:
    """The id of the release whose interpreter `program` is; empty for that of a checkout."""
    found = re.search(python_path("/releases/([^/]+)") + "$", program)
    return found[1] if found else ""


def packages_path(home: str, release: Release) -> str:
    return f"{home}/venv/lib/python{release.python}/site-packages"


def install_plan(
    *,
    prefix: str,
    release: Release,
    handlers: tuple[Handler, ...],
    configs: Mapping[str, str],
    manual: str,
    containerd: Containerd | None,
    has_crio: bool,
    daemon_json: MembersWrite | None = None,
) -> InstallPlan:
    """`configs` are the shipped files by their path below configs/, `manual` is the page of the operator's command.

    Raises ShimError naming the obstacle.
    """
    home = release_path(prefix, release)
    shim = f"{prefix}/bin/{BINARY}"
    writes: list[Write] = [
        *_programs(prefix, home, release, shim),
        *(write for handler in handlers for write in _configuration(handler, configs[handler.source], home)),
        *_units(prefix, configs),
        FileWrite(path=_MANUAL, content=manual),
    ]
    if has_crio:
        writes.append(FileWrite(path=CRIO_DROP_IN, content=crio_text(handlers, shim)))
    if containerd is not None:
        writes += containerd_writes(containerd, handlers, shim=shim)
    if daemon_json is not None:
        writes.append(daemon_json)
    return InstallPlan(prefix=prefix, release=release, writes=tuple(writes))


def _programs(prefix: str, home: str, release: Release, shim: str) -> list[Write]:
    python = python_path(home)
    operator = f"{prefix}/bin/pyshim"
    return [
        FileWrite(path=shim, content=launcher_text(python, (packages_path(home, release),)), mode=0o755),
        FileWrite(path=operator, content=f'#!/bin/sh\nexec {python} -I -m pyshim "$@"\n', mode=0o755),
        LinkWrite(path=f"{_LAUNCHERS}/{BINARY}", target=shim),
        LinkWrite(path=f"{_LAUNCHERS}/pyshim", target=operator),
    ]


def _configuration(handler: Handler, shipped: str, home: str) -> list[Write]:
    text = shipped.replace("../.build/guest/", f"{home}/guest/")
    if handler.turned_on:
        text = text.replace(f"{handler.turned_on} = false", f"{handler.turned_on} = true")
    directory = posixpath.dirname(handler.config_path)
    found: list[Write] = [FileWrite(path=handler.config_path, content=_CONFIG_HEAD.format(directory=directory) + text)]
    if handler.settings is not None:
        found.append(FileWrite(path=f"{directory}/{_SETTINGS_FILE}", content=handler.settings))
    return found


def _units(prefix: str, configs: Mapping[str, str]) -> list[Write]:
    files = [
        FileWrite(path=f"{_SYSTEMD}/{name}", content=configs[f"systemd/{name}"].replace(PREFIX, prefix))
        for name in _UNITS
    ]
    enabled = [
        LinkWrite(path=f"{_SYSTEMD}/{target}.wants/{name}", target=f"{_SYSTEMD}/{name}")
        for name, target in _WANTED_BY.items()
    ]
    return [*files, *enabled]
