"""starts/ has the code that each start ran, once, without secrets."""

import json
import os
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from documents import PROJECT
from my_project import provenance
from my_project.config import Config
from my_project.manifest import read_manifest
from my_project.process import CODE
from runs import change, make_config, train

SECRET = "hf_abcdefgh12345678"
PACKAGE = "import os\n\n\ndef token(text):\n    return text\n\n\nwidth = 4\n"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@here", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the project in a subfolder, whose package and recipe are one module."""
    top = tmp_path / "large"
    module = top / "team/src/my_project/provenance.py"
    module.parent.mkdir(parents=True)
    module.write_text(PACKAGE)
    (top / "notes.txt").write_text("one\n")
    (top / ".gitignore").write_text("ignored.py\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(top, *words)
    monkeypatch.chdir(top / "team")
    monkeypatch.setattr(provenance, "__file__", str(module))
    monkeypatch.setattr(provenance.inspect, "getsourcefile", lambda _: str(module))
    return top


def kept_in(folder: Path, name: str) -> dict:
    return json.loads((folder / "starts" / name / "start.json").read_text())


def keep(config: Config, name: str) -> str:
    config.folder.mkdir(parents=True, exist_ok=True)
    return provenance.keep_code(config.folder, config, "run", name).start


def brought_back(repository: Path, run: Path, name: str, folder: Path) -> Path:
    """Clone the commit and apply what a start has kept."""
    kept, start = kept_in(run, name), run / "starts" / name
    git(folder.parent, "clone", "-q", str(repository), str(folder))
    git(folder, "checkout", "-q", kept["commit"])
    if (start / "code.patch").exists():
        git(folder, "apply", str(start / "code.patch"))
    if (start / "sources.zip").exists():
        zipfile.ZipFile(start / "sources.zip").extractall(folder)
    return folder


def test_a_patch_of_all_changes_applies_to_the_commit(repository, tmp_path):
    config = make_config(tmp_path)
    package = repository / "team/src/my_project"
    (package / "provenance.py").write_text(PACKAGE.replace("4", "8") + "é = 'x'")
    (package / "new.py").write_text("untracked = True\n")
    (package / "ignored.py").write_text("ignored = True\n")
    (repository / "notes.txt").unlink()
    (repository / "bytes").write_bytes(bytes(range(256)) * 9)
    git(repository, "add", "bytes")
    git(repository, "config", "diff.noprefix", "true")
    before = git(repository, "status", "--porcelain")
    assert keep(config, "a.0") == "a.0"
    assert git(repository, "status", "--porcelain") == before, "the user's index is as it was"
    kept = kept_in(config.folder, "a.0")
    assert (kept["folder"], kept["search_path"]) == ("team", ["team/src", "."])
    assert (kept["not_kept"], kept["masked"]) == ("", [])
    clone = brought_back(repository, config.folder, "a.0", tmp_path / "clone")
    for name in ("team/src/my_project", "bytes", "notes.txt"):
        for path in [repository / name, *(repository / name).glob("*.py")]:
            if path.is_file():
                assert (clone / path.relative_to(repository)).read_bytes() == path.read_bytes()
    assert not (clone / "notes.txt").exists()


def test_a_change_just_after_the_commit_is_seen_though_the_size_is_equal(repository, tmp_path):
    config = make_config(tmp_path)
    notes, second = repository / "notes.txt", (10**9, 10**9)
    git(repository, "config", "core.trustctime", "false")  # which no test can set
    os.utime(notes, second)
    git(repository, "update-index", "--refresh")
    os.utime(repository / ".git/index", second)
    notes.write_text("two\n")
    os.utime(notes, second)
    keep(config, "a.0")
    clone = brought_back(repository, config.folder, "a.0", tmp_path / "clone")
    assert (clone / "notes.txt").read_text() == "two\n"


def test_a_thousand_starts_with_the_same_code_keep_it_once(repository, tmp_path):
    config = make_config(tmp_path)
    (repository / "notes.txt").write_text("two\n")
    assert [keep(config, f"a.{i}") for i in range(3)] == ["a.0"] * 3
    (repository / "notes.txt").write_text("three\n")
    assert keep(config, "a.3") == "a.3"
    (repository / "notes.txt").write_text("two\n")
    assert keep(config, "a.4") == "a.0"
    starts = config.folder / "starts"
    assert sorted(path.name for path in starts.iterdir()) == ["a.0", "a.3"]
    assert (starts / "a.0/same_code.txt").read_text().split() == ["a.1", "a.2", "a.4"]


def test_secrets_are_masked_and_what_is_kept_still_applies(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "plain-secret-value")
    config = make_config(tmp_path)
    package, old = repository / "team/src/my_project", repository / "old.py"
    old.write_text(f"hub_token = '{SECRET}'\na = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "with a secret")
    old.write_text(f"hub_token = '{SECRET}'\na = 2\n")
    code = f'api_key: str = "{SECRET}"\nos.environ["HF_TOKEN"] = "{SECRET}"\n'
    code += "x = 'plain-secret-value'\nurl = 'https://me:pw1@host'\n"
    (package / "new.py").write_text(code)
    keep(config, "a.0")
    start = config.folder / "starts/a.0"
    contents = [path.read_bytes() for path in start.iterdir()]
    archive = zipfile.ZipFile(start / "sources.zip")
    contents += [archive.read(name) for name in archive.namelist()]
    for secret in (SECRET, "plain-secret-value", "pw1"):
        assert not [content for content in contents if secret.encode() in content], secret
    assert kept_in(config.folder, "a.0")["masked"] == ["old.py", "team/src/my_project/new.py"]
    clone = brought_back(repository, config.folder, "a.0", tmp_path / "clone")
    assert (clone / "old.py").read_text() == "hub_token = '***'\na = 2\n"
    assert "https://***@host" in (clone / "team/src/my_project/new.py").read_text()


def test_what_cannot_be_kept_without_a_secret_is_told(repository, tmp_path):
    """A deleted file, a file whose name git quotes, and a private key over several lines."""
    config = make_config(tmp_path)
    names = ("gone.yaml", 'an"other.yaml', "key.yaml")
    gone, other, key = (repository / name for name in names)
    text = "a: |\n  -----BEGIN PRIVATE KEY-----\n  {}\n  -----END PRIVATE KEY-----\n"
    for path in (gone, other):
        path.write_text(f"hub_token: {SECRET}\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "with a secret")
    gone.unlink()
    other.write_text("a: 1\n")
    key.write_text(text.format("MIIEvQIBADAN"))
    git(repository, "add", "key.yaml")
    keep(config, "a.0")
    kept = kept_in(config.folder, "a.0")
    assert "gone.yaml" in kept["not_kept"]
    assert 'an\\"other.yaml' in kept["not_kept"]
    clone = brought_back(repository, config.folder, "a.0", tmp_path / "clone")
    assert (clone / "key.yaml").read_text() == text.format("***")


def test_no_line_of_this_project_is_taken_for_a_secret():
    for path in (PROJECT / "src/my_project").rglob("*.py"):
        text = path.read_text()
        assert provenance.mask_source(text) == text, path


def test_a_long_word_is_masked_in_no_time():
    begun = time.process_time()
    assert provenance.mask_source("a" * 20_000) == "a" * 20_000
    assert time.process_time() - begun < 2


def test_changes_over_the_limit_are_told_and_not_cut(repository, tmp_path, caplog):
    config = make_config(tmp_path)
    (repository / "notes.txt").write_text("".join(f"{i}\n" for i in range(300_000)))
    changed = PACKAGE.replace("4", "8")
    (repository / "team/src/my_project/provenance.py").write_text(changed)
    keep(config, "a.0")
    assert "code.patch" not in kept_in(config.folder, "a.0")["files"]
    assert "exceed the 1 MB limit" in kept_in(config.folder, "a.0")["not_kept"]
    assert "exceed the 1 MB limit" in caplog.text
    clone = brought_back(repository, config.folder, "a.0", tmp_path / "clone")
    assert (clone / "team/src/my_project/provenance.py").read_text() == changed


def test_code_over_the_limit_has_no_masked_files(repository, tmp_path):
    config = make_config(tmp_path)
    text = f"hub_token = '{SECRET}'\n" + "".join(f"x{i} = {hash(str(i))}\n" for i in range(99_000))
    (repository / "team/src/my_project/ignored.py").write_text(text)
    keep(config, "a.0")
    kept = kept_in(config.folder, "a.0")
    assert "over the limit" in kept["not_kept"]
    assert kept["masked"] == []


def test_the_limit_of_changed_files_is_named(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "MOST_CHANGED_BYTES", 5_000_000)
    (repository / "notes.txt").write_bytes(bytes(6_000_000))
    config = make_config(tmp_path)
    keep(config, "a.0")
    assert "exceed the 5 MB limit" in kept_in(config.folder, "a.0")["not_kept"]


def test_an_edit_during_a_launch_is_not_taken_for_what_a_restart_runs(
    repository, tmp_path, monkeypatch
):
    """A restart in place is forked from the launcher, which imported the code before the edit."""
    config = make_config(tmp_path)
    code = provenance.code_digest(config.recipe)
    monkeypatch.setenv(CODE, code)
    assert keep(config, "a.0") == "a.0"
    (repository / "team/src/my_project/provenance.py").write_text(PACKAGE.replace("4", "8"))
    origin = provenance.keep_code(config.folder, config, "run", "a.1")
    assert (origin.start, origin.code) == ("a.0", code)
    assert (config.folder / "starts/a.0/same_code.txt").read_text() == "a.1\n"
    monkeypatch.setenv(CODE, "imported")
    origin = provenance.keep_code(config.folder, config, "run", "b.1")
    assert (origin.start, origin.code) == ("", "imported")
    monkeypatch.setenv(CODE, "")
    assert keep(config, "c.0") == "c.0"


def test_a_recipe_that_was_broken_or_removed_during_a_launch_ends_no_restart(tmp_path):
    source = tmp_path / "recipe.py"
    source.write_text("import torch\nclass Recipe(")
    assert provenance.provenance(str(source))["recipe_sha256"]
    source.unlink()
    assert provenance.provenance(str(source))["recipe_sha256"] is None


def test_a_lock_of_an_editor_and_a_package_without_metadata_are_left_out(
    repository, tmp_path, monkeypatch
):
    (repository / "team/accelerate_configs").mkdir()
    (repository / "team/accelerate_configs/cpu.yaml").write_text("a: 1\n")
    (repository / "team/accelerate_configs/.#cpu.yaml").symlink_to("me@host.1234")
    (tmp_path / "site/old-1.dist-info").mkdir(parents=True)
    (tmp_path / "site/old-1.dist-info/top_level.txt").write_text("torch\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "torch" in provenance.imported_distributions()
    config = make_config(tmp_path)
    assert keep(config, "a.0") == "a.0"


def test_without_a_commit_the_sources_are_kept(repository, tmp_path):
    config = make_config(tmp_path)
    git(repository, "update-ref", "-d", "HEAD")
    keep(config, "a.0")
    assert kept_in(config.folder, "a.0")["commit"] is None
    archive = zipfile.ZipFile(config.folder / "starts/a.0/sources.zip")
    assert archive.read("my_project/provenance.py").decode() == PACKAGE


def test_submodules_are_named_and_their_changes_are_told(repository, tmp_path):
    config = make_config(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(other, *words)
    git(repository, "submodule", "--quiet", "add", str(other), "sub")
    git(repository, "commit", "-qm", "sub")
    keep(config, "a.0")
    head = git(repository / "sub", "rev-parse", "HEAD")
    assert kept_in(config.folder, "a.0")["submodules"] == {"sub": head}
    assert kept_in(config.folder, "a.0")["not_kept"] == ""
    (repository / "sub/a.py").write_text("a = 2\n")
    keep(config, "a.1")
    assert kept_in(config.folder, "a.1")["not_kept"] == "the changes in the submodules sub"
    assert kept_in(config.folder, "a.1")["files"] == {}


def test_checkpoints_and_exports_say_where_they_come_from(tmp_path):
    config = change(make_config(tmp_path, steps=2), checkpoints__every_steps=1)
    assert train(config) == 0
    about = json.loads((config.folder / "run.json").read_text())
    exported = json.loads((config.folder / "export/step.json").read_text())["provenance"]
    saved = read_manifest(config.folder / "checkpoints/step_00000002")["provenance"]
    assert saved == exported
    assert saved["run"] == about["run"]
    assert saved["code"] == provenance.code_digest(config.recipe)
    assert saved["config"] == (config.folder / "config.yaml").read_text()
    assert saved["packages"]["torch"] == provenance.version("torch")
    assert (config.folder / "starts" / saved["start"] / "start.json").is_file()


def test_a_run_goes_on_where_its_code_cannot_be_kept(tmp_path, caplog):
    config = make_config(tmp_path, steps=2)
    config.folder.mkdir(parents=True)
    (config.folder / "starts").write_text("a file")
    assert train(config) == 0
    assert "could not be written" in caplog.text
    assert (config.folder / "starts").read_text() == "a file"
