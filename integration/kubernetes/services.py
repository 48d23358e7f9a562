"""Services within the cluster of one node: kube-proxy carries their addresses, dnsmasq knows their names.

Other tests have none: their pods ask for no service. dnsmasq stands for the cluster's DNS: it has the addresses of
services by name, and nothing else.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from . import peers
from .cluster import GROUND, NODE, Cluster, Daemon, Refused

DNS_ADDRESS = "10.96.0.10"
"""Of the node as well, as the API server's."""
DOMAIN = "cluster.local"
_EACH_S = 1.0
_HOSTS = GROUND / "services"
_DNS = (
    *("--keep-in-foreground", "--user=root", "--no-hosts", "--no-resolv", "--bind-interfaces", "--log-facility=-"),
    *("--pid-file=", f"--listen-address={DNS_ADDRESS}", f"--hostsdir={_HOSTS}"),
)
# What the proxy would set of connection tracking is the whole machine's.
_PROXY = (
    *(f"--kubeconfig={GROUND}/kubeconfig", f"--hostname-override={NODE}", "--proxy-mode=iptables", "--masquerade-all"),
    *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"),
)


@contextlib.contextmanager
def services(cluster: Cluster) -> Iterator[None]:
    """Pods that start within the block reach services by name and by address."""
    _HOSTS.mkdir()
    subprocess.run(["ip", "address", "add", f"{DNS_ADDRESS}/32", "dev", NODE], check=True)
    cluster.kubelet.stop()
    cluster.configure_kubelet(clusterDNS=[DNS_ADDRESS], clusterDomain=DOMAIN)
    cluster.start_kubelet()
    ended = threading.Event()
    names = threading.Thread(target=_tell_names, args=(cluster, ended), daemon=True)
    with Daemon(str(peers.CLIENTS / "kube-proxy"), *_PROXY), Daemon("dnsmasq", *_DNS):
        names.start()
        try:
            yield
        finally:
            ended.set()
            names.join()


def _tell_names(cluster: Cluster, ended: threading.Event) -> None:
    """Until the event each service has a file that dnsmasq reads as soon as it is there."""
    while not ended.wait(_EACH_S):
        with contextlib.suppress(OSError, Refused):
            for service in cluster.call("GET", "/api/v1/services")["items"]:
                name = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
                _write(_HOSTS / name, f"{service['spec']['clusterIP']} {name}.svc.{DOMAIN}\n")


def _write(path: Path, line: str) -> None:
    if not path.exists() or path.read_text() != line:
        path.write_text(line)
