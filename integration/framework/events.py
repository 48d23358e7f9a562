"""The output of `ctr events`, taken apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from .ctr import Ctr
from .images import IMAGE
from .waiting import eventually


def until_watching(ctr: Ctr, output: Callable[[], str]) -> None:
    """`ctr events` says nothing when it is ready; an event of our own shows that it is."""
    label = itertools.count()

    def look() -> bool:
        ctr("images", "label", IMAGE, f"probe={next(label)}")
        return "/images/update" in output()

    eventually(look, what="ctr events is connected", every_s=0.2)


def task_events(text: str, container: str) -> list[tuple[str, dict[str, Any]]]:
    """`(topic, body)` of the events of one task, in the order they were printed."""
    found = []
    for line in text.splitlines():
        if " /tasks/" not in line:
            continue
        head, body = line.split(" {", 1)
        decoded = json.loads("{" + body)
        if decoded.get("container_id") == container:
            found.append((head.split()[-1], decoded))
    return found
