"""What a Python import costs inside the guest: `python -m bench.guest_imports [--runs N]`.

Boots the image once with a program of its own in the agent's place. That program starts the interpreter again and again
with one import each; the table has medians, as ratios to the interpreter with nothing imported.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.boot_variants import CACHE, CHECKOUT, Variant, qemu_argv, running
from guest.image import recipe
from guest.image.build import find_inputs, gather
from guest.image.cpio import cpio_archive
from guest.image.rootfs import erofs_image, loader_tree
from guest.image.vmlinux import write_vmlinux

MODULES = (
    *("", "struct", "selectors", "enum", "threading", "ctypes", "socket", "re", "json", "typing", "subprocess"),
    *("pathlib", "logging", "dataclasses", "asyncio"),
)
LIMIT_S = 180
END = "END OF TABLE"

# Runs as process 1 of the guest. The pause lets the background loading of drivers end.
PROGRAM = """
import os, time
time.sleep(2)
for name in {modules!r}:
    argv = ["/usr/bin/python3", "-I", "-S", "-c", "import " + name if name else "pass"]
    spent = []
    for _ in range({runs} + 1):
        start = time.monotonic_ns()
        os.waitpid(os.posix_spawn(argv[0], argv, os.environ), 0)
        spent.append(str(time.monotonic_ns() - start))
    print(name or "-", *spent[1:], flush=True)
print({end!r}, flush=True)
while True:
    time.sleep(60)
"""


def measured(directory: Path, runs: int) -> dict[str, list[int]]:
    """Nanoseconds by module, first run of each left out: it reads from the disk what later ones find in memory."""
    start = directory / "imports_start.py"
    start.write_text(PROGRAM.format(modules=MODULES, runs=runs, end=END))
    material = gather(find_inputs(CHECKOUT, CACHE, start, print), CACHE, directory, lambda text: None)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        tool = material.unpacked.command("usr/bin/mkfs.erofs")
        erofs_image(material.tree(material.bundled()), tool, directory / "root.img", Path(scratch))
    write_vmlinux(material.bzimage, material.unpacked.command("usr/bin/lz4"), directory / "vmlinux", directory)
    initrd = cpio_archive(loader_tree(material.release, material.store), recipe.MTIME_S)
    (directory / "initrd.img").write_bytes(initrd)
    kernel, image = directory / "vmlinux", directory / "root.img"
    variant = Variant(name="imports", kernel=kernel, initrd=directory / "initrd.img", image=image)
    console = directory / "console"
    argv = qemu_argv(variant, directory / "channel", console)
    argv[argv.index(f"socket,id=channel,path={directory / 'channel'}")] = "null,id=channel"
    deadline_s = time.monotonic() + LIMIT_S
    with running(argv) as process:
        while END not in (text := console.read_text() if console.exists() else ""):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise RuntimeError(f"measure imports: the guest stopped or took over {LIMIT_S} s:\n{text[-2000:]}")
            time.sleep(0.5)
    rows = [line.split() for line in text.splitlines() if line.split()[1:] and line.split()[1].isdigit()]
    return {name: [int(figure) for figure in figures] for name, *figures in rows}


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.guest_imports", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="starts of the interpreter per module")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="guest-imports-") as name:
        medians = {module: statistics.median(row) for module, row in measured(Path(name), options.runs).items()}
    print("| import | ratio to the bare interpreter | ms |")
    print("|---|---|---|")
    for module, median_ns in medians.items():
        print(f"| {module} | {median_ns / medians['-']:.2f} | {median_ns / 1e6:.0f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
