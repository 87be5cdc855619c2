"""Turn the copy of the template's project into the user's project.

The template has no template syntax: it is a working project with the default answers in its text.
This hook moves its files and replaces the defaults with the answers. It changes only
TEMPLATE_FILES, since with -f the folder may contain any other files. Cookiecutter renders this file
with Jinja; only the last line has template syntax.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The files that git tracks in template/, sorted; a test compares the two.
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
    "accelerate_configs/cpu_fsdp2.yaml",
    "accelerate_configs/cpu_hsdp.yaml",
    "accelerate_configs/fsdp2.yaml",
    "accelerate_configs/gpu.yaml",
    "accelerate_configs/multi_gpu.yaml",
    "accelerate_configs/multi_gpu_fp16.yaml",
    "accelerate_configs/multi_node.yaml",
    "accelerate_configs/multi_node_cpu.yaml",
    "accelerate_configs/multi_node_fsdp2.yaml",
    "accelerate_configs/multi_node_hsdp.yaml",
    "configs/causal_lm.yaml",
    "configs/embedding.yaml",
    "configs/finetune.yaml",
    "configs/image_classification.yaml",
    "configs/segmentation.yaml",
    "docs/checks.md",
    "docs/clusters.md",
    "docs/how-a-step-works.md",
    "docs/how-to/class-weights.md",
    "docs/how-to/freeze-layers.md",
    "docs/how-to/hub.md",
    "docs/how-to/huggingface-stream.md",
    "docs/how-to/image-at-evaluations.md",
    "docs/how-to/lion.md",
    "docs/how-to/mlflow.md",
    "docs/how-to/muon.md",
    "docs/how-to/onnx.md",
    "docs/how-to/pretokenized-shards.md",
    "docs/how-to/reproduce.md",
    "docs/how-to/schedule.md",
    "docs/how-to/spot.md",
    "docs/how-to/start-from-weights.md",
    "docs/how-to/state-in-a-buffer.md",
    "docs/how-to/training-scalar.md",
    "docs/how-to/two-optimizers.md",
    "docs/how-to/vscode.md",
    "docs/how-to/wandb-sweeps.md",
    "docs/how-to/weighted-sampling.md",
    "docs/interruptions.md",
    "docs/promises.md",
    "docs/run-folder.md",
    "docs/security.md",
    "docs/troubleshooting.md",
    "docs/watching-runs.md",
    "docs/working-with-runs.md",
    "docs/your-own-recipe.md",
    "launch/kubeflow.yaml",
    "launch/kubernetes.yaml",
    "launch/network.sh",
    "launch/slurm.sbatch",
    "launch/ssh.sh",
    "pyproject.toml",
    "src/my_project/__init__.py",
    "src/my_project/__main__.py",
    "src/my_project/accelerator.py",
    "src/my_project/blocks.py",
    "src/my_project/checkpoint/__init__.py",
    "src/my_project/checkpoint/exporting.py",
    "src/my_project/checkpoint/resuming.py",
    "src/my_project/checkpoint/saving.py",
    "src/my_project/checkpoint/shards.py",
    "src/my_project/checks/__init__.py",
    "src/my_project/checks/agreement.py",
    "src/my_project/checks/data.py",
    "src/my_project/checks/findings.py",
    "src/my_project/checks/ranks.py",
    "src/my_project/checks/recipe.py",
    "src/my_project/checks/start.py",
    "src/my_project/commands.py",
    "src/my_project/config.py",
    "src/my_project/contract.py",
    "src/my_project/ema.py",
    "src/my_project/evaluate.py",
    "src/my_project/exits.py",
    "src/my_project/failures.py",
    "src/my_project/files.py",
    "src/my_project/follow.py",
    "src/my_project/launch.py",
    "src/my_project/launching/__init__.py",
    "src/my_project/launching/attempts.py",
    "src/my_project/launching/launch.py",
    "src/my_project/launching/memory.py",
    "src/my_project/launching/nodes.py",
    "src/my_project/launching/summary.py",
    "src/my_project/launching/train.py",
    "src/my_project/launching/workers.py",
    "src/my_project/loading/__init__.py",
    "src/my_project/loading/layout.py",
    "src/my_project/loading/loader.py",
    "src/my_project/loading/prepare.py",
    "src/my_project/loading/seeding.py",
    "src/my_project/loading/streams.py",
    "src/my_project/manifest.py",
    "src/my_project/memory.py",
    "src/my_project/mirror/__init__.py",
    "src/my_project/mirror/download.py",
    "src/my_project/mirror/store.py",
    "src/my_project/mirror/upload.py",
    "src/my_project/model_card.py",
    "src/my_project/optim.py",
    "src/my_project/parallel.py",
    "src/my_project/process.py",
    "src/my_project/provenance.py",
    "src/my_project/ranks.py",
    "src/my_project/recipe.py",
    "src/my_project/recipes/__init__.py",
    "src/my_project/recipes/causal_lm.py",
    "src/my_project/recipes/embedding.py",
    "src/my_project/recipes/finetune.py",
    "src/my_project/recipes/image_classification.py",
    "src/my_project/recipes/segmentation.py",
    "src/my_project/records/__init__.py",
    "src/my_project/records/log.py",
    "src/my_project/records/performance.py",
    "src/my_project/records/profiling.py",
    "src/my_project/records/recorder.py",
    "src/my_project/records/samples.py",
    "src/my_project/records/screen.py",
    "src/my_project/records/trackers.py",
    "src/my_project/run_files.py",
    "src/my_project/run_folder.py",
    "src/my_project/safety/__init__.py",
    "src/my_project/safety/redaction.py",
    "src/my_project/safety/search_path.py",
    "src/my_project/safety/trust.py",
    "src/my_project/settings.py",
    "src/my_project/sharding.py",
    "src/my_project/state.py",
    "src/my_project/statistics.py",
    "src/my_project/step_sums.py",
    "src/my_project/stopping.py",
    "src/my_project/tools/__init__.py",
    "src/my_project/tools/doctor.py",
    "src/my_project/tools/flight_recorder.py",
    "src/my_project/tools/goodput.py",
    "src/my_project/tools/planner.py",
    "src/my_project/tools/preflight.py",
    "src/my_project/tools/reader.py",
    "src/my_project/tools/report/__init__.py",
    "src/my_project/tools/report/charts.py",
    "src/my_project/tools/report/history.py",
    "src/my_project/tools/report/page.py",
    "src/my_project/tools/report/report.py",
    "src/my_project/tools/report/sections.py",
    "src/my_project/tools/reproduce.py",
    "src/my_project/tools/runs.py",
    "src/my_project/tools/simulate.py",
    "src/my_project/tools/spikes.py",
    "src/my_project/train.py",
    "src/my_project/watchdog.py",
    "src/my_project/weights.py",
    "src/my_project/words.py",
    "tests/conftest.py",
    "tests/documents.py",
    "tests/ragged.py",
    "tests/recipes/test_causal_lm.py",
    "tests/recipes/test_embedding.py",
    "tests/recipes/test_finetune.py",
    "tests/recipes/test_image_classification.py",
    "tests/recipes/test_segmentation.py",
    "tests/runs.py",
    "tests/test_accelerate_configs.py",
    "tests/test_commands.py",
    "tests/test_damage.py",
    "tests/test_ema.py",
    "tests/test_evaluation.py",
    "tests/test_export.py",
    "tests/test_follow.py",
    "tests/test_gpu.py",
    "tests/test_launch.py",
    "tests/test_loader.py",
    "tests/test_metrics.py",
    "tests/test_mirror.py",
    "tests/test_model_card.py",
    "tests/test_overfit.py",
    "tests/test_resume.py",
    "tests/test_same_curve.py",
    "tests/test_sharding.py",
    "tests/test_stopping.py",
    "tests/test_watchdog.py",
    "tests/world.py",
    "tests/world_imports.py",
)
# README.md and Makefile name the first; recipe_files lists the files of each.
RECIPES = ("image_classification", "causal_lm", "embedding", "finetune", "segmentation")
# The default answers, which are in the text of the template.
DEFAULTS = {
    "project_name": "My Project",
    "project_slug": "my-project",
    "package_name": "my_project",
    "description": "Training with PyTorch and Accelerate.",
    "author": "The Author",
}
PACKAGE = DEFAULTS["package_name"]


def recipe_files(recipe: str) -> tuple[str, ...]:
    """Return the template's files that belong to one recipe."""
    return (
        f"configs/{recipe}.yaml",
        f"src/{PACKAGE}/recipes/{recipe}.py",
        f"tests/recipes/test_{recipe}.py",
    )


