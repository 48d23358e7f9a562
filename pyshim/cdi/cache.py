"""Directories of specs, cached: which device a name stands for, by priority.

A later directory wins. A device that two specs of one directory define is in conflict and cannot be used, unless a
later directory defines it again. A wrong file is an error of its own and leaves the devices of other files usable.
Before each question the cache looks at the directories (names, times, sizes) and reads only the files that changed.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CdiError, DeviceConflict, InvalidName, UnresolvedDevices, os_cause
from .files import SUFFIXES, read_spec
from .inject import inject
from .names import parse_qualified_name
from .spec import ContainerEdits, Device, Spec

DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
"""The first for files that an administrator writes, the second for those that programs write at run time."""

_Signature = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDevice:
    name: str
    """Qualified."""
    device: Device
    spec: Spec
    path: str
    """The file of `spec`."""
    priority: int
    """The index of its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    signature: _Signature
    spec: Spec | None
    error: CdiError | None


class Cache:
    """Safe to share between threads. Construction reads nothing."""

    def __init__(
        self,
        directories: Iterable[str] = DEFAULT_DIRECTORIES,
        *,
        read: Callable[[str], Spec] = read_spec,
    ) -> None:
        self.directories = tuple(directories)
        self._read = read
        self._lock = threading.RLock()
        self._files: dict[str, _File] = {}
        self._devices: dict[str, CachedDevice] = {}
        self._errors: dict[str, tuple[CdiError, ...]] = {}

    def _refresh(self) -> None:
        """Files and devices are those of the directories as they are now."""
        failed: dict[str, CdiError] = {}
        files: dict[str, _File] = {}
        order: list[tuple[int, str]] = []
        for priority, directory in enumerate(self.directories):
            for path in self._listed(directory, failed):
                if path not in files:
                    files[path] = self._file(path)
                    order.append((priority, path))
        if failed or files != self._files or self._errors.keys() - files.keys():
            self._files = files
            self._index(order, failed)

    def _listed(self, directory: str, failed: dict[str, CdiError]) -> list[str]:
        try:
            names = sorted(os.listdir(directory))
        except FileNotFoundError:
            return []
        except OSError as error:
            failed[directory] = CdiError(f"list cdi specs in '{directory}': {os_cause(error)}")
            return []
        paths = (os.path.join(directory, name) for name in names if name.endswith(SUFFIXES) and name not in SUFFIXES)
        return [path for path in paths if not os.path.isdir(path)]

    def _file(self, path: str) -> _File:
        signature = _signature(path)
        known = self._files.get(path)
        if known is not None and known.signature == signature:
            return known
        try:
            return _File(signature=signature, spec=self._read(path), error=None)
        except CdiError as error:
            return _File(signature=signature, spec=None, error=error)

    def _index(self, order: list[tuple[int, str]], failed: Mapping[str, CdiError]) -> None:
        errors: dict[str, list[CdiError]] = {path: [error] for path, error in failed.items()}
        found: dict[str, list[CachedDevice]] = {}
        for priority, path in order:
            file = self._files[path]
            if file.error is not None:
                errors.setdefault(path, []).append(file.error)
            if file.spec is None:
                continue
            for device in file.spec.devices:
                name = f"{file.spec.kind}={device.name}"
                entry = CachedDevice(name=name, device=device, spec=file.spec, path=path, priority=priority)
                found.setdefault(name, []).append(entry)
        self._devices = {}
        for name, entries in found.items():
            best = [entry for entry in entries if entry.priority == entries[-1].priority]
            if len(best) == 1:
                self._devices[name] = best[0]
                continue
            conflict = DeviceConflict(name, tuple(entry.path for entry in best))
            for entry in best:
                errors.setdefault(entry.path, []).append(conflict)
        self._errors = {path: tuple(found_errors) for path, found_errors in errors.items()}

    def errors(self) -> Mapping[str, tuple[CdiError, ...]]:
        """The errors of directories and files, by path; empty when all is well."""
        with self._lock:
            self._refresh()
            return dict(self._errors)

    def devices(self) -> tuple[CachedDevice, ...]:
        """Every device without a conflict, by name."""
        with self._lock:
            self._refresh()
            return tuple(self._devices[name] for name in sorted(self._devices))

    def kinds(self) -> tuple[str, ...]:
        """The kinds of all valid specs."""
        with self._lock:
            self._refresh()
            return tuple(sorted({file.spec.kind for file in self._files.values() if file.spec is not None}))

    def find(self, names: Iterable[str]) -> tuple[CachedDevice, ...]:
        """The devices, in the order asked for. Raises UnresolvedDevices with all that are missing and why."""
        wanted = tuple(dict.fromkeys(names))
        with self._lock:
            self._refresh()
            missing = tuple(name for name in wanted if name not in self._devices)
            if missing:
                raise UnresolvedDevices(missing, self._hints(missing))
            return tuple(self._devices[name] for name in wanted)

    def _hints(self, missing: tuple[str, ...]) -> tuple[str, ...]:
        hints = []
        wanted = set(missing)
        for name in missing:
            try:
                parse_qualified_name(name)
            except InvalidName as error:
                hints.append(str(error))
        for path in sorted(self._errors):
            for found in self._errors[path]:
                if not isinstance(found, DeviceConflict) or found.device in wanted:
                    hints.append(str(found))
        return tuple(dict.fromkeys(hints))

    def edits(self, names: Iterable[str]) -> ContainerEdits:
        """The edits of all the devices: a spec's own edits once, before those of its first device."""
        edits: list[ContainerEdits] = []
        begun: set[str] = set()
        for found in self.find(names):
            if found.path not in begun:
                begun.add(found.path)
                edits.append(found.spec.container_edits)
            edits.append(found.device.container_edits)
        return ContainerEdits.joined(edits)

    def inject(self, oci_spec: dict[str, Any], names: Iterable[str]) -> None:
        """`oci_spec` has the devices. Raises UnresolvedDevices or InjectionFailed with the spec untouched."""
        inject(oci_spec, self.edits(names))


def _signature(path: str) -> _Signature:
    """A value that differs when the file's content may have changed; the errno if the file cannot be read."""
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
