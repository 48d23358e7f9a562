"""The runtime handlers: those that come with pyshim, and an operator's own. Pure."""

import posixpath
import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument

SETTINGS = "/etc/pyshim"
SANDBOXERS = ("podsandbox", "shim")
"""By the first, containerd makes a pod with a pause container; by the second, with the Sandbox API and without one."""
_OWN_CONFIGS = f"{SETTINGS}/classes"
"""A directory for each handler with a name of the operator's."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A RuntimeClass has this form of name, and a label of the node is made of it."""
_STATE_LABEL = "state"
"""Not a handler's name: the label `pyshim.io/state` of a node has the state of its installation."""


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """One name that a RuntimeClass can have as its handler."""

    name: str
    source: str
    """The file of configs/ that it starts from."""
    config_path: str
    turned_on: str = ""
    """A key that is false in `source` and true for this handler."""
    is_local: bool = True
    """Its VMs run on the node, in QEMU."""
    guest_pulls: bool = False
    """Its guests pull the images themselves."""
    sandboxer: str = "podsandbox"
    """One of SANDBOXERS."""
    snapshotter: str = ""
    """containerd's snapshotter for its images, if its guests do not pull them; empty for that of the CRI plugin."""
    settings: str | None = None
    """The operator's settings on top of `source`: the text of a file in `config.d`; None without one."""


def _shipped(name: str, source: str, **settings: Any) -> Handler:
    directory = name.replace("pykata", "/etc/pyshim").replace("-", "/")
    return Handler(name=name, source=source, config_path=f"{directory}/configuration.toml", **settings)


HANDLERS = (
    _shipped("pykata", "configuration-qemu.toml"),
    _shipped("pykata-tdx", "configuration-qemu-tdx.toml", guest_pulls=True),
    _shipped("pykata-snp", "configuration-qemu-snp.toml", guest_pulls=True),
    _shipped("pykata-remote", "configuration-remote.toml", is_local=False, guest_pulls=True),
    _shipped("pykata-debug", "configuration-qemu.toml", turned_on="enable_debug"),
    _shipped("pykata-warm", "configuration-qemu.toml", turned_on="enable_template"),
)


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
    elif not _NAME.fullmatch(name) or name == _STATE_LABEL:
        rule = f"give it a name of lower-case letters, digits and '-', not '{_STATE_LABEL}'"
        raise InvalidArgument(f"install handler '{name}': {rule}")
    else:
        handler = replace(known[base], name=name, config_path=config_path_of(name))
    return replace(handler, settings=read(handler, file)) if equals else handler


def handler_name(word: str) -> str:
    """The name in `NAME[:BASE][=FILE]`."""
    return word.partition("=")[0].partition(":")[0]


def config_path_of(name: str) -> str:
    """The configuration of the handler of this name, which is one of ours or the operator's."""
    ours = {handler.name: handler.config_path for handler in HANDLERS}
    return ours.get(name, f"{_OWN_CONFIGS}/{name}/configuration.toml")


def installed_handlers(paths: Collection[str]) -> tuple[str, ...]:
    """The names of the handlers whose configurations are among these files; ours come first."""
    ours = [handler.name for handler in HANDLERS if handler.config_path in paths]
    directories = [posixpath.dirname(path) for path in paths if path.endswith("/configuration.toml")]
    own = [posixpath.basename(each) for each in directories if posixpath.dirname(each) == _OWN_CONFIGS]
    return (*ours, *own)
