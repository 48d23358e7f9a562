"""Makes a release in its own directory: a virtual environment with the locked dependencies, and the guest."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256

from pyshim import PYTHONS, __version__
from pyshim.host.kernel_image import boot_file_architecture
from pyshim.host.writers import writable_below, writable_by_others
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.node.install.plan import Release, packages_path, python_path

GUEST_FILES = ("vmlinux", "initrd.img", "rootfs.img", "relay")
_PACKAGES = ("pyshim", "hypervisors", "protos", "configs")
_CODE_BYTES = 100 << 20
"""Room that the virtual environment takes, rounded up: 85 MiB with Python 3.11."""
_PIP_S = 900.0
"""Seconds that pip may take. It downloads 10 MB."""


class Sources:
    """The parts of a release; `checkout` has the code unless `wheel` is given, and `lock` names its dependencies."""

    def __init__(self, *, checkout: str, guest: str, lock: str, wheel: str | None, wheels: str | None) -> None:
        """`wheels` is a directory with the dependencies, for a node that reaches no package index."""
        self.guest = guest
        self.lock = lock
        self._checkout = checkout
        self._given = wheel
        self._wheels = wheels
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            self._made.cleanup()

    def release(self) -> Release:
        """The release, named by a digest of its content.

        Raises NotFound for a missing part, FailedPrecondition for an unsupported Python.
        """
        require_own_guest(f"{self.guest}/{GUEST_FILES[0]}", os.uname().machine)
        python = supported_python(f"{sys.version_info.major}.{sys.version_info.minor}")
        digest = sha256(f"{python}\n".encode())
        with zipfile.ZipFile(self.wheel()) as archive:
            for item in sorted(archive.infolist(), key=lambda item: item.filename):
                if not item.filename.endswith("/RECORD"):
                    digest.update(f"{item.filename} {item.CRC} {item.file_size}\n".encode())
        for path in (self.lock, *(f"{self.guest}/{name}" for name in GUEST_FILES)):
            try:
                with open(path, "rb") as file:
                    digest.update(f"{os.path.basename(path)} {file_digest(file, 'sha256').hexdigest()}\n".encode())
            except FileNotFoundError as error:
                hint = "'make guest' builds the guest, --guest names another place"
                raise NotFound(f"read '{path}': there is no such file (hint: {hint})") from error
        return Release(id=f"{__version__}-{digest.hexdigest()[:12]}", python=python)

    def size_bytes(self) -> int:
        """The room that the release takes on the disk. Raises OSError for a missing part."""
        return _CODE_BYTES + sum(os.stat(f"{self.guest}/{name}").st_size for name in GUEST_FILES)

    def wheel(self) -> str:
        """The package as a wheel; built from the checkout unless given."""
        if self._given is None:
            self._made = tempfile.TemporaryDirectory(prefix="pyshim-wheel-")
            self._given = _built_wheel(self._checkout, self._made.name)
        return self._given

    def configs(self) -> dict[str, str]:
        """The shipped files, by their path below configs/."""
        with zipfile.ZipFile(self.wheel()) as archive:
            return {
                name.removeprefix("configs/"): archive.read(name).decode()
                for name in archive.namelist()
                if name.startswith("configs/")
            }

    def make(
        self, directory: str, final: str, release: Release, begin_step: Callable[[str], None] = lambda _: None
    ) -> None:
        """`directory`, which will be renamed to `final`, holds the release. Raises FailedPrecondition, OSError.

        `begin_step` is called with the name of each step.
        """
        before = os.umask(0o022)  # only root may write what root executes
        try:
            begin_step("make the virtual environment")
            run_step(
                "make the virtual environment", [_base_python(), "-m", "venv", "--without-pip", f"{directory}/venv"]
            )
            begin_step("install the locked dependencies")
            self._install(python_path(directory))
            begin_step("copy the guest")
            os.mkdir(f"{directory}/guest")
            for name in GUEST_FILES:
                shutil.copy(f"{self.guest}/{name}", f"{directory}/guest/{name}")
            # The package looks for the relay where a checkout has it.
            packages = packages_path(directory, release)
            os.mkdir(f"{packages}/.build")
            os.symlink(f"{final}/guest", f"{packages}/.build/guest")
        finally:
            os.umask(before)
        found = (*writable_by_others((directory, python_path(directory))), *writable_below((directory,)))
        if found:
            raise FailedPrecondition(f"install '{final}': users other than root can write {', '.join(found[:10])}")

    def _install(self, python: str) -> None:
        """Runs this interpreter's pip: a release needs no pip."""
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet", "install"]
        where = ["--no-index", "--find-links", self._wheels] if self._wheels is not None else []
        run_step("install the locked dependencies", [*pip, "--no-deps", *where, "--require-hashes", "-r", self.lock])
        run_step("install the wheel", [*pip, "--no-deps", "--no-index", self.wheel()])


def supported_python(version: str) -> str:
    """`version`, if the locked dependencies have wheels for it. Raises FailedPrecondition."""
    if version not in PYTHONS:
        raise FailedPrecondition(f"install for Python {version}: the supported versions are {', '.join(PYTHONS)}")
    return version


def require_own_guest(kernel: str, machine: str) -> None:
    """The guest's kernel is for this machine, or does not say. Raises FailedPrecondition."""
    with suppress(OSError):  # a missing part is named later
        found = boot_file_architecture(kernel)
        if found and found != machine:
            raise FailedPrecondition(f"take the guest of '{kernel}': it is for {found}, and this node is {machine}")


def _built_wheel(checkout: str, directory: str) -> str:
    """The wheel, built from a copy of the checkout: setuptools writes beside the sources."""
    copy = f"{directory}/source"
    os.mkdir(copy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if not os.path.exists(f"{checkout}/{name}"):
            raise NotFound(f"build the wheel: '{checkout}' is not a checkout (hint: --wheel FILE)")
        shutil.copy(f"{checkout}/{name}", copy)
    for name in _PACKAGES:
        shutil.copytree(f"{checkout}/{name}", f"{copy}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    source = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run_step("build the wheel", [sys.executable, "-c", source, directory], cwd=copy)
    (name,) = (name for name in os.listdir(directory) if name.endswith(".whl"))
    return f"{directory}/{name}"


def _base_python() -> str:
    """The interpreter that this virtual environment was made with: the new one must not depend on this one."""
    return os.path.realpath(sys.executable)


def run_step(what: str, command: list[str], cwd: str | None = None) -> None:
    """The program has exited with 0. Raises FailedPrecondition. After an error or a signal its processes are killed."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", "/")}
    environment |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    with ExitStack() as undo:
        # The exception of a signal between the fork and the return of Popen would lose the process.
        with _signals_blocked() as before:
            # Its own process group: pip starts further processes, and none may write to a directory being removed.
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, before),
            )
            undo.enter_context(process)
            undo.enter_context(_killed_at_error(process))
        try:
            output, errors = process.communicate(timeout=_PIP_S)
        except subprocess.TimeoutExpired as error:
            raise FailedPrecondition(f"{what}: not done within {_PIP_S:g} s") from error
    if process.returncode != 0:
        raise FailedPrecondition(f"{what}: exit code {process.returncode}: {(errors or output).strip()[-1500:]}")


@contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """SIGTERM and SIGINT are blocked in this thread. Yields the former mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _killed_at_error(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
