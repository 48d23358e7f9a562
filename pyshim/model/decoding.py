"""The one reader of what others wrote: bytes to a typed value, or one error that names the file and the place in it.

JSON and TOML fail in several ways (not UTF-8, not the grammar, nested too deeply, a wrong type), for which libraries
raise unrelated exceptions. Here each becomes the one error that the caller chooses. msgspec finds wrong types; this
module words them for people. `tests/style/test_decoding.py` sees that no other module decodes by itself.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from pyshim.model.errors import InvalidArgument

T = TypeVar("T")
Refused = Callable[[str], Exception]
"""Makes the error for a document. Its argument is a sentence that names the place: `a.b[2].c is not a string`."""
Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0\ud800-\udfff]*\Z", description="not text that the kernel accepts")]
"""A string without NUL bytes and without lone surrogates, which JSON's escapes can spell."""

_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$([^`]*)`)?", re.DOTALL)
"""A ValidationError's text: the problem, then the member's path unless the whole document is wrong. `[...]` stands for
any key of an object."""
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MAX_SHOWN = 100
_INTEGER = "a whole number"
_WORDS: dict[type[inspect.Type], str] = {
    inspect.StrType: "a string",
    inspect.EnumType: "a string",
    inspect.IntType: _INTEGER,
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
}


def described(kind: type[T]) -> type[T]:
    """Class decorator: makes msgspec read the annotations of the msgspec.Struct `kind` now, and returns `kind`.

    Otherwise msgspec reads them at the first use, which is in every shim that a zygote has forked.
    """
    msgspec.json.Decoder(kind)
    return kind


def damaged(where: str, error: type[Exception] = InvalidArgument, hint: str = "") -> Refused:
    """Errors of this class about the document `where`, a path or words: `read '/run/x': not JSON: ... (hint: ...)`."""
    what = f"'{where}'" if where.startswith("/") else where
    return lambda sentence: error(f"read {what}: {sentence}{f' (hint: {hint})' if hint else ''}")


def json_value(data: bytes | str, refused: Refused, *, number: Callable[[str], Any] | None = None) -> Any:
    """The value that the JSON text spells, in UTF-8. Raises `refused(sentence)` for any other text.

    Numbers that JSON does not have (NaN, Infinity) are refused. Strings may have lone surrogates. `number` makes the
    value of a number from its text, in place of int and float.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, parse_int=number, parse_float=number, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise refused(f"not JSON: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise refused("not JSON: nested too deeply") from error
    except ValueError as error:
        raise refused(f"not JSON: {str(error)[:_MAX_SHOWN]}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def from_json(
    data: bytes | str, kind: type[T], refused: Refused, *, hook: Callable[[type, Any], object] | None = None
) -> T:
    """The JSON text `data` as a `kind`: `json_value`, then `decoded`. Lone surrogates are refused, too."""
    value = json_value(data, refused)
    text = data if isinstance(data, str) else data.decode()
    if "\\u" in text or isinstance(data, str):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise refused("it has a string that is not text") from error
    return decoded(value, kind, refused, hook=hook)


def toml_value(data: bytes | str, refused: Refused, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The table that the TOML text spells, in UTF-8. Raises `refused(sentence)` for any other text."""
    import tomllib  # `delete` reads no TOML

    try:
        text = data if isinstance(data, str) else data.decode()
        check_toml_keys(text)
        return tomllib.loads(text, parse_float=parse_float)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise refused(f"not UTF-8 at byte {error.start}, line {line}") from error
    except RecursionError as error:
        raise refused("not TOML: nested too deeply") from error
    except ValueError as error:
        raise refused(f"not TOML: {str(error)[:200]}") from error


def from_toml(data: bytes | str, kind: type[T], refused: Refused) -> T:
    """The TOML text `data` as a `kind`: `toml_value`, then `decoded`."""
    return decoded(toml_value(data, refused), kind, refused)


def decoded(
    value: object,
    kind: type[T],
    refused: Refused,
    *,
    hook: Callable[[type, Any], object] | None = None,
) -> T:
    """The JSON or TOML value `value` as a `kind`, a msgspec.Struct. Unknown members are ignored.

    `hook` converts values of types that msgspec does not support; it raises ValueError with the rest of a sentence
    (`is not ...`). Raises `refused(sentence)` for the first wrong member: `a.b[2].c is not a whole number`. Null counts
    as missing where a value is required. For a string that does not match its pattern, the sentence has the pattern's
    description (as in `Text`).
    """
    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise refused(_sentence(value, kind, str(error))) from error
    except UnicodeEncodeError as error:
        raise refused(f"the name of a member is not text: {error.object[:_MAX_SHOWN]!r}") from error


def _sentence(value: Any, kind: type, message: str) -> str:
    match = _MESSAGE.fullmatch(message)
    assert match is not None, "anything matches it"
    problem, path = match[1], (match[2] or "").partition("[...]")[0]
    member = path.removeprefix(".")
    if missing := _MISSING.fullmatch(problem):
        return f"{f'{member}.{missing[1]}'.removeprefix('.')} is missing"
    if unknown := _UNKNOWN.fullmatch(problem):
        return f"{member}: object contains unknown field `{unknown[1]}`".removeprefix(": ")
    declared: inspect.Type | None = inspect.type_info(kind)
    last = ""
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
        declared, last = _below(declared, name, index), name or last
    expected = _expected(declared)
    if not member:
        return "not a JSON object" if expected in ("an object", "") else f"not {expected}"
    if value is None and not member.endswith("]"):
        return f"{member} is missing"
    declared = _not_null(declared)
    if isinstance(declared, inspect.Metadata):
        if isinstance(value, str) and declared.extra_json_schema:
            return f"{member} is {declared.extra_json_schema['description']}: {value[:_MAX_SHOWN]!r}"
        declared = declared.type
        expected = _expected(declared)
    if isinstance(declared, inspect.CustomType):
        return f"{member} {problem}"
    if isinstance(declared, inspect.EnumType) and isinstance(value, str):
        return f"{member}: unknown {last.lower()} {value[:_MAX_SHOWN]!r}"
    if isinstance(declared, inspect.DictType) and isinstance(declared.value_type, inspect.StrType):
        wrong = [key for key, text in value.items() if not isinstance(text, str)] if isinstance(value, dict) else []
        return f"{member} is not an object of strings" + (f" (see {wrong[0][:_MAX_SHOWN]!r})" if wrong else "")
    if not expected or "length" in problem or (type(value) is int and expected == _INTEGER):
        return f"{member}: {problem[:1].lower()}{problem[1:_MAX_SHOWN]}"
    return f"{member} is not {expected}"


def _below(declared: inspect.Type | None, name: str, index: str) -> inspect.Type | None:
    """The type of the member `name` of a struct, or of the item `index` of a list; None where it depends on values."""
    match _not_null(declared):
        case inspect.StructType(fields=fields):
            return next((field.type for field in fields if field.encode_name == name), None)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return item
        case inspect.TupleType(item_types=items) if index:
            return items[int(index)]
    return None


def _not_null(declared: inspect.Type | None) -> inspect.Type | None:
    if not isinstance(declared, inspect.UnionType):
        return declared
    others = [each for each in declared.types if not isinstance(each, inspect.NoneType)]
    return others[0] if len(others) == 1 else None


def _expected(declared: inspect.Type | None) -> str:
    """The words for the type; empty where msgspec's own are better."""
    match _not_null(declared):
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return "a list of strings" if isinstance(item, inspect.StrType) else "a list"
        case inspect.DictType() | inspect.StructType():
            return "an object"
        case None:
            return ""
        case plain:
            return _WORDS.get(type(plain), "")


MAX_KEY_PARTS = 8
"""Most parts of a dotted TOML key. Our documents have four at most; tomllib's memory grows with their square."""
_TOKEN = re.compile(r"""\"{3}|'{3}|["'#.]|[\n=,{}\[\]]+""")
_STRING_ENDS = {
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'''": re.compile(r"'{3,5}"),
    '"': re.compile(r'\\.|["\n]'),
    "'": re.compile(r"['\n]"),
    "#": re.compile(r"\n"),
}
"""The pattern of a string's or comment's end, or of an escape, by the token that starts it."""


def check_toml_keys(text: str) -> None:
    """Raises ValueError for a key of more than MAX_KEY_PARTS parts. Call it before `tomllib` parses `text`."""
    at = dots = 0
    while token := _TOKEN.search(text, at):
        at = token.end()
        if token[0] == ".":
            dots += 1
            if dots >= MAX_KEY_PARTS:
                raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
        elif token[0] in _STRING_ENDS:
            ends = _STRING_ENDS[token[0]].finditer(text, at)
            end = next((found for found in ends if found[0][0] != "\\"), None)
            if end is None:  # no key can follow; `tomllib` reports the unclosed string
                return
            at = end.end()
            dots = 0 if end[0] == "\n" else dots
        else:
            dots = 0
