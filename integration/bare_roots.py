"""An archive of a release on bare systems: Debian 12, Debian 13, and Debian 12 without apt and dpkg.

`python -m integration.bare_roots make` makes the systems with debootstrap, outside the enclosure, which has no network;
they have what a node has before pyshim: containerd, runc, CNI's plugins, QEMU, virtiofsd and Python, from Debian.
`python -m integration.bare_roots try ARCHIVE [NAME...]` goes, in the enclosure and so without a network, through the
README's three commands in each, with real virtual machines, and through the removal. It prints a line for each system,
and exits 1 if something that was there before the installation is changed or anything is left after it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from integration.framework import images
from integration.framework.bare_node import CONFIG
from integration.framework.releases import PROJECT, one_build

_CACHE = PROJECT / ".build" / "cache" / "bare-roots"
_GROUND = Path("/run/bare-roots")
_PAUSE = "docker.io/local/pause:test"
_NODE = ("python3", "containerd", "runc", "containernetworking-plugins", "iproute2", "qemu-system-x86")
_SUITES = {"bookworm": (*_NODE, "qemu-system-common"), "trixie": (*_NODE, "virtiofsd")}
ROOTS = {"debian-12": "bookworm", "debian-13": "trixie", "without-apt": "bookworm"}
_CONTAINERD = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_PAUSE}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "/etc/cni/net.d"
"""
_CONFLIST = """\
{"cniVersion": "0.4.0", "name": "bare", "plugins": [{"type": "bridge", "bridge": "cnibare", "ipam":
{"type": "host-local", "ranges": [[{"subnet": "10.233.10.0/24"}]]}}]}
"""
# In place of systemd, which a chroot does not run.
_SYSTEMCTL = """\
#!/bin/sh
[ "$*" = "restart containerd" ] || exit 1
if [ -e /run/containerd.pid ]; then
    kill "$(cat /run/containerd.pid)"
    while kill -0 "$(cat /run/containerd.pid)" 2>/dev/null; do sleep 0.1; done
fi
PYSHIM_ZYGOTE=off setsid containerd >>/run/containerd.log 2>&1 </dev/null &
echo $! >/run/containerd.pid
"""
_TRIAL = f"""\
set -eu
umask 022
list() {{ find /etc /opt /usr /var/lib -xdev ! -path '/var/lib/containerd*' ! -path '/var/lib/cni*' \\
    ! -path '*/__pycache__*' \\( -type d -printf '%p %y %m\\n' -o -printf '%p %y %m %l %s\\n' \\) | sort
    find /etc /opt /usr/local -xdev -type f -exec sha256sum {{}} + | sort; }}
systemctl restart containerd
until ctr version >/dev/null 2>&1; do sleep 0.2; done
for namespace in k8s.io default; do ctr --namespace $namespace images import /run/pause.tar >/dev/null; done
list >/run/before

cd /root
tar -xzf /run/archive.tar.gz
pyshim-*/install --restart
echo "kernel of the node: $(uname -r)"
echo "kernel of the pod: $(ctr run --rm --runtime io.containerd.pykata.v2 {_PAUSE} pod uname -r)"

pyshim status --json >/dev/null
pyshim-*/install --restart | tail -n 1
pyshim uninstall --restart >/dev/null
list >/run/after
diff /run/before /run/after
echo "removed: the files are as before"
"""


def make() -> None:
    """The systems are in the cache. Raises CalledProcessError, OSError."""
    with one_build(_CACHE):
        for suite, packages in _SUITES.items():
            root, aside = _CACHE / suite, _CACHE / f"{suite}~"
            if root.exists():
                continue
            print(f"==> debootstrap {suite}, with what a node has", flush=True)
            shutil.rmtree(aside, ignore_errors=True)
            with (_CACHE / f"{suite}.log").open("wb") as log:
                subprocess.run(["debootstrap", "--variant=minbase", suite, aside], check=True, stdout=log, stderr=log)
                shutil.copy("/etc/resolv.conf", aside / "etc")
                policy = aside / "usr" / "sbin" / "policy-rc.d"
                policy.write_text("#!/bin/sh\nexit 101\n")
                policy.chmod(0o755)
                install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
                for command in (["apt-get", "update"], ["env", "DEBIAN_FRONTEND=noninteractive", *install]):
                    subprocess.run(["chroot", aside, *command], check=True, stdout=log, stderr=log)
            aside.rename(root)


def try_archive(archive: Path, name: str) -> str:
    """What the trial in the system of this name printed. Raises CalledProcessError with it."""
    ground = _GROUND / name
    root = ground / "root"
    for directory in ("upper", "work", "root"):
        (ground / directory).mkdir(parents=True)
    layers = f"lowerdir={_CACHE / ROOTS[name]},upperdir={ground}/upper,workdir={ground}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, name, root], check=True)
    for top in ("dev", "sys"):
        subprocess.run(["mount", "--rbind", f"/{top}", root / top], check=True)
    (root / "var" / "lib" / "containerd").mkdir(exist_ok=True)
    for own in ("run", "var/lib/containerd"):
        subprocess.run(["mount", "-t", "tmpfs", name, root / own], check=True)
    if name == "without-apt":
        shutil.rmtree(root / "var" / "lib" / "dpkg")
        for program in ("apt", "apt-get", "apt-cache", "dpkg", "dpkg-query", "dpkg-deb"):
            (root / "usr" / "bin" / program).unlink()
    files = {
        CONFIG: _CONTAINERD,
        Path("/etc/cni/net.d/10-bare.conflist"): _CONFLIST,
        Path("/usr/local/sbin/systemctl"): _SYSTEMCTL,
    }
    for path, content in files.items():
        place = root / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
        place.chmod(0o755)
    images.write_archive(root / "run" / "pause.tar", _PAUSE, ("sleep", "100000"))
    shutil.copy(archive, root / "run" / "archive.tar.gz")
    # A root of its own, not a chroot; in it QEMU and virtiofsd get views of their own.
    (root / "run" / "host").mkdir()
    enter = f"cd {root} && pivot_root . run/host && mount -t proc proc /proc && umount -l /run/host"
    enter += f" && exec sh -c {shlex.quote(_TRIAL)}"
    search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter],
        env={"PATH": search, "HOME": "/root", "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        log = root / "run" / "containerd.log"
        said = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        raise subprocess.CalledProcessError(done.returncode, f"trial in {name}", done.stdout + said)
    return done.stdout


def main(words: list[str]) -> int:
    if words == ["make"]:
        make()
        return 0
    if len(words) < 2 or words[0] != "try" or set(words[2:]) - ROOTS.keys():
        print(f"bare_roots: say make, or try ARCHIVE and some of {', '.join(ROOTS)}", file=sys.stderr)
        return 2
    archive, failed = Path(words[1]), 0
    for name in words[2:] or ROOTS:
        began_s = time.monotonic()
        try:
            output, word = try_archive(archive, name), "ok"
        except subprocess.CalledProcessError as error:
            output, word, failed = error.output, "FAILED", failed + 1
        print(f"{output}==> {name}: {word} after {time.monotonic() - began_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
