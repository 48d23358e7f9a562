"""The table: what each verb of `docker` shows with runc and with pyshim. What may differ says why (docs/DOCKER.md)."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from integration.framework.ctr import Result
from integration.framework.waiting import eventually

from .engine import BY_PATH, IMAGE, RUNC, Docker

SERVE = "echo it works > /index.html; echo started; echo went wrong >&2; exec httpd -f -p 80"
ENDS_BY_TERM = "trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
IGNORES_TERM = "trap '' TERM; echo ready; while :; do sleep 0.1; done"


@dataclass(kw_only=True)
class Scene:
    """One runtime's turn: containers and networks with its name in theirs."""

    docker: Docker
    runtime: str
    ground: Path
    port: int
    made: list[str] = field(default_factory=list)

    def named(self, name: str) -> str:
        return f"{self.runtime}-{name}"

    def run(self, *words: str | Path, input: bytes | None = None) -> Result:
        """A container to its end; words are options and, after the image, its command: `*options, IMAGE, *command`."""
        return self.docker("run", "--rm", "--runtime", self.runtime, *words, input=input, check=False)

    def start(self, name: str, *words: str | Path) -> str:
        """A container that runs in the background. Its whole name."""
        whole = self.named(name)
        self.docker("run", "--detach", "--runtime", self.runtime, "--name", whole, *words)
        return whole

    @property
    def main(self) -> str:
        return self.named("main")

    def exec(self, *words: str | Path) -> Result:
        return self.docker("exec", *words, check=False)

    def said(self, name: str, text: str) -> None:
        eventually(lambda: text in self.docker("logs", name).out, what=f"{name} prints {text!r}", every_s=0.3)

    def ended(self, name: str) -> str:
        return self.docker("wait", name).out.strip()

    def links(self, name: str) -> str:
        return " ".join(sorted(self.exec(name, "ls", "/sys/class/net").lines))


def shown(result: Result) -> str:
    return f"{result.code}: {' / '.join(result.lines)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    name: str
    look: Callable[[Scene], str]
    differs: str = ""
    """Why pyshim's column may differ from runc's."""


VERBS: list[Verb] = []


def verb(name: str, differs: str = "") -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """The function is the look of the next row."""

    def add(look: Callable[[Scene], str]) -> Callable[[Scene], str]:
        VERBS.append(Verb(name=name, look=look, differs=differs))
        return look

    return add


# ---- one command


@verb("run -e -u -w -h -v --network none")
def _run(scene: Scene) -> str:
    share = scene.ground / scene.named("share")
    share.mkdir()
    share.chmod(0o777)
    (share / "file").write_text("from the host\n")
    script = "echo $GREETING; id -u; id -g; pwd; hostname; cat /data/file; echo back > /data/back; exit 7"
    words = ("-e", "GREETING=hello", "-u", "1000:50", "-w", "/tmp", "-h", "one", "-v", f"{share}:/data")
    done = scene.run(*words, "--network", "none", IMAGE, "sh", "-c", script)
    return f"{shown(done)}; {(share / 'back').read_text().strip()}"


@verb("run -i")
def _run_input(scene: Scene) -> str:
    return shown(scene.run("-i", "--network", "none", IMAGE, "wc", "-c", input=b"four"))


@verb("run, no such program")
def _missing(scene: Scene) -> str:
    done = scene.run("--network", "none", IMAGE, "no-such-program")
    return f"{done.code}: {'executable file not found in $PATH' in done.err}"


@verb("run, a file that is no program, a directory")
def _no_program(scene: Scene) -> str:
    return " ".join(str(scene.run("--network", "none", IMAGE, path).code) for path in ("/etc/passwd", "/etc"))


@verb("run --read-only --tmpfs --ulimit --shm-size --cap-drop --sysctl --add-host --dns")
def _options(scene: Scene) -> str:
    script = (
        "touch /x 2>&1; touch /t/x && echo tmpfs; ulimit -n; df -m /dev/shm | tail -1 | awk '{print $2}';"
        "grep CapEff /proc/self/status; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; grep somewhere /etc/hosts;"
        "grep nameserver /etc/resolv.conf; cat /sys/class/net/eth0/address"
    )
    words = ("--read-only", "--tmpfs", "/t", "--ulimit", "nofile=123:123", "--shm-size", "32m", "--cap-drop", "ALL")
    network = ("--sysctl", "net.ipv4.ip_unprivileged_port_start=77", "--mac-address", "02:42:0a:e6:00:77")
    names = ("--add-host", "somewhere:10.230.0.9", "--dns", "10.230.0.8")
    return shown(scene.run(*words, *network, *names, IMAGE, "sh", "-c", script))


