"""Broken configuration and guests that do not come up: one clear error that names the object, and a clean host
(conftest checks that).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework import releases, shim_config
from .framework.ctr import Ctr, Result


def _refused(result: Result) -> str:
    """The one line `ctr` printed; a traceback or a second line would not be one clear error."""
    assert result.code != 0, result
    assert result.out == ""
    line = result.err.strip()
    assert "Traceback" not in line
    return line


def _has_code(error: str, *codes: str) -> bool:
    return error.endswith(codes) or not releases.chosen().ctr_prints_codes


def _run_with_config(ctr: Ctr, name: str, config: Path) -> Result:
    return ctr.run(name, "true", config=config, check=False, within_s=100)


@pytest.mark.vm
@pytest.mark.parametrize("key", ["kernel", "image", "path", "virtio_fs_daemon"])
def test_missing_file_of_the_configuration_is_named(ctr: Ctr, name: str, scratch: Path, key: str) -> None:
    missing = scratch / f"no-such-{key}"
    config = shim_config.variant(scratch, **{key: missing})

    error = _refused(_run_with_config(ctr, name, config))

    assert str(missing) in error
    assert "no such file" in error.lower() or "ENOENT" in error
    assert _has_code(error, "failed precondition")
    assert len(error.splitlines()) == 1


@pytest.mark.vm
def test_kernel_that_is_no_kernel_fails_with_qemus_own_words(ctr: Ctr, name: str, scratch: Path) -> None:
    kernel = scratch / "kernel"
    kernel.write_bytes(b"not a kernel" * 1000)
    config = shim_config.variant(scratch, kernel=kernel)

    error = _refused(_run_with_config(ctr, name, config))

    assert "qemu" in error
    assert "kernel" in error


@pytest.mark.vm
def test_configuration_that_does_not_exist_is_named(ctr: Ctr, name: str, scratch: Path) -> None:
    error = _refused(_run_with_config(ctr, name, scratch / "absent.toml"))

    assert str(scratch / "absent.toml") in error


@pytest.mark.vm
def test_vm_that_panics_at_boot_fails_the_run_with_the_last_console_lines(ctr: Ctr, name: str, scratch: Path) -> None:
    """The root image holds no file system: the guest's first process gives up, and the kernel panics."""
    image = scratch / "empty.img"
    image.write_bytes(bytes(1024 * 1024))
    config = shim_config.variant(scratch, image=image)

    error = _refused(_run_with_config(ctr, name, config))

    assert "panic" in error.lower()
    assert "console" in error


@pytest.mark.vm
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        pytest.param("root=/dev/vdz", "find the root image: /dev/vdz is not there", id="no disk"),
        pytest.param(
            "rootfstype=ext4",
            "mount root image /dev/vda1 as ext4: mount: mounting /dev/vda1 on /root failed",
            id="another file system",
        ),
        pytest.param(
            # The one where the driver is a module, the other where the kernel has it built in.
            "module_blacklist=virtio_console initcall_blacklist=virtio_console_init",
            "find the agent's port org.pykata.agent.0: no driver virtio_console",
            id="no driver of ports and console",
        ),
    ],
)
def test_a_guest_that_does_not_start_says_why(ctr: Ctr, name: str, scratch: Path, params: str, reason: str) -> None:
    config = shim_config.variant(scratch, kernel_params=params)

    error = _refused(_run_with_config(ctr, name, config))

    assert f"guest init: cannot {reason}" in error


@pytest.mark.vm
def test_agent_that_never_answers_ends_in_a_deadline_that_names_it(ctr: Ctr, name: str, scratch: Path) -> None:
    """The guest boots into the debug shell of its loader: alive, without an agent that answers."""
    config = shim_config.variant(scratch, kernel_params="rdinit=/shell", dial_timeout=11)

    error = _refused(_run_with_config(ctr, name, config))

    assert "agent" in error
    assert "no answer within 11 s" in error
    assert _has_code(error, "deadline exceeded", "unavailable")
