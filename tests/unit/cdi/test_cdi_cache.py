"""Directories of specs: files that are good, bad, hostile, changing; priorities, conflicts, writing."""

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spec_files import CountedText, put, spec

from pyshim.cdi import Cache, DeviceConflict, InvalidSpec, UnresolvedDevices, files, parse_spec, read_spec, yaml_text
from pyshim.cdi.files import MAX_SPEC_BYTES, MAX_VALUES, document_of


def names(cache: Cache) -> list[str]:
    return [found.name for found in cache.devices()]


YAML = """
cdiVersion: v0.6.0
kind: "v.com/c"
devices:
  - name: 0
    containerEdits:
      deviceNodes:
        - {path: /dev/x, type: c, major: 0x10, minor: 010, fileMode: 0660}
      env: [WHEN=2020-01-01, 'A=b']
  - name: 1:30
    annotations: {released: 2020-01-01, yes: "1"}
    containerEdits: &same
      env: [A=b]
  - {name: other, containerEdits: *same}
"""


def test_yaml_is_read_as_the_same_nouns(tmp_path: Path) -> None:
    found = read_spec(str(put(tmp_path, "x.yaml", YAML.replace('yes: "1"', "'yes': \"1\""))))

    node = found.devices[0].container_edits.device_nodes[0]
    assert [device.name for device in found.devices] == ["0", "1:30", "other"]
    assert (node.major, node.minor, node.file_mode) == (16, 8, 0o660)
    assert found.devices[1].annotations == {"released": "2020-01-01", "yes": "1"}
    assert found.devices[2].container_edits == found.devices[1].container_edits


