"""The program that the guest's interpreter runs as process 1: /usr/lib/agent/start.py in the image."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from guest.agent.__main__ import main

    raise SystemExit(main())
