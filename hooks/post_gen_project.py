"""Make the template's own project, which cookiecutter has just copied, the user's.

The template holds no template syntax: it is a project that runs, with the default answers as its
text. Here its files get their place, and the answers replace the defaults. Only TEMPLATE_FILES are
ever touched, since with -f the folder may hold anything. Cookiecutter renders this file with Jinja;
the last line is the only template syntax in it.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

# What git tracks in template/, one path per line, sorted. A new file of the template goes here.
TEMPLATE_FILES = (
    ".dockerignore",
    ".github/workflows/ci.yaml",
    ".gitignore",
    ".pre-commit-config.yaml",
    "AGENTS.md",
    "Dockerfile",
    "LICENSE.Apache-2.0",
    "LICENSE.BSD-3-Clause",
    "LICENSE.MIT",
    "Makefile",
    "README.md",
    "accelerate_configs/README.md",
    "accelerate_configs/cpu.yaml",
    "accelerate_configs/cpu_2_processes.yaml",
    "accelerate_configs/fsdp2.yaml",
    "accelerate_configs/gpu.yaml",
    "accelerate_configs/multi_gpu.yaml",
    "accelerate_configs/multi_gpu_fp16.yaml",
    "accelerate_configs/multi_node.yaml",
    "accelerate_configs/multi_node_cpu.yaml",
    "accelerate_configs/multi_node_elastic.yaml",
    "accelerate_configs/multi_node_fsdp2.yaml",
    "accelerate_configs/multi_node_hsdp.yaml",
    "configs/causal_lm.yaml",
    "configs/embedding.yaml",
    "configs/finetune.yaml",
    "configs/image_classification.yaml",
    "configs/segmentation.yaml",
    "docs/how-a-step-works.md",
    "docs/troubleshooting.md",
    "docs/your-own-recipe.md",
    "launch/kubeflow.yaml",
    "launch/kubernetes.yaml",
    "launch/local.sh",
    "launch/network.sh",
    "launch/slurm.sbatch",
    "launch/ssh.sh",
    "pyproject.toml",
    "src/my_project/__init__.py",
    "src/my_project/__main__.py",
    "src/my_project/checkpoint/__init__.py",
    "src/my_project/checkpoint/resuming.py",
    "src/my_project/checkpoint/saving.py",
    "src/my_project/checkpoint/shards.py",
    "src/my_project/cli.py",
    "src/my_project/cluster/__init__.py",
    "src/my_project/cluster/hosts.py",
    "src/my_project/cluster/planner.py",
    "src/my_project/cluster/preflight.py",
    "src/my_project/cluster/rendezvous.py",
    "src/my_project/config.py",
    "src/my_project/contract.py",
    "src/my_project/cost.py",
    "src/my_project/devices.py",
    "src/my_project/evaluate.py",
    "src/my_project/export.py",
    "src/my_project/files.py",
    "src/my_project/launch.py",
    "src/my_project/launcher.py",
    "src/my_project/loading/__init__.py",
    "src/my_project/loading/feed.py",
    "src/my_project/loading/layout.py",
    "src/my_project/loading/loader.py",
    "src/my_project/loading/locks.py",
    "src/my_project/loading/seeding.py",
    "src/my_project/loading/staging.py",
    "src/my_project/loading/streams.py",
    "src/my_project/loading/workers.py",
    "src/my_project/optim.py",
    "src/my_project/predict.py",
    "src/my_project/recipe.py",
    "src/my_project/recipes/__init__.py",
    "src/my_project/recipes/causal_lm.py",
    "src/my_project/recipes/embedding.py",
    "src/my_project/recipes/finetune.py",
    "src/my_project/recipes/image_classification.py",
    "src/my_project/recipes/segmentation.py",
    "src/my_project/records/__init__.py",
    "src/my_project/records/display.py",
    "src/my_project/records/logs.py",
    "src/my_project/records/metrics.py",
    "src/my_project/records/trackers.py",
    "src/my_project/run_folder.py",
    "src/my_project/safety/__init__.py",
    "src/my_project/safety/redaction.py",
    "src/my_project/safety/search_path.py",
    "src/my_project/safety/trust.py",
    "src/my_project/sharding.py",
    "src/my_project/stacks.py",
    "src/my_project/state.py",
    "src/my_project/step_sums.py",
    "src/my_project/stopping.py",
    "src/my_project/train.py",
    "tests/conftest.py",
    "tests/documents.py",
    "tests/ragged.py",
    "tests/runs.py",
    "tests/test_accelerate_configs.py",
    "tests/test_batches.py",
    "tests/test_causal_lm.py",
    "tests/test_checkpoint.py",
    "tests/test_cli.py",
    "tests/test_config.py",
    "tests/test_contract.py",
    "tests/test_damage.py",
    "tests/test_documents.py",
    "tests/test_embedding.py",
    "tests/test_evaluation.py",
    "tests/test_export.py",
    "tests/test_faults.py",
    "tests/test_finetune.py",
    "tests/test_gpu.py",
    "tests/test_image_classification.py",
    "tests/test_launch.py",
    "tests/test_launch_node.py",
    "tests/test_loopback.py",
    "tests/test_metrics.py",
    "tests/test_optim.py",
    "tests/test_parent.py",
    "tests/test_plan.py",
    "tests/test_preflight.py",
    "tests/test_readme.py",
    "tests/test_records.py",
    "tests/test_redaction.py",
    "tests/test_resume.py",
    "tests/test_roll_call.py",
    "tests/test_same_curve.py",
    "tests/test_segmentation.py",
    "tests/test_sharded.py",
    "tests/test_stage.py",
    "tests/test_streams.py",
    "tests/test_structure.py",
    "tests/test_trackers.py",
    "tests/test_trust.py",
    "tests/test_turns.py",
    "tests/world.py",
    "tests/world_imports.py",
)
# The first is the one that README.md and Makefile name. Each has the files of recipe_files.
RECIPES = ("image_classification", "causal_lm", "embedding", "finetune", "segmentation")
# The answers that the template carries.
DEFAULTS = {
    "project_name": "My Project",
    "project_slug": "my-project",
    "package_name": "my_project",
    "description": "Training with PyTorch and Accelerate.",
    "author": "The Author",
}
PACKAGE = DEFAULTS["package_name"]


def recipe_files(recipe: str) -> tuple[str, ...]:
    """Name the template's files that belong to one recipe and go with it."""
    return (
        f"configs/{recipe}.yaml",
        f"src/{PACKAGE}/recipes/{recipe}.py",
        f"tests/test_{recipe}.py",
    )


