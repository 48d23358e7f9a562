"""Documents that are not what they should be: one error, which names the document and the place in it."""

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from pyshim.model.decoding import damaged, decoded, from_json, from_toml, json_value, toml_value
from pyshim.model.errors import Internal, InvalidArgument


class Kind(StrEnum):
    MOUNT = "mount"


class Item(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    path: str
    words: tuple[str, ...] | None = None
    count: int = 0
    kind: Kind = Kind.MOUNT
    share: Fraction = Fraction(1)
    on: bool = False
    below: "Item | None" = None


class Top(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[Item, ...] = ()
    labels: Mapping[str, str] | None = None
    sizes: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    objects: tuple[Mapping[str, Any], ...] = ()


def hook(kind: type, value: Any) -> Fraction:
    assert kind is Fraction
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError) as exc:
        raise ValueError(f"is not a fraction: {value!r}") from exc


def items(**members: object) -> dict[str, Any]:
    return {"items": [{"Path": "/a"}, {"Path": "/b", **members}]}


def test_a_value_of_the_type_comes_typed_and_further_members_are_ignored() -> None:
    value = {**items(Words=["a"], Kind="mount", Share="1/3", Below={"Path": "/c"}), "other": [1], "labels": None}

    top = decoded(value, Top, AssertionError, hook=hook)

    assert top.items[1] == Item(path="/b", words=("a",), share=Fraction(1, 3), below=Item(path="/c"))
    assert top.labels is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "not a JSON object"),
        ([], "not a JSON object"),
        ({"items": {}}, "items is not a list"),
        ({"items": [{}, 5]}, "items[0].Path is missing"),
        ({"items": [5]}, "items[0] is not an object"),
        ({"items": [None]}, "items[0] is not an object"),
        (items(Path=None), "items[1].Path is missing"),
        (items(Path=7), "items[1].Path is not a string"),
        (items(Words="a"), "items[1].Words is not a list of strings"),
        (items(Words=["a", 3]), "items[1].Words[1] is not a string"),
        (items(Count=True), "items[1].Count is not a whole number"),
        (items(Count=1.0), "items[1].Count is not a whole number"),
        (items(Count="1"), "items[1].Count is not a whole number"),
        (items(On=1), "items[1].On is not true or false"),
        (items(Kind="moon"), "items[1].Kind: unknown kind 'moon'"),
        (items(Kind="a - at `$.b`"), "items[1].Kind: unknown kind 'a - at `$.b`'"),
        (items(Kind=1), "items[1].Kind is not a string"),
        (items(Share="1/0"), "items[1].Share is not a fraction: '1/0'"),
        (items(Share="x - at `$.b`"), "items[1].Share is not a fraction: 'x - at `$.b`'"),
        (items(Below=3), "items[1].Below is not an object"),
        (items(Below={"Path": 3}), "items[1].Below.Path is not a string"),
        ({"labels": 3}, "labels is not an object of strings"),
        ({"labels": {"a": "b", "c.d": 1}}, "labels is not an object of strings (see 'c.d')"),
        ({"sizes": {"a": ["b"]}}, "sizes is not an object"),
        ({"objects": [{}, []]}, "objects[1] is not an object"),
        ({"\udcff": 1}, "the name of a member is not text: '\\udcff'"),
    ],
)
def test_the_first_wrong_member_is_named_with_what_it_should_be(value: object, sentence: str) -> None:
    with pytest.raises(LookupError) as refused:
        decoded(value, Top, lambda problem: LookupError(f"read 'f': {problem}"), hook=hook)

    assert str(refused.value) == f"read 'f': {sentence}"


class Record(msgspec.Struct, frozen=True):
    key: str
    files: tuple[tuple[str, str], ...] = ()
    either: int | str = 0


GOOD = b'{"key": "k", "files": [["/a", "1"]], "either": "x"}'


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{"key": "\xff"}', "not JSON: not UTF-8 at byte 9"),
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "not JSON: Expecting property name"),
        (GOOD + b"}", "not JSON: Extra data"),
        (b"\xef\xbb\xbf" + GOOD, "not JSON: Unexpected UTF-8 BOM"),
        (GOOD.decode().encode("utf-16"), "not JSON: not UTF-8 at byte 0"),
        (b'{"key": "k", "either": NaN}', "not JSON: NaN is not a number"),
        (b"9" * 5000, "not JSON: Exceeds the limit"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'{"key": "\\ud800"}', "it has a string that is not text"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"{}", "key is missing"),
        (b'{"key": null}', "key is missing"),
        (b'{"key": 1}', "key is not a string"),
        (b'{"key": "k", "files": {}}', "files is not a list"),
        (b'{"key": "k", "files": [["/a"]]}', "files[0]: expected `array` of length 2"),
        (b'{"key": "k", "files": [["/a", 7]]}', "files[0][1] is not a string"),
        (b'{"key": "k", "either": []}', "either: expected `int | str`, got `array`"),
    ],
)
def test_a_damaged_document_is_one_error_with_the_place(data: bytes, sentence: str) -> None:
    with pytest.raises(Internal) as caught:
        from_json(data, Record, damaged("/run/x", Internal, "remove it"))

    assert str(caught.value).startswith(f"read '/run/x': {sentence}")
    assert str(caught.value).endswith("(hint: remove it)")


def test_a_list_can_be_a_document() -> None:
    assert from_json(b'[{"key": "k"}]', tuple[Record, ...], ValueError) == (Record("k"),)
    with pytest.raises(InvalidArgument, match=r"^read x: not a list$"):
        from_json(b"{}", tuple[Record, ...], damaged("x"))
    with pytest.raises(InvalidArgument, match=r"^read x: \[0\]\.key is not a string$"):
        from_json(b'[{"key": 1}]', tuple[Record, ...], damaged("x"))


def test_a_spec_may_have_lone_surrogates_and_numbers_may_stay_text() -> None:
    assert json_value(b'["\\ud800", 1.50]', ValueError, number=str) == ["\ud800", "1.50"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"key = '\xff'", "not UTF-8 at byte 7"),
        (b"key = ", "not TOML: Invalid value"),
        (b"a = 1\na = 2", "not TOML: Cannot overwrite a value"),
        (b"a.b.c.d.e.f.g.h.i = 1", "not TOML: a key of more than 8 parts"),
        (b"key = 1", "key is not a string"),
        (b"", "key is missing"),
    ],
)
def test_toml_is_read_alike(data: bytes, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_toml(data, Record, damaged("/etc/x"))

    assert str(caught.value).startswith(f"read '/etc/x': {sentence}")
    assert toml_value(b"key = 1.5", ValueError, parse_float=str) == {"key": "1.5"}
