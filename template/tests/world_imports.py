"""What the fork server imports once, for 15 s: nothing that starts a thread or a computation."""

import contextlib
import importlib

import my_project.evaluate
import my_project.train  # noqa: F401

for name in (
    "rich.console",
    "rich.table",
    "tensorboard",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "torchvision.transforms.v2",  # the recipe's
    "sklearn.datasets",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "peft",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
