"""What a shim loads when it is idle."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_RUN = """
import asyncio, sys
from pyshim.later import LATER, load_while

def loaded():
    return [name for name in LATER if name in sys.modules]

async def main():
    idle = asyncio.Event()
    loading = asyncio.create_task(load_while(idle, pause_s=0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert loaded() == [], loaded()
    idle.set()
    await loading
    assert loaded() == list(LATER), loaded()

asyncio.run(main())
"""


def test_what_comes_later_is_loaded_once_the_shim_is_idle_and_not_before() -> None:
    subprocess.run([sys.executable, "-c", _RUN], cwd=REPOSITORY, check=True, timeout=60)
