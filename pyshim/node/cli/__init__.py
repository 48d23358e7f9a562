"""The operator's command `pyshim`. Each subcommand is a module that is imported only when it is called. No shim imports
this room. Read `command.py` first.
"""
