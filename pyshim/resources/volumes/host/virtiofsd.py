"""virtiofsd, the Rust one or QEMU's C one, given a socket that already listens.

Option tables: `virtiofsd --help` of 1.13 (Rust) and of QEMU 7.2 (C). Three traps of the C one decide the shape here:
without `-o source=` it shares the host's root directory, with `--syslog` its errors are lost, and a thread that its
libraries start before `main` keeps all rights that the program begins with. So the C one begins with the rights that it
needs in the end, in namespaces that the shim has made. The Rust one makes its own, gives up its rights, and only then
starts threads.
"""

import logging
import os
import re
from collections.abc import Iterator

import msgspec

from pyshim.host.fds import listening_socket
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.children import Child, Children
from pyshim.host.processes.launch import Isolation, SpawnFailed
from pyshim.host.processes.rights import CAPABILITIES
from pyshim.host.threads import in_own_thread
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import VirtiofsdFlavour
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.volumes import VirtiofsdPlan
from pyshim.resources.volumes.host.share_namespace import ShareNamespace, share_namespace
from pyshim.resources.volumes.host.virtiofsd_flavours import VirtiofsdFlavours

log = logging.getLogger(__name__)

LISTEN_FD = 3
CACHE_MODES = ("never", "metadata", "auto", "always")

