"""Run a command of this package, or list them: see cli.py.

Also what the console script my-project runs (pyproject.toml).
"""

import sys

from .safety.search_path import leave_out_weights

if sys.argv[1:2] and sys.argv[1] in ("predict", "evaluate", "export"):
    leave_out_weights(sys.argv[2:])  # before any other import

from .cli import main

if __name__ == "__main__":
    main()
