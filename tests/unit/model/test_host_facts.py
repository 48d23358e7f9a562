"""The kernel's lists of CPUs, both ways."""

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import cpu_set, cpuset_text


def test_a_descending_range_of_cpus_holds_none() -> None:
    assert cpu_set("3-1,7", "here") == {7}


@pytest.mark.parametrize("text", ["", "5", "0-2,5", "0,2,4", "62-65,8191"])
def test_what_is_written_reads_back(text: str) -> None:
    assert cpuset_text(cpu_set(f" {text}\n", "here")) == text


@pytest.mark.parametrize("text", ["x", "1-", "-1", "8192", "1;2", "٣", None, 3], ids=str)
def test_what_is_no_list_is_refused_with_the_place(text: object) -> None:
    with pytest.raises(InvalidArgument, match="read /sys/x: not a list of CPUs"):
        cpu_set(text, "/sys/x")
