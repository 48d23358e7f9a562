"""Required members of a spec's process."""

import json

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.oci import parse_spec


@pytest.mark.parametrize(
    ("process", "named"),
    [
        pytest.param({"args": []}, "process.args is empty", id="no-args"),
        pytest.param({"args": ["a"], "cwd": "relative"}, "process.cwd is not absolute: 'relative'", id="relative-cwd"),
        pytest.param({"args": ["a"], "cwd": ""}, "process.cwd is not absolute: ''", id="empty-cwd"),
        pytest.param({"args": ["a"], "cwd": 3}, "process.cwd", id="cwd-of-another-type"),
    ],
)
def test_a_process_that_cannot_be_meant_is_refused_by_name(process: dict[str, object], named: str) -> None:
    data = json.dumps({"process": process, "root": {"path": "rootfs"}}).encode()

    with pytest.raises(InvalidArgument, match=r"^read spec '/b/config\.json': ") as refused:
        parse_spec(data, "/b/config.json")

    assert named in str(refused.value)


def test_an_absolute_directory_and_a_missing_one_are_accepted() -> None:
    for process in ({"args": ["a"], "cwd": "/x"}, {"args": ["a"]}):
        spec = parse_spec(json.dumps({"process": process, "root": {"path": "rootfs"}}).encode(), "/b/config.json")
        assert spec.root_path == "rootfs"
