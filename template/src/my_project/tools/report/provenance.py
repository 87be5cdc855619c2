"""The settings of runs and where they come from, for the report."""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...files import read_yaml
from ...safety.redaction import mask, mask_command
from ..runs import NOT_COMPARED
from .history import MOST_CHARACTERS, History, as_typed, text
from .page import details, escape, table

MOST_SETTINGS = 500
MOST_WORDS = 500  # of a command
MOST_BYTES = 50_000  # of an accelerate config


def configuration(runs: list[History]) -> str:
    """Return the settings: first those that differ between runs, then all."""
    parts = []
    with_settings = [run for run in runs if run.settings]
    if len(with_settings) > 1:
        names = list(dict.fromkeys(name for run in with_settings for name in run.settings))
        differing = [
            name
            for name in names
            if len({run.settings.get(name) for run in with_settings}) > 1
            and name not in NOT_COMPARED
        ]
        cells = [
            [escape(name), *(escape(run.settings.get(name, "")) for run in with_settings)]
            for name in differing
        ]
        head = ["setting", *(escape(run.short, 80) for run in with_settings)]
        shown = _settings(head, cells) if cells else "<p>No setting differs.</p>"
        parts.append(f"<h3>What differs</h3>{shown}")
    for run in with_settings:
        cells = [[escape(name), escape(value)] for name, value in run.settings.items()]
        name = "All settings" if len(runs) == 1 else f"All settings of {run.name}"
        parts.append(details(name, _settings([], cells)))
    return "".join(parts)


def _settings(head: list[str], cells: list[list[str]]) -> str:
    left = len(cells) - MOST_SETTINGS
    note = f'<p class="soft">{left:,} more are left out.</p>' if left > 0 else ""
    return table(head, cells[:MOST_SETTINGS], kind="long") + note


def provenance(runs: list[History]) -> str:
    """Return where the runs come from: commands, code, versions, machines."""
    parts = []
    for run in runs:
        if run.about:
            content = origin(run)
            parts.append(details(run.name, content) if len(runs) > 1 else content)
    return "".join(parts)


def origin(run: History) -> str:
    """Return the provenance of a run."""
    about = run.about
    commit = text(about.get("git_commit")) or "none"
    if about.get("git_dirty") is True:
        commit += ", with changes that are not committed"
    packages = about.get("packages")
    versions = {"python": text(about.get("python"))}
    for name, version in packages.items() if isinstance(packages, dict) else ():
        versions[str(name)] = text(version)
    facts = {
        "Commit": commit,
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Host": text(about.get("host")),
        "Folder": text(about.get("folder")),
        "Run": text(about.get("run")),
        "Recipe, SHA-256": text(about.get("recipe_sha256")),
    }
    for name in ("numerics", "lengths"):
        values = about.get(name)
        if isinstance(values, dict):
            shown = [f"{key} {as_typed(key, value)}" for key, value in values.items()]
            facts[name.capitalize()] = ", ".join(shown)
    cells = [[name, escape(value, 1000)] for name, value in facts.items() if value]
    parts = [table([], cells, kind="long")]
    for name, words in (("Command", about.get("command")), ("Launched by", about.get("launcher"))):
        if command := command_of(words):
            parts.append(f"<h3>{name}</h3><pre>{escape(shlex.join(command), 5000)}</pre>")
    parts.append(accelerate(about))
    variables = about.get("environment")
    if isinstance(variables, dict) and variables:
        pairs = [[escape(name), escape(as_typed(name, value))] for name, value in variables.items()]
        parts.append(details("Environment variables", table([], pairs[:200], kind="long")))
    return "".join(parts)


def accelerate(about: dict[str, Any]) -> str:
    """Return the accelerate config: its path, and its content as it is now."""
    name, content = accelerate_config(about)
    if not name:
        return '<p class="soft">The accelerate config is not recorded.</p>'
    if not content:
        return f"<p>Accelerate config: <code>{escape(name)}</code> (not to be read here now).</p>"
    note = f"Read from {about['folder']} when this page was written; it may have changed since."
    return details(
        f"Accelerate config {name}",
        f'<p class="soft">{escape(note)}</p><pre>{escape(content, 10_000)}</pre>',
    )


def command_of(words: Any) -> list[str]:
    """Return a recorded command, masked again; [] if there is none."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return []
    return mask_command(word[:MOST_CHARACTERS] for word in words[:MOST_WORDS])


def accelerate_config(about: dict[str, Any]) -> tuple[str, str]:
    """Return the path of the accelerate config of a run, and its text as it is now.

    The text is "" if the file is gone, is not below the folder in which the run was started, or is
    no accelerate config: the path may be a stranger's.
    """
    words = [*command_of(about.get("launcher")), *command_of(about.get("command"))]
    pairs = [f"{one}={two}".split("=") for one, two in pairwise([*words, ""])]
    name = next((parts[1] for parts in pairs if parts[0] == "--config_file" and parts[1]), "")
    folder = about.get("folder")
    if not name or not isinstance(folder, str):
        return name, ""
    try:
        path, root = Path(folder, name).resolve(), Path(folder).resolve()
        is_near = path.is_relative_to(root) and path.suffix in (".yaml", ".yml")
        if not (is_near and path.is_file() and path.stat().st_size < MOST_BYTES):
            return name, ""
        is_ours = {"distributed_type", "compute_environment"} & read_yaml(path).keys()
        return name, mask(path.read_text(encoding="utf-8")) if is_ours else ""
    except (OSError, ValueError):  # ConfigError is a ValueError; also a name with a zero byte
        return name, ""
