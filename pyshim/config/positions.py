"""The line of each key and table in a TOML text, which `tomllib` does not report.

Reads texts that `tomllib` has accepted, so it only has to find its way, not to judge.
"""

import re
import tomllib
from bisect import bisect_right

Path = tuple[str, ...]
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\n\]}#]*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}' r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}" r"""|"(?:[^"\\]|\\.)*"|'[^']*'""",
    re.DOTALL,
)
_BRACKETS = re.compile(r"""[\[\]{}]|#[^\n]*|[^\[\]{}#"']+""")


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every key and table header; an item of an array of tables has its number in the path."""
    scanner = _Scanner(text.replace("\r\n", "\n") + "\n")
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._items: dict[Path, int] = {}
        self.lines: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> Path:
        is_item = self._text.startswith("[[", self._at)
        start = self._at
        self._at += 2 if is_item else 1
        path = self._inside_items(self._key())
        self._at += 2 if is_item else 1
        if is_item:
            # An array met before comes back with its last item's number; this header begins the next item.
            name = path[:-1] if path[:-1] in self._items else path
            self._note(name, start)
            self._items[name] = self._items.get(name, -1) + 1
            path = (*name, str(self._items[name]))
        self._note(path, start)
        return path

    def _inside_items(self, names: Path) -> Path:
        """`names` with the number of the current item after each name that is an array of tables."""
        path: Path = ()
        for name in names:
            path = (*path, name)
            if path in self._items:
                path = (*path, str(self._items[path]))
        return path

    def _pair(self, table: Path) -> None:
        start = self._at
        path = (*table, *self._key())
        self._at += 1
        self._skip(_SPACE)
        self._note(path, start)
        self._value(path)

    def _key(self) -> Path:
        names: list[str] = []
        while True:
            self._skip(_SPACE)
            string = _STRING.match(self._text, self._at)
            if string:
                names.append(tomllib.loads(f"key = {string[0]}")["key"])
                self._at = string.end()
            else:
                bare = _BARE_KEY.match(self._text, self._at)
                assert bare is not None, f"no key at offset {self._at} of a text that is valid TOML"
                names.append(bare[0])
                self._at = bare.end()
            self._skip(_SPACE)
            if self._text[self._at] != ".":
                return tuple(names)
            self._at += 1

    def _value(self, path: Path) -> None:
        string = _STRING.match(self._text, self._at)
        if string:
            self._at = string.end()
        elif self._text[self._at] == "[":
            self._skip_brackets()
        elif self._text[self._at] == "{":
            self._inline_table(path)
        else:
            self._skip(_BARE_VALUE)

    def _inline_table(self, path: Path) -> None:
        self._at += 1
        self._skip(_BLANK)
        while self._text[self._at] != "}":
            self._pair(path)
            self._skip(_BLANK)
            if self._text[self._at] == ",":
                self._at += 1
                self._skip(_BLANK)
        self._at += 1

    def _skip_brackets(self) -> None:
        depth = 0
        while True:
            string = _STRING.match(self._text, self._at)
            if string:
                self._at = string.end()
                continue
            part = _BRACKETS.match(self._text, self._at)
            assert part is not None, f"no way on at offset {self._at} of a text that is valid TOML"
            self._at = part.end()
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(part[0], 0)
            if depth == 0:
                return

    def _note(self, path: Path, start: int) -> None:
        line = bisect_right(self._newlines, start - 1) + 1
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
