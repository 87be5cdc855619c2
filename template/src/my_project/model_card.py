"""Write export/README.md, the model card of the Hugging Face Hub, from the records of a run.

It says what was trained, on which data, with which results, and how to load it; no license, which
only the owner knows, and no path or secret. A page that somebody has edited is kept.
"""

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from .files import read_own
from .run_files import read_info, records
from .run_folder import Run
from .safety.redaction import is_secret, mask
from .words import PACKAGE, format_metric, printable

NEW_LINE = "\n"
MOST_METRICS = 8  # so that the page stays short
MARK = "<!-- written from the records; an edited page is kept: {} -->\n"
IS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # of a dataset, not a path


def write_model_card(run: Run, model: nn.Module, folder: Path) -> None:
    """Write README.md into the folder that is to become export/, or keep the owner's.

    Args:
        run: the run folder, whose export/ is that of before.
        model: its parameters are counted.
        folder: may hold a README.md of the recipe's export, which stays.
    """
    before, path = run.folder / "export" / "README.md", folder / "README.md"
    if os.path.lexists(before) and not is_written_here(before):
        shutil.copy2(before, path, follow_symlinks=False)
    elif not os.path.lexists(path):
        text = model_card(run, model)
        path.write_text(text + MARK.format(digest(text)), encoding="utf-8")


def is_written_here(path: Path) -> bool:
    """Return whether a page is as this module has written it."""
    with suppress(OSError, ValueError):
        text, start, end = read_own(path).decode().rpartition(MARK.partition("{}")[0])
        return f"{start}{end}" == MARK.format(digest(text))
    return False


def digest(text: str) -> str:
    """Return a hash by which a change of the text is noticed."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_card(run: Run, model: nn.Module) -> str:
    """Return the text of the page."""
    config, kind = run.config, type(run.config.recipe)
    name = f"{kind.__module__}.{kind.__qualname__}"
    info, batch_size = read_info(run.folder), config.batches.global_batch_size
    count = sum(parameter.numel() for parameter in model.parameters())
    commit = f", at commit {info.git_commit}" if info.git_commit else ""
    commit += " with changes that were not committed" * bool(info.git_dirty)
    trusted = "" if name.startswith(f"{PACKAGE}.") else f', ["{name}"]'
    dataset, is_on_hub = dataset_name(config.recipe)
    datasets = f"datasets: [{dataset}]\n" * is_on_hub
    sizes = [
        f"- {cell(name)}: {length:,}{' samples' * ('lanes' not in name)}"
        for name, length in run.lengths.items()
    ]
    return f"""---
library_name: {PACKAGE}
tags: [pytorch, safetensors, accelerate]
{datasets}---

# {cell(config.run_name)}

A `{kind.__qualname__}` with {count:,} parameters, trained by `{name}` of the project
`{PACKAGE}`{commit}, for {run.step:,} steps of {batch_size:,} samples with seed {config.seed}.

## Data

{NEW_LINE.join([f"- dataset: {dataset}"] * bool(dataset) + sizes)}

## Results

{results(run)}
## How to load it

With the project installed, in the folder that holds this one:

```python
from pathlib import Path

from {PACKAGE}.weights import load

config, data_info, model = load(Path("export"){trusted})
```
"""


def dataset_name(recipe: Any) -> tuple[str, bool]:
    """Return the recipe's dataset and whether it has the form of one on the Hub; "": not known."""
    for field in ("dataset", "data"):
        value = getattr(recipe, field, None)
        if isinstance(value, str) and IS_NAME.fullmatch(value) and not is_secret(field):
            # a path below the current folder may look the same
            return ("", False) if os.path.exists(value) else (mask(value), "/" in value)
    return "", False


def results(run: Run) -> str:
    """Return a table of the last evaluation and the best."""
    evaluations = [*records(run.folder, "evaluation")]
    if not evaluations:
        return "None: the run has no validation set.\n"
    columns = {"last": evaluations[-1]}
    if best := [one for one in evaluations if one.get("is_best") is True]:
        columns["best"] = best[-1]
    heads = [f"{name} (step {one['step']:,})" for name, one in columns.items()]
    rows = [["metric", *heads], ["---"] * (1 + len(heads))]
    names = [name for name in evaluations[-1] if "/" in name][:MOST_METRICS]
    for name in names:
        rows.append([cell(name), *(format_metric(one.get(name)) for one in columns.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cell(text: str) -> str:
    """Return a text that stays in one line and one cell of a table."""
    return printable(text).replace("|", "\\|")
