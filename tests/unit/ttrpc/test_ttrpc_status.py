"""Status codes: their numbers are gRPC's, wherever they are written down."""

from __future__ import annotations

import grpc

from pyshim.model.errors import ErrorCode
from pyshim.ttrpc.status import Code


def test_every_code_has_grpcs_number() -> None:
    numbers = {code.name: code.value[0] for code in grpc.StatusCode}

    assert {name: number for name, number in vars(Code).items() if name.isupper()} == numbers
    assert {"OK": 0, **{code.name: int(code) for code in ErrorCode}} == numbers
