"""CDI specs as files."""

import json
from pathlib import Path
from typing import Any, ClassVar


def spec(kind: str = "v.com/c", *devices: str, env: str = "DEV", version: str = "1.1.0") -> dict[str, Any]:
    names = devices or ("0",)
    return {
        "cdiVersion": version,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": {"env": [f"{env}_{name}=1"]}} for name in names],
        "containerEdits": {"env": ["COMMON=1"]},
    }


def put(directory: Path, name: str, document: object) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


class CountedText(str):
    """A text that counts how often it is compared."""

    compared: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedText.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        CountedText.compared += 1
        return str.__ne__(self, other)
