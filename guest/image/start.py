"""The program that the guest's interpreter runs as process 1: /usr/lib/agent/start.py in the image."""

import gc
import os
import sys
from types import ModuleType

PACKAGES = "/usr/lib/python3/dist-packages"
"""Debian's Python packages. The interpreter runs without `site`, which would look for them and for startup hooks."""

_PROTOBUF_IN_PYTHON = "google.protobuf.internal.python_message"


def hide_unused_modules() -> None:
    """Libraries import the agent's modules without these two, which take a fifth of the agent's imports.

    asyncio can do without ssl; TLS is spoken by programs of their own. protobuf imports its implementation in Python
    even when it uses the one in C, and calls no function of it then.
    """
    sys.modules["ssl"] = None  # type: ignore[assignment]
    sys.modules[_PROTOBUF_IN_PYTHON] = ModuleType(_PROTOBUF_IN_PYTHON)


if __name__ == "__main__":
    sys.path = [os.path.dirname(os.path.abspath(__file__)), *sys.path, PACKAGES]
    hide_unused_modules()
    # What the imports make stays: looking for garbage among it takes a twelfth of their time.
    gc.disable()
    from guest.agent.__main__ import main

    gc.freeze()
    gc.enable()
    raise SystemExit(main())
