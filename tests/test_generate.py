"""Generating a project in every way of cookiecutter and cruft, with every kind of answer."""

import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import quick
from test_lowest_versions import bounds

REPOSITORY = Path(__file__).parents[1]
LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause")
DEFAULTS = {
    "project_name": "My Project",
    "project_slug": "my-project",
    "package_name": "my_project",
    "description": "Training with PyTorch and Accelerate.",
    "author": "The Author",
    "license": "MIT",
    "recipe": "image_classification",
}
RENAMED = {
    "project_name": "Leaf Scanner",
    "project_slug": "leaf-scanner",
    "package_name": "leafscan",
    "description": "Names a plant by its leaf.",
    "author": "Ada Lovelace",
}
# The import names of the dependencies whose distribution has another name.
IMPORT_NAMES = {"scikit_learn": "sklearn", "pyyaml": "yaml", "nvidia_ml_py": "pynvml"}


def hook(name: str) -> Any:
    """Return the names in a hook before it is rendered: template syntax is below `__main__`."""
    return SimpleNamespace(**runpy.run_path(str(REPOSITORY / f"hooks/{name}.py")))


PRE_GEN, POST_GEN = hook("pre_gen_project"), hook("post_gen_project")


class Desk:
    """A user's folder, with its own home and temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "desk"
        self.home = folder / "home"
        self.temporary = folder / "tmp"
        for made in (self.folder, self.home, self.temporary):
            made.mkdir()
        # in a git hook, git's variables would lead every git command here to that repository
        outside = {key: value for key, value in os.environ.items() if key[:4] != "GIT_"}
        self.environment = {
            **outside,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "PWD": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            **{f"GIT_{who}_NAME": "A User" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "user@example.org" for who in ("AUTHOR", "COMMITTER")},
        }

    def run(
        self, *command: str | Path, cwd: Path | None = None, typed: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; it may fail."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env={**self.environment, "PWD": str(cwd or self.folder)},
            input=typed,
            stdin=None if typed is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def succeed(self, *command: str | Path, **options: Any) -> str:
        """Run a command that must succeed; return what it prints."""
        done = self.run(*command, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def cookiecutter(
        self, source: str | Path, *options: str, **answers: str
    ) -> subprocess.CompletedProcess[str]:
        """Run cookiecutter without questions."""
        given = (f"{question}={answer}" for question, answer in answers.items())
        return self.run(
            sys.executable, "-m", "cookiecutter", "--no-input", *options, source, *given
        )

    def generate(self, source: str | Path, *options: str, **answers: str) -> Path:
        """Generate a project, which must succeed; return its folder."""
        done = self.cookiecutter(source, *options, **answers)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.folder / answers.get("project_slug", DEFAULTS["project_slug"])

    def commit(self, folder: Path) -> None:
        """Commit all files of a folder; make it a git repository if it is not one."""
        self.succeed("git", "init", "--quiet", "--initial-branch=main", cwd=folder)
        self.succeed("git", "add", "--all", "--force", cwd=folder)
        # a generated project has a first commit
        self.succeed("git", "commit", "--quiet", "--allow-empty", "--message=All", cwd=folder)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Map every file below a folder, except `.git`, to its content and whether it is executable."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def default_tree(template: Path, *others: str) -> dict[str, tuple[bytes, bool]]:
    """Return what the default answers must give: template/ without what they do not choose.

    Args:
        template: where it lies.
        others: recipes that are there besides the first.
    """
    files = tree(template / "template")
    for recipe in POST_GEN.RECIPES[1:]:
        for file in () if recipe in others else POST_GEN.recipe_files(recipe):
            files.pop(file, None)
    unneeded = tuple(f"{recipe} = [" for recipe in POST_GEN.RECIPES[1:] if recipe not in others)
    content, executable = files["pyproject.toml"]
    lines = content.decode().splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.startswith(unneeded))
    assert len(kept.splitlines()) == len(lines) - len(unneeded)
    files["pyproject.toml"] = (kept.encode(), executable)
    files["LICENSE"] = files["LICENSE.MIT"]
    for license in LICENSES:
        del files[f"LICENSE.{license}"]
    return files


# The ways to the template


@pytest.mark.slow
def test_a_zip_archive_and_a_checkout_without_links_give_equal_bytes(
    template: Path, tmp_path: Path, desk: Desk
):
    upstream = shutil.copytree(template, tmp_path / "upstream", symlinks=True)
    desk.commit(upstream)
    archive, checkout = tmp_path / "main.zip", tmp_path / "checkout"
    packed = ("--prefix=accelerate-main/", f"--output={archive}", "HEAD")
    desk.succeed("git", "archive", *packed, cwd=upstream)
    desk.succeed("git", "clone", "--quiet", "-c", "core.symlinks=false", upstream, checkout)
    assert (checkout / "{{cookiecutter.project_slug}}").is_file()
    for source in (archive, checkout):
        project = desk.generate(source)
        assert tree(project) == default_tree(template), source
        shutil.rmtree(project)
    assert desk.succeed("git", "status", "--porcelain", cwd=checkout) == ""


def test_a_used_clone_gives_the_same_project_without_what_git_ignores(
    template: Path, tmp_path: Path, desk: Desk
):
    used = shutil.copytree(template, tmp_path / "used", symlinks=True)
    for file in (
        ".ruff_cache/0.17/1",
        "src/my_project/__pycache__/train.cpython-311.pyc",
        "runs/first/events.out",
        ".venv/bin/python",
    ):
        (used / "template" / file).parent.mkdir(parents=True)
        (used / "template" / file).write_bytes(b"a line\nanother\x89")
    before = tree(used)
    assert tree(desk.generate(used)) == default_tree(template)
    assert tree(used) == before


# The answers


def test_nothing_of_the_template_is_left_in_a_renamed_project(template: Path, desk: Desk):
    project = desk.generate(template, **RENAMED)
    left = [
        f"{path}: {word}"
        for path, (content, _) in tree(project).items()
        for word in [*list(DEFAULTS.values())[:5], "cookiecutter.", "{{", "{%", "{#"]
        # GitHub's expressions and the lengths of bash arrays look like Jinja's.
        if word in path
        or (
            word in content.decode().replace("${{", "" if ".github" in path else "${{")
            and not (word == "{#" and path.endswith(".sh"))
        )
    ]
    assert left == []
    assert not [path for path in project.rglob("*") if path.is_symlink()]
    expected = {path.replace("my_project", "leafscan") for path in default_tree(template)}
    assert set(tree(project)) == expected


AWKWARD = {
    "project_name": """Bob's "net" & \\sons\\ 'R' us""",
    "description": r"""It's "5 < 6" & C:\new\table, naïve Ωmega 東京 🌱 '''""" + '"""' + "\\",
    "author": 'Zoë "Z" O\'Brien \\1 \\g<0> & The Author of My Project',
}


