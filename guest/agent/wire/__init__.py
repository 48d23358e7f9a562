"""Protobuf without the protobuf library: importing that costs the guest more than everything else the agent does before
its first answer.

`schema.py` holds the tables, `codec.py` reads and writes bytes by them. A unit test compares both with the generated
modules of protos/.
"""
