# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchvision>=0.25",
#   "torchmetrics>=1.7",
#   "scikit-learn>=1.6",
#   "pillow>=10.1",  # ImageFont.load_default(size)
# ]
# ///
"""Semantic segmentation: assign a class to each pixel of images of any size.

Data:  digits (synthetic scenes composed of scikit-learn's real handwritten digits, each scene from
       its own seed), or folder (<data_path>/train/images/*.png or *.jpg, and masks/<same name>.png
       with a class number per pixel, 255 for pixels to ignore; the same in <data_path>/validation):
       --recipe.data
Model: mini_unet, or the name of a torchvision segmentation model (lraspp_mobilenet_v3_large, ...).
Padding: images keep their sizes. A micro-batch is padded to its largest image; padded pixels are
       ignored by loss and metrics, but padding still changes the outputs of the other pixels. With
       evaluation.batch_size 1, images are padded only to a multiple of 8.
Normalization: mini_unet uses GroupNorm, whose statistics do not depend on the other images.
       torchvision's models use BatchNorm: if a micro-batch has few images and there are several
       GPUs, set distributed.sync_batchnorm, which computes the statistics over all processes.
The default config, with its measured result and time, is configs/segmentation.yaml.
"""

from colorsys import hsv_to_rgb
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: images in a micro-batch, C: channels, H, W: height and width, K: classes

