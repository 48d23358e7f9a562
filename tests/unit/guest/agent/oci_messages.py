"""A spec as the guest agent gets it."""

from __future__ import annotations

from typing import Any

from protos.agent import oci_pb2 as pb


def a_spec(**linux: Any) -> pb.Spec:
    return pb.Spec(
        Version="1.1.0",
        Process=pb.Process(Args=["a"], Cwd="/w", User=pb.User(UID=3, GID=4)),
        Root=pb.Root(Path="/r"),
        Linux=pb.Linux(**linux),
    )
