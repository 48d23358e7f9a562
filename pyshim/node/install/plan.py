"""The files of an installation: a value that can be printed, compared and applied. Pure.

`/opt/pyshim/releases/<id>` has one release, code and guest, and never changes; the other files refer to it. So pods
that run during an upgrade keep the code that they started with. `id` is a digest of the contents: installing the same
again changes nothing.
"""

import posixpath
import re
from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument
from pyshim.node.install.drop_ins import HANDLERS, Containerd, Handler, containerd_writes, crio_text
from pyshim.node.install.launcher import launcher_text
from pyshim.node.install.writes import FileWrite, LinkWrite, Write
from pyshim.start.info import BINARY

PREFIX = "/opt/pyshim"
CRIO_DROP_IN = "/etc/crio/crio.conf.d/99-pyshim.conf"
_LAUNCHERS = "/usr/local/bin"
_MANUAL = "/usr/local/share/man/man1/pyshim.1"
_SYSTEMD = "/etc/systemd/system"
_UNITS = ("pyshim-cleanup.service", "pyshim-cleanup.timer", "pyshim-zygote.service")
_WANTED_BY = {"pyshim-cleanup.timer": "timers.target", "pyshim-zygote.service": "multi-user.target"}
SETTINGS = "/etc/pyshim"
_OWN = f"{SETTINGS}/classes"
"""A directory for each handler with a name of the operator's."""
_DROP_IN = "config.d/10-install.toml"
"""Names of the operator's own files sort after it."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A RuntimeClass has this form of name, and a label of the node is made of it."""
_STATE = "state"
"""Not a handler's name: the label `pyshim.io/state` of a node has the state of its installation."""
_CONFIG_HEAD = (
    "# Written by `pyshim install`. Settings of your own: {directory}/config.d/*.toml, read on top of this file.\n"
)


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One state of code and guest."""

    id: str
    python: str
    """Major and minor number of the interpreter, as in the path of its packages."""


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


def chosen_handlers(words: tuple[str, ...], read: Callable[[Handler, str], str]) -> tuple[Handler, ...]:
    """The handlers that `words` choose, each `NAME[:BASE][=FILE]`; without words all that come with pyshim.

    An operator's own NAME starts from our handler BASE. `read` returns the text of FILE, settings on top of the shipped
    ones. Our handlers come first, in their order.

    Raises InvalidArgument, and what `read` raises.
    """
    if not words:
        return HANDLERS
    chosen: dict[str, Handler] = {}
    for word in words:
        handler = _chosen(word, read)
        if handler.name in chosen:
            raise InvalidArgument(f"install handler '{handler.name}': it is there twice")
        chosen[handler.name] = handler
    ours = [chosen.pop(each.name) for each in HANDLERS if each.name in chosen]
    return (*ours, *chosen.values())


def _chosen(word: str, read: Callable[[Handler, str], str]) -> Handler:
    called, equals, file = word.partition("=")
    name, colon, base = called.partition(":")
    known = {handler.name: handler for handler in HANDLERS}
    if name in known and not colon:
        handler = known[name]
    elif name in known:
        raise InvalidArgument(f"install handler '{name}': it comes with pyshim and has no base '{base}'")
    elif base not in known:
        unknown = f"base '{base}' is not known; " if colon else ""
        hint = "NAME:BASE, such as gpu:pykata, is a handler of your own"
        raise InvalidArgument(f"install handler '{name}': {unknown}known are {', '.join(known)} (hint: {hint})")
    elif not _NAME.fullmatch(name) or name == _STATE:
        rule = f"give it a name of lower-case letters, digits and '-', not '{_STATE}'"
        raise InvalidArgument(f"install handler '{name}': {rule}")
    else:
        handler = replace(known[base], name=name, config_path=config_path_of(name))
    return replace(handler, drop_in=read(handler, file)) if equals else handler


def handler_name(word: str) -> str:
    """The name in `NAME[:BASE][=FILE]`."""
    return word.partition("=")[0].partition(":")[0]


def config_path_of(name: str) -> str:
    """The configuration of the handler of this name, which is one of ours or the operator's."""
    return {handler.name: handler.config_path for handler in HANDLERS}.get(name, f"{_OWN}/{name}/configuration.toml")


def installed_handlers(paths: Collection[str]) -> tuple[str, ...]:
    """The names of the handlers whose configurations are among these files; ours come first."""
    ours = [handler.name for handler in HANDLERS if handler.config_path in paths]
    directories = [posixpath.dirname(path) for path in paths if path.endswith("/configuration.toml")]
    own = [posixpath.basename(each) for each in directories if posixpath.dirname(each) == _OWN]
    return (*ours, *own)


def install_plan(
    *,
    prefix: str,
    release: Release,
    handlers: tuple[Handler, ...],
    configs: Mapping[str, str],
    manual: str,
    containerd: Containerd | None,
    has_crio: bool,
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
    if handler.drop_in is not None:
        found.append(FileWrite(path=f"{directory}/{_DROP_IN}", content=handler.drop_in))
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
