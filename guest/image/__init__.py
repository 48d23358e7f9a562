"""The build of the guest image: kernel, loader initrd and root file system, all from Debian packages.

Lives here: everything that turns packages and this checkout into the files under `.build/guest`. Must not live here:
what runs inside the guest (that is `guest.agent`), apart from the table of system calls that is its first process and
the agent's three-line entry. Read `recipe.py` first (what goes in, as data), then `build.py` (the order of the steps).
docs/GUEST.md has the contract with the host.
"""
