"""Run a command of this package, or list them: `python -m my_project`.

The console script my-project (pyproject.toml) runs this module too, but does not add the current
folder to sys.path.
"""

import sys

from .safety import search_path

COMMANDS = {  # the module of each; if it was deleted, the command is not listed
    "train": "launching.train",
    **dict.fromkeys(search_path.ON_WEIGHTS, "commands"),
    "runs": "tools.runs",
    "report": "tools.report.report",
    "doctor": "tools.doctor",
    "planner": "tools.planner",
    "preflight": "tools.preflight",
    "launch": "launch",
}
if __name__ == "__main__" or "".join(sys.argv[1:2]) in COMMANDS:  # see search_path
    search_path.leave_out_untrusted("".join(sys.argv[1:2]), sys.argv[2:])  # before other imports

import runpy
from pathlib import Path


def main() -> None:
    """Run the command given as the first argument, or list all of them."""
    from . import commands
    from .config import ConfigError
    from .failures import exit_with_error
    from .settings import did_you_mean

    folder = Path(__file__).parent
    files = {name: folder / f"{at.replace('.', '/')}.py" for name, at in COMMANDS.items()}
    available = {name: file for name, file in files.items() if file.exists()}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(f"usage: python -m {__package__} COMMAND ...; COMMAND --help lists its options\n")
        for name, file in available.items():
            text = file.read_text(encoding="utf-8")
            text = getattr(commands, name).__doc__ if name in search_path.ON_WEIGHTS else text
            first_line = text.splitlines()[0].strip('"')
            print(f"  {name:10} {first_line}")
    elif command not in available:
        hint = did_you_mean(command, available) or f"; use one of {', '.join(available)}."
        exit_with_error(ConfigError(f"there is no command {command}{hint}"))
    elif command in search_path.ON_WEIGHTS:
        getattr(commands, command)(sys.argv[2:])
    else:
        del sys.argv[1]
        runpy.run_module(f"{__package__}.{COMMANDS[command]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
