"""TOML to one typed `Config`; nothing else reads configuration files.

`keys.py` is the table of every key with type, default and range; `sources.py` finds the files and merges drop-ins;
`load.py` puts both together. Kata's files work unchanged: its keys that have no effect here are named in a warning.
"""
