"""Process entry: `python3 -I -S .../guest/agent/__main__.py`. Sets the import path and hands over to `main.py`, whose
code is cached.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from guest.agent.main import main

    sys.exit(main())
