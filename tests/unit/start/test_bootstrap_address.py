import os
from pathlib import Path

import pytest

from pyshim.start.address import abandon, claim, socket_path
from pyshim.start.errors import BootstrapError


def test_path_is_the_hash_of_the_cleaned_joined_parts() -> None:
    # printf /run/containerd/containerd.sock/k8s.io/abc | sha256sum
    digest = "a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72"

    path = socket_path("/run/containerd/s", "/run/containerd//x/../containerd.sock", "k8s.io", "abc")

    assert path == socket_path("/run/containerd/s", "/run/containerd/containerd.sock", "k8s.io", "abc")
    assert path == f"/run/containerd/s/{digest}"


def test_longest_socket_directory_of_containerd_fits_and_a_longer_one_is_refused() -> None:
    assert socket_path("/" + "d" * 41, "/c", "n", "g")
    with pytest.raises(BootstrapError, match="longer than 107 bytes"):
        socket_path("/" + "d" * 42, "/c", "n", "g")


def test_claimed_socket_listens_before_another_can_claim_it(tmp_path: Path) -> None:
    path = "/proc/self/cwd/s/x" if len(str(tmp_path)) > 90 else f"{tmp_path}/s/x"
    listener = claim(path)
    assert listener is not None

    assert claim(path) is None

    abandon(listener, path)
    assert not os.path.exists(path)
    again = claim(path)
    assert again is not None
    abandon(again, path)


def test_file_that_is_no_socket_is_replaced_like_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("")

    listener = claim(str(path))

    assert listener is not None
    abandon(listener, str(path))


def test_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    with pytest.raises(BootstrapError, match=r"^bind socket '.*/x': EISDIR"):
        claim(str(tmp_path / "x"))
