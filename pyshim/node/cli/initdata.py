"""`pyshim initdata encode|digest`: the document of annotation cc_init_data, for the owner of a guest."""

import base64

import click

from pyshim.model.confidential import SNP_HOST_DATA_BYTES, TDX_CONFIG_ID_BYTES
from pyshim.model.errors import InvalidArgument
from pyshim.node.cli.options import read_limited
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.resources.confidential.plan.initdata import MAX_TEXT_BYTES, decode, disk_image, encode, parse


@click.group(
    epilog=examples(
        "pyshim initdata encode initdata.toml", "pyshim initdata encode initdata.toml | pyshim initdata digest"
    )
)
def command() -> None:
    """Encode and digest the initdata document of a confidential guest, which its owner has measured."""


@command.command("encode")
@click.argument("file", metavar="[FILE]", default="-")
@click.option("--disk", metavar="FILE", help="Write the disk the guest sees instead.")
def _encode(file: str, disk: str | None) -> int:
    """A TOML document as the annotation's text. FILE is by default stdin."""
    initdata = parse(read_limited(file, MAX_TEXT_BYTES), _origin(file))
    if disk:
        with open(disk, "wb") as image:
            image.write(disk_image(initdata))
    else:
        print(encode(initdata))
    return 0


@command.command("digest")
@click.argument("file", metavar="[FILE]", default="-")
@json_option
def _digest(file: str, as_json: bool) -> int:
    """The digest of an annotation's text, and the fields of TDX and SNP that will hold it. FILE is by default stdin."""
    initdata = decode(_text(read_limited(file, MAX_TEXT_BYTES), _origin(file)), _origin(file))
    fields = {
        name: base64.b64encode(initdata.digest_of(length)).decode()
        for name, length in (("tdx mrconfigid", TDX_CONFIG_ID_BYTES), ("snp host-data", SNP_HOST_DATA_BYTES))
    }
    rows = {str(initdata.algorithm): initdata.digest.hex(), **fields}
    if as_json:
        print_json(rows)
    else:
        print("\n".join(f"{name}: {value}" for name, value in rows.items()))
    return 0


def _origin(path: str) -> str:
    return "stdin" if path == "-" else f"'{path}'"


def _text(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"read initdata of {origin}: not UTF-8") from exc
