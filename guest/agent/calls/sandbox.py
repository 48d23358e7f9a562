"""CreateSandbox and DestroySandbox."""

from __future__ import annotations

import _socket
import os
import stat

from guest.agent import log
from guest.agent.errors import FailedPrecondition, Internal, InvalidArgument
from guest.agent.runtime.children import find_program
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_RESOLV_CONF = "/run/kata-containers/sandbox/resolv.conf"
_GUEST_RESOLV_CONF = "/etc/resolv.conf"
_MODPROBE_TIMEOUT_S = 30.0
_HOOK_KINDS = ("prestart", "poststart", "poststop")


async def create(agent: Agent, request: Message) -> None:
    """Modules are loaded, the sandbox has its hostname and storages, hooks and DNS are known, loopback is up."""
    sandbox = agent.sandbox
    if sandbox.is_created:
        raise FailedPrecondition(f"create sandbox {request.sandbox_id!r}: {sandbox.id!r} was created before")
    if len(request.hostname.encode()) > 64:
        raise InvalidArgument(f"create sandbox: hostname {request.hostname!r} is longer than 64 bytes")
    sandbox.is_created = True
    try:
        sandbox.id = request.sandbox_id
        sandbox.hostname = request.hostname
        os.makedirs("/run/kata-containers", exist_ok=True)
        for module in request.kernel_modules:
            await _load_module(agent, module)
        _make_namespaces(agent)
        if request.sandbox_pidns and sandbox.pidns_pid is None:
            from guest.agent.container.pause import start_pause

            sandbox.pidns_pid = start_pause(agent)
            sandbox.pid_namespace = f"/proc/{sandbox.pidns_pid}/ns/pid"
        from guest.agent.storage.table import SANDBOX

        await agent.storages.add(request.storages, SANDBOX)
        if request.guest_hook_path:
            sandbox.hooks = find_hooks(request.guest_hook_path)
        _set_dns(request.dns)
        _loopback_up()
    except BaseException:
        sandbox.is_created = False  # the same request may be sent again: each step can be repeated
        raise
    log.info("sandbox created", sandbox=sandbox.id, hostname=sandbox.hostname)


async def destroy(agent: Agent, request: Message) -> None:
    """Every container is gone and the agent ends once this is answered."""
    for container in list(agent.sandbox.containers.values()):
        await container.remove()
    agent.sandbox.containers.clear()
    pause = agent.sandbox.pidns_pid
    if pause is not None and agent.children.is_running(pause):
        os.kill(pause, 9)
    os.sync()
    agent.wants_shutdown = True


async def _load_module(agent: Agent, module: Message) -> None:
    if not module.name or module.name.startswith("-"):
        raise InvalidArgument(f"load kernel module {module.name!r}: no module name")
    program = find_program("modprobe")
    if program is None:
        raise Internal(f"load kernel module {module.name!r}: the guest has no modprobe")
    ended = await agent.children.run([program, "--", module.name, *module.parameters], timeout_s=_MODPROBE_TIMEOUT_S)
    if ended.code != 0:
        cause = ended.stderr.decode("utf-8", "replace").strip() or f"modprobe exited {ended.code}"
        raise Internal(f"load kernel module {module.name!r}: {cause}")


def _make_namespaces(agent: Agent) -> None:
    """The UTS and IPC namespaces that containers share are this process's own, which in a guest nobody else has.

    Nothing of the agent depends on them, so further ones would only cost: the guest is the pod's.
    """
    if os.getpid() != 1:
        from guest.agent.storage import syscalls

        syscalls.unshare(syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC)
    if agent.sandbox.hostname:
        _socket.sethostname(agent.sandbox.hostname)


def find_hooks(folder: str) -> dict[str, list[Message]]:
    """Executable regular files in `folder`/prestart, poststart and poststop, as hooks, in order of their names."""
    hooks: dict[str, list[Message]] = {}
    for kind in _HOOK_KINDS:
        try:
            names = sorted(os.listdir(f"{folder}/{kind}"))
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{kind}/{name}"
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & 0o111:
                hooks.setdefault(kind, []).append(Message("Hook", Path=path, Args=[name, kind]))
    return hooks


def _set_dns(lines: list[str]) -> None:
    """The guest's resolv.conf has these lines; containers get theirs by mounts."""
    if not lines or not os.path.isfile(_GUEST_RESOLV_CONF):
        return
    from guest.agent.storage import mounts

    os.makedirs(os.path.dirname(_RESOLV_CONF), exist_ok=True)
    with open(_RESOLV_CONF, "w", encoding="utf-8") as file:
        file.write("\n".join(line.strip() for line in lines) + "\n")
    mounts.mount(_RESOLV_CONF, os.path.realpath(_GUEST_RESOLV_CONF), "bind", [])


def _loopback_up() -> None:
    from fcntl import ioctl
    from struct import pack, unpack_from

    get_flags, set_flags, is_up = 0x8913, 0x8914, 1
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        request = ioctl(probe.fileno(), get_flags, pack("16sH22x", b"lo", 0))
        (flags,) = unpack_from("H", request, 16)
        if not flags & is_up:
            ioctl(probe.fileno(), set_flags, pack("16sH22x", b"lo", flags | is_up))
    finally:
        probe.close()
