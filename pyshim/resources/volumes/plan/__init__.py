"""Pure: what each mount of a spec becomes. Read `volumes.py` first."""
