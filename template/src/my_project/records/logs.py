"""Follow the output of all processes of a run until it ends.

    python -m my_project logs runs/image_classification

Reads the files that launch.py has processes write: of the newest launch on each node,
<run folder>/logs/node_<n>/<start>/attempt_<n>/<process>/stdout.log and stderr.log.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..cli import make_parser, run
from ..config import ConfigError
from ..run_folder import read_status

QUIET_SECONDS = 3.0  # after which a run that has ended has nothing more to say


def newest(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the label and path of each log file of the newest launch on each node."""
    nodes = [path for path in folder.glob("logs/node_*/") if path.name[5:].isdecimal()]
    for node in sorted(nodes, key=lambda path: int(path.name[5:])):
        starts = [path for path in node.iterdir() if path.is_dir()]
        attempts = [a for start in starts for a in start.glob("attempt_*/")]
        if attempts:
            latest = max(attempts, key=lambda path: path.stat().st_mtime)
            for process in sorted(latest.iterdir(), key=lambda path: path.name.zfill(4)):
                for stream in ("stdout.log", "stderr.log"):
                    if (process / stream).is_file():
                        yield f"{node.name}:{process.name}", process / stream


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


def main(arguments: argparse.Namespace) -> None:
    """Print the output until the run ends, then its outcome."""
    folder = Path(arguments.run)
    if not any(newest(folder)):
        raise ConfigError(
            f"{folder}/logs has no log files: they are written for runs of several processes that"
            " the scripts in launch/ start; check the path, or start the run with one of them."
        )
    for text in follow(folder, arguments.lines):
        print(text, flush=True)
    status = read_status(folder)
    print(f"{folder}: {status.get('outcome', 'no status.json')} {status.get('reason', '')}".strip())


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--lines", type=int, default=20, help="existing lines to show per file")
    with suppress(KeyboardInterrupt):
        run(main, parser.parse_args())
