"""Logs, exec, attach, files and figures of containers, as the kubelet asks for them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import grpc
import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Cri, Pod, Security
from .framework.spdy import EXEC, SpdyConnection
from .framework.waiting import eventually

pytestmark = pytest.mark.vm


def test_the_log_has_both_streams_in_the_kubelets_format(pod: Pod) -> None:
    container = pod.start("sh", "-c", "echo out; echo err >&2; printf unfinished")
    assert container.exit_code() == 0

    lines = container.log_path.read_text().splitlines()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) [FP] .*", line) for line in lines)
    assert container.log() == "out\nunfinished"
    assert container.log("stderr") == "err\n"


def test_a_long_line_and_bytes_that_are_no_text_arrive_whole(pod: Pod) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x; echo; printf '\\303\\244\\377\\n'"
    container = pod.start("sh", "-c", script)
    assert container.exit_code() == 0

    assert container.log().split("\n")[0] == "x" * 100000
    assert b"\xc3\xa4\xff" in container.log_path.read_bytes()


def test_a_rotated_log_goes_on_in_a_new_file(pod: Pod) -> None:
    """As the kubelet does: rename, then ReopenContainerLog."""
    container = pod.start("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done")
    eventually(lambda: "3\n" in container.log(), what="some lines are logged")
    rotated = container.log_path.with_suffix(".rotated")
    container.log_path.rename(rotated)

    pod.cri.call("ReopenContainerLog", container_id=container.id)

    eventually(lambda: container.log_path.exists() and len(container.log().split()) > 3, what="the new log grows")
    last = int(rotated.read_text().split()[-1])
    assert int(container.log().split()[0]) == last + 1
    rotated.unlink()


def test_an_exec_that_exceeds_its_time_is_ended(pod: Pod) -> None:
    container = pod.start()

    with pytest.raises(grpc.RpcError) as caught:
        container.exec("sleep", "4711", timeout=1)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: "4711" not in container.sh("ps"), what="the process is gone")


def test_execs_at_the_same_time_do_not_mix(pod: Pod) -> None:
    container = pod.start()
    outputs: dict[int, str] = {}

    def run(number: int) -> None:
        outputs[number] = container.exec("sh", "-c", f"for i in 1 2 3; do echo {number}; sleep 0.05; done").out

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outputs == {number: f"{number}\n" * 3 for number in range(8)}


def opened(spdy: SpdyConnection, *names: str) -> list[int]:
    return [spdy.open({"streamtype": name}) for name in ("error", *names)]


def test_exec_streams_the_kubelets_way(pod: Pod) -> None:
    """Over SPDY, as `kubectl exec` comes through the kubelet."""
    command = ["sh", "-c", "cat; echo bad >&2; exit 5"]
    url = pod.cri.call("Exec", container_id=pod.start().id, cmd=command, stdin=True, stdout=True, stderr=True).url

    with SpdyConnection(url, EXEC) as spdy:
        error, stdin, stdout, stderr = opened(spdy, "stdin", "stdout", "stderr")
        spdy.send(stdin, b"h" * 100_000, end=True)

        assert spdy.read_to_end(stdout) == b"h" * 100_000
        assert spdy.read_to_end(stderr) == b"bad\n"
        outcome = json.loads(spdy.read_to_end(error))

    assert outcome["details"]["causes"] == [{"reason": "ExitCode", "message": "5"}]


def test_with_stdin_once_the_end_of_an_attached_clients_input_is_the_programs(pod: Pod) -> None:
    """`echo it | kubectl attach -i`, without a terminal."""
    container = pod.start("sh", "-c", "cat; echo over", stdin=True, stdin_once=True)
    url = pod.cri.call("Attach", container_id=container.id, stdin=True, stdout=True, stderr=True).url

    with SpdyConnection(url, EXEC) as spdy:
        _, stdin, stdout, _ = opened(spdy, "stdin", "stdout", "stderr")
        spdy.send(stdin, b"it\n", end=True)
        assert spdy.read_to_end(stdout) == b"it\nover\n"

    assert container.run_to_end() == "it\nover\n"


def test_exec_on_a_terminal_has_the_clients_size(pod: Pod) -> None:
    url = pod.cri.call("Exec", container_id=pod.start().id, cmd=["sh"], stdin=True, stdout=True, tty=True).url

    with SpdyConnection(url, EXEC) as spdy:
        error, stdin, stdout, size = opened(spdy, "stdin", "stdout", "resize")
        spdy.send(size, b'{"Width": 132, "Height": 43}')
        spdy.send(stdin, b"until [ \"$(stty size)\" = '43 132' ]; do sleep 0.1; done; echo si''zed\n")
        spdy.read_until(stdout, b"sized")
        spdy.send(stdin, b"exit\n")

        assert json.loads(spdy.read_to_end(error))["status"] == "Success"


def test_attach_joins_the_running_process(pod: Pod) -> None:
    container = pod.start("sh", "-c", "while read line; do echo got $line; done", stdin=True)
    for word in (b"one", b"two"):  # twice: the first client's going away must not close the process's input
        url = pod.cri.call("Attach", container_id=container.id, stdin=True, stdout=True, stderr=True).url
        with SpdyConnection(url, EXEC) as spdy:
            _, stdin, stdout, _ = opened(spdy, "stdin", "stdout", "stderr")
            spdy.send(stdin, word + b"\n")
            spdy.read_until(stdout, b"got " + word)

    assert container.is_running
    assert container.log() == "got one\ngot two\n"


def test_the_termination_message_is_on_the_host_when_the_container_has_ended(pod: Pod, scratch: Path) -> None:
    message = scratch / "termination"
    message.touch()
    mount = pb.Mount(container_path="/dev/termination-log", host_path=str(message))

    container = pod.start("sh", "-c", "echo why > /dev/termination-log; exit 1", mounts=[mount])

    assert container.exit_code() == 1
    assert message.read_text() == "why\n"


def test_an_image_as_a_volume(pod: Pod, cri: Cri) -> None:
    """An image mounted on the host, read only; what containerd 2.x does itself for image volumes, this one does not."""
    image = cri.daemon.directories.root / "image-volume"
    image.mkdir()
    ctr = cri.daemon.ctr
    ctr("--namespace", "k8s.io", "images", "mount", "docker.io/local/busybox:test", image)
    try:
        container = pod.start(mounts=[pb.Mount(container_path="/image", host_path=str(image), readonly=True)])
        assert container.sh("cat /image/layer-marker") == "upper\n"
        container.remove()
    finally:
        ctr("--namespace", "k8s.io", "images", "unmount", "--rm", image)


@pytest.mark.parametrize(
    "name",
    ["with space", "quo'te\"s", "new\nline", "ünïcødé-日本", "comma,colon:back\\slash", "-leading"],
    ids=["space", "quotes", "newline", "unicode", "separators", "dash"],
)
def test_strange_names_of_files_and_values_arrive_as_they_are(pod: Pod, scratch: Path, name: str) -> None:
    source = scratch / name
    source.mkdir()
    (source / name).write_text(name)
    variable = pb.KeyValue(key="NAME", value=name.encode())

    container = pod.start(
        mounts=[pb.Mount(container_path=f"/mnt/{name}", host_path=str(source))],
        envs=[variable],
        labels={"label": name},
        annotations={"example.org/note": name},
    )

    assert container.sh('cat "/mnt/$NAME/$NAME"') == name
    assert container.exec("printf", "%s", name).out == name
    assert container.status.labels["label"] == name


def test_pods_and_containers_of_strange_names(cri: Cri) -> None:
    with cri.pod("p od'\"ü", annotations={"example.org/ä": "\"quoted\"\n'twice'"}) as pod:
        container = pod.start("echo", "fine", name="c 'ö\"")
        assert container.run_to_end() == "fine\n"


def test_a_container_without_a_terminal_has_no_input_to_wait_for(pod: Pod) -> None:
    container = pod.start("sh", "-c", "cat; echo ended", security=Security())

    assert container.run_to_end() == "ended\n"


def test_standard_input_without_a_client_is_dev_null(pod: Pod) -> None:
    """As with runc: a pipe would be read by programs that look for one."""
    container = pod.start("sh", "-c", "readlink /proc/self/fd/0; sleep 100000")

    assert container.sh("readlink /proc/self/fd/0") == "/dev/null\n"
    eventually(lambda: container.log() == "/dev/null\n", what="the container has told its input")
