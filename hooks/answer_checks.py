"""Refuse a bad answer immediately, with one sentence, in cookiecutter's own process.

A hook could check answers only after the last question, and when it fails, cookiecutter prints a
traceback of 12 lines below its message. After each question, a Jinja extension can raise an error
that cookiecutter prints as one line. pre_prompt.py makes this file a local extension of the
temporary copy of the template; cruft finds no local extensions, so the original cookiecutter.json
names none.
"""

import logging
import re
import runpy
from pathlib import Path
from typing import Any

import click
from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

ROOT = Path(__file__).parent
answer_problems = runpy.run_path(str(ROOT / "hooks/pre_gen_project.py"))["answer_problems"]

# A hook that fails prints the reason; this logger would only add a traceback of cookiecutter.
logging.getLogger("cookiecutter.hooks").addFilter(lambda record: record.levelno < logging.ERROR)


class AnswerChecks(Extension):
    """Add the filter `checked` to Jinja."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["checked"] = checked

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Refuse Jinja syntax in an answer on the command line, which cookiecutter would render.

        All our own templates contain the word cookiecutter.
        """
        if (syntax := re.search(r"[{][#%{]", source)) and "cookiecutter" not in source:
            raise FailedHookException(
                f"The answer {source!r} contains {syntax[0]!r}, which is Jinja syntax: insert a"
                " space."
            )
        return source


def checked(answers: dict[str, Any]) -> str:
    """Return an empty string if all answers so far are valid.

    Raises:
        FailedHookException: an answer is invalid; cookiecutter prints the message and exits with
            code 1.
    """
    for question, answer in answers.items():
        for problem in answer_problems(question, answer):
            raise FailedHookException(problem)
    if "project_slug" in answers:
        refuse_existing_folder(answers["project_slug"])
    return ""


def refuse_existing_folder(slug: str) -> None:
    """Refuse a folder that exists, as cookiecutter does after the last question."""
    context = click.get_current_context(silent=True)  # None if a script calls cookiecutter
    options = context.params if context else {}
    folder = Path(options.get("output_dir", ".")).absolute() / slug
    if options and not options.get("overwrite_if_exists") and folder.exists():
        raise FailedHookException(
            f"project_slug {slug!r} names a folder that exists, {folder}: choose another name, "
            "move the folder away, or add -f to overwrite the template's files in it."
        )
