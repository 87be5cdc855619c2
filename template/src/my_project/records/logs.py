"""Follow the output of all processes of a run until it ends.

    python -m my_project logs runs/image_classification
    python -m my_project logs configs/image_classification.yaml --optim.lr 3e-3

Takes the run folder, or what was typed after train. Reads the files that each process writes
(process.write_logs): of the newest start on each node, <run folder>/logs/node_<n>/<start>/, with
rank_<rank>.log for a process, and launcher.log for accelerate launch.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..cli import make_parser, run
from ..command_line import check
from ..config import ConfigError
from ..run_folder import read_status
from ..train_command import read_options

QUIET_SECONDS = 3.0  # after which a run that has ended has nothing more to say


def newest(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the label and path of each log file of the newest start on each node."""
    nodes = [path for path in folder.glob("logs/node_*/") if path.name[5:].isdecimal()]
    for node in sorted(nodes, key=lambda path: int(path.name[5:])):
        # their names begin with the time
        starts = sorted(path for path in node.iterdir() if path.is_dir())
        for path in sorted(starts[-1].glob("*.log")) if starts else ():
            kind, _, rank = path.stem.partition("_")
            yield f"node {node.name[5:]} {kind} {int(rank) if rank else ''}".strip(), path


def follow(folder: Path, lines: int, poll_seconds: float = 0.5) -> Iterator[str]:
    """Yield each line with the node and the process that printed it.

    Args:
        folder: the run folder.
        lines: the number of existing lines of each file to yield first, as with tail -n.
        poll_seconds: how often to look for more.
    """
    offsets: dict[Path, int] = {}
    quiet_since = time.monotonic()
    while True:
        for label, path in newest(folder):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                whole, _, rest = file.read().rpartition(b"\n")
                new = whole.decode(errors="replace").splitlines() if whole else []
                at_first = path not in offsets
                offsets[path] = file.tell() - len(rest)
            for text in new[-lines:] if at_first else new:
                quiet_since = time.monotonic()
                yield f"{label} | {text}"
        ended = read_status(folder).get("outcome") != "running"
        if ended and time.monotonic() - quiet_since > QUIET_SECONDS:
            return
        time.sleep(poll_seconds)


def find_folder(arguments: argparse.Namespace, settings: list[str]) -> Path:
    """Return the run folder that is given, or that the settings name."""
    if not settings and Path(arguments.run).suffix not in (".yaml", ".yml"):
        return Path(arguments.run)
    return check(list(read_options([arguments.run, *settings]).settings)).folder


def main(arguments: argparse.Namespace, settings: list[str]) -> None:
    """Print the output until the run ends, then its outcome."""
    folder = find_folder(arguments, settings)
    if not any(newest(folder)):
        raise ConfigError(
            f"{folder}/logs has no log files: they are written for runs that the command train or"
            " the scripts in launch/ start; check the path, or start the run with one of them."
        )
    for text in follow(folder, arguments.lines):
        print(text, flush=True)
    status = read_status(folder)
    print(f"{folder}: {status.get('outcome', 'no status.json')} {status.get('reason', '')}".strip())


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the run folder, or the config file of the run")
    parser.add_argument("--lines", type=int, default=20, help="existing lines to show per file")
    with suppress(KeyboardInterrupt):
        run(main, *parser.parse_known_args())
