"""Images pulled in the guest: names, sources, layers. What is wrong with an image never becomes a directory of it."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from guest_agent_client import CallError, HostedAgent

from guest.agent.pull.__main__ import open_source
from guest.agent.pull.images import pause_root
from guest.agent.pull.layers import make_image
from guest.agent.pull.sources import PullError, Reference, get, image_of
from protos.agent import agent_pb2

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
NAME = "registry.example/team/app:v1"


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def layer(*members: tuple[tarfile.TarInfo, bytes], packed: bool = True) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue()) if packed else buffer.getvalue()


class Layout:
    """An OCI image layout being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)

    def blob(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        value = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / value).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{value}", "size": len(data), **more}

    def image(self, *layers: bytes, kind: str = "application/vnd.oci.image.layer.v1.tar+gzip") -> dict[str, Any]:
        described = [self.blob(data, kind) for data in layers]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": described}
        return self.blob(json.dumps(manifest).encode(), MANIFEST)

    def publish(self, descriptor: dict[str, Any], name: str = NAME) -> None:
        listed = {**descriptor, "annotations": {"io.containerd.image.name": name}}
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [listed]}))

    @property
    def source(self) -> str:
        return f"oci:{self.path}"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def made(layout: Layout, tmp_path: Path, name: str = NAME) -> Path:
    return Path(make_image(open_source(layout.source), name, str(tmp_path / "images")))


@pytest.mark.parametrize(
    ("name", "repository", "version"),
    [
        ("busybox", "busybox", "latest"),
        ("docker.io/busybox:1", "library/busybox", "1"),
        ("docker.io/a/b:1", "a/b", "1"),
        ("localhost:5000/a:2", "a", "2"),
        ("quay.io/a/b@sha256:" + "0" * 64, "a/b", "sha256:" + "0" * 64),
        ("quay.io/a/b:tag@sha256:" + "0" * 64, "a/b", "sha256:" + "0" * 64),
    ],
)
def test_a_name_is_taken_apart(name: str, repository: str, version: str) -> None:
    reference = Reference(name)

    assert (reference.repository, reference.version) == (repository, version)


