"""Kernels of a few instructions that QEMU boots like Linux: each does one thing to the machine and stops.

A kernel's code is words of `tiny_kernel.S`, one a line; binutils assemble it.
"""

import functools
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".S")
_SETUP_BYTES, _REST_BYTES = 1024, 4096

HALT = "halt\n"
RESET = "reset\n"
POWER_OFF = "power_off\n"
PANIC_EVENT = "panic_event\n"
FLOOD = "flood\n"


def say(text: str) -> str:
    """Code that prints `text` on the first serial port."""
    return "".join(f"say {char}\n" for char in text.encode())


@functools.cache
def bzimage(code: str) -> bytes:
    """A kernel whose set-up code is `code`."""
    with tempfile.TemporaryDirectory() as directory:
        made, image = Path(directory, "kernel.o"), Path(directory, "kernel")
        source = f"{_SOURCE.read_text()}{code}\t.org {_SETUP_BYTES}\n\t.fill {_REST_BYTES}\n"
        subprocess.run(["as", "--32", "-o", made, "-"], input=source, text=True, check=True)
        subprocess.run(["objcopy", "-O", "binary", "--only-section=.text", made, image], check=True)
        return image.read_bytes()
