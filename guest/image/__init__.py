"""Builds the guest image: kernel, loader initrd and root file system, all from Debian packages.

Read `recipe.py` first (the contents, as data), then `build.py` (the order of the steps). This room makes the files
under `.build/guest` of packages and this checkout. The programs that run in the guest are in `guest.agent`, except the
first process (`init.sh`) and the agent's entry (`start.py`). docs/GUEST.md has the contract with the host.
"""
