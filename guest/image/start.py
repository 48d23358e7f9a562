"""The agent's entry in the guest: makes our packages importable and calls main. It is compiled into the image.

A guest that is reached over the network has the forwarder beside the agent; nothing of it is loaded in any other.

All modules the agent imports lie in one file, so that an import is neither a search through directories nor a read of
its own from the disk; `guest.image.interpreter.bundle` writes it. What is imported here is built into the interpreter.
"""

import marshal
import sys
from _frozen_importlib import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

BUNDLE = "/usr/lib/agent/bundle"


class Bundle:
    """A finder and loader of the modules in one bundle file."""

    def __init__(self, path: str) -> None:
        with open(path, "rb", 0) as file:
            index_start = len(file.readline())
            file.seek(0)
            body = index_start + int(file.read(index_start))
            index = file.read(body - index_start).decode()
        self._path = path
        self._modules: dict[str, tuple[bool, int, int]] = {}
        for line in index.splitlines():
            name, is_package, offset, length = line.split(" ")
            self._modules[name] = (is_package == "1", body + int(offset), int(length))

    def names(self) -> "Iterable[str]":
        """All modules that are here."""
        return self._modules.keys()

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """How to load the module `name`; None when it is not here."""
        found = self._modules.get(name)
        if found is None:
            return None
        # the abstract class the annotation asks for costs an import; the protocol is met
        return ModuleSpec(name, self, origin=self._path, is_package=found[0])  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Ask for a module of the ordinary kind."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module's code."""
        _, start, length = self._modules[module.__name__]
        with open(self._path, "rb", 0) as file:
            file.seek(start)
            code = file.read(length)
        exec(marshal.loads(code), module.__dict__)


if __name__ == "__main__":
    bundle = Bundle(BUNDLE)
    sys.meta_path.insert(0, bundle)
    from guest.agent.main import main
    from guest.agent.text_files import read_text

    # Two roles that only the image's build has for this program, see `guest.snapshot`.
    if sys.argv[1:] == ["tracer"]:
        from guest.snapshot.tracer import run

        run()
    elif sys.argv[1:] == ["subject"]:
        from guest.snapshot.subject import stay_here

        stay_here(bundle.names())
    asked = read_text("/proc/cmdline")
    if "forwarder.port=" in asked:
        from guest.forwarder.fork import fork_forwarder, parse

        words = parse(asked)
        if words is not None:
            fork_forwarder(words)
    raise SystemExit(main())
