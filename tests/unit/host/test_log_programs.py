"""Programs that take a container's output: started, signalled, and ended when they do not obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.host.processes.children import Children
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from tests.unit.host.stream_ends import PATIENT, opened

pytestmark = pytest.mark.usefixtures("nothing_left")
PROGRAM = """\
#!/bin/sh
{{
echo "args $*"
env | grep ^CONTAINER | sort
}} > {log}
{ready}
cat <&3 >> {log}
cat <&4 >> {log}
{end}
"""


def log_program(tmp_path: Path, *, ready: str = "exec 5>&-", end: str = "") -> tuple[Path, Path]:
    log, program = tmp_path / "program.log", tmp_path / "program"
    program.write_text(PROGRAM.format(log=log, ready=ready, end=end))
    program.chmod(0o755)
    return program, log


async def test_a_log_program_gets_arguments_environment_and_both_streams(tmp_path: Path) -> None:
    program, log = log_program(tmp_path)

    streams = await opened(stdout=f"binary://{program}?a=1&b=2&a=3&c=", stderr="ignored")
    assert streams.stdout is not None
    assert streams.stderr is not None
    await streams.stdout.write(b"out\n")
    await streams.stderr.write(b"err\n")

    await streams.close()
    await streams.close()

    assert log.read_text() == "args a 1 b 2 c \nCONTAINER_ID=exec1\nCONTAINER_NAMESPACE=ns1\nout\nerr\n"


async def test_a_log_program_may_say_ready_with_a_byte(tmp_path: Path) -> None:
    program, log = log_program(tmp_path, ready="printf r >&5")

    streams = await opened(stdout=f"binary-v2://{program}", terminal=True)
    assert streams.stdout is not None
    assert streams.stderr is None
    await streams.stdout.write(b"out\n")

    await streams.close()

    assert log.read_text().endswith("out\n")


async def test_a_version_2_log_program_that_only_closes_its_ready_pipe_has_failed(tmp_path: Path) -> None:
    program, _ = log_program(tmp_path, ready="echo 'bad option' >&2; exit 3")

    with pytest.raises(FailedPrecondition, match=r"exited with status 3.*bad option"):
        await opened(stdout=f"binary-v2://{program}")


async def test_a_log_program_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ShimError, match=r"nowhere/prog.*ENOENT"):
        await opened(stdout="binary:///nowhere/prog")


async def test_a_log_program_that_never_gets_ready_is_killed(tmp_path: Path, children: Children) -> None:
    program, _ = log_program(tmp_path, ready="exec sleep 1000")

    with pytest.raises(DeadlineExceeded, match=str(program)):
        await opened(stdout=f"binary://{program}", children=children, log_program_times=replace(PATIENT, ready_s=0.1))


async def test_output_of_a_log_program_that_died_is_dropped(tmp_path: Path) -> None:
    program, _ = log_program(tmp_path, ready="exit 0")

    streams = await opened(stdout=f"binary://{program}")
    assert streams.stdout is not None

    await streams.stdout.write(bytes(4 << 20))

    await streams.close()


async def test_a_log_program_that_obeys_nothing_is_killed(tmp_path: Path, children: Children) -> None:
    program, _ = log_program(tmp_path, ready="trap '' TERM; exec 5>&-", end="exec sleep 1000")
    impatient = replace(PATIENT, end_of_input_s=0.1, terminate_s=0.1)

    streams = await opened(stdout=f"binary://{program}", children=children, log_program_times=impatient)

    await streams.close()
