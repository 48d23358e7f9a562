"""The example of the README runs."""

import re
from pathlib import Path
from typing import Any

from tests.unit.cdi.spec_files import put, spec

README = Path(__file__).resolve().parents[3] / "pyshim/cdi/README.md"


def test_the_example_injects_a_device_and_names_one_that_is_missing(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)
    put(tmp_path, "a.json", spec("v.com/a", "x"))
    oci_spec: dict[str, Any] = {}

    assert scope["with_devices"](oci_spec, ["v.com/a=x"], [str(tmp_path)]) == []
    assert oci_spec["process"]["env"] == ["COMMON=1", "DEV_x=1"]
    assert scope["with_devices"](oci_spec, ["v.com/a=y"], [str(tmp_path)]) == ["v.com/a=y"]
