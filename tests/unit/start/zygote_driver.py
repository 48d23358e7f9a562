"""A program of the tests: a zygote whose forks run the daemon script that `start` names.

    zygote_driver.py <repository> <zygote's directory> <idle seconds> <modules to import, with commas>

Run under `python -I -S`.
"""

import sys

_repository, _directory, _idle_s, _modules = sys.argv[1:]
sys.path.append(_repository)

from pyshim.zygote import server  # noqa: E402

_prepared: list[int] = []
_words = server.run(
    directory=_directory,
    idle_s=float(_idle_s),
    modules=tuple(filter(None, _modules.split(","))),
    prepare=lambda request: _prepared.append(request.pid),
)
if _words is not None:
    import runpy

    runpy.run_path(sys.argv[0], run_name="__main__", init_globals={"prepared": _prepared})
