"""What the guest agent imports before its first answer, and never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
_ALLOWED_AT_FIRST_ANSWER = """
__future__ _collections_abc _heapq _io _operator _signal _socket _sre _stat _struct _abc abc builtins codecs
collections enum errno functools genericpath heapq io itertools keyword marshal operator os os.path posix posixpath
reprlib select site stat struct sys time types zipimport
""".split()


def test_the_first_answer_needs_no_costly_module() -> None:
    script = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import guest.agent.main, guest.agent.log, guest.agent.settings, guest.agent.agent, guest.agent.transport
import guest.agent.calls.health
print(*sorted(name for name in set(sys.modules) - before if not name.startswith(("guest", "pyshim"))))
"""
    argv = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())

    foreign = {name for name in loaded if name not in _ALLOWED_AT_FIRST_ANSWER and not name.startswith("_")}
    assert not foreign, f"imported before the first Health.Check: {sorted(foreign)}"


def test_no_module_of_the_agent_loads_what_its_guest_does_not_have() -> None:
    modules = [
        str(path.relative_to(REPOSITORY))[:-3].replace("/", ".")
        for path in (REPOSITORY / "guest/agent").rglob("*.py")
        # cdi.py is loaded for a container that asks for devices by name, and brings the library's imports along.
        # What is in pull/ runs in a child of its own, which ends with the image it pulled.
        if path.name not in ("__init__.py", "__main__.py", "cdi.py") and path.parent.name != "pull"
    ]
    script = f"""
import sys
sys.path.insert(0, sys.argv[1])
for name in {modules!r}:
    __import__(name)
print(*sorted(sys.modules))
"""
    argv = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())

    unwanted = {"asyncio", "logging", "dataclasses", "typing", "re", "json", "subprocess", "socket", "selectors"}
    assert not loaded & (unwanted | {"google.protobuf", "pathlib", "contextlib", "shutil", "tempfile", "threading"})
