"""Measures the guest's boot in several variants: `python -m bench.boot_variants [--rounds N] [--json FILE]`.

Time runs from the start of the QEMU process to the agent's answer to a health check over the virtio-serial port; for
the bare kernel, to the first write of a static init in an otherwise empty initrd. Two clocks: wall, and the CPU time of
the QEMU process, which neighbours on the machine disturb less.

The default executes the agent's interpreter at each boot; `make guest` keeps the agent's process, which is a variant
here. Every boot of a variant lies between two boots of the default, and counts as a ratio to their mean: drift of the
machine cancels out. The table has medians of those ratios. Variants are built in memory from the same material as the
image.
"""

import argparse
import json
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from guest.image import recipe
from guest.image.build import Material, find_inputs, gather
from guest.image.cpio import cpio_archive
from guest.image.debian import Progress, run
from guest.image.interpreter import stdlib_sources
from guest.image.loader import (
    AGENT_ARGV,
    NEW_ROOT,
    become,
    enter_root,
    load_modules,
    mount_devices,
    mount_file_systems,
)
from guest.image.rootfs import erofs_image, loader_tree
from guest.image.sysinit import SAVED_FD, Program
from guest.image.tree import Tree
from guest.image.vmlinux import write_vmlinux

CHECKOUT = Path(__file__).resolve().parents[1]
CACHE = CHECKOUT / ".build/cache/guest"
PORT = "org.pykata.agent.0"
KERNEL_PARAMS = (
    "quiet panic=1 cryptomgr.notests tsc=reliable no_timer_check rcupdate.rcu_expedited=1 i8042.direct=1"
    " i8042.dumbkbd=1 i8042.nopnp=1 i8042.noaux=1 noreplace-smp reboot=t"
)
# what qemu64 lacks of the level that programs of RHEL 9 and its relatives are built for
X86_64_V2 = "+ssse3,+sse4.1,+sse4.2,+popcnt"
MEMORY_MIB = 2048
BOOT_LIMIT_S = 60
MARK = b"UP\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to boot; `bare` means the marker of the empty initrd on a serial line instead of the agent's answer."""

    name: str
    kernel: Path
    initrd: Path
    image: Path | None
    machine: str = "q35"
    cpu: str = "qemu64"
    params: str = KERNEL_PARAMS
    bare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One boot."""

    wall_s: float
    cpu_s: float


def health_check() -> bytes:
    """A ttrpc request for grpc.Health/Check on stream 1, with an empty payload."""
    body = b"".join(bytes([number << 3 | 2, len(text)]) + text for number, text in ((1, b"grpc.Health"), (2, b"Check")))
    return struct.pack(">IIBB", len(body), 1, 1, 0) + body


def cpu_time_s(pid: int) -> float:
    """What all threads of the process have used so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


def qemu_argv(variant: Variant, channel: Path, console: Path) -> list[str]:
    """The virtual machine the driver would start, without what a pod adds (network, shared directory)."""
    suffix = "device" if variant.machine == "microvm" else "pci"
    append = f"root=/dev/vda rootfstype=erofs ro {variant.params} agent.server_addr=serial:///dev/virtio-ports/{PORT}"
    argv = ["qemu-system-x86_64", "-machine", f"{variant.machine},accel=tcg,memory-backend=ram", "-cpu", variant.cpu]
    argv += ["-object", f"memory-backend-memfd,id=ram,size={MEMORY_MIB}M,share=on", "-m", str(MEMORY_MIB), "-smp", "1"]
    argv += ["-no-user-config", "-nodefaults", "-nographic", "-no-reboot"]
    argv += ["-kernel", str(variant.kernel), "-initrd", str(variant.initrd)]
    argv += ["-object", "rng-random,id=rng0,filename=/dev/urandom", "-device", f"virtio-rng-{suffix},rng=rng0"]
    argv += ["-chardev", f"socket,id=channel,path={channel}"]
    if variant.bare:
        return [*argv, "-append", f"console=ttyS0 {append}", "-serial", "chardev:channel"]
    argv += ["-append", f"console=hvc0 {append}", "-device", f"virtio-serial-{suffix}"]
    argv += ["-chardev", f"file,id=console,path={console}", "-device", "virtconsole,chardev=console"]
    argv += ["-device", f"virtserialport,chardev=channel,name={PORT}"]
    if variant.image is not None:
        argv += ["-drive", f"id=image,file={variant.image},format=raw,if=none,readonly=on"]
        argv += ["-device", f"virtio-blk-{suffix},drive=image,serial=image"]
    return argv


@contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `argv`, which is gone when the block ends."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def boot(variant: Variant, scratch: Path) -> Sample:
    """Boot once and stop; RuntimeError with the end of the console when the guest does not come up."""
    channel, console = scratch / "channel", scratch / "console"
    channel.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(channel))
        listener.listen(1)
        listener.settimeout(BOOT_LIMIT_S)
        started_s = time.monotonic()
        with running(qemu_argv(variant, channel, console)) as process:
            try:
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(BOOT_LIMIT_S)
                    if not variant.bare:
                        peer.sendall(health_check())
                    received = b""
                    while not (received.endswith(MARK) or (not variant.bare and len(received) >= 10)):
                        chunk = peer.recv(4096)
                        if not chunk:
                            raise RuntimeError("QEMU closed the channel")
                        received += chunk.replace(b"\r", b"")
                    return Sample(wall_s=time.monotonic() - started_s, cpu_s=cpu_time_s(process.pid))
            except (OSError, RuntimeError) as exc:
                tail = console.read_text(errors="replace")[-2000:] if console.exists() else ""
                raise RuntimeError(f"boot {variant.name}: {exc or 'no answer'}\n{tail}") from exc


def bare_initrd() -> bytes:
    """The least that lets a kernel reach user space: a console node and a program that writes one line."""
    tree = Tree()
    tree.add_directory("dev")
    tree.add_character_device("dev/console", 5, 1)
    program = Program()
    program.call("open", b"/dev/console", 2, keep=True)
    program.call("write", SAVED_FD, MARK, len(MARK))
    # process 1 must not end: the kernel would panic into the measurement. A read from a quiet line waits for ever.
    program.call("read", SAVED_FD, b"\0" * 8, 1)
    tree.add_file("init", program.image(), 0o755)
    return cpio_archive(tree, recipe.MTIME_S)


def whole_initrd(root: Tree, loader: Tree) -> bytes:
    """The root file system as the initrd: no root image, so neither its driver nor its file system."""
    tree = Tree()
    for path, entry in root.items():
        tree.add(path, entry)
    tree.add_character_device("dev/console", 5, 1)
    paths = [path for path, _ in loader.items() if path.endswith(".ko")]
    wanted = ("virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio", "virtio_pci", "virtio-rng")
    program = Program()
    mount_devices(program)
    for name in (*wanted, "virtio_console"):
        path = next(path for path in paths if path.endswith(f"/{name}.ko"))
        tree.add(path, loader[path])
        load_modules(program, [f"/{path}"])
    # pivot_root, which containers need, refuses the initramfs itself as the old root: a bind mount of it will do
    program.call("mount", b"/", NEW_ROOT, b"", 4096, 0, must="bind the root")
    enter_root(program)
    mount_file_systems(program)
    become(program, AGENT_ARGV)
    tree.add_file("init", program.image(), 0o755)
    return cpio_archive(tree, recipe.MTIME_S)


SHELL_INIT = """#!/busybox sh
export PATH=/
/busybox mount -t devtmpfs dev /dev
{inserts}
/busybox mount -t erofs -o ro,nodev /dev/vda /root
/busybox mount -o move /dev /root/dev
/busybox mkdir /root/dev/pts /root/dev/shm
/busybox mount -t proc proc /root/proc
/busybox mount -t sysfs sysfs /root/sys
/busybox mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
/busybox mount -t devpts devpts /root/dev/pts
/busybox mount -t tmpfs tmpfs /root/dev/shm
/busybox mount -t tmpfs tmpfs /root/run
/busybox mount -t tmpfs tmpfs /root/tmp
/busybox mount -t tmpfs tmpfs /root/var
exec /busybox switch_root -c /dev/console /root {argv}
"""


