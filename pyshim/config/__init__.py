"""The configuration: TOML files and annotations become one typed `Config`. No other room reads these files.

`keys.py` describes a key, and `keys_*.py` list all keys with type, default and meaning. `sources.py` finds the files
and merges drop-ins, `effective.py` computes the value of each key, `load.py` does all of it for a sandbox: read it
first. Kata's files work unchanged; keys without effect are named in a warning.
"""
