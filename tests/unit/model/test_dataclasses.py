"""Our `dataclass` beside the standard library's: each test holds for both, so none can tell them apart."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pyshim.model import dataclasses as ours


class Classes:
    """The same classes, made by one of the two decorators."""

    def __init__(self, dataclass: Any) -> None:
        @dataclass(frozen=True, slots=True, kw_only=True)
        class Point:
            x: int
            y: int = 2
            names: dict[str, int] = dataclasses.field(default_factory=dict)

            @property
            def total(self) -> int:
                return self.x + self.y

        @dataclass(frozen=True, slots=True)
        class Pair:
            left: int
            right: int = 0

        @dataclass(slots=True, kw_only=True)
        class Counter:
            count: int

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Own:
            value: int

            def __repr__(self) -> str:
                return "own words"

            def __eq__(self, other: object) -> bool:
                return True

            def __hash__(self) -> int:
                return 7

        @dataclass(frozen=True, slots=True, kw_only=True)
        class OwnEquality:
            value: int

            def __eq__(self, other: object) -> bool:
                return True

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Nothing:
            pass

        self.Point, self.Pair, self.Counter, self.Nothing = Point, Pair, Counter, Nothing
        self.Own, self.OwnEquality = Own, OwnEquality


@pytest.fixture(params=[dataclasses.dataclass, ours.dataclass], ids=["original", "ours"])
def made(request: pytest.FixtureRequest) -> Classes:
    return Classes(request.param)


@ours.dataclass(frozen=True, slots=True, kw_only=True)
class Importable:
    """Pickle finds it by its name."""

    numbers: tuple[int, ...]
    name: str = "n"


def test_fields_have_the_values_given_or_their_defaults(made: Classes) -> None:
    first, second = made.Point(x=1), made.Point(x=1, y=5, names={"a": 1})

    assert (first.x, first.y, first.names, first.total) == (1, 2, {}, 3)
    assert (second.x, second.y, second.names) == (1, 5, {"a": 1})


def test_a_default_of_a_factory_is_made_anew_for_each(made: Classes) -> None:
    assert made.Point(x=1).names is not made.Point(x=1).names


def test_arguments_may_be_positional_unless_keywords_are_asked_for(made: Classes) -> None:
    assert made.Pair(1) == made.Pair(left=1, right=0)
    assert made.Pair(1, 2) == made.Pair(1, right=2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda made: made.Point(), "'x'"),
        (lambda made: made.Point(y=1, names={}), "'x'"),
        (lambda made: made.Point(x=1, z=2), "'z'"),
        (lambda made: made.Point(x=1, y=1, names={}, z=2), "'z'"),
        (lambda made: made.Point(y=1, names={}, z=2), "'[xz]'"),
        (lambda made: made.Point(1), "positional"),
        (lambda made: made.Pair(), "'left'"),
        (lambda made: made.Pair(1, 2, 3), "positional"),
        (lambda made: made.Pair(1, left=2), "'left'"),
        (lambda made: made.Nothing(x=1), "'x'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(made: Classes, call: Callable[[Classes], Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        call(made)


def test_equal_are_those_of_one_class_with_equal_fields(made: Classes) -> None:
    point = made.Point(x=1)

    assert point == made.Point(x=1, y=2)
    assert point != made.Point(x=2)
    assert made.Pair(1, 2) != (1, 2)
    assert made.Nothing() == made.Nothing()
    assert made.Counter(count=1) == made.Counter(count=1)


def test_equal_ones_have_one_hash_and_changeable_ones_none(made: Classes) -> None:
    assert hash(made.Pair(1, 2)) == hash(made.Pair(1, 2)) == hash((1, 2))
    assert len({made.Pair(1), made.Pair(1, 0), made.Pair(2)}) == 2
    with pytest.raises(TypeError):
        hash(made.Counter(count=1))
    with pytest.raises(TypeError):
        hash(made.Point(x=1))  # of a dict


def test_it_prints_its_fields(made: Classes) -> None:
    assert repr(made.Point(x=1)).rpartition(".")[2] == "Point(x=1, y=2, names={})"
    assert repr(made.Nothing()).rpartition(".")[2] == "Nothing()"


def test_methods_of_the_class_itself_stay(made: Classes) -> None:
    own = made.Own(value=1)

    assert (repr(own), hash(own), own == 3) == ("own words", 7, True)
    assert hash(made.OwnEquality(value=1)) == hash((1,))


def test_frozen_ones_refuse_changes(made: Classes) -> None:
    point = made.Point(x=1)

    with pytest.raises(dataclasses.FrozenInstanceError, match="assign to field 'x'"):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="delete field 'x'"):
        del point.x
    assert point.x == 1


def test_others_can_be_changed_but_have_their_fields_only(made: Classes) -> None:
    counter = made.Counter(count=1)
    counter.count = 2

    assert counter.count == 2
    with pytest.raises(AttributeError):
        counter.other = 1


def test_functions_of_the_original_work(made: Classes) -> None:
    point = made.Point(x=1)

    assert dataclasses.is_dataclass(point)
    assert [(each.name, each.type) for each in dataclasses.fields(made.Pair)] == [("left", int), ("right", int)]
    assert dataclasses.replace(point, y=7) == made.Point(x=1, y=7)
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "names": {}}
    with pytest.raises(TypeError, match="'z'"):
        dataclasses.replace(point, z=1)


def test_patterns_match(made: Classes) -> None:
    match made.Pair(1, 2):
        case made.Pair(left, right):
            assert (left, right) == (1, 2)
    match made.Point(x=3):
        case made.Point(x=x, y=2):
            assert x == 3
    assert made.Point.__match_args__ == ()


def test_copies_are_equal_and_a_deep_one_shares_nothing(made: Classes) -> None:
    point = made.Point(x=1, names={"a": 1})
    shallow, deep = copy.copy(point), copy.deepcopy(point)

    assert point == shallow == deep
    assert shallow.names is point.names
    assert deep.names is not point.names


def test_pickled_ones_come_back() -> None:
    value = Importable(numbers=(1, 2))

    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    "options", [{"repr": False}, {"compare": False}, {"init": False, "default": 0}, {"hash": False}]
)
def test_options_of_fields_that_nothing_here_heeds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="make field 'x'"):

        @ours.dataclass(frozen=True, slots=True, kw_only=True)
        class _Odd:
            x: int = dataclasses.field(**options)


def test_a_class_that_wants_to_finish_its_making_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="__post_init__"):

        @ours.dataclass(frozen=True, slots=True, kw_only=True)
        class _Odd:
            def __post_init__(self) -> None: ...
