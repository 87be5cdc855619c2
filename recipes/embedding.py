# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
# ]
# ///
"""Embed texts that belong together near each other, with negatives from all processes.

Data:  python (each documented function of the standard library: the first paragraph of its
       docstring, and its source without it), or pairs (<data_path>/train.jsonl and
       validation.jsonl, an object with "query" and "document" per line): --recipe.init_args.data
Model: hashed n-grams of characters, summed, and a perceptron for each side. build_model is the
       place for another encoder: a module with encode(bag, side) -> (B, D) and log_scale.
The loss compares each query with the documents of the whole micro-batch, over all processes, and
each document with the queries (CLIP, section 2.3, https://arxiv.org/abs/2103.00020). So it is the
same for any number of processes at accumulation 1; with accumulation there are fewer negatives, and
it is not.
The card of the default, with its measured recall and time, is configs/embedding.yaml.
"""

import ast
import json
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

# B: pairs in a micro-batch, N: pairs over all processes, D: width; a bag: (n-grams, offsets)

Bag = tuple[Tensor, Tensor]

TIE = 1e-6  # of scores between -1 and 1; the rounding of float32 embeddings stays below it


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Find the document that belongs to a query; every field can be set from the command line."""

    data: str = "python"
    """python or pairs."""
    data_path: str = field(default="data", metadata={"changes_curve": False, "staged": True})
    """pairs: the folder that holds them; what stage_to copies."""
    longest: int = 2000
    """Characters of a text that are looked at."""
    buckets: int = 65_536
    """Rows of the table that n-grams are hashed into."""
    width: int = 128
    temperature: float = 0.05
    """At the start; it is learned."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Count the pairs."""
        if self.data not in ("python", "pairs"):
            raise ValueError(f"data is {self.data}, but must be python or pairs")
        train, validation = self._pairs()
        return {"pairs": len(train), "validation_pairs": len(validation)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the pairs as bags of n-grams."""
        train, validation = (Pairs(p, self.buckets, self.longest) for p in self._pairs())
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
            _read(Path(self.data_path) / f"{part}.jsonl") for part in ("train", "validation")
        )
        return train, validation

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Bag]:
        """Lay the bags of a micro-batch end to end."""
        return {
            side: _lay([sample[k] for sample in samples])
            for k, side in enumerate(("query", "document"))
        }

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with fresh weights."""
        return TwoTowers(self.buckets, self.width, self.temperature)

    def loss(self, model: Any, batch: dict[str, Bag], step: int) -> tuple[Tensor, int]:
        """Sum the cross-entropies of this process's pairs among those of all.

        Args:
            model: has encode(bag, side) -> (B, D), of unit length, and log_scale, (1,).
            batch: the bags of queries and documents.
            step: not used.

        Returns:
            The sum in nats, a scalar, and the number of pairs.
        """
        query, document = (model.encode(batch[side], side) for side in ("query", "document"))
        queries, documents = everyones(query), everyones(document)  # (N, D)
        scale = model.log_scale.exp()
        target = torch.arange(len(query), device=query.device) + len(query) * _rank()
        to_document = F.cross_entropy(scale * query @ documents.T, target, reduction="sum")
        to_query = F.cross_entropy(scale * document @ queries.T, target, reduction="sum")
        return (to_document + to_query) / 2, len(query)

    # ---- evaluation and use ---------------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Name the part of the queries whose document is the first, or among the first ten."""
        return {"recall_at_1": RecallAtK(k=1), "recall_at_10": RecallAtK(k=10)}

    def update_metrics(self, model: Any, batch: dict[str, Bag], metrics: dict[str, Any]) -> None:
        """Keep the embeddings of one micro-batch."""
        query, document = (model.encode(batch[side], side) for side in ("query", "document"))
        for metric in metrics.values():
            metric.update(query.float(), document.float())

    def predict(self, model: Any, data_info: dict[str, Any], argument: str) -> str:
        """Order the lines of a text by how well they answer its first."""
        query, *documents = [line for line in argument.splitlines() if line.strip()]
        if not documents:
            raise ValueError("give a query and, on lines of their own, the documents to order")
        bags = [ngrams(text, self.buckets, self.longest) for text in documents]
        near = model.encode(_lay(bags), "document") @ model.encode(
            _lay([ngrams(query, self.buckets, self.longest)]), "query"
        ).flatten()  # fmt: skip
        order = near.argsort(descending=True).tolist()
        return "\n".join(f"{near[i]:.3f} {documents[i]}" for i in order)


# ---- all processes ------------------------------------------------------------------------------
def everyones(mine: Tensor) -> Tensor:
    """Gather rows from all processes, in order of rank; gradients flow back to where they are from.

    (B, D) -> (N, D)
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return mine
    return cast(Tensor, _Gather.apply(mine))


class _Gather(torch.autograd.Function):
    """all_gather; backward, each process gets what all of them want of its rows."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        """(B, D) -> (N, D)."""
        parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, mine.contiguous())
        ctx.start, ctx.length = torch.distributed.get_rank() * len(mine), len(mine)
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
    """The fraction of queries whose own document is among the k nearest of the whole set; exact."""

    full_state_update = False

    def __init__(self, *, k: int) -> None:
        super().__init__()
        self.k = k
        self.queries: list[Tensor]
        self.documents: list[Tensor]
        self.add_state("queries", [], dist_reduce_fx="cat")
        self.add_state("documents", [], dist_reduce_fx="cat")

    def update(self, queries: Tensor, documents: Tensor) -> None:
        """Keep rows that belong together; (B, D) each."""
        self.queries.append(queries)
        self.documents.append(documents)

    def compute(self) -> Tensor:
        """Compare every query with every document, some queries at a time.

        Documents whose scores are within TIE of that of the query's own share the places they
        take: rounding, which differs with the batch and the CPU, decides nothing.
        """
        # float64: also where float32 products use TF32
        queries, documents = (
            torch.cat(list(side)).double() for side in (self.queries, self.documents)
        )
        found, start = queries.new_zeros(()), 0
        for part in queries.split(256):  # float64: 2 KB per document, three times
            scores = part @ documents.T
            index = torch.arange(start, start + len(part), device=scores.device)
            own = scores.gather(1, index[:, None])
            better = (scores > own + TIE).sum(1)
            equal = ((scores - own).abs() <= TIE).sum(1).clamp(min=1)
            credit = ((self.k - better) / equal.double()).clamp(0, 1)
            found += (credit * own[:, 0].isfinite()).sum()
            start += len(part)
        return found / len(queries)


# ---- texts --------------------------------------------------------------------------------------
class Pairs(torch.utils.data.Dataset):
    """Pairs of bags of n-grams."""

    def __init__(self, pairs: list[tuple[str, str]], buckets: int, longest: int) -> None:
        self.pairs, self.buckets, self.longest = pairs, buckets, longest

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the bags of a query and its document, int64, of any length."""
        query, document = (ngrams(t, self.buckets, self.longest) for t in self.pairs[index])
        return query, document


def ngrams(text: str, buckets: int, longest: int) -> Tensor:
    """Hash a text's runs of 3 to 5 characters, within words; the same on every machine."""
    found = [
        zlib.crc32(padded[i : i + n].encode()) % buckets
        for word in text[:longest].lower().split()
        for padded in [f"<{word}>"]
        for n in (3, 4, 5)
        for i in range(len(padded) - n + 1)
    ]
    return torch.tensor(found or [0])


def _lay(bags: list[Tensor]) -> Bag:
    lengths = torch.tensor([0, *(len(bag) for bag in bags[:-1])])
    return torch.cat(bags), lengths.cumsum(0)


def _read(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; pairs need train.jsonl and validation.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [(row["query"], row["document"]) for row in rows]


def standard_library() -> list[tuple[str, str]]:
    """Pair the first paragraph of each docstring with its function's source, names left in."""
    root, pairs = Path(sysconfig.get_path("stdlib")), {}
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
                query = told.split("\n\n")[0].replace("\n", " ")[:200]
                body = "\n".join(lines[node.body[0].end_lineno or 0 : node.end_lineno])
                if len(query) > 20 and body.strip():
                    pairs.setdefault(query, f"{lines[node.lineno - 1]}\n{body}")
    return list(pairs.items())


# ---- the model ----------------------------------------------------------------------------------
class TwoTowers(nn.Module):
    """One table of n-grams, and a perceptron for queries and one for documents."""

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
        # of shape (1,), since FSDP refuses parameters without a dimension
        self.log_scale = nn.Parameter(torch.tensor([1 / temperature]).log())

    def encode(self, bag: Bag, side: str) -> Tensor:
        """Embed texts on one side; (B, D), of unit length."""
        mean = self.table(*bag)
        return F.normalize(mean + self.towers[side](mean), dim=-1)
