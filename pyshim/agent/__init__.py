"""Client of the guest's agent: connect, call, translate. Protobuf types live in `translate.py` only."""
