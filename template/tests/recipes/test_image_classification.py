"""The recipe image_classification: every kind of data, any model, and the accuracy on its card."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from documents import (
    PROJECT,
    blocks,
    card,
    predict_as_typed,
    text_of,
    train_as_typed,
    train_on_own_data,
)
from runs import make_config, train

from my_project.recipes.image_classification import ImageClassification


def images_by_class(folder, splits=("train", "validation"), count=6):
    """Write small PNG files of two classes: dark and bright."""
    from PIL import Image

    for split in splits:
        for name, shade in {"bright": 220, "dark": 30}.items():
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                size = (9 + i, 12)  # different sizes
                Image.new("RGB", size, (shade, shade + i, shade)).save(
                    folder / split / name / f"{i}.png"
                )


def test_any_torchvision_model_fits_any_data():
    data_info = {"classes": ["a", "b", "c"], "image_size": 64}
    for name in ("resnet18", "mobilenet_v3_small"):
        model = ImageClassification(model=name).build_model(data_info)
        batch = [torch.randn(2, 3, 64, 64), torch.tensor([0, 2])]
        loss_sum, num_items = ImageClassification(label_smoothing=0.1).loss(model, batch, 0)
        assert loss_sum.isfinite()
        assert num_items == 2


def write_digit(path):
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels = (load_digits().images[4] / 16 * 255).astype("uint8")
    Image.fromarray(pixels).save(path)


def read_commands(path: Path) -> list[str]:
    """Read the commands in the comment at the head of a config, continuation lines joined."""
    commands = re.findall(r"(?m)^  ((?:.*\\\n)*.*)$", card(path))
    return [" ".join(command.replace("\\\n", " ").split()) for command in commands]


def test_a_wrong_data_path_is_named(tmp_path):
    config = make_config(tmp_path, ImageClassification(data="parquet", data_path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"contains no train\*.parquet"):
        train(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # libraries warn when they read images
def test_your_own_images_are_read_as_the_document_says(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    images_by_class(data / "leaves")
    tables = datasets.load_dataset("imagefolder", data_dir=str(data / "leaves"))
    (data / "trees").mkdir()
    for split, part in {"train": "train", "validation": "test"}.items():
        table = tables[split].rename_columns({"image": "photo", "label": "species"})
        table.to_parquet(data / "trees" / f"{part}.parquet")
        folder = data / "birds" / split
        folder.mkdir(parents=True)
        lines = []
        for number, path in enumerate(sorted((data / "leaves" / split).glob("*/*.png"))):
            (folder / f"{number}.png").write_bytes(path.read_bytes())
            word = ["robin", "crow"][number % 2]
            lines.append(json.dumps({"file_name": f"{number}.png", "label": word}))
        (folder / "metadata.jsonl").write_text("\n".join(lines))

    classes = {}
    for name, config in train_on_own_data("image_classification", tmp_path).items():
        info = json.loads((config.folder / "export/data_info.json").read_text())
        assert info["image_size"] == 32
        classes[name] = info["classes"]
        image, label = config.recipe.build_datasets(info)[0][0]
        assert image.shape == (3, 32, 32)
        assert name == "birds" or (image.mean() > 0) == (info["classes"][label] == "bright")
    assert classes.keys() == {"leaves", "birds", "trees"}
    assert classes["leaves"] == classes["trees"] == ["bright", "dark"]
    assert classes["birds"] == ["crow", "robin"]


@pytest.mark.parametrize(
    ("train_labels", "validation_labels", "classes", "numbers"),
    [
        (["b", "a", "b"], ["b"], ["a", "b"], [1]),
        ([2, 0], [0, 1], ["0", "1", "2"], [0, 1]),
        (["a"], ["c"], "contains c, but the training data has only a", []),
        (["a", None], ["a"], "contains None; the class of an image must be a word or a number", []),
        ([-1], [0], "contains -1; the class of an image must be", []),
    ],
)
def test_labels_are_words_or_numbers(tmp_path, train_labels, validation_labels, classes, numbers):
    import datasets
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    for split, labels in {"train": train_labels, "validation": validation_labels}.items():
        images = [str(tmp_path / "x.png")] * len(labels)
        table = datasets.Dataset.from_dict({"image": images, "label": labels})
        table.to_parquet(tmp_path / f"{split}.parquet")
    recipe = ImageClassification(data="parquet", data_path=str(tmp_path))
    if isinstance(classes, str):
        with pytest.raises(ValueError, match=classes):
            recipe.build_datasets(recipe.prepare_data())
        return
    data_info = recipe.prepare_data()
    assert data_info["classes"] == classes
    _, sets = recipe.build_datasets(data_info)
    assert [label for _, label in sets["validation"]] == numbers


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """Do the default run for 4 steps, and write picture.png; return the document's section."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    command = "python -m my_project train configs/image_classification.yaml"
    train_as_typed(command, "--steps 4")
    write_digit(tmp_path / "picture.png")
    return text_of("docs/your-own-recipe.md", "## Using an export")


def test_an_export_is_used_in_plain_torch_as_the_document_says(exported, tmp_path, capsys):
    weight_files = pytest.importorskip("my_project.weights")
    after = exported.partition("### In plain torch")[2]
    (block,) = blocks(after.partition("### In transformers")[0], "python")
    capsys.readouterr()
    exec(block, {})
    config, info, model = weight_files.load(tmp_path / "runs/image_classification/export")
    answer = config.recipe.predict(model, info, "picture.png")  # type: ignore[attr-defined]
    assert capsys.readouterr().out == f"{answer}\n"


def test_the_commands_of_the_card_show_answers_and_classify_a_picture(exported):
    from PIL import Image

    _, *predict = read_commands(PROJECT / "configs/image_classification.yaml")
    shutil.copy("picture.png", "digit.png")
    sheet, answer = (predict_as_typed(command) for command in predict)
    assert re.fullmatch(r"\d \(probability [01]\.\d{3}\)\n", answer)
    title, path = sheet.splitlines()
    assert path == "runs/image_classification/predictions.png"
    assert re.fullmatch(r"\d+ of 16 validation samples right", title)
    with Image.open(path) as drawn:
        assert drawn.width > 4 * 144
