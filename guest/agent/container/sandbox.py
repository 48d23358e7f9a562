"""The sandbox: what CreateSandbox made, the pid namespace and the kernel settings that its containers share.

The other namespaces that containers share are the agent's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from protos.agent.oci_pb2 import Hook

from guest.agent import syscalls
from guest.agent.children import Child, Children
from guest.agent.errors import Internal, InvalidArgument, os_cause
from guest.agent.files import write_text


class Sandbox:
    """The one sandbox of this guest. Its hostname is that of the UTS namespace that all containers share.

    `pause` keeps the pid namespace that containers share, if the sandbox has one. `hooks` are the guest's own, by kind.
    """

    def __init__(self) -> None:
        self.id = ""
        self.hostname = ""
        self.is_created = False
        self.pause: Child | None = None
        self.hooks: Mapping[str, list[Hook]] = {}


# -- the pid namespace -------------------------------------------------------------------------------------------------


def start_pause(children: Children) -> Child:
    """A new process that keeps a pid namespace open for the containers that share it. It is PID 1 there and only
    reaps. It ends with the agent's pid namespace, or when the sandbox is destroyed.

    unshare(2) makes a pid namespace for the caller's further children, but the agent's belong in its own. So a first
    child unshares and forks the pause process, which becomes the agent's child when the first one ends.
    """
    read_end, write_end = os.pipe()
    with children.expecting() as adopt:
        try:
            middle = os.fork()
            if middle == 0:
                _middle(write_end)
            os.close(write_end)
            text = os.read(read_end, 32)
        finally:
            os.close(read_end)
        if not text.isdigit():
            raise Internal(f"start pause process: {text.decode('utf-8', 'replace') or 'it ended'}")
        return adopt(int(text))


def _middle(write_end: int) -> None:
    """In the first child: makes the namespace, forks its PID 1, reports its pid, ends."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _pause()
        os.write(write_end, str(pid).encode())
    except BaseException as error:
        os.write(write_end, repr(error)[:31].encode())
    finally:
        os._exit(0)


def _pause() -> None:
    try:
        signal.set_wakeup_fd(-1)  # this process does not run the agent's loop
        os.closerange(3, 65536)
        # Blocked before the first look, so that no end is missed between looking and waiting.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            signal.sigwait([signal.SIGCHLD])
    finally:
        os._exit(1)


# -- kernel settings ---------------------------------------------------------------------------------------------------
# crun cannot set them: it refuses network settings for a container without its own network namespace, and here the
# pod's network is the guest's. Source: kernel Documentation/admin-guide/sysctl/.

_SYSCTLS = "/proc/sys"


def sysctl_path(name: str) -> str:
    """The file of a setting. As for sysctl(8), the first separator decides; the other one is part of a name
    (`net.ipv4.conf.eth0/1.forwarding` is of interface eth0.1). InvalidArgument for a name that leads out of the
    directory.
    """
    dots, slashes = name.find("."), name.find("/")
    if dots >= 0 and (slashes < 0 or dots < slashes):
        name = name.translate({ord("."): "/", ord("/"): "."})
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidArgument(f"set sysctl {name[:80]!r}: not a name of a setting")
    return f"{_SYSCTLS}/{name}"


def apply_sysctls(settings: Mapping[str, str]) -> None:
    """Every setting has its value. InvalidArgument names one that the kernel lacks or refuses."""
    paths = {name: sysctl_path(name) for name in settings}
    for name, path in paths.items():
        try:
            write_text(path, settings[name])
        except FileNotFoundError:
            raise InvalidArgument(f"set sysctl {name!r}: this kernel has no such setting") from None
        except OSError as error:
            raise InvalidArgument(f"set sysctl {name!r} to {settings[name][:80]!r}: {os_cause(error)}") from None
