"""Nodes that leave a run, come back or wait as spares: eight of the cases of node_faults.py.

make faults runs them all, and prints the table of docs/faults.md.
"""

import node_faults
import pytest
from hosts import NEEDS_HOSTS
from node_faults import CASES

pytestmark = NEEDS_HOSTS
EIGHT = [
    "power 1 step back",
    "power 1 2 step",
    "power 2 join",
    "power 2 save",
    "cut 20 s 2 step",
    "launcher told to stop 2 evaluation",
    "power 0 step",
    "launcher told to stop 0 step back",
]


@pytest.mark.parametrize("name", EIGHT)
def test_a_run_loses_nodes_and_goes_on_or_ends_by_name(name):
    case = next(case for case in CASES if str(case) == name)
    assert node_faults.run(case)
