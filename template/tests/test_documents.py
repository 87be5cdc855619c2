"""What the documents say is there: files, links, messages. Their commands fit a page, and run."""

import re

import pytest
from documents import DOCUMENTS, PROJECT, text_of

SOURCE = PROJECT / "src/my_project"
MORE = len(SOURCE.name) - 10  # letters of the package's name than in the template


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_or_a_heading(document):
    text = text_of(document)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            path = (PROJECT / document).parent / target.partition("#")[0]
            assert path.exists(), target
            assert path.resolve().is_relative_to(PROJECT.resolve()), f"{target} is not of a project"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_fits_the_width_of_a_page(document):
    for block in re.findall(r"(?ms)^```.*?^```$", text_of(document)):
        for line in block.splitlines():
            assert len(line) - MORE * line.count(SOURCE.name) <= 100, line


@pytest.mark.skipif(
    not (SOURCE / "loading").is_dir(), reason="the modules do not lie in subpackages yet"
)
@pytest.mark.parametrize("document", ["AGENTS.md", "docs/how-a-step-works.md"])
def test_every_module_that_is_named_is_there(document):
    if not (PROJECT / document).exists():
        pytest.skip("not written yet")
    named = re.findall(r"`(?:src/my_project/)?([a-z_/]+(?:\.py|/))`", text_of(document))
    assert named
    for name in named:
        assert (SOURCE / name).exists() or (PROJECT / name).exists(), name
