"""A pod may change some keys; others are refused with an error that names the rule."""

import base64
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pyshim.config.annotations import WALLS, path_is_listed, with_annotations
from pyshim.config.catalogue import annotated
from pyshim.config.effective import Effective
from pyshim.config.keys import Table
from pyshim.config.load import load_config, refused, typed, warnings
from pyshim.model.errors import FailedPrecondition, InvalidArgument

from .documents import examined, options, write

ROOT = Path(__file__).parents[3]
C = "io.katacontainers.config."
H = C + "hypervisor."
ALL = '[hypervisor.qemu]\nenable_annotations = [".*"]\n'


def applied(path: Path, text: str, annotations: dict[str, str]) -> Effective:
    return with_annotations(examined(path, text), annotations)


def value(effective: Effective, table: Table, name: str) -> Any:
    return effective.of(table, name).value


VALUES = [
    (H + "default_vcpus", "0.5", Table.HYPERVISOR, "default_vcpus", Fraction(1, 2)),
    (H + "default_memory", "512", Table.HYPERVISOR, "default_memory", 512),
    (H + "default_memory", "2 GiB", Table.HYPERVISOR, "default_memory", 2048),
    (H + "default_max_vcpus", "4", Table.HYPERVISOR, "default_maxvcpus", 4),
    (H + "default_maxvcpus", "4", Table.HYPERVISOR, "default_maxvcpus", 4),
    (H + "blk_logical_sector_size", "512", Table.HYPERVISOR, "block_device_logical_sector_size", 512),
    (H + "machine_type", "microvm", Table.HYPERVISOR, "machine_type", "microvm"),
    (H + "enable_hugepages", "true", Table.HYPERVISOR, "enable_hugepages", True),
    (H + "virtio_fs_extra_args", '["-o", "a,b"]', Table.HYPERVISOR, "virtio_fs_extra_args", ("-o", "a,b")),
    (H + "virtio_fs_extra_args", "--a,--b", Table.HYPERVISOR, "virtio_fs_extra_args", ("--a", "--b")),
    (H + "block_device_queue_size", "64", Table.HYPERVISOR, "queue_size", 64),
    (C + "runtime.create_container_timeout", "90", Table.RUNTIME, "create_container_timeout", 90.0),
    (C + "runtime.disable_guest_seccomp", "false", Table.RUNTIME, "disable_guest_seccomp", False),
    (C + "runtime.internetworking_model", "none", Table.RUNTIME, "internetworking_model", "none"),
    (C + "runtime.enable_vcpus_pinning", "true", Table.RUNTIME, "enable_vcpus_pinning", True),
    ("io.katacontainers.enable_vcpus_pinning", "true", Table.RUNTIME, "enable_vcpus_pinning", True),
    (C + "agent.kernel_modules", "a x=1;b", Table.AGENT, "kernel_modules", ("a x=1", "b")),
    (C + "agent.cdh_api_timeout_ms", "12000", Table.AGENT, "cdh_api_timeout", 12.0),
    (C + "agent.enable_tracing", "1", Table.AGENT, "enable_tracing", True),
]


@pytest.mark.parametrize(("name", "text", "table", "key", "expected"), VALUES, ids=[f"{r[0]}={r[1]}" for r in VALUES])
def test_an_annotation_overrides_its_key(
    tmp_path: Path, name: str, text: str, table: Table, key: str, expected: Any
) -> None:
    effective = applied(tmp_path / "c.toml", ALL, {name: text, "unrelated": "x"})

    assert value(effective, table, key) == expected
    assert effective.of(table, key).origin == f"annotation {name}"


