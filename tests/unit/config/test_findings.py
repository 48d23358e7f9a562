"""The effective configuration of a document: origins, spellings of both runtimes, lines of mistakes."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyshim.config.effective import Level
from pyshim.config.keys import Table, Verdict, document_table
from pyshim.config.keys_runtime import OTHER_VMMS
from pyshim.config.load import build_config, raise_first_error, warnings
from pyshim.config.sources import key_lines, read_source
from pyshim.config.values import toml_value
from pyshim.model.errors import FailedPrecondition, InvalidArgument

from .documents import examined, options, write

H, A, R, F = Table.HYPERVISOR, Table.AGENT, Table.RUNTIME, Table.FACTORY

BOTH_DIALECTS = [
    ("[hypervisor.qemu]\ndefault_max_vcpus = 3", H, "default_maxvcpus", 3),
    ("[hypervisor.qemu]\nseccomp_sandbox = 'on'", H, "seccompsandbox", "on"),
    ("[hypervisor.qemu]\nblk_logical_sector_size = 512", H, "block_device_logical_sector_size", 512),
    ("[hypervisor.qemu]\nblk_physical_sector_size = 4096", H, "block_device_physical_sector_size", 4096),
    ("[hypervisor.remote]\nhypervisor_socket = '/s'", H, "remote_hypervisor_socket", "/s"),
    ("[hypervisor.remote]\nremote_hypervisor_timeout = 60", H, "remote_hypervisor_timeout", 60.0),
    ("[hypervisor.remote]\nhypervisor_timeout = 61", H, "remote_hypervisor_timeout", 61.0),
    ("[agent.kata]\ncreate_container_timeout = 5", R, "create_container_timeout", 5.0),
    ("[runtime]\ncreate_container_timeout = 6", R, "create_container_timeout", 6.0),
    ("[agent.kata]\nreconnect_timeout_ms = 45000", A, "dial_timeout", 45.0),
    ("[agent.kata]\nrequest_timeout_ms = 1500", A, "request_timeout", 1.5),
    ("[agent.kata]\ncdh_api_timeout_ms = 50000", A, "cdh_api_timeout", 50.0),
    ("[factory]\nenable_template = true", F, "enable_template", True),
    ("[hypervisor.qemu.factory]\nenable_template = true", F, "enable_template", True),
    ("[agent.kata.mem_agent]\nmem_agent_enable = true", Table.MEM_AGENT, "mem_agent_enable", True),
    # The value Kata's Rust template ships.
    (
        "[agent.kata.mem_agent]\ncompact_force_times = 9223372036854775807",
        Table.MEM_AGENT,
        "compact_force_times",
        2**63 - 1,
    ),
    ("[runtime]\npassfd_listener_port = 1030", A, "passfd_listener_port", 1030),
]


@pytest.mark.parametrize(("text", "table", "name", "value"), BOTH_DIALECTS, ids=[row[0] for row in BOTH_DIALECTS])
def test_a_key_is_accepted_where_either_runtime_has_it(
    tmp_path: Path, text: str, table: Table, name: str, value: Any
) -> None:
    effective = examined(tmp_path / "c.toml", text)

    assert effective.of(table, name).value == value
    assert effective.of(table, name).origin == f"{tmp_path}/c.toml:2"
    assert {finding.verdict for finding in effective.findings} <= {Verdict.HONOURED, Verdict.NO_EFFECT}


KATAS_MEANINGS = [
    (H, "default_vcpus", "-1", -1),
    (H, "default_vcpus", "-0.5", -1),
    (H, "default_vcpus", "0", 1),
    (H, "default_vcpus", "0.0", 1),
    (H, "default_vcpus", "4095", 4095),
    (H, "default_memory", "0", 2048),
    (H, "default_bridges", "0", 1),
    (H, "machine_type", '""', "q35"),
    (H, "shared_fs", '""', "virtio-fs"),
    (H, "block_device_driver", '""', "virtio-scsi"),
    (H, "block_device_aio", '""', "io_uring"),
    (H, "rootfs_type", '""', "ext4"),
    (H, "cold_plug_vfio", '""', "no-port"),
    (H, "hot_plug_vfio", '""', "no-port"),
    (R, "internetworking_model", '""', "tcfilter"),
    (R, "vfio_mode", '""', "guest-kernel"),
    (R, "emptydir_mode", '""', "shared-fs"),
]


@pytest.mark.parametrize(("table", "name", "text", "value"), KATAS_MEANINGS)
def test_a_value_that_kata_gives_a_meaning_has_it_without_a_word(
    tmp_path: Path, table: Table, name: str, text: str, value: Any
) -> None:
    effective = examined(tmp_path / "c.toml", f"[{document_table(table)}]\n{name} = {text}\n")

    assert effective.of(table, name).value == value
    assert [(each.level, each.verdict) for each in effective.findings] == [(Level.FINE, Verdict.HONOURED)]


def test_false_and_an_empty_list_are_no_numbers_of_kata(tmp_path: Path) -> None:
    text = "[hypervisor.qemu]\ndefault_vcpus = false\ndefault_memory = []\nmachine_type = 0\n"

    errors = [error.text for error in examined(tmp_path / "c.toml", text).errors()]

    assert errors == ["expected a number", "expected a whole number", "expected a string"]


def test_more_bridges_than_kata_makes_are_limited_with_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "[hypervisor.qemu]\ndefault_bridges = 7\n")
    source = read_source(options(path), {})

    assert build_config(source).hypervisor.default_bridges == 5
    assert warnings(examined(path)) == ("hypervisor.qemu.default_bridges is limited to 5",)


@pytest.mark.parametrize("value", ["true", "false"])
def test_use_vsock_of_kata_1_is_ignored_with_a_warning(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "c.toml", f"[hypervisor.qemu]\nuse_vsock = {value}\n")

    assert build_config(read_source(options(path), {})).hypervisor.agent_channel == "auto"
    (warning,) = warnings(examined(path))
    assert warning == (
        "hypervisor.qemu.use_vsock was removed from Kata: agent_channel decides how the agent is reached"
    )


@pytest.mark.parametrize(
    ("former", "channel"),
    [("auto", "auto"), ("true", "vhost-vsock"), ("false", "serial"), ("vhost-user", "vhost-user")],
)
def test_use_vsock_of_pyshim_0_1_keeps_its_meaning_with_a_warning(tmp_path: Path, former: str, channel: str) -> None:
    path = write(tmp_path / "c.toml", f'[hypervisor.qemu]\nuse_vsock = "{former}"\n')

    assert build_config(read_source(options(path), {})).hypervisor.agent_channel == channel
    assert warnings(examined(path)) == (
        f'hypervisor.qemu.use_vsock is called agent_channel now, and the value "{channel}"',
    )


def test_use_vsock_with_another_text_or_beside_another_channel_is_an_error(tmp_path: Path) -> None:
    unknown = examined(tmp_path / "c.toml", '[hypervisor.qemu]\nuse_vsock = "maybe"\n').errors()
    two = '[hypervisor.qemu]\nuse_vsock = "false"\nagent_channel = "vhost-user"\n'

    assert "'maybe' is not one of" in unknown[0].text
    assert "which is the same key" in examined(tmp_path / "c.toml", two).errors()[0].text


def test_two_spellings_that_disagree_are_an_error_and_two_that_agree_are_not(tmp_path: Path) -> None:
    disagree = "[agent.kata]\ndial_timeout = 30\nreconnect_timeout_ms = 3000\n"
    agree = "[agent.kata]\ndial_timeout = 3\nreconnect_timeout_ms = 3000\n"

    (error,) = examined(tmp_path / "c.toml", disagree).errors()
    assert (error.subject, str(error.place)) == ("agent.kata.reconnect_timeout_ms", f"{tmp_path}/c.toml:3")
    assert "which is the same key" in error.text
    assert examined(tmp_path / "c.toml", agree).errors() == ()


def test_a_drop_in_in_the_other_dialect_overrides_the_file(tmp_path: Path) -> None:
    write(tmp_path / "config.d/10.toml", "[agent.kata]\nreconnect_timeout_ms = 3000\n")

    effective = examined(tmp_path / "c.toml", "[agent.kata]\ndial_timeout = 30\n")

    assert effective.errors() == ()
    assert effective.of(A, "dial_timeout").value == 3.0
    assert effective.of(A, "dial_timeout").origin == f"{tmp_path}/config.d/10.toml:2"


def test_arrays_of_a_drop_in_replace(tmp_path: Path) -> None:
    write(tmp_path / "config.d/10.toml", '[agent.kata]\nkernel_modules = ["b"]\n')

    effective = examined(tmp_path / "c.toml", '[agent.kata]\nkernel_modules = ["a", "c"]\n')

    assert effective.of(A, "kernel_modules").value == ("b",)


def test_a_relative_path_starts_from_the_file_and_an_empty_program_is_looked_for(tmp_path: Path) -> None:
    effective = examined(tmp_path / "c.toml", "[hypervisor.qemu]\nkernel = '../k'\npath = ''\n")

    assert effective.of(H, "kernel").value == os.path.normpath(tmp_path / "../k")
    assert os.path.isabs(effective.of(H, "path").value)


CHOICES = [
    ("", "qemu"),
    ("[hypervisor.remote]\n", "remote"),
    ("[hypervisor.clh]\n[hypervisor.qemu]\n", "qemu"),
    ("[hypervisor.qemu]\n[hypervisor.remote]\n[runtime]\nhypervisor_name = 'remote'\n", "remote"),
]


@pytest.mark.parametrize(("text", "chosen"), CHOICES)
def test_the_hypervisor_is_the_named_one_or_the_one_that_is_there(tmp_path: Path, text: str, chosen: str) -> None:
    assert examined(write(tmp_path / "c.toml", text)).hypervisor == chosen


@pytest.mark.parametrize("name", [*OTHER_VMMS, "qmeu"])
def test_a_file_for_another_hypervisor_is_named_as_such_before_any_key_is_blamed(tmp_path: Path, name: str) -> None:
    keys = 'block_device_driver = "virtio-mmio"\nmachine_type = "virt"\ndefault_vcpus = "two"\nown_key = 1\n'
    path = write(tmp_path / "c.toml", f"\n[hypervisor.{name}]\n{keys}")

    why = r" \(did you mean qemu\?\)" if name == "qmeu" else ": the file is for another VMM"
    said = rf"c\.toml' line 2: hypervisor\.{name} is not supported, only qemu and remote{why}$"
    with pytest.raises(FailedPrecondition, match=said):
        build_config(read_source(options(path), {}))
    assert len(examined(path).findings) == 1


WITH_LINES = [
    ("[hypervisor.qemu]\n\ndefault_vcpus = 'two'", 3, "default_vcpus"),
    ("[hypervisor.qemu]\ndefault_memory = -1", 2, "default_memory"),
    ("[hypervisor.qemu]\ndefault_vcpus = nan", 2, "nan is not a usable number"),
    ("[hypervisor.qemu]\ndefault_vcpus = 1e400", 2, "1e400 is not a usable number"),
    ("[hypervisor.qemu]\ndefault_memory = '2 GiB'", 2, "expected a whole number"),
    ("[hypervisor.qemu]\nenable_annotations = ['ok', '*']", 2, "'*' is not a regular expression"),
    ("[runtime]\nunused = 1\ndisable_new_netns = true", 3, 'true needs internetworking_model = "none"'),
    ("[hypervisor.qemu]\ncold_plug_vfio = 'root-port'\nhot_plug_vfio = 'root-port'", 3, "excludes cold_plug_vfio"),
    (
        "[hypervisor.qemu]\nblk_logical_sector_size = 4096\nblk_physical_sector_size = 512",
        2,
        "4096 is above block_device_physical_sector_size = 512",
    ),
    (
        "[hypervisor.qemu]\nblock_device_cache_direct = true\nblock_device_aio = 'native'",
        3,
        '"native" needs block_device_cache_set = true and block_device_cache_direct = true',
    ),
    ("[hypervisor.qemu]\nenable_hugepages = true\ndefault_maxmemory = 1", 3, "1 MiB is less than a huge page"),
    ("runtime = 3", 1, "is not a table"),
    ("[hypervisor.qemu]\nrootless_user = 3", 2, "expected a table"),
    ("[[hypervisor.qemu.guest_extension_images]]\nname = 'x'", 1, "lacks the string 'path'"),
    ("[[hypervisor.qemu.guest_extension_images]]\nname = 'eleven-long'\npath = '/x'", 1, "is not 1 to 10 letters"),
    ("[[hypervisor.qemu.guest_extension_images]]\nname = 'x'\npath = 'x'", 1, "is not absolute"),
    ("[runtime]\nexperimental = ['force_guest_pull', 'x']", 2, "'x' is not a known feature, only force_guest_pull"),
]


@pytest.mark.parametrize(("text", "line", "reason"), WITH_LINES, ids=[row[0] for row in WITH_LINES])
def test_a_mistake_is_named_with_its_file_and_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    effective = examined(tmp_path / "c.toml", text)

    with pytest.raises(InvalidArgument) as caught:
        raise_first_error(effective)
    assert f"'{tmp_path}/c.toml' line {line}: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_mistake_in_a_drop_in_is_named_there(tmp_path: Path) -> None:
    drop_in = write(tmp_path / "config.d/10.toml", "\n[hypervisor.qemu]\ndefault_vcpus = 'two'\n")

    effective = examined(tmp_path / "c.toml", "[hypervisor.qemu]\ndefault_vcpus = 2\n")

    assert [str(error.place) for error in effective.errors()] == [f"{drop_in}:3"]


UNREADABLE = [
    ("[a]\nb = 1\n[a]\n", "line 3", InvalidArgument),
    ("a = 1\na = 2\n", "line 2", InvalidArgument),
    (b"a = 1\nb = '\xff'\n", "line 2", InvalidArgument),
    (".".join(["a"] * 20_000) + " = 1\n", "a key of more than 8 parts", InvalidArgument),
]


@pytest.mark.parametrize(
    ("text", "place", "error"), UNREADABLE, ids=["table twice", "key twice", "not UTF-8", "a long key"]
)
def test_a_text_that_is_not_toml_is_named_with_its_line(
    tmp_path: Path, text: str | bytes, place: str, error: type[Exception]
) -> None:
    path = write(tmp_path / "c.toml", text)

    with pytest.raises(error) as caught:
        read_source(options(path), {})
    assert str(path) in str(caught.value)
    assert place in str(caught.value)


def test_a_drop_in_that_is_no_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "")
    directory = tmp_path / "config.d"

    (directory / "a.toml").mkdir(parents=True)
    with pytest.raises(FailedPrecondition, match=r"config\.d/a\.toml': it is a directory"):
        read_source(options(path), {})

    (directory / "a.toml").rmdir()
    os.mkfifo(directory / "a.toml")
    with pytest.raises(FailedPrecondition, match=r"config\.d/a\.toml': it is not a regular file"):
        read_source(options(path), {})

    (directory / "a.toml").unlink()
    (directory / "a.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(FailedPrecondition, match=r"config\.d/a\.toml': No such file"):
        read_source(options(path), {})


def test_the_file_of_another_vmm_beside_ours_is_only_a_note(tmp_path: Path) -> None:
    effective = examined(tmp_path / "c.toml", "[hypervisor.qemu]\n[hypervisor.clh]\npath = '/x'\n[hypervisor.bhyve]\n")

    assert [(finding.level, finding.subject) for finding in effective.findings] == [
        (Level.NOTE, "hypervisor.clh"),
        (Level.WARNING, "hypervisor.bhyve"),
    ]


RUNTIME_RS = """\
[hypervisor.qemu]
default_vcpus = 1.0
default_memory = 2048
overhead_vcpus = 0.2
overhead_memory = 32
[runtime]
hypervisor_name = "qemu"
"""


@pytest.mark.parametrize(
    ("text", "policy", "origin"),
    [
        (RUNTIME_RS, "overhead", "4"),
        ("[hypervisor.qemu]\noverhead_memory = 32\n", "overhead", "2"),
        (f'{RUNTIME_RS}sizing_policy = "sum"\n', "sum", "8"),
        ("[hypervisor.qemu]\ndefault_memory = 512\n", "sum", "default"),
    ],
    ids=["runtime-rs", "one overhead", "our key wins", "no overhead"],
)
def test_a_file_that_names_overheads_is_sized_by_them(tmp_path: Path, text: str, policy: str, origin: str) -> None:
    setting = examined(tmp_path / "c.toml", text).of(R, "sizing_policy")

    assert setting.value == policy
    assert setting.origin.rpartition(":")[2] == origin


def test_the_feature_force_guest_pull_is_the_key_of_that_name(tmp_path: Path) -> None:
    effective = examined(tmp_path / "c.toml", '[runtime]\nexperimental = ["force_guest_pull"]\n')

    assert effective.of(R, "experimental_force_guest_pull").value is True
    assert effective.of(R, "experimental_force_guest_pull").origin.endswith("c.toml:2")


TEXTS = [
    ("nothing", "", {}),
    ("top", "\n\na = 1", {("a",): 3}),
    ("table", "[x]\na = 1\n[y.z]\nb = 2", {("x",): 1, ("x", "a"): 2, ("y",): 3, ("y", "z"): 3, ("y", "z", "b"): 4}),
    ("dotted key", "a.b . c = 1\na.d = 2", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1, ("a", "d"): 2}),
    ("quoted keys", "'a.b' = 1\n\"c\\u0064\" = 2", {("a.b",): 1, ("cd",): 2}),
    ("comments", "# [no]\na = 1 # b = 2\n#\nc = '#' # d", {("a",): 2, ("c",): 4}),
    ("list over lines", "a = [\n 1, # ]\n '[', \"]\",\n [2],\n]\nb = 1", {("a",): 1, ("b",): 6}),
    ("long string", 'a = """\nb = 1\n\\""" c = 2\n"""\nd = 1', {("a",): 1, ("d",): 5}),
    ("long string that ends in quotes", 'a = """b"""""\nc = 1', {("a",): 1, ("c",): 2}),
    ("long literal", "a = '''\nb = 1\n'' c\n'''\nd = 1", {("a",): 1, ("d",): 5}),
    ("empty strings", "a = \"\"\nb = ''\nc = 1", {("a",): 1, ("b",): 2, ("c",): 3}),
    (
        "inline table",
        "a = { b = 1, c.d = '}' }\ne = 1",
        {("a",): 1, ("a", "b"): 1, ("a", "c"): 1, ("a", "c", "d"): 1, ("e",): 2},
    ),
    ("empty inline table", "a = {}\nb = 1", {("a",): 1, ("b",): 2}),
    (
        "array of tables",
        "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3",
        {("a",): 1, ("a", "b"): 2, ("a", "c"): 5, ("a", "c", "d"): 6},
    ),
    ("windows", "a = 1\r\n[b]\r\nc = 2", {("a",): 1, ("b",): 2, ("b", "c"): 3}),
    ("dates and spaces", "a = 1979-05-27 07:32:00 # x\nb = 1", {("a",): 1, ("b",): 2}),
    ("too many lines that may end it", "a = 1\nb = [\n" + "[1],\n" * 200 + "]\nc = 1", {("a",): 1}),
    ("blanks in a header", "[ a . 'b' ]\nc = 1", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 2}),
]