def destination(file: str, answers: dict[str, Any]) -> str | None:
    """Say where a file of the template goes; None if the answers do not choose it."""
    if file.startswith("LICENSE."):
        return "LICENSE" if file == f"LICENSE.{answers['license']}" else None
    if answers["recipe"] != "all":
        others = (recipe for recipe in RECIPES if recipe != answers["recipe"])
        if any(file in recipe_files(recipe) for recipe in others):
            return None
    if file.startswith(f"src/{PACKAGE}/"):
        return f"src/{answers['package_name']}/{file.removeprefix(f'src/{PACKAGE}/')}"
    return file


def replacements(file: str, answers: dict[str, Any]) -> dict[str, str]:
    """Map the template's words in a file to the user's.

    Free text has no place in code, where it would need the quoting of each language.
    """
    free_text = file in ("README.md", "LICENSE", "pyproject.toml")
    questions = DEFAULTS if free_text else ("project_slug", "package_name")
    words = {DEFAULTS[question]: answers[question] for question in questions}
    if file.endswith(".toml"):
        # What JSON escapes within a string, and how, TOML's basic strings understand.
        words = {
            default: json.dumps(answer, ensure_ascii=False)[1:-1]
            for default, answer in words.items()
        }
    if file == "pyproject.toml":
        license = answers["license"]
        words['license = "MIT"\n'] = "" if license == "none" else f'license = "{license}"\n'
    # docs/your-own-recipe.md names each recipe for what it is.
    naming = ("README.md", "Makefile", "Dockerfile", "docs/troubleshooting.md")
    names_the_recipe = file in naming or file.startswith(("launch/", "accelerate_configs/", "src/"))
    if names_the_recipe and answers["recipe"] != RECIPES[0]:
        words[extra(RECIPES[0])] = chosen_extras(answers)
        if answers["recipe"] != "all":
            words[RECIPES[0]] = answers["recipe"]
    return words


