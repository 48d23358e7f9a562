"""A Kubernetes pod on the remote hypervisor, as the kubelet runs it: through a RuntimeClass handler of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework.cri import Cri
from .framework.cri_session import REMOTE_CONFIG, REMOTE_HANDLER
from .framework.remote_peer import RemotePeer

pytestmark = pytest.mark.vm


def test_a_kubernetes_pod_lives_in_one_vm_of_the_peer(cri: Cri, peer: RemotePeer) -> None:
    peer.configuration(REMOTE_CONFIG.parent)

    # containerd copies it to every container, and the adaptor's edit then asks for GPUs that the VM does not have.
    annotations = {"io.katacontainers.config.hypervisor.default_gpus": "0"}

    with cri.pod("shop", handler=REMOTE_HANDLER, annotations=annotations) as pod:
        one, two = pod.start(), pod.start("sh", "-c", "echo $((6 * 7)); exit 5")
        record = peer.record(pod.id)
        assert one.is_running
        assert one.sh("cat /layer-marker") == "upper\n"
        assert two.exit_code() == 5
        assert two.log() == "42\n"
        assert Path(record["netns"]).exists()
        assert record["annotations"]["io.kubernetes.cri.sandbox-name"] == "shop"
        assert record["annotations"]["io.kubernetes.cri.sandbox-uid"] == pod.config.metadata.uid

    assert not peer.records()
