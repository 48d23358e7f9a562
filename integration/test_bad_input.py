"""Broken configuration, specs, streams and frames: one clear error that names the object, and a clean host
(conftest checks that).
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.ttrpc import Code, RemoteError

from .framework import oci, releases, shim_config
from .framework.ctr import Ctr, Result
from .framework.direct import DirectShim, StartFailed, code_of, direct_shim
from .framework.images import IMAGE
from .framework.runtime import Runtime

_BINARIES = Path(__file__).resolve().parents[1] / "bin"


def _refused(result: Result) -> str:
    """The one line `ctr` printed; a traceback or a second line would not be one clear error."""
    assert result.code != 0, result
    assert result.out == ""
    line = result.err.strip()
    assert "Traceback" not in line
    return line


def _has_code(error: str, *codes: str) -> bool:
    return error.endswith(codes) or not releases.chosen().ctr_prints_codes


def _run_with_config(ctr: Ctr, runtime: Runtime, name: str, config: Path) -> Result:
    words = ("run", "--rm", "--runtime-config-path", config, "--runtime", runtime.name, IMAGE, name, "true")
    return ctr(*words, check=False, within_s=100)


@pytest.mark.vm
@pytest.mark.parametrize("key", ["kernel", "image", "path", "virtio_fs_daemon"])
def test_missing_file_of_the_configuration_is_named(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, key: str
) -> None:
    missing = scratch / f"no-such-{key}"
    config = shim_config.variant(scratch, **{key: missing})

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert str(missing) in error
    assert "no such file" in error.lower() or "ENOENT" in error
    assert _has_code(error, "failed precondition")
    assert len(error.splitlines()) == 1


@pytest.mark.vm
@pytest.mark.parametrize("key", ["path", "virtio_fs_daemon"])
def test_program_of_the_configuration_that_is_not_executable_is_named(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, key: str
) -> None:
    program = scratch / "not-a-program"
    program.write_text("this is not a program\n")
    config = shim_config.variant(scratch, **{key: program})

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert str(program) in error


@pytest.mark.vm
def test_kernel_that_is_no_kernel_fails_with_qemus_own_words(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    kernel = scratch / "kernel"
    kernel.write_bytes(b"not a kernel" * 1000)
    config = shim_config.variant(scratch, kernel=kernel)

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert "qemu" in error
    assert "kernel" in error


@pytest.mark.vm
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("[hypervisor.qemu\n", "line 1", id="not-toml"),
        pytest.param(b"\xff\xfe[hypervisor]", "UTF-8", id="not-utf-8"),
        pytest.param('[hypervisor.qemu]\ndefault_vcpus = "three"\n', "default_vcpus", id="wrong-type"),
        pytest.param("[hypervisor]\nqemu = 3\n", "hypervisor.qemu", id="no-table"),
    ],
)
def test_invalid_configuration_is_refused_with_its_path_and_place(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, text: str | bytes, expected: str
) -> None:
    config = scratch / "broken.toml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert str(config) in error
    assert expected in error
    assert _has_code(error, "invalid argument")


@pytest.mark.vm
def test_configuration_that_does_not_exist_is_named(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    error = _refused(_run_with_config(ctr, runtime, name, scratch / "absent.toml"))

    assert str(scratch / "absent.toml") in error


@pytest.mark.vm
def test_vm_that_panics_at_boot_fails_the_run_with_the_last_console_lines(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    """The root image holds no file system: the guest's first process gives up, and the kernel panics."""
    image = scratch / "empty.img"
    image.write_bytes(bytes(1024 * 1024))
    config = shim_config.variant(scratch, image=image)

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert "panic" in error.lower()
    assert "console" in error


@pytest.mark.vm
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("root=/dev/vdz", "find the root image: /dev/vdz is not there"),
        ("rootfstype=ext4", "mount root image /dev/vda1 as ext4: mount: mounting /dev/vda1 on /root failed"),
    ],
)
def test_a_guest_without_its_root_image_says_so(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, params: str, reason: str
) -> None:
    config = shim_config.variant(scratch, kernel_params=params)

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert f"guest init: cannot {reason}" in error


