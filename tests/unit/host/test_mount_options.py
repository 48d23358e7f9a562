import pytest

from pyshim.host import syscalls as s
from pyshim.host.mounts.options import overlay_data, parse_mount_options
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.volumes import Propagation


@pytest.mark.parametrize(
    ("words", "flags", "data"),
    [
        pytest.param((), 0, (), id="nothing"),
        pytest.param(("defaults", ""), 0, (), id="words that say nothing"),
        pytest.param(("ro", "nosuid", "nodev"), s.MS_RDONLY | s.MS_NOSUID | s.MS_NODEV, (), id="flags"),
        pytest.param(("ro", "rw"), 0, (), id="the last of a pair wins, rw"),
        pytest.param(("rw", "ro"), s.MS_RDONLY, (), id="the last of a pair wins, ro"),
        pytest.param(("rbind", "ro"), s.MS_BIND | s.MS_REC | s.MS_RDONLY, (), id="recursive bind"),
        pytest.param(("size=1m", "mode=700"), 0, ("size=1m", "mode=700"), id="words of the file system"),
        pytest.param(("nouuid", "noatime"), s.MS_NOATIME, ("nouuid",), id="both"),
    ],
)
def test_words_become_flags_or_data(words: tuple[str, ...], flags: int, data: tuple[str, ...]) -> None:
    options = parse_mount_options(words, None, target="/t")

    assert (options.flags, options.data, options.loop, options.propagation) == (flags, data, False, ())


def test_loop_is_no_word_of_the_file_system() -> None:
    options = parse_mount_options(("loop", "ro"), None, target="/t")

    assert options.loop
    assert options.data == ()


def test_wanted_propagation_comes_after_the_words() -> None:
    options = parse_mount_options(("rslave",), Propagation.SHARED, target="/t")

    assert [(change.flag, change.recursive) for change in options.propagation] == [
        (s.MS_SLAVE, True),
        (s.MS_SHARED, False),
    ]


@pytest.mark.parametrize("word", ["uidmap=0:1000:10", "gidmap=0:1000:10"])
def test_id_mapping_is_refused_not_ignored(word: str) -> None:
    with pytest.raises(Unimplemented, match=r"/t.*id-mapped.*" + word):
        parse_mount_options((word,), None, target="/t")


def test_a_word_the_mount_manager_should_have_consumed_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match=r"X-containerd\.mkdir\.path=/x"):
        parse_mount_options(("X-containerd.mkdir.path=/x",), None, target="/t")


def overlay(lowers: list[str]) -> tuple[str, ...]:
    return ("index=off", "workdir=/s/9/work", "upperdir=/s/9/fs", "lowerdir=" + ":".join(lowers))


def test_overlay_options_that_fit_are_left_alone() -> None:
    words = overlay(["/s/1/fs", "/s/2/fs"])

    plan = overlay_data(words, limit_bytes=4096)

    assert plan.directory is None
    assert plan.data == ",".join(words)


def test_long_overlay_options_get_lower_directories_relative_to_their_parent() -> None:
    plan = overlay_data(overlay([f"/var/lib/snapshots/{i}/fs" for i in range(3)]), limit_bytes=60)

    assert plan.directory == "/var/lib/snapshots"
    assert plan.data == "index=off,workdir=/s/9/work,upperdir=/s/9/fs,lowerdir=0/fs:1/fs:2/fs"


@pytest.mark.parametrize(
    "lowers",
    [
        pytest.param(["/a/fs", "/b/fs"], id="no parent but the root"),
        pytest.param(["1/fs", "2/fs"], id="relative already"),
        pytest.param(["/s\\:x/1", "/s\\:x/2"], id="an escaped colon in the parent"),
    ],
)
def test_lower_directories_without_a_usable_parent_are_left_alone(lowers: list[str]) -> None:
    assert overlay_data(overlay(lowers), limit_bytes=10).directory is None


def test_an_escaped_colon_does_not_split_a_lower_directory() -> None:
    plan = overlay_data(("lowerdir=/s/a\\:b:/s/c",), limit_bytes=10)

    assert (plan.directory, plan.data) == ("/s", "lowerdir=a\\:b:c")


def test_a_lower_directory_is_never_its_own_parent() -> None:
    plan = overlay_data(("lowerdir=/s/a:/s/a/b",), limit_bytes=10)

    assert (plan.directory, plan.data) == ("/s", "lowerdir=a:a/b")
