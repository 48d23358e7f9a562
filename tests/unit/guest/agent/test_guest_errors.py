"""Errors of the guest agent's."""

from __future__ import annotations

import re

from guest.agent.errors import AgentError
from pyshim.ttrpc import Code


def test_every_error_has_the_status_of_its_name() -> None:
    """The agent and the shim write the numbers down apart."""
    codes = {re.sub(r"\B(?=[A-Z])", "_", kind.__name__).upper(): kind.code for kind in AgentError.__subclasses__()}

    assert {"NOT_FOUND", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"} <= set(codes)
    assert codes == {name: getattr(Code, name) for name in codes}
    assert AgentError.code == Code.INTERNAL