# The plan decides these; a user's extra argument must not change them.
_OURS = frozenset(
    {"--fd", "--socket-path", "--shared-dir", "--cache", "--daemonize", "--print-capabilities", "--syslog"}
)
_OUR_SUBOPTIONS = frozenset({"source", "cache"})
_FILE_SERVER = ("chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "setfcap")
"""The capabilities of both flavours while they serve files."""
_TO_BEGIN = ("sys_chroot", "setpcap")
"""The C one needs them besides until it serves: the share becomes its root, and it gives up these two. The thread of
its libraries keeps them. In a namespace with the share and programs, and with a bounding set of the others, they are
good for nothing more."""
_NO_NODES = "-mknod"
"""virtiofsd runs without CAP_MKNOD. No image layer needs it: containerd unpacks layers and mounts their overlay on the
host, and the kernel makes the overlay's whiteouts with the rights of its mounter. A whiteout that the guest
makes itself (character device 0:0) has needed no capability since Linux 5.8; source: vfs_mknod in fs/namei.c.
"""
_HANDLES = "--inode-file-handles"
_NO_HANDLES = f"{_HANDLES}=never"
"""To use file handles, which 1.14 does by default, the Rust one keeps CAP_DAC_READ_SEARCH. With it open_by_handle_at(2)
opens any file of the share's file system, also outside the share. The C one has neither.
"""
_TAKES_VALUE = frozenset(
    {"--fd", "--socket-path", "--shared-dir", "--cache", "--tag", "--socket-group", "--thread-pool-size", "--sandbox"}
    | {"--seccomp", "--rlimit-nofile", "--log-level", "--xattrmap", "--modcaps", "--inode-file-handles", "--uid-map"}
    | {"--gid-map", "--translate-uid", "--translate-gid", "--migration-mode", "--migration-on-error", "-o"}
)
# Rust spelling -> the C one's `-o` spelling ("{}" takes the value).
_AS_C_SUBOPTION = {
    "--announce-submounts": "announce_submounts",
    "--xattr": "xattr",
    "--xattrmap": "xattrmap={}",
    "--posix-acl": "posix_acl",
    "--security-label": "security_label",
    "--killpriv-v2": "killpriv_v2",
    "--no-killpriv-v2": "no_killpriv_v2",
    "--writeback": "writeback",
    "--allow-direct-io": "allow_direct_io",
    "--no-readdirplus": "no_readdirplus",
    "--log-level": "log_level={}",
}
_C_LOG_LEVELS = {"error": "err", "warn": "warn", "info": "info", "debug": "debug", "trace": "debug"}
_SAME_FOR_C = frozenset({"--thread-pool-size", "--rlimit-nofile", "--socket-group"})


class VirtiofsdCommand(msgspec.Struct, frozen=True):
    argv: tuple[str, ...]
    capabilities: frozenset[int] | None
    """Those that it is started with; None for the shim's, which it gives up itself."""
    key: str
    """The word of `argv` that no other process has: it names the shared directory."""
    dropped: tuple[str, ...]
    """Extra arguments that this flavour lacks, or that would undo a decision; they are logged."""


def virtiofsd_command(plan: VirtiofsdPlan, flavour: VirtiofsdFlavour, *, in_view: bool = True) -> VirtiofsdCommand:
    """The argv for a socket that listens at LISTEN_FD; pure. `in_view`: the shim makes namespaces for it.

    Raises InvalidArgument for an unknown cache mode.
    """
    cache = plan.cache or "auto"
    if cache not in CACHE_MODES:
        raise InvalidArgument(f"build virtiofsd command for {plan.shared_dir!r}: unknown cache mode {plan.cache!r}")
    if flavour is VirtiofsdFlavour.RUST:
        return _rust_command(plan, cache)
    return _c_command(plan, cache, in_view)


def _rust_command(plan: VirtiofsdPlan, cache: str) -> VirtiofsdCommand:
    key = f"--shared-dir={plan.shared_dir}"
    options, modcaps = _without_modcaps(_options(plan.extra_args))
    argv = [plan.binary, f"--fd={LISTEN_FD}", key, f"--cache={cache}", f"--modcaps={modcaps}"]
    if all(option != _HANDLES for option, _ in options):
        argv.append(_NO_HANDLES)
    if plan.debug:
        argv.append("--log-level=debug")
    dropped: list[str] = []
    for option, value in options:
        if option in _OURS or (option == "-o" and _touches_ours(value)):
            dropped.append(_spelled(option, value))
        elif option == "-o":
            argv += [option, value or ""]
        else:
            argv.append(_spelled(option, value))
    return VirtiofsdCommand(tuple(argv), None, key, tuple(dropped))


def _c_command(plan: VirtiofsdPlan, cache: str, in_view: bool) -> VirtiofsdCommand:
    # It has no "metadata"; "none" is the nearest mode that never shows stale data.
    mode = {"never": "none", "metadata": "none"}.get(cache, cache)
    key = f"source={_c_quoted(plan.shared_dir)}"
    options, modcaps = _without_modcaps(_options(plan.extra_args))
    argv = [plan.binary, f"--fd={LISTEN_FD}", "-o", key, "-o", f"cache={mode}"]
    argv += ["-o", f"sandbox={'chroot' if in_view else 'namespace'}", "-o", f"modcaps={_c_quoted(modcaps)}"]
    dropped: list[str] = ["--cache=metadata"] if cache == "metadata" else []
    if plan.debug:
        argv += ["-o", "log_level=debug"]
    for option, value in options:
        translated = _for_c(option, value)
        if not translated:
            dropped.append(_spelled(option, value))
        argv += translated
    capabilities = _capabilities(modcaps) if in_view else None
    return VirtiofsdCommand(tuple(argv), capabilities, key, tuple(dropped))


def _capabilities(modcaps: str) -> frozenset[int]:
    """Those of a file server, changed by `modcaps` (`+name` and `-name`, colons between), and those to begin with."""
    names = {*_FILE_SERVER}
    for change in modcaps.split(":"):
        (names.add if change[:1] == "+" else names.discard)(change[1:].lower())
    return frozenset(CAPABILITIES[name] for name in (*names, *_TO_BEGIN) if name in CAPABILITIES)


def _for_c(option: str, value: str | None) -> list[str]:
    """The C spelling of one extra argument; empty when the C one lacks it."""
    if option in _SAME_FOR_C and value:
        return [f"{option}={value}"]
    if option == "-o" and value and not _touches_ours(value) and not value.startswith("sandbox="):
        return ["-o", _c_quoted(value)]
    if option == "--log-level":
        value = _C_LOG_LEVELS.get(value or "")
        if value is None:
            return []
    form = _AS_C_SUBOPTION.get(option)
    if form is None or ("{}" in form) != (value is not None):
        return []
    return ["-o", form.format(_c_quoted(value) if value else "")]


def _options(extra_args: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """(option, value) pairs, whether written `--a=b`, `--a b` or `-ob`; one for each sub-option of an `-o`."""
    found: list[tuple[str, str | None]] = []
    words = list(extra_args)
    while words:
        word = words.pop(0)
        if word.startswith("--") and "=" in word:
            option, _, value = word.partition("=")
            found.append((option, value))
        elif word.startswith("-o") and (len(word) > 2 or words):
            found += (("-o", part) for part in _suboptions(word[2:] or words.pop(0)))
        elif word in _TAKES_VALUE and words:
            found.append((word, words.pop(0)))
        else:
            found.append((word, None))
    return found


_Options = list[tuple[str, str | None]]


def _without_modcaps(options: _Options) -> tuple[_Options, str]:
    """The other options, and one list of capability changes: CAP_MKNOD goes, unless an extra argument names it.

    One list, because neither flavour adds up several: the Rust one refuses, the C one obeys the last.
    """
    rest: _Options = []
    changes: list[str] = []
    for option, value in options:
        if option == "--modcaps":
            changes.append(value or "")
        elif option == "-o" and value and value.startswith("modcaps="):
            changes.append(value.removeprefix("modcaps="))
        else:
            rest.append((option, value))
    caps = [cap for change in changes for cap in change.split(":") if cap]
    own = [] if "mknod" in {cap[1:].lower() for cap in caps} else [_NO_NODES]
    return rest, ":".join([*own, *caps])


def _suboptions(text: str) -> Iterator[str]:
    """The parts of an `-o`, as libfuse reads them: it splits at commas, and a backslash quotes one, or is octal."""
    escaped = re.compile(r"\\([0-3][0-7]{2}|.)", re.DOTALL)

    def plain(match: re.Match[str]) -> str:
        found = match[1]
        return chr(int(found, 8)) if len(found) == 3 else found

    for part in re.findall(r"(?:\\.|[^,\\]|\\$)+", text, re.DOTALL):
        yield escaped.sub(plain, part)


def _touches_ours(suboption: str | None) -> bool:
    """Also as the Rust one would read it, which splits at every comma."""
    return any(part.partition("=")[0] in _OUR_SUBOPTIONS for part in (suboption or "").split(","))


def _spelled(option: str, value: str | None) -> str:
    if value is None:
        return option
    return f"{option} {value}" if option == "-o" else f"{option}={value}"


def _c_quoted(value: str) -> str:
    """A value inside `-o`: libfuse's parser splits at commas unless escaped."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


class VirtiofsdProcess:
    """One running virtiofsd."""

    def __init__(
        self,
        child: Child,
        shared_dir: str,
        namespace: ShareNamespace | None,
        *,
        takes_groups: bool,
        ledger: Ledger,
        entries: tuple[LedgerEntry, ...],
    ) -> None:
        self.namespace = namespace
        """None: it sees the host's mounts."""
        self._child = child
        self._shared_dir = shared_dir
        self._ledger = ledger
        self._entries = entries
        self.pid = child.pid
        self.takes_groups = takes_groups
        """Rust's does; QEMU's C one has the container's user and first group only."""

    async def wait(self) -> str:
        """The way it ended, with its last output, once it has."""
        await self._child.wait()
        return f"virtiofsd of {self._shared_dir!r} ended: {self._child.describe_exit()}"

    async def stop(self) -> None:
        """The daemon and its socket are gone. Idempotent. It has nothing to flush: the host's files are the truth."""
        await self._child.end()
        if self.namespace is not None:
            self.namespace.close()
        for entry in self._entries:
            await self._ledger.release(entry)


async def start_virtiofsd(
    plan: VirtiofsdPlan, ledger: Ledger, children: Children, *, flavours: VirtiofsdFlavours
) -> VirtiofsdProcess:
    """virtiofsd runs and its socket takes connections.

    Ledger: SOCKET `plan.listen_path`, and PROCESS under the word that names the share; both released again on error.
    """
    flavour = await flavours.of(plan.binary)
    _check_directory(plan.shared_dir)
    socket_entry = LedgerEntry(kind=ResourceKind.SOCKET, key=plan.listen_path)
    ledger.acquire(socket_entry)
    namespace = None
    try:
        namespace = await in_own_thread(share_namespace, plan)
        command = virtiofsd_command(plan, flavour, in_view=namespace is not None)
        for argument in command.dropped:
            log.warning("virtiofsd argument dropped", extra={"argument": argument, "flavour": str(flavour)})
        with listening_socket(plan.listen_path) as listener:
            child = await children.spawn(
                command.argv,
                fds={LISTEN_FD: listener.fileno()},
                # It needs no network: abstract sockets and 127.0.0.1 of the host are out of its reach.
                isolation=Isolation(
                    empty_netns=True,
                    view=namespace.view if namespace is not None else None,
                    own_processes=command.capabilities is not None,
                    capabilities=command.capabilities,
                    labels=plan.labels,
                ),
                dumps_core=plan.dumps_core,
                ledger=ledger,
                ledger_key=command.key,
            )
        if namespace is not None and command.capabilities is not None:
            await _confine(child, namespace, plan, command, ledger)
    except BaseException:
        if namespace is not None:
            namespace.close()
        await ledger.release(socket_entry)
        raise
    log.info("virtiofsd started", extra={"pid": child.pid, "shared_dir": plan.shared_dir})
    process_entry = LedgerEntry(kind=ResourceKind.PROCESS, key=command.key)
    return VirtiofsdProcess(
        child,
        plan.shared_dir,
        namespace,
        takes_groups=flavour is VirtiofsdFlavour.RUST,
        ledger=ledger,
        entries=(process_entry, socket_entry),
    )


async def _confine(
    child: Child, namespace: ShareNamespace, plan: VirtiofsdPlan, command: VirtiofsdCommand, ledger: Ledger
) -> None:
    """It sees itself alone: it waits for QEMU, so this is not too late.

    Raises SpawnFailed when it has ended or the kernel refuses; it is gone then, from the ledger too.
    """
    try:
        await in_own_thread(namespace.show_only, child.pid)
    except BaseException as error:
        await child.end()
        await ledger.release(LedgerEntry(kind=ResourceKind.PROCESS, key=command.key))
        if not isinstance(error, OSError):
            raise
        cause = f"{describe_os_error(error)}: {child.describe_exit()}"
        raise SpawnFailed(f"confine virtiofsd of {plan.shared_dir!r}: {cause}") from error


def _check_directory(path: str) -> None:
    if not os.path.isdir(path):
        raise FailedPrecondition(f"share directory {path!r}: not a directory")
