"""What wires a pod's network, with processes of its own beside those of the namespaces."""

from collections.abc import Iterator

import pytest

from pyshim.host.processes.children import Children
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from tests.fakes.open_files import open_files


@pytest.fixture
def children(no_task_left: None) -> Iterator[Children]:
    """After the test no child is left and no file is open that was not; it may have closed its namespaces."""
    before = open_files()
    children = Children()
    yield children
    assert children.alive == ()
    assert open_files() <= before


@pytest.fixture
def connector(children: Children) -> HostNetworkConnector:
    return HostNetworkConnector(children=children, timeout_s=60)
