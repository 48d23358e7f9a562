"""The templates of this host: a directory each, below one that only root may enter, on a file system in memory.

    ROOT/KEY/memory, state      the machine (`hypervisors/qemu/saved_machine.py`)
    ROOT/KEY/template.json      `Template`; its time is that of the last use
    ROOT/making                 the template that is being made; it is renamed when it is complete
    ROOT/KEY.tried              the reason and time of a failed attempt: pods do not ask for one again so soon

The maker of a template has locked ROOT. Any number of VMs may continue from a template, also from one that is removed
meanwhile: they have their own copy, or boot.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from pyshim.host.fds import OwnedFd
from pyshim.host.file_answers import file_identity
from pyshim.host.files import lock_within, open_directory
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import FailedPrecondition, Internal, NotFound, ResourceExhausted, Unavailable
from pyshim.model.units import MIB
from pyshim.model.vm import LocalVm
from pyshim.resources.templates.plan import MachineFacts, StoredTemplate, Template

MOST_TEMPLATES = 8
"""On one host; the template that was used least recently is removed for a new one."""
MOST_BYTES = 4 << 30
"""Of all templates on a host, with the same rule: they are in its memory."""
MOST_DAYS = 30
"""Age limit of a template: it also limits the age of what the machine derived since its boot, keys included."""
_MEMORY, _STATE, _RECORD = "memory", "state", "template.json"
_MAKING = "making"
_TRIED = ".tried"
_TRY_AGAIN_S = 3600
_IS_KEY = re.compile(r"[0-9a-f]{32}")
_MAX_RECORD_BYTES = 1 << 16
_DAY_NS = 86_400 * 10**9


class TemplateDamaged(Internal):
    """A template that no VM should continue from; the text says why."""


class TemplateStore:
    """Every method raises ShimError naming the template, or OSError."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find(self, key: str) -> str:
        """The directory of a template of that key. Raises NotFound without one.

        Raises TemplateDamaged, and has removed it, when no VM should continue from it.
        """
        try:
            stored = self._stored(key)
        except TemplateDamaged:
            self.discard(key)
            raise
        os.utime(f"{stored.directory}/{_RECORD}")
        return stored.directory

    def all(self) -> Iterator[StoredTemplate | TemplateDamaged]:
        """Every template, in the order of their keys; for one that cannot be used, the error that says why."""
        for key in self._keys():
            try:
                yield self._stored(key)
            except NotFound:
                continue  # it was removed meanwhile
            except TemplateDamaged as error:
                yield error
        for key in self._keys(_TRIED):
            with suppress(FileNotFoundError), open(f"{self._root}/{key}{_TRIED}", errors="replace") as file:
                yield TemplateDamaged(f"make template {key!r}: {file.read(_MAX_RECORD_BYTES) or 'it is being made'}")

    def discard(self, key: str) -> None:
        """Removes the template of that key, and what is known of failed attempts. Idempotent."""
        _remove(f"{self._root}/{key}")
        self._forget_trial(key)

    def discard_useless(self, *, dry_run: bool) -> Iterator[str]:
        """Removes templates that no VM can continue from; yields each reason. Does nothing while a template is made."""
        if not any((self._keys(), self._keys(_TRIED), os.path.isdir(f"{self._root}/{_MAKING}"))):
            return
        with suppress(Unavailable), self.locked():
            if os.path.isdir(f"{self._root}/{_MAKING}"):
                yield f"make template in '{self._root}': the process that made it has gone"
                if not dry_run:
                    _remove(f"{self._root}/{_MAKING}")
            for key in self._keys():
                try:
                    self._stored(key)
                except NotFound:
                    continue
                except TemplateDamaged as error:
                    yield str(error)
                    if not dry_run:
                        self.discard(key)
            for key in self._keys(_TRIED):
                if not self.was_tried(key):
                    yield f"make template {key!r}: an attempt of more than {_TRY_AGAIN_S // 3600} hour ago failed"
                    if not dry_run:
                        self._forget_trial(key)

    def note_trial(self, key: str, reason: str = "") -> None:
        """For an hour no pod asks for a template of that key, unless one is made; `reason` is why it was not.

        If no file can be written there, because it is full or was removed, pods may ask sooner.
        """
        with suppress(OSError), open(f"{self._root}/{key}{_TRIED}", "w", encoding="utf-8") as file:
            file.write(reason)

    def was_tried(self, key: str) -> bool:
        try:
            return abs(time.time() - os.stat(f"{self._root}/{key}{_TRIED}").st_mtime) < _TRY_AGAIN_S
        except FileNotFoundError:
            return False

    def discard_all(self) -> int:
        """Removes all templates, and the root directory if nothing else is in it. Returns the number of templates."""
        keys = self._keys()
        for name in (*keys, _MAKING):
            _remove(f"{self._root}/{name}")
        for key in self._keys(_TRIED):
            self._forget_trial(key)
        with suppress(OSError):
            os.rmdir(self._root)
        return len(keys)

    @contextmanager
    def locked(self) -> Iterator[OwnedFd]:
        """No other process makes a template until the descriptor and all its copies are closed.

        Raises Unavailable while another process makes one.
        """
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        self._check_root()
        with open_directory(self._root) as directory:
            if not lock_within(directory, 0):
                raise Unavailable(f"make template in '{self._root}': another process makes one")
            yield directory

    @contextmanager
    def making(self, key: str, memory_mib: int) -> Iterator[str]:
        """An empty directory for a new template's machine; after the block the template is in use.

        The caller has locked the templates. Raises ResourceExhausted if the memory does not fit.
        """
        self._check_room(memory_mib)
        _remove(f"{self._root}/{_MAKING}")
        os.mkdir(f"{self._root}/{_MAKING}", 0o700)
        try:
            yield f"{self._root}/{_MAKING}"
            self.discard(key)
            os.rename(f"{self._root}/{_MAKING}", f"{self._root}/{key}")
        finally:
            _remove(f"{self._root}/{_MAKING}")
        self._forget_trial(key)
        self._make_room(key)

    def _forget_trial(self, key: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(f"{self._root}/{key}{_TRIED}")

    def _check_root(self) -> None:
        found = os.lstat(self._root)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise FailedPrecondition(
                f"make template in '{self._root}': not a directory that only this user may enter (template_path)"
            )

    def _check_room(self, memory_mib: int) -> None:
        room = os.statvfs(self._root)
        free_mib = room.f_bavail * room.f_frsize // MIB
        if free_mib < memory_mib:
            raise ResourceExhausted(
                f"make template in '{self._root}': {free_mib} MiB are free, its memory may take {memory_mib} MiB"
            )

    def _make_room(self, newest: str) -> None:
        found = [each for each in self.all() if isinstance(each, StoredTemplate)]
        found.sort(key=lambda each: (each.template.key == newest, each.used_ns), reverse=True)
        room_bytes = MOST_BYTES
        for number, each in enumerate(found):
            room_bytes -= each.used_bytes
            if number and (number >= MOST_TEMPLATES or room_bytes < 0):
                self.discard(each.template.key)

    def _keys(self, suffix: str = "") -> tuple[str, ...]:
        """The keys of all directories, or files, that have this suffix."""
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return ()
        keys = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
        return tuple(sorted(key for key in keys if _IS_KEY.fullmatch(key)))

    def _stored(self, key: str) -> StoredTemplate:
        directory = f"{self._root}/{key}"
        try:
            found = {name: os.lstat(f"{directory}/{name}") for name in (_MEMORY, _STATE, _RECORD)}
            template = _record(f"{directory}/{_RECORD}")
        except FileNotFoundError:
            if not os.path.isdir(directory):
                raise NotFound(f"find template {key!r} in '{self._root}': there is none") from None
            raise TemplateDamaged(f"use template {key!r}: a file of it is missing") from None
        except OSError as error:
            raise TemplateDamaged(f"use template {key!r}: {describe_os_error(error)}") from error
        for name, closed in ((_MEMORY, 0o033), (_STATE, 0o077), (_RECORD, 0o077)):
            if found[name].st_mode & closed or found[name].st_uid != os.geteuid():
                raise TemplateDamaged(f"use template {key!r}: others can open {name!r}")
        age_days = (time.time_ns() - template.made_ns) / _DAY_NS
        if age_days > MOST_DAYS:
            raise TemplateDamaged(f"use template {key!r}: it is {age_days:.0f} days old")
        if age_days < 0:
            raise TemplateDamaged(f"use template {key!r}: its age is not known, since the clock was set back")
        for path, identity in template.files:
            with suppress(FailedPrecondition):
                if _identity(path) == identity:
                    continue
            raise TemplateDamaged(f"use template {key!r}: it was made with another {path!r}")
        sizes = (template.memory_mib * MIB, template.state_bytes)
        if (found[_MEMORY].st_size, found[_STATE].st_size) != sizes or template.key != key:
            raise TemplateDamaged(f"use template {key!r}: its files have other sizes than when it was made")
        if _sha256(f"{directory}/{_STATE}") != template.state_sha256:
            raise TemplateDamaged(f"use template {key!r}: {_STATE!r} has another content than when it was made")
        used_bytes = sum(facts.st_blocks * 512 for facts in found.values())
        return StoredTemplate(
            template=template, directory=directory, used_bytes=used_bytes, used_ns=found[_RECORD].st_mtime_ns
        )


def write_record(directory: str, key: str, vm: LocalVm, facts: MachineFacts) -> None:
    """The machine in `directory` is described; call when its other files are complete."""
    template = Template(
        key=key,
        kernel=vm.boot.kernel,
        vcpus=vm.cpu.boot_vcpus,
        memory_mib=vm.memory.boot_mib,
        state_bytes=os.stat(f"{directory}/{_STATE}").st_size,
        state_sha256=_sha256(f"{directory}/{_STATE}"),
        made_ns=time.time_ns(),
        files=facts.files,
    )
    with open(os.open(f"{directory}/{_RECORD}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as f:
        f.write(msgspec.json.encode(template))


def _record(path: str) -> Template:
    with open(path, "rb") as file:
        return from_json(file.read(_MAX_RECORD_BYTES), Template, damaged(path, TemplateDamaged))


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(directory: str) -> None:
    """The template in it is gone; the directory stays if it has other files."""
    for name in (_RECORD, _STATE, _MEMORY):  # the record first: without it no reader uses the rest
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(f"{directory}/{name}")
    with suppress(OSError):
        os.rmdir(directory)


def machine_facts(vm: LocalVm) -> MachineFacts:
    """The facts of this host that determine the machine. Raises FailedPrecondition naming a file that is missing."""
    boot = vm.boot
    named = (vm.hypervisor_path, boot.kernel, boot.initrd, boot.image, boot.firmware)
    paths = (*(path for path in named if path), *(disk.path for disk in vm.extensions))
    files = tuple((path, _identity(path)) for path in paths)
    return MachineFacts(files=files, cpu=_cpu(), host_kernel=os.uname().release)


def _identity(path: str) -> str:
    with os_errors(f"look at {path!r}"):
        return file_identity(os.stat(path))


def _cpu() -> str:
    """The first CPU's lines, without those that change or differ by CPU."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        first = file.read().partition("\n\n")[0]
    changing = ("cpu MHz", "bogomips", "processor", "core id", "apicid", "initial apicid", "physical id")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() not in changing)
