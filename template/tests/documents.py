"""The commands and the code in the documents, for tests that run them as they stand."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(PROJECT).as_posix()
    for pattern in ("*.md", "docs/*.md", "accelerate_configs/*.md")
    for path in PROJECT.glob(pattern)
)


def text_of(document: str, heading: str = "") -> str:
    """Return a document, or what stands below a heading, up to the next of its level."""
    text = (PROJECT / document).read_text(encoding="utf-8")
    if not heading:
        return text
    kept, is_code = [], False
    for line in text.split(f"\n{heading}\n", 1)[1].splitlines(keepends=True):
        is_code ^= line.startswith("```")  # a comment there is no heading
        marks = line.partition(" ")[0]
        if not is_code and marks in ("#", "##", "###") and heading.startswith(marks):
            break
        kept.append(line)
    return "".join(kept)


def blocks(text: str, language: str) -> list[str]:
    """List the blocks of code of one language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def commands(text: str) -> list[str]:
    """List the commands, one a line: those of several lines are joined."""
    joined = (re.sub(r"\\\n\s*", "", block) for block in blocks(text, "bash"))
    return [line for block in joined for line in block.strip().splitlines()]