def destination(file: str, answers: dict[str, Any]) -> str | None:
    """Return the path of a template file in the project; None if the answers exclude it."""
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
    """Map the words to replace in a file to the answers.

    Free text is not written into code, where each language quotes differently.
    """
    free_text = file in ("README.md", "AGENTS.md", "LICENSE", "pyproject.toml")
    questions = DEFAULTS if free_text else ("project_slug", "package_name")
    words = {DEFAULTS[question]: answers[question] for question in questions}
    if file.endswith(".toml"):
        # TOML's basic strings have the escapes of JSON's strings
        words = {
            default: json.dumps(answer, ensure_ascii=False)[1:-1]
            for default, answer in words.items()
        }
    if file == "pyproject.toml":
        license = answers["license"]
        words['license = "MIT"\n'] = "" if license == "none" else f'license = "{license}"\n'
    # not docs/your-own-recipe.md, which describes all recipes by their own names
    naming = ["README.md", "Makefile", "Dockerfile"]
    pages = ("clusters", "interruptions", "troubleshooting", "watching-runs", "working-with-runs")
    naming += [f"docs/{page}.md" for page in pages]
    names_the_recipe = file in naming or file.startswith(("launch/", "accelerate_configs/", "src/"))
    if names_the_recipe and answers["recipe"] != RECIPES[0]:
        words[extra(RECIPES[0])] = chosen_extras(answers)
        if answers["recipe"] != "all":
            words[RECIPES[0]] = answers["recipe"]
    return words


