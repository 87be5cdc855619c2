"""Start this node's part of a run, as accelerate launch would (launching/launch.py)."""

import sys

from .exits import run
from .launching.launch import main

if __name__ == "__main__":
    run(main, sys.argv[1:])
