"""Run the GPU tests and the benchmark on GPUs, and print a table for benchmarks/README.md.

    make test-gpu

Runs the tests marked `gpu` (where there is one GPU, several processes share it over gloo), then
the benchmark of the loop against hand-written PyTorch over NCCL.
"""

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def hardware() -> str:
    """Return the GPUs, the versions of the libraries, and the date."""
    import torch
    from torch.cuda import nccl

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl_version = ".".join(map(str, nccl.version()))
    return (
        f"{len(names)} x {names[0]}, {platform.machine()}; torch {torch.__version__}, CUDA"
        f" {torch.version.cuda}, NCCL {nccl_version}, accelerate {version('accelerate')};"
        f" {datetime.date.today().isoformat()}"
    )


def table(report: Path) -> str:
    """Return pytest's JUnit report as a Markdown table: test, outcome, seconds."""
    lines = ["| test | outcome | seconds |", "|---|---|---|"]
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].removeprefix("test_").replace("_", " ")
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "**failed**"
            elif child.tag == "skipped":
                outcome = f"skipped: {child.attrib['message']}"
        lines.append(f"| {name} | {outcome} | {float(case.attrib['time']):.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Run tests and benchmark; return 1 if one fails, 2 without a GPU."""
    argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: torch finds no NVIDIA GPU here; make test-all needs none.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"],
            cwd=ROOT / "template",
            stdout=sys.stderr,
            check=False,
        )
        results = table(report)
    loop = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/loop.py"), "--device", "cuda"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"\n{hardware()}\n\n{results}\n\n```\n{(loop.stdout or loop.stderr).rstrip()}\n```")
    return int(tests.returncode != 0 or loop.returncode != 0)


if __name__ == "__main__":
    raise SystemExit(main())
