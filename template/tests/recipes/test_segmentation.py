"""The recipe segmentation: images of any size, padding ignored, mean IoU over the whole set."""

import dataclasses
import json

import pytest
import torch
from documents import predict_as_typed, train_on_own_data, train_recipe_config
from runs import make_config, records, train
from world import run_world

from my_project.config import Config
from my_project.recipes import segmentation
from my_project.recipes.segmentation import IGNORE_INDEX, Segmentation

SMALL = Segmentation(scenes=28, width=4)


def run_config(folder, **settings) -> Config:
    batches = {"batches__global_batch_size": 8, "batches__micro_batch_size": 2}
    settings = batches | {"evaluation__batch_size": 1} | settings
    return dataclasses.replace(make_config(folder, **settings), recipe=SMALL)


def folder_of(path, size=(9, 13), label=1):
    from torchvision.io import write_png

    for part in ("train", "validation"):
        for kind in ("images", "masks"):
            (path / part / kind).mkdir(parents=True)
        for i in range(8):
            image = torch.full((3, size[0] + i, size[1]), 20 * i, dtype=torch.uint8)
            mask = torch.full((1, size[0] + i, size[1]), i % 2 * label, dtype=torch.uint8)
            write_png(image, str(path / part / f"images/{i}.png"))
            write_png(mask, str(path / part / f"masks/{i}.png"))
    return path


def test_scenes_depend_on_their_index_only_and_differ_in_size():
    train_set, sets = SMALL.build_datasets({})
    again, _ = SMALL.build_datasets({})
    assert all(torch.equal(a, b) for a, b in zip(train_set[3], again[3], strict=True))
    sizes = {train_set[i][0].shape for i in range(len(train_set))}
    assert len(sizes) > 10
    labels = torch.cat([train_set[i][1].flatten() for i in range(24)])
    assert set(labels.unique().tolist()) == set(range(11))
    held_out = {d.sum().item() for d, _ in sets["validation"].digits}
    assert len(sets["validation"]) == 7, "not divisible by two processes"
    assert len(held_out) < len(train_set.digits) / 3


def test_padding_is_ignored_by_loss_and_metrics():
    model = SMALL.build_model({"classes": ["a"] * 11})
    train_set, _ = SMALL.build_datasets({})
    images, labels = SMALL.collate([train_set[0], train_set[1]])
    assert images.shape[2] % 8 == images.shape[3] % 8 == 0
    loss_sum, num_items = SMALL.loss(model, (images, labels), 0)
    assert num_items == sum(train_set[i][1].numel() for i in (0, 1))
    relabeled = labels.clone()
    metrics = SMALL.build_metrics()
    SMALL.update_metrics(model, (images, labels), metrics)
    predicted = model(images).argmax(1)
    accuracy = ((predicted == labels) & (labels != IGNORE_INDEX)).sum() / num_items
    assert metrics["accuracy"].compute() == pytest.approx(float(accuracy))
    relabeled[labels == IGNORE_INDEX] = 3
    assert SMALL.loss(model, (images, relabeled), 0)[0] > loss_sum


@pytest.mark.slow
def test_loss_and_iou_are_the_same_on_one_and_two_processes(tmp_path):
    one, two = (run_config(tmp_path, run_name=name, steps=6) for name in ("one", "two"))
    assert train(one) == 0
    assert run_world(2, train, two) == [0, 0]
    for ours, theirs in zip(records(two), records(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    ious = [records(c, "validation/mean_iou")[-1]["validation/mean_iou"] for c in (one, two)]
    assert ious[0] == pytest.approx(ious[1], abs=1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    config = run_config(folder, run_name="whole", steps=8, optim__schedule="constant")
    assert train(config) == 0
    return config


def test_a_mask_holds_the_classes_and_shows_their_colors(tmp_path, whole, monkeypatch):
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.utils import save_image

    image, expected = SMALL.build_datasets({})[1]["validation"][0]
    monkeypatch.setattr(Segmentation, "_mask", lambda *_: expected)
    command = f"python -m my_project predict {whole.folder} {tmp_path}/scene.png"
    save_image(image, tmp_path / "scene.png")
    paths = [tmp_path / f"scene.{kind}.png" for kind in ("mask", "overlay")]
    for path in paths:
        path.symlink_to(tmp_path / "elsewhere")
    answer = predict_as_typed(command)
    assert answer.startswith(f"{paths[0]}, {paths[1]}: ")
    assert not (tmp_path / "elsewhere").exists(), "nothing is written through a link"

    pixels = decode_image(str(tmp_path / "scene.png"), ImageReadMode.RGB)
    torch.testing.assert_close(pixels / 255, image, rtol=0, atol=1 / 255)
    assert torch.equal(decode_image(str(paths[0]), ImageReadMode.UNCHANGED)[0], expected)
    with Image.open(paths[0]) as mask, Image.open(paths[1]) as overlay:
        y, x = (expected > 0).nonzero()[0].tolist()
        assert mask.convert("RGB").getpixel((x, y)) == segmentation.PALETTE[expected[y, x]]
        assert overlay.height > mask.height, "enlarged, above the legend"


def test_samples_are_shown_beside_their_truth(whole):
    weights_of = pytest.importorskip("my_project.weights")
    from PIL import Image

    text, path = predict_as_typed(f"python -m my_project predict {whole.folder}").splitlines()
    model = weights_of.load(whole.folder / "export")[2]
    data = SMALL.build_datasets({})[1]["validation"]
    rights = torch.cat([(SMALL._mask(model, data[i][0]) == data[i][1]).flatten() for i in range(7)])
    assert text == f"{int(rights.sum()) / len(rights):.1%} of the pixels of 7 samples right"
    with Image.open(path) as sheet:
        assert sheet.width > 4 * 128


@pytest.mark.slow
def test_a_folder_of_images_and_a_torchvision_model(tmp_path):
    folder_of(tmp_path / "data", size=(40, 40))
    recipe = Segmentation(
        data="folder", data_path=str(tmp_path / "data"), classes=("no", "yes"),
        model="lraspp_mobilenet_v3_large",
    )  # fmt: skip
    config = dataclasses.replace(run_config(tmp_path, steps=2), recipe=recipe)
    assert train(config) == 0
    assert "validation/mean_iou" in records(config, "validation/mean_iou")[-1]


def test_a_mask_of_another_size_or_with_an_unknown_class_is_refused(tmp_path):
    from torchvision.io import write_png

    folder = folder_of(tmp_path, label=7)
    write_png(torch.zeros(1, 5, 5, dtype=torch.uint8), str(folder / "train/masks/2.png"))
    recipe = Segmentation(data="folder", data_path=str(folder), classes=("a", "b"))
    data, _ = recipe.build_datasets({})
    with pytest.raises(ValueError, match=r"1.png has class 7, but there are 2"):
        data[1]
    with pytest.raises(ValueError, match=r"2.png is 5 x 5, but its image is 13 x 11"):
        data[2]


@pytest.mark.slow
def test_the_default_config_trains(tmp_path):
    losses = train_recipe_config("segmentation", tmp_path, steps=10)
    assert losses[-1] < losses[0]


def test_your_own_images_and_masks_are_read_as_the_document_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "data/streets")
    configs = train_on_own_data("segmentation", tmp_path)
    assert configs.keys() == {"streets"}
    info = json.loads((configs["streets"].folder / "export/data_info.json").read_text())
    assert info == {"classes": ["road", "sky", "car"]}
