# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
#   "rich>=13",
# ]
# ///
"""Train text embeddings by contrastive learning, with in-batch negatives from all processes.

Data:  python (documented functions of the standard library: the first 200 characters of a
       docstring's first paragraph are the query; the line with "def" and what follows the docstring
       are the document), or pairs
       (<data_path>/train.jsonl and validation.jsonl, one object with "query" and "document" per
       line): --recipe.data
Model: the mean of hashed character n-gram embeddings, and an MLP each for queries and documents.
       For another encoder, override build_model: its module needs encode(bag, side) -> (B, D) and
       logit_scale.
Loss:  the symmetric cross-entropy of CLIP (https://arxiv.org/abs/2103.00020, section 2.3) over the
       micro-batches of all processes: each query against all documents, each document against all
       queries. All processes need micro-batches of the same size. Without gradient accumulation,
       the loss then does not depend on the number of processes. With accumulation there are fewer
       negatives, which changes the loss.
The default config, with its measured recall and time, is configs/embedding.yaml.
"""

import ast
import json
import os
import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

# B: pairs in a micro-batch, N: pairs over all processes, D: width

Bag = tuple[Tensor, Tensor]  # n-gram ids of all texts, and the offset at which each text begins

MAX_DOCUMENTS = 10_000  # predict_samples searches this many documents, and those of the samples
TIE = 1e-6  # scores (-1 to 1) closer than this count as equal; float32 rounding stays below it


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Retrieve the document that matches a query; every field can be set from the command line."""

    compares_samples = True  # the loss compares each query with all documents

    data: str = "python"
    """python or pairs."""
    data_path: str = field(default="data", metadata={"changes_curve": False})
    """pairs: the folder with the .jsonl files."""
    max_characters: int = 2000
    """Number of characters of a text that are used, from its beginning."""
    buckets: int = 65_536
    """Rows of the embedding table; n-grams are hashed to rows."""
    width: int = 128
    """Size of an embedding."""
    temperature: float = 0.05
    """Initial temperature of the softmax; training changes it."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Return the number of training and validation pairs."""
        if self.data not in ("python", "pairs"):
            raise ValueError(f"data is {self.data}, but must be python or pairs")
        train, validation = self._pairs()
        return {"pairs": len(train), "validation_pairs": len(validation)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return datasets of pairs of n-gram bags."""
        train, validation = (
            PairDataset(p, self.buckets, self.max_characters) for p in self._pairs()
        )
        return train, {"validation": validation} if len(validation) else {}

    def _pairs(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        if self.data == "python":
            pairs = standard_library()
            held_out = [zlib.crc32(query.encode()) % 10 == 0 for query, _ in pairs]
            return (
                [pair for pair, held in zip(pairs, held_out, strict=True) if not held],
                [pair for pair, held in zip(pairs, held_out, strict=True) if held],
            )
        train, validation = (
            _read_jsonl(Path(self.data_path) / f"{split}.jsonl")
            for split in ("train", "validation")
        )
        return train, validation

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Bag]:
        """Concatenate the n-gram ids of a micro-batch, with offsets for EmbeddingBag."""
        return {
            side: _concatenate([sample[k] for sample in samples])
            for k, side in enumerate(("query", "document"))
        }

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with randomly initialized weights."""
        return TwoTowers(self.buckets, self.width, self.temperature)

    def loss(self, model: Any, batch: dict[str, Bag], step: int) -> tuple[Tensor, int]:
        """Return the summed loss of this process's pairs against those of all processes.

        Args:
            model: has encode(bag, side) -> (B, D), unit vectors, and logit_scale, (1,).
            batch: the bags of queries and documents.
            step: the number of the step; in the first one, the sizes of micro-batches are compared.

        Returns:
            loss_sum in nats, a scalar, and num_items, the number of pairs.

        Raises:
            ValueError: the processes have micro-batches of different sizes.
        """
        query, document = (model.encode(batch[side], side) for side in ("query", "document"))
        # once, since all steps have the same sizes; the checks before training disable gradients
        if torch.is_grad_enabled() and vars(model).setdefault("first_step", step) == step:
            check_sizes(len(query))
        queries, documents = all_gather_with_grad(query), all_gather_with_grad(document)  # (N, D)
        scale = model.logit_scale.exp()
        target = torch.arange(len(query), device=query.device) + len(query) * _rank()
        to_document = F.cross_entropy(scale * query @ documents.T, target, reduction="sum")
        to_query = F.cross_entropy(scale * document @ queries.T, target, reduction="sum")
        return (to_document + to_query) / 2, len(query)

    # ---- evaluation and inference ---------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Return recall@1 and recall@10: how often a query's own document ranks that high."""
        return {"recall_at_1": RecallAtK(k=1), "recall_at_10": RecallAtK(k=10)}

    def update_metrics(self, model: Any, batch: dict[str, Bag], metrics: dict[str, Any]) -> None:
        """Store the embeddings of one micro-batch."""
        query, document = (model.encode(batch[side], side) for side in ("query", "document"))
        for metric in metrics.values():
            metric.update(query.float(), document.float())

    def predict(self, model: Any, data_info: dict[str, Any], argument: str) -> str:
        """Rank documents by their similarity to a query.

        The argument is a text or the path of a file: the query, then the documents, one per line.
        """
        if os.path.isfile(argument):
            argument = Path(argument).read_text(encoding="utf-8", errors="replace")
        query, *documents = [line for line in argument.split("\n") if line.strip()] or [""]
        if not documents:
            raise ValueError(
                "give a query and the documents to rank, one per line, or a file with them"
            )
        query_vector = self._encode(model, [query], "query").flatten()
        scores = self._encode(model, documents, "document") @ query_vector
        order = scores.argsort(descending=True).tolist()
        return "\n".join(f"{scores[i]:.3f} {documents[i]}" for i in order)

    def predict_samples(
        self, model: Any, data_info: dict[str, Any], samples: Any, folder: Path
    ) -> Any:
        """Return a table of queries, each with the nearest of the validation documents."""
        from rich.table import Table
        from rich.text import Text

        data, rows = samples.dataset, range(len(samples.dataset))
        while not hasattr(data, "pairs"):  # a Subset, with overfit_batches
            data, rows = data.dataset, [data.indices[i] for i in rows]
        pairs = [data.pairs[i] for i in rows]
        candidates = sorted({*range(min(len(pairs), MAX_DOCUMENTS)), *samples.indices})
        documents = torch.cat(
            [
                self._encode(model, [pairs[i][1] for i in candidates[k : k + 256]], "document")
                for k in range(0, len(candidates), 256)
            ]
        )
        table, num_right = Table("query", "nearest document", "similarity", "own document"), 0
        for i in samples.indices:
            scores = documents @ self._encode(model, [pairs[i][0]], "query").flatten()
            nearest = int(scores.argmax())
            rank = 1 + int((scores > scores[candidates.index(i)] + TIE).sum())
            num_right += rank == 1
            words = (pairs[i][0], pairs[candidates[nearest]][1])
            table.add_row(
                *(
                    Text(" ".join(text.split()), overflow="ellipsis", no_wrap=True)
                    for text in words
                ),
                f"{scores[nearest]:.2f}",
                "nearest" if rank == 1 else f"rank {rank}",
                style=None if rank == 1 else "red",
            )
        table.title = f"{num_right} of {len(samples)} queries are nearest to their own document"
        table.caption = f"among {len(candidates)} documents"
        return table

    def _encode(self, model: Any, texts: list[str], side: str) -> Tensor:
        bags = [ngrams(text, self.buckets, self.max_characters) for text in texts]
        tokens, starts = _concatenate(bags)
        device = model.logit_scale.device
        return model.encode((tokens.to(device), starts.to(device)), side)


# ---- collectives --------------------------------------------------------------------------------
def check_sizes(size: int) -> None:
    """Refuse micro-batches of different sizes, whose embeddings all_gather cannot gather."""
    if not torch.distributed.is_initialized():
        return
    sizes = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(sizes, size)
    if len({*sizes}) > 1:
        raise ValueError(
            f"the micro-batches of the {len(sizes)} processes have {', '.join(map(str, sizes))}"
            " pairs, but the loss needs micro-batches of the same size: set"
            f" batches.global_batch_size to a multiple of {len(sizes)}, and"
            " batches.micro_batch_size to a divisor of it or to 0"
        )


def all_gather_with_grad(local: Tensor) -> Tensor:
    """Gather rows from all processes in order of rank; gradients flow back to their process.

    (B, D) -> (N, D)
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return local
    return cast(Tensor, _AllGather.apply(local))


class _AllGather(torch.autograd.Function):
    """all_gather whose backward sums over processes and returns the gradient of the local rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        """(B, D) -> (N, D)."""
        parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, local.contiguous())
        ctx.start = torch.distributed.get_rank() * len(local)
        ctx.length = len(local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """(N, D) -> (B, D)."""
        gradient = gradients[0].contiguous()
        torch.distributed.all_reduce(gradient)
        return gradient[ctx.start : ctx.start + ctx.length]


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class RecallAtK(Metric):
    """Exact fraction of queries whose own document is among the k nearest of the whole set."""

    full_state_update = False

    def __init__(self, *, k: int) -> None:
        super().__init__()
        self.k = k
        self.queries: list[Tensor]
        self.documents: list[Tensor]
        self.add_state("queries", [], dist_reduce_fx="cat")
        self.add_state("documents", [], dist_reduce_fx="cat")

    def update(self, queries: Tensor, documents: Tensor) -> None:
        """Store the embeddings of matching pairs; (B, D) each."""
        self.queries.append(queries)
        self.documents.append(documents)

    def compute(self) -> Tensor:
        """Compare every query with every document, 256 queries at a time.

        Scores within TIE of the own document's score are ties, which share their ranks equally.
        So rounding errors, which depend on the batch and the CPU, do not change the result.
        """
        # float64, since float32 matmuls may run in TF32
        queries, documents = (
            dim_zero_cat(side).double() for side in (self.queries, self.documents)
        )
        hits = queries.new_zeros(())
        start = 0
        for chunk in queries.split(256):  # memory: three float64 tensors, 2 KB per document each
            scores = chunk @ documents.T
            index = torch.arange(start, start + len(chunk), device=scores.device)
            own = scores.gather(1, index[:, None])
            better = (scores > own + TIE).sum(1)
            equal = ((scores - own).abs() <= TIE).sum(1).clamp(min=1)
            credit = ((self.k - better) / equal.double()).clamp(0, 1)
            hits += (credit * own[:, 0].isfinite()).sum()
            start += len(chunk)
        return hits / len(queries)


# ---- data ---------------------------------------------------------------------------------------
class PairDataset(torch.utils.data.Dataset):
    """Pairs of bags of n-grams."""

    def __init__(self, pairs: list[tuple[str, str]], buckets: int, max_characters: int) -> None:
        self.pairs = pairs
        self.buckets = buckets
        self.max_characters = max_characters

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the n-gram ids of a query and of its document, two int64 tensors of any length."""
        query, document = (ngrams(t, self.buckets, self.max_characters) for t in self.pairs[index])
        return query, document


def ngrams(text: str, buckets: int, max_characters: int) -> Tensor:
    """Return the hashed character n-grams of a text's words, n = 3 to 5.

    The hashes (CRC-32) are the same on every machine.
    """
    ids = [
        zlib.crc32(padded[i : i + n].encode()) % buckets
        for word in text[:max_characters].lower().split()
        for padded in [f"<{word}>"]
        for n in (3, 4, 5)
        for i in range(len(padded) - n + 1)
    ]
    return torch.tensor(ids or [0])


def _concatenate(bags: list[Tensor]) -> Bag:
    lengths = torch.tensor([0, *(len(bag) for bag in bags[:-1])])
    return torch.cat(bags), lengths.cumsum(0)


def _read_jsonl(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; pairs need train.jsonl and validation.jsonl")
    # not splitlines, which also splits at characters that a text may contain, such as U+2028
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [(row["query"], row["document"]) for row in rows]


def standard_library() -> list[tuple[str, str]]:
    """Return pairs: the beginning of a docstring, and the function's source without it."""
    root = Path(sysconfig.get_path("stdlib"))
    pairs: dict[str, str] = {}
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.split("\n")  # splitlines would also split at form feeds
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                query = docstring.split("\n\n")[0].replace("\n", " ")[:200]
                body = "\n".join(lines[node.body[0].end_lineno or 0 : node.end_lineno])
                if len(query) > 20 and body.strip():
                    pairs.setdefault(query, f"{lines[node.lineno - 1]}\n{body}")
    return list(pairs.items())


# ---- the model ----------------------------------------------------------------------------------
class TwoTowers(nn.Module):
    """A shared n-gram embedding table, and an MLP each for queries and documents."""

    def __init__(self, buckets: int, width: int, temperature: float) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(buckets, width, mode="mean")
        self.towers = nn.ModuleDict(
            {
                side: nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 2 * width),
                    nn.GELU(),
                    nn.Linear(2 * width, width),
                )
                for side in ("query", "document")
            }
        )
        nn.init.normal_(self.table.weight, std=0.1)
        # of shape (1,), since FSDP refuses 0-dimensional parameters
        self.logit_scale = nn.Parameter(torch.tensor([1 / temperature]).log())

    def encode(self, bag: Bag, side: str) -> Tensor:
        """Return the embeddings of texts, unit vectors (B, D); side is query or document."""
        mean = self.table(*bag)
        return F.normalize(mean + self.towers[side](mean), dim=-1)