def extra(recipe: str) -> str:
    """Return the name of a recipe's extra as pip's metadata has it, with hyphens.

    Up to 23.2 pip compares it with what is typed letter by letter, and only warns of an extra that
    it does not find.
    """
    return recipe.replace("_", "-")


def chosen_extras(answers: dict[str, Any]) -> str:
    """Return the extras to install for the chosen recipe, or for all, separated by commas."""
    recipes = RECIPES if answers["recipe"] == "all" else (answers["recipe"],)
    return ",".join(map(extra, recipes))


def replace(text: str, words: dict[str, str]) -> str:
    """Replace whole words in one pass, so that no answer is taken for a default of another."""
    pattern = "|".join(
        # A hyphen is part of a name, `my-project-2`, and a dot or a slash is not.
        (r"(?<![\w-])" if word[0].isalnum() else "")
        + re.escape(word)
        + (r"(?![\w-])" if word[-1].isalnum() else "")
        for word in sorted(words, key=len, reverse=True)
    )
    return re.sub(pattern, lambda found: words[found[0]], text)


def without_other_extras(text: str, answers: dict[str, Any]) -> str:
    """Drop from pyproject.toml what recipes need that were not chosen."""
    for recipe in RECIPES:
        if answers["recipe"] not in (recipe, "all"):
            text = re.sub(rf"(?m)^{recipe} = \[.*\]\n", "", text)
    return text


def next_commands(answers: dict[str, Any], folder: Path) -> str:
    """Spell out how to go on in the project."""
    started_here = Path(os.environ.get("PWD", "")) == folder.parent
    return (
        f"cd {shlex.quote(folder.name if started_here else str(folder))}\n"
        f'pip install -e ".[{chosen_extras(answers)},dev]"\n'
        "make train"
    )


def main(answers: dict[str, Any], project: Path) -> None:
    """Move, remove and fill in what cookiecutter has written into the project's folder."""
    for file in TEMPLATE_FILES:
        source, place = project / file, destination(file, answers)
        if place is None:
            source.unlink()
            continue
        # One by one: a folder cannot be moved onto one that exists.
        (project / place).parent.mkdir(parents=True, exist_ok=True)
        source.replace(project / place)
        # In bytes, so that line ends stay as they are.
        content = (project / place).read_bytes()
        with contextlib.suppress(UnicodeDecodeError):  # not text
            text = content.decode()
            if place == "pyproject.toml":
                text = without_other_extras(text, answers)
            filled = replace(text, replacements(place, answers)).encode()
            if filled != content:
                (project / place).write_bytes(filled)
            if place.endswith(".sh") and content.startswith(b"#!"):
                (project / place).chmod(0o755)  # zip archives do not keep it

    folders = {parent for file in TEMPLATE_FILES for parent in (project / file).parents}
    for folder in sorted(folders, reverse=True):  # the inner ones first
        if folder.is_relative_to(project / "src" / PACKAGE):
            with contextlib.suppress(OSError):  # not empty: it holds files of the user's
                folder.rmdir()

    # cruft update and diff generate in temporary folders, where nobody goes on.
    temporary = project.is_relative_to(Path(tempfile.gettempdir()).resolve())
    if "_output_dir" in answers or not temporary:
        # Not on standard output: that of cruft diff is a patch.
        print(next_commands(answers, project), file=sys.stderr)


if __name__ == "__main__":
    # Whatever was typed: tojson writes ' and all that is not ASCII as \u escapes, and the string is
    # raw, so that nothing can end it or be read twice.
    main(json.loads(r'''{{ cookiecutter | tojson }}'''), Path.cwd().resolve())  # fmt: skip
