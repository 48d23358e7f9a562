"""Kernel settings that a spec asks for, written in the namespaces that the containers share.

Not left to crun: it refuses network settings of a container without a network namespace of its own, and here the pod's
network is the guest's. Source: kernel Documentation/admin-guide/sysctl/; which settings are whose, by namespace, see
ipc_namespaces(7) and uts_namespaces(7).
"""

from __future__ import annotations

import errno
import os

from guest.agent.errors import InvalidArgument
from guest.agent.storage import syscalls

_ROOT = "/proc/sys"
_ENTERED = {"ipc": syscalls.CLONE_NEWIPC, "uts": syscalls.CLONE_NEWUTS}


def sysctl_path(name: str) -> str:
    """The file of a setting. As sysctl(8) reads names: the first separator decides, the other kind is part of a name
    (`net.ipv4.conf.eth0/1.forwarding` is of interface eth0.1). InvalidArgument for a name that leads elsewhere.
    """
    dots, slashes = name.find("."), name.find("/")
    if dots >= 0 and (slashes < 0 or dots < slashes):
        name = name.translate({ord("."): "/", ord("/"): "."})
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidArgument(f"set sysctl {name[:80]!r}: not a name of a setting")
    return f"{_ROOT}/{name}"


def apply_sysctls(settings: dict[str, str], namespaces: dict[str, str]) -> None:
    """Every setting has its value. InvalidArgument names the one that the kernel does not know or refuses.

    `namespaces` has the paths of the shared ones; this process is back in its own afterwards.
    """
    paths = {name: sysctl_path(name) for name in settings}
    kinds = [kind for kind in _ENTERED if namespaces.get(kind)]
    own = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}
    try:
        for kind in kinds:
            _enter(namespaces[kind], _ENTERED[kind])
        for name, path in paths.items():
            _write(name, path, settings[name])
    finally:
        for kind, fd in own.items():
            syscalls.setns(fd, _ENTERED[kind])
            os.close(fd)


def _enter(path: str, flag: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.setns(fd, flag)
    finally:
        os.close(fd)


def _write(name: str, path: str, value: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode("utf-8", "surrogateescape"))
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise InvalidArgument(f"set sysctl {name!r}: this kernel has no such setting") from None
    except OSError as error:
        cause = f"{errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror})"
        raise InvalidArgument(f"set sysctl {name!r} to {value[:80]!r}: {cause}") from None