GATE = [
    ("search matches anywhere", '["path"]', "search", "jailer_path", True),
    ("search of a part", '["gpu_model"]', "search", "default_gpu_model", True),
    ("search with anchors of its own", '["^path$"]', "search", "jailer_path", False),
    ("anchored wants all", '["path"]', "anchored", "jailer_path", False),
    ("anchored takes all", '["default_.*"]', "anchored", "default_vcpus", True),
    ("anchored alternatives", '["x|default_vcpus"]', "anchored", "default_vcpus", True),
    ("nothing enabled", "[]", "search", "default_vcpus", False),
    ("everything enabled", '[".*"]', "anchored", "default_vcpus", True),
    ("unknown and not enabled", '["default_vcpus"]', "search", "no_such_key", False),
]
GATED_VALUES = {"jailer_path": "", "default_gpu_model": "A100", "default_vcpus": "3", "no_such_key": "1"}


@pytest.mark.parametrize(("_", "enabled", "match", "name", "passes"), GATE, ids=[row[0] for row in GATE])
def test_an_annotation_passes_only_where_the_file_enables_it(
    tmp_path: Path, _: str, enabled: str, match: str, name: str, passes: bool
) -> None:
    path = tmp_path / "c.toml"
    text = f'[hypervisor.qemu]\nannotation_match = "{match}"\nenable_annotations = {enabled}\n'
    pod = {H + name: GATED_VALUES[name]}

    if passes:
        assert applied(path, text, pod).of(Table.HYPERVISOR, name).origin == f"annotation {H}{name}"
    else:
        with pytest.raises(InvalidArgument) as caught:
            applied(path, text, pod)
        assert f"refuse annotation '{H}{name}': not enabled by enable_annotations = {enabled}" in str(caught.value)
        assert f"'{path}:3'" in str(caught.value)


@pytest.mark.parametrize(("table", "name"), [(Table.RUNTIME, "vfio_mode"), (Table.AGENT, "kernel_modules")])
def test_runtime_and_agent_need_no_permission(tmp_path: Path, table: Table, name: str) -> None:
    annotation = f"{C}{'runtime' if table is Table.RUNTIME else 'agent'}.{name}"

    effective = applied(write(tmp_path / "c.toml", ""), "", {annotation: "vfio"})

    assert effective.of(table, name).origin == f"annotation {annotation}"


def test_the_table_of_walls_has_every_annotation_that_needs_no_other_permission() -> None:
    """A new annotation of runtime or agent is looked at: does a value of it take a wall down?"""
    keys = {key.name for key in annotated().values() if key.table is not Table.HYPERVISOR}

    assert keys == WALLS.keys()


NO_NETWORK = {C + "runtime.internetworking_model": "none"}
WALL_ROWS = [
    # name, the pod's value, the file's value and permissions, is it refused?
    ("disable_new_netns", "true", "", True),
    ("disable_new_netns", "true", 'enable_wall_annotations = ["sandbox_cgroup_only"]', True),
    ("disable_new_netns", "true", 'enable_wall_annotations = ["disable_new_netns"]', False),
    ("disable_new_netns", "false", 'disable_new_netns = true\ninternetworking_model = "none"', False),
    ("disable_new_netns", "true", 'disable_new_netns = true\ninternetworking_model = "none"', False),
    ("sandbox_cgroup_only", "false", "sandbox_cgroup_only = true", True),
    ("sandbox_cgroup_only", "0", "sandbox_cgroup_only = true", True),
    (
        "sandbox_cgroup_only",
        "false",
        'sandbox_cgroup_only = true\nenable_wall_annotations = ["sandbox_cgroup_only"]',
        False,
    ),
    ("sandbox_cgroup_only", "true", "", False),
    ("sandbox_cgroup_only", "false", "", False),
]


@pytest.mark.parametrize(("name", "text", "file", "refused"), WALL_ROWS, ids=str)
def test_a_pod_takes_no_wall_down_without_the_files_permission(
    tmp_path: Path, name: str, text: str, file: str, refused: bool
) -> None:
    annotations = {C + f"runtime.{name}": text, **(NO_NETWORK if name == "disable_new_netns" else {})}
    source = write(tmp_path / "c.toml", f"{ALL}\n[runtime]\n{file}\n")
    expected = pytest.raises(InvalidArgument, match=f"refuse annotation '.*{name}': .*enable_wall_annotations")

    with expected if refused else nullcontext():
        applied(source, source.read_text(), annotations)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("configuration-*.toml")), ids=lambda path: path.stem)
