"""The guest's bill of materials, SPDX 2.3 as JSON: the contents of the images, with versions and digests."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from guest.image.recipe import MTIME_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from guest.image.debian import Package

SBOM = "sbom.spdx.json"
_GUEST = "SPDXRef-guest"


def bill_of_materials(packages: Iterable[Package], libraries: Mapping[str, str], *, agent: str, key: str) -> str:
    """The document. `libraries` are Python packages with their versions; `agent` is the version of ours or of Kata's.

    The same inputs give the same bytes: the time is that of the images' files, the name has their key.
    """
    parts = [
        *(_debian(package) for package in packages),
        *(part(name, version, f"pkg:pypi/{quote(name)}@{quote(version)}") for name, version in libraries.items()),
    ]
    guest = {**part("pyshim-guest", agent, f"pkg:generic/pyshim-guest@{quote(agent)}"), "SPDXID": _GUEST}
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "pyshim-guest",
        "documentNamespace": f"https://spdx.org/spdxdocs/pyshim-guest-{key}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(MTIME_S)),
            "creators": ["Tool: pyshim-guest-image"],
        },
        "packages": [guest, *parts],
        "relationships": [
            related("SPDXRef-DOCUMENT", "DESCRIBES", _GUEST),
            *(related(_GUEST, "CONTAINS", str(each["SPDXID"])) for each in parts),
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _debian(package: Package) -> dict[str, object]:
    locator = f"pkg:deb/debian/{quote(package.name)}@{quote(package.version)}?arch={package.architecture}"
    checksum = {"algorithm": "SHA256", "checksumValue": package.sha256}
    return {**part(package.name, package.version, locator), "checksums": [checksum]}


def part(name: str, version: str, locator: str) -> dict[str, object]:
    """A package of an SPDX document. `locator` is its purl."""
    # An SPDX id has letters, digits, dots and hyphens only.
    return {
        "SPDXID": f"SPDXRef-{name.replace('_', '-').replace('+', '-plus-')}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}
        ],
    }


def related(element: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": other}
