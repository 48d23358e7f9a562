"""What containerd is asked."""

from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition
from pyshim.node.runtime import effective

_CONTAINERD = """#!/bin/sh
# As containerd 1.7, which has no dump of a file that is not there.
case $* in
"config default") echo 'from = "the defaults"' ;;
"--config $2 config dump") [ -e "$2" ] && echo 'from = "the file"' ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def containerd(tmp_path: Path) -> str:
    program = tmp_path / "containerd"
    program.write_text(_CONTAINERD)
    program.chmod(0o755)
    return str(program)


def test_a_node_without_a_configuration_has_containerds_defaults(containerd: str, tmp_path: Path) -> None:
    """As on Ubuntu, whose package brings no config.toml."""
    assert effective(containerd, str(tmp_path / "config.toml")) == {"from": "the defaults"}


def test_a_file_is_read_with_its_imports_by_containerd_itself(containerd: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()

    assert effective(containerd, str(tmp_path / "config.toml")) == {"from": "the file"}


def test_what_containerd_refuses_is_named(containerd: str, tmp_path: Path) -> None:
    Path(containerd).write_text("#!/bin/sh\necho 'invalid plugin' >&2; exit 1\n")
    (tmp_path / "config.toml").touch()

    with pytest.raises(FailedPrecondition, match="invalid plugin"):
        effective(containerd, str(tmp_path / "config.toml"))
