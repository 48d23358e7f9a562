"""What holds for every test."""

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: an example may take as long as it takes, and so may its making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=120)
# For `make check`, which says so by --hypothesis-profile.
settings.register_profile("quick", settings.get_profile("patient"), max_examples=30)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker can send the report of a test that logs or shows what is no UTF-8: lone surrogates are escaped."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sendable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value
