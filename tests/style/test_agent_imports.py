"""What the guest's agent loads before it serves: under emulation a module costs up to 0.1 s of each pod's start."""

import json
import subprocess
import sys

from .project_files import ROOT

LATER = {"pyshim.cdi", "shutil", "pathlib", "tempfile", "urllib", "http", "email", "_ssl", "hashlib", "yaml", "site"}
"""Few containers need them. The image's `start.py` hides ssl from asyncio."""


def test_the_agent_serves_without_what_few_containers_need() -> None:
    path = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
    program = f"""
import json, sys
sys.path += {path!r}
sys.modules["ssl"] = None
import guest.agent.__main__
print(json.dumps(list(sys.modules)))
"""
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-IS", "-c", program], text=True)))

    assert "guest.agent.calls.containers" in loaded
    assert LATER & loaded == set()
