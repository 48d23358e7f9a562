"""The program that the guest's interpreter runs as process 1: /usr/lib/agent/start.py in the image."""

import os
import sys

PACKAGES = "/usr/lib/python3/dist-packages"
"""Debian's Python packages. The interpreter runs without `site`, which would look for them and for startup hooks."""

if __name__ == "__main__":
    sys.path = [os.path.dirname(os.path.abspath(__file__)), *sys.path, PACKAGES]
    # asyncio can do without ssl, which takes a tenth of the agent's start. TLS is spoken by programs of their own.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    from guest.agent.__main__ import main

    raise SystemExit(main())
