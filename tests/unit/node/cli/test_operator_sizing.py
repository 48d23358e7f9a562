"""`pyshim sizing`: what it prints is compared with golden files; `PYSHIM_UPDATE_GOLDEN=1` writes them anew."""

import json
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pyshim.__main__ import operator_main
from pyshim.model.sizing import Dimension, SizingRecord
from pyshim.state.store import StateStore
from tests.unit.state import states

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "sizing"
DOCUMENT = ROOT / "docs" / "SIZING.md"
NODE = ["--node-cpus", "8", "--node-memory", "16384"]

RECORD = SizingRecord(
    policy="sum",
    vcpus=Dimension(
        base=Fraction(1, 2),
        base_source="default_vcpus",
        requested=Fraction(5),
        requested_source="annotations",
        exact=Fraction(11, 2),
        unit=1,
        rounded=6,
        granted=4,
        limited_by="default_maxvcpus",
    ),
    memory_mib=Dimension(
        base=Fraction(32),
        base_source="overhead_memory",
        requested=Fraction(7, 1 << 20),
        requested_source="linux.resources.memory.limit",
        exact=Fraction(32) + Fraction(7, 1 << 20),
        unit=2,
        rounded=34,
        granted=256,
        limited_by="the smallest VM, 256 MiB",
    ),
    warnings=("something overcommits",),
)
VCPUS: Any = RECORD.as_json()["vcpus"]


def explain(pod: str, config: str, *more: str) -> list[str]:
    return ["sizing", "explain", str(GOLDEN / pod), "--config", str(GOLDEN / config), *NODE, *more]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("web-sum.txt", explain("web.yaml", "defaults.toml")),
        ("web-overhead.txt", explain("web.yaml", "overhead.toml")),
        ("web-dynamic.txt", explain("web.yaml", "dynamic.toml")),
        ("empty-sum.txt", explain("empty.yaml", "defaults.toml", "--runtimeclass", str(GOLDEN / "web.yaml"))),
        ("exact-overhead.txt", explain("exact.yaml", "overhead.toml", "--host-side", "0")),
        ("web-sum.json", explain("web.yaml", "defaults.toml", "--json")),
        ("exact-overhead.json", explain("exact.yaml", "overhead.toml", "--json")),
    ],
)
def test_explain_prints_what_the_golden_file_holds(
    capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    assert operator_main(words) == 0

    printed = capsys.readouterr().out
    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(printed)
    assert printed == (GOLDEN / name).read_text()
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_the_documents_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/SIZING.md shows the pod and the output; both are the golden files'."""
    document = DOCUMENT.read_text()
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)

    assert operator_main(explain("web.yaml", "defaults.toml")) == 0

    assert capsys.readouterr().out in blocks
    assert (GOLDEN / "web.yaml").read_text() in blocks


def test_a_pods_annotations_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = "kind: Pod\nmetadata: {annotations: {io.katacontainers.config.hypervisor.default_memory: '3000'}}\n"
    (tmp_path / "pod.yaml").write_text(pod + "spec: {containers: [{name: a}]}\n")
    (tmp_path / "c.toml").write_text("[hypervisor.qemu]\nenable_annotations = ['default_memory']\n")
    words = ["sizing", "explain", str(tmp_path / "pod.yaml"), "--config", str(tmp_path / "c.toml"), "--json"]

    assert operator_main(words) == 0

    assert json.loads(capsys.readouterr().out)["policies"]["sum"]["memory_mib"]["base"] == "3000"


def test_show_explains_a_sandboxs_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states.save(tmp_path, "pod1", sizing=RECORD.as_json())

    assert operator_main(["sizing", "show", "pod1", "--state-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "policy: sum",
        "vCPUs: 4 vCPU",
        "  base      0.5  default_vcpus",
        "  requested   5  annotations",
        "  exact sum 5.5",
        "  rounded     6  up to whole vCPU",
        "  granted     4  limited by default_maxvcpus",
        "memory: 256 MiB",
        "  base       32  overhead_memory",
        "  requested  ~0  linux.resources.memory.limit",
        "  exact sum ~32",
        "  rounded    34  up to a multiple of 2 MiB",
        "  granted   256  raised by the smallest VM, 256 MiB",
        "warning: something overcommits",
    ]


def test_show_gives_the_record_to_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states.save(tmp_path, "pod1", sizing=RECORD.as_json())

    assert operator_main(["sizing", "show", "pod1", "--state-dir", str(tmp_path), "--json"]) == 0

    assert SizingRecord.from_json(json.loads(capsys.readouterr().out), "stdout") == RECORD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"policy": 3}, "policy is not a string", id="policy"),
        pytest.param({"vcpus": {}}, "vcpus.base is missing", id="empty-dimension"),
        pytest.param({"vcpus": {**VCPUS, "base": "1/0"}}, "base is not a fraction", id="zero-division"),
        pytest.param({"warnings": "x"}, "warnings is not a list of strings", id="warnings"),
    ],
)
def test_a_damaged_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    states.save(tmp_path, "pod1", sizing={**RECORD.as_json(), **change})

    assert operator_main(["sizing", "show", "pod1", "--state-dir", str(tmp_path)]) == 1

    error = capsys.readouterr().err
    assert "sizing record of 'pod1'" in error
    assert said in error


def test_a_sandbox_without_a_record_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states.save(tmp_path, "pod1", sizing={})

    assert operator_main(["sizing", "show", "pod1", "--state-dir", str(tmp_path)]) == 1

    assert "none is recorded yet" in capsys.readouterr().err


def test_a_sandbox_that_its_shim_has_not_planned_yet_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StateStore(root=str(tmp_path)).save(states.state(planned=False))

    assert operator_main(["sizing", "show", "sb1", "--state-dir", str(tmp_path)]) == 1

    assert "read state of sandbox 'sb1': its shim has not saved it yet" in capsys.readouterr().err


POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("a: [", "read manifest", id="not-yaml"),
        pytest.param("kind: !!python/object:os.system {}\n", "could not determine a constructor", id="tags"),
        pytest.param("- 1\n", "not a mapping", id="a-list"),
        pytest.param("", "no pod and no pod template in it, only nothing", id="empty"),
        pytest.param("kind: Service\n", "only Service", id="no-pod"),
        pytest.param(f"{POD}  containers: []\n", "containers: there is none", id="no-containers"),
        pytest.param(
            f"{POD}  containers: [{{resources: {{limits: {{cpu: 1}}, requests: {{cpu: 2}}}}}}]\n",
            "requests.cpu: more than its limit",
            id="request-above-limit",
        ),
    ],
)
def test_a_manifest_that_cannot_be_counted_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "pod.yaml").write_text(text)

    code = operator_main(["sizing", "explain", str(tmp_path / "pod.yaml"), "--config", str(GOLDEN / "defaults.toml")])

    error = capsys.readouterr().err
    assert (code, said in error, "pod.yaml" in error) == (1, True, True), error


def test_a_missing_file_or_class_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(explain("nowhere.yaml", "defaults.toml")) == 1
    assert "nowhere.yaml': No such file" in capsys.readouterr().err

    assert operator_main(explain("web.yaml", "defaults.toml", "--runtimeclass", str(GOLDEN / "empty.yaml"))) == 1
    assert "Pod shop/web: pykata" in capsys.readouterr().err


def test_a_huge_manifest_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pod.yaml").write_bytes(b"#" * (4 * 1024 * 1024 + 1))

    assert operator_main(["sizing", "explain", str(tmp_path / "pod.yaml")]) == 1

    assert "larger than" in capsys.readouterr().err


CONFIGS = ROOT / "configs"


def podfixed(state_dir: Path, config: str, *more: str) -> list[str]:
    """On a node with KVM on which no sandbox runs."""
    words = ["sizing", "podfixed", "--state-dir", str(state_dir), "--node-kvm", "yes"]
    return [*words, "--config", str(CONFIGS / config), *more]


@pytest.mark.parametrize(
    ("config", "more", "fixed"),
    [
        ("configuration-qemu.toml", [], {"cpu": "250m", "memory": "238Mi"}),
        ("configuration-qemu.toml", ["--node-kvm", "no"], {"cpu": "250m", "memory": "334Mi"}),
        ("configuration-qemu.toml", ["--host-side", "0", "--reserve", "7"], {"cpu": "250m", "memory": "135Mi"}),
        ("configuration-qemu-tdx.toml", [], {"cpu": "1", "memory": "2159Mi"}),
        ("configuration-remote.toml", [], {"cpu": "0", "memory": "25Mi"}),
    ],
)
def test_podfixed_is_the_sum_of_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, more: list[str], fixed: dict[str, str]
) -> None:
    assert operator_main(podfixed(tmp_path, config, *more, "--json")) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["pod_fixed"] == fixed
    summed = sum(int(each["memory"].removesuffix("Mi")) for each in found["summands"])
    assert f"{summed}Mi" == fixed["memory"]


def test_podfixed_is_what_explain_and_check_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(podfixed(tmp_path, "configuration-qemu.toml", "--json")) == 0
    fixed = json.loads(capsys.readouterr().out)["pod_fixed"]

    words = ["sizing", "explain", str(GOLDEN / "web.yaml"), "--config", str(CONFIGS / "configuration-qemu.toml")]
    assert operator_main([*words, "--node-kvm", "yes", "--json"]) == 0
    views = json.loads(capsys.readouterr().out)
    assert views["policies"][views["policy_in_force"]]["class_fixed"] == fixed


def test_podfixed_shows_the_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(podfixed(tmp_path, "configuration-qemu.toml", "--reserve", "82")) == 0

    assert capsys.readouterr().out.splitlines() == [
        "podFixed of pods that state their limits, policy overhead",
        "",
        "                                     CPU      memory",
        "  overhead_*                        250m       112Mi",
        "  up to the smallest VM, 128 MiB       -        16Mi",
        "  host side                            -       110Mi  documented in docs/KUBERNETES.md",
        "  reserve                              -        82Mi",
        "  podFixed                          250m       320Mi",
    ]


def test_the_shipped_runtime_class_is_what_podfixed_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`configs/kubernetes/runtimeclass-pykata.yaml` says by which words it was made."""
    shipped = (CONFIGS / "kubernetes" / "runtimeclass-pykata.yaml").read_text()

    assert (
        operator_main(podfixed(tmp_path, "configuration-qemu.toml", "--reserve", "82", "--runtimeclass", "pykata")) == 0
    )

    assert capsys.readouterr().out in shipped
    assert "--node-kvm yes --reserve 82 --runtimeclass pykata" in shipped


def test_a_runtime_class_has_the_selector_and_the_handler_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--runtimeclass", "vm", "--handler", "pykata-remote", "--node-selector", "a/b=true", "--json"]
    assert operator_main(podfixed(tmp_path, "configuration-remote.toml", *words)) == 0

    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "vm"},
        "handler": "pykata-remote",
        "overhead": {"podFixed": {"memory": "25Mi"}},
        "scheduling": {"nodeSelector": {"a/b": "true"}},
    }


@pytest.mark.parametrize("more", [["--node-selector", "a=b"], ["--handler", "x"], ["--node-selector", "a"]])
def test_podfixed_refuses_words_without_a_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert operator_main(podfixed(tmp_path, "configuration-qemu.toml", *more)) == 2
    assert "node-selector" in capsys.readouterr().err
