"""The peer's work for each call, and its record of each VM: on disk, so that the next peer has it too."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import disks, machine
from .certificates import Authority
from .faults import Faults
from .machine import Machine, MachineError, Running
from .proxy import AgentProxy

log = logging.getLogger("remote.peer")

VERSION = "0.0.0"
SOCKET_NAME = "agent.ttrpc"
_RECORDS, _RECORD = "vms", "vm.json"
NAME = "io.kubernetes.cri.sandbox-name"
NAMESPACE = "io.kubernetes.cri.sandbox-namespace"
_HYPERVISOR = "io.katacontainers.config.hypervisor."
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_DEFAULT_VCPUS, _DEFAULT_MEMORY_MIB = 1, 512
_START_WITHIN_S = 300.0


class Refused(Exception):
    """Why a call fails, in words for the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One VM from CreateVM to StopVM. `running` is None until StartVM has made it, and after its boot failed."""

    id: str
    pod: str
    namespace: str
    netns: str
    server_name: str
    vcpus: int
    memory_mib: int
    annotations: dict[str, str]
    running: Running | None = None


@dataclass(slots=True)
class _Vm:
    record: Record
    proxy: AgentProxy | None = None
    boot: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None

    async def let_go(self) -> None:
        """Nothing of this process looks after the VM any more, and its agent cannot be reached."""
        for task in (self.boot, self.watch):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.proxy is not None:
            await self.proxy.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`directory` holds everything of the peer but `pods`, where the agents' sockets are."""

    directory: Path
    pods: Path
    guest: Path
    images: Path | None
    """A tar file with an OCI image layout, for guests that pull."""
    accelerator: str


