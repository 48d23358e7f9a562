"""Pictures of what `pyshim` prints, for the README: `scripts/integration integration/pictures.py` draws them anew.

Real output on a real terminal, drawn by rich; the sandboxes are three pods that run meanwhile. The only word that is
changed is the directory of this checkout, which is shown as /opt/pyshim. No run of tests collects this file.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from protos.cri import v1_pb2 as pb

from .framework.cri import Cri, Pod, pod_config
from .framework.terminal import Terminal

PROJECT = Path(__file__).resolve().parents[1]
PICTURES = PROJECT / "docs" / "pictures"
COLUMNS = 118
_MIB = 1 << 20
_PODS = {"web": (256, 500), "cache": (512, 1000), "worker": (128, 250)}
"""Name of each pod, and its container's limits: MiB, thousandths of a CPU."""
_FONT = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)
"""rich's SVG fetches a font from a server of others: a reader's own monospaced one does."""

pytestmark = pytest.mark.vm


def draw(name: str, *words: str) -> None:
    """`docs/pictures/NAME.svg` shows `pyshim` with these words on a terminal."""
    environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    with Terminal.open([str(PROJECT / "bin/pyshim"), *words], environment, rows=60, columns=COLUMNS) as terminal:
        terminal.wait()
        seen = terminal.seen.decode().replace("\r\n", "\n").replace(str(PROJECT), "/opt/pyshim")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(f"# pyshim {' '.join(words)}\n{seen}".rstrip()), soft_wrap=False)
        PICTURES.mkdir(exist_ok=True)
        svg = console.export_svg(title="", unique_id=f"pyshim-{name}")
    (PICTURES / f"{name}.svg").write_text(_FONT.sub("\n", svg))


def test_pictures(cri: Cri, leaves_nothing: None) -> None:
    with ExitStack() as running:
        for name, (memory_mib, milli_cpus) in _PODS.items():
            limits = pb.LinuxContainerResources(
                memory_limit_in_bytes=memory_mib * _MIB, cpu_period=100_000, cpu_quota=milli_cpus * 100
            )
            config = pod_config(name, cri.logs)
            config.linux.resources.CopyFrom(limits)  # as the kubelet does
            pod = Pod.run(cri, config)
            running.callback(pod.remove)
            pod.start(resources=limits)
        draw("list", "list")
    draw("check", "check")
    kubernetes = "configs/kubernetes"
    draw(
        "sizing",
        *("sizing", "explain", f"{kubernetes}/pod-example.yaml"),
        *("--runtimeclass", f"{kubernetes}/runtimeclass-pykata.yaml"),
    )
