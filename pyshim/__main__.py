"""Both programs of the package: the shim that containerd calls (`main`) and the operator's command `pyshim`.

`main` is entered by the launcher (pyshim/node/install/launcher.py) under `python -I -S`. It reads the
action first and imports only the modules of that action: every container waits for `start`, which takes a tenth of
`serve`'s.
"""

import os
import sys

from pyshim.start.invocation import CommandError, Invocation, os_failure, parse

TYPE_CHECKING = False  # `typing` itself would cost `start` more than it needs in all
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyshim.config.load import ConfigCache
    from pyshim.serve import Faults
    from pyshim.zygote.fork import Request

_OCI_ACTIONS = ("create", "run", "state", "features", "kill", "exec", "spec", "checkpoint")
_OCI_HINT = " (hint: this is containerd's shim and no OCI runtime: Docker names it by runtimeType, not by path)"
"""For a caller that was given the shim's path as that of an OCI runtime: it shows the line to its user."""


def main(words: list[str] | None = None, *, launcher: str = "", faults: "Callable[[], Faults] | None" = None) -> int:
    """The exit code of the shim called with `words` (default: the command line) through the script `launcher`.

    `faults` makes a test's failpoints around the daemon's adapters.
    """
    launcher = launcher or sys.argv[0]
    words = sys.argv[1:] if words is None else words
    try:
        call = parse(words)
        if call.version:
            from pyshim.start.dialect import print_version

            return print_version()
        if call.info:
            from pyshim.start.dialect import print_runtime_info

            return print_runtime_info()
        if call.action in ("start", "delete"):
            return _foreground(call, launcher)
        if call.action == "serve":
            return _serve(call, made_by="exec", faults=faults() if faults else None)
        if call.action == "zygote":
            return _zygote(call)
        oci_action = next((word for word in words if word in _OCI_ACTIONS), "")
        text = f"run action {(oci_action or call.action)!r}: expected start, delete, serve or zygote"
        if oci_action:
            text += _OCI_HINT
            _log_as_oci_runtime(words, text)
        raise CommandError(text)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1


def _log_as_oci_runtime(words: list[str], text: str) -> None:
    """The text is the last line of an OCI runtime's log, which runc's shim shows its user."""
    from contextlib import suppress

    path = words[words.index("--log") + 1] if "--log" in words[:-1] else ""
    if path:
        with suppress(OSError), open(path, "a", encoding="utf-8") as log:
            log.write(f'{{"level": "error", "msg": "{text}"}}\n')


def _foreground(call: Invocation, launcher: str) -> int:
    """The exit code of a call that containerd waits for. Raises CommandError, whatever system call fails."""
    try:
        if call.action == "delete":
            from pyshim.start.delete import print_served_answer

            if print_served_answer(call):
                os._exit(0)  # as `start`
            from pyshim.cleanup import delete

            return delete.main(call)
        from pyshim.start import start

        # Without the interpreter's clean-up: it takes 1.4 ms, and `start` has flushed its output.
        os._exit(start.main(call, launcher=launcher))
    except OSError as error:
        raise os_failure(call.action, str(error.filename or call.id), error) from error


def _serve(
    call: Invocation, *, made_by: str, faults: "Faults | None" = None, config_cache: "ConfigCache | None" = None
) -> int:
    import gc

    gc.disable()  # the imports make little garbage, and collections would take 5 % of their CPU time
    from pyshim.config.sources import named_file
    from pyshim.model.ids import HostPath
    from pyshim.model.task import Identity
    from pyshim.serve import serve
    from pyshim.start.daemonize import LISTENING_FD

    gc.freeze()  # modules stay until the end, so collections need not visit them
    gc.enable()
    identity = Identity(
        namespace=call.namespace,
        sandbox_id=call.id,
        containerd_ttrpc_address=call.ttrpc_address,
        bundle=HostPath(call.bundle),
        debug=call.debug,
        options=named_file(call.config),
    )
    return serve(
        LISTENING_FD, identity, made_by=made_by, reason=call.executed_because, faults=faults, config_cache=config_cache
    )


def _zygote(call: Invocation) -> int:
    """The exit code of the zygote, and in each process that it forks, of the daemon there."""
    from pyshim.config.load import ConfigCache, fill_caches
    from pyshim.config.sources import named_file
    from pyshim.model.errors import ShimError
    from pyshim.start import zygote_client
    from pyshim.start.start import ZYGOTE_DIR
    from pyshim.zygote.server import run

    directory = call.directory or ZYGOTE_DIR
    try:
        idle_s = float(call.idle or zygote_client.IDLE_S)
    except ValueError:
        idle_s = -1.0
    if not idle_s >= 0:  # true for "nan", too
        raise CommandError(f"parse flag '-idle': {call.idle!r} is not a number of seconds")
    config_cache = ConfigCache()

    def read_configuration(request: "Request") -> None:
        try:
            fill_caches(config_cache.get(named_file(parse(request.words).config), request.environment))
        except (OSError, ShimError, CommandError):
            return  # the daemon meets the same error, and reports it

    try:
        words = run(directory=directory, idle_s=idle_s, prepare=read_configuration)
    except OSError as error:
        raise os_failure("run zygote", directory, error) from error
    return 0 if words is None else _serve(parse(words), made_by="fork", config_cache=config_cache)


def operator_main(words: list[str] | None = None) -> int:
    """The exit code of the `pyshim` command."""
    try:
        from pyshim.node.cli.command import run
    except ModuleNotFoundError as error:
        print(f"run 'pyshim': {error} (hint: install pyshim[node])", file=sys.stderr)
        return 1
    return run(sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(operator_main())
