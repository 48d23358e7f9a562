"""Errors about names, specs and devices. Every text names the file, the member or the device."""

import errno

MAX_SHOWN = 50
"""Problems of one file, or devices, in one text: a file of 4 MiB can have a million."""


def os_cause(error: OSError) -> str:
    """`ENOENT (no such file or directory)`."""
    return f"{errno.errorcode.get(error.errno or 0, error.errno)} ({(error.strerror or '').lower()})"


class CdiError(Exception):
    """Base of all errors of this library."""


class InvalidName(CdiError):
    """A device name, kind or annotation that does not follow the rules."""


class InvalidSpec(CdiError):
    """A spec that cannot be used; `problems` holds every finding as `member: problem`, in document order."""

    def __init__(self, where: str, problems: tuple[str, ...]) -> None:
        shown = "; ".join(problems[:MAX_SHOWN])
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        super().__init__(f"load cdi spec '{where}': {shown}{more}")
        self.where = where
        self.problems = problems


class DeviceConflict(CdiError):
    """A device that two specs of the same priority define, and that therefore cannot be used."""

    def __init__(self, device: str, files: tuple[str, ...]) -> None:
        super().__init__(f"find cdi device '{device}': defined by {' and '.join(repr(file) for file in files)}")
        self.device = device
        self.files = files


class UnresolvedDevices(CdiError):
    """Devices that no spec defines; `devices` names all of them."""

    def __init__(self, devices: tuple[str, ...], hints: tuple[str, ...] = ()) -> None:
        named = ", ".join(repr(device[:200]) for device in devices[:MAX_SHOWN])
        more = f" and {len(devices) - MAX_SHOWN} more" if len(devices) > MAX_SHOWN else ""
        text = f"resolve cdi devices: no spec defines {named}{more}"
        super().__init__(f"{text} ({'; '.join(hints[:MAX_SHOWN])})" if hints else text)
        self.devices = devices


class InjectionFailed(CdiError):
    """An edit that cannot be made on this host, such as a device node that is not there."""
