"""What the guest's agent loads before it serves: under emulation a module costs up to 0.1 s of each pod's start."""

import json
import subprocess
import sys
from typing import Any

import pytest

from guest.image.recipe import SUITES

from .project_files import ROOT

LATER = {
    *("pyshim.cdi", "shutil", "pathlib", "tempfile", "urllib", "http", "email", "_ssl", "hashlib", "yaml", "site"),
    *("dataclasses", "pickle", "google.protobuf.text_format"),
}
"""Few containers need them. The image's `guest/image/start.py` hides what asyncio and protobuf would import of them."""


def after_the_start(program: str) -> Any:
    """What `program` prints as JSON, in an interpreter that has imported the agent as `guest/image/start.py` does."""
    path = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
    start = f"""
import json, sys
sys.path += {path!r}
from guest.image.start import hide_unused_modules
hide_unused_modules()
import guest.agent.__main__
"""
    return json.loads(subprocess.check_output([sys.executable, "-IS", "-c", start + program], text=True))


@pytest.mark.skipif(
    sys.version_info[:2] > max(tuple(map(int, suite.python.removeprefix("python").split("."))) for suite in SUITES),
    reason="no guest has this Python, whose asyncio imports more",
)
def test_the_agent_serves_without_what_few_containers_need() -> None:
    loaded = set(after_the_start("print(json.dumps(list(sys.modules)))"))

    assert "guest.agent.calls.containers" in loaded
    assert LATER & loaded == set()


def test_messages_work_without_protobufs_implementation_in_python() -> None:
    program = """
from google.protobuf.internal import api_implementation
from protos.agent import agent_pb2
sent = agent_pb2.CreateContainerRequest(container_id="c", storages=[{"source": "s", "options": ["ro"]}])
sent.OCI.Annotations["key"] = "value"
sent.OCI.Linux.Resources.Memory.Limit = 7
read = type(sent).FromString(sent.SerializeToString())
read.sandbox_pidns = True
print(json.dumps([api_implementation.Type(), str(read), dict(read.OCI.Annotations), read == sent]))
"""
    kind, text, annotations, is_equal = after_the_start(program)

    assert kind == "upb"
    assert 'options: "ro"' in text
    assert annotations == {"key": "value"}
    assert not is_equal