@verb("run --privileged")
def _privileged(scene: Scene) -> str:
    script = "mount -t tmpfs none /mnt && echo mounted; grep CapEff /proc/self/status; test -e /dev/net/tun && echo tun"
    return shown(scene.run("--privileged", "--network", "none", IMAGE, "sh", "-c", f"mkdir -p /mnt; {script}"))


@verb("run --init, stop")
def _init(scene: Scene) -> str:
    name = scene.start("init", "--init", "--network", "none", IMAGE, "sleep", "1000")
    scene.docker("stop", "--time", "60", name)
    return scene.ended(name)


@verb("run -m 64m, more memory used")
def _oom(scene: Scene) -> str:
    script = "x=y; while :; do x=$x$x; done"
    name = scene.start("oom", "-m", "64m", "--memory-swap", "64m", "--network", "none", IMAGE, "sh", "-c", script)
    code = scene.ended(name)
    return f"{code}, OOMKilled {scene.docker.inspect(name, '.State.OOMKilled')}"


@verb("run --restart on-failure:2")
def _restarts(scene: Scene) -> str:
    name = scene.start("again", "--restart", "on-failure:2", "--network", "none", IMAGE, "sh", "-c", "exit 3")
    eventually(
        lambda: (
            scene.docker.inspect(name, ".RestartCount") == 2 and scene.docker.inspect(name, ".State.Status") == "exited"
        ),
        what="the container was restarted twice",
        within_s=600,
        every_s=0.5,
    )
    return str(scene.docker.inspect(name, ".State.ExitCode"))


@verb("volume: written by one container, read by the next and by one beside it")
def _volume(scene: Scene) -> str:
    volume = f"{scene.named('volume')}:/v"
    scene.run("-v", volume, "--network", "none", IMAGE, "sh", "-c", "echo kept > /v/file")
    beside = scene.start("reader", "-v", volume, "--network", "none", IMAGE, "sleep", "1000")
    read = scene.run("-v", volume, "--network", "none", IMAGE, "sh", "-c", "cat /v/file; echo changed > /v/file")
    return f"{shown(read)}; {shown(scene.exec(beside, 'cat', '/v/file'))}"


# ---- a container that serves


@verb("run -d -p -m --cpus --health-cmd")
def _serve(scene: Scene) -> str:
    health = ("--health-cmd", "wget -qO- http://127.0.0.1/", "--health-interval", "2s", "--health-timeout", "60s")
    scene.start("main", "-p", f"{scene.port}:80", "-m", "128m", "--cpus", "0.5", *health, IMAGE, "sh", "-c", SERVE)
    scene.said(scene.main, "started")
    return " ".join(map(str, (scene.docker.inspect(scene.main, f".State.{part}") for part in ("Status", "Running"))))


@verb("logs")
def _logs(scene: Scene) -> str:
    done = scene.docker("logs", scene.main)
    return f"{done.out.strip()} / {done.err.strip()}"


@verb("ps")
def _ps(scene: Scene) -> str:
    (line,) = scene.docker("ps", "--filter", f"name={scene.main}", "--format", "{{.State}} {{.Ports}}").lines
    return line.replace(str(scene.port), "PORT")


@verb("port, and the published port from the host")
def _published(scene: Scene) -> str:
    port = scene.docker("port", scene.main).lines[0].replace(str(scene.port), "PORT")
    return f"{port}: {fetched(scene.port)}"


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        return str(answer.read().decode().strip())


@verb("health")
def _health(scene: Scene) -> str:
    eventually(
        lambda: scene.docker.inspect(scene.main, ".State.Health.Status") == "healthy", what="healthy", every_s=0.5
    )
    return "healthy"


@verb("exec -e -w -u, exec -i, exec -t, exit code")
def _exec(scene: Scene) -> str:
    done = scene.exec("-e", "A=b", "-w", "/tmp", "-u", "1000", scene.main, "sh", "-c", "echo $A; pwd; id -u; exit 3")
    piped = scene.docker("exec", "-i", scene.main, "wc", "-c", input=b"four")
    terminal = scene.exec("-t", scene.main, "sh", "-c", "test -t 1 && echo terminal")
    return f"{shown(done)}; {shown(piped)}; {shown(terminal)}"


@verb("top", "the processes are in the guest: Docker looks for them on the host, and finds the VM's")
def _top(scene: Scene) -> str:
    done = scene.docker("top", scene.main, check=False)
    return f"{done.code}: {'httpd' if 'httpd' in done.out else 'qemu' if 'qemu' in done.out else done.out[:60]}"


