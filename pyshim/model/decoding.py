"""Decodes JSON documents to typed values. msgspec finds the errors; this module words them for people."""

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0\ud800-\udfff]*\Z", description="not text that the kernel accepts")]
"""A string without NUL bytes and without lone surrogates, which JSON's escapes can spell."""

_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$([^`]*)`)?", re.DOTALL)
"""A ValidationError's text: the problem, then the member's path unless the whole document is wrong. `[...]` stands for
any key of an object."""
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MAX_SHOWN = 100
_WORDS: dict[type[inspect.Type], str] = {
    inspect.StrType: "a string",
    inspect.EnumType: "a string",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
}


def described(kind: type[T]) -> type[T]:
    """Class decorator: makes msgspec read the annotations of the msgspec.Struct `kind` now, and returns `kind`.

    Otherwise msgspec reads them at the first use, which is in every shim that a zygote has forked.
    """
    msgspec.json.Decoder(kind)
    return kind


def decoded(
    value: object,
    kind: type[T],
    refused: Callable[[str], Exception],
    *,
    hook: Callable[[type, Any], object] | None = None,
) -> T:
    """The JSON value `value` as a `kind`, a msgspec.Struct. Unknown members are ignored.

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
    declared, last = inspect.type_info(kind), ""
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
        declared, last = _below(declared, name), name or last
    if not member:
        return "not a JSON object"
    if value is None and not member.endswith("]"):
        return f"{member} is missing"
    declared = _not_null(declared)
    if isinstance(declared, inspect.Metadata):
        if isinstance(value, str):
            return f"{member} is {(declared.extra_json_schema or {})['description']}: {value[:_MAX_SHOWN]!r}"
        declared = declared.type
    if isinstance(declared, inspect.CustomType):
        return f"{member} {problem}"
    if isinstance(declared, inspect.EnumType) and isinstance(value, str):
        return f"{member}: unknown {last.lower()} {value[:_MAX_SHOWN]!r}"
    if isinstance(declared, inspect.DictType) and isinstance(declared.value_type, inspect.StrType):
        wrong = [key for key, text in value.items() if not isinstance(text, str)] if isinstance(value, dict) else []
        return f"{member} is not an object of strings" + (f" (see {wrong[0][:_MAX_SHOWN]!r})" if wrong else "")
    return f"{member} is not {_expected(declared)}"


def _below(declared: inspect.Type, name: str) -> inspect.Type:
    """The type of the member `name` if `declared` is a struct, of the items if it is a list."""
    match _not_null(declared):
        case inspect.StructType(fields=fields):
            return next(field.type for field in fields if field.encode_name == name)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return item
    raise AssertionError(f"nothing is below {declared}")


def _not_null(declared: inspect.Type) -> inspect.Type:
    match declared:
        case inspect.UnionType(types=types):
            return next(each for each in types if not isinstance(each, inspect.NoneType))
    return declared


def _expected(declared: inspect.Type) -> str:
    match _not_null(declared):
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return "a list of strings" if isinstance(item, inspect.StrType) else "a list"
        case inspect.DictType() | inspect.StructType():
            return "an object"
        case plain:
            return _WORDS[type(plain)]


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
