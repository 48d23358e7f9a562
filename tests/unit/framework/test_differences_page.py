"""docs/DIFFERENCES.md is the table by which the comparison with runc judges."""

from pathlib import Path

from integration.comparison.allowed import ALLOWED, page, unexplained, unneeded

PAGE = Path(__file__).parents[3] / "docs" / "DIFFERENCES.md"


def test_the_page_has_the_table_of_allowed_differences() -> None:
    assert page() in PAGE.read_text()


def test_a_difference_is_allowed_by_name_and_scene() -> None:
    differs = {"mount./.type": ("runc's", "ours"), "mount./data.type": ("runc's", "ours")}
    assert unexplained("root", differs) == ["mount./data.type"]
    assert unexplained("privileged", {"device.opens.kvm": None}) == []
    assert unexplained("root", {"device.opens.kvm": None}) == ["device.opens.kvm"]


def test_a_pattern_that_no_scene_needs_is_named() -> None:
    of_all = [pattern for one in ALLOWED for pattern in one.facts if not one.on]
    needed = {"privileged": of_all, "user": of_all}

    assert unneeded(needed) == []
    assert unneeded({scene: [name for name in names if name != "link.eth0.*"] for scene, names in needed.items()}) == [
        "link.eth0.*"
    ]
    assert "device.opens.*" in unneeded({"root": of_all}), "it is of another scene"
    assert "cgroup.*" not in unneeded({}), "it depends on the node"
