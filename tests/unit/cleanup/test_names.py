"""What a sandbox whose state cannot be read has left, found by names."""

import subprocess
import time
from pathlib import Path

import pytest

from pyshim.cleanup.names import Places, conventional_ledger
from pyshim.model.ledger import LedgerEntry, ResourceKind

DEADLINE_S = 60.0


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for name in ("vm", "shared", "cgroups", "netns", "direct", "metrics"):
        (tmp_path / name).mkdir()
    return Places(
        vm_root=f"{tmp_path}/vm",
        shared_root=f"{tmp_path}/shared",
        cgroup_root=f"{tmp_path}/cgroups",
        netns_root=f"{tmp_path}/netns",
        direct_volumes=f"{tmp_path}/direct",
        metrics_root=f"{tmp_path}/metrics",
    )


def test_the_network_namespace_that_the_shim_made_is_undone_after_what_is_in_it(places: Places) -> None:
    for name in ("pyshim-sb1", "pyshim-sb10", "pod"):
        Path(places.netns_root, name).touch()
    Path(places.metrics_root, "sb1").touch()

    netns, *others = conventional_ledger("sb1", places)

    assert netns == LedgerEntry(kind=ResourceKind.NETNS, key=f"{places.netns_root}/pyshim-sb1")
    assert [entry.kind for entry in others] == [ResourceKind.SOCKET]


@pytest.mark.root
def test_the_file_server_is_found_in_a_pid_namespace_of_its_own(places: Places, tmp_path: Path) -> None:
    program = tmp_path / "virtiofsd"
    program.write_text("#!/usr/bin/python3\nimport time\ntime.sleep(600)\n")
    program.chmod(0o755)
    words = ["unshare", "--pid", "--fork", "--kill-child", str(program), f"{places.shared_root}/sb1/"]
    with subprocess.Popen(words) as above:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (found := conventional_ledger("sb1", places)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            above.kill()

    assert [(entry.kind, entry.key) for entry in found] == [(ResourceKind.PROCESS, "virtiofsd")]
    assert conventional_ledger("sb2", places) == ()
