"""What the benchmark does with its samples, and what it leaves of a VM's command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import chart, peers, report
from bench.bare_boot import bare_argv
from bench.rounds import Samples
from bench.stub_pods import waited_s
from pyshim.model.trace import NO_PARENT, Span

PROJECT = Path(__file__).resolve().parents[3]
INITRD = Path("/scratch/bare")


def samples(**series: list[list[float]]) -> Samples:
    """The given series; every other has a 1 in each of as many rounds as the longest."""
    found = Samples()
    rounds = max((len(one) for one in series.values()), default=2)
    for question in report.QUESTIONS:
        for name in (question.series, question.reference):
            found.by_round[name] = series.get(name, [[1.0]] * rounds)
    return found


def row(title: str, found: list[report.Row]) -> report.Row:
    (only,) = [one for one in found if one.title == title]
    return only


@pytest.fixture
def argv() -> list[str]:
    words = "qemu -machine q35 -m 2048M -no-reboot -S -chardev socket,id=qmp0,fd=3,server=on,wait=off"
    words += " -mon chardev=qmp0,mode=control -device virtio-serial-pci,id=serial0"
    words += " -chardev socket,id=hvc0,fd=4 -device virtconsole,chardev=hvc0,id=console0"
    words += " -chardev socket,id=tty0,fd=5 -serial chardev:tty0"
    words += " -blockdev driver=raw,node-name=image0 -device virtio-blk-pci,drive=image0,id=virtio-image0"
    words += " -chardev socket,id=agent0,fd=6,server=on -device virtserialport,chardev=agent0,name=port"
    words += " -chardev socket,id=share0,path=/s -device vhost-user-fs-pci,chardev=share0,tag=kataShared"
    words += " -netdev tap,id=eth0,fds=8 -device virtio-net-pci,netdev=eth0 -kernel /k -initrd /big"
    return [*words.split(), "-append", "quiet console=hvc0 panic=1"]


def test_a_bare_boot_keeps_the_machine_and_drops_what_leads_out_of_it(argv: list[str]) -> None:
    words = bare_argv(argv, INITRD, {"hvc0": 10, "tty0": 11})

    expected = "qemu -machine q35 -m 2048M -no-reboot -device virtio-serial-pci,id=serial0"
    expected += " -chardev socket,id=hvc0,fd=10 -device virtconsole,chardev=hvc0,id=console0"
    expected += " -chardev socket,id=tty0,fd=11 -serial chardev:tty0 -kernel /k -initrd /scratch/bare"
    assert words == [*expected.split(), "-append", "quiet console=ttyS0 panic=1"]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    found = report.rows(samples(start_pykata=[[2.0], [30.0], [8.0]], start_bare=[[1.0, 1.0], [10.0, 10.0], [2.0, 2.0]]))

    start = row("`start`", found)
    assert start.ratios == (2.0, 3.0, 4.0)
    assert start.ratio == 3.0
    assert (start.value, start.spread, start.reference) == (8000.0, (2000.0, 30000.0), 2000.0)


def test_one_disturbed_sample_does_not_move_a_rounds_ratio() -> None:
    found = report.rows(samples(start_pykata=[[2.0, 2.0, 90.0]], start_bare=[[1.0, 1.0, 1.0]]))

    assert row("`start`", found).ratio == 2.0


def test_a_series_without_its_reference_in_every_round_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        report.rows(samples(start_pykata=[[1.0], [1.0]], start_bare=[[1.0]]))


@pytest.mark.slow
def test_every_row_is_in_the_table_the_markdown_and_the_picture(tmp_path: Path) -> None:
    found = report.rows(samples())

    chart.write_svg(tmp_path / "a.svg", found, "caption")
    text, markdown, picture = (
        report.as_text(found),
        report.as_markdown(found, {"cpu": "x"}, "a note"),
        (tmp_path / "a.svg").read_text(),
    )
    for one in found:
        assert one.title in markdown
        assert one.title.replace("`", "") in text
        assert one.title.replace("`", "") in picture
    assert "a note" in markdown


def test_a_peer_is_named_as_containerd_finds_it() -> None:
    peer = peers.runtime_of(Path("/opt/kata/bin/containerd-shim-kata-v2"))

    assert (peer.name, peer.binary) == ("io.containerd.kata.v2", "containerd-shim-kata-v2")


@pytest.mark.parametrize("name", ["kata", "containerd-shim-kata", "containerd-shim--v2", "a-b-c-d"])
def test_a_program_that_is_no_shim_is_refused_as_peer(name: str) -> None:
    with pytest.raises(ValueError, match="its name is not containerd-shim-NAME-VERSION"):
        peers.runtime_of(Path("/bin") / name)


def test_the_table_of_peers_has_the_median_of_the_rounds_ratios() -> None:
    ours = {key: [0.001, 0.002, 0.030] for key in peers.TITLES}
    theirs = {key: [0.002, 0.002, 0.010] for key in peers.TITLES}

    text = peers.as_markdown({"forked": ours, "executed": theirs, "peer": theirs}, "shim-x", {"rounds": "3"}, "")

    assert "| `start` | 2 ms | 2 ms | 2 ms | 1.00 | 1.00 |" in text.splitlines()
    assert all(f"| {title} |" in text for title in peers.TITLES.values())


def a_span(name: str, parent: int, start_ms: int, end_ms: int) -> Span:
    return Span(name, parent, start_ms * 1_000_000, end_ms * 1_000_000, "")


@pytest.mark.parametrize(
    ("beside", "waited_ms"),
    [
        pytest.param([], 10, id="nothing"),
        pytest.param([("allow devices", 1, 16, 19)], 7, id="within"),
        pytest.param([("allow devices", 1, 10, 18)], 7, id="since-before"),
        pytest.param([("allow devices", 1, 22, 30)], 7, id="longer"),
        pytest.param([("one", 1, 16, 19), ("other", 1, 18, 20), ("inside", 3, 17, 18)], 6, id="overlapping"),
        pytest.param([("earlier", 1, 2, 15), ("later", 0, 25, 40)], 10, id="apart"),
        pytest.param([("all of it", 1, 2, 40)], 0, id="all"),
        pytest.param([("not ended", 1, 20, 0)], 5, id="not-ended"),
    ],
)
def test_only_the_wait_in_which_the_shim_did_nothing_counts(
    beside: list[tuple[str, int, int, int]], waited_ms: int
) -> None:
    spans = [a_span("create", NO_PARENT, 1, 50), a_span("start vmm", 0, 12, 26), a_span("wait for vmm", 1, 15, 25)]
    spans += [a_span(*one) for one in beside]

    assert waited_s(tuple(spans)) == pytest.approx(waited_ms / 1000)


def test_a_trace_without_the_wait_and_one_in_which_it_lasts() -> None:
    assert waited_s((a_span("create", NO_PARENT, 1, 50),)) == 0
    with pytest.raises(ValueError, match="has not ended"):
        waited_s((a_span("wait for vmm", NO_PARENT, 1, 0),))


def in_enclosure(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "integration.framework.enclosure", sys.executable, *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.root
def test_results_are_not_written_to_what_ends_with_the_enclosure() -> None:
    done = in_enclosure("-m", "bench", "--output", "/tmp/results")

    assert done.returncode == 2
    assert done.stderr == "bench: write results to '/tmp/results': it is gone when the measuring has ended\n"


@pytest.mark.root
def test_only_the_checkout_outlives_the_enclosure_wherever_it_lies() -> None:
    places = ("not/yet/there", "/tmp/results", "/run/a/b", "/dev/shm")
    code = "from pathlib import Path; from integration.framework.enclosure import outlives; "
    code += f"print([place for place in {places!r} if outlives(Path(place))])"

    done = in_enclosure("-c", code)

    assert done.stdout == "['not/yet/there']\n", done.stderr
