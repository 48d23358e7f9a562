"""The choice of an instance: linear, by GPU count and model, memory, vCPUs, price; tables and annotations."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.instances import InstanceType, InvalidTable, Need, NoInstance, need_of, read_table, select
from pyshim.instances.need import PREFIX
from pyshim.node.cli.command import run


def kind(name: str, vcpus: int, gib: int, gpus: int = 0, model: str = "", price: str = "") -> InstanceType:
    return InstanceType(
        name=name,
        vcpus=vcpus,
        memory_mib=gib * 1024,
        gpus=gpus,
        gpu_model=model,
        price=Fraction(price) if price else None,
    )


# Sorted by memory, not by vCPUs: a binary search finds nothing for 8 and 8.
TABLE = (
    kind("small", 2, 4, price="0.1"),
    kind("square", 8, 8, price="0.4"),
    kind("tall", 4, 16),
    kind("taller", 4, 32),
    kind("gpu-a10", 8, 32, 1, "NVIDIA A10G", "1.0"),
    kind("gpu-h100", 16, 128, 1, "NVIDIA H100 80GB HBM3", "9.0"),
    kind("gpu-h100-cheap", 16, 128, 1, "nvidia-h100", "8.5"),
    kind("gpu-h100-unpriced", 16, 128, 1, "H100"),
    kind("gpu-a100x8", 96, 1024, 8, "NVIDIA A100", "30"),
)


@pytest.mark.parametrize(
    ("need", "name"),
    [
        (Need(vcpus=8, memory_mib=8192), "square"),
        (Need(vcpus=1, memory_mib=1), "small"),
        (Need(), "small"),
        (Need(vcpus=3, memory_mib=9000), "tall"),
        (Need(memory_mib=20_000), "taller"),
        (Need(gpus=1), "gpu-a10"),
        (Need(gpus=1, gpu_model="A10G"), "gpu-a10"),
        (Need(gpus=1, gpu_model="h100"), "gpu-h100-cheap"),
        (Need(gpus=1, gpu_model="NVIDIA H100 80GB"), "gpu-h100"),
        (Need(gpus=1, memory_mib=40_000), "gpu-h100-cheap"),
        (Need(gpus=2), "gpu-a100x8"),
        (Need(gpus=1, gpu_model="A100"), "gpu-a100x8"),
        (Need(vcpus=500, machine_type="taller"), "taller"),
    ],
    ids=str,
)
def test_the_smallest_that_has_it_all(need: Need, name: str) -> None:
    choice = select(TABLE, need)

    assert choice.instance.name == name
    assert repr(name) in choice.reason


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (Need(vcpus=16, memory_mib=1), "choose instance for 16 vCPUs, 1 MiB: none of 9 types has it all"),
        (Need(gpus=1, gpu_model="A10"), "does not fit in GPU model"),
        (Need(gpus=9), "9 GPUs: none of 9 types has it all"),
        (Need(gpus=2, gpu_model="H100"), "2 GPUs 'H100'"),
        (Need(machine_type="huge"), "choose instance 'huge': it is not among the 9 types"),
    ],
    ids=str,
)
def test_what_no_type_has_is_refused_with_the_nearest(need: Need, text: str) -> None:
    with pytest.raises(NoInstance) as refused:
        select(TABLE, need)
    assert text in str(refused.value)


def test_an_empty_table_has_nothing() -> None:
    with pytest.raises(NoInstance, match="the table is empty"):
        select((), Need(vcpus=1))


TYPES = st.lists(
    st.builds(
        InstanceType,
        name=st.text("abc", min_size=1, max_size=4),
        vcpus=st.integers(1, 8),
        memory_mib=st.integers(1, 8),
        gpus=st.integers(0, 2),
        gpu_model=st.sampled_from(["", "A 1", "B 1"]),
        price=st.none() | st.integers(0, 3).map(Fraction),
    ),
    max_size=8,
)
NEEDS = st.builds(
    Need,
    vcpus=st.integers(0, 8),
    memory_mib=st.integers(0, 8),
    gpus=st.integers(0, 2),
    gpu_model=st.sampled_from(["", "a"]),
)


@given(TYPES, NEEDS, st.randoms())
def test_the_choice_fits_is_smallest_and_does_not_depend_on_the_tables_order(
    types: list[InstanceType], need: Need, random: Any
) -> None:
    def fits(each: InstanceType) -> bool:
        has_gpus = each.gpus >= need.gpus if need.gpus else each.gpus == 0
        has_model = not need.gpus or not need.gpu_model or each.gpu_model.startswith("A")
        return has_gpus and has_model and each.vcpus >= need.vcpus and each.memory_mib >= need.memory_mib

    fitting = [each for each in types if fits(each)]
    shuffled = list(types)
    random.shuffle(shuffled)
    if not fitting:
        with pytest.raises(NoInstance):
            select(types, need)
        return
    chosen = select(types, need).instance

    assert chosen in fitting
    assert (chosen.gpus, chosen.memory_mib, chosen.vcpus) == min((e.gpus, e.memory_mib, e.vcpus) for e in fitting)
    again = select(shuffled, need).instance
    assert (again.name, again.price) == (chosen.name, chosen.price)


def annotations(**values: str) -> dict[str, str]:
    return {f"{PREFIX}{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("given_annotations", "need"),
    [
        ({}, Need()),
        (annotations(default_vcpus="1.2", default_memory="2048"), Need(vcpus=2, memory_mib=2048)),
        (annotations(default_gpus="0", default_gpu_model="", machine_type=""), Need()),
        (annotations(default_gpus="2", default_gpu_model=" H100 "), Need(gpus=2, gpu_model="H100")),
        (annotations(machine_type="m5.large"), Need(machine_type="m5.large")),
    ],
)
def test_the_need_in_annotations(given_annotations: dict[str, str], need: Need) -> None:
    assert need_of(given_annotations) == need


@pytest.mark.parametrize(
    "wrong",
    [
        annotations(default_vcpus="many"),
        annotations(default_vcpus="-1"),
        annotations(default_vcpus="1/2"),
        annotations(default_vcpus="1e99999"),
        annotations(default_memory="2G"),
        annotations(default_gpus="1.5"),
        annotations(default_vcpus="nan"),
        annotations(default_gpu_model="H100"),
    ],
    ids=str,
)
def test_what_is_no_number_is_not_taken_for_0(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"read annotation '{next(iter(wrong))}'"):
        need_of(wrong)


def put(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


ROW = {"name": "a", "vcpus": 2, "memory_mib": 4096, "gpus": 1, "gpu_model": "X", "price": 0.1}


def test_a_table_is_read_exactly(tmp_path: Path) -> None:
    path = put(tmp_path / "t.json", [ROW, {"name": "b", "vcpus": 1, "memory_mib": 1}])

    assert read_table(path) == (
        InstanceType(name="a", vcpus=2, memory_mib=4096, gpus=1, gpu_model="X", price=Fraction(1, 10)),
        InstanceType(name="b", vcpus=1, memory_mib=1),
    )


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "not JSON"),
        ({}, "the document is not a list"),
        ([1], "row 0 is not an object"),
        ([{**ROW, "cpus": 1}], "row 0: 'cpus' is not known"),
        ([{"vcpus": 1, "memory_mib": 1}], "row 0: name is missing"),
        ([{"name": "a", "vcpus": 1}], "row 0: memory_mib is missing"),
        ([{**ROW, "vcpus": 1.5}], "row 0: vcpus is not a whole number"),
        ('[{"price": 1e999999999}]', "not JSON: '1e999999999' is not a number of at most 20 digits"),
        ([{**ROW, "gpus": True}], "row 0: gpus is not a whole number"),
        ([{**ROW, "memory_mib": -1}], "row 0: memory_mib is not a whole number"),
        ([{**ROW, "price": "1"}], "row 0: price is no number"),
        ([{**ROW, "gpu_model": 7}], "row 0: gpu_model is not a text"),
        ([ROW, ROW], "'a' is there twice"),
    ],
    ids=str,
)
def test_tables_that_mean_nothing(document: object, text: str, tmp_path: Path) -> None:
    path = put(tmp_path / "t.json", document)

    with pytest.raises(InvalidTable) as refused:
        read_table(path)
    assert text in str(refused.value)
    assert path in str(refused.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path / "t.json", [ROW, {"name": "b", "vcpus": 4, "memory_mib": 8192}])

    assert run(["instances", "select", path, "--vcpus", "2", "--memory", "100"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "b"
    assert run(["instances", "select", path, "--json", "--annotation", f"{PREFIX}default_gpus=1"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "a"
    assert run(["instances", "select", path, "--gpus", "2"]) == 1
    assert "choose instance for 0 vCPUs, 0 MiB, 2 GPUs" in capsys.readouterr().err
    assert run(["instances", "select", path, "--gpu-model", "X"]) == 1
    assert run(["instances", "select", str(tmp_path / "none")]) == 1
    assert run(["instances", "select", path, "--annotation", f"{PREFIX}default_gpus=x"]) == 1
