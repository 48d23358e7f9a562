"""The machine under the calls: one thread, one epoll, native coroutines, children, byte streams. Knows no message and
no container.
"""