def test_the_shipped_files_permit_no_annotation_that_takes_a_wall_down(path: Path) -> None:
    assert value(examined(path), Table.RUNTIME, "enable_wall_annotations") == ()


BAD = [
    (H + "default_vcpus", "many", "expected a number, not 'many'"),
    (H + "default_vcpus", "nan", "expected a number, not 'nan'"),
    (H + "default_vcpus", "-1", "-1 is not between"),
    (H + "default_vcpus", "1e400", "expected a number, not '1e400'"),
    (H + "default_memory", "2 parsecs", "with a unit"),
    (H + "default_memory", "16", "16 is not between 64"),
    (H + "machine_type", "pc", "'pc' is not one of"),
    (C + "agent.cdh_api_timeout_ms", "a minute", "expected a number, not 'a minute'"),
    (H + "kernel_params", 'a="b', "a double quote is not closed"),
    (H + "kernel_params", "a\0b", "contains a NUL character"),
    (H + "kernel", "relative", "not an absolute path"),
    (H + "kernel", "/boot/../etc/passwd", "not an absolute path in its shortest form"),
    (H + "kernel", "/no/such/kernel", "does not exist"),
    (C + "runtime.disable_new_netns", "true", "QEMU would be in the host's network namespace"),
    (C + "runtime.internetworking_model", "magic", "'magic' is not one of"),
]


@pytest.mark.parametrize(("name", "text", "reason"), BAD, ids=[f"{row[0]}={row[1]!r}" for row in BAD])
def test_a_bad_value_is_an_error_that_names_the_annotation(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        applied(tmp_path / "c.toml", ALL, {name: text})

    assert reason in str(caught.value)
    assert name in str(caught.value)


LISTED = [
    ("path", "valid_hypervisor_paths", "[]", False),
    ("path", "valid_hypervisor_paths", '["{dir}/*"]', True),
    ("path", "valid_hypervisor_paths", '["{parent}/*"]', False),
    ("virtio_fs_daemon", "valid_virtio_fs_daemon_paths", '["{dir}/f?le"]', True),
    ("virtio_fs_daemon", "valid_virtio_fs_daemon_paths", '["/elsewhere"]', False),
    ("entropy_source", "valid_entropy_sources", '["/dev/random"]', False),
    ("kernel", "valid_kernel_paths", "[]", True),
    ("kernel", "valid_kernel_paths", '["/elsewhere/*"]', False),
    ("image", "valid_image_paths", '["{dir}/file"]', True),
    ("initrd", "valid_initrd_paths", '["/x"]', False),
    ("firmware", "valid_firmware_paths", '["/x"]', False),
]


@pytest.mark.parametrize(("name", "rule", "listed", "passes"), LISTED, ids=[f"{r[1]}={r[2]}" for r in LISTED])
def test_a_path_must_be_listed(tmp_path: Path, name: str, rule: str, listed: str, passes: bool) -> None:
    file = write(tmp_path / "d/file", "x")
    listed = listed.format(dir=file.parent, parent=tmp_path)
    text = f"{ALL}{rule} = {listed}\n"
    pod = {H + name: str(file)}

    if passes:
        assert value(applied(tmp_path / "c.toml", text, pod), Table.HYPERVISOR, name) == str(file)
    else:
        with pytest.raises(InvalidArgument) as caught:
            applied(tmp_path / "c.toml", text, pod)
        assert f"refuse annotation '{H}{name}': '{file}' is not in {rule} = {listed}" in str(caught.value)
        assert f"'{tmp_path}/c.toml:3'" in str(caught.value)


def test_the_files_own_path_needs_no_list(tmp_path: Path) -> None:
    file = write(tmp_path / "qemu", "x")

    effective = applied(tmp_path / "c.toml", f'{ALL}path = "{file}"\n', {H + "path": str(file)})

    assert value(effective, Table.HYPERVISOR, "path") == str(file)


@pytest.mark.parametrize(
    ("path", "patterns", "listed"),
    [
        ("/a/b", ["/a/b"], True),
        ("/a/b", ["/a/*"], True),
        ("/a/b/c", ["/a/*"], False),
        ("/a/b", ["/*"], False),
        ("/a/b", ["/a/[^c]"], True),
        ("/a/c", ["/a/[^c]"], False),
        ("/a/b", [], False),
        ("", [""], True),
        ("/A/b", ["/a/b"], False),
    ],
)
def test_patterns_match_name_by_name(path: str, patterns: list[str], listed: bool) -> None:
    assert path_is_listed(path, patterns) is listed


def test_kernel_parameters_of_the_same_name_are_replaced(tmp_path: Path) -> None:
    text = ALL + 'kernel_params = "quiet a=1 b=\\"x y\\" a=2"\n'

    effective = applied(tmp_path / "c.toml", text, {H + "kernel_params": "a=3 c"})

    assert value(effective, Table.HYPERVISOR, "kernel_params") == 'quiet b="x y" a=3 c'


def test_an_annotation_for_one_plug_key_resets_the_other(tmp_path: Path) -> None:
    effective = applied(
        tmp_path / "c.toml", ALL + 'cold_plug_vfio = "root-port"\n', {H + "hot_plug_vfio": "bridge-port"}
    )

    assert value(effective, Table.HYPERVISOR, "cold_plug_vfio") == "no-port"
    assert value(effective, Table.HYPERVISOR, "hot_plug_vfio") == "bridge-port"
    assert refused(effective) == ()


def test_two_spellings_that_disagree_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="which is the same key"):
        applied(
            tmp_path / "c.toml",
            ALL,
            {"io.katacontainers.enable_vcpus_pinning": "true", C + "runtime.enable_vcpus_pinning": "false"},
        )