IGNORE_INDEX = 255  # the label of pixels that loss and metrics ignore
PALETTE = [  # the color of each class in masks and overlays; hues are a golden ratio apart
    (0, 0, 0),
    *(
        tuple(round(255 * part) for part in hsv_to_rgb(0.618 * k % 1, 0.55 + 0.45 * (k % 2), 1.0))
        for k in range(1, IGNORE_INDEX)
    ),
    (255, 255, 255),  # pixels to ignore
]
GRAY = "#e8e8e8"  # the background, which shows where a picture ends
SIZE_MULTIPLE = 8  # padded sizes are multiples of this: mini_unet halves them 3 times


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """Classify every pixel; every field can be set from the command line."""

    compares_samples = True  # padding to the largest image changes the other images' outputs

    model: str = "mini_unet"
    """mini_unet, or the name of a torchvision segmentation model."""
    data: str = "digits"
    """digits or folder."""
    data_path: str = field(default="data", metadata={"changes_curve": False})
    """folder: the folder with the data."""
    classes: tuple[str, ...] = ()
    """folder: the names of classes 0, 1, ...; digits does not use it."""
    digits: int = 10
    """digits: use the digits from 0 up to this number, exclusive."""
    scenes: int = 800
    """digits: number of training scenes; validation has a quarter as many."""
    width: int = 16
    """mini_unet: channels at full resolution; doubled each time the resolution is halved."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Return the names of the classes."""
        if self.data == "digits":
            return {"classes": ["background", *map(str, range(self.digits))]}
        if self.data != "folder":
            raise ValueError(f"data is {self.data}, but must be digits or folder")
        if len(self.classes) < 2:
            raise ValueError("data folder needs classes: give the names of at least two")
        return {"classes": list(self.classes)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return datasets of images and masks."""
        if self.data == "digits":
            train: Any = DigitScenes(self.scenes, self.digits, first=0)
            held_out = DigitScenes(self.scenes // 4, self.digits, first=1_000_000)
            return train, {"validation": held_out}
        train = ImageMaskFolder(Path(self.data_path) / "train", len(self.classes))
        validation = Path(self.data_path) / "validation"
        if not validation.is_dir():
            return train, {}
        return train, {"validation": ImageMaskFolder(validation, len(self.classes))}

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Pad images to the largest of the micro-batch; padded labels are IGNORE_INDEX.

        Returns:
            Images (B, 3, H, W), float32, and labels (B, H, W), int64.
        """
        height, width = (
            SIZE_MULTIPLE * -(-max(image.shape[axis] for image, _ in samples) // SIZE_MULTIPLE)
            for axis in (1, 2)
        )
        images = torch.zeros(len(samples), 3, height, width)
        labels = torch.full((len(samples), height, width), IGNORE_INDEX)
        for i, (image, label) in enumerate(samples):
            images[i, :, : image.shape[1], : image.shape[2]] = image
            labels[i, : label.shape[0], : label.shape[1]] = label
        return images, labels

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with randomly initialized weights."""
        classes = len(data_info["classes"])
        if self.model == "mini_unet":
            return MiniUNet(classes, self.width)
        from torchvision.models import get_model

        return get_model(self.model, weights=None, weights_backbone=None, num_classes=classes)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], step: int
    ) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy of the labeled pixels, and their number.

        Args:
            model: maps images (B, 3, H, W) to logits (B, K, H, W).
            batch: images, labels (B, H, W).
            step: not used.

        Returns:
            loss_sum in nats, and num_items, the number of labeled pixels; scalars.
        """
        images, labels = batch
        logits = _logits(model(images)).float()
        loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss_sum, (labels != IGNORE_INDEX).sum()

    # ---- evaluation and inference ---------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Return the mean intersection over union and the pixel accuracy, over the whole set."""
        from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

        count = len(self.prepare_data()["classes"])
        return {
            "mean_iou": MulticlassJaccardIndex(count, ignore_index=IGNORE_INDEX),
            "accuracy": MulticlassAccuracy(count, ignore_index=IGNORE_INDEX, average="micro"),
        }

    def update_metrics(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], metrics: dict[str, Any]
    ) -> None:
        """Update the metrics with one micro-batch."""
        images, labels = batch
        predicted = _logits(model(images)).argmax(1)
        for metric in metrics.values():
            metric.update(predicted, labels)

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Write the predicted mask and an overlay beside an image file.

        The mask's pixel values are the class numbers, and its palette has their colors.

        Returns:
            The paths of the files, and the share of each class in the pixels.
        """
        classes, image = data_info["classes"], _read_image(argument).float() / 255
        predicted = self._mask(model, image)
        overlay = with_legend(_overlay(image, predicted), classes, {*predicted.unique().tolist()})
        pictures = {"mask": _palette_image(predicted), "overlay": overlay}
        paths = {kind: Path(argument).with_suffix(f".{kind}.png") for kind in pictures}
        for kind, path in paths.items():
            path.unlink(missing_ok=True)  # never write through a link
            pictures[kind].save(path)
        shares = torch.bincount(predicted.flatten(), minlength=len(classes)) / predicted.numel()
        parts = [
            f"{classes[k]} {shares[k]:.1%}"
            for k in shares.argsort(descending=True).tolist()
            if shares[k] > 0
        ]
        return f"{paths['mask']}, {paths['overlay']}: {', '.join(parts)}"

    def _mask(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the most likely class of each pixel of an image: (3, H, W) -> (H, W)."""
        images, _ = self.collate([(image, torch.zeros(image.shape[1:], dtype=torch.int64))])
        images = images.to(next(model.parameters()).device)
        with torch.no_grad():
            mask = _logits(model(images)).argmax(1)[0, : image.shape[1], : image.shape[2]]
        return mask.cpu()

    def predict_samples(
        self, model: nn.Module, data_info: dict[str, Any], samples: Any, folder: Path
    ) -> str:
        """Write predictions.png: each image twice, under the true and the predicted mask."""
        tiles, present, num_right, num_labeled = [], set(), 0, 0
        for image, label in samples:
            image, label = image.cpu(), label.cpu()  # evaluations give them on the model's device
            predicted = self._mask(model, image)
            is_labeled = label != IGNORE_INDEX
            right = int((predicted == label)[is_labeled].sum())
            num_right, num_labeled = num_right + right, num_labeled + int(is_labeled.sum())
            present |= {*label.unique().tolist(), *predicted.unique().tolist()}
            caption = f"{right / max(1, int(is_labeled.sum())):.1%} of pixels right"
            tiles.append((_overlay(image, label), _overlay(image, predicted), caption))
        title = f"{num_right / max(1, num_labeled):.1%} of the pixels of {len(tiles)} samples right"
        sheet = contact_sheet(title, tiles, data_info["classes"], present)
        sheet.save(folder / "predictions.png")
        return title


def _logits(output: Any) -> Tensor:
    """Return the main logits; torchvision's models return a dict of outputs."""
    return output["out"] if isinstance(output, dict) else output


# ---- pictures -----------------------------------------------------------------------------------
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
    """Return an image, (3, H, W) from 0 to 1, as a Pillow image."""
    from torchvision.transforms.v2.functional import to_pil_image

    return to_pil_image((image.clamp(0, 1) * 255).round().to(torch.uint8))


def _palette_image(mask: Tensor) -> Any:
    """Return a mask (H, W) as a Pillow image of class numbers, with their colors as palette."""
    from torchvision.transforms.v2.functional import to_pil_image

    image = to_pil_image(mask.to(torch.uint8)[None])
    image.putpalette([part for color in PALETTE for part in color])  # changes the mode to P
    return image


def _overlay(image: Tensor, mask: Tensor) -> Any:
    """Return an image (3, H, W) under the half-transparent colors of a mask (H, W)."""
    from PIL import Image

    return Image.blend(_picture(image), _palette_image(mask).convert("RGB"), 0.5)


def legend(classes: list[str], present: set[int], width: int) -> Any:
    """Draw the colors and names of the present classes, in an image `width` pixels wide."""
    from PIL import Image, ImageDraw, ImageFont

    font, x, y, places = ImageFont.load_default(14), 0, 4, {}
    for k in sorted(present - {IGNORE_INDEX}):
        length = round(font.getlength(classes[k])) + 40
        if x + length > width and x:
            x, y = 0, y + 24
        places[k] = x, y
        x += length
    image = Image.new("RGB", (width, y + 24), GRAY)
    draw = ImageDraw.Draw(image)
    for k, (x, y) in places.items():
        draw.rectangle((x, y, x + 16, y + 16), PALETTE[k], "black")
        draw.text((x + 22, y), classes[k], "black", font)
    return image


def with_legend(picture: Any, classes: list[str], present: set[int]) -> Any:
    """Return a picture, enlarged if it is small, above the legend."""
    from PIL import Image, ImageOps

    picture = ImageOps.scale(picture, max(1, 256 // max(picture.size)), Image.Resampling.NEAREST)
    below = legend(classes, present, max(picture.width, 256))
    both = Image.new("RGB", (below.width, picture.height + below.height), GRAY)
    both.paste(picture)
    both.paste(below, (0, picture.height))
    return both


def contact_sheet(
    title: str, tiles: list[tuple[Any, Any, str]], classes: list[str], present: set[int]
) -> Any:
    """Draw true and predicted overlays side by side, in rows of 4, below the legend.

    Args:
        title: the first line of the sheet.
        tiles: for each image, two overlays (Pillow images) and a caption.
        classes: the names of all classes.
        present: the classes in any of the masks, for the legend.

    Returns:
        A Pillow image.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    side, gap, line = 128, 20, 18  # pixels
    width, height = 2 * side + 4 + gap, side + 2 * line + gap  # size of a tile
    colors = legend(classes, present, 4 * width - gap)
    top = 3 * gap + colors.height
    sheet = Image.new("RGB", (4 * width + gap, top + -(-len(tiles) // 4) * height), GRAY)
    sheet.paste(colors, (gap, 2 * gap))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    draw.text((gap, gap // 2), title, "black", font)
    for k, (*pictures, caption) in enumerate(tiles):
        left, y = gap + k % 4 * width, top + k // 4 * height
        for x, picture, heading in zip(
            (left, left + side + 4), pictures, ("truth", "answer"), strict=True
        ):
            is_small = max(picture.size) < side
            method = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
            draw.text((x, y), heading, "black", font)
            sheet.paste(ImageOps.pad(picture, (side, side), method, GRAY), (x, y + line))
        draw.text((left, y + line + side + 2), caption, "black", font)
    return sheet


# ---- datasets -----------------------------------------------------------------------------------
class DigitScenes(torch.utils.data.Dataset):
    """Scenes of 3 to 6 handwritten digits, of varying size; a scene depends only on its index."""

    def __init__(self, length: int, digits: int, *, first: int) -> None:
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        images = torch.tensor(data.images / 16, dtype=torch.float32)  # (1797, 8, 8)
        # training and validation scenes share no image of a digit
        chosen = [i for i in range(len(images)) if (i % 5 == 4) == (first > 0)]
        self.digits = [(images[i], int(data.target[i])) for i in chosen if data.target[i] < digits]
        self.length = length
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, H, W), float32 in 0 to 1, and its labels (H, W), int64."""
        generator = torch.Generator().manual_seed(self.first + index)

        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        height, width = integer(40, 57), integer(40, 73)
        image = 0.1 * torch.rand(height, width, generator=generator)
        label = torch.zeros(height, width, dtype=torch.int64)
        for _ in range(integer(3, 7)):
            digit, value = self.digits[integer(0, len(self.digits))]
            side = integer(12, 25)
            resized = F.interpolate(digit[None, None], (side, side), mode="bilinear")[0, 0]
            top, left = integer(0, height - side + 1), integer(0, width - side + 1)
            region = slice(top, top + side), slice(left, left + side)
            image[region] = torch.maximum(image[region], resized)
            label[region] = torch.where(resized > 0.4, value + 1, label[region])
        return image.expand(3, -1, -1).clone(), label


class ImageMaskFolder(torch.utils.data.Dataset):
    """Images and masks with the same file names, in two folders."""

    def __init__(self, folder: Path, classes: int) -> None:
        self.classes = classes
        images = sorted(
            path for path in (folder / "images").glob("*") if path.suffix in (".png", ".jpg")
        )
        self.files = [(path, folder / "masks" / f"{path.stem}.png") for path in images]
        if not self.files:
            raise ValueError(f"{folder}/images contains no *.png or *.jpg")
        if missing := [mask.name for _, mask in self.files if not mask.is_file()]:
            raise ValueError(f"{folder}/masks lacks {len(missing)} masks, such as {missing[0]}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, H, W), float32 in 0 to 1, and its labels (H, W), int64."""
        from torchvision.io import ImageReadMode, decode_image

        image, mask = self.files[index]
        label = decode_image(str(mask), ImageReadMode.UNCHANGED)[0].long()
        unknown = label[(label >= self.classes) & (label != IGNORE_INDEX)]
        if len(unknown):
            raise ValueError(
                f"{mask} has class {int(unknown[0])}, but there are {self.classes} classes; list"
                " all names in classes, or use 255 for pixels to ignore"
            )
        pixels = decode_image(str(image), ImageReadMode.RGB)
        if pixels.shape[1:] != label.shape:
            raise ValueError(
                f"{mask} is {label.shape[1]} x {label.shape[0]}, but its image is"
                f" {pixels.shape[2]} x {pixels.shape[1]}; make the mask as large as the image"
            )
        return pixels.float() / 255, label


# ---- the model ----------------------------------------------------------------------------------
class DoubleConv(nn.Sequential):
    """Two 3 x 3 convolutions, each with GroupNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        layers: list[nn.Module] = []
        for channels in (in_channels, out_channels):
            layers += [
                nn.Conv2d(channels, out_channels, 3, padding=1, bias=False),
                nn.GroupNorm(max(1, out_channels // 8), out_channels),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class MiniUNet(nn.Module):
    """A U-Net of four resolutions (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            DoubleConv(in_channels, out_channels)
            for in_channels, out_channels in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            DoubleConv(deep + shallow, shallow)
            for deep, shallow in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K, H, W); H and W are multiples of 8."""
        features = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            features.append(x)
        for block, skip in zip(self.up, features[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.head(x)
