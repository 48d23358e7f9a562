#!/usr/bin/python3
"""A CNI plugin for the end of a chain: the pod's namespace gets permanent neighbours, as some networks set them.

Installed by `cri_session.py` beside the real plugins; isolated from the project, since containerd starts it.
Source: CNI specification 0.4.0, "Network Configuration Lists".
"""

import json
import os
import subprocess
import sys

_VERSIONS = {"cniVersion": "0.4.0", "supportedVersions": ["0.4.0"]}


def main() -> int:
    asked = json.load(sys.stdin)
    match os.environ["CNI_COMMAND"]:
        case "VERSION":
            print(json.dumps(_VERSIONS))
        case "ADD":
            for address, mac in asked["neighbours"].items():
                words = ["neigh", "replace", address, "lladdr", mac, "dev", os.environ["CNI_IFNAME"]]
                command = ["nsenter", f"--net={os.environ['CNI_NETNS']}", "ip", *words, "nud", "permanent"]
                subprocess.run(command, check=True)
            print(json.dumps(asked["prevResult"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
