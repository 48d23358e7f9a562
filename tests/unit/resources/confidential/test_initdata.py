"""Initdata: what is read, what is refused, and how little of it is held meanwhile."""

import base64
import gzip
import hashlib
import tracemalloc

import pytest

from pyshim.model.errors import InvalidArgument
from pyshim.resources.confidential.plan.initdata import (
    MAX_DOCUMENT_BYTES,
    MAX_TEXT_BYTES,
    decode,
    disk_image,
    encode,
    parse,
)

DOCUMENT = b"algorithm = \"sha256\"\nversion = \"0.1.0\"\n\n[data]\n\"aa.toml\" = '''\n[token_configs]\n'''\n"


def packed(document: bytes) -> str:
    return base64.b64encode(gzip.compress(document, mtime=0)).decode()


@pytest.mark.parametrize(
    "text",
    [packed(DOCUMENT), DOCUMENT.decode(), packed(DOCUMENT)[:40] + "\n" + packed(DOCUMENT)[40:]],
    ids=["packed", "plain", "packed, in lines"],
)
def test_the_document_is_read_byte_for_byte(text: str) -> None:
    initdata = decode(text, "test")

    assert (initdata.document, initdata.algorithm, initdata.version) == (DOCUMENT, "sha256", "0.1.0")
    assert initdata.data == {"aa.toml": "[token_configs]\n"}
    assert initdata.digest == hashlib.sha256(DOCUMENT).digest()


@pytest.mark.parametrize(
    ("algorithm", "length"), [("sha256", 32), ("sha384", 32), ("sha512", 32), ("sha256", 48), ("sha512", 48)]
)
def test_a_field_holds_the_digest_cut_or_padded(algorithm: str, length: int) -> None:
    document = DOCUMENT.replace(b"sha256", algorithm.encode())
    digest = hashlib.new(algorithm, document).digest()

    field = parse(document, "test").digest_of(length)

    assert field == (digest + bytes(16))[:length]


def test_encoding_is_undone_by_decoding_and_does_not_depend_on_the_time() -> None:
    text = encode(parse(DOCUMENT, "test"))

    assert decode(text, "test").document == DOCUMENT
    assert base64.b64decode(text)[4:8] == bytes(4), "gzip's field for the time"


def test_the_disk_is_what_katas_guest_looks_for() -> None:
    disk = disk_image(parse(DOCUMENT, "test"))

    length = int.from_bytes(disk[8:16], "little")
    assert (disk[:8], len(disk) % 512) == (b"initdata", 0)
    assert gzip.decompress(disk[16 : 16 + length]) == DOCUMENT
    assert disk[16 + length :].strip(b"\0") == b""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("a", "not base64", id="no base64"),
        pytest.param("äöü", "not base64", id="no ASCII"),
        pytest.param("QUJD", "not gzip", id="no gzip"),
        pytest.param("", "ends early", id="nothing"),
        pytest.param(base64.b64encode(gzip.compress(DOCUMENT)[:-9]).decode(), "ends early", id="cut off"),
        pytest.param(base64.b64encode(gzip.compress(DOCUMENT) + b"x").decode(), "bytes after", id="more behind"),
        pytest.param(packed(b"\xff\xfe"), "not UTF-8", id="no text"),
        pytest.param(packed(b"a = "), "not TOML", id="no TOML"),
        pytest.param(packed(b"a = " + b"[" * 100_000), "not TOML", id="nested without end"),
        pytest.param(
            packed(DOCUMENT.replace(b"sha256", b"md5")),
            "algorithm 'md5' is not one of sha256, sha384, sha512",
            id="algorithm",
        ),
        pytest.param(packed(DOCUMENT.replace(b"0.1.0", b"9")), "version '9' is not one of", id="version"),
        pytest.param(packed(DOCUMENT.replace(b"algorithm", b"algo")), "algorithm 'None'", id="no algorithm"),
        pytest.param(
            packed(DOCUMENT.split(b"[data]")[0] + b"data = 3"), "data is not a table of strings", id="data is a number"
        ),
        pytest.param(packed(DOCUMENT + b"b = 1"), "data is not a table of strings", id="a number in the data"),
        pytest.param("A" * (MAX_TEXT_BYTES + 1), "at most", id="too long"),
        pytest.param('"' + "A" * MAX_DOCUMENT_BYTES, f"at most {MAX_DOCUMENT_BYTES}", id="a document too long"),
        pytest.param(packed(b"#" * (MAX_DOCUMENT_BYTES + 1)), "once unpacked", id="too long once unpacked"),
    ],
)
def test_what_is_wrong_is_said_with_its_origin(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(text, "annotation 'x'")

    assert str(caught.value).startswith("read initdata of annotation 'x': ")
    assert reason in str(caught.value)


def test_a_bomb_is_never_unpacked() -> None:
    bomb = packed(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="once unpacked"):
            decode(bomb, "test")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 16 << 20


@pytest.mark.parametrize("part", ["a", '"a"', "'\"'", "a ", r'"\""'])
@pytest.mark.parametrize("before", ["", 'x = """\\""""""\n', "x = ''''''\n", "# '''\n", "x = '\"'\n", "["])
def test_a_key_of_very_many_parts_is_refused_before_it_takes_memory(before: str, part: str) -> None:
    document = before + f"{part}." * 2000 + "a = 1\n"

    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="a key of more than 8 parts"):
            parse(document.encode(), "test")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["'''{}'''", '"""{}"""', '"{}"', "'{}'", r'"""\"""{}"""', '"\\"{}"', "1 # {}"])
def test_dots_in_texts_and_comments_make_no_key(text: str) -> None:
    document = f"notes = {text.replace('{}', 'a.b.' * 100)}\n".encode() + DOCUMENT

    assert parse(document, "test").data == {"aa.toml": "[token_configs]\n"}