def test_content_decides_between_json_and_yaml(tmp_path: Path) -> None:
    as_yaml = put(
        tmp_path, "a.json", "cdiVersion: 0.3.0\nkind: v/c\ndevices: [{name: a, containerEdits: {env: [A=b]}}]"
    )
    as_json = put(tmp_path, "b.yaml", json.dumps(spec()))
    flow = put(tmp_path, "c.yaml", "{cdiVersion: 0.3.0, kind: v/c, devices: [{name: a, containerEdits: {env: [A=b]}}]}")

    assert [read_spec(str(path)).kind for path in (as_yaml, as_json, flow)] == ["v/c", "v.com/c", "v/c"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.json", "", "the document is missing"),
        ("x.json", "{", "not JSON"),
        ("x.json", '{"kind": "a/b", "kind": "a/c"}', "the name 'kind' is given twice"),
        ("x.yaml", "kind: a/b\nkind: a/c", "the name 'kind' is given twice"),
        ("x.yaml", "a: [", "not YAML"),
        ("x.yaml", "{1: 2}", "is not a member's name"),
        ("x.yaml", "--- {}\n--- {}", "not YAML"),
        ("x.yaml", "!!int", "not YAML"),
        ("x.yaml", "!!bool x", "not YAML"),
        ("x.yaml", "!!timestamp x", "not YAML"),
        ("x.yaml", "!!python/object/apply:os.system [true]", "not YAML"),
        ("x.yaml", "just text", "the document is not an object"),
        ("x.json", "[" * 100_000, "not YAML"),
        ("x.yaml", "&a [*a]", "nested deeper than"),
        ("x.json", "\ud800", "not UTF-8 at byte 0"),
        ("x.json", '{"kind": "\\ud800/x"}', "not a text that a kernel takes"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode(),
)
def test_files_that_are_no_specs(tmp_path: Path, name: str, content: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogatepass"))

    with pytest.raises(InvalidSpec, match=text) as refused:
        read_spec(str(path))
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 2000


def test_a_small_file_that_unfolds_to_billions_is_refused() -> None:
    levels = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]

    with pytest.raises(InvalidSpec, match="more than 200000 values"):
        document_of("\n".join(levels).encode(), "bomb.yaml")


def test_yaml_is_read_no_further_than_a_spec_can_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB of one-letter values took a minute: parsing stops at the limit."""
    read: list[object] = []
    parse = yaml_text.yaml.parse

    def counted(text: str, **options: Any) -> Iterator[object]:
        for event in parse(text, **options):
            read.append(event)
            yield event

    monkeypatch.setattr(yaml_text.yaml, "parse", counted)

    with pytest.raises(InvalidSpec, match="not YAML: more than 200000 values"):
        document_of(b"a: [" + b"0," * (1 << 20) + b"]", "wide.yaml")
    assert len(read) < MAX_VALUES + 10


def test_of_a_million_problems_fifty_are_shown() -> None:
    document = {"cdiVersion": "0.3.0", "kind": "v/c", "devices": [1] * 1000}

    with pytest.raises(InvalidSpec) as refused:
        parse_spec(document, "x")
    assert len(refused.value.problems) == 1000
    assert str(refused.value).endswith("devices[49] is not an object; and 950 more")


def test_a_name_given_twice_is_found_in_one_pass() -> None:
    pairs = [(CountedText(number), number) for number in range(2000)]
    CountedText.compared = 0

    with pytest.raises(ValueError, match="the name '1999' is given twice"):
        files._object([*pairs, (CountedText(1999), 0)])
    assert CountedText.compared < 20 * len(pairs)


def test_merges_of_merges_are_refused_while_they_are_small() -> None:
    levels = ["x:", "  a0: &a0 {k: 1}"]
    levels += [f"  a{n}: &a{n}\n    <<: [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)]

    tracemalloc.start()
    try:
        with pytest.raises(InvalidSpec, match="more than 1000 members by merging"):
            document_of("\n".join([*levels, "<<: *a6"]).encode(), "bomb.yaml")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_aliases_are_counted() -> None:
    with pytest.raises(InvalidSpec, match="more than 1000 aliases"):
        document_of(f"a: &a x\nb: [{'*a,' * 1001}]".encode(), "aliases.yaml")


def test_one_object_takes_in_another() -> None:
    found = document_of(b"a: &a {k: 1}\nb: {<<: *a, l: 2}", "merge.yaml")

    assert found == {"a": {"k": 1}, "b": {"k": 1, "l": 2}}


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with open(path, "wb") as file:
        file.truncate(100 << 20)

    with pytest.raises(InvalidSpec, match=f"it has {100 << 20} bytes, at most {MAX_SPEC_BYTES} are read"):
        read_spec(str(path))


def test_what_is_no_regular_file_is_refused_at_once(low: Path, cache: Cache) -> None:
    good = put(low, "good.json", spec())
    os.mkfifo(low / "fifo.json")
    (low / "loop.json").symlink_to("loop.json")
    (low / "dangling.json").symlink_to("nowhere")
    (low / "null.yaml").symlink_to("/dev/null")
    (low / "link.json").symlink_to("../elsewhere.json")
    put(low.parent, "elsewhere.json", spec("v.com/linked"))

    assert names(cache) == ["v.com/c=0", "v.com/linked=0"]
    texts = {Path(path).name: str(error[0]) for path, error in cache.errors().items()}
    assert sorted(texts) == ["dangling.json", "fifo.json", "loop.json", "null.yaml"]
    assert "ELOOP" in texts["loop.json"]
    assert "ENOENT" in texts["dangling.json"]
    assert "not a regular file" in texts["fifo.json"]
    assert "not a regular file" in texts["null.yaml"]
    assert cache.devices()[0].path == str(good)


def test_only_files_of_the_two_suffixes_directly_in_the_directory_count(low: Path, cache: Cache) -> None:
    put(low, "a.json", spec("v.com/a"))
    put(low, "b.yaml", spec("v.com/b"))
    for name in ("c.yml", "d.JSON", "e.json.bak", "f", ".json"):
        put(low, name, "nonsense")
    (low / "sub.json").mkdir()
    put(low / "sub.json", "g.json", spec("v.com/g"))

    assert names(cache) == ["v.com/a=0", "v.com/b=0"]
    assert cache.errors() == {}
    assert cache.kinds() == ("v.com/a", "v.com/b")


def test_missing_directories_are_empty_ones_and_loops_are_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    good = tmp_path / "good"
    put(good, "x.json", spec())
    cache = Cache([str(tmp_path / name) for name in ("none", "loop", "file", "good")])

    assert names(cache) == ["v.com/c=0"]
    assert {Path(path).name: str(errors[0]).split("': ")[1] for path, errors in cache.errors().items()} == {
        "loop": "ELOOP (too many levels of symbolic links)",
        "file": "ENOTDIR (not a directory)",
    }


def test_one_broken_file_does_not_touch_the_others(low: Path, cache: Cache) -> None:
    put(low, "a.json", spec("v.com/a"))
    put(low, "b.json", {**spec("v.com/b"), "extra": 1})
    put(low, "c.json", spec("v.com/c", version="0.2.0"))

    assert names(cache) == ["v.com/a=0"]
    assert sorted(Path(path).name for path in cache.errors()) == ["b.json", "c.json"]
    with pytest.raises(UnresolvedDevices, match=r"b\.json': extra is not known"):
        cache.edits(["v.com/b=0"])


def test_the_later_directory_wins(low: Path, high: Path, cache: Cache) -> None:
    put(low, "x.json", spec("v.com/c", "0", "1", env="LOW"))
    put(high, "y.json", spec("v.com/c", "1", env="HIGH"))

    assert [(found.name, Path(found.path).name) for found in cache.devices()] == [
        ("v.com/c=0", "x.json"),
        ("v.com/c=1", "y.json"),
    ]
    assert cache.errors() == {}
    assert cache.edits(["v.com/c=1"]).env == ("COMMON=1", "HIGH_1=1")


def test_a_conflict_removes_the_device_and_is_reported_for_both_files(low: Path, high: Path, cache: Cache) -> None:
    put(low, "a.json", spec("v.com/c", "0", "1"))
    put(low, "b.json", spec("v.com/c", "1", "2"))

    assert names(cache) == ["v.com/c=0", "v.com/c=2"]
    errors = cache.errors()
    assert sorted(Path(path).name for path in errors) == ["a.json", "b.json"]
    assert all(isinstance(error, DeviceConflict) for found in errors.values() for error in found)
    with pytest.raises(UnresolvedDevices, match=r"'v.com/c=1' \(find cdi device 'v.com/c=1': defined by .*a.json"):
        cache.edits(["v.com/c=1"])
    put(high, "c.json", spec("v.com/c", "1"))
    assert names(cache) == ["v.com/c=0", "v.com/c=1", "v.com/c=2"]
    assert cache.errors() == {}


def test_all_unresolved_names_are_listed_at_once_and_nothing_is_injected(low: Path, cache: Cache) -> None:
    put(low, "a.json", spec())
    oci: dict[str, Any] = {}

    with pytest.raises(UnresolvedDevices, match=r"'v\.com/c=7', 'w\.com/c=0', 'nonsense'") as refused:
        cache.inject(oci, ["v.com/c=0", "v.com/c=7", "w.com/c=0", "nonsense"])
    assert refused.value.devices == ("v.com/c=7", "w.com/c=0", "nonsense")
    assert "want VENDOR/CLASS=NAME" in str(refused.value)
    assert oci == {}


def test_a_specs_own_edits_come_once_before_its_first_device(low: Path, cache: Cache) -> None:
    put(low, "a.json", {**spec("v.com/a", "0", "1"), "containerEdits": {"env": ["ORDER=a"]}})
    put(low, "b.json", {**spec("v.com/b", "0"), "containerEdits": {"env": ["ORDER=b"]}})

    edits = cache.edits(["v.com/b=0", "v.com/a=1", "v.com/a=0", "v.com/a=1"])

    assert edits.env == ("ORDER=b", "DEV_0=1", "ORDER=a", "DEV_1=1", "DEV_0=1")


def test_changes_are_seen_and_what_did_not_change_is_not_read_again(low: Path, high: Path) -> None:
    read: list[str] = []

    def reading(path: str) -> Any:
        read.append(Path(path).name)
        return read_spec(path)

    cache = Cache([str(low), str(high)], read=reading)
    put(low, "a.json", spec("v.com/a"))
    assert names(cache) == ["v.com/a=0"]
    put(high, "b.json", "broken")
    assert names(cache) == ["v.com/a=0"]
    assert len(cache.errors()) == 1
    put(high, "b.json", spec("v.com/b", "0"))
    assert names(cache) == ["v.com/a=0", "v.com/b=0"]
    assert cache.errors() == {}
    assert read == ["a.json", "b.json", "b.json"]
    (low / "a.json").unlink()
    assert names(cache) == ["v.com/b=0"]
    assert read == ["a.json", "b.json", "b.json"]