def test_initdata_and_policy_reach_the_config(tmp_path: Path) -> None:
    policy = base64.b64encode(b"package agent_policy").decode()

    config = typed(applied(tmp_path / "c.toml", ALL, {H + "cc_init_data": "eA==", C + "agent.policy": policy}))

    assert (config.hypervisor.initdata, config.agent.policy) == ("eA==", "package agent_policy")


@pytest.mark.parametrize("text", ["%", "/w=="], ids=["no-base64", "no-text"])
def test_a_policy_that_is_no_base64_of_a_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"agent\.policy.*expected base64 of a text"):
        applied(tmp_path / "c.toml", ALL, {C + "agent.policy": text})


@pytest.mark.parametrize(
    ("file", "pod", "named"),
    [
        ("disable_guest_selinux = false", {}, "hypervisor.qemu.disable_guest_selinux = false"),
        ("", {C + "runtime.guest_selinux_label": "x"}, f'guest_selinux_label = "x" (annotation {C}runtime'),
        ("shared_fs = 'virtio-9p'", {}, 'hypervisor.qemu.shared_fs = "virtio-9p"'),
        ("", {H + "block_device_driver": "nvdimm"}, f'block_device_driver = "nvdimm" (annotation {H}'),
        ("", {C + "runtime.internetworking_model": "l3forwarding"}, 'internetworking_model = "l3forwarding"'),
    ],
)
def test_no_sandbox_starts_with_a_refused_value(tmp_path: Path, file: str, pod: dict[str, str], named: str) -> None:
    path = write(tmp_path / "c.toml", f"{ALL}{file}\n")

    with pytest.raises(FailedPrecondition) as caught:
        load_config(options(path), pod, {})

    assert "not supported yet" in str(caught.value)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


