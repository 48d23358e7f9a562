"""The file trees of the guest, the root file system and the initrd, and the files into which they are packed."""

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from guest.image import recipe
from guest.image.debian import run
from guest.image.errors import BuildError
from guest.image.modules import ModuleStore
from guest.image.recipe import Architecture, Suite

_HERE = Path(__file__).parent
_SECTOR_BYTES = 512
PARTITION_OFFSET_BYTES = 2 << 20
"""Where the root file system begins in the image: page tables map persistent memory in units of 2 MiB."""


def agent_files(checkout: Path) -> list[Path]:
    """Our own modules for the guest, sorted, without generated gRPC stubs: the guest has no grpc."""
    found: list[Path] = []
    for name in recipe.AGENT_SOURCES:
        start = checkout / name
        if not start.exists():
            raise BuildError(f"take agent sources: {name} is not in {checkout}")
        files = [start] if start.is_file() else sorted(start.rglob("*.py"))
        found += [file for file in files if not file.name.endswith("_grpc.py")]
    return found


def library_files(site_packages: Path) -> list[Path]:
    """The files of the virtual environment's libraries that go into the guest, sorted."""
    found: list[Path] = []
    for name in recipe.AGENT_LIBRARIES:
        files = sorted(file for suffix in ("*.py", "*.so") for file in (site_packages / name).rglob(suffix))
        if not files:
            raise BuildError(f"take library {name}: it is not in {site_packages}")
        if other := [file.name for file in files if file.suffix == ".so" and not file.name.endswith(".abi3.so")]:
            raise BuildError(f"take library {name}: {other[0]} is for one version of Python (its name has no .abi3)")
        found += files
    return found


def write_root(
    root: Path,
    *,
    suite: Suite,
    architecture: Architecture,
    packages: Iterable[Path],
    store: ModuleStore,
    add_agent: Callable[[Path, list[str]], None],
) -> None:
    """Make the root file system in the empty directory `root` out of unpacked packages, modules and an agent.

    `add_agent` gets the root and the modules that the agent loads.
    """
    _make_links(root)
    for directory in recipe.EMPTY_DIRECTORIES:
        (root / directory).mkdir()
    for package in packages:
        _merge(package, root)
    for name, text in recipe.ETC_FILES.items():
        (root / "etc" / name).write_text(text.format(release=suite.release))
    (root / "etc/mtab").symlink_to("../proc/self/mounts")
    (root / "sbin/modprobe").symlink_to("../bin/busybox")  # the path by which the kernel calls it
    link_applets(root, store.busybox)
    later = (*recipe.LATER_MODULES, *architecture.later_modules)
    add_agent(root, store.loadable(later))
    on_demand = (*recipe.ON_DEMAND_MODULES, *architecture.on_demand_modules, *store.below(recipe.ON_DEMAND_DIRECTORIES))
    store.install(root, (*recipe.FIRST_MODULES, *recipe.PMEM_MODULES, *later, *on_demand))


def _make_links(root: Path) -> None:
    for directory in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / directory).mkdir(parents=True)
        (root / directory).symlink_to(f"usr/{directory}")


def add_own_agent(
    root: Path, drivers: list[str], *, python: str, checkout: Path, site_packages: Path, compiler: Sequence[Path] = ()
) -> None:
    """Our agent, its libraries and byte code of all Python modules are in the tree `root`, whose interpreter is
    `python`. It loads the modules `drivers`.

    `compiler`: the unpacked packages of that interpreter for this host, where the root's own does not run.
    """
    (root / "usr/bin/python3").symlink_to(python)
    agent = root / recipe.AGENT_DIRECTORY
    for base, files in ((checkout, agent_files(checkout)), (site_packages, library_files(site_packages))):
        for file in files:
            target = agent / file.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    shutil.copyfile(_HERE / "start.py", agent / "start.py")
    (agent / "drivers").write_text("".join(f"{module}\n" for module in drivers))
    if not compiler:
        _compile(root, python)
        return
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="compiler-") as directory:
        host, guest = Path(directory), Path(directory, "guest")
        _make_links(host)
        for package in compiler:
            _merge(package, host)
        root.rename(guest)
        _compile(host, python, guest="/guest")
        guest.rename(root)


def add_kata_agent(root: Path, program: Path, *, runs_here: bool = True) -> None:
    """The kata-agent `program` is in the tree `root`, and runs there if this host can run it; else BuildError has the
    reason.
    """
    target = root / recipe.KATA_AGENT
    shutil.copyfile(program, target)
    target.chmod(0o755)
    (root / "etc/fstab").write_text(recipe.KATA_FSTAB)
    if not runs_here:
        return
    try:
        said = run(["chroot", root, f"/{recipe.KATA_AGENT}", "--version"])
    except BuildError as exc:
        raise BuildError(f"take kata-agent {program}: {exc}") from exc
    if not said.startswith("kata-agent version "):
        raise BuildError(f"take kata-agent {program}: it says {said[:80]!r} of its version")


