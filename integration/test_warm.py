"""Warm pods: VMs that continue from a template, each a VM of its own; and that boot when the template is no good."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from protos.containerd import runtimeoptions_pb2

from .conftest import GROUND, PROJECT, RunTask, own_name
from .framework import boots, erofs, oci, shim_config
from .framework.containerd import Containerd
from .framework.ctr import Ctr, Result
from .framework.direct import direct_shim
from .framework.networks import pod_network
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(boots.is_warm("test_warm"), reason="makes templates of its own: run it without --warm"),
]

TEMPLATES = GROUND / "templates"


@pytest.fixture(scope="module")
def warm(module_leaves_nothing: None) -> Iterator[Path]:
    """A configuration with templates, and the template of its machine."""
    with template(GROUND / "warm", TEMPLATES) as path:
        yield path


@contextmanager
def template(directory: Path, templates: Path, **changes: object) -> Iterator[Path]:
    """In `directory`, which is made, a configuration whose VMs continue from a template in `templates`."""
    directory.mkdir()
    path = shim_config.with_templates(directory, templates, **changes)
    try:
        assert "made" in factory(path, "init")
        yield path
    finally:
        factory(path, "destroy")


def factory(config: Path, verb: str, *words: str) -> str:
    command = [str(PROJECT / "bin" / "pyshim"), "factory", verb, "--config", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.fixture
def continued(containerd: Containerd, request: pytest.FixtureRequest) -> Callable[[], list[str]]:
    """The log's lines of this test about VMs that continued, or were to."""

    def lines() -> list[str]:
        text = containerd.directories.log.read_bytes()[request.node.containerd_log_size :].decode()
        return [
            line
            for line in text.splitlines()
            if any(text in line for text in ("vm continued", "template discarded", "clone given up", "vm boots"))
        ]

    return lines


def inside(ctr: Ctr, name: str, script: str) -> Result:
    return ctr.inside(name, "sh", "-c", script)


def test_two_clones_are_two_machines(ctr: Ctr, warm: Path, name: str, continued: Callable[[], list[str]]) -> None:
    random = "/proc/sys/kernel/random"
    different = {
        "uuid": f"cat {random}/uuid",
        "boot id": f"cat {random}/boot_id",
        "random numbers": "head -c 16 /dev/urandom | od -An -tx1",
        "hostname": "hostname",
        "mac": "cat /sys/class/net/eth0/address",
        "address": "ip -o -4 addr show dev eth0",
    }
    with (
        own_name(ctr) as other,
        pod_network("it-warm-1", subnet=30) as one_network,
        pod_network("it-warm-2", subnet=31) as other_network,
    ):
        for each, network in ((name, one_network), (other, other_network)):
            ctr.start(each, "--with-ns", f"network:{network.namespace}", config=warm)
        for what, script in different.items():
            one, two = (inside(ctr, each, script).out for each in (name, other))
            assert one, what
            assert one != two, what
        assert abs(int(inside(ctr, name, "date +%s").out) - time.time()) < 30
        ctr.remove([name, other])
    lines = continued()
    assert len([line for line in lines if "vm continued" in line]) == 2, lines


QEMU_AN_HOUR_BEHIND = """#!/bin/sh
for word; do
    shift
    case $word in base=utc,*) word=base=$(date -u -d '1 hour ago' +%Y-%m-%dT%H:%M:%S),${{word#base=utc,}} ;; esac
    set -- "$@" "$word"
done
exec {qemu} "$@"
"""


def test_a_clone_has_the_right_time_an_hour_after_its_template_was_made(
    ctr: Ctr, runtime: Runtime, module_leaves_nothing: None, name: str, scratch: Path
) -> None:
    qemu = scratch / "qemu-system-an-hour-behind"
    qemu.write_text(QEMU_AN_HOUR_BEHIND.format(qemu=shutil.which("qemu-system-x86_64")))
    qemu.chmod(0o755)

    with template(scratch / "behind", scratch / "templates", path=qemu) as config:
        ctr.start(name, "--cap-add", "CAP_SYSLOG", config=config)
        now = int(inside(ctr, name, "date +%s").out)
        boot_log = inside(ctr, name, "dmesg").out
        state = json.loads(runtime.persisted(name).read_text())["Pyshim"]["Snapshot"]
        ctr.remove([name])

    assert state["Origin"].startswith("cloned from ")
    (booted,) = re.findall(r"setting system clock to \S+ UTC \((\d+)\)", boot_log)
    assert time.time() - int(booted) > 3500, "the template's guest was behind"
    assert abs(now - time.time()) < 30


