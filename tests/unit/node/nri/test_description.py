"""Descriptions of machines: what they say, and what is wrong with one, by name."""

from pathlib import Path
from typing import Any

import pytest

from pyshim.model.host_facts import MachineError
from pyshim.model.units import MIB
from pyshim.node.nri.description import described, read_description

SMALL: dict[str, Any] = {"cores": 2, "memory_mib": 512}


def test_cpus_are_numbered_core_by_core_and_then_their_siblings() -> None:
    there = described({**SMALL, "sockets": 2, "threads": 2, "offline": 5})

    assert [(cpu.id, cpu.core, cpu.socket, cpu.node, cpu.online) for cpu in there.cpus] == [
        (0, 0, 0, 0, True),
        (1, 1, 0, 0, True),
        (2, 2, 1, 1, True),
        (3, 3, 1, 1, True),
        (4, 0, 0, 0, True),
        (5, 1, 0, 0, False),
        (6, 2, 1, 1, True),
        (7, 3, 1, 1, True),
    ]


def test_nodes_have_the_distances_firmware_would_give() -> None:
    there = described({**SMALL, "sockets": 2, "nodes": 2, "memory_mib": [1, 2, 0, 4]})

    assert [node.distances for node in there.nodes][::3] == [(10, 12, 21, 21), (21, 21, 12, 10)]
    assert [node.memory_bytes // MIB for node in there.nodes] == [1, 2, 0, 4]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "read machine: not a JSON object"),
        ({}, "memory_mib is missing"),
        ({**SMALL, "core": 1}, "object contains unknown field `core`"),
        ({**SMALL, "threads": "two"}, "threads is not a whole number"),
        ({**SMALL, "dies": 0}, "dies is 0, not 1 to 8192"),
        ({**SMALL, "cores": 8000, "threads": 2}, "16000 CPUs are more than 8192"),
        ({**SMALL, "sockets": 129}, "129 nodes are more than 128"),
        ({**SMALL, "nodes": 3}, "the 2 cores of a socket are not 3 equal nodes"),
        ({**SMALL, "memory_mib": [1, 2]}, "memory_mib has 2 entries for 1 nodes"),
        ({**SMALL, "memory_mib": -1}, "memory_mib and distances are never below 0"),
        ({**SMALL, "distances": [[10], [10]]}, "distances has 2 entries for 1 nodes"),
        ({**SMALL, "distances": [[10, 20]]}, "2 distances to 1 nodes"),
        ({**SMALL, "offline": "2"}, "offline: there is no CPU 2"),
        ({**SMALL, "offline": "0-1"}, "no CPU is online"),
        ({**SMALL, "offline": "first"}, "machine: offline: not a list of CPUs"),
    ],
    ids=str,
)
def test_an_error_in_a_description_is_named(document: object, problem: str) -> None:
    with pytest.raises(MachineError, match=problem):
        described(document)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"cores: [", "while parsing a flow node"),
        (b"\xff\xfe\x00", "read machine '.*m.yaml': "),
        (b"{cores: 2, memory_mib: 1, offline: x}", "read machine '.*m.yaml': offline: not a list of CPUs"),
        (b"", "read machine '.*m.yaml': not a JSON object"),
        (b"#" * (1 << 20) + b"\n", "larger than 1048576 bytes"),
    ],
    ids=["no YAML", "no text", "wrong member", "empty", "large"],
)
def test_a_file_that_is_no_description_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(content)

    with pytest.raises(MachineError, match=problem):
        read_description(str(path))
