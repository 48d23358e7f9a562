"""What holds for every test."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: an example may take as long as it takes, and so may its making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