def _merge(package: Path, root: Path) -> None:
    """Copy the unpacked `package` over `root`, whose /bin, /lib, /lib64 and /sbin are links into /usr."""

    def left_out(directory: str, names: list[str]) -> set[str]:
        below = os.path.relpath(directory, package)
        return {name for name in names if os.path.normpath(os.path.join(below, name)) in recipe.WITHOUT_PATHS}

    shutil.copytree(package, root, symlinks=True, dirs_exist_ok=True, ignore=left_out)


def link_applets(root: Path, busybox: Path) -> None:
    """Every applet of `busybox` is a command, unless a package has a command of that name."""
    for applet in run([busybox, "--list"]).split():
        if not any(os.path.lexists(root / place / applet) for place in ("bin", "sbin")):
            (root / "bin" / applet).symlink_to("busybox")


def _compile(root: Path, python: str, guest: str = "") -> None:
    """All Python modules below the directory `guest` of the root have byte code beside them, made by the root's
    interpreter, of the guest's version.

    It is of the kind "unchecked hash": it has no time stamp, and the guest does not check it. One process with a fixed
    hash seed compiles all, so equal sources give equal bytes.
    """
    # -B: modules that the compiler imports are compiled in their turn.
    argv = [f"/usr/bin/{python}", "-B", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    places = (f"{guest}/usr/lib/{python}", f"{guest}/usr/lib/python3", f"{guest}/{recipe.AGENT_DIRECTORY}")
    names = ("-s", guest, "-p", "/") if guest else ()  # files have the guest's names in the byte code
    run(
        ["chroot", root, *argv, *names, *places],
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]},
    )


def write_initrd(directory: Path, *, busybox: Path, store: ModuleStore, later: Sequence[str] = ()) -> None:
    """Make the initrd's tree in the empty `directory`: BusyBox, the first process, and the modules it loads."""
    for name in ("bin", "dev", "etc", "proc", "root"):
        (directory / name).mkdir()
    shutil.copy(busybox, directory / "bin/busybox")
    shutil.copyfile(_HERE / "init.sh", directory / "init")
    (directory / "init").chmod(0o755)
    (directory / "shell").symlink_to("init")
    link_applets(directory, store.busybox)
    for name, modules in (
        ("modules", recipe.FIRST_MODULES),
        ("modules.pmem", recipe.PMEM_MODULES),
        ("modules.later", (*recipe.LATER_MODULES, *later)),  # for kata-agent: ours has a list of its own
    ):
        (directory / "etc" / name).write_text(" ".join(store.loadable(modules)) + "\n")
    store.install(directory, (*recipe.FIRST_MODULES, *recipe.PMEM_MODULES))


def pack_initrd(directory: Path, target: Path, *, cpio: Sequence[str] = ("cpio",)) -> None:
    """Write the tree in `directory` as an uncompressed initramfs: sorted, owned by root, with the one time."""
    paths = sorted(directory.rglob("*"))
    for path in paths:
        os.utime(path, (recipe.MTIME_S, recipe.MTIME_S), follow_symlinks=False)
    names = "".join(f"{path.relative_to(directory)}\n" for path in paths)
    argv = [*cpio, "--create", "--format=newc", "--reproducible", "--owner=0:0", "--quiet", f"--file={target}"]
    run(argv, cwd=directory, text=names)


def pack_root(directory: Path, target: Path, *, mkfs: Sequence[str] = ("mkfs.erofs",)) -> None:
    """Write the tree in `directory` as a disk with one partition, an uncompressed erofs."""
    file_system = target.with_suffix(".erofs")
    fixed = (f"-T{recipe.MTIME_S}", f"-U{recipe.ROOT_IMAGE_UUID}", "--all-root", "-x-1")
    run([*mkfs, "--quiet", *fixed, file_system, directory])
    with target.open("wb") as disk, file_system.open("rb") as content:
        disk.write(partition_table(file_system.stat().st_size))
        disk.seek(PARTITION_OFFSET_BYTES)
        shutil.copyfileobj(content, disk)
    file_system.unlink()


def partition_table(size_bytes: int) -> bytes:
    """A master boot record whose first partition, of Linux, has `size_bytes` from PARTITION_OFFSET_BYTES on."""
    no_cylinders = b"\xfe\xff\xff"  # the address is given by sectors only
    start, count = PARTITION_OFFSET_BYTES // _SECTOR_BYTES, -(-size_bytes // _SECTOR_BYTES)
    entry = struct.pack("<B3sB3sII", 0, no_cylinders, 0x83, no_cylinders, start, count)
    return bytes(446) + entry + bytes(48) + b"\x55\xaa"
