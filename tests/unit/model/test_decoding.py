"""Errors of values of a wrong type: they name the first wrong member, and its type."""

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from pyshim.model.decoding import decoded


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
