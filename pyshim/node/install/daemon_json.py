"""Our members of `runtimes` in Docker's daemon.json, beside those of others. Pure.

A change writes the file anew with the indentation that it has; all other members keep their values and their order.
Texts that are no such file raise ValueError.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pyshim.model.decoding import from_json
from pyshim.model.errors import AlreadyExists, FailedPrecondition
from pyshim.node.install.handlers import Handler
from pyshim.node.install.writes import MembersWrite
from pyshim.start.dialect import RUNTIME

DAEMON_JSON = "/etc/docker/daemon.json"
_KEY = "runtimes"
_INDENT = re.compile(r"\n([ \t]+)\"")
_DEFAULT_INDENT = "    "


def docker_handlers(handlers: Iterable[Handler]) -> tuple[Handler, ...]:
    """Those that Docker can use: it pulls images itself, and tells no guest their names."""
    return tuple(handler for handler in handlers if not handler.guest_pulls)


def daemon_json_write(path: str, text: str | None, handlers: Iterable[Handler], ours: Collection[str]) -> MembersWrite:
    """A runtime for each handler that Docker can use; `ours` are the names that an earlier installation wrote.

    `text` is that of the file, None without one. Raises FailedPrecondition for a file that is not Docker's, and when
    Docker can use no handler, AlreadyExists for a runtime of such a name that is another one.
    """
    members: dict[str, dict[str, Any]] = {
        handler.name: {"runtimeType": RUNTIME, "options": {"ConfigPath": handler.config_path}}
        for handler in docker_handlers(handlers)
    }
    if not members:
        raise FailedPrecondition(f"add runtimes to '{path}': Docker can use none of these handlers (hint: pykata)")
    try:
        present = _runtimes(_document(text or ""))
    except ValueError as error:
        raise FailedPrecondition(f"add runtimes to '{path}': {error}") from error
    for name, runtime in members.items():
        if name in present and name not in ours and present[name] != runtime:
            raise AlreadyExists(
                f"add runtime '{name}' to '{path}': it has another one of this name that 'pyshim install' did not write"
            )
    return MembersWrite(path=path, members=members, former=tuple(name for name in ours if name not in members))


def with_members(text: str, members: Mapping[str, Any], former: Collection[str] = ()) -> str:
    """`text` with these runtimes and without the `former` ones; unchanged if it is so already."""
    document = _document(text)
    present = _runtimes(document)
    wanted = {**{name: value for name, value in present.items() if name not in former}, **members}
    if wanted == present:
        return text
    if wanted:
        document[_KEY] = wanted
    else:
        document.pop(_KEY, None)
    return _written(document, text)


def _written(document: Mapping[str, Any], like: str) -> str:
    """The document with the indentation of the text `like`, on one line as that one, and with its last newline."""
    found = _INDENT.search(like)
    is_line = len(like.strip()) > len("{}") and "\n" not in like.strip()
    indent = found[1] if found else None if is_line else _DEFAULT_INDENT
    return json.dumps(document, indent=indent, ensure_ascii=False) + ("\n" if like.endswith("\n") or not like else "")


def members_in(text: str, names: Collection[str]) -> str | None:
    """The runtimes of these names, in a form that compares; None if there is none of them."""
    present = _runtimes(_document(text))
    found = {name: value for name, value in present.items() if name in names}
    return json.dumps(found, sort_keys=True) if found else None


def _document(text: str) -> dict[str, Any]:
    """The file's object; dockerd takes an empty file for one without members, and a byte order mark for none."""
    content = text.removeprefix("\ufeff")
    return from_json(content, dict[str, Any], ValueError) if content.strip() else {}


def _runtimes(document: Mapping[str, Any]) -> dict[str, Any]:
    present = document.get(_KEY, {})
    if not isinstance(present, dict):
        raise ValueError(f"its member '{_KEY}' is not an object")
    return present
