"""Client of the guest's agent: connect, call, translate. Protobuf types live in `translate.py` only.

Read `client.py` first. `samples.py` answers many questions for statistics with few calls.
"""