def test_quotes_backslashes_and_letters_of_all_kinds_come_through_exactly(
    template: Path, desk: Desk
):
    names = {"project_slug": "B.ob_s-9", "package_name": "bobs_net"}
    project = desk.generate(template, **AWKWARD, **names)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert metadata["description"] == AWKWARD["description"]
    assert metadata["authors"] == [{"name": AWKWARD["author"]}]
    assert metadata["name"] == "B.ob_s-9"
    assert metadata["scripts"] == {"B.ob_s-9": "bobs_net.__main__:main"}
    assert f"Copyright (c) {AWKWARD['author']}\n" in (project / "LICENSE").read_text()
    # Code contains only the names.
    plain = desk.generate(template, "--output-dir=plain", **names).parent / "plain/B.ob_s-9"
    free_text = {"README.md", "AGENTS.md", "LICENSE", "pyproject.toml"}
    for file, content in tree(plain).items():
        assert file in free_text or tree(project)[file] == content, file


@pytest.mark.parametrize("package", quick(1, ["not_my_project", "my_project_two"]))
def test_a_package_name_may_contain_the_templates(template: Path, desk: Desk, package: str):
    project = desk.generate(template, package_name=package)
    assert not (project / "src/my_project").exists()
    generated = tree(project)
    for file, (content, _) in default_tree(template).items():
        renamed = file.replace("my_project", package)
        assert generated[renamed][0] == content.replace(b"my_project", package.encode()), file


