"""Where states are kept: <root>/<sandbox>/persist.json and <root>/<sandbox>/<container>/persist.json.

A second file, <register>/<sandbox>, says no more than that a shim of ours made the sandbox, and which. Kata's shims use
the same root, so without it nobody could tell whose a sandbox is whose state was lost or damaged.

A file is replaced whole (written aside, synced, renamed), so a reader finds the old or the new one, after a crash too.
Directories 0700, files 0600: bundles and addresses are nobody else's business.
"""

import contextlib
import json
import os
from collections.abc import Iterable

from pyshim.host.trees import remove_tree
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.snapshot import ContainerSnapshot
from pyshim.state.json_fields import Fields, StateDamaged
from pyshim.state.kata import as_kata_sees, container_as_kata_sees, kata_container
from pyshim.state.schema import (
    KEY,
    SandboxState,
    ShimRecord,
    head_to_json,
    kata_to_json,
    shim_from_json,
    shim_to_json,
    snapshot_to_json,
    state_from_json,
)

ROOT = "/run/vc/sbs"
REGISTER = "/run/pyshim/sandboxes"
FILE_NAME = "persist.json"
MAX_BYTES = 16 * 1024 * 1024
MAX_ENTRY_BYTES = 64 * 1024
_ASIDE = "~"
"""No id has it in it: in the register, and among the containers, other files are named by ids."""


class StateStore:
    """The states below one root directory. Knows files, not what they mean."""

    def __init__(self, *, root: str = ROOT, register: str | None = None) -> None:
        """Without `register` nothing is entered in one, and no sandbox is found there."""
        self.root = root
        self._register = register
        self._written: _SnapshotText | None = None
        self._containers: dict[tuple[str, str], tuple[ContainerSnapshot, int]] = {}
        """What the files of containers say; the number is the VMM's pid."""

    def directory(self, sandbox_id: str) -> str:
        """Where the sandbox's state is. Raises FailedPrecondition for an id that is no plain file name."""
        if sandbox_id in ("", ".", "..") or "/" in sandbox_id or "\0" in sandbox_id:
            raise FailedPrecondition(f"find state of {sandbox_id!r}: not a sandbox id")
        return f"{self.root}/{sandbox_id}"

    def save(self, state: SandboxState) -> None:
        """The state is on disk, whole, with a file for each of its containers. Raises FailedPrecondition."""
        directory = self.directory(state.sandbox_id)
        try:
            text, self._written = self._written, None
            had_containers = text is not None and text.is_of(state)
            if text is None or not had_containers:
                text = _SnapshotText(state, text)
            body = text.document(state)
            if len(body) > MAX_BYTES:
                raise FailedPrecondition(f"write state {directory!r}: {len(body)} bytes are above {MAX_BYTES}")
            try:
                _replace(f"{directory}/{FILE_NAME}", body)
            except FileNotFoundError:  # the first of many writes
                self._make(directory)
                _replace(f"{directory}/{FILE_NAME}", body)
            if not had_containers:
                self._save_containers(directory, state)
            self._written = text
        except OSError as error:
            raise FailedPrecondition(f"write state {directory!r}: {error.strerror}") from error

    def load(self, sandbox_id: str) -> SandboxState:
        """The sandbox's state. Raises NotFound, StateDamaged, StateTooNew, NotOurState; each names the file."""
        path = f"{self.directory(sandbox_id)}/{FILE_NAME}"
        try:
            with open(path, "rb") as file:
                body = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"read state {path!r}: no such file") from None
        except OSError as error:
            raise FailedPrecondition(f"read state {path!r}: {error.strerror}") from error
        if len(body) > MAX_BYTES:
            raise StateDamaged(f"read state {path!r}: larger than {MAX_BYTES} bytes")
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise StateDamaged(f"read state {path!r}: not JSON: {error}") from error
        state = state_from_json(document, path)
        if state.sandbox_id != sandbox_id:
            raise StateDamaged(f"read state {path!r}: it is the state of {state.sandbox_id!r}")
        return state

    def enter(self, sandbox_id: str, shim: ShimRecord) -> None:
        """The register says that the sandbox is this shim's. Raises FailedPrecondition."""
        if self._register is None:
            return
        try:
            os.makedirs(self._register, mode=0o700, exist_ok=True)
            _replace(self._entry(sandbox_id), _encoded(shim_to_json(shim)))
        except OSError as error:
            raise FailedPrecondition(f"write register {self._register!r}: {error.strerror}") from error

    def entered(self, sandbox_id: str) -> ShimRecord | None:
        """The shim that entered the sandbox; None when it is in no register, or the entry says nothing."""
        if self._register is None:
            return None
        path = self._entry(sandbox_id)
        try:
            return shim_from_json(Fields(json.loads(_content(path, MAX_ENTRY_BYTES)), path))
        except (ValueError, RecursionError, StateDamaged):
            return None

    def entered_ids(self) -> tuple[str, ...]:
        """Every sandbox in the register, in no order."""
        if self._register is None:
            return ()
        try:
            names = os.listdir(self._register)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(name for name in names if not name.endswith(_ASIDE))

    def names_us(self, sandbox_id: str) -> bool:
        """The state, however damaged, has our key in it."""
        return self.mentions(sandbox_id, (f'"{KEY}"'.encode(),))

    def mentions(self, sandbox_id: str, words: Iterable[bytes]) -> bool:
        """The state, however damaged, has one of the words in it."""
        text = _content(f"{self.directory(sandbox_id)}/{FILE_NAME}", MAX_BYTES)
        return any(word in text for word in words)

    def knows(self, sandbox_id: str) -> bool:
        """There is a state of the sandbox, readable or not, or an entry in the register."""
        if os.path.lexists(f"{self.directory(sandbox_id)}/{FILE_NAME}"):
            return True
        return self._register is not None and os.path.lexists(self._entry(sandbox_id))

    def _entry(self, sandbox_id: str) -> str:
        return f"{self._register}/{os.path.basename(self.directory(sandbox_id))}"

    def remove(self, sandbox_id: str) -> None:
        """Nothing of the sandbox's state is left. Idempotent; raises FailedPrecondition."""
        directory = self.directory(sandbox_id)
        self._written = None
        self._containers.clear()
        try:
            remove_tree(directory)
            if self._register is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._entry(sandbox_id))
        except OSError as error:
            raise FailedPrecondition(f"remove state {directory!r}: {error.strerror}") from error

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

    def _save_containers(self, directory: str, state: SandboxState) -> None:
        snapshot = state.snapshot
        containers = () if snapshot is None else snapshot.containers
        vmm_pid = 0 if snapshot is None else snapshot.vmm_pid
        wanted = {
            (state.sandbox_id, container.container_id): (container_as_kata_sees(container), vmm_pid)
            for container in containers
        }
        if self._containers == wanted:
            return
        self._remove_containers(directory, {container_id for _, container_id in wanted})
        self._containers = {slot: said for slot, said in self._containers.items() if slot in wanted}
        for slot, said in wanted.items():
            if self._containers.get(slot) == said:
                continue
            path = f"{directory}/{slot[1]}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            _replace(f"{path}/{FILE_NAME}", _encoded(kata_container(*said)))
            self._containers[slot] = said

    def _remove_containers(self, directory: str, wanted: set[str]) -> None:
        with os.scandir(directory) as entries:
            gone = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name not in wanted]
        for path in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{FILE_NAME}")
            # What is not ours in there stays, and its directory with it.
            with contextlib.suppress(OSError):
                os.rmdir(path)


