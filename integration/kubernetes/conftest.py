"""One cluster for the session, a bare one for the tests that ask for it; each test must leave neither pod nor VM."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.framework import evidence
from integration.framework.leaks import HostState, assert_nothing_left

from . import cluster as clusters
from . import peers
from .cluster import GROUND, Cluster, cluster

_IMAGE_VOLUMES = Path("/run/containerd-cri/io.containerd.grpc.v1.cri/image-volumes")
"""containerd's, made with the first one."""
collect_ignore_glob = [] if peers.are_chosen() else ["test_*.py"]


def pytest_configure() -> None:
    if peers.are_chosen() and (missing := clusters.missing()):
        pytest.exit(f"tests with a kubelet need {', '.join(missing)} (hint: `make peers WHAT=kubelet`)", returncode=2)


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """pytest gives one after the other: the tests that ask for BARE (by `indirect`) follow each other."""
    with getattr(request, "param", cluster)() as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing() -> None:
    """In place of the one for tests without a cluster, whose containerd these do not need."""


@pytest.fixture(autouse=True)
def leaves_nothing(kube: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """No pod, sandbox, VM, mount or socket is left; what the kubelet keeps for itself is not looked at."""
    ignored = (GROUND.parent, _IMAGE_VOLUMES)
    before, failed = HostState.look(ignored), request.session.testsfailed
    yield
    if request.session.testsfailed != failed:
        _keep_logs(kube, request.node.nodeid)
    try:
        kube.remove_ended_sandboxes()
        assert kube.cri.sandboxes() == []
        assert_nothing_left(before, ignored)
    except AssertionError:
        _keep_logs(kube, request.node.nodeid)
        raise


def _keep_logs(kube: Cluster, test: str) -> None:
    directory = evidence.directory_for(clusters.PROJECT / ".build" / "integration" / "kubelet", test)
    directory.mkdir(parents=True, exist_ok=True)
    for log in (*GROUND.glob("*.log"), kube.cri.daemon.directories.log):
        shutil.copy(log, directory)
