"""What the fork server imports, once, in 15 s; no import may start a thread or a computation."""

import contextlib
import gc
import importlib

from my_project.process import no_garbage_collection

with no_garbage_collection():
    for name in (
        "my_project.evaluate",
        "my_project.train",
        "pytest",  # each test module imports it
        "rich.console",
        "rich.table",
        "tensorboard",
        "torch._dynamo",  # the first optimizer imports it
        "torch.distributed.algorithms.ddp_comm_hooks",
        "torch.utils.tensorboard",
        "torchmetrics.classification",
        "torchvision.transforms.v2",  # the recipe imports it
        "sklearn.datasets",
        "transformers.models.auto.modeling_auto",
        "transformers.models.bert.modeling_bert",
        "peft",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

gc.freeze()  # otherwise the first collection of each forked process scans all that was imported