def test_all_keeps_every_recipe(template: Path, desk: Desk):
    project = desk.generate(template, recipe="all")
    expected = default_tree(template, *POST_GEN.RECIPES[1:])
    extras = ",".join(POST_GEN.RECIPES).replace("_", "-").encode()
    for file in ("README.md", "Makefile", "Dockerfile"):  # they install what all recipes need
        content, executable = expected[file]
        expected[file] = (content.replace(b"image-classification", extras), executable)
    assert tree(project) == expected


@pytest.mark.parametrize(
    ("recipe", "license"),
    quick(2, zip(["all", *POST_GEN.RECIPES], cycle([*LICENSES, "none"]), strict=False)),
)
def test_the_license_is_the_chosen_one_and_an_install_brings_its_needs(
    template: Path, desk: Desk, recipe: str, license: str
):
    printed = desk.cookiecutter(template, **RENAMED, recipe=recipe, license=license).stderr
    project = desk.folder / RENAMED["project_slug"]
    chosen = POST_GEN.RECIPES if recipe == "all" else (recipe,)
    extras = ",".join(chosen).replace("_", "-")  # pip before 23.3 needs this form
    for text in (printed, *((project / file).read_text() for file in ("README.md", "Makefile"))):
        installed = re.findall(r"(?:pip|\(PIP\)) install (-e .*)$", text, re.M)
        assert set(installed) == {f'-e ".[{extras},dev]"'}
    assert f'--editable ".[{extras}]" ' in (project / "Dockerfile").read_text()
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert set(pyproject["optional-dependencies"]) == {*chosen, "s3", "gcs", "azure", "dev"}
    for place in ("configs/*.yaml", "src/leafscan/recipes/[a-z]*.py"):
        assert {path.stem for path in project.glob(place)} == set(chosen)
    tests = {path.stem.removeprefix("test_") for path in project.glob("tests/recipes/test_*.py")}
    assert tests == set(chosen)
    assert pyproject.get("license", "none") == license
    assert not list(project.glob("LICENSE.*"))
    if license == "none":
        assert not (project / "LICENSE").exists()
        return
    text = (template / f"template/LICENSE.{license}").read_text()
    assert (project / "LICENSE").read_text() == text.replace("The Author", RENAMED["author"])


# The repository


def test_the_project_is_a_repository_with_all_of_its_files_committed(template: Path, desk: Desk):
    done = desk.cookiecutter(template)
    project = desk.folder / "my-project"
    assert "a git repository with a first commit" in done.stderr
    assert desk.succeed("git", "status", "--porcelain", cwd=project) == ""
    assert desk.succeed("git", "branch", "--show-current", cwd=project) == "main\n"
    listed = desk.succeed("git", "ls-files", "-z", cwd=project).rstrip("\0").split("\0")
    assert {*listed} == {*tree(project)}


def test_f_commits_no_file_of_the_users(template: Path, desk: Desk):
    project = desk.folder / "my-project"
    project.mkdir()
    (project / "notes.txt").write_text("mine")
    desk.generate(template, "-f")
    assert desk.succeed("git", "status", "--porcelain", cwd=project) == "?? notes.txt\n"


def test_without_a_name_for_git_nothing_is_committed(template: Path, desk: Desk):
    names = [name for name in desk.environment if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]
    for name in names:
        del desk.environment[name]
    done = desk.cookiecutter(template)
    assert done.returncode == 0
    assert "without a commit" in done.stderr
    project = desk.folder / "my-project"
    assert desk.run("git", "rev-parse", "HEAD", cwd=project).returncode != 0
    assert (project / ".git").is_dir()


def test_a_project_in_a_repository_is_left_to_it(template: Path, desk: Desk):
    desk.succeed("git", "init", "--quiet")
    done = desk.cookiecutter(template)
    assert "in a git repository already" in done.stderr
    assert not (desk.folder / "my-project/.git").exists()
    assert desk.succeed("git", "diff", "--cached", "--name-only") == ""


