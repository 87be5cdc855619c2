# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchvision>=0.25",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "scikit-learn>=1.6",
#   "pillow>=10.1",  # ImageFont.load_default(size)
# ]
# ///
"""Image classification: a small ResNet, or any torchvision model, on any labeled images.

Data:  digits (handwritten digits that scikit-learn includes, no download), cifar10, folder
       (torchvision's ImageFolder: <data_path>/train/<class>/*.png and <data_path>/validation/...),
       parquet (<data_path>/train*.parquet and validation*.parquet), or the name or local path of a
       Hugging Face dataset: --recipe.data
Model: mini_resnet, or the name of a torchvision classification model: --recipe.model
The default config, with its measured accuracy and time, is configs/image_classification.yaml.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: images in a micro-batch, C: channels, H, W: height and width, K: classes

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's, per channel


@dataclass(frozen=True, kw_only=True)
class ImageClassification:
    """Classify images; every field can be set from the command line."""

    model: str = "mini_resnet"
    """mini_resnet, or any name of torchvision.models.list_models()."""
    data: str = "digits"
    """digits, cifar10, folder, parquet, or the name or path of a Hugging Face dataset."""
    data_path: str = field(default="data", metadata={"changes_curve": False})
    """folder, parquet: the folder of the data; cifar10: the download folder."""
    train_split: str = "train"
    """folder, parquet, Hugging Face dataset: subfolder, file prefix or split to train on."""
    validation_split: str = "validation"
    """The same, for validation."""
    image_column: str = "image"
    """parquet, Hugging Face dataset: the column that holds the images."""
    label_column: str = "label"
    """parquet, Hugging Face dataset: the column that holds the classes, as names or numbers."""
    image_size: int = 8
    """Height and width after resizing and cropping, in pixels."""
    augmentation: Literal["none", "shift", "shift_flip", "resized_crop_flip"] = "shift"
    """shift: pad by 1/8 and crop at random; resized_crop_flip: as usual for ImageNet."""
    label_smoothing: float = 0.0
    width: int = 32
    """mini_resnet: channels of the first of three stages; each next stage has twice as many."""
    blocks: int = 1
    """mini_resnet: residual blocks per stage."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Download CIFAR-10 if it is the data, and return the names of the classes."""
        if self.data == "cifar10":
            from torchvision.datasets import CIFAR10

            for train in (True, False):
                CIFAR10(self.data_path, train=train, download=True)
        train = self._images(train=True)
        return {"classes": train.classes, "image_size": self.image_size}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the training images with augmentation, and the validation images without."""
        classes = data_info["classes"]
        train = self._images(train=True, classes=classes)
        validation = self._images(train=False, classes=classes)
        if validation.classes != classes:
            raise ValueError(
                f"the validation classes {validation.classes} differ from the training classes"
                f" {classes}; give both splits the same classes."
            )
        train.transform = image_transform(self.image_size, self.augmentation)
        validation.transform = image_transform(self.image_size, "none")
        return train, {"validation": validation}

    def _images(self, *, train: bool, classes: list[str] | None = None) -> "ImageDataset":
        """Return the images of a split; `classes` are those of the training split, once known."""
        if self.data == "digits":
            return digits(train)
        if self.data in ("cifar10", "folder"):
            from torchvision import datasets

            if self.data == "cifar10":
                source: Any = datasets.CIFAR10(self.data_path, train=train)
            else:
                split = self.train_split if train else self.validation_split
                source = datasets.ImageFolder(str(Path(self.data_path) / split))
            return ImageDataset(source.__getitem__, len(source), source.classes)
        import datasets as hugging_face

        split = self.train_split if train else self.validation_split
        if self.data == "parquet":
            files = [str(path) for path in sorted(Path(self.data_path).glob(f"{split}*.parquet"))]
            if not files:
                raise ValueError(f"{self.data_path} contains no {split}*.parquet")
            table = hugging_face.load_dataset("parquet", data_files=files, split="train")
        else:
            table = hugging_face.load_dataset(self.data, split=split)
        for setting in ("image_column", "label_column"):
            if (column := getattr(self, setting)) not in table.column_names:
                raise ValueError(
                    f"{setting} is {column}, but the data has only {', '.join(table.column_names)}"
                )
        table = table.cast_column(self.image_column, hugging_face.Image())
        if names := getattr(table.features[self.label_column], "names", None):
            labels = {number: number for number in range(len(names))}
        else:
            labels, names = self._labels(table.unique(self.label_column), classes)
        read = partial(_read_row, table, self.image_column, self.label_column, labels)
        return ImageDataset(read, len(table), names)

    def _labels(
        self, values: list[Any], classes: list[str] | None
    ) -> tuple[dict[Any, int], list[str]]:
        """Return the label of each value in a column without class names, and the class names.

        Numbers are used unchanged; words are numbered in alphabetical order.
        """
        for value in values:
            if not isinstance(value, str) and not (isinstance(value, int) and value >= 0):
                raise ValueError(
                    f"label_column {self.label_column} contains {value!r}; the class of an image"
                    " must be a word or a number from 0 up"
                )
        is_word = isinstance(values[0], str)
        if classes is None:
            classes = sorted(values) if is_word else [str(i) for i in range(max(values) + 1)]
        labels: dict[Any, int] = {
            name if is_word else number: number for number, name in enumerate(classes)
        }
        if unknown := [value for value in values if value not in labels]:
            raise ValueError(
                f"label_column {self.label_column} of the validation data contains {unknown[0]},"
                f" but the training data has only {', '.join(classes)}"
            )
        return labels, classes

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with randomly initialized weights."""
        classes = len(data_info["classes"])
        if self.model == "mini_resnet":
            return MiniResNet(classes, self.width, self.blocks)
        from torchvision.models import get_model

        return get_model(self.model, weights=None, num_classes=classes)

    def loss(self, model: nn.Module, batch: list[Tensor], step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of a micro-batch, and its number of images.

        Args:
            model: maps images (B, 3, H, W) to logits (B, K).
            batch: images (B, 3, H, W), labels (B,).
            step: not used.

        Returns:
            loss_sum in nats, a scalar, and num_items, the number of images.
        """
        images, labels = batch
        logits = _logits(model(images))
        loss_sum = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss_sum, len(labels)

    # ---- evaluation and inference ---------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Return the accuracy (a fraction) and the mean cross-entropy in nats."""
        from torchmetrics import MeanMetric

        return {"accuracy": MeanMetric(), "loss": MeanMetric()}

    def update_metrics(
        self, model: nn.Module, batch: list[Tensor], metrics: dict[str, Any]
    ) -> None:
        """Update the metrics with one micro-batch."""
        images, labels = batch
        logits = _logits(model(images)).float()
        metrics["accuracy"].update((logits.argmax(1) == labels).float())
        metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Classify the image file whose path is the argument."""
        image = image_transform(self.image_size, "none")(_read_image(argument))
        with torch.no_grad():
            probabilities = _logits(model(image[None])).softmax(1)[0]
        predicted = int(probabilities.argmax())
        return f"{data_info['classes'][predicted]} (probability {probabilities[predicted]:.3f})"

    def predict_samples(
        self, model: nn.Module, data_info: dict[str, Any], samples: Any, folder: Path
    ) -> str:
        """Write predictions.png: each image with its true class, the answer and its probability."""
        classes, tiles, num_right = data_info["classes"], [], 0
        for image, label in samples:
            with torch.no_grad():
                probabilities = _logits(model(image[None])).softmax(1)[0]
            answer = int(probabilities.argmax())
            num_right += answer == label
            lines = [f"truth {classes[label]}", f"answer {classes[answer]}"]
            lines.append(f"probability {probabilities[answer]:.2f}")
            tiles.append((_picture(image), lines, answer == label))
        title = f"{num_right} of {len(tiles)} validation samples right"
        contact_sheet(title, tiles).save(folder / "predictions.png")
        return title


def _logits(output: Any) -> Tensor:
    """Return the main logits; GoogLeNet and Inception also return auxiliary ones."""
    return output if isinstance(output, Tensor) else output.logits


def _read_image(path: str) -> Tensor:
    """Return the pixels of an image file, uint8 (3, H, W)."""
    from torchvision.io import ImageReadMode, decode_image

    if not Path(path).is_file():
        problem = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"{path} {problem}; give an image file")
    try:
        return decode_image(path, ImageReadMode.RGB)
    except RuntimeError as error:
        raise ValueError(
            f"{path} is not an image that torchvision reads (PNG, JPEG, WebP, GIF): convert it"
        ) from error


def _picture(image: Tensor) -> Any:
    """Return a normalized image of a dataset, (3, H, W), as a Pillow image."""
    from torchvision.transforms.v2.functional import to_pil_image

    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return to_pil_image(((image.cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8))


def contact_sheet(title: str, tiles: list[tuple[Any, list[str], bool]]) -> Any:
    """Draw pictures in rows of 4, each above its lines of text; a red frame marks wrong answers.

    Args:
        title: the first line of the sheet.
        tiles: for each picture, a Pillow image, its lines, and whether the answer is right.

    Returns:
        A Pillow image.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    side, gap, line, gray = 144, 20, 18, "#e8e8e8"  # pixels; gray shows where a picture ends
    height = side + line * max(len(lines) for _, lines, _ in tiles) + gap  # height of a row
    size = 4 * (side + gap) + gap, 3 * gap + -(-len(tiles) // 4) * height
    font = ImageFont.load_default(14)
    sheet = Image.new("RGB", size, gray)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, gap), title, "black", font)
    for k, (picture, lines, is_right) in enumerate(tiles):
        x, y = gap + k % 4 * (side + gap), 3 * gap + k // 4 * height
        is_small = max(picture.size) < side
        method = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
        sheet.paste(ImageOps.pad(picture, (side, side), method, gray), (x, y))
        color = "black" if is_right else "#c00000"
        if not is_right:
            draw.rectangle((x - 5, y - 5, x + side + 4, y + side + 4), outline=color, width=4)
        for number, text in enumerate(lines):
            while font.getlength(text) > side:
                text = text[:-2] + "…"
            draw.text((x, y + side + 4 + number * line), text, color, font)
    return sheet


