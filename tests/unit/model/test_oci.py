"""Reading config.json: what is wrong is named, whatever it is."""

import json
from typing import Any

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.oci import NO_HOOKS, parse_spec

WHERE = "/b/config.json"


def parse(**members: Any) -> Any:
    spec = {"process": {"args": ["sh"]}, "root": {"path": "rootfs"}, **members}
    return parse_spec(json.dumps(spec).encode(), WHERE)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"process": None}, "process is missing"),
        ({"process": {"args": []}}, "process.args is empty"),
        ({"process": {"args": "sh"}}, "process.args is not a list of str"),
        ({"process": {"args": ["sh"], "terminal": 1}}, "process.terminal is not true or false"),
        ({"root": None}, "root is missing"),
        ({"root": {"path": ""}}, "root.path is empty"),
        ({"root": {"path": "a\0b"}}, "root.path is no text"),
        ({"root": {"path": "\ud800"}}, "root.path is no text"),
        ({"hostname": 3}, "hostname is not a str"),
        ({"mounts": {}}, "mounts is not a list"),
        ({"mounts": [{"destination": "data"}]}, r"mounts\[0\].destination is not absolute"),
        ({"mounts": [{"destination": "/d"}] * 100_000}, "mounts has 100000 entries, at most 4096"),
        ({"linux": [1]}, "linux is not an object"),
        ({"linux": {"namespaces": [{"type": "soul"}]}}, "is not a known namespace"),
        (
            {"linux": {"devices": [{"path": "/d", "type": "b", "major": True}]}},
            r"devices\[0\].major is not a whole number",
        ),
        ({"linux": {"resources": [1]}}, "linux.resources is not an object"),
        ({"linux": {"resources": {"cpu": "all"}}}, "linux.resources.cpu is not an object"),
        ({"linux": {"resources": {"memory": [1]}}}, "linux.resources.memory is not an object"),
        ({"linux": {"resources": {"devices": [7]}}}, r"linux.resources.devices\[0\] is not an object"),
        ({"linux": {"resources": {"devices": [{"access": 7}]}}}, r"devices\[0\].access is not a str"),
        ({"linux": {"sysctl": [5]}}, "linux.sysctl is not an object of strings"),
        ({"hooks": {"prestart": [{}]}}, r"hooks.prestart\[0\].path is missing"),
        ({"hooks": {"createRuntime": [{"path": "sh"}]}}, r"hooks.createRuntime\[0\].path is not absolute: 'sh'"),
        ({"hooks": {"poststop": [{"path": "/h", "timeout": 0}]}}, r"hooks.poststop\[0\].timeout is not above zero: 0"),
        (
            {"hooks": {"poststart": [{"path": "/h", "env": ["A"]}]}},
            r"hooks.poststart\[0\].env has an entry that is not",
        ),
        ({"hooks": {"poststart": [{"path": "/h", "args": "a"}]}}, r"hooks.poststart\[0\].args is not a list"),
        ({"annotations": {"a": 1}}, "annotations is not an object of strings"),
    ],
)
def test_a_wrong_member_is_named_with_its_file(members: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"read spec '{WHERE}': .*{named}"):
        parse(**members)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"{", b"[" * 100_000, b'{"process": {}}'])
def test_what_is_no_spec_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=WHERE):
        parse_spec(data, WHERE)


def test_null_members_are_as_if_missing() -> None:
    spec = parse(linux=None, mounts=None, annotations=None, hooks={"prestart": None})

    assert (spec.mounts, spec.devices, dict(spec.annotations), spec.hooks) == ((), (), {}, NO_HOOKS)
