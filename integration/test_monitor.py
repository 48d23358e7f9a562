"""The monitor socket of a running pod, asked as operators do."""

from __future__ import annotations

import pytest

from pyshim.model.errors import ShimError
from pyshim.model.places import METRICS_DIRECTORY
from pyshim.node.cli.monitor import exchange, monitor_socket

STATE_DIR = "/run/vc/sbs"


def test_a_pod_serves_its_metrics(shared: str) -> None:
    text = exchange(monitor_socket(STATE_DIR, shared), "GET", "/metrics")

    for name in ("kata_shim_threads", "kata_hypervisor_fds", "pyshim_guest_metrics_whole 1", "kata_guest_load{"):
        assert f"\n{name}" in text
    assert 'kata_hypervisor_netdev{interface="lo",item="recv_bytes"}' in text
    assert 'pyshim_start_phase_seconds{phase="wait for agent"}' in text
    assert exchange(monitor_socket(STATE_DIR, shared), "GET", "/agent-url")


def test_the_metrics_socket_answers_questions_and_takes_no_change(shared: str) -> None:
    path = f"{METRICS_DIRECTORY}/{shared}"

    assert "\nkata_shim_threads" in exchange(path, "GET", "/metrics")
    assert exchange(path, "GET", "/pod")
    for method, target in (("PUT", "/policy"), ("PUT", "/iptables"), ("GET", "/iptables")):
        with pytest.raises(ShimError, match="no such path"):
            exchange(path, method, target, b"*filter\nCOMMIT\n" if method == "PUT" else b"")
