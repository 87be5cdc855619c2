# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchvision>=0.25",
#   "torchmetrics>=1.7",
#   "scikit-learn>=1.6",
# ]
# ///
"""Say for each pixel of an image what it belongs to.

Data:  digits (scenes composed, by a seed, of the real handwritten digits inside scikit-learn; the
       scenes are made up, the digits are not), or folder (<data_path>/train/images/*.png or *.jpg,
       masks/<same name>.png with a class number per pixel, 255 where none counts; and
       <data_path>/validation/...): --recipe.init_args.data
Model: mini_unet, or a torchvision segmentation model by name (lraspp_mobilenet_v3_large, ...).
Images keep their sizes: a micro-batch is padded to its largest, and padding does not count. But
what is beside an image changes what the model makes of it, so evaluate with evaluation.batch_size
1: then the metrics are the same for any number of processes.
mini_unet normalises over groups of channels, so that the curve is the same for any split.
torchvision's models have BatchNorm: on several GPUs set distributed.sync_batchnorm, which makes its
statistics those of all processes.
The card of the default, with its measured result and time, is configs/segmentation.yaml.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: images in a micro-batch, C: channels, H, W: height and width, K: classes

IGNORED = 255  # the label of pixels that do not count
MULTIPLE = 8  # of heights and widths, for the three halvings of mini_unet


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """Label every pixel; every field can be set from the command line."""

    model: str = "mini_unet"
    """mini_unet, or a torchvision segmentation model."""
    data: str = "digits"
    """digits or folder."""
    data_path: str = field(default="data", metadata={"changes_curve": False, "staged": True})
    """folder: where it lies; what stage_to copies."""
    classes: tuple[str, ...] = ()
    """folder: the names of classes 0, 1, ...; digits has its own."""
    digits: int = 10
    """digits: how many of the ten appear, 0 first."""
    scenes: int = 800
    """digits: how many to train on; a quarter as many are for validation."""
    width: int = 16
    """mini_unet: channels at full size; each halving doubles them."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Name the classes."""
        if self.data == "digits":
            return {"classes": ["background", *map(str, range(self.digits))]}
        if self.data != "folder":
            raise ValueError(f"data is {self.data}, but must be digits or folder")
        if len(self.classes) < 2:
            raise ValueError("data folder needs classes, the names of at least two")
        return {"classes": list(self.classes)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return images with their masks."""
        if self.data == "digits":
            train: Any = DigitScenes(self.scenes, self.digits, first=0)
            held_out = DigitScenes(self.scenes // 4, self.digits, first=1_000_000)
            return train, {"validation": held_out}
        train = Folder(Path(self.data_path) / "train", len(self.classes))
        validation = Path(self.data_path) / "validation"
        if not validation.is_dir():
            return train, {}
        return train, {"validation": Folder(validation, len(self.classes))}

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Pad to the largest of the micro-batch; what is added does not count.

        Returns:
            Images (B, 3, H, W), float32, and labels (B, H, W), int64.
        """
        height, width = (
            MULTIPLE * -(-max(image.shape[axis] for image, _ in samples) // MULTIPLE)
            for axis in (1, 2)
        )
        images = torch.zeros(len(samples), 3, height, width)
        labels = torch.full((len(samples), height, width), IGNORED)
        for i, (image, label) in enumerate(samples):
            images[i, :, : image.shape[1], : image.shape[2]] = image
            labels[i, : label.shape[0], : label.shape[1]] = label
        return images, labels

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with fresh weights."""
        classes = len(data_info["classes"])
        if self.model == "mini_unet":
            return MiniUNet(classes, self.width)
        from torchvision.models import get_model

        return get_model(self.model, weights=None, weights_backbone=None, num_classes=classes)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """Sum the cross-entropy over the pixels that count.

        Args:
            model: maps images (B, 3, H, W) to logits (B, K, H, W).
            batch: images, labels (B, H, W).
            step: not used.

        Returns:
            The sum in nats, and the number of pixels; scalars.
        """
        images, labels = batch
        logits = _logits(model(images)).float()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    # ---- evaluation and use ---------------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Mean intersection over union, of all pixels of the set, and the part labelled right."""
        from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

        count = len(self.prepare_data()["classes"])
        return {
            "mean_iou": MulticlassJaccardIndex(count, ignore_index=IGNORED),
            "accuracy": MulticlassAccuracy(count, ignore_index=IGNORED, average="micro"),
        }

    def update_metrics(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], metrics: dict[str, Any]
    ) -> None:
        """Count one micro-batch."""
        images, labels = batch
        found = _logits(model(images)).argmax(1)
        for metric in metrics.values():
            metric.update(found, labels)

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Label an image file; write the mask beside it, and say which classes take how much."""
        from torchvision.io import ImageReadMode, decode_image, write_png

        image = decode_image(argument, ImageReadMode.RGB).float() / 255
        images, _ = self.collate([(image, torch.zeros(image.shape[1:], dtype=torch.int64))])
        with torch.no_grad():
            found = _logits(model(images)).argmax(1)[0, : image.shape[1], : image.shape[2]]
        path = Path(argument).with_suffix(".mask.png")
        path.unlink(missing_ok=True)  # a link would lead elsewhere
        write_png(found.to(torch.uint8)[None], str(path))
        shares = (
            torch.bincount(found.flatten(), minlength=len(data_info["classes"])) / found.numel()
        )
        parts = [
            f"{data_info['classes'][k]} {shares[k]:.1%}"
            for k in shares.argsort(descending=True).tolist()
            if shares[k] > 0
        ]
        return f"{path}: {', '.join(parts)}"

    def example_inputs(self, data_info: dict[str, Any]) -> tuple[Tensor, ...]:
        """Two images, for tracing."""
        return (torch.zeros(2, 3, 64, 64),)


def _logits(output: Any) -> Tensor:
    """Take the main output of torchvision's models, which return several by name."""
    return output["out"] if isinstance(output, dict) else output


# ---- data sets ----------------------------------------------------------------------------------
class DigitScenes(torch.utils.data.Dataset):
    """Scenes of 3 to 6 handwritten digits, of several sizes; the same for the same index."""

    def __init__(self, length: int, digits: int, *, first: int) -> None:
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        images = torch.tensor(data.images / 16, dtype=torch.float32)  # (1797, 8, 8)
        # those of validation are in no scene for training
        chosen = [i for i in range(len(images)) if (i % 5 == 4) == (first > 0)]
        self.digits = [(images[i], int(data.target[i])) for i in chosen if data.target[i] < digits]
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, H, W), float32 in 0 to 1, and its labels (H, W), int64."""
        draw = torch.Generator().manual_seed(self.first + index)

        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=draw))

        height, width = integer(40, 57), integer(40, 73)
        image = 0.1 * torch.rand(height, width, generator=draw)
        label = torch.zeros(height, width, dtype=torch.int64)
        for _ in range(integer(3, 7)):
            digit, number = self.digits[integer(0, len(self.digits))]
            side = integer(12, 25)
            large = F.interpolate(digit[None, None], (side, side), mode="bilinear")[0, 0]
            top, left = integer(0, height - side + 1), integer(0, width - side + 1)
            place = slice(top, top + side), slice(left, left + side)
            image[place] = torch.maximum(image[place], large)
            label[place] = torch.where(large > 0.4, number + 1, label[place])
        return image.expand(3, -1, -1).clone(), label


class Folder(torch.utils.data.Dataset):
    """Images and masks of equal names in two folders."""

    def __init__(self, folder: Path, classes: int) -> None:
        self.classes = classes
        images = sorted(
            path for path in (folder / "images").glob("*") if path.suffix in (".png", ".jpg")
        )
        self.files = [(path, folder / "masks" / f"{path.stem}.png") for path in images]
        if not self.files:
            raise ValueError(f"{folder}/images holds no *.png or *.jpg")
        if missing := [mask.name for _, mask in self.files if not mask.is_file()]:
            raise ValueError(f"{folder}/masks lacks {len(missing)} of them, such as {missing[0]}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, H, W), float32 in 0 to 1, and its labels (H, W), int64."""
        from torchvision.io import ImageReadMode, decode_image

        image, mask = self.files[index]
        label = decode_image(str(mask), ImageReadMode.UNCHANGED)[0].long()
        wrong = label[(label >= self.classes) & (label != IGNORED)]
        if len(wrong):
            raise ValueError(
                f"{mask} has class {int(wrong[0])}, but there are {self.classes}; name them all in"
                " classes, or use 255 for pixels that do not count"
            )
        pixels = decode_image(str(image), ImageReadMode.RGB)
        if pixels.shape[1:] != label.shape:
            raise ValueError(
                f"{mask} is {label.shape[1]} x {label.shape[0]}, but its image"
                f" {pixels.shape[2]} x {pixels.shape[1]}; a mask has a pixel for each of the image"
            )
        return pixels.float() / 255, label


# ---- the model ----------------------------------------------------------------------------------
class Convolutions(nn.Sequential):
    """Two 3 x 3 convolutions."""

    def __init__(self, before: int, after: int) -> None:
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [
                nn.Conv2d(channels, after, 3, padding=1, bias=False),
                nn.GroupNorm(max(1, after // 8), after),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class MiniUNet(nn.Module):
    """A U-Net of three halvings (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            Convolutions(before, after)
            for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            Convolutions(deep + shallow, shallow)
            for deep, shallow in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K, H, W); H and W are multiples of 8."""
        passed = []
        for depth, convolutions in enumerate(self.down):
            x = convolutions(F.max_pool2d(x, 2) if depth else x)
            passed.append(x)
        for convolutions, skip in zip(self.up, passed[-2::-1], strict=True):
            x = convolutions(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.head(x)
