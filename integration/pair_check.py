"""What two processes on one file system promise each other, run as a program in two containers: first `serve DIRECTORY`
in one, which holds its ends for the others, then `meet DIRECTORY` in another, which prints a name for each that works.

Stdlib only; `test_shared_volumes.py` compares what `meet` prints.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
import time

_IN_CREATE = 0x100
_WAIT_S = 20


def serve(directory: str) -> None:
    """Holds two locks, listens, has a file mapped, watches the directory, and reads the pipe; until it is killed."""
    os.chdir(directory)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    for name, take in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        take(os.open(name, os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)
    with open("mapped", "wb") as file:
        file.write(bytes(4096))
    with open("mapped", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    os.mkfifo("pipe")
    threading.Thread(target=_read_pipe, daemon=True).start()
    libc = ctypes.CDLL(None, use_errno=True)
    inotify = libc.inotify_init1(os.O_CLOEXEC)
    assert libc.inotify_add_watch(inotify, b".", _IN_CREATE) > 0, ctypes.get_errno()
    threading.Thread(target=_watch, args=(inotify,), daemon=True).start()
    mapped[:6] = b"server"
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(mapped[16:22])


def _read_pipe() -> None:
    with open("pipe") as pipe:
        _note("read", pipe.read())


def _watch(inotify: int) -> None:
    while b"watched" not in os.read(inotify, 4096):
        pass
    _note("seen", "watched")


def _note(name: str, text: str) -> None:
    with open(f"{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{name}.new", name)


def meet(directory: str) -> None:
    os.chdir(directory)
    with open("mapped", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    if mapped[:6] == b"server":
        print("mapping read")
    mapped[16:22] = b"client"
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect("socket")
    except OSError as error:
        print(f"socket: {error.strerror}")
    else:
        print("socket")
        if client.recv(6) == b"client":
            print("mapping written")
    for name, take in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        with open(name, "r+") as file:
            try:
                take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(name)
    open("watched", "w").close()
    if _noted("seen") == "watched":
        print("inotify")
    # A pipe whose other end does not meet this one blocks for ever: a child may.
    writer = subprocess.Popen([sys.executable, "-I", "-S", "-c", "open('pipe', 'w').write('by pipe')"])
    if _noted("read") == "by pipe":
        print("pipe")
    writer.kill()


def _noted(name: str) -> str:
    end = time.monotonic() + _WAIT_S
    while not os.path.exists(name) and time.monotonic() < end:
        time.sleep(0.1)
    return open(name).read() if os.path.exists(name) else ""


if __name__ == "__main__":
    {"serve": serve, "meet": meet}[sys.argv[1]](sys.argv[2])