def test_a_clone_has_volumes_network_and_execs(
    ctr: Ctr, warm: Path, name: str, scratch: Path, continued: Callable[[], list[str]]
) -> None:
    (scratch / "file").write_text("of the host\n")
    with pod_network("it-warm", subnet=29) as network:
        mount = f"type=bind,src={scratch},dst=/volume,options=rbind:rw"
        ctr.start(name, "--mount", mount, "--with-ns", f"network:{network.namespace}", config=warm)

        assert inside(ctr, name, "cat /volume/file; echo of the guest > /volume/answer").out == "of the host\n"
        assert (scratch / "answer").read_text() == "of the guest\n"
        assert " 0% packet loss" in inside(ctr, name, f"ping -c 3 -W 5 {network.peer_address}").out
        assert f"{network.address}/{network.prefix}" in inside(ctr, name, f"ip addr show dev {network.interface}").out
        ctr.remove([name])
    assert any("vm continued" in line for line in continued())


def test_a_clone_without_a_share_has_its_image_on_disks(
    runtime: Runtime, containerd: Containerd, name: str, scratch: Path
) -> None:
    layers, out = erofs.layer_files(scratch / "snapshots", erofs.image_layers(5)), scratch / "out"
    spec = oci.spec("sh", "-c", f"{erofs.SEEN}; sleep 100000", name=name, rootfs="rootfs")
    with (
        template(scratch / "no-share", scratch / "templates", shared_fs="none") as config,
        direct_shim(runtime, PROJECT / "bin", name, scratch / "bundle", spec) as shim,
    ):
        shim.start()
        options = runtimeoptions_pb2.Options(config_path=str(config))
        shim.call(
            "Create",
            bundle=str(shim.bundle),
            rootfs=erofs.active_mounts(layers, scratch),
            options={"type_url": "runtimeoptions.v1.Options", "value": options.SerializeToString()},
            stdout=f"file://{out}",
        )
        shim.call("Start")
        seen = erofs.seen(5)
        eventually(lambda: out.exists() and out.read_text().splitlines() == seen, what="the image's files")
        assert runtime.virtiofsds(name) == []
        state = json.loads(runtime.persisted(name).read_text())["Pyshim"]["Snapshot"]
        assert state["Origin"].startswith("cloned from ")
        (vmm,) = runtime.vmms(name)
        (memory,) = (scratch / "templates").glob("*/memory")
        is_readable_by_qemu = bool(memory.stat().st_mode & 0o004)  # from version 8.2 on
        assert (str(memory) in Path(f"/proc/{vmm.pid}/maps").read_text()) == is_readable_by_qemu


def test_a_clone_grows_to_the_size_of_its_pod(
    ctr: Ctr, runtime: Runtime, scratch: Path, name: str, continued: Callable[[], list[str]]
) -> None:
    guest = shim_config.guest_that_takes_vcpus()
    with template(scratch / "warm", scratch / "templates", **guest) as warm:
        ctr.start(name, "--memory-limit", str(300 << 20), "--cpus", "1", config=warm)
        cpus, total_kib = inside(ctr, name, "nproc; sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo").lines

    assert any("vm continued" in line for line in continued())
    state = json.loads(runtime.persisted(name).read_text())["Pyshim"]["Snapshot"]
    assert state["Origin"].startswith("cloned from ")
    assert int(cpus) == state["Sizing"]["vcpus"]["granted"] > 1
    assert state["Sizing"]["memory_mib"]["granted"] >= 300 + 112
    assert int(total_kib) >> 10 > 300, "more than the template has"


def test_the_end_of_its_vmm_is_the_end_of_a_clone(ctr: Ctr, runtime: Runtime, warm: Path, name: str) -> None:
    ctr.start(name, config=warm)
    (vmm,) = runtime.vmms(name)

    os.kill(vmm.pid, signal.SIGKILL)

    eventually(lambda: ctr.state_of(name) == "STOPPED", what="the task has stopped")


def test_a_template_is_made_once_beside_the_first_pods_that_could_have_used_it(
    ctr: Ctr, warm: Path, name: str, continued: Callable[[], list[str]]
) -> None:
    assert "1 templates removed" in factory(warm, "destroy")
    with own_name(ctr) as second, own_name(ctr) as third:
        # At once: a busy machine would have the template before a second pod begins after the first.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: ctr.start(each, config=warm), (name, second)))
        made = eventually(lambda: list(TEMPLATES.glob("*/template.json")), what="a template is made", within_s=120)
        eventually(lambda: not list(TEMPLATES.glob("*.tried")), what="its maker has ended")
        ctr.start(third, config=warm)

    assert len(made) == 1
    *boots, last = continued()
    assert ["vm boots" in line for line in boots] == [True, True], boots
    assert "vm continued" in last


@pytest.mark.parametrize("damaged", ["state", "memory"])
def test_a_damaged_template_is_discarded_with_one_warning_and_the_pod_boots(
    run: RunTask, warm: Path, continued: Callable[[], list[str]], damaged: str
) -> None:
    if "there is no template" in factory(warm, "status"):
        factory(warm, "init")
    (file,) = TEMPLATES.glob(f"*/{damaged}")
    size = file.stat().st_size
    file.write_bytes(bytes(size))

    result = run("echo", "up", options=["--runtime-config-path", str(warm)])

    assert result.out == "up\n"
    (line,) = continued()
    assert "template discarded" in line
    assert "there is no template" in factory(warm, "status")
