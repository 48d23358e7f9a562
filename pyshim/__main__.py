"""Both programs of the package: the shim that containerd calls (`main`) and the operator's command `pyshim`.

`main` is entered by the launcher script (see operator/launcher.py) under `python -I -S`. It imports nothing before it
knows the action, because `start` sits in the way of every container.
"""

import sys


def main(words: "list[str] | None" = None, *, launcher: str = "") -> int:
    """The exit code of the shim called with `words` (default: the command line) through the script `launcher`."""
    from pyshim.bootstrap.argv import parse
    from pyshim.bootstrap.errors import BootstrapError

    launcher = launcher or sys.argv[0]
    try:
        call = parse(sys.argv[1:] if words is None else words)
        if call.version:
            from pyshim.bootstrap.info import print_version

            return print_version()
        if call.info:
            from pyshim.bootstrap.info import print_runtime_info

            return print_runtime_info()
        if call.action == "start":
            from pyshim.bootstrap import start

            return _leave(start.main(call, launcher=launcher))
        if call.action == "delete":
            from pyshim.bootstrap import delete

            return _leave(delete.main(call))
        if call.action == "serve":
            return _serve(call, forked=False)
        if call.action == "zygote":
            return _zygote(call)
        raise BootstrapError(f"run action {call.action!r}: expected start, delete, serve or zygote")
    except BootstrapError as error:
        print(error, file=sys.stderr)
        return 1


def _leave(code: int) -> "NoReturn":
    """This process has ended with `code`.

    Not by way of the interpreter's own end, which unloads module by module and costs half of what `start` does itself.
    Nothing is left to it: both actions write with `os.write` or to stderr, which keeps no line back.
    """
    from posix import _exit

    _exit(code)


def _serve(call: "Invocation", *, forked: bool, baseline: "Baseline | None" = None) -> int:
    if not forked:
        _load_shim()
    from pyshim.bootstrap.daemonize import LISTENING_FD
    from pyshim.model.ids import HostPath
    from pyshim.model.task import Identity
    from pyshim.serve import serve

    identity = Identity(
        namespace=call.namespace,
        sandbox_id=call.id,
        containerd_address=call.address,
        containerd_ttrpc_address=call.ttrpc_address,
        publish_binary=call.publish_binary,
        bundle=HostPath(call.bundle),
        debug=call.debug,
    )
    return serve(LISTENING_FD, identity, forked=forked, baseline=baseline)


def _load_shim() -> None:
    """What `serve` needs is loaded for good: no search for garbage has looked at it, or will.

    That would take a tenth of the time, and as much again now and then.
    """
    import gc

    from pyshim.without_tls import leave_out_tls

    gc.disable()
    leave_out_tls()
    import pyshim.serve  # noqa: F401

    gc.freeze()
    gc.enable()


def _zygote(call: "Invocation") -> int:
    from pyshim.without_tls import leave_out_tls

    leave_out_tls()
    from pyshim.bootstrap import zygote as link
    from pyshim.bootstrap.argv import parse
    from pyshim.bootstrap.errors import BootstrapError, os_failure
    from pyshim.bootstrap.start import ZYGOTE_DIR
    from pyshim.zygote.server import run

    directory = call.directory or ZYGOTE_DIR
    try:
        idle_s = float(call.idle or link.IDLE_S)
    except ValueError as error:
        raise BootstrapError(f"parse flag '-idle': {call.idle!r} is no number of seconds") from error
    try:
        daemon = run(directory=directory, idle_s=idle_s)
    except OSError as error:
        raise os_failure("run zygote", directory, error) from error
    return 0 if daemon is None else _serve(parse(daemon.words), forked=True, baseline=daemon.baseline)


def operator_main(words: "list[str] | None" = None) -> int:
    """The exit code of the `pyshim` command."""
    from pyshim.operator.command import run

    return run(sys.argv[1:] if words is None else words)


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from pyshim.bootstrap.argv import Invocation
    from pyshim.host.memory.baseline import Baseline

if __name__ == "__main__":
    sys.exit(operator_main())
