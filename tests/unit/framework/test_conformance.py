"""What `make conformance` reads of critest's report, and the images that it serves to the suite."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from integration.conformance.__main__ import Spec, leaf, read_report
from integration.conformance.suite_images import SuiteImages

_REPORT = """<testsuites><testsuite>
<testcase name="[BeforeSuite]" status="passed"/>
<testcase name="[It] [k8s.io] Container runtime should support exec [Conformance]" status="passed"/>
<testcase name="[It] [k8s.io] Networking runtime should support port mapping" status="failed">
<failure message="no answer&#10;at line 3" type="failed"/></testcase>
</testsuite></testsuites>"""


def test_a_report_gives_each_spec_with_the_first_line_of_its_failure(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(_REPORT)

    first, second = read_report(tmp_path / "junit.xml")

    assert (first.status, first.reason) == ("passed", "")
    assert (second.status, second.reason) == ("failed", "no answer")
    with pytest.raises(FileNotFoundError):
        read_report(tmp_path / "none.xml")


@pytest.mark.parametrize(
    ("name", "leaf_name"),
    [
        (
            "[It] [k8s.io] Container runtime should support basic runtime should support exec [Conformance]",
            "support exec",
        ),
        ("[It] [k8s.io] Security Context bucket runtime should support HostIpc is true", "support HostIpc is true"),
        (
            "[It] [k8s.io] Image Manager public image should be pulled [Conformance]",
            "Image Manager public image should be pulled",
        ),
    ],
    ids=["labelled", "plain", "no runtime"],
)
def test_a_spec_is_listed_by_the_end_of_its_name(name: str, leaf_name: str) -> None:
    assert leaf(Spec(name, "failed", "")) == leaf_name


def test_tag_and_digest_lead_to_one_manifest_whose_blobs_are_served() -> None:
    images = SuiteImages()
    images.add("group/one:1", User="1002")
    images.add("group/two:1")

    digest = images.digest("group/one", "1")

    assert digest is not None
    assert images.digest("group/one", digest) == digest
    assert images.digest("group/two", "1") != digest
    assert images.digest("group/one", "2") is None
    manifest = json.loads(images.blobs[digest])
    named = [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
    assert all(name == f"sha256:{hashlib.sha256(images.blobs[name]).hexdigest()}" for name in named)
    assert json.loads(images.blobs[manifest["config"]["digest"]])["config"]["User"] == "1002"
