"""Pure: endpoints, taps, rates, directly attached devices, the relay of port-forward. Read `network.py` first."""
