"""`start`: containerd asks for a shim that serves one container, and gets the address of the shim's socket.

containerd reads stdout and stderr as one text, the answer, until both are closed. So `start` writes nothing else to
either, and the daemon must not inherit them. containerd does not call `delete` after a failed `start`, so `start`
itself removes what it made.
"""

import errno
import os
import sys

from pyshim.start import address, dialect, zygote_client
from pyshim.start.dialect import StartParams
from pyshim.start.invocation import CommandError, Invocation, group_id, os_failure, require_spec

ZYGOTE_DIR = "/run/pyshim"
_MAX_STDIN_BYTES = 16 << 20
_SIGKILL = 9  # the module `signal` imports `enum`, which takes as long as all of ours


class Executed:
    """A daemon that this `start` executed. It serves already."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def release(self) -> None:
        """Nothing to do: an executed daemon serves already."""

    def end(self) -> None:
        """The daemon was killed and reaped."""
        os.kill(self._pid, _SIGKILL)
        os.waitpid(self._pid, 0)


def main(call: Invocation, *, launcher: str, socket_dir: str = address.SOCKET_DIR, zygote_dir: str = ZYGOTE_DIR) -> int:
    """The exit code of `start`; the daemon it leaves is this interpreter running `launcher` again, for `serve`."""
    program = [sys.executable, "-I", "-S", os.path.abspath(launcher)]
    try:
        start(call, program=program, environment=dict(os.environ), socket_dir=socket_dir, zygote_dir=zygote_dir)
    except CommandError as error:
        os.write(2, f"{error}\n".encode())
        return 1
    return 0


def start(
    call: Invocation,
    *,
    program: list[str],
    environment: dict[str, str],
    socket_dir: str,
    zygote_dir: str,
    stdin_fd: int = 0,
    stdout_fd: int = 1,
) -> None:
    """A daemon listens for the container's group; its address is on stdout and in the bundle's file `address`.

    Of simultaneous calls for one group one makes the daemon, by executing `program` with the arguments of `serve`; all
    give the same answer. Raises CommandError, and then neither daemon nor socket nor `address` file of ours is left.
    """
    _check(call)
    stdin = _read_all(stdin_fd)
    bundle = os.path.abspath(call.bundle or ".")
    if not call.address:
        # CRI-O makes no sandbox without a spec. For an infra container that it has dropped, it calls the default
        # runtime without a bundle, in CRI-O's own directory, which must stay as it is.
        require_spec(bundle)
    group = group_id(bundle, call.id)
    params = dialect.params_of(stdin, call)
    path = address.socket_path(params.socket_dir or socket_dir, call.address, call.namespace, group)
    notes = f"{zygote_dir}/sockets"
    listener = address.claim(path, notes)
    if listener is None:
        _publish_address(bundle, path, params, stdout_fd)
        return
    try:
        daemon = _make_daemon(
            program,
            _serve_arguments(call, params, group, bundle, environment),
            environment=environment,
            listening_fd=listener.fileno(),
            log_path=f"{bundle}/log",
            shim_cgroup=params.shim_cgroup,
            zygote_dir=zygote_dir,
        )
        try:
            _publish_address(bundle, path, params, stdout_fd)
        except BaseException:
            daemon.end()
            raise
        daemon.release()
    except BaseException:
        address.abandon(listener, path, notes)
        raise
    listener.close()


def _check(call: Invocation) -> None:
    for flag, value in (("-namespace", call.namespace), ("-id", call.id)):
        if not value:
            raise CommandError(f"check flag {flag!r}: it is required by 'start'")


def _read_all(fd: int) -> bytes:
    """All of stdin; nothing when it is closed or a terminal."""
    chunks: list[bytes] = []
    size = 0
    try:
        if os.isatty(fd):
            return b""
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_STDIN_BYTES:
                raise CommandError(f"read runtime options 'stdin': more than {_MAX_STDIN_BYTES} bytes")
    except OSError as error:
        if error.errno != errno.EBADF:
            raise os_failure("read runtime options", "stdin", error) from error
    return b"".join(chunks)


def _make_daemon(
    program: list[str],
    words: list[str],
    *,
    environment: dict[str, str],
    listening_fd: int,
    log_path: str,
    shim_cgroup: str,
    zygote_dir: str,
) -> zygote_client.Forked | Executed:
    """A daemon that serves, as `program` with `words`, once it is released.

    The zygote forks it. Where the zygote is switched off or does not fork, `start` executes the daemon and passes the
    reason on for its log; where there is no zygote, `start` then launches one for the next call.
    """
    try:
        return zygote_client.fork_daemon(
            zygote_dir,
            program,
            words,
            environment=environment,
            listening_fd=listening_fd,
            log_path=log_path,
            shim_cgroup=shim_cgroup,
        )
    except zygote_client.NotForked as error:
        why = error
    from pyshim.start.daemonize import spawn  # not needed where the zygote forks

    pid = spawn(
        [*program, "-executed-because", str(why), *words],
        environment=environment,
        listening_fd=listening_fd,
        log_path=log_path,
        shim_cgroup=shim_cgroup,
    )
    if isinstance(why, zygote_client.NoZygote):
        zygote_client.launch(program, environment, zygote_dir)
    return Executed(pid)


def _serve_arguments(
    call: Invocation, params: StartParams, group: str, bundle: str, environment: dict[str, str]
) -> list[str]:
    # CRI-O has neither socket, and takes no events.
    beside_grpc = f"{call.address}.ttrpc" if call.address else ""
    ttrpc_address = params.ttrpc_address or environment.get("TTRPC_ADDRESS") or beside_grpc
    return [
        *("-namespace", call.namespace),
        *("-id", group),
        *("-address", call.address),
        *("-ttrpc-address", ttrpc_address),
        *("-publish-binary", call.publish_binary),
        *("-bundle", bundle),
        *(("-config", config) if (config := _config_file(params, bundle)) else ()),
        *(("-debug",) if call.debug or params.debug else ()),
        "serve",
    ]


def _config_file(params: StartParams, bundle: str) -> str:
    """The configuration's file; empty without one. A sandbox without a spec gets the text of the options as a file:
    no later call of containerd's brings it.
    """
    if params.config_path or not params.config_body or os.path.exists(f"{bundle}/config.json"):
        return params.config_path
    path = f"{bundle}/configuration.toml"
    try:
        with open(path, "wb") as file:
            file.write(params.config_body)
    except OSError as error:
        raise os_failure("write", path, error) from error
    return path


def _publish_address(bundle: str, path: str, params: StartParams, stdout_fd: int) -> None:
    """The address is in the bundle (read by containerd up to 1.7 after its restart), then on stdout."""
    socket_address = f"unix://{path}"
    file = _write_address(bundle, socket_address)
    answer = params.answer(socket_address)
    try:
        while answer:
            answer = answer[os.write(stdout_fd, answer) :]
    except OSError as error:
        address.unlink(file)
        raise os_failure("write answer", "stdout", error) from error


def _write_address(bundle: str, socket_address: str) -> str:
    path = f"{bundle}/address"
    temporary = f"{bundle}/.address.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            file.write(socket_address)
        os.rename(temporary, path)
    except OSError as error:
        address.unlink(temporary)
        raise os_failure("write", path, error) from error
    return path