@pytest.mark.parametrize("name", ["", "A", "a:", "a@sha256:0", "a/../b", "a b", "a?x", "a" * 2000, "a@md5:0"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(PullError, match="is no name of an image"):
        Reference(name)


@pytest.mark.root
def test_a_pull_leaves_root_and_working_directory_as_they_were(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layout.publish(layout.image(layer(entry("a", b"a"))))
    before = [os.stat(place) for place in ("/", ".")]

    made(layout, tmp_path)

    assert all(os.path.samestat(was, os.stat(place)) for was, place in zip(before, ("/", "."), strict=True))


@pytest.mark.root
def test_layers_lie_on_each_other(layout: Layout, tmp_path: Path) -> None:
    lower = layer(
        folder("d", 0o750),
        entry("d/kept", b"kept"),
        entry("d/gone", b"gone"),
        entry("changed", b"old"),
        folder("opaque"),
        entry("opaque/hidden", b"x"),
        entry("file-then-folder", b"x"),
        entry("owned", b"o", uid=1000, gid=50, mode=0o4755, mtime=1000),
    )
    upper = layer(
        entry("d/.wh.gone"),
        entry("changed", b"new"),
        entry("opaque/shown", b"y"),
        entry("opaque/.wh..wh..opq"),
        folder("file-then-folder"),
        link("soft", "/d/kept"),
        link("hard", "d/kept", tarfile.LNKTYPE),
        entry("pipe", type=tarfile.FIFOTYPE),
        entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    )
    layout.publish(layout.image(lower, upper))

    root = made(layout, tmp_path)

    assert sorted(os.listdir(root / "d")) == ["kept"]
    assert (root / "changed").read_text() == "new"
    assert os.listdir(root / "opaque") == ["shown"]
    assert (root / "file-then-folder").is_dir()
    assert os.readlink(root / "soft") == "/d/kept"
    assert (root / "hard").stat().st_ino == (root / "d/kept").stat().st_ino
    assert (root / "pipe").is_fifo()
    assert (root / "null").stat().st_rdev == os.makedev(1, 3)
    owned = (root / "owned").stat()
    assert (owned.st_uid, owned.st_gid, stat.S_IMODE(owned.st_mode), owned.st_mtime) == (1000, 50, 0o4755, 1000)
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o750


@pytest.mark.root
def test_no_link_of_a_layer_leads_out_of_the_image(layout: Layout, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    bad = layer(
        link("way", str(victim)),
        entry("way/planted", b"x"),
        link("up", "../../../../../../../../" + str(victim)),
        entry("up/planted", b"x"),
        link("file", str(victim / "target")),
        entry("file", b"x"),
    )
    layout.publish(layout.image(bad))

    try:
        root = made(layout, tmp_path)
    except (PullError, OSError):
        root = None

    assert os.listdir(victim) == []
    assert root is None or (root / "file").read_bytes() == b"x"


@pytest.mark.root
def test_an_image_that_is_there_is_not_pulled_again(layout: Layout, tmp_path: Path) -> None:
    layout.publish(layout.image(layer(entry("a", b"1"))))
    first = made(layout, tmp_path)
    for blob in (layout.path / "blobs/sha256").iterdir():
        if b'"layers"' not in blob.read_bytes():
            blob.unlink()

    assert made(layout, tmp_path) == first


def tampered(layout: Layout, descriptor: dict[str, Any]) -> None:
    path = layout.path / "blobs" / descriptor["digest"].replace(":", "/")
    path.write_bytes(path.read_bytes()[:-1] + b"X")


@pytest.mark.root
@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda lay: lay.image(layer(entry("../a"))), "has the name '../a'"),
        (lambda lay: lay.image(b"not gzip"), "not gzip"),
        (lambda lay: lay.image(gzip.compress(b"not a tar archive" * 100)), "not a tar archive"),
        (lambda lay: lay.image(layer(entry("a", os.urandom(100_000)))[:-2000]), "not a tar archive"),
        (
            lambda lay: lay.image(layer(entry("a")), kind="application/vnd.oci.image.layer.v1.tar+zstd"),
            "cannot be unpacked",
        ),
        (lambda lay: lay.image(), "has no layers"),
        (lambda lay: lay.blob(b"[]", MANIFEST), "no object"),
        (lambda lay: lay.blob(b"{", MANIFEST), "not JSON"),
        (lambda lay: lay.blob(b'{"layers":[{}]}', MANIFEST), "descriptor without digest"),
        (lambda lay: lay.blob(b'{"manifests":[]}', INDEX), "has no image for linux on amd64"),
        (lambda lay: lay.blob(b"{" + b" " * (5 << 20), MANIFEST), "longer than"),
    ],
)
def test_a_broken_image_is_an_error_and_leaves_nothing(
    layout: Layout, tmp_path: Path, build: Callable[[Layout], dict[str, Any]], named: str
) -> None:
    layout.publish(build(layout))

    with pytest.raises(PullError, match=named):
        made(layout, tmp_path)

    assert not (tmp_path / "images").exists() or os.listdir(tmp_path / "images") == []


@pytest.mark.root
def test_a_layer_of_another_digest_is_never_used(layout: Layout, tmp_path: Path) -> None:
    data = layer(entry("a", b"1"), packed=False)
    kind = "application/vnd.oci.image.layer.v1.tar"
    layout.publish(layout.image(data, kind=kind))
    tampered(layout, layout.blob(data, kind))

    with pytest.raises(PullError, match="has another digest"):
        made(layout, tmp_path)

    assert os.listdir(tmp_path / "images") == []


@pytest.mark.root
def test_an_index_leads_to_this_machines_image(layout: Layout, tmp_path: Path) -> None:
    ours, theirs = (layout.image(layer(entry("arch", name))) for name in (b"amd64", b"arm64"))
    platforms = [
        {**image, "platform": {"os": "linux", "architecture": arch}}
        for image, arch in ((theirs, "arm64"), (ours, "amd64"))
    ]
    layout.publish(layout.blob(json.dumps({"mediaType": INDEX, "manifests": platforms}).encode(), INDEX))

    assert (made(layout, tmp_path) / "arch").read_text() == "amd64"


def test_a_layout_without_the_image_says_what_it_has(layout: Layout) -> None:
    layout.publish(layout.image(layer()), "docker.io/library/other:1")

    with pytest.raises(PullError, match=r"has no 'registry.example/team/app:v1', but docker.io/library/other:1"):
        image_of(open_source(layout.source), NAME)


@pytest.mark.parametrize("text", ["", "https://x", "oci:relative", "file:///x"])
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(PullError, match="is no source of images"):
        open_source(text)


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    raw: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self.close_connection = True
        self.wfile.write(self.raw.get(self.path, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()
    Answers.raw = {}


def body(url: str) -> bytes:
    reply = get(url, "*/*")
    try:
        return b"".join(iter(lambda: reply.read(3), b""))
    finally:
        reply.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nlayer 1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nlayer\r\n2\r\n 1\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nlayer 1",
    ],
    ids=["length", "chunks", "until-the-end"],
)
def test_every_way_to_end_a_body_is_understood(server: str, answer: bytes) -> None:
    Answers.raw = {"/x": answer, "/moved": b"HTTP/1.1 307 T\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"}

    assert body(f"{server}/moved") == b"layer 1"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "ended 4 bytes early"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no length of a chunk"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "is no number"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "wants authentication"),
        (b"HTTP/1.1 302 F\r\nLocation: https://x/\r\n\r\n", "plain HTTP only"),
        (b"HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "redirected more than"),
        (b"SSH-2.0-x\r\n", "not an answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 20000, "line too long"),
        (b"", "ends within its head"),
    ],
)
def test_a_registry_that_answers_wrongly_is_an_error(server: str, answer: bytes, named: str) -> None:
    Answers.raw = {"/x": answer}

    with pytest.raises(PullError, match=named):
        body(f"{server}/x")


def test_a_registry_that_is_not_there_is_named() -> None:
    with pytest.raises(PullError, match=r"connect '127\.0\.0\.1:1'"):
        get("http://127.0.0.1:1/v2/", "*/*")


@pytest.mark.skipif(not os.path.exists("/bin/busybox"), reason="needs /bin/busybox")
def test_the_pause_containers_root_is_made_once_and_can_run(tmp_path: Path) -> None:
    root = pause_root(str(tmp_path))

    assert pause_root(str(tmp_path)) == root
    assert os.access(f"{root}/pause", os.X_OK)
    assert os.readlink(f"{root}/bin/sh") == "busybox"
    assert os.access(f"{root}/bin/sleep", os.X_OK)


@pytest.mark.root
def test_a_container_runs_on_a_root_that_the_agent_has_pulled(layout: Layout, tmp_path: Path) -> None:
    busybox = Path("/bin/busybox").read_bytes()
    folders = [folder(name) for name in ("bin", "dev", "proc", "sys")]
    layout.publish(layout.image(layer(*folders, entry("bin/echo", busybox, mode=0o755))))
    agent = HostedAgent(tmp_path, f"agent.image_source={layout.source}")
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s"))
        for name, image in (("one", NAME), ("two", NAME), ("gone", "no/such:image")):
            root = f"/run/kata-containers/{name}/rootfs"
            storage = agent_pb2.Storage(driver="image_guest_pull", source=image, mount_point=root)
            spec = agent.spec(["echo", name])
            spec.Root.Path = root
            del spec.Mounts[:]
            if name == "gone":
                with pytest.raises(CallError, match=f"pull image 'no/such:image' from '{layout.source}': .* has no"):
                    client.create(spec, name, storages=[storage])
            else:
                client.run(spec, name, storages=[storage])
                assert client.read_all(name) == f"{name}\n".encode()
        assert agent.log().count("pulling image") == 2, "once for each image"
    finally:
        agent.stop()