def shell_initrd(material: Material, loader: Tree) -> bytes:
    """The loader as a BusyBox script in place of the table of system calls."""
    tree = Tree()
    order = material.store.closure(recipe.LOADER_MODULES)
    inserts = [f"/busybox insmod /modules/{module.path.rpartition('/')[2]}" for module in order]
    for path, entry in loader.items():
        if path not in ("init", "shell"):
            tree.add(path, entry)
    tree.add_file("busybox", material.unpacked.find("bin/busybox").read_bytes(), 0o755)
    argv = " ".join(word.decode() for word in AGENT_ARGV)
    tree.add_file("init", SHELL_INIT.format(inserts="\n".join(inserts), argv=argv).encode(), 0o755)
    return cpio_archive(tree, recipe.MTIME_S)


PLAIN_START = """import sys
sys.path.insert(0, "/usr/lib/agent")
from guest.agent.main import main
raise SystemExit(main())
"""


def plain_python(directory: Path, progress: Progress) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The interpreter's modules without a bundle: as byte-code files, and as sources that every import compiles."""
    entry = directory / "plain_start.py"
    entry.write_text(PLAIN_START)
    inputs = find_inputs(CHECKOUT, CACHE, entry, progress)
    material = gather(inputs, CACHE, directory, progress)
    packages = [material.unpacked.directories[f"libpython3.11-{part}"] for part in ("minimal", "stdlib")]
    sources = {path: data for path, data in material.modules.items() if not path.endswith(".pyc")}
    for source in (*stdlib_sources(packages), *inputs.sources):
        if source.is_module and source.file != entry:
            sources[source.path] = source.file.read_bytes()
    start = "usr/lib/agent/start.pyc"
    return material.modules, {**sources, start: material.modules[start]}


def without_entropy(material: Material) -> Tree:
    """The loader with the entropy device's driver taken out: the first reader of random bytes waits for the jitter."""
    kept = tuple(name for name in recipe.LOADER_MODULES if name != "virtio_rng")
    return loader_tree(material.release, material.store, kept)


def kept_agent(material: Material, kernel: Path, directory: Path) -> tuple[Tree, Tree]:
    """Root file system and initrd of a guest that goes on as the agent's process, as `make guest` builds them."""
    root = material.tree(material.bundled())
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        resumption = material.keep_agent(root, kernel, Path(scratch))
    return root, loader_tree(material.release, material.store, resumption=resumption)


def variants(material: Material, directory: Path, progress: Progress) -> tuple[Variant, list[Variant]]:
    """The default and all others, their files written below `directory`."""
    erofs_tool = material.unpacked.command("usr/bin/mkfs.erofs")
    lz4_tool = material.unpacked.command("usr/bin/lz4")

    def written(name: str, data: bytes) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    def image(name: str, tree: Tree, *options: str) -> Path:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            erofs_image(tree, erofs_tool, directory / name, Path(scratch), *options)
        return directory / name

    root = material.tree(material.bundled())
    files, sources = plain_python(directory, progress)
    loader = loader_tree(material.release, material.store)
    vmlinux = directory / "vmlinux"
    write_vmlinux(material.bzimage, lz4_tool, vmlinux, directory)
    bzimage = written("vmlinuz", material.bzimage)
    whole = written("whole.img", whole_initrd(root, loader))
    run([*lz4_tool, "-l", "-9", "-q", "-f", whole, directory / "whole.lz4"])
    initrd = written("initrd.img", cpio_archive(loader, recipe.MTIME_S))
    default = Variant(name="default", kernel=vmlinux, initrd=initrd, image=image("root.img", root))
    empty = written("bare.img", bare_initrd())
    quiet_start = written("late.img", cpio_archive(without_entropy(material), recipe.MTIME_S))
    script = written("script.img", shell_initrd(material, loader))
    kept_root, kept_loader = kept_agent(material, vmlinux, directory)
    kept_initrd = written("kept.img", cpio_archive(kept_loader, recipe.MTIME_S))
    bare = Variant(name="bare kernel, empty initrd", kernel=vmlinux, initrd=empty, image=None, bare=True)

    def params(name: str, words: str) -> Variant:
        return replace(default, name=name, params=f"{KERNEL_PARAMS} {words}")

    return default, [
        replace(default, name="agent kept at the build", initrd=kept_initrd, image=image("kept-root.img", kept_root)),
        bare,
        replace(bare, name="bare kernel, empty initrd, bzImage", kernel=bzimage),
        replace(default, name="bzImage instead of PVH vmlinux", kernel=bzimage),
        replace(default, name="root as cpio initrd, uncompressed", initrd=whole, image=None),
        replace(default, name="root as cpio initrd, lz4", initrd=directory / "whole.lz4", image=None),
        replace(default, name="root as erofs, lz4hc", image=image("lz4.img", root, "-zlz4hc")),
        replace(default, name="loader as BusyBox script", initrd=script),
        replace(default, name="agent's modules as byte-code files", image=image("files.img", material.tree(files))),
        replace(default, name="Python sources, no byte code", image=image("source.img", material.tree(sources))),
        replace(default, name="no virtio-rng driver in the loader", initrd=quiet_start),
        replace(default, name="same with -cpu qemu64,+rdrand", initrd=quiet_start, cpu="qemu64,+rdrand"),
        replace(default, name="-cpu qemu64 raised to x86-64-v2", cpu=f"qemu64,{X86_64_V2}"),
        replace(default, name="-cpu max", cpu="max"),
        replace(default, name="microvm", machine="microvm", params=f"{KERNEL_PARAMS} tsc_early_khz=2000000"),
        replace(default, name="without cryptomgr.notests", params=KERNEL_PARAMS.replace("cryptomgr.notests ", "")),
        params("apparmor=0 selinux=0 audit=0", "apparmor=0 selinux=0 audit=0"),
        params("mitigations=off", "mitigations=off"),
        params("init_on_alloc=0", "init_on_alloc=0"),
        params("tracefs left out", "initcall_blacklist=tracer_init_tracefs,init_kprobe_trace"),
    ]


