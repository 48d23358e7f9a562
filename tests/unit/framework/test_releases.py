"""Which release of containerd is the newest."""

import pytest

from integration.framework.releases import newest_version, release_of


def test_the_newest_release_is_the_highest_by_number_and_no_candidate() -> None:
    served = "github.com/containerd/containerd/v2 v2.9.1 v2.10.0 v2.10.2 v2.10.11 v2.11.0-rc.1 v2.0.0".split()

    assert newest_version(served) == "v2.10.11"
    assert release_of("v2.10.11").numbers == (2, 10)


def test_without_a_release_the_choice_fails() -> None:
    with pytest.raises(ValueError, match="serves no release"):
        newest_version(["github.com/containerd/containerd/v2", "v2.0.0-beta.1"])
