"""The files of an installation: a value that can be printed, compared and applied. Pure.

`/opt/pyshim/releases/<id>` holds one release, code and guest, and never changes; the other files name it. So pods that
run during an upgrade keep the code that they started with. `id` is made of the contents: installing the same
again changes nothing.
"""

from collections.abc import Mapping

import msgspec

from pyshim.model.errors import InvalidArgument
from pyshim.node.install.drop_ins import HANDLERS, Containerd, Handler, containerd_addition, crio_text
from pyshim.node.install.launcher import launcher_text
from pyshim.start.info import BINARY

PREFIX = "/opt/pyshim"
CONTAINERD_DROP_IN = "/etc/containerd/conf.d/pyshim.toml"
CRIO_DROP_IN = "/etc/crio/crio.conf.d/99-pyshim.conf"
_LAUNCHERS = "/usr/local/bin"
_SYSTEMD = "/etc/systemd/system"
_UNITS = ("pyshim-cleanup.service", "pyshim-cleanup.timer", "pyshim-zygote.service")
_WANTED_BY = {"pyshim-cleanup.timer": "timers.target", "pyshim-zygote.service": "multi-user.target"}
_CONFIG_HEAD = (
    "# Written by `pyshim install`. Settings of your own: {directory}/config.d/*.toml, read on top of this file.\n"
)


class FileWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A file of our own."""

    path: str
    content: str
    mode: int = 0o644


class LinkWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A symbolic link of our own."""

    path: str
    target: str


class BlockWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A marked block in a file that is not ours."""

    path: str
    body: str
    first: bool


Write = FileWrite | LinkWrite | BlockWrite


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One state of code and guest."""

    id: str
    python: str
    """Major and minor number of the interpreter, as in the path of its packages."""


class InstallPlan(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str
    release: Release
    writes: tuple[Write, ...]
    """In the order in which they are made: what names a file comes after it."""

    @property
    def release_path(self) -> str:
        return release_path(self.prefix, self.release)


def release_path(prefix: str, release: Release) -> str:
    return f"{prefix}/releases/{release.id}"


def packages_path(home: str, release: Release) -> str:
    return f"{home}/venv/lib/python{release.python}/site-packages"


def chosen_handlers(names: tuple[str, ...]) -> tuple[Handler, ...]:
    """The handlers of these names, all without any. Raises InvalidArgument for an unknown one."""
    known = {handler.name: handler for handler in HANDLERS}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"install handler '{name}': known are {', '.join(known)}")
    return tuple(handler for name, handler in known.items() if not names or name in names)


def install_plan(
    *,
    prefix: str,
    release: Release,
    handlers: tuple[Handler, ...],
    configs: Mapping[str, str],
    containerd: Containerd | None,
    has_crio: bool,
) -> InstallPlan:
    """`configs` are the shipped files by their path below configs/. Raises ShimError naming what stands in the way."""
    home = release_path(prefix, release)
    shim = f"{prefix}/bin/{BINARY}"
    writes: list[Write] = [
        *_programs(prefix, home, release, shim),
        *(_configuration(handler, configs[handler.source], home) for handler in handlers),
        *_units(prefix, configs),
    ]
    if has_crio:
        writes.append(FileWrite(path=CRIO_DROP_IN, content=crio_text(handlers, shim)))
    if containerd is not None:
        writes += _containerd(containerd, handlers, shim)
    return InstallPlan(prefix=prefix, release=release, writes=tuple(writes))


def _programs(prefix: str, home: str, release: Release, shim: str) -> list[Write]:
    python = f"{home}/venv/bin/python"
    operator = f"{prefix}/bin/pyshim"
    return [
        FileWrite(path=shim, content=launcher_text(python, (packages_path(home, release),)), mode=0o755),
        FileWrite(path=operator, content=f'#!/bin/sh\nexec {python} -I -m pyshim "$@"\n', mode=0o755),
        LinkWrite(path=f"{_LAUNCHERS}/{BINARY}", target=shim),
        LinkWrite(path=f"{_LAUNCHERS}/pyshim", target=operator),
    ]


def _configuration(handler: Handler, shipped: str, home: str) -> FileWrite:
    text = shipped.replace("../.build/guest/", f"{home}/guest/")
    if handler.debug:
        text = text.replace("enable_debug = false", "enable_debug = true")
    head = _CONFIG_HEAD.format(directory=handler.config_path.rpartition("/")[0])
    return FileWrite(path=handler.config_path, content=head + text)


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


def _containerd(containerd: Containerd, handlers: tuple[Handler, ...], shim: str) -> list[Write]:
    addition = containerd_addition(containerd, handlers, shim=shim, drop_in=CONTAINERD_DROP_IN)
    writes: list[Write] = []
    if addition.drop_in is not None:
        writes.append(FileWrite(path=CONTAINERD_DROP_IN, content=addition.drop_in))
    if addition.text is None:
        return writes
    if containerd.config_text is None:
        return [*writes, FileWrite(path=containerd.config_path, content=addition.text)]
    return [*writes, BlockWrite(path=containerd.config_path, body=addition.text, first=addition.first)]