class _SnapshotText:
    """A snapshot in its document's words, kept between writes: most of them change nothing but the ledger, or an exec
    of which Kata's keys do not tell.
    """

    def __init__(self, state: SandboxState, before: "_SnapshotText | None") -> None:
        snapshot = state.snapshot
        self._sandbox_id, self._snapshot = state.sandbox_id, snapshot
        self._seen = None if snapshot is None else as_kata_sees(snapshot)
        self._kata: bytes
        if before is not None and before._seen == self._seen:
            self._kata = before._kata
        else:
            self._kata = _encoded(kata_to_json(snapshot))
        self._ours = _encoded(snapshot_to_json(snapshot))

    def is_of(self, state: SandboxState) -> bool:
        """Snapshots are never changed, so it is the same one or another."""
        return state.sandbox_id == self._sandbox_id and state.snapshot is self._snapshot

    def document(self, state: SandboxState) -> bytes:
        """`state_to_json(state)`, encoded."""
        head = _encoded(head_to_json(state))
        return b'%b,"%b":%b,"Snapshot":%b}}' % (self._kata[:-1], KEY.encode(), head[:-1], self._ours)


def _encoded(document: dict[str, object] | None) -> bytes:
    return _ENCODER.encode(document).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _content(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def _replace(path: str, body: bytes) -> None:
    """`path` holds `body`; on failure, or after a power cut, it may hold what it held, but never a part."""
    aside = path + _ASIDE
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