def extra(recipe: str) -> str:
    """Return the name of a recipe's extra with hyphens, as in the metadata that pip reads.

    pip before 23.3 does not normalize a name on its command line, and only warns of an unknown
    extra.
    """
    return recipe.replace("_", "-")


def chosen_extras(answers: dict[str, Any]) -> str:
    """Return the extras to install for the chosen recipe, or for all, separated by commas."""
    recipes = RECIPES if answers["recipe"] == "all" else (answers["recipe"],)
    return ",".join(map(extra, recipes))


def replace(text: str, words: dict[str, str]) -> str:
    """Replace whole words in one pass, so that no replacement is replaced again."""

    def whole_word(word: str) -> str:
        """Return a pattern that matches the word unless it is a part of a longer name."""
        # my-project-2 is another name, but runs/image_classification-seed=1 contains the recipe's
        part = r"\w" if "_" in word else r"[\w-]"
        before = f"(?<!{part})" if word[0].isalnum() else ""
        after = f"(?!{part})" if word[-1].isalnum() else ""
        return before + re.escape(word) + after

    pattern = "|".join(map(whole_word, sorted(words, key=len, reverse=True)))
    return re.sub(pattern, lambda match: words[match[0]], text)


def without_other_extras(text: str, answers: dict[str, Any]) -> str:
    """Remove the extras of the recipes that were not chosen from pyproject.toml."""
    for recipe in RECIPES:
        if answers["recipe"] not in (recipe, "all"):
            text = re.sub(rf"(?m)^{recipe} = \[.*\]\n", "", text)
    return text