def _read_row(
    table: Any, image_column: str, label_column: str, labels: dict[Any, int], index: int
) -> tuple[Any, int]:
    row = table[index]
    return row[image_column], labels[row[label_column]]


class ImageDataset(torch.utils.data.Dataset):
    """Images and labels from any source; an image is transformed when it is read."""

    def __init__(self, read: Any, length: int, classes: list[str]) -> None:
        self.read = read
        self.length = length
        self.classes = classes
        self.transform: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, H, W), float32, and its label."""
        image, label = self.read(index)
        return self.transform(image), label


def digits(train: bool) -> ImageDataset:
    """Return scikit-learn's 1,797 handwritten digits (8 x 8); every fifth is for validation."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.tensor(data.images / 16 * 255).to(torch.uint8)[:, None]  # (N, 1, 8, 8)
    chosen = [i for i in range(len(images)) if (i % 5 != 4) == train]
    labels = data.target.tolist()
    samples = [(images[i], labels[i]) for i in chosen]
    return ImageDataset(
        samples.__getitem__, len(samples), [str(name) for name in data.target_names]
    )


def image_transform(size: int, augmentation: str) -> Any:
    """Return the transform from a Pillow image or uint8 tensor to float32 (3, size, size)."""
    from torchvision.transforms import v2

    crops: dict[str, list[nn.Module]] = {
        "none": [v2.Resize(size), v2.CenterCrop(size)],
        "shift": [v2.Resize(size), v2.RandomCrop(size, padding=max(1, size // 8))],
        "resized_crop_flip": [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()],
    }
    crops["shift_flip"] = [*crops["shift"], v2.RandomHorizontalFlip()]
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RGB(),
            *crops[augmentation],
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut connection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class MiniResNet(nn.Module):
    """A ResNet of three stages (He et al. 2015, https://arxiv.org/abs/1512.03385, section 4.2)."""

    def __init__(self, classes: int, width: int, blocks: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        in_channels = width
        for stage, out_channels in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(ResidualBlock(in_channels, out_channels, stride))
                in_channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