def measure(default: Variant, others: list[Variant], rounds: int, scratch: Path) -> dict[str, dict[str, object]]:
    """For each variant the medians of its ratios to the default, and of its own seconds."""
    ratios: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in others}
    samples: dict[str, list[Sample]] = {variant.name: [] for variant in (default, *others)}
    for number in range(rounds):
        before = boot(default, scratch)
        samples[default.name].append(before)
        for variant in others:
            print(f"round {number + 1} of {rounds}: {variant.name}", file=sys.stderr, flush=True)
            sample = boot(variant, scratch)
            after = boot(default, scratch)
            wall = 2 * sample.wall_s / (before.wall_s + after.wall_s)
            ratios[variant.name].append((wall, 2 * sample.cpu_s / (before.cpu_s + after.cpu_s)))
            samples[variant.name].append(sample)
            samples[default.name].append(after)
            before = after
    ratios[default.name] = [(1.0, 1.0)]
    return {
        name: {
            "wall_ratio": statistics.median(wall for wall, _ in ratios[name]),
            "cpu_ratio": statistics.median(cpu for _, cpu in ratios[name]),
            "wall_s": statistics.median(sample.wall_s for sample in taken),
            "cpu_s": statistics.median(sample.cpu_s for sample in taken),
            "boots": len(taken),
        }
        for name, taken in samples.items()
    }


def main(arguments: list[str]) -> int:
    """Print the table; 0 when every variant came up every time."""
    parser = argparse.ArgumentParser(prog="python -m bench.boot_variants", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="boots of each variant")
    parser.add_argument("--only", default="", help="measure only the variants whose name contains this text")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(arguments)

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="boot-variants-") as name:
        directory = Path(name)
        inputs = find_inputs(CHECKOUT, CACHE, CHECKOUT / "guest/image/start.py", progress)
        default, others = variants(gather(inputs, CACHE, directory, progress), directory, progress)
        others = [variant for variant in others if options.only in variant.name]
        table = measure(default, others, options.rounds, directory)
    print("| variant | wall, ratio | CPU, ratio | median wall s | boots |")
    print("|---|---|---|---|---|")
    for variant, row in table.items():
        print(
            f"| {variant} | {row['wall_ratio']:.2f} | {row['cpu_ratio']:.2f} | {row['wall_s']:.2f} | {row['boots']} |"
        )
    if options.json:
        facts = {"machine": platform.platform(), "rounds": options.rounds}
        options.json.write_text(json.dumps({**facts, "variants": table}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
