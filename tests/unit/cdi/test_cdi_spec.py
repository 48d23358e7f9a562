"""The specification, clause by clause, and the README's example: names, documents, versions, refusals."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyshim.cdi import (
    InvalidName,
    InvalidSpec,
    as_json,
    is_qualified_name,
    minimum_version,
    parse_annotations,
    parse_qualified_name,
    parse_spec,
)
from tests.unit.cdi.spec_files import put, spec

FULL_EDITS: dict[str, Any] = {
    "env": ["FOO=bar", "EMPTY="],
    "deviceNodes": [
        {
            "path": "/dev/card0",
            "hostPath": "/dev/vendor/card0",
            "type": "c",
            "major": 195,
            "minor": 0,
            "fileMode": 0o660,
            "permissions": "rw",
            "uid": 0,
            "gid": 44,
        }
    ],
    "netDevices": [{"hostInterfaceName": "eth7", "name": "net0"}],
    "mounts": [{"hostPath": "/usr/lib/v", "containerPath": "/usr/lib/v", "options": ["ro", "bind"], "type": "bind"}],
    "hooks": [{"hookName": "createRuntime", "path": "/bin/h", "args": ["h", "x"], "env": ["A=b"], "timeout": 5}],
    "intelRdt": {
        "closID": "gold",
        "l3CacheSchema": "L3:0=f",
        "memBwSchema": "MB:0=10",
        "schemata": ["L3:0=f"],
        "enableMonitoring": True,
    },
    "additionalGids": [5, 10],
}
FULL: dict[str, Any] = {
    "cdiVersion": "1.1.0",
    "kind": "vendor.com/device.sub",
    "annotations": {"vendor.com/note": "spec"},
    "devices": [{"name": "0:card", "annotations": {"note": "device"}, "containerEdits": FULL_EDITS}],
    "containerEdits": {"env": ["ALL=1"]},
}


def document(**changes: Any) -> dict[str, Any]:
    base = {"cdiVersion": "0.3.0", "kind": "v.com/c", "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}]}
    return {**copy.deepcopy(base), **changes}


def with_edits(edits: dict[str, Any], version: str = "1.1.0") -> dict[str, Any]:
    return document(cdiVersion=version, devices=[{"name": "a", "containerEdits": edits}])


def problems(document: object, where: str = "/etc/cdi/x.json") -> tuple[str, ...]:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(document, where)
    assert f"load cdi spec '{where}': " in str(refused.value)
    return refused.value.problems


def _valid(document: object) -> bool:
    try:
        parse_spec(document, "x")
    except InvalidSpec:
        return False
    return True


def test_a_document_with_everything_survives_the_way_there_and_back() -> None:
    spec = parse_spec(FULL, "full")

    assert as_json(spec) == FULL
    assert parse_spec(as_json(spec), "again") == spec


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("vendor.com/class=dev", True),
        ("v/c=0", True),
        ("V-1_x.y/c-d_e.f=0:1-2_3.4", True),
        ("vendor.com/class=dev=2", False),
        ("vendor.com/class/sub=dev", False),
        ("", False),
        ("/dev/null", False),
        ("/v/c=d", False),
        ("v/c", False),
        ("v/c=", False),
        ("v/=d", False),
        ("/c=d", False),
        ("=d", False),
        ("1v/c=d", False),
        ("_v/c=d", False),
        ("v-/c=d", False),
        ("v/1c=d", False),
        ("v/c.=d", False),
        ("v:x/c=d", False),
        ("v/c:x=d", False),
        ("v/c=:d", False),
        ("v/c=d:", False),
        ("v/c=d e", False),
        ("v/c=dé", False),
        ("vé/c=d", False),
    ],
)
def test_a_qualified_name_is_vendor_class_and_device(text: str, ok: bool) -> None:
    assert is_qualified_name(text) is ok
    if ok:
        assert str(parse_qualified_name(text)) == text
    else:
        with pytest.raises(InvalidName, match="parse cdi device"):
            parse_qualified_name(text)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_a_name_is_taken_apart_and_put_together_unchanged_or_refused(text: str) -> None:
    try:
        assert str(parse_qualified_name(text)) == text
    except InvalidName:
        assert not is_qualified_name(text)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"cdiVersion": None}, "cdiVersion is missing"),
        ({"kind": None}, "kind is missing"),
        ({"devices": None}, "devices is missing"),
        ({"cdiVersion": "9.9.9"}, "cdiVersion '9.9.9' is not one of 0.1.0"),
        ({"cdiVersion": "vv0.3.0"}, "cdiVersion 'vv0.3.0' is not one of"),
        ({"cdiVersion": "0.1.0"}, "cdiVersion '0.1.0' is too low: the content needs at least 0.3.0"),
        ({"cdiVersion": "0.2.0"}, "cdiVersion '0.2.0' is too low"),
        ({"kind": "vendor"}, "kind 'vendor' is not VENDOR/CLASS"),
        ({"kind": "9v/c"}, "kind '9v/c' has a vendor '9v' that does not begin with a letter"),
        ({"kind": "v/c-"}, "kind 'v/c-' has a class 'c-' that does not end with a letter or digit"),
        ({"extra": 1}, "extra is not known"),
        ({"CDIVersion": "0.3.0"}, "CDIVersion is not known"),
        ({"devices": []}, "devices has no device"),
        ({"devices": {}}, "devices is not a list"),
        ({"devices": ["a"]}, "devices[0] is not an object"),
        ({"devices": [{"name": "a"}]}, "devices[0].containerEdits is missing"),
        ({"devices": [{"containerEdits": {"env": ["A=1"]}}]}, "devices[0].name is missing"),
        ({"devices": [{"name": "a", "containerEdits": {}}]}, "devices[0].containerEdits is empty"),
        ({"devices": [{"name": "-", "containerEdits": {"env": ["A=1"]}}]}, "devices[0].name '-' does not begin"),
        ({"devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}] * 2}, "devices[1].name 'a' is there twice"),
        ({"devices": [{"name": ["a"], "containerEdits": {"env": ["A=1"]}}]}, "devices[0].name is not a text"),
        ({"annotations": []}, "annotations is not an object"),
        ({"annotations": {"a b": "x"}, "cdiVersion": "1.1.0"}, "annotations['a b'] is not a key of the form"),
        ({"annotations": {"v/k": 1.5}, "cdiVersion": "1.1.0"}, "annotations['v/k'] is not a text"),
        (
            {"annotations": {"v/k": "x" * 262144}, "cdiVersion": "1.1.0"},
            "annotations are larger than 262144 bytes together",
        ),
        ({"containerEdits": []}, "containerEdits is not an object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_document_and_its_devices(changes: dict[str, Any], found: str) -> None:
    assert any(problem.startswith(found) for problem in problems(document(**changes))), problems(document(**changes))


EDIT_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"env": ["FOO"]}, "env[0] 'FOO' is not NAME=VALUE"),
    ({"env": ["A=1", "=x"]}, "env[1] '=x' has no name"),
    ({"env": "A=1"}, "env is not a list"),
    ({"env": [{}]}, "env[0] is not a text"),
    ({"env": ["A=\0"]}, "env[0] is not a text that a kernel takes"),
    ({"deviceNodes": [{"hostPath": "/dev/x"}]}, "deviceNodes[0].path is missing"),
    ({"deviceNodes": [{"path": ""}]}, "deviceNodes[0].path is empty"),
    ({"deviceNodes": [{"path": "/dev/x", "type": "x"}]}, "deviceNodes[0].type 'x' is not one of b, c, u, p"),
    ({"deviceNodes": [{"path": "/dev/x", "permissions": "rx"}]}, "deviceNodes[0].permissions 'rx' has characters"),
    ({"deviceNodes": [{"path": "/dev/x", "permissions": "nono"}]}, "deviceNodes[0].permissions 'nono' has characters"),
    ({"deviceNodes": [{"path": "/dev/x", "major": "1"}]}, "deviceNodes[0].major is not a whole number"),
    ({"deviceNodes": [{"path": "/dev/x", "major": True}]}, "deviceNodes[0].major is not a whole number"),
    ({"deviceNodes": [{"path": "/dev/x", "minor": 1.5}]}, "deviceNodes[0].minor is not a whole number"),
    ({"deviceNodes": [{"path": "/dev/x", "minor": 1 << 63}]}, "deviceNodes[0].minor is out of range"),
    ({"deviceNodes": [{"path": "/dev/x", "uid": -1}]}, "deviceNodes[0].uid is out of range: -1"),
    ({"deviceNodes": [{"path": "/dev/x", "gid": 1 << 32}]}, "deviceNodes[0].gid is out of range"),
    ({"deviceNodes": [{"path": "/dev/x", "fileMode": -1}]}, "deviceNodes[0].fileMode is out of range"),
    ({"deviceNodes": [{"path": "/dev/x", "mode": 1}]}, "deviceNodes[0].mode is not known"),
    ({"netDevices": [{"name": "n"}]}, "netDevices[0].hostInterfaceName is empty"),
    ({"netDevices": [{"hostInterfaceName": "e"}]}, "netDevices[0].name is empty"),
    (
        {"netDevices": [{"hostInterfaceName": "e", "name": "a"}, {"hostInterfaceName": "e", "name": "b"}]},
        "netDevices[1].hostInterfaceName 'e' is there twice",
    ),
    (
        {"netDevices": [{"hostInterfaceName": "e", "name": "a"}, {"hostInterfaceName": "f", "name": "a"}]},
        "netDevices[1].name 'a' is there twice",
    ),
    ({"mounts": [{"containerPath": "/x"}]}, "mounts[0].hostPath is missing"),
    ({"mounts": [{"hostPath": "/x"}]}, "mounts[0].containerPath is missing"),
    ({"mounts": [{"hostPath": "", "containerPath": "/x"}]}, "mounts[0].hostPath is empty"),
    ({"mounts": [{"hostPath": "/x", "containerPath": ""}]}, "mounts[0].containerPath is empty"),
    ({"mounts": [{"hostPath": "/x", "containerPath": "/x", "options": "ro"}]}, "mounts[0].options is not a list"),
    ({"hooks": [{"hookName": "poststop"}]}, "hooks[0].path is missing"),
    ({"hooks": [{"path": "/x"}]}, "hooks[0].hookName is missing"),
    ({"hooks": [{"hookName": "later", "path": "/x"}]}, "hooks[0].hookName 'later' is not one of prestart"),
    ({"hooks": [{"hookName": "poststop", "path": ""}]}, "hooks[0].path is empty"),
    ({"hooks": [{"hookName": "poststop", "path": "/x", "env": ["A"]}]}, "hooks[0].env[0] 'A' is not NAME=VALUE"),
    ({"hooks": [{"hookName": "poststop", "path": "/x", "timeout": "5"}]}, "hooks[0].timeout is not a whole number"),
    ({"intelRdt": []}, "intelRdt is not an object"),
    ({"intelRdt": {"closID": "a/b"}}, "intelRdt.closID 'a/b' is not a directory name"),
    ({"intelRdt": {"closID": "a\nb"}}, "intelRdt.closID 'a\\nb' is not a directory name"),
    ({"intelRdt": {"closID": ".."}}, "intelRdt.closID '..' is not a directory name"),
    ({"intelRdt": {"closID": "."}}, "intelRdt.closID '.' is not a directory name"),
    ({"intelRdt": {"closID": "x" * 4096}}, "intelRdt.closID is longer than 4095 bytes"),
    ({"intelRdt": {"enableMonitoring": 1}}, "intelRdt.enableMonitoring is neither true nor false"),
    ({"intelRdt": {"enableCMT": True}}, "intelRdt.enableCMT is known from version 0.7.0 to 1.0.0 only"),
    ({"intelRdt": {"schema": []}}, "intelRdt.schema is not known"),
    ({"additionalGids": [-1]}, "additionalGids[0] is out of range"),
    ({"additionalGids": ["5"]}, "additionalGids[0] is not a whole number"),
    ({"additionalGIDs": [5]}, "additionalGIDs is not known"),
]


@pytest.mark.parametrize(("edits", "found"), EDIT_PROBLEMS, ids=[found[:50] for _, found in EDIT_PROBLEMS])
def test_what_edits_must_not_be(edits: dict[str, Any], found: str) -> None:
    by_device = problems(with_edits(edits))
    by_spec = problems(document(cdiVersion="1.1.0", containerEdits=edits))

    assert any(problem.startswith(f"devices[0].containerEdits.{found}") for problem in by_device), by_device
    assert any(problem.startswith(f"containerEdits.{found}") for problem in by_spec), by_spec


@pytest.mark.parametrize(
    "edits",
    [
        {"intelRdt": {"closID": "/"}},
        {"intelRdt": {"closID": "x" * 4095}},
        {"intelRdt": {}},
        {"deviceNodes": [{"path": "/dev/x", "type": "p", "permissions": ""}]},
        {"deviceNodes": [{"path": "/dev/x", "permissions": "mwr", "major": None}]},
        {"env": ["A=b=c", "B="]},
        {"env": None, "mounts": None, "additionalGids": [0]},
    ],
    ids=str,
)
def test_what_edits_may_be(edits: dict[str, Any]) -> None:
    parse_spec(with_edits(edits), "x")


def test_all_problems_are_said_at_once() -> None:
    found = problems(document(extra=1, devices=[{"name": "a", "containerEdits": {"env": [1.5], "nodes": []}}]))

    assert found == (
        "extra is not known",
        "devices[0].containerEdits.nodes is not known",
        "devices[0].containerEdits.env[0] is not a text",
    )


def test_texts_that_yaml_took_for_numbers_are_texts() -> None:
    spec = parse_spec(document(cdiVersion="0.5.0", devices=[{"name": 0, "containerEdits": {"env": ["A=1"]}}]), "x")

    assert spec.devices[0].name == "0"


def test_old_monitoring_switches_are_known_where_they_existed() -> None:
    for version in ("0.7.0", "0.8.0", "1.0.0"):
        parse_spec(with_edits({"intelRdt": {"enableCMT": True, "enableMBM": True}}, version), "x")


VERSIONS: list[tuple[str, dict[str, Any]]] = [
    ("0.3.0", document()),
    ("0.3.0", with_edits({"deviceNodes": [{"path": "/dev/x"}], "hooks": FULL_EDITS["hooks"]})),
    ("0.4.0", with_edits({"mounts": [{"hostPath": "/x", "containerPath": "/x", "type": "tmpfs"}]})),
    ("0.5.0", with_edits({"deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/y"}]})),
    ("0.5.0", document(devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}])),
    ("0.6.0", document(annotations={"a": "b"})),
    ("0.6.0", document(devices=[{"name": "a", "annotations": {"a": "b"}, "containerEdits": {"env": ["A=1"]}}])),
    ("0.6.0", document(kind="v/c.d")),
    ("0.7.0", with_edits({"intelRdt": {}})),
    ("0.7.0", with_edits({"additionalGids": [1]})),
    ("1.1.0", with_edits({"netDevices": [{"hostInterfaceName": "e", "name": "n"}]})),
    ("1.1.0", with_edits({"intelRdt": {"schemata": ["L3:0=f"]}})),
    ("1.1.0", with_edits({"intelRdt": {"enableMonitoring": True}})),
]


@pytest.mark.parametrize(("least", "content"), VERSIONS, ids=lambda value: str(value)[:70])
def test_the_minimum_version_is_accepted_and_anything_below_refused(least: str, content: dict[str, Any]) -> None:
    known = ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"]
    by_spec = {**content, "devices": document()["devices"], "containerEdits": content["devices"][0]["containerEdits"]}

    for version in known:
        declared = {**content, "cdiVersion": version}
        if version >= least:
            assert minimum_version(parse_spec(declared, "x")) == least
            parse_spec({**declared, "cdiVersion": f"v{version}"}, "x")
        else:
            assert problems(declared) == (f"cdiVersion {version!r} is too low: the content needs at least {least}",)
    if "name" not in str(content["devices"][0]["name"]) and content["devices"][0]["name"] == "a":
        assert minimum_version(parse_spec({**by_spec, "cdiVersion": "1.1.0"}, "x")) <= least


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FULL, *FULL_EDITS, "path"]), inner),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_any_document_is_a_spec_or_refused_with_problems(value: object) -> None:
    assert _valid(value) or problems(value, "x")


@given(st.sampled_from(sorted(FULL_EDITS)), JSON_VALUES)
def test_any_edit_replaced_by_anything_is_valid_or_refused(member: str, value: object) -> None:
    document = with_edits({**FULL_EDITS, member: value})

    if _valid(document):
        spec = parse_spec(document, "x")
        assert parse_spec(as_json(spec), "again") == spec
    else:
        assert all(found.startswith(f"devices[0].containerEdits.{member}") for found in problems(document, "x"))


def test_annotations_are_read_in_the_order_of_their_keys_and_each_device_once() -> None:
    annotations = {"cdi.k8s.io/b": "v/c=2,v/c=1", "cdi.k8s.io/a": "v/c=3,v/c=2", "cdi.k8s.io.not/x": "?"}

    assert parse_annotations(annotations) == (("cdi.k8s.io/a", "cdi.k8s.io/b"), ("v/c=3", "v/c=2", "v/c=1"))
    assert parse_annotations(dict(reversed(annotations.items()))) == parse_annotations(annotations)


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        ({"cdi.k8s.io/a": "v/c=1, v/c=2"}, "cdi.k8s.io/a"),
        ({"cdi.k8s.io/a": ""}, "cdi.k8s.io/a"),
        ({"cdi.k8s.io/a": "v/c=1,"}, "cdi.k8s.io/a"),
        ({"cdi.k8s.io/a": "v/c=1", "cdi.k8s.io/b": "nonsense"}, "cdi.k8s.io/b"),
    ],
    ids=str,
)
def test_bad_annotations_are_named(annotations: dict[str, str], found: str) -> None:
    with pytest.raises(InvalidName, match="read cdi annotation") as refused:
        parse_annotations(annotations)
    assert found in str(refused.value)


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a" * 64, "é"])
def test_an_annotation_is_read_whatever_its_key_is_called_after_the_prefix(name: str) -> None:
    key = f"cdi.k8s.io/{name}"

    assert parse_annotations({key: "v/c=1"}) == ((key,), ("v/c=1",))


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
