"""A program of the tests: calls `start` as the launcher does, but for a socket directory and a daemon of the test's.

    start_driver.py <repository> <socket directory> <daemon script> <words of containerd>...

The zygote's directory is the socket directory's name with ".z" behind it. Run under `python -I -S`.
With START_IMPORTS_TO in the environment it writes every module that was imported, with the file that imported it, to
the file named there.
"""

import os
import sys

_repository, _socket_dir, _daemon, *_words = sys.argv[1:]
sys.path.append(_repository)
_seen: "list[tuple[str, str]]" = []


class _Witness:
    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        _seen.append((name, frame.f_code.co_filename))


sys.meta_path.insert(0, _Witness)

from pyshim.start import invocation, start  # noqa: E402

_code = start.main(invocation.parse(_words), launcher=_daemon, socket_dir=_socket_dir, zygote_dir=f"{_socket_dir}.z")
if _file_name := os.environ.get("START_IMPORTS_TO"):
    _importers = dict(reversed(_seen))
    with open(_file_name, "w") as _file:
        for _name in sys.modules:
            _file.write(f"{_name}\t{_importers.get(_name, 'the interpreter')}\n")
sys.exit(_code)