@verb("stats --no-stream")
def _stats(scene: Scene) -> str:
    words = ("--no-stream", "--format", "{{.MemUsage}} {{.PIDs}} {{.NetIO}}")
    used, _, limit, pids, received, _, _sent = scene.docker("stats", *words, scene.main).out.split()
    return f"limit {limit}, used {used != '0B'}, processes {int(pids) > 0}, network {received != '0B'}"


@verb("cp in and out")
def _cp(scene: Scene) -> str:
    source, target = scene.ground / scene.named("in"), scene.ground / scene.named("out")
    source.write_text("copied\n")
    scene.docker("cp", source, f"{scene.main}:/tmp/copied")
    inside = scene.exec(scene.main, "cat", "/tmp/copied")
    scene.docker("cp", f"{scene.main}:/index.html", target)
    return f"{shown(inside)}; {target.read_text().strip()}"


@verb("diff, commit, export")
def _diff(scene: Scene) -> str:
    changed = "A /index.html" in scene.docker("diff", scene.main).lines
    image = f"{scene.main}:committed"
    scene.docker("commit", scene.main, image)
    again = scene.run("--network", "none", image, "cat", "/index.html")
    scene.docker("rmi", image)
    exported = b"it works" in scene.docker("export", scene.main).stdout
    return f"{changed} {shown(again)} {exported}"


@verb("pause, unpause")
def _pause(scene: Scene) -> str:
    scene.docker("pause", scene.main)
    paused = scene.docker.inspect(scene.main, ".State.Status")
    scene.docker("unpause", scene.main)
    return f"{paused}, {shown(scene.exec(scene.main, 'echo', 'again'))}"


@verb("update -m --cpus, below what the VM has")
def _update(scene: Scene) -> str:
    scene.docker("update", "-m", "96m", "--memory-swap", "96m", "--cpus", "1", scene.main)
    limit = scene.docker("stats", "--no-stream", "--format", "{{.MemUsage}}", scene.main).out.split()[-1]
    return f"{limit} {scene.docker.inspect(scene.main, '.HostConfig.NanoCpus')}"


@verb("network connect, disconnect")
def _networks(scene: Scene) -> str:
    network = scene.named("other")
    scene.docker("network", "create", network)
    before = scene.links(scene.main)
    scene.docker("network", "connect", network, scene.main)
    eventually(lambda: "eth1" in scene.links(scene.main), what="the second interface", every_s=0.5)
    address = scene.docker.inspect(scene.main, f'(index .NetworkSettings.Networks "{network}").IPAddress')
    inside = str(address) in scene.exec(scene.main, "ip", "addr", "show", "dev", "eth1").out
    scene.docker("network", "disconnect", network, scene.main)
    eventually(lambda: "eth1" not in scene.links(scene.main), what="the second interface is gone", every_s=0.5)
    scene.docker("network", "rm", network)
    return f"{before}; {inside}; {scene.links(scene.main)}; {fetched(scene.port)}"


@verb("rename, restart")
def _restart(scene: Scene) -> str:
    scene.docker("rename", scene.main, scene.named("renamed"))
    scene.docker("rename", scene.named("renamed"), scene.main)
    scene.docker("restart", "--time", "1", scene.main)
    eventually(lambda: scene.docker("logs", scene.main).out.count("started") == 2, what="it runs again", every_s=0.3)
    eventually(lambda: _answers(scene.port), what="it serves again", every_s=0.5)
    return fetched(scene.port)


def _answers(port: int) -> bool:
    try:
        return bool(fetched(port))
    except OSError:
        return False


@verb("kill, wait, start, rm -f")
def _kill(scene: Scene) -> str:
    scene.docker("kill", scene.main)
    code = scene.ended(scene.main)
    scene.docker("start", scene.main)
    running = scene.docker.inspect(scene.main, ".State.Running")
    scene.docker("rm", "--force", scene.main)
    left = scene.docker("ps", "--all", "--quiet", "--filter", f"name={scene.main}").lines
    return f"{code} {running} {left}"


@verb("stop, of what takes TERM and of what ignores it; kill -s")
def _stop(scene: Scene) -> str:
    found = []
    for name, script, seconds in (("takes", ENDS_BY_TERM, "60"), ("ignores", IGNORES_TERM, "1")):
        container = scene.start(name, "--network", "none", IMAGE, "sh", "-c", script)
        scene.said(container, "ready")
        scene.docker("stop", "--time", seconds, container)
        found.append(scene.ended(container))
    hup = scene.start(
        "hup", "--network", "none", IMAGE, "sh", "-c", "trap 'exit 5' HUP; echo ready; while :; do sleep 0.1; done"
    )
    scene.said(hup, "ready")
    scene.docker("kill", "--signal", "HUP", hup)
    return f"{found} {scene.ended(hup)}"