@pytest.mark.parametrize(("_", "text", "lines"), TEXTS, ids=[row[0] for row in TEXTS])
def test_every_key_and_table_has_its_line(_: str, text: str, lines: dict[tuple[str, ...], int]) -> None:
    tomllib.loads(text)

    assert key_lines(text) == lines


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=6)
_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(), st.integers(-99, 99), st.text(max_size=12), st.lists(st.text(max_size=4), max_size=3)
)
_DOCUMENTS = st.dictionaries(
    _NAMES, st.dictionaries(_NAMES, _LEAVES | st.dictionaries(_NAMES, _LEAVES, max_size=2), max_size=4), max_size=4
)


@given(_DOCUMENTS)
def test_generated_documents_are_read_as_tomllib_reads_them(document: dict[str, dict[str, Any]]) -> None:
    lines = []
    expected: dict[tuple[str, ...], int] = {}
    for table, pairs in document.items():
        lines.append(f"[{toml_value(table)}]")
        expected[table,] = len(lines)
        for key, value in pairs.items():
            lines.append(f"{toml_value(key)} = {toml_value(value)}")
            expected[table, key] = len(lines)
            if isinstance(value, dict):
                expected.update({(table, key, inner): len(lines) for inner in value})
    text = "\n".join(lines)

    assert tomllib.loads(text) == document
    assert key_lines(text) == expected
