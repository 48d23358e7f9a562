import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId
from pyshim.model.ids import checked_id as model_checked_id
from pyshim.model.oci import membership
from pyshim.start.invocation import CommandError, checked_id, group_id, parse_json

RUNC_GROUP = "io.containerd.runc.v2.group"
CRI_TYPE = "io.kubernetes.cri.container-type"
CRI = "io.kubernetes.cri.sandbox-id"
CRIO_TYPE = "io.kubernetes.cri-o.ContainerType"
CRIO = "io.kubernetes.cri-o.SandboxID"
DOCKER_TYPE = "io.kubernetes.docker.type"
DOCKER = "io.kubernetes.sandbox.id"


@pytest.mark.parametrize(
    ("annotations", "group"),
    [
        ({}, "c1"),
        ({CRI_TYPE: "container", CRI: "pod"}, "pod"),
        ({CRIO_TYPE: "container", CRIO: "pod"}, "pod"),
        ({DOCKER_TYPE: "container", DOCKER: "pod"}, "pod"),
        ({CRI_TYPE: "sandbox", CRI: "c1"}, "c1"),
        ({DOCKER_TYPE: "podsandbox"}, "c1"),
        ({RUNC_GROUP: "g"}, "c1"),
        ({CRI: "pod"}, "c1"),
        ({CRI_TYPE: "container", CRI: ""}, "c1"),
        ({CRI_TYPE: "container", CRI: 7}, "c1"),
        (None, "c1"),
        ([], "c1"),
    ],
    ids=[
        *("none", "cri", "cri-o", "cri-dockerd", "the sandbox itself", "dockerd's sandbox", "runc's group"),
        *("no type", "empty", "number", "null", "list"),
    ],
)
def test_group_of_a_bundle(tmp_path: Path, annotations: object, group: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"annotations": annotations}))

    assert group_id(str(tmp_path), "c1") == group


TYPES = st.sampled_from([CRI_TYPE, CRIO_TYPE, DOCKER_TYPE])
SANDBOXES = st.sampled_from([CRI, CRIO, DOCKER, RUNC_GROUP])


@given(
    st.dictionaries(TYPES, st.sampled_from(["sandbox", "podsandbox", "container", "odd", ""])),
    st.dictionaries(SANDBOXES, st.sampled_from(["c1", "pod", "pod-2", ""])),
)
def test_start_groups_as_create_places(types: dict[str, str], sandboxes: dict[str, str]) -> None:
    """A container that reaches another shim than that of its sandbox could not be created."""
    annotations = types | sandboxes
    with tempfile.TemporaryDirectory() as bundle:
        Path(bundle, "config.json").write_text(json.dumps({"annotations": annotations}))
        group = group_id(bundle, "c1")

    try:
        member = membership(annotations, ContainerId("c1"))
    except InvalidArgument:
        assert group == "c1"
    else:
        assert group == member.sandbox_id


def test_spec_that_is_no_object_has_no_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")

    assert group_id(str(tmp_path), "c1") == "c1"


def test_spec_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)

    with pytest.raises(CommandError, match=r"^parse spec '.*/config\.json': "):
        group_id(str(tmp_path), "c1")


def test_a_bundle_without_a_spec_is_that_of_a_sandbox_of_the_sandbox_api(tmp_path: Path) -> None:
    assert group_id(str(tmp_path), "c1") == "c1"


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^read spec '.*/none/config\.json': ENOENT "):
        group_id(str(tmp_path / "none"), "c1")


def test_unreadable_spec_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()

    with pytest.raises(CommandError, match=r"^read spec '.*/config\.json': EISDIR \(is a directory\)$"):
        group_id(str(tmp_path), "c1")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON_VALUES, st.sampled_from(["", " ", "\n\t\r "]))
def test_json_is_read_as_the_json_module_reads_it(value: object, space: str) -> None:
    assert parse_json((space + json.dumps(value) + space).encode()) == value


@given(st.text(alphabet='{}[]",:0123456789.eE+-truefalsn \\u"', max_size=12))
def test_text_is_refused_exactly_when_the_json_module_refuses_it(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            parse_json(text.encode())
    else:
        assert parse_json(text.encode()) == expected


@given(st.text(alphabet="aZ09._-/é ", max_size=6) | st.sampled_from(["a" * 76, "a" * 77]))
def test_identifier_rule_is_that_of_the_model(text: str) -> None:
    try:
        model_checked_id(text, "id")
    except InvalidArgument:
        with pytest.raises(CommandError):
            checked_id(text, "id")
    else:
        assert checked_id(text, "id") == text
