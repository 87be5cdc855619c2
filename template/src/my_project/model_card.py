"""Write export/README.md, the model card of the Hugging Face Hub, from the records of a run.

The card says what was trained, on which data, with which results, and how to load it. It names no
license, which only the owner knows, and no path or secret. A card that somebody has edited is kept,
unless the recipe's export writes one.
"""

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from torch import nn

from .files import read_own
from .recipe import Recipe
from .run_files import read_info, records
from .run_folder import Run
from .safety.redaction import mask
from .words import PACKAGE, format_metric, printable

MOST_METRICS = 8  # so that the card stays short
MARK = "<!-- written from the records; an edited page is kept: {} -->\n"
IS_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # a dataset's name, not a path


def write_model_card(run: Run, model: nn.Module, folder: Path) -> None:
    """Write README.md into the folder that will become export/, or copy an edited card there.

    Args:
        run: the run, whose export/ is still the previous one.
        model: the model, whose parameters are counted.
        folder: the new export; a README.md that the recipe's export has written there is kept.
    """
    before, path = run.folder / "export" / "README.md", folder / "README.md"
    if os.path.lexists(path):
        return
    if os.path.lexists(before) and not is_written_here(before):
        shutil.copy2(before, path, follow_symlinks=False)
    else:
        text = model_card(run, model)
        path.write_text(text + MARK.format(digest(text)), encoding="utf-8")


def is_written_here(path: Path) -> bool:
    """Return whether this module has written a card and nobody has edited it."""
    with suppress(OSError, ValueError):
        text, start, end = read_own(path).decode().rpartition(MARK.partition("{}")[0])
        return f"{start}{end}" == MARK.format(digest(text))
    return False


def digest(text: str) -> str:
    """Return a hash that shows whether the text was changed."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_card(run: Run, model: nn.Module) -> str:
    """Return the text of the card."""
    config, kind = run.config, type(run.config.recipe)
    name = f"{kind.__module__}.{kind.__qualname__}"
    info, batch_size = read_info(run.folder), config.batches.global_batch_size
    count = sum(parameter.numel() for parameter in model.parameters())
    commit = f", at commit {info.git_commit}" if info.git_commit else ""
    commit += " with changes that were not committed" if info.git_dirty else ""
    trusted = "" if name.startswith(f"{PACKAGE}.") else f', ["{name}"]'
    dataset, is_on_hub = dataset_name(config.recipe)
    data = [f"- dataset: {dataset}"] if dataset else []
    for set_name, length in run.lengths.items():
        unit = "" if set_name == "the lanes of the stream" else " samples"
        data.append(f"- {cell(set_name)}: {length:,}{unit}")
    data_lines = "\n".join(data)
    datasets = f"datasets: [{dataset}]\n" if is_on_hub else ""
    return f"""---
library_name: {PACKAGE}
tags: [pytorch, safetensors, accelerate]
{datasets}---

# {cell(config.run_name)}

A `{kind.__qualname__}` with {count:,} parameters, trained by `{name}` of the project
`{PACKAGE}`{commit}, for {run.step:,} steps of {batch_size:,} samples with seed {config.seed}.

## Data

{data_lines}

## Results

{results(run)}
## How to load it

With the project installed, in the folder that contains this export:

```python
from pathlib import Path

from {PACKAGE}.weights import load

config, data_info, model = load(Path("export"){trusted})
```
"""


def dataset_name(recipe: Recipe) -> tuple[str, bool]:
    """Return the name of the recipe's dataset ("" if unknown), and whether it can be on the Hub."""
    for field in ("dataset", "data"):
        value = getattr(recipe, field, None)
        if isinstance(value, str) and IS_NAME.fullmatch(value):
            # a path below the current folder may look the same
            return ("", False) if os.path.exists(value) else (mask(value), "/" in value)
    return "", False


def results(run: Run) -> str:
    """Return a table of the last evaluation and the best evaluation."""
    evaluations = [*records(run.folder, "evaluation")]
    if not evaluations:
        return "None: no evaluation is recorded.\n"
    columns = {"last": evaluations[-1]}
    if best := [record for record in evaluations if record.values.get("is_best") is True]:
        columns["best"] = best[-1]
    heads = [f"{name} (step {record.step:,})" for name, record in columns.items()]
    rows = [["metric", *heads], ["---"] * (1 + len(heads))]
    for name in [name for name in evaluations[-1].values if "/" in name][:MOST_METRICS]:
        values = [format_metric(record.number(name)) for record in columns.values()]
        rows.append([cell(name), *values])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cell(text: str) -> str:
    """Return a text on one line, with | escaped, for a cell of a table."""
    return printable(text).replace("|", "\\|")
