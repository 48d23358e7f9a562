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
    from types import ModuleType

BUNDLE = "/usr/lib/agent/bundle"


class Bundle:
    """A finder and loader of the modules in one bundle file."""

    def __init__(self, path: str) -> None:
        with open(path, "rb", 0) as file:
            data = memoryview(file.read())
        index_start = bytes(data[:16]).index(b"\n") + 1
        body = index_start + int(bytes(data[:index_start]))
        self._path = path
        self._modules: dict[str, tuple[bool, memoryview]] = {}
        for line in bytes(data[index_start:body]).decode().splitlines():
            name, is_package, offset, length = line.split(" ")
            start = body + int(offset)
            self._modules[name] = (is_package == "1", data[start : start + int(length)])

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
        """Run the module's code, whose bytes are not needed again."""
        exec(marshal.loads(self._modules.pop(module.__name__)[1]), module.__dict__)


if __name__ == "__main__":
    sys.meta_path.insert(0, Bundle(BUNDLE))
    with open("/proc/cmdline", encoding="utf-8", errors="replace") as command_line:
        asked = command_line.read()
    if "forwarder.port=" in asked:
        from guest.forwarder.fork import fork_forwarder, parse

        words = parse(asked)
        if words is not None:
            fork_forwarder(words)
    from guest.agent.main import main

    raise SystemExit(main())
