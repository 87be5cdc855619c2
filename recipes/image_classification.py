# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchvision>=0.25",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "scikit-learn>=1.6",
# ]
# ///
"""Image classification: a small ResNet, or any torchvision model, on any labelled images.

Data:  digits (handwritten, inside scikit-learn, no download), cifar10, folder (torchvision's
       ImageFolder: <data_path>/train/<class>/*.png and <data_path>/validation/...), parquet
       (<data_path>/train*.parquet and validation*.parquet), or the name or local path of a Hugging
       Face data set: --recipe.init_args.data
Model: mini_resnet, or a torchvision classification model by name: --recipe.init_args.model
The card of the default, with its measured accuracy and time, is configs/image_classification.yaml.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: samples in a micro-batch, C: channels, H, W: height and width, K: classes


@dataclass(frozen=True, kw_only=True)
class ImageClassification:
    """Classify images; every field can be set from the command line."""

    model: str = "mini_resnet"
    """mini_resnet, or any name of torchvision.models.list_models()."""
    data: str = "digits"
    """digits, cifar10, folder, parquet, or a Hugging Face data set's name or path."""
    data_path: str = field(default="data", metadata={"changes_curve": False, "staged": True})
    """Where folder and parquet lie, and where cifar10 is downloaded to; what stage_to copies."""
    train_split: str = "train"
    validation_split: str = "validation"
    image_column: str = "image"
    label_column: str = "label"
    image_size: int = 8
    """Height and width after scaling and cropping, in pixels."""
    augmentation: Literal["none", "shift", "shift_flip", "resized_crop_flip"] = "shift"
    """shift: pad by an eighth and crop; resized_crop_flip: as is usual for ImageNet."""
    label_smoothing: float = 0.0
    width: int = 32
    """mini_resnet: channels of the first stage; each of the three stages doubles them."""
    blocks: int = 1
    """mini_resnet: residual blocks per stage."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Download what has to be, and name the classes."""
        if self.data == "cifar10":
            from torchvision.datasets import CIFAR10

            for train in (True, False):
                CIFAR10(self.data_path, train=train, download=True)
        train = self._images(train=True)
        return {"classes": train.classes, "image_size": self.image_size}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the training images, augmented, and the validation images, as they are."""
        train, validation = self._images(train=True), self._images(train=False)
        if validation.classes != data_info["classes"]:
            raise ValueError(
                f"the classes for validation are {validation.classes}, those for training"
                f" {data_info['classes']}; give both splits the same classes."
            )
        train.transform = image_transform(self.image_size, self.augmentation)
        validation.transform = image_transform(self.image_size, "none")
        return train, {"validation": validation}

    def _images(self, *, train: bool) -> "Images":
        if self.data == "digits":
            return digits(train)
        if self.data in ("cifar10", "folder"):
            from torchvision import datasets

            if self.data == "cifar10":
                source: Any = datasets.CIFAR10(self.data_path, train=train)
            else:
                split = self.train_split if train else self.validation_split
                source = datasets.ImageFolder(str(Path(self.data_path) / split))
            return Images(source.__getitem__, len(source), source.classes)
        import datasets as hugging_face

        split = self.train_split if train else self.validation_split
        if self.data == "parquet":
            files = [str(path) for path in sorted(Path(self.data_path).glob(f"{split}*.parquet"))]
            if not files:
                raise ValueError(f"{self.data_path} holds no {split}*.parquet")
            table = hugging_face.load_dataset("parquet", data_files=files, split="train")
        else:
            table = hugging_face.load_dataset(self.data, split=split)
        table = table.cast_column(self.image_column, hugging_face.Image())
        label = table.features[self.label_column]
        classes = getattr(label, "names", None) or [
            str(number) for number in range(max(table[self.label_column]) + 1)
        ]
        read = partial(_row, table, self.image_column, self.label_column)
        return Images(read, len(table), classes)

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with fresh weights."""
        classes = len(data_info["classes"])
        if self.model == "mini_resnet":
            return MiniResNet(classes, self.width, self.blocks)
        from torchvision.models import get_model

        return get_model(self.model, weights=None, num_classes=classes)

    def loss(self, model: nn.Module, batch: list[Tensor], step: int) -> tuple[Tensor, int]:
        """Sum the cross-entropy over the images of a micro-batch.

        Args:
            model: maps images (B, 3, H, W) to logits (B, K).
            batch: images (B, 3, H, W), labels (B,).
            step: not used.

        Returns:
            The sum in nats, a scalar, and the number of images.
        """
        images, labels = batch
        logits = _logits(model(images))
        loss = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss, len(labels)

    # ---- evaluation and use ---------------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Accuracy, the fraction of images classified right, and the mean cross-entropy in nats."""
        from torchmetrics import MeanMetric

        return {"accuracy": MeanMetric(), "loss": MeanMetric()}

    def update_metrics(
        self, model: nn.Module, batch: list[Tensor], metrics: dict[str, Any]
    ) -> None:
        """Count one micro-batch."""
        images, labels = batch
        logits = _logits(model(images)).float()
        metrics["accuracy"].update((logits.argmax(1) == labels).float())
        metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Classify the image file that the argument names."""
        from torchvision.io import ImageReadMode, decode_image

        image = image_transform(self.image_size, "none")(decode_image(argument, ImageReadMode.RGB))
        with torch.no_grad():
            probabilities = _logits(model(image[None])).softmax(1)[0]
        best = int(probabilities.argmax())
        return f"{data_info['classes'][best]} (probability {probabilities[best]:.3f})"

    def example_inputs(self, data_info: dict[str, Any]) -> tuple[Tensor, ...]:
        """Two images, for tracing."""
        return (torch.zeros(2, 3, data_info["image_size"], data_info["image_size"]),)


def _logits(output: Any) -> Tensor:
    """Take the main output of models which also return auxiliary ones (googlenet, inception)."""
    return output if isinstance(output, Tensor) else output.logits


def _row(table: Any, image_column: str, label_column: str, index: int) -> tuple[Any, int]:
    row = table[index]
    return row[image_column], row[label_column]


class Images(torch.utils.data.Dataset):
    """Images and labels from anywhere, transformed when they are read."""

    def __init__(self, read: Any, length: int, classes: list[str]) -> None:
        self.read, self.length, self.classes = read, length, classes
        self.transform: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, H, W), float32, and its label."""
        image, label = self.read(index)
        return self.transform(image), label


def digits(train: bool) -> Images:
    """Read the 1,797 handwritten digits inside scikit-learn (8 x 8); every fifth is validation."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.tensor(data.images / 16 * 255).to(torch.uint8)[:, None]  # (N, 1, 8, 8)
    chosen = [i for i in range(len(images)) if (i % 5 != 4) == train]
    labels = data.target.tolist()
    samples = [(images[i], labels[i]) for i in chosen]
    return Images(samples.__getitem__, len(samples), [str(name) for name in data.target_names])


def image_transform(size: int, augmentation: str) -> Any:
    """Build the transform from a PIL image or uint8 tensor to float32 (3, size, size)."""
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
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),  # ImageNet's
        ]
    )


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
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
        before = width
        for stage, after in enumerate(widths):
            for block in range(blocks):
                stages.append(Block(before, after, 2 if stage and not block else 1))
                before = after
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
