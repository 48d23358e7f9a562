"""`python -m guest.image build`: make the guest's kernel, initrd and root image."""

import argparse
import os
import sys
from pathlib import Path

from guest.image.build import Origin, build, find_architecture
from guest.image.errors import BuildError
from guest.image.recipe import ARCHITECTURES, SUITES

CHECKOUT = Path(__file__).resolve().parents[2]


def _say(text: str) -> None:
    print(f"guest: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """0 when the image is there and current; 1 with one line on standard error when it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m guest.image", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser("build", help="build the guest image unless it is current")
    action.add_argument(
        "--out",
        type=Path,
        help="directory for the artefacts; default: .build/guest, and .build/guest-ARCH with --arch of another machine",
    )
    action.add_argument("--cache", type=Path, default=CHECKOUT / ".build/cache/guest", help="directory for packages")
    action.add_argument("--kata-agent", type=Path, help="a kata-agent that is the guest's agent in place of ours")
    action.add_argument(
        "--suite",
        default="",
        help=f"Debian's release in the guest: {', '.join(suite.codename for suite in SUITES)} (default: the first)",
    )
    action.add_argument(
        "--arch",
        default=os.uname().machine,
        help=f"the guest's processor: {', '.join(each.name for each in ARCHITECTURES)} (default: this machine's)",
    )
    action.add_argument("--mirror", default="", metavar="URL", help="a Debian mirror; default: that of the host's apt")
    action.add_argument(
        "--security-mirror", default="", metavar="URL", help="of security updates; default: beside the mirror"
    )
    action.add_argument(
        "--snapshot", default="", metavar="TIME", help="packages of snapshot.debian.org, as in 20260101T000000Z"
    )
    action.add_argument(
        "--keyring", type=Path, metavar="FILE", help="Debian's keys; default: of debian-archive-keyring"
    )
    action.add_argument("--update", action="store_true", help="take the newest packages, not those of the last build")
    action.add_argument(
        "--expect", type=Path, metavar="MANIFEST", help="fail unless the packages are those of this one"
    )
    options = parser.parse_args(arguments)
    os.umask(0o022)  # the modes in the image are those of new files
    try:
        architecture = find_architecture(options.arch)
        name = "guest" if architecture.machine == os.uname().machine else f"guest-{architecture.name}"
        build(
            checkout=CHECKOUT,
            out=(options.out or CHECKOUT / ".build" / name).resolve(),
            cache=options.cache.resolve(),
            kata_agent=options.kata_agent and options.kata_agent.resolve(),
            origin=Origin(
                suite=options.suite,
                architecture=architecture.name,
                mirror=options.mirror,
                security_mirror=options.security_mirror,
                snapshot=options.snapshot,
                keyring=options.keyring,
                update=options.update,
            ),
            expected=options.expect,
            progress=_say,
        )
    except BuildError as exc:
        print(f"guest: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
