"""The operator's command `pyshim`: what a person at a shell asks of this node. Each subcommand is a module that is
imported when it is named; none of this is ever loaded by the shim. Read `command.py` first.
"""
