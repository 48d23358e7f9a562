"""`pyshim config initdata`."""

import base64
import gzip
import hashlib
from pathlib import Path

import pytest

from pyshim.__main__ import operator_main

DOCUMENT = b'version = "0.1.0"\nalgorithm = "sha256"\n[data]\n'


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "initdata.toml"
    path.write_bytes(DOCUMENT)
    return path


def test_the_encoded_text_is_gzip_in_base64(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["config", "initdata", str(document)]) == 0

    assert gzip.decompress(base64.b64decode(capsys.readouterr().out)) == DOCUMENT


def test_digest_shows_what_each_technology_will_report(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["config", "initdata", "--digest", str(document)]) == 0

    digest = hashlib.sha256(DOCUMENT).digest()
    assert capsys.readouterr().out.splitlines() == [
        f"sha256: {digest.hex()}",
        f"tdx mrconfigid: {base64.b64encode(digest + bytes(16)).decode()}",
        f"snp host-data: {base64.b64encode(digest).decode()}",
    ]


def test_the_guests_disk_can_be_had(document: Path, tmp_path: Path) -> None:
    assert operator_main(["config", "initdata", str(document), "--disk", str(tmp_path / "disk")]) == 0

    assert (tmp_path / "disk").read_bytes().startswith(b"initdata")


@pytest.mark.parametrize("content", [b"\xff", b"version", b"x" * (3 << 20)], ids=["no-text", "no-toml", "too-long"])
@pytest.mark.parametrize("action", ["", "--digest"])
def test_unreadable_initdata_is_one_line_on_stderr(
    document: Path, action: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    document.write_bytes(content)

    assert operator_main(["config", "initdata", *action.split(), str(document)]) == 1

    error = capsys.readouterr().err
    assert error.startswith("pyshim: read ")
    assert f"'{document}': " in error
    assert error.count("\n") == 1
