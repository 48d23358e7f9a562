"""The example of the README runs."""

import asyncio
import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[3] / "pyshim/ttrpc/README.md"


def test_the_example_answers_its_call(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)

    assert asyncio.run(scope["main"](str(tmp_path / "demo.sock"))) == b"value of key"
