"""`pyshim initdata encode|decode|digest`: the document of annotation cc_init_data, for whoever owns a guest."""

import argparse
import base64
import sys

from pyshim.model.confidential import SNP_HOST_DATA_BYTES, TDX_CONFIG_ID_BYTES
from pyshim.model.errors import InvalidArgument
from pyshim.plan.initdata import MAX_TEXT_BYTES, decode, disk_image, encode, parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    encoded = actions.add_parser("encode", help="a TOML document as the annotation's text")
    decoded = actions.add_parser("decode", help="the TOML document of an annotation's text")
    digest = actions.add_parser("digest", help="the digest, and the fields of TDX and SNP that will hold it")
    for action, what in ((encoded, "TOML document"), (decoded, "annotation's text"), (digest, "either of the two")):
        action.add_argument("file", nargs="?", default="-", metavar="FILE", help=f"the {what}; default: stdin")
    encoded.add_argument("--disk", metavar="FILE", help="write the disk the guest sees instead")


def run(arguments: argparse.Namespace) -> int:
    content = _read(arguments.file)
    origin = "stdin" if arguments.file == "-" else f"'{arguments.file}'"
    if arguments.action == "encode":
        initdata = parse(content, origin)
        if arguments.disk:
            with open(arguments.disk, "wb") as disk:
                disk.write(disk_image(initdata))
        else:
            print(encode(initdata))
        return 0
    initdata = decode(_text(content, origin), origin)
    if arguments.action == "decode":
        sys.stdout.buffer.write(initdata.document)
        sys.stdout.flush()
        return 0
    print(f"{initdata.algorithm}: {initdata.digest.hex()}")
    for name, length in (("tdx mrconfigid", TDX_CONFIG_ID_BYTES), ("snp host-data", SNP_HOST_DATA_BYTES)):
        print(f"{name}: {base64.b64encode(initdata.digest_of(length)).decode()}")
    return 0


def _read(path: str) -> bytes:
    """At most a byte more than any document or its text may have, so that a longer one is refused, not held."""
    if path == "-":
        return sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    with open(path, "rb") as file:
        return file.read(MAX_TEXT_BYTES + 1)


def _text(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"read initdata of {origin}: not UTF-8") from exc
