"""Children that run a part of pyshim in a process of their own: in another namespace, or with heavy libraries.

Read `asking.py` first, the shim's side. `messages.py` is what both sides say.
"""
