"""The shim with faults: what the tests' launcher runs in place of `pyshim.__main__`."""

import os
from collections.abc import Callable

from pyshim.__main__ import main as shim_main
from tests.failpoints.points import VARIABLE
from tests.failpoints.wrapping import Faults


def main(*, launcher: str) -> int:
    """The exit code of the shim, whose daemon meets the faults of the variable PYSHIM_FAILPOINTS."""
    faults: Callable[[], Faults] | None = (lambda: Faults(os.environ)) if os.environ.get(VARIABLE) else None
    return shim_main(launcher=launcher, faults=faults)


def write_launcher(product: str, path: str) -> None:
    """The launcher `product` again at `path`, for the shim with faults."""
    with open(product, encoding="utf-8") as file:
        text = file.read()
    entry = "from pyshim.__main__ import main"
    assert entry in text, f"{product} is not a launcher of this project"
    with open(path, "x", encoding="utf-8") as file:
        file.write(text.replace(entry, "from tests.failpoints.shim import main"))
        os.fchmod(file.fileno(), 0o755)
