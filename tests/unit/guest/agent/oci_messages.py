"""A spec as the guest agent gets it."""

from __future__ import annotations

from typing import Any

from guest.agent.wire.codec import Message as M


def a_spec(**linux: Any) -> M:
    return M(
        "Spec",
        Version="1.1.0",
        Process=M("Process", Args=["a"], Cwd="/w", User=M("User", UID=3, GID=4)),
        Root=M("Root", Path="/r"),
        Linux=M("Linux", **linux),
    )
