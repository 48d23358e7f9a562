"""JSON documents to typed values: msgspec finds what does not fit, the words are ours."""

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0\ud800-\udfff]*\Z", description="no text a kernel would take")]
"""Without a NUL byte, and without half of a character, which JSON's escapes can spell."""

_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$([^`]*)`)?", re.DOTALL)
"""A ValidationError: what is wrong, and the path of the member unless it is the document. `[...]` is some key."""
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
    """`kind`, a msgspec.Struct: msgspec has read its annotations.

    Otherwise it does so at the first use, in every shim that a zygote has forked.
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
    """`value`, which is what `json` made of a document, as a `kind`: a msgspec.Struct. Further members are ignored.

    `hook` makes values of types that msgspec does not know; it raises ValueError saying what the member is instead.
    Raises what `refused` makes of a sentence on the first member that is wrong: `a.b[2].c is not a whole number`. A
    member that is null where a value must be is missing. What is wrong with a string that does not match its pattern is
    the description beside the pattern (`Text`).
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
    """The type of the member `name` of an object, or of the items of a list."""
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
"""Parts of a dotted TOML key: no document here needs more than four, and tomllib's memory grows with their square."""
_OUTSIDE_TEXTS = re.compile(r"""\"{3}|'{3}|["'#.]|[\n=,{}\[\]]+""")
_TEXT_ENDS = {
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'''": re.compile(r"'{3,5}"),
    '"': re.compile(r'\\.|["\n]'),
    "'": re.compile(r"['\n]"),
    "#": re.compile(r"\n"),
}
"""Start of a text or comment to its end; an escape does not end one."""


def check_toml_keys(text: str) -> None:
    """Raises ValueError for a key of more than MAX_KEY_PARTS parts; to be called before `tomllib` reads `text`."""
    at = dots = 0
    while token := _OUTSIDE_TEXTS.search(text, at):
        at = token.end()
        if token[0] == ".":
            dots += 1
            if dots >= MAX_KEY_PARTS:
                raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
        elif token[0] in _TEXT_ENDS:
            ends = _TEXT_ENDS[token[0]].finditer(text, at)
            end = next((found for found in ends if found[0][0] != "\\"), None)
            if end is None:  # a key does not follow; the parser reports what is missing
                return
            at = end.end()
            dots = 0 if end[0] == "\n" else dots
        else:
            dots = 0
