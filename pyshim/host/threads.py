"""A thread for one piece of work that changes properties of its thread: namespaces, root, working directory.

Imports nothing heavy: `delete` uses it too.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_short_thread(work: Callable[[], T]) -> T:
    """The result of `work`, or its exception, from a thread that has ended. Blocking."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=f"short/{work.__name__}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