def git(project: Path, *words: str) -> bool:
    """Run git in the project; return whether it succeeded."""
    # inside a git hook, these point to another repository
    own = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    variables = {name: value for name, value in os.environ.items() if name not in own}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=project,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def make_repository(answers: dict[str, Any], project: Path) -> str:
    """Make the project a git repository with a first commit; return a sentence on the outcome."""
    if answers.get("git_init", "no") != "yes":
        return ""
    if not git(project, "--version"):
        return "It is not a git repository, since git is not installed here."
    if git(project, "rev-parse", "--git-dir"):
        return "It is in a git repository already: commit it there."
    git(project, "init", "--quiet", "--initial-branch=main")
    if not git(project, "rev-parse", "--git-dir"):
        return "It is not a git repository: git init failed."
    # cruft adds .cruft.json after this hook, so a commit here would lack it
    if "_output_dir" in answers and commit(answers, project):
        return "It is a git repository with a first commit."
    return "It is a git repository without a commit: git add --all && git commit"


def commit(answers: dict[str, Any], project: Path) -> bool:
    """Commit only the template's files; return whether that succeeded."""
    files = [path for file in TEMPLATE_FILES if (path := destination(file, answers))]
    # git must not invent a name from the host name, nor ask for the passphrase of a key
    options = ("-c", "user.useConfigOnly=true", "-c", "commit.gpgSign=false")
    words = ("commit", "--quiet", "--no-verify", "--message=Generate the project")
    return git(project, "add", "--", *files) and git(project, *options, *words)


def summary(answers: dict[str, Any], folder: Path, repository: str = "") -> str:
    """Return a text: what was generated, where, and the commands to install it and train."""
    recipe = "all recipes" if answers["recipe"] == "all" else f"recipe {answers['recipe']}"
    license = "no license" if answers["license"] == "none" else f"license {answers['license']}"
    started_here = Path(os.environ.get("PWD", "")) == folder.parent
    to_install = f'pip install -e ".[{chosen_extras(answers)},dev]"'
    return f"""
{answers["project_name"]} ({recipe}, {license}) is in
{folder}
{repository and f"{repository}{chr(10)}"}
To install it with uv and train:

cd {shlex.quote(folder.name if started_here else str(folder))}
uv venv --seed && source .venv/bin/activate
uv {to_install}
make train

Without uv, in place of its two lines:

python3 -m venv .venv && source .venv/bin/activate && {to_install}
"""


def main(answers: dict[str, Any], project: Path) -> None:
    """Move, remove and fill in the files that cookiecutter wrote."""
    for file in TEMPLATE_FILES:
        source = project / file
        path = destination(file, answers)
        if path is None:
            source.unlink()
            continue
        # file by file, since a folder cannot replace an existing folder
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        source.replace(project / path)
        # as bytes, to keep the line endings
        content = (project / path).read_bytes()
        with contextlib.suppress(UnicodeDecodeError):  # not text
            text = content.decode()
            if path == "pyproject.toml":
                text = without_other_extras(text, answers)
            filled = replace(text, replacements(path, answers)).encode()
            if filled != content:
                (project / path).write_bytes(filled)
            if path.endswith(".sh") and content.startswith(b"#!"):
                (project / path).chmod(0o755)  # zip archives do not keep the mode

    folders = {parent for file in TEMPLATE_FILES for parent in (project / file).parents}
    for folder in sorted(folders, reverse=True):  # inner folders first
        if folder.is_relative_to(project / "src" / PACKAGE):
            with contextlib.suppress(OSError):  # not empty: it contains files of the user
                folder.rmdir()

    # cruft update and cruft diff generate in temporary folders, where these commands are useless
    is_temporary = project.is_relative_to(Path(tempfile.gettempdir()).resolve())
    if "_output_dir" in answers or not is_temporary:
        # not on standard output, where cruft diff writes its patch
        repository = make_repository(answers, project)
        print(summary(answers, project, repository), end="", file=sys.stderr)


if __name__ == "__main__":
    # tojson writes ' and non-ASCII characters as \u escapes, and the string is raw, so no answer
    # can end the string or be unescaped twice.
    main(json.loads(r'''{{ cookiecutter | tojson }}'''), Path.cwd().resolve())  # fmt: skip
