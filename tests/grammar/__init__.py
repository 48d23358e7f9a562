"""Does a QEMU understand an argv? What each version accepts, as data, and the check of an argv against it.

`check.py` reads an argv and compares it with a `Grammar`; `introspect.py` asks a QEMU binary for its grammar. The files
in tests/golden/qemu/grammar/ are its output for versions that are not installed here; write them anew, never by hand:

    python -m tests.grammar.introspect /usr/bin/qemu-system-x86_64 > tests/golden/qemu/grammar/7.2.json
"""
