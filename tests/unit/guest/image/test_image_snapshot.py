"""The machine that keeps the agent's process, when it does not: a stand-in for QEMU fails in its place."""

import os
from pathlib import Path

import pytest

from guest.image import snapshot
from guest.image.errors import BuildError

# Finds the file of the console, which QEMU is told by `-chardev file,...,path=`.
QEMU = """#!/bin/sh
for word; do case $word in file,id=console,path=*) console=${word#*path=};; esac; done
"""


@pytest.mark.parametrize(
    ("script", "limit_s", "said"),
    [
        ("echo '-cpu: no such model' >&2; exit 1", 60.0, r"Expecting value.*says '-cpu: no such model'"),
        ("echo early > $console; echo 'snapshot failed: x' >> $console", 60.0, r"says 'early \| snapshot failed: x'"),
        ("echo '{\"registers\": {}}' | dd of=snapshot conv=notrunc status=none", 60.0, "'mappings'"),
        ("echo 'it hangs here' > $console; exec sleep 600", 3.0, "not done after 3 s; the guest says 'it hangs here'"),
    ],
)
def test_a_machine_that_keeps_nothing_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, said: str
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "qemu-system-x86_64").write_text(f"{QEMU}{script}\n")
    (programs / "qemu-system-x86_64").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(snapshot, "_LIMIT_S", limit_s)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BuildError, match=f"keep the agent's process: .*{said}"):
        snapshot._kept_process(tmp_path / "vmlinux", tmp_path / "initrd", tmp_path / "image", tmp_path)


def test_without_qemu_the_build_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BuildError, match="run qemu-system-x86_64: not installed"):
        snapshot._kept_process(tmp_path / "vmlinux", tmp_path / "initrd", tmp_path / "image", tmp_path)
