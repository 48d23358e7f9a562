"""Checks an installation on the running node, with the programs that read its files."""

import sys
from collections.abc import Callable

from msgspec import Struct

from pyshim.model.errors import ShimError
from pyshim.node.install import docker, running, runtime
from pyshim.node.install.drop_ins import Containerd, Layout
from pyshim.node.install.handlers import Handler


def require_handlers(
    caller: runtime.ContainerRuntime, containerd: Containerd | None, names: frozenset[str], *, root: str = ""
) -> None:
    """containerd's configuration has the handlers that it had before, and `names` where an operator writes it.

    A distribution renders its file at its next start only. Raises FailedPrecondition naming the first that is missing.
    """
    if containerd is None:
        return
    wanted = names if containerd.layout is Layout.FILE else frozenset()
    document = runtime.present(caller, root, containerd.version)
    runtime.require_handlers(document, containerd.effective_runtimes, wanted, caller.config)


class NodeCheck(Struct, kw_only=True):
    """Checks the written files with the programs that read them: systemd, containerd, a test pod or container."""

    caller: runtime.ContainerRuntime
    handlers: tuple[Handler, ...]
    containerd: Containerd | None
    restart: bool
    with_pod: bool
    is_installed: bool
    """The node had these files before."""
    has_entries: bool = False
    """The handlers are runtimes of daemon.json."""
    was_restarted: bool = False

    def check(self, begin_step: Callable[[str], None]) -> None:
        """The runtime takes the files, and with `--restart` ran a pod. Raises ShimError."""
        running.reload_units()
        names = frozenset(handler.name for handler in self.handlers)
        begin_step("read the container runtime's configuration")
        require_handlers(self.caller, self.containerd, names)
        if self.restart:
            self._require_pod(names, begin_step)
        begin_step("restart pyshim's units")
        running.restart_units(also_stopped=self.restart)

    def _require_pod(self, names: frozenset[str], begin_step: Callable[[str], None]) -> None:
        """A test pod ran. If the node had these files before, the runtime is restarted only if the pod fails."""
        if self.is_installed:
            try:
                self._run_pod(names, begin_step)
                return
            except ShimError as error:
                print(f"{self.caller.reads_again} of {self.caller.name}: {error}", file=sys.stderr)
        self.was_restarted = True
        begin_step(f"{self.caller.reads_again} {self.caller.name}")
        runtime.read_again(self.caller)
        require_handlers(self.caller, self.containerd, frozenset())
        self._run_pod(names, begin_step)

    def _run_pod(self, names: frozenset[str], begin_step: Callable[[str], None]) -> None:
        if self.with_pod and self.caller.name == runtime.DOCKER.name:
            begin_step("run a test container")
            docker.verify(self.caller.socket, [each.name for each in self.handlers], has_entries=self.has_entries)
        elif self.with_pod:
            from pyshim.node.install.cri import verify

            begin_step("run a test pod")
            verify(self.caller.socket, names, pod=self.handlers[0].name)

    def rolled_back(self) -> None:
        """The programs read the former files again, which are back in place."""
        try:
            running.reload_units()
            running.restart_units(also_stopped=False)
        finally:
            if self.was_restarted:
                runtime.read_again(self.caller)