@verb("events of a life")
def _events(scene: Scene) -> str:
    since = time.time()
    name = scene.named("events")
    scene.run("--name", name, "--network", "none", IMAGE, "sh", "-c", "exit 4")
    words = ("--since", f"{since:.3f}", "--until", f"{time.time():.3f}", "--filter", f"container={name}")
    shows = "{{.Action}} {{.Actor.Attributes.exitCode}}"
    return ", ".join(
        line.replace(" <no value>", "").strip() for line in scene.docker("events", *words, "--format", shows).lines
    )


# ---- networks


@verb("a network of one's own: names, aliases, both ways, IPv6")
def _names(scene: Scene) -> str:
    network = scene.named("net")
    subnet = f"fd00:{scene.port:x}::/64"
    scene.docker("network", "create", "--ipv6", "--subnet", subnet, network)
    server = scene.start("server", "--network", network, "--network-alias", "web", IMAGE, "sh", "-c", SERVE)
    scene.said(server, "started")
    script = (
        f"wget -qO- http://{server}/; wget -qO- http://web/; nslookup -type=aaaa web | grep -c fd00;"
        "nslookup no-such > /dev/null; echo $?"
    )
    client = scene.run("--network", network, IMAGE, "sh", "-c", script)
    beside = scene.docker("run", "--rm", "--network", network, IMAGE, "wget", "-qO-", "http://web/", check=False)
    return f"{shown(client)}; {shown(beside)}"


@verb("run --network A --network B")
def _two(scene: Scene) -> str:
    networks = [scene.named("a"), scene.named("b")]
    for network in networks:
        scene.docker("network", "create", network)
    script = "ls /sys/class/net; ip route | grep -c default; ip route | grep -c src"
    done = scene.run("--network", networks[0], "--network", networks[1], IMAGE, "sh", "-c", script)
    return shown(done)


@verb("network rm while attached")
def _attached(scene: Scene) -> str:
    network = scene.named("net")
    done = scene.docker("network", "rm", network, check=False)
    forced = scene.docker("network", "disconnect", "--force", network, scene.named("server"), check=False)
    return f"{done.code} {forced.code} {shown(scene.exec(scene.named('server'), 'echo', 'runs'))}"


# ---- what a VM cannot share with its host


@verb("run --network container:X, twice", "a VM has a network namespace of its own")
def _shared_network(scene: Scene) -> str:
    words = ("--network", f"container:{scene.named('server')}", IMAGE, "echo", "shared")
    codes = [scene.run(*words).code for _ in range(2)]
    return f"{codes} {shown(scene.exec(scene.named('server'), 'echo', 'runs'))}"


@verb("run --network host", "a VM cannot have the host's network")
def _host_network(scene: Scene) -> str:
    return str(scene.run("--network", "host", IMAGE, "true").code)


@verb("run --pid host", "the guest's processes are all that a VM has")
def _host_pid(scene: Scene) -> str:
    done = scene.run("--pid", "host", "--network", "none", IMAGE, "sh", "-c", "cat /proc/1/comm")
    return f"{done.code} {'dockerd' in done.out or 'python' in done.out}"


@verb("run --ipc host --uts host", "the guest's, not the host's")
def _host_ipc(scene: Scene) -> str:
    marker = Path("/dev/shm", scene.named("marker"))
    marker.touch()
    try:
        done = scene.run("--ipc", "host", "--uts", "host", "--network", "none", IMAGE, "ls", f"/dev/shm/{marker.name}")
    finally:
        marker.unlink()
    return str(done.code)


@verb("update -m, above what the VM has", "a VM cannot have more than its host allows it")
def _update_above(scene: Scene) -> str:
    name = scene.start("large", "-m", "64m", "--network", "none", IMAGE, "sleep", "1000")
    done = scene.docker("update", "-m", "64g", "--memory-swap", "64g", name, check=False)
    return f"{done.code} {shown(scene.exec(name, 'echo', 'runs'))}"


@verb("daemon.json names the shim by path: the error says by what to name it")
def _by_path(scene: Scene) -> str:
    if scene.runtime == RUNC:
        return "said"  # what the other column has to show
    done = scene.docker("run", "--rm", "--runtime", BY_PATH, "--network", "none", IMAGE, "true", check=False)
    return "said" if "Docker names it by runtimeType, not by path" in done.err else f"{done.code}: {done.err}"


@verb("checkpoint create")
def _checkpoint(scene: Scene) -> str:
    return str(scene.docker("checkpoint", "create", scene.named("server"), "one", check=False).code)
