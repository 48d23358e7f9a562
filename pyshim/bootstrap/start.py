"""`start`: containerd's request for a shim that serves one container, answered with the address of its socket.

containerd reads stdout and stderr as one text and takes it for the answer, so nothing else may ever be written to
either, and it waits for their end, so the daemon must not have them. Nobody calls `delete` after a failed `start`:
whatever it made, it removes.
"""

import errno
import posix
import sys

from pyshim.bootstrap import address, spec
from pyshim.bootstrap.argv import Invocation
from pyshim.bootstrap.errors import BootstrapError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

    from pyshim.bootstrap.dialect import Caller

ZYGOTE_DIR = "/run/pyshim"
_MAX_STDIN_BYTES = 16 << 20


def main(call: Invocation, *, launcher: str, socket_dir: str = address.SOCKET_DIR, zygote_dir: str = ZYGOTE_DIR) -> int:
    """The exit code of `start`; the daemon it leaves is this interpreter running `launcher` again, for `serve`."""
    program = [sys.executable, "-I", "-S", address.absolute(launcher)]
    try:
        start(call, program=program, environment=_environment(), socket_dir=socket_dir, zygote_dir=zygote_dir)
    except BootstrapError as error:
        posix.write(2, f"{error}\n".encode())
        return 1
    return 0


def start(
    call: Invocation,
    *,
    program: "list[str]",
    environment: "dict[str, str]",
    socket_dir: str,
    zygote_dir: str,
    stdin_fd: int = 0,
    stdout_fd: int = 1,
) -> None:
    """A daemon listens for the container's group, containerd knows its address, the bundle has it in `address`.

    Of simultaneous calls for one group one makes the daemon, by executing `program` with the arguments of `serve`; all
    give the same answer. Raises BootstrapError, and then neither daemon nor socket nor `address` file of ours is left.
    """
    _check(call)
    said = _read_all(stdin_fd)
    bundle = address.absolute(call.bundle) if call.bundle else posix.getcwd()
    group = spec.group_id(bundle, call.id)
    zygote = None
    if group == call.id:  # else a shim of the pod is there, and no other is needed
        # Early: a fork examines us while we load the rest and find our socket.
        zygote = _connect_zygote(environment, zygote_dir)
    from pyshim.bootstrap import daemon as daemons
    from pyshim.bootstrap import dialect

    caller = dialect.caller(said, call)
    path = address.socket_path(caller.socket_dir or socket_dir, call.address, call.namespace, group)
    listener = address.claim(path)
    if listener is None:
        if zygote is not None:
            zygote.close()
        _tell(bundle, path, caller, stdout_fd)
        return
    try:
        if group != call.id:
            zygote = _connect_zygote(environment, zygote_dir)
        daemon = daemons.make_daemon(
            program,
            _serve_arguments(call, caller, group, bundle, environment),
            environment=environment,
            listening_fd=listener.fileno(),
            log_path=f"{bundle}/log",
            shim_cgroup=caller.shim_cgroup,
            zygote=zygote,
            zygote_dir=zygote_dir,
        )
        try:
            _tell(bundle, path, caller, stdout_fd)
        except BaseException:
            daemon.end()
            raise
        daemon.release()
    except BaseException:
        address.abandon(listener, path)
        raise
    listener.close()


def _connect_zygote(environment: "dict[str, str]", directory: str) -> "socket | None":
    """A connection to the node's zygote; None where there is none, or where it shall not be used."""
    choice = environment.get("PYSHIM_ZYGOTE", "")
    # A core of its own is asked of the kernel by `daemonize.spawn`, before the fork.
    if choice == "off" or environment.get("SCHED_CORE") or not address.is_there(directory):
        return None
    from pyshim.bootstrap.zygote import connect

    return connect(environment, directory)


def _environment() -> "dict[str, str]":
    """`dict(os.environ)`."""
    return {address.decoded(name): address.decoded(value) for name, value in posix.environ.items()}


def _check(call: Invocation) -> None:
    for flag, value in (("-namespace", call.namespace), ("-id", call.id), ("-address", call.address)):
        if not value:
            raise BootstrapError(f"check flag {flag!r}: it is required by 'start'")


def _read_all(fd: int) -> bytes:
    """Everything stdin holds; nothing when it is closed, or a person's terminal."""
    chunks: list[bytes] = []
    size = 0
    try:
        if posix.isatty(fd):
            return b""
        while chunk := posix.read(fd, 1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_STDIN_BYTES:
                raise BootstrapError(f"read runtime options 'stdin': more than {_MAX_STDIN_BYTES} bytes")
    except OSError as error:
        if error.errno != errno.EBADF:
            raise os_failure("read runtime options", "stdin", error) from error
    return b"".join(chunks)


def _serve_arguments(
    call: Invocation, caller: "Caller", group: str, bundle: str, environment: "dict[str, str]"
) -> "list[str]":
    ttrpc_address = caller.ttrpc_address or environment.get("TTRPC_ADDRESS") or call.address + ".ttrpc"
    return [
        *("-namespace", call.namespace),
        *("-id", group),
        *("-address", call.address),
        *("-ttrpc-address", ttrpc_address),
        *("-publish-binary", call.publish_binary),
        *("-bundle", bundle),
        *(("-debug",) if call.debug or caller.debug else ()),
        "serve",
    ]


def _tell(bundle: str, path: str, caller: "Caller", stdout_fd: int) -> None:
    """The address is in the bundle (read by containerd up to 1.7 after its restart), then on stdout."""
    socket_address = f"unix://{path}"
    file = _write_address(bundle, socket_address)
    answer = caller.answer(socket_address)
    try:
        while answer:
            answer = answer[posix.write(stdout_fd, answer) :]
    except OSError as error:
        address.unlink(file)
        raise os_failure("write answer", "stdout", error) from error


def _write_address(bundle: str, socket_address: str) -> str:
    path = f"{bundle}/address"
    temporary = f"{bundle}/.address.{posix.getpid()}"
    try:
        with open(temporary, "w") as file:
            file.write(socket_address)
        posix.rename(temporary, path)
    except OSError as error:
        address.unlink(temporary)
        raise os_failure("write", path, error) from error
    return path
