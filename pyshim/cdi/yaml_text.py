"""YAML as specs use it: texts, whole numbers, booleans, lists and objects. No tags of Python, no name given twice."""

import re
from typing import Any, ClassVar

import yaml

MAX_DEPTH = 32
MAX_ALIASES = 1000
MAX_MERGED = 1000
"""Members of an object that takes others in (`<<`): merges of merges grow by a factor each, from a small file."""
_MERGE = "tag:yaml.org,2002:merge"
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Dates and `1:30` (a number of base 60 in YAML 1.1) stay the texts they are; a name may not come twice."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int")]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: Any) -> None:
        merges = any(key_node.tag == _MERGE for key_node, _ in node.value)
        super().flatten_mapping(node)
        if merges and len(node.value) > MAX_MERGED:
            problem = f"an object with more than {MAX_MERGED} members by merging"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                problem = f"{key!r} is not a member's name"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in found:
                problem = f"the name {key[:100]!r} is given twice in one object"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0[0-7_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def load(text: str, *, max_values: int) -> object:
    """The one document in `text`. Raises yaml.YAMLError, ValueError or RecursionError.

    A text that spells more than `max_values` values and names, aliases not followed, is given up where it does so.
    """
    depth = aliases = values = 0
    # PyYAML's C loader recurses without a limit, and a deep document ends the process.
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        values += isinstance(event, yaml.NodeEvent)
        if values > max_values:
            raise ValueError(f"more than {max_values} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if aliases > MAX_ALIASES:
            raise ValueError(f"more than {MAX_ALIASES} aliases")
    try:
        found: object = yaml.load(text, Loader=_Loader)
    except (LookupError, AttributeError) as error:  # PyYAML's answer to `!!int ""`, `!!bool x`, `!!timestamp x`
        raise ValueError("a tag with a value that does not fit it") from error
    return found
