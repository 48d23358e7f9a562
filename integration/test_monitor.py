"""The monitor socket of a running pod, asked as operators do."""

from __future__ import annotations

from pyshim.node.cli.monitor_client import exchange, monitor_socket

STATE_DIR = "/run/vc/sbs"


def test_a_pod_tells_its_metrics(shared: str) -> None:
    text = exchange(monitor_socket(STATE_DIR, shared), "GET", "/metrics")

    for name in ("kata_shim_threads", "kata_hypervisor_fds", "pyshim_guest_metrics_whole 1", "kata_guest_load{"):
        assert f"\n{name}" in text
    assert 'kata_hypervisor_netdev{interface="lo",item="recv_bytes"}' in text
    assert 'pyshim_start_phase_seconds{phase="wait for agent"}' in text
    assert exchange(monitor_socket(STATE_DIR, shared), "GET", "/agent-url")
