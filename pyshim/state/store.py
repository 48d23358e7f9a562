"""Where states are kept: <root>/<sandbox>/persist.json and <root>/<sandbox>/<container>/persist.json.

A second file, <register>/<sandbox>, says no more than that a shim of ours made the sandbox, and which. Kata's shims use
the same root, so without it nobody could tell whose a sandbox is whose state was lost or damaged.

A file is replaced whole (written aside, synced, renamed), so a reader finds the old or the new one, after a crash too.
Directories 0700, files 0600: bundles and addresses are nobody else's business.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable

from pyshim.host.trees import remove_tree
from pyshim.host.whole_files import ASIDE, replace_file
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot
from pyshim.state.json_fields import Fields, StateDamaged
from pyshim.state.kata import container_as_kata_sees, fields_of, kata_container, told, told_of_container
from pyshim.state.schema import (
    KEY,
    SandboxState,
    ShimRecord,
    container_to_json,
    execs_to_json,
    head_to_json,
    kata_to_json,
    sandbox_to_json,
    shim_from_json,
    shim_to_json,
    state_from_json,
)

ROOT = "/run/vc/sbs"
REGISTER = "/run/pyshim/sandboxes"
FILE_NAME = "persist.json"
MAX_BYTES = 16 * 1024 * 1024
MAX_ENTRY_BYTES = 64 * 1024


class StateStore:
    """The states below one root directory. Knows files, not what they mean."""

    def __init__(self, *, root: str = ROOT, register: str | None = None) -> None:
        """Without `register` nothing is entered in one, and no sandbox is found there."""
        self.root = root
        self._register = register
        self._text = _StateText()
        self._complete: tuple[str, SandboxSnapshot | None] | None = None
        """The sandbox and its snapshot whose containers' files are there as well."""
        self._containers: dict[tuple[str, str], tuple[object, int]] = {}
        """What the files of containers tell; the number is the VMM's pid."""

    def directory(self, sandbox_id: str) -> str:
        """Where the sandbox's state is. Raises FailedPrecondition for an id that is no plain file name."""
        if sandbox_id in ("", ".", "..") or "/" in sandbox_id or "\0" in sandbox_id:
            raise FailedPrecondition(f"find state of {sandbox_id!r}: not a sandbox id")
        return f"{self.root}/{sandbox_id}"

    def save(self, state: SandboxState) -> None:
        """The state is on disk, whole, with a file for each of its containers. Raises FailedPrecondition."""
        directory = self.directory(state.sandbox_id)
        try:
            complete, self._complete = self._complete, None
            body = self._text.document(state)
            if len(body) > MAX_BYTES:
                raise FailedPrecondition(f"write state {directory!r}: {len(body)} bytes are above {MAX_BYTES}")
            try:
                _replace(f"{directory}/{FILE_NAME}", body)
            except FileNotFoundError:  # the first of many writes
                self._make(directory)
                _replace(f"{directory}/{FILE_NAME}", body)
            if complete is None or complete[0] != state.sandbox_id or complete[1] is not state.snapshot:
                self._save_containers(directory, state)
            self._complete = state.sandbox_id, state.snapshot
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
            _replace(self._entry(sandbox_id), _encoded(shim_to_json(shim)).encode())
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
        return tuple(name for name in names if not name.endswith(ASIDE))  # as no id does

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
        self._complete = None
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
            (state.sandbox_id, container.container_id): (told_of_container(container), vmm_pid)
            for container in containers
        }
        if self._containers == wanted:
            return
        self._remove_containers(directory, {container_id for _, container_id in wanted})
        self._containers = {slot: said for slot, said in self._containers.items() if slot in wanted}
        for container in containers:
            slot = (state.sandbox_id, container.container_id)
            if self._containers.get(slot) == wanted[slot]:
                continue
            path = f"{directory}/{container.container_id}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            document = kata_container(container_as_kata_sees(container), vmm_pid)
            _replace(f"{path}/{FILE_NAME}", _encoded(document).encode())
            self._containers[slot] = wanted[slot]

    def _remove_containers(self, directory: str, wanted: set[str]) -> None:
        with os.scandir(directory) as entries:
            gone = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name not in wanted]
        for path in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{FILE_NAME}")
            # What is not ours in there stays, and its directory with it.
            with contextlib.suppress(OSError):
                os.rmdir(path)


class _StateText:
    """The text of one state after the other. Most changes are of the ledger alone, or of an exec, of which Kata's keys
    do not tell: what has been encoded and has not changed since is not encoded again.
    """

    def __init__(self) -> None:
        self._snapshot: SandboxSnapshot | None = None
        self._kata = _Kept()
        self._head = _Kept()
        self._sandbox = _Kept()
        self._containers: dict[str, _Kept] = {}
        self._ours = "null"

    def document(self, state: SandboxState) -> bytes:
        """`state_to_json(state)`, encoded."""
        snapshot = state.snapshot
        if snapshot is not self._snapshot:  # snapshots are never changed
            self._ours = "null" if snapshot is None else self._follow(snapshot)
            self._snapshot = snapshot
        kata = self._kata.text(None if snapshot is None else told(snapshot), lambda: kata_to_json(snapshot))
        head = self._head.text((state.sandbox_id, state.shim, state.ledger), lambda: head_to_json(state))
        return f'{kata[:-1]},"{KEY}":{head[:-1]},"Snapshot":{self._ours}}}}}'.encode()

    def _follow(self, snapshot: SandboxSnapshot) -> str:
        sandbox = self._sandbox.text(_OF_SANDBOX(snapshot), lambda: sandbox_to_json(snapshot))
        former = self._containers
        self._containers = {each.container_id: former.get(each.container_id, _Kept()) for each in snapshot.containers}
        containers = ",".join([self._container(container) for container in snapshot.containers])
        return f'{sandbox[:-1]},"Containers":[{containers}]}}'

    def _container(self, container: ContainerSnapshot) -> str:
        kept = self._containers[container.container_id]
        text = kept.text(_OF_CONTAINER(container), lambda: container_to_json(container))
        return f'{text[:-1]},"Execs":{_encoded(execs_to_json(container))}}}'


class _Kept:
    """The text of an object, for as long as what it is made of stays the same."""

    __slots__ = ("_of", "_text")

    def __init__(self) -> None:
        self._of: object = self
        self._text = ""

    def text(self, of: object, make: Callable[[], object]) -> str:
        if of != self._of:
            self._text = _encoded(make())
            self._of = of
        return self._text


_OF_SANDBOX = fields_of(SandboxSnapshot, without=("containers",))
_OF_CONTAINER = fields_of(ContainerSnapshot, without=("execs",))


def _encoded(document: object) -> str:
    return _ENCODER.encode(document)


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _content(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def _replace(path: str, body: bytes) -> None:
    """`path` holds `body`; only the shim that owns the sandbox writes here."""
    replace_file(path, body, mode=0o600, durable=True)
