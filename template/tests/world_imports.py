"""What the fork server imports once. None of it may start a thread or use a tensor."""

import accelerate  # noqa: F401
import jsonargparse  # noqa: F401
import tensorboard  # noqa: F401
import rich.console
import rich.table  # noqa: F401
import torch._dynamo  # noqa: F401  # the first optimizer imports it, for 4 s
import torch.distributed.algorithms.ddp_comm_hooks  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import torchmetrics.classification  # noqa: F401

import my_project.evaluate
import my_project.train  # noqa: F401

try:
    import torchvision.transforms.v2  # noqa: F401  # the recipe's; 8 s
except ImportError:
    pass