def test_annotations_without_effect_and_unknown_ones_are_findings(tmp_path: Path) -> None:
    effective = applied(
        tmp_path / "c.toml",
        ALL,
        {
            H + "default_gpus": "1",
            H + "enable_iommu_platform": "true",
            "io.katacontainers.cofnig.runtime.sandbox_cgroup_only": "1",
            C + "runtime.no_such_key": "1",
            C + "shim.x": "1",
            "io.katacontainers.config_path": "/etc/passwd",
            "io.katacontainers.container.resource.swappiness": "1",
            "io.katacontainers.pkg.oci.bundle_path": "/b",
        },
    )

    typo, meant = (f"io.katacontainers.{word}.runtime.sandbox_cgroup_only" for word in ("cofnig", "config"))
    assert warnings(effective) == (
        f"annotation {typo} is not a known annotation (did you mean {meant}?)",
        f"annotation {H}default_gpus has no effect: only remote VMs have it",
        f"annotation {H}enable_iommu_platform has no effect: not implemented yet: virtio devices reach all of the "
        "guest's memory",
        f"annotation {C}runtime.no_such_key is not a known annotation",
        f"annotation {C}shim.x is not a known annotation",
        "annotation io.katacontainers.config_path has no effect: removed from Kata: a pod does not choose the node's "
        "configuration",
    )


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("remote", FailedPrecondition, "has no table hypervisor.remote"),
        ("clh", FailedPrecondition, "refuse annotation .*: clh is not supported, only qemu and remote"),
        ("nonsense", InvalidArgument, "is not one of"),
    ],
)
def test_a_pod_cannot_choose_a_hypervisor_without_a_table(
    tmp_path: Path, name: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        load_config(options(write(tmp_path / "c.toml", "")), {C + "runtime.hypervisor_name": name}, {})


def test_the_annotation_sandbox_bind_mounts_is_always_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"refuse annotation '.*sandbox_bind_mounts'"):
        applied(tmp_path / "c.toml", ALL, {C + "runtime.sandbox_bind_mounts": "/etc"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("no_such_key", ""), ("default_memroy", rf" \(did you mean {H}default_memory\?\)"), ("enable_numa", "")],
)
def test_an_unknown_hypervisor_annotation_is_refused(tmp_path: Path, name: str, hint: str) -> None:
    """Who sets it means the VM's size or safety."""
    with pytest.raises(InvalidArgument, match=f"{H}{name}': it is not a known annotation{hint}"):
        applied(tmp_path / "c.toml", ALL, {H + name: "1"})


@pytest.mark.parametrize("name", ["default_vcpus", "default_maxvcpus", "default_memory"])
def test_a_number_of_thousands_of_digits_is_a_short_error(tmp_path: Path, name: str) -> None:
    digits = "9" * 4000

    with pytest.raises(InvalidArgument) as in_annotation:
        applied(tmp_path / "a.toml", ALL, {H + name: digits})
    in_file = examined(tmp_path / "f.toml", f"[hypervisor.qemu]\n{name} = {digits}\n").errors()

    assert len(in_file) == 1
    assert "a number of more than 20 digits is not between" in in_file[0].text
    assert len(str(in_annotation.value)) < 400


def test_the_layers_of_a_block_snapshotter_are_refused_by_name(tmp_path: Path) -> None:
    name = "io.katacontainers.fs-opt.layer"

    with pytest.raises(InvalidArgument, match=f"'{name}': layers that a block snapshotter"):
        applied(tmp_path / "c.toml", ALL, {name: "x"})


@pytest.mark.parametrize("name", ["io.katacontainers.asset_hash_type", f"{H}asset_hash_type", f"{H}kernel_hash"])
def test_hash_annotations_are_accepted(tmp_path: Path, name: str) -> None:
    text = '[hypervisor.qemu]\nenable_annotations = [".*"]\n'

    before = applied(tmp_path / "c.toml", text, {})
    assert applied(tmp_path / "c.toml", text, {name: "sha512"}).findings == before.findings