@pytest.mark.vm
def test_agent_that_never_answers_ends_in_a_deadline_that_names_it(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    """The guest boots into the debug shell of its loader: alive, without an agent that answers."""
    config = shim_config.variant(scratch, kernel_params="rdinit=/shell", dial_timeout=11)

    error = _refused(_run_with_config(ctr, runtime, name, config))

    assert "agent" in error
    assert "no answer within 11 s" in error
    assert _has_code(error, "deadline exceeded", "unavailable")


def test_unknown_network_namespace_is_named(ctr: Ctr, runtime: Runtime, name: str) -> None:
    path = "/run/netns/no-such-namespace"

    result = ctr(
        "run", "--rm", "--with-ns", f"network:{path}", "--runtime", runtime.name, IMAGE, name, "true", check=False
    )

    assert path in _refused(result)


@pytest.mark.vm
def test_path_that_is_no_network_namespace_is_named(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    path = scratch / "file"
    path.touch()

    result = ctr(
        "run", "--rm", "--with-ns", f"network:{path}", "--runtime", runtime.name, IMAGE, name, "true", check=False
    )

    assert str(path) in _refused(result)


@pytest.mark.vm
@pytest.mark.skipif(Path("/sys/fs/resctrl/schemata").exists(), reason="this machine has classes")
def test_a_class_of_cache_that_the_node_does_not_have_is_named(ctr: Ctr, runtime: Runtime, name: str) -> None:
    result = ctr("run", "--rm", "--rdt-class", "gold", "--runtime", runtime.name, IMAGE, name, "true", check=False)

    assert "join RDT class 'gold': open '/sys/fs/resctrl/gold/tasks': ENOENT" in _refused(result)
    assert "mount -t resctrl" in result.err


def test_bind_mount_of_a_missing_source_is_named(ctr: Ctr, runtime: Runtime, name: str) -> None:
    mount = "type=bind,src=/run/no-such-source,dst=/mnt,options=rbind:ro"

    result = ctr("run", "--rm", "--mount", mount, "--runtime", runtime.name, IMAGE, name, "true", check=False)

    assert "/run/no-such-source" in _refused(result)


# -- specs, given to the shim without containerd, which would refuse some of them itself -----------------------------

Shims = Callable[[oci.Spec | None], DirectShim]


@pytest.fixture
def shims(runtime: Runtime, containerd: object, name: str, scratch: Path) -> Iterator[Shims]:
    """Makes a started shim for a bundle with the given spec."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def make(config: oci.Spec | None) -> DirectShim:
            return stack.enter_context(direct_shim(runtime, _BINARIES, name, scratch / "bundle", config))

        yield make


def _without(spec: oci.Spec, key: str) -> oci.Spec:
    return {k: v for k, v in spec.items() if k != key}


@pytest.mark.vm
@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda spec: _without(spec, "process"), "process", id="no-process"),
        pytest.param(lambda spec: _without(spec, "root"), "root", id="no-root"),
        pytest.param(
            lambda spec: {**spec, "root": {"path": "../../elsewhere"}}, "elsewhere", id="rootfs-leaves-the-bundle"
        ),
        pytest.param(lambda spec: {**spec, "process": {**spec["process"], "args": []}}, "args", id="no-args"),
        pytest.param(
            lambda spec: {**spec, "process": {**spec["process"], "cwd": "relative"}}, "cwd", id="relative-cwd"
        ),
        pytest.param(
            lambda spec: {**spec, "mounts": [{"type": "tmpfs"}]}, "destination", id="mount-without-destination"
        ),
        pytest.param(lambda spec: {**spec, "mounts": "none"}, "mounts", id="mounts-not-a-list"),
    ],
)
def test_incomplete_spec_is_refused_and_names_what_is_wrong(
    shims: Shims, name: str, plain_rootfs: Path, change: Callable[[oci.Spec], Any], named: str
) -> None:
    shim = shims(change(oci.spec("true", name=name, rootfs=plain_rootfs)))
    shim.start()

    with pytest.raises(RemoteError) as refused:
        shim.call("Create", bundle=str(shim.bundle))

    assert code_of(refused.value) == Code.INVALID_ARGUMENT
    assert named in str(refused.value)


def _start_and_create(shim: DirectShim) -> None:
    """Either call may be the one that notices."""
    shim.start()
    shim.call("Create", bundle=str(shim.bundle))


@pytest.mark.vm
@pytest.mark.parametrize(
    "text", ["{not json", "[]", "", '"text"', "nul\0"], ids=["broken", "list", "empty", "string", "binary"]
)
def test_config_json_that_is_no_json_object_is_named(shims: Shims, text: str) -> None:
    shim = shims(None)
    (shim.bundle / "config.json").write_text(text)

    with pytest.raises((StartFailed, RemoteError), match=r"config\.json"):
        _start_and_create(shim)


@pytest.mark.vm
def test_missing_config_json_is_named(shims: Shims) -> None:
    shim = shims(None)

    with pytest.raises((StartFailed, RemoteError), match=r"config\.json"):
        _start_and_create(shim)


def _frame(stream: int, kind: int, payload: bytes, claimed: int | None = None) -> bytes:
    return struct.pack(">IIBB", len(payload) if claimed is None else claimed, stream, kind, 0) + payload


def test_frame_of_five_mebibytes_is_refused_and_the_shim_serves_on(shims: Shims, name: str, plain_rootfs: Path) -> None:
    shim = shims(oci.spec("true", name=name, rootfs=plain_rootfs))
    shim.start()
    size = 5 * 1024 * 1024
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(shim.socket_path)
        raw.sendall(_frame(1, 1, bytes(size)))
        length, stream, kind, _ = struct.unpack(">IIBB", _exactly(raw, 10))
        answer = _exactly(raw, length)

    assert (stream, kind) == (1, 2)
    # Response{status{code 8}}: field 1, length-delimited; inside it field 1, varint 8.
    assert re.match(rb"\x0a.{1,2}\x08\x08", answer, re.DOTALL), answer
    with pytest.raises(RemoteError) as unknown:
        shim.call("State")
    assert code_of(unknown.value) == Code.NOT_FOUND


@pytest.mark.vm
def test_garbage_on_the_socket_closes_that_connection_and_no_other(shims: Shims, name: str, plain_rootfs: Path) -> None:
    shim = shims(oci.spec("true", name=name, rootfs=plain_rootfs))
    shim.start()
    shim.connect()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(shim.socket_path)
        raw.sendall(_frame(2, 1, b"\xff" * 100) + b"\xff" * 4096)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass

    with pytest.raises(RemoteError) as unknown:
        shim.call("State")
    assert code_of(unknown.value) == Code.NOT_FOUND


def _exactly(raw: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = raw.recv(count - len(data))
        assert more, f"the connection ended after {len(data)} of {count} bytes"
        data += more
    return data
