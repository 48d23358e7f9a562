"""Images in place of the suites', which are pulled from public registries: busybox, and programs that act as theirs.

The enclosure has no network, so a registry of ours serves these in their place. An image that a suite names by digest
cannot be replaced.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from integration.framework.images import BUSYBOX, Blobs, image_blobs, layer, payload_layers

# nginx as the suite looks for it: a process of this name, a pid file, a page. $1 is the port.
_WEB_SERVER = """\
#!/bin/sh
mkdir -p /var/run
echo "httpd is up"
echo $$ > /var/run/nginx.pid
httpd -p "$1" -h /www
trap 'exit 0' TERM INT QUIT
while :; do sleep 1000 & wait $!; done
"""
_SHOWS_USER = (
    '#include <stdio.h>\n#include <unistd.h>\nint main(void) {\n    printf("Effective uid: %u\\n", geteuid());\n}\n'
)
# Of `stress -m 1 --vm-bytes 100M --vm-hang 0 -t 30`.
_HOLDS_MEMORY = """\
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    size_t size = 104 << 20;
    volatile char *held = malloc(size);
    if (!held) return 1;
    for (size_t at = 0; at < size; at += 4096) held[at] = 1;
    return sleep(30);
}
"""
# What containerd's suite looks for in volumes, one per file.
_VOLUMES = {
    "/test_dir": "test_dir/test_file",
    "C:/weird_test_dir": "C:/weird_test_dir/weird_test_file",
    "/:colon_prefixed": ":colon_prefixed/colon_prefixed_file",
}
# The static busybox of the distribution has neither.
_PROGRAMS = {
    "bin/ipcs": "#!/bin/sh\ncat /proc/sysvipc/shm\n",
    "bin/pgrep": '#!/bin/sh\nfor one in /proc/[0-9]*; do [ "$(cat $one/comm)" != "$1" ] || echo ${one#/proc/}; done\n',
}
_PLAIN = {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/home:/bin/false\n"}
_PREDEFINED = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\ndefault-user:x:1000:1000::/home:/bin/sh\n",
    "etc/group": "root:x:0:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
}
# As in busybox's image.
_BUSYBOX_USERS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/usr/sbin:/bin/false\n",
    "etc/group": "root:x:0:\ndaemon:x:1:\nwheel:x:10:root\n",
}
_TEST_IMAGES = "k8s-staging-cri-tools"
_E2E = "e2e-test-images"
_CONTAINERD = "containerd"
_NOBODY = 65534


@dataclass(slots=True)
class SuiteImages:
    """Manifests by (repository, tag), and every blob by digest."""

    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    blobs: Blobs = field(default_factory=dict)

    def add(self, name: str, more_layers: tuple[bytes, ...] = (), **settings: object) -> None:
        """The image `REPOSITORY:TAG`: busybox with further layers and settings."""
        digest, blobs = image_blobs(
            (*payload_layers(), *more_layers), {"Labels": {"image": name.partition(":")[0]}, **settings}
        )
        self.blobs |= blobs
        repository, _, tag = name.partition(":")
        self.tags[repository, tag] = digest

    def digest(self, repository: str, reference: str) -> str | None:
        """Of the manifest that a tag or a digest names."""
        return reference if reference in self.blobs else self.tags.get((repository, reference))


def suite_images(scratch: Path) -> SuiteImages:
    """All of them. Builds two small programs in `scratch`."""
    made = SuiteImages()
    files = {name: text.encode() for name, text in _PLAIN.items()}
    # A program of its own, as in busybox's image: the suite masks this path, and here all others are links to one file.
    scripts = {name: text.encode() for name, text in _PROGRAMS.items()}
    programs = layer({"bin/ls": BUSYBOX.read_bytes(), **scripts}, mode=0o755)
    made.add(f"{_E2E}/busybox:1.29-2", (layer(files, mode=0o644), programs))
    server = layer({"bin/nginx": _WEB_SERVER.encode(), "www/index.html": b"it works\n"}, mode=0o755)
    for name, port in ((f"{_E2E}/nginx:1.14-2", "80"), (f"{_E2E}/httpd:2.4.39-4", "80")):
        made.add(name, (server,), Entrypoint=["nginx", port, "master process"])
    host_port = ["nginx", "12003", "master process"]
    made.add(f"{_TEST_IMAGES}/hostnet-nginx-amd64:latest", (server,), Entrypoint=host_port)
    setuid = layer({"nnp": _program(scratch, _SHOWS_USER)}, mode=0o4755)
    made.add(f"{_E2E}/nonewprivs:1.3", (setuid,), Entrypoint=["/nnp"])
    made.add("pause:3.9", Entrypoint=["sleep", "100000"])
    made.add("pause:3.10.2", (layer({"pause": b""}, mode=0o755),), Entrypoint=["tail", "-f", "/dev/null"])
    named = layer({name: text.encode() for name, text in _BUSYBOX_USERS.items()}, mode=0o644)
    for name in ("busybox:1.36", "alpine:3.14.0"):
        made.add(f"{_CONTAINERD}/{name}", (named,))
    stress = layer({"bin/stress": _program(scratch, _HOLDS_MEMORY)}, mode=0o755)
    made.add(f"{_E2E}/resource-consumer:1.10", (stress,), Entrypoint=["tail", "-f", "/dev/null"])
    volumes = layer(dict.fromkeys(_VOLUMES.values(), b"test_content\n"), mode=0o644)
    made.add(f"{_CONTAINERD}/volume-copy-up:2.2", (volumes,), Volumes={name: {} for name in _VOLUMES})
    owned = layer({"test_dir/": b""}, mode=0o755, owner=_NOBODY)
    made.add(f"{_CONTAINERD}/volume-ownership:2.1", (owned,), Volumes={"/test_dir": {}})
    groups = layer({name: text.encode() for name, text in _PREDEFINED.items()}, mode=0o644)
    made.add(f"{_TEST_IMAGES}/test-image-predefined-group:latest", (groups,), User="1000")
    users = {"uid": "1002", "username": "www-data", "uid-group": "1003:50", "username-group": "www-data:50"}
    for name, user in users.items():
        made.add(f"{_TEST_IMAGES}/test-image-user-{name}:latest", User=user)
    for name in ("latest", "1", "2", "3"):
        made.add(f"{_TEST_IMAGES}/test-image-{name}:latest")
    for name in ("tag:test", "tag:all", "tags:1", "tags:2", "tags:3"):
        made.add(f"{_TEST_IMAGES}/test-image-{name}")
    return made


def _program(scratch: Path, text: str) -> bytes:
    """A static program of this C source."""
    source, program = scratch / "program.c", scratch / "program"
    source.write_text(text)
    subprocess.run(["gcc", "-Os", "-static", "-s", "-o", program, source], check=True)
    return program.read_bytes()
