"""`python3 -m guest.agent.pull SOURCE IMAGE DIRECTORY` pulls one image and prints the directory of its files."""

from __future__ import annotations

import sys

from guest.agent.pull.layers import make_image
from guest.agent.pull.sources import ImageLayout, ImageSource, PullError, Registry


def main() -> int:
    """0, or 1 with the reason on stderr."""
    source, image, images = sys.argv[1:]
    try:
        directory = make_image(open_source(source), image, images)
    except (PullError, OSError, EOFError, ValueError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    sys.stdout.write(directory)
    return 0


def open_source(text: str) -> ImageSource:
    """The source of setting `agent.image_source`. Raises PullError for a malformed setting."""
    if text.startswith("oci:/"):
        return ImageLayout(text.removeprefix("oci:"))
    if text.startswith("http://"):
        return Registry(text)
    raise PullError(f"{text[:200]!r} is no source of images: http://HOST[:PORT] and oci:/PATH are")


if __name__ == "__main__":
    sys.exit(main())
