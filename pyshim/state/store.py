"""States as files: <root>/<sandbox>/persist.json and <root>/<sandbox>/<container>/persist.json.

A second file, <register>/<sandbox>, says which shim of ours made the sandbox, and nothing else. Kata's shims use
the same root, so the register identifies our sandboxes whose state was lost or damaged.

A file is replaced whole (written aside, synced, renamed), so a reader finds the old or the new one, after a crash too.
Directories have mode 0700 and files 0600: bundles and addresses are for their owner alone.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable

import msgspec

from pyshim.host.fds import with_spare_descriptors
from pyshim.host.files import ASIDE, remove_tree, replace_file
from pyshim.host.os_errors import os_errors
from pyshim.model.decoding import damaged, from_json, json_value
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.places import STATE_ROOT
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.state.schema import (
    CHECKSUM,
    KEY,
    SandboxState,
    ShimRecord,
    StateDamaged,
    document_of,
    kata_container,
    state_from_json,
)

FILE_NAME = "persist.json"
MAX_BYTES = 16 * 1024 * 1024
"""Bytes of a state: tens of times that of a pod with a thousand mounts."""
MAX_ENTRY_BYTES = 64 * 1024
"""Bytes of an entry in the register: a few hundred are usual."""


class StateStore:
    """The states below one root directory, as files; `schema.py` has their format."""

    def __init__(self, *, root: str = STATE_ROOT, register: str | None = None) -> None:
        """Without a `register` no sandbox is entered in one or found there."""
        self.root = root
        self._register = register
        self._written: dict[str, bytes] = {}
        """The files of the last sandbox's containers, by directory; empty after a failed write."""

    def directory(self, sandbox_id: str) -> str:
        """The directory of the sandbox's state. Raises FailedPrecondition for an id that is not a file name."""
        if sandbox_id in ("", ".", "..") or "/" in sandbox_id or "\0" in sandbox_id:
            raise FailedPrecondition(f"find state of {sandbox_id!r}: not a sandbox id")
        return f"{self.root}/{sandbox_id}"

    def save(self, state: SandboxState) -> None:
        """The state is on disk, whole, with a file for each of its containers. Raises FailedPrecondition."""
        directory = self.directory(state.sandbox_id)
        with os_errors(f"write state {directory!r}"):
            body = _sealed(_encoded(document_of(state)).removesuffix(_END))
            if len(body) > MAX_BYTES:
                raise FailedPrecondition(f"write state {directory!r}: {len(body)} bytes are above {MAX_BYTES}")
            with_spare_descriptors(self._write, directory, body, state.snapshot)

    def _write(self, directory: str, body: bytes, snapshot: SandboxSnapshot | None) -> None:
        try:
            _replace(f"{directory}/{FILE_NAME}", body)
        except FileNotFoundError:  # the first of many writes
            self._make(directory)
            _replace(f"{directory}/{FILE_NAME}", body)
        self._save_containers(directory, snapshot)

    def load(self, sandbox_id: str) -> SandboxState:
        """The sandbox's state. Raises NotFound, StateDamaged, StateTooNew, NotOurState; each names the file."""
        path = f"{self.directory(sandbox_id)}/{FILE_NAME}"
        try:
            body = _read(path, MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"read state {path!r}: no such file") from None
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO):
                raise StateDamaged(f"read state {path!r}: not a regular file") from error
            raise FailedPrecondition(f"read state {path!r}: {error.strerror}") from error
        if len(body) > MAX_BYTES:
            raise StateDamaged(f"read state {path!r}: larger than {MAX_BYTES} bytes")
        sealed = _is_sealed(body, path)
        document = json_value(body, lambda problem: StateDamaged(f"read state {path!r}: {problem}"))
        state = state_from_json(document, path, sealed=sealed)
        if state.sandbox_id != sandbox_id:
            raise StateDamaged(f"read state {path!r}: it is the state of {state.sandbox_id!r}")
        return state

    def enter(self, sandbox_id: str, shim: ShimRecord) -> None:
        """The register says that the sandbox is this shim's. Raises FailedPrecondition."""
        if self._register is None:
            return
        with os_errors(f"write register {self._register!r}"):
            os.makedirs(self._register, mode=0o700, exist_ok=True)
            _replace(self._entry(sandbox_id), _encoded(shim))

    def entered(self, sandbox_id: str) -> ShimRecord | None:
        """The shim that entered the sandbox; None without a readable entry."""
        if self._register is None:
            return None
        path = self._entry(sandbox_id)
        with contextlib.suppress(StateDamaged):
            return from_json(_content(path, MAX_ENTRY_BYTES), ShimRecord, damaged(path, StateDamaged))
        return None

    def entered_ids(self) -> tuple[str, ...]:
        """Every sandbox in the register, in no order."""
        if self._register is None:
            return ()
        try:
            names = os.listdir(self._register)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(name for name in names if not name.endswith(ASIDE))  # no id ends so

    def names_us(self, sandbox_id: str) -> bool:
        """The state, however damaged, contains our key."""
        return self.mentions(sandbox_id, (f'"{KEY}"'.encode(),))

    def mentions(self, sandbox_id: str, texts: Iterable[bytes]) -> bool:
        """The state, however damaged, contains one of the texts."""
        content = _content(f"{self.directory(sandbox_id)}/{FILE_NAME}", MAX_BYTES)
        return any(text in content for text in texts)

    def has_record(self, sandbox_id: str) -> bool:
        """There is a state of the sandbox, readable or not, or an entry in the register."""
        if os.path.lexists(f"{self.directory(sandbox_id)}/{FILE_NAME}"):
            return True
        return self._register is not None and os.path.lexists(self._entry(sandbox_id))

    def _entry(self, sandbox_id: str) -> str:
        return f"{self._register}/{os.path.basename(self.directory(sandbox_id))}"

    def remove(self, sandbox_id: str) -> None:
        """The sandbox's state is removed. Idempotent; raises FailedPrecondition."""
        directory = self.directory(sandbox_id)
        self._written = {}
        with os_errors(f"remove state {directory!r}"):
            remove_tree(directory)
            if self._register is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._entry(sandbox_id))

    def sandbox_ids(self) -> tuple[str, ...]:
        """Every sandbox that has a state here, ours or another runtime's, in no order."""
        try:
            with os.scandir(self.root) as entries:
                return tuple(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return ()

    def _make(self, directory: str) -> None:
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)

    def _save_containers(self, directory: str, snapshot: SandboxSnapshot | None) -> None:
        """Each container has its file; only files that change are written."""
        containers = snapshot.containers if snapshot is not None else ()
        vmm_pid = snapshot.vmm_pid if snapshot is not None else 0
        bodies = {f"{directory}/{each.container_id}": _encoded(kata_container(each, vmm_pid)) for each in containers}
        if self._written == bodies:
            return
        former, self._written = self._written, {}
        self._remove_containers(directory, {container.container_id for container in containers})
        for path, body in bodies.items():
            if former.get(path) != body:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                _replace(f"{path}/{FILE_NAME}", body)
        self._written = bodies

    def _remove_containers(self, directory: str, wanted: set[str]) -> None:
        with os.scandir(directory) as entries:
            gone = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name not in wanted]
        for path in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{FILE_NAME}")
            # Another program's file stays, and its directory with it.
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _encoded(document: object) -> bytes:
    """JSON text. `json` writes lone surrogates, which a spec's JSON may have and msgspec refuses."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(document), separators=(",", ":")).encode()


def _sealed(body: bytes) -> bytes:
    """`body`, which lacks `_END`, with its checksum and `_END`."""
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + b'"' + _END


def _is_sealed(body: bytes, path: str) -> bool:
    """True when a checksum ends the file and is right; False without one. Raises StateDamaged when it is wrong."""
    start = len(body) - _SEAL_BYTES
    if start < 0 or body[start : start + len(_SEAL)] != _SEAL or not body.endswith(b'"' + _END):
        return False
    if _sealed(body[:start]) != body:
        raise StateDamaged(f"read state {path!r}: its checksum is wrong")
    return True


_SEAL = f',"{CHECKSUM}":"'.encode()
_END = b"}}"
"""The end of our object and of the document."""
_SEAL_BYTES = len(_SEAL) + 2 * hashlib.sha256().digest_size + len(b'"' + _END)


def _content(path: str, limit: int) -> bytes:
    try:
        return _read(path, limit)
    except OSError:
        return b""


def _read(path: str, limit: int) -> bytes:
    """The first `limit` bytes of a regular file. Raises OSError: EINVAL for a FIFO, which is not waited for."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(min(found.st_size, limit))  # Python allocates what it is told to read


def _replace(path: str, body: bytes) -> None:
    """The file has the content `body`. Only the shim that owns the sandbox writes it."""
    replace_file(path, body, mode=0o600, durable=True)
