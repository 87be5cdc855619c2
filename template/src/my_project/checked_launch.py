"""Check the settings of the recipe and the number of GPUs, then run accelerate launch.

In the launcher's own process, since both import torch, which takes seconds.
"""

import sys
import traceback

from .command_line import parse
from .config import ConfigError
from .failures import exit_with_error


def check(gpus: int, arguments: list[str]) -> None:
    """Check the command line of accelerate launch with the train module.

    Args:
        gpus: the number of GPUs that the processes of this node need.
        arguments: the options of accelerate launch, -m, the module and its options.

    Raises:
        ConfigError: a field of the recipe is wrong, or GPUs are missing.
    """
    parse(arguments[arguments.index("-m") + 2 :])
    if gpus:
        from .devices import check_gpus

        check_gpus(gpus)


def main() -> None:
    """Check, then launch."""
    try:
        check(int(sys.argv.pop(1)), sys.argv[1:])
    except ConfigError as error:
        exit_with_error(error)
    except Exception:  # of the recipe's module, which may need a rank: the processes report it
        traceback.print_exc()
    from accelerate.commands import launch

    sys.argv[0] = "accelerate launch"
    launch.main()


if __name__ == "__main__":
    main()
