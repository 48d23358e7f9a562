"""A node as an operator finds it: the distribution's or another release's containerd, and nothing of pyshim.

Its /etc, /opt and /usr/local are overlays of the test's own, within the enclosure. In place of systemd there are two
commands, `systemctl restart containerd` and `systemctl reload docker`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import releases
from .containerd import DEBIAN
from .waiting import eventually

CONFIG = Path("/etc/containerd/config.toml")
_PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2")
_LOOKED_AT = ("/etc", "/opt", "/usr/local")
_SYSTEMCTL = """\
#!/bin/sh
[ "$*" != "reload docker" ] || exec kill -HUP "$(cat {ground}/engine/docker.pid)"
[ "$*" = "restart containerd" ] || exit 1
if [ -e {ground}/pid ]; then
    kill "$(cat {ground}/pid)"
    while kill -0 "$(cat {ground}/pid)" 2>/dev/null; do sleep 0.05; done
fi
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYSHIM_ZYGOTE=off
export CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1
# As a service of systemd's, whatever the caller: not in the cgroups, the network or the session of that program.
groups=/sys/fs/cgroup/*/cgroup.procs
[ ! -e /sys/fs/cgroup/cgroup.procs ] || groups=/sys/fs/cgroup/runner/cgroup.procs
for group in $groups; do echo $$ >"$group"; done
setsid nsenter --target 1 --net --ipc --uts -- \\
    containerd --root {ground}/root --state {state} --address {state}/containerd.sock \\
    >>{ground}/containerd.log 2>&1 </dev/null &
echo $! >{ground}/pid
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BareNode:
    """`ground` is a directory of its own below /run, in which also CNI's `bin` and `net.d` are expected, in `cni`."""

    ground: Path
    state: Path
    release: releases.Release = field(default_factory=releases.chosen)

    @property
    def socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def containerd(self) -> Path:
        """The program."""
        return self.release.programs / "containerd"

    @property
    def log(self) -> Path:
        return self.ground / "containerd.log"

    def restart_containerd(self) -> None:
        subprocess.run(["/usr/local/sbin/systemctl", "restart", "containerd"], check=True)

    def end_containerd(self) -> None:
        """containerd has ended, and with it its mounts below the ground."""
        try:
            pid = int((self.ground / "pid").read_text())
        except FileNotFoundError:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), what="containerd has ended")

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    @contextlib.contextmanager
    def laid_out(self, config: str, *overlays: str) -> Iterator[None]:
        """The node's files, with `config` as containerd's, until the end of the block. containerd is not started."""
        mounted = []
        try:
            for number, top in enumerate((*_LOOKED_AT, *overlays)):
                upper, work = self.ground / f"upper{number}", self.ground / f"work{number}"
                upper.mkdir()
                work.mkdir()
                options = f"lowerdir={top},upperdir={upper},workdir={work}"
                subprocess.run(["mount", "-t", "overlay", "-o", options, "node", top], check=True)
                mounted.append(top)
            CONFIG.parent.mkdir(exist_ok=True)
            CONFIG.write_text(config)
            systemctl = Path("/usr/local/sbin/systemctl")
            systemctl.write_text(_SYSTEMCTL.format(ground=self.ground, state=self.state))
            systemctl.chmod(0o755)
            for name in _PROGRAMS if self.release.is_built else ():
                Path("/usr/local/bin", name).symlink_to(self.release.programs / name)
            yield
        finally:
            self.end_containerd()
            for top in reversed(mounted):
                subprocess.run(["umount", top], check=True)


def everything() -> dict[str, tuple[int, bytes]]:
    """All files of the node that an installation may touch: mode, and content or target."""
    found: dict[str, tuple[int, bytes]] = {}
    for top in _LOOKED_AT:
        for directory, names, files in os.walk(top):
            for name in (*names, *files):
                path = Path(directory, name)
                mode = path.lstat().st_mode
                is_file = stat.S_ISREG(mode) and path.stat().st_size < 1 << 20
                content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if is_file else b""
                found[str(path)] = (mode, content)
    return found


def layouts(ground: Path, pause: str) -> dict[str, str]:
    """Configurations of containerd that nodes have, by a name: those that the chosen release reads."""
    release = releases.chosen()
    opt = f'[plugins."io.containerd.internal.v1.opt"]\n  path = "{ground}/opt"\n'
    if release.numbers < (2,):
        cri = f'[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "{pause}"\n  restrict_oom_score_adj = true\n'
        debian = DEBIAN.replace('  [plugins."io.containerd.grpc.v1.cri"]\n', "")
        debian = debian.replace("/etc/cni/net.d", f"{ground}/cni/net.d").replace("/usr/lib/cni", f"{ground}/cni/bin")
        return {"debian": f"{debian}{opt}{cri}"}
    version_3 = f"{opt}{release.cri_config(sandbox_image=pause, cni=ground / 'cni', nri=ground / 'nri')}"
    version_2 = releases.RELEASES["1.7"].cri_config(sandbox_image=pause, cni=ground / "cni", nri=ground / "nri")
    imports = 'imports = ["/etc/containerd/conf.d/*.toml"]'
    version_4 = {"version-4": f"version = 4\n{imports}\n{version_3}"} if release.numbers >= (2, 3) else {}
    return version_4 | {
        "version-3": f"version = 3\n{version_3}",
        "imports": f"version = 3\n{imports}\n{version_3}",
        "version-2": f"version = 2\n{opt}{version_2}",
    }
