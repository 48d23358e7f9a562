"""A configuration is read again only after a change of its files or of the programs that it names."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.config import effective
from pyshim.config.keys import Table
from pyshim.config.load import ConfigCache, fill_caches, load_config, typed
from pyshim.model.config import HYPERVISOR_PREFIX
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RuntimeOptions

from .documents import options, write

LATER_NS = 10_000_000_000


def later() -> ConfigCache:
    """For whom every file is old enough to be known by its identity."""
    return ConfigCache(clock_ns=lambda: time.time_ns() + LATER_NS)


def kernel(found: effective.Effective) -> str:
    return str(found.of(Table.HYPERVISOR, "kernel").value)


def named(path: str) -> str:
    return f'[hypervisor.qemu]\nkernel = "{path}"\n'


def test_a_configuration_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "c.toml", named("/a")), later()

    assert cache.get(options(path), {}) is cache.get(options(path), {})


def test_pods_whose_annotations_change_nothing_share_one_config(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "c.toml", named("/a") + 'enable_annotations = ["default_vcpus"]\n'), later()
    fill_caches(cache.get(options(path), {}))
    shared = typed(cache.get(options(path), {}))

    assert load_config(options(path), {"io.kubernetes.cri.sandbox-id": "a"}, {}, cache) is shared
    other = load_config(options(path), {f"{HYPERVISOR_PREFIX}default_vcpus": "3"}, {}, cache)
    assert (other.hypervisor.default_vcpus, shared.hypervisor.default_vcpus) == (3, 1)


def test_a_changed_link_to_the_file_is_followed(tmp_path: Path) -> None:
    link, cache = tmp_path / "c.toml", later()
    link.symlink_to(write(tmp_path / "a" / "c.toml", named("/a")))
    before = kernel(cache.get(options(link), {}))
    link.unlink()
    link.symlink_to(write(tmp_path / "b" / "c.toml", named("/b")))

    assert (before, kernel(cache.get(options(link), {}))) == ("/a", "/b")


def _drop_in(directory: Path) -> Path:
    return directory / "config.d" / "10.toml"


@pytest.mark.parametrize(
    ("prepare", "change"),
    [
        (lambda home: None, lambda home: write(home / "c.toml", named("/b"))),
        (lambda home: None, lambda home: write(_drop_in(home), named("/b"))),
        (lambda home: write(_drop_in(home), named("/c")), lambda home: write(_drop_in(home), named("/b"))),
        (
            lambda home: write(home / "c.toml", named("/b")) and write(_drop_in(home), named("/c")),
            lambda home: _drop_in(home).unlink(),
        ),
        (lambda home: None, lambda home: os.replace(write(home / "new", named("/b")), home / "c.toml")),
    ],
    ids=["file written", "drop-in comes", "drop-in written", "drop-in goes", "file replaced"],
)
def test_a_change_of_its_files_is_seen(
    tmp_path: Path, prepare: Callable[[Path], object], change: Callable[[Path], object]
) -> None:
    path, cache = write(tmp_path / "c.toml", named("/a")), later()
    prepare(tmp_path)
    before = kernel(cache.get(options(path), {}))
    change(tmp_path)

    assert before != "/b"
    assert kernel(cache.get(options(path), {})) == "/b"


def test_a_program_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = (str(tmp_path / "local" / "virtiofsd"), str(tmp_path / "virtiofsd"))
    monkeypatch.setitem(effective.PROGRAM_PATHS, "virtio_fs_daemon", places)  # type: ignore[arg-type]  # a dict
    path, cache = write(tmp_path / "c.toml", "[hypervisor.qemu]\n"), later()
    before = cache.get(options(path), {}).of(Table.HYPERVISOR, "virtio_fs_daemon").value
    write(tmp_path / "virtiofsd", "").chmod(0o755)

    assert before == places[0]
    assert cache.get(options(path), {}).of(Table.HYPERVISOR, "virtio_fs_daemon").value == places[1]


def test_a_file_changed_just_now_is_not_cached(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "c.toml", named("/a")), ConfigCache()

    assert cache.get(options(path), {}) is not cache.get(options(path), {})


def test_a_read_error_is_raised_until_the_file_can_be_read(tmp_path: Path) -> None:
    path, cache = tmp_path / "c.toml", later()

    for _ in range(2):
        with pytest.raises(FailedPrecondition, match=r"c\.toml': No such file"):
            cache.get(options(path), {})
    write(path, "[")
    with pytest.raises(InvalidArgument, match=r"c\.toml"):
        cache.get(options(path), {})
    assert kernel(cache.get(options(write(path, named("/a"))), {})) == "/a"


def test_a_text_of_the_options_is_read_each_time() -> None:
    cache = later()
    texts = [RuntimeOptions(config_path="", config_body=named(path).encode()) for path in ("/a", "/b")]

    assert [kernel(cache.get(text, {})) for text in texts] == ["/a", "/b"]


def test_the_cache_has_a_limited_size(tmp_path: Path) -> None:
    cache = later()
    paths = [write(tmp_path / f"{number}.toml", named(f"/{number}")) for number in range(40)]

    assert [kernel(cache.get(options(path), {})) for path in paths] == [f"/{number}" for number in range(40)]
    assert len(cache._entries) < 20
