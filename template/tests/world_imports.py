"""What the fork server imports once, for 15 s: nothing that starts a thread or a computation."""

import contextlib
import gc
import importlib

from my_project.process import no_garbage_collection

with no_garbage_collection():
    for name in (
        "my_project.evaluate",
        "my_project.train",
        "pytest",  # each module of tests imports it
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

gc.freeze()  # else the first collection of each forked process looks at all that was imported
