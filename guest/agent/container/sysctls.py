"""Sets the kernel settings of a spec. The namespaces that the containers share are the agent's own.

crun cannot do it: it refuses network settings for a container without its own network namespace, and here the pod's
network is the guest's. Source: kernel Documentation/admin-guide/sysctl/.
"""

from __future__ import annotations

from collections.abc import Mapping

from guest.agent.errors import InvalidArgument, os_cause
from guest.agent.files import write_text

_ROOT = "/proc/sys"


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
    return f"{_ROOT}/{name}"


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