def test_without_git_a_project_is_generated_and_this_is_said(template: Path, desk: Desk):
    desk.environment["PATH"] = str(desk.folder)
    done = desk.cookiecutter(template)
    assert done.returncode == 0
    assert "git is not installed" in done.stderr
    assert (desk.folder / "my-project/src/my_project/train.py").is_file()


# Refusals


BAD_ANSWERS = {
    "project_slug": [
        *("", "../a", "/tmp/a", "a b", "-a", "a.", "a\n", "{{a}}", "né", "Scikit_Learn"),
        "Python3.11",
    ],
    "package_name": [
        *("", "9a", "a-b", "a/b", "class", "None", "json", "Random", "torch", "TORCHVISION"),
        *("sklearn", "tests", "Data", "launch"),
    ],
} | dict.fromkeys(
    ("project_name", "description", "author"),
    ("a\nb", "a\x00", "\udcff", "{{ a }}", "{% a", "{# a"),  # answers that no file can hold
)


@pytest.mark.parametrize("question", BAD_ANSWERS)
def test_a_bad_answer_is_refused(tmp_path: Path, question: str):
    for answer in BAD_ANSWERS[question]:
        (problem,) = PRE_GEN.problems({**DEFAULTS, question: answer}, tmp_path)
        assert problem.startswith(f"{question} {answer!r} ")


REFUSED = [
    {"package_name": "a'b\"c\\"},
    {"project_slug": "../outside", "package_name": "outside"},
    {"author": "\x1b[31mred"},
]


@pytest.mark.parametrize("answers", quick(1, REFUSED))
def test_a_refusal_is_one_sentence_and_leaves_nothing(
    template: Path, desk: Desk, answers: dict[str, str]
):
    (desk.folder / "mine.txt").write_text("mine")
    around = sorted(desk.folder.parent.iterdir())
    done = desk.cookiecutter(template, **answers)
    assert done.returncode == 1
    (question, *_) = answers
    assert done.stdout.startswith(f"{question} {answers[question]!r} ")
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    assert [path.name for path in desk.folder.iterdir()] == ["mine.txt"]
    assert sorted(desk.folder.parent.iterdir()) == around


def test_a_bad_typed_answer_ends_before_the_next_question(template: Path, desk: Desk):
    """For license and recipe, cookiecutter asks for a number, and asks again after a wrong one."""
    typing = [sys.executable, "-m", "cookiecutter", template]
    refused = desk.run(*typing, typed="Torch\n\n")
    assert refused.returncode == 1
    assert "What is its Python package called?" not in refused.stdout
    assert list(desk.folder.iterdir()) == []
    desk.succeed(*typing, typed="Leaf Scanner\n\nleafscan\n\n\nmit\n2\n7\n2\n3\n2\n")
    assert (desk.folder / "leaf-scanner/configs/causal_lm.yaml").is_file()
    assert "Apache License" in (desk.folder / "leaf-scanner/LICENSE").read_text()
    assert not (desk.folder / "leaf-scanner/.git").exists()


def test_the_lists_of_a_refusal_hold_every_dependency():
    path = REPOSITORY / "template/pyproject.toml"
    needed = [*bounds(path), *tomllib.loads(path.read_text())["build-system"]["requires"]]
    names = {PRE_GEN.plain(re.split(r"[^\w.-]", text)[0]) for text in needed}
    names |= {IMPORT_NAMES.get(name, name) for name in names}
    assert len(names) > 15
    assert sorted(names - PRE_GEN.LIBRARIES) == []


# Generating over a folder that exists