class Peer:
    """The calls of `hypervisor.Hypervisor` as methods that raise Refused."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._vms: dict[str, _Vm] = {}
        self._records = settings.directory / _RECORDS
        self.faults = Faults(settings.directory / "faults")

    async def open(self) -> None:
        """VMs of an earlier peer are known, and the agents of those that run can be reached."""
        self._records.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._settings.pods.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._authority = Authority(self._settings.directory / "tls")
        self._images = self._settings.directory / "images.img" if self._settings.images else None
        if self._settings.images is not None and self._images is not None:
            disks.write_images_disk(self._images, self._settings.images)
        for record in map(_record, saved(self._settings.directory)):
            vm = self._vms[record.id] = _Vm(record)
            if record.running is not None and machine.is_running(record.running):
                await self._listen(vm, record.running)
                self._watch(vm, record.running)
                log.info("found vm %s", record.id)

    async def close(self) -> None:
        """The service does not listen any more; VMs that run go on running, boots under way are given up."""
        for vm in self._vms.values():
            await vm.let_go()

    def list(self) -> tuple[tuple[Record, bool], ...]:
        """Every VM, and whether it runs."""
        records = [vm.record for vm in self._vms.values()]
        return tuple((r, r.running is not None and machine.is_running(r.running)) for r in records)

    async def create(self, id: str, annotations: dict[str, str], netns: str) -> str:
        """The path where the agent will answer once the VM is started. Nothing runs yet."""
        if not id:
            raise Refused("empty sandbox id")
        if not _ID.fullmatch(id) or len(id) > 128:
            raise Refused(f"sandbox id {id[:200]!r} is no name of a directory")
        for key in (NAME, NAMESPACE):
            if not annotations.get(key):
                raise Refused(f"annotation {key} is missing")
        if not _is_namespace(netns):
            raise Refused(f"failed to inspect netns {netns}: no such file")
        if id in self._vms:
            raise Refused(f"adding sandbox: sandbox {id} already exists")
        record = Record(
            id=id,
            pod=annotations[NAME],
            namespace=annotations[NAMESPACE],
            netns=netns,
            server_name="podvm-" + hashlib.sha256(id.encode()).hexdigest()[:16],
            vcpus=_number(annotations, "default_vcpus") or _DEFAULT_VCPUS,
            memory_mib=_number(annotations, "default_memory") or _DEFAULT_MEMORY_MIB,
            annotations=annotations,
        )
        self._vms[id] = _Vm(record)
        directory = self._directory(id)
        directory.mkdir(mode=0o700)
        self._socket(id).parent.mkdir(exist_ok=True, mode=0o700)
        files = {
            "apf.json": disks.daemon_configuration(
                pod=record.pod,
                namespace=record.namespace,
                server=self._authority.server(record.server_name),
                client_authority=self._authority.certificate,
            )
        }
        if initdata := annotations.get(_HYPERVISOR + "cc_init_data"):
            files["initdata"] = initdata.encode()
        disks.write_config_disk(directory / "config.img", files)
        self._save(record)
        return str(self._socket(id))

    async def start(self, id: str) -> None:
        """The VM runs and its forwarder has been reached; after an error it does not run."""
        vm = self._known(id, "getting sandbox")
        if vm.boot is not None or vm.record.running is not None:
            raise Refused(f"creating an instance : sandbox {id} has been started already")
        vm.boot = asyncio.create_task(self._boot(vm), name=f"boot {id}")
        try:
            # The caller may go away; the VM comes up all the same, and StopVM finds it.
            await asyncio.shield(vm.boot)
        except asyncio.CancelledError as error:
            if vm.boot.cancelled():
                raise Refused(f"creating an instance : sandbox {id} was stopped") from error
            raise
        except MachineError as error:
            raise Refused(f"creating an instance : {error}") from error
        finally:
            if vm.boot.done():
                vm.boot = None

    async def stop(self, id: str) -> None:
        """Nothing is left of the VM, here or in QEMU."""
        vm = self._known(id, "stopping VM")
        await vm.let_go()
        if vm.record.running is not None:
            await machine.end(vm.record.running)
        shutil.rmtree(self._socket(id).parent, ignore_errors=True)
        shutil.rmtree(self._directory(id))
        del self._vms[id]

    async def _boot(self, vm: _Vm) -> None:
        record = vm.record
        running = await machine.boot(self._machine(record))
        try:
            # Before anything else: from here on a peer that dies leaves a VM that the next one must know.
            self._save(replace(record, running=running))
            await self._listen(vm, running)
            assert vm.proxy is not None
            reaching = asyncio.create_task(vm.proxy.reach(), name=f"reach {record.id}")
            ended = asyncio.create_task(machine.until_ended(running), name=f"await end of {record.id}")
            try:
                await asyncio.wait({reaching, ended}, timeout=_START_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
                if not reaching.done():
                    how = "it ended" if ended.done() else f"its forwarder is silent for {_START_WITHIN_S:g} s"
                    words = machine.words_of(self._directory(record.id))
                    raise MachineError(f"boot {record.server_name!r}: {how}: {words}")
            finally:
                for task in (reaching, ended):
                    task.cancel()
                await asyncio.gather(reaching, ended, return_exceptions=True)
        except BaseException:
            if vm.proxy is not None:
                await vm.proxy.close()
            await machine.end(running)
            self._save(record)
            raise
        vm.record = replace(record, running=running)
        self._watch(vm, running)

    async def _listen(self, vm: _Vm, running: Running) -> None:
        path, name = self._socket(vm.record.id), vm.record.server_name
        vm.proxy = AgentProxy(path, running.port, name, self._authority.client_context())
        path.parent.mkdir(exist_ok=True, mode=0o700)
        await vm.proxy.open()

    def _watch(self, vm: _Vm, running: Running) -> None:
        """The agent's socket goes with its VM: who connects is refused, not kept waiting."""

        async def watch() -> None:
            await machine.until_ended(running)
            log.info("vm %s has ended", vm.record.id)
            if vm.proxy is not None:
                await vm.proxy.close()

        vm.watch = asyncio.create_task(watch(), name=f"watch {vm.record.id}")

    def _machine(self, record: Record) -> Machine:
        return Machine(
            name=record.server_name,
            directory=self._directory(record.id),
            guest=self._settings.guest,
            images=self._images,
            vcpus=record.vcpus,
            memory_mib=record.memory_mib,
            accelerator=self._settings.accelerator,
        )

    def _known(self, id: str, doing: str) -> _Vm:
        if not id:
            raise Refused(f"{doing}: empty sandbox id")
        if id not in self._vms:
            raise Refused(f"{doing}: sandbox {id} does not exist")
        return self._vms[id]

    def _directory(self, id: str) -> Path:
        return self._records / id

    def _socket(self, id: str) -> Path:
        return self._settings.pods / id / SOCKET_NAME

    def _save(self, record: Record) -> None:
        file = self._directory(record.id) / _RECORD
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record), indent=1))
        fresh.rename(file)


def saved(directory: Path) -> list[dict[str, Any]]:
    """The records of each VM that a peer on `directory` has written, also for who looks on while it serves."""
    found = []
    for file in sorted((directory / _RECORDS).glob(f"*/{_RECORD}")):
        with contextlib.suppress(FileNotFoundError):
            found.append(json.loads(file.read_text()))
    return found


def _record(members: dict[str, Any]) -> Record:
    running = members["running"]
    return Record(**{**members, "running": Running(**running) if running else None})


def _is_namespace(path: str) -> bool:
    return bool(path) and os.path.exists(path)


def _number(annotations: dict[str, str], key: str) -> int:
    """A decimal annotation; 0 without one and for other text than a number, as the adaptor reads them."""
    with contextlib.suppress(ValueError):
        return max(0, int(annotations.get(_HYPERVISOR + key, "")))
    return 0