@pytest.mark.parametrize("package", ["my_project", "leafscan"])
@pytest.mark.slow
def test_f_deletes_and_alters_nothing_of_the_users(template: Path, desk: Desk, package: str):
    answers = {"package_name": package, "license": "none"}
    project = desk.generate(template, **answers)
    own = {
        "notes.txt": "mine",
        "LICENSE": "mine",
        "configs/own.yaml": "mine",
        "accelerate_configs/own.yaml": "mine",
        f"src/{package}/own.py": "mine",
        f"src/{package}/recipes/own.py": "mine = 'my_project, my-project, My Project'",
        "src/other/train.py": "import my_project",
        "tests/test_own.py": "import my_project",
        "runs/first/metrics.jsonl": "{}",
    }
    for file, content in own.items():
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(content)
    (project / "empty").mkdir()
    (project / f"src/{package}/train.py").write_text("to be overwritten, as -f says")
    with_theirs = {
        **tree(desk.generate(template, "--output-dir=fresh", **answers)),
        **tree(project),
    }
    fresh = tree(desk.folder / "fresh" / project.name)
    desk.generate(template, "-f", **answers)
    assert tree(project) == {**with_theirs, **fresh}
    assert (project / "empty").is_dir()


LOST = [
    ("src/my_project/train.py", {"package_name": "leafscan"}),
    ("LICENSE.MIT", {}),
    ("src/my_project/data.json", {"package_name": "leafscan"}),
    ("LICENSE.Apache-2.0", {"license": "none"}),
    ("configs/causal_lm.yaml", {}),
    ("tests/recipes/test_image_classification.py", {"recipe": "causal_lm"}),
]


@pytest.mark.parametrize(("file", "answers"), quick(2, LOST))
def test_f_is_refused_where_a_file_of_the_users_would_be_lost(
    template: Path, desk: Desk, file: str, answers: dict[str, str]
):
    project = desk.folder / "my-project"
    (project / file).parent.mkdir(parents=True)
    (project / file).write_text("mine")
    before = tree(project)
    done = desk.cookiecutter(template, "-f", **answers)
    assert done.returncode != 0
    assert tree(project) == before


# The lists that must be kept


def test_template_files_are_what_git_tracks(tracked: list[str]):
    folder = "template/"
    files = [file.removeprefix(folder) for file in tracked if file.startswith(folder)]
    assert list(POST_GEN.TEMPLATE_FILES) == files, "add or remove it in hooks/post_gen_project.py"


def test_every_template_file_is_copied_and_no_folder_is():
    patterns = json.loads((REPOSITORY / "cookiecutter.json").read_text())["_copy_without_render"]

    def copied(path: str) -> bool:
        return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)

    files = POST_GEN.TEMPLATE_FILES
    assert [file for file in files if not copied(file)] == []
    folders = {str(parent) for file in files for parent in Path(file).parents} - {"."}
    # A folder that matches is deleted by -f, with the user's files in it.
    assert [folder for folder in folders if copied(folder)] == []


def test_the_hooks_and_the_questions_agree():
    questions = json.loads((REPOSITORY / "cookiecutter.json").read_text())
    assert PRE_GEN.RECIPES == POST_GEN.RECIPES
    assert PRE_GEN.PACKAGE == POST_GEN.PACKAGE
    assert questions["recipe"] == [*POST_GEN.RECIPES, "all"]
    assert questions["license"] == [*PRE_GEN.LICENSES, "none"]
    for question in ("recipe", "license", "git_init"):
        assert [*questions["__prompts__"][question]] == ["__prompt__", *questions[question]]
    recipes = [file for file in POST_GEN.TEMPLATE_FILES if "_project/recipes/" in file]
    assert {Path(file).stem for file in recipes} - {"__init__"} == set(POST_GEN.RECIPES)
    # Only folders that pre_gen protects may pass.
    for recipe in POST_GEN.RECIPES:
        answers = {**DEFAULTS, "recipe": "none of them"}
        assert set(POST_GEN.recipe_files(recipe)) <= set(PRE_GEN.temporary_files(answers))


# The checks of the generated project itself


@pytest.mark.parametrize("package", quick(1, ["zz_top", "a", "protein_localization"]))
def test_formatting_and_lint_hold_under_any_name(template: Path, desk: Desk, package: str):
    project = desk.generate(template, package_name=package)
    desk.succeed("ruff", "format", "--check", "--diff", ".", cwd=project)
    desk.succeed("ruff", "check", ".", cwd=project)
