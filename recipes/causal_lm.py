# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "tokenizers>=0.22.1",
# ]
# ///
"""Pretrain a GPT on any text, from its bytes or from tokens.

Data:  python (the standard library's own source, on every machine), files (every file below
       data_path that matches pattern, a document each), or the name or local path of a Hugging Face
       data set with a column of text: --recipe.init_args.data
Tokens: bytes, the path of a tokenizer.json, or the name of a tokenizer on the Hugging Face hub:
       --recipe.init_args.tokenizer
Documents are tokenised once and packed end to end into blocks, with an end-of-text token between
them; a block may hold the end of one document and the start of the next, and the model sees across.
The blocks lie in cache_path, memory-mapped; where that is a disk of the node, once per node.
Stream: with --recipe.init_args.lanes 64 no training document is packed to disk; they are read and
       tokenised beside training. Each process reads its own lanes only; where a Hugging Face data
       set has not so many files, or a multiple, a lane reads them all and keeps its part. A
       resumed run passes over what its lanes have given in this epoch, which takes reading and
       tokenising it again: raise distributed.startup_timeout_seconds where that is long.
Model: pre-norm blocks (RMSNorm), rotary positions, SwiGLU or GELU, tied embeddings, no biases.
The card of the default, with its measured loss and time, is configs/causal_lm.yaml.
"""

import hashlib
import json
import math
import os
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# B: blocks in a micro-batch, T: tokens in a block, D: width, H: heads, V: vocabulary

END_OF_BYTES = 256  # after the 256 bytes
FREE: Any = {"changes_curve": False}
PREPARED: dict["CausalLM", dict[str, Any]] = {}  # what prepare_data has returned


@dataclass(frozen=True, kw_only=True)
class CausalLM:
    """Predict the next token; every field can be set from the command line."""

    data: str = "python"
    """python, files, or a Hugging Face data set's name or path."""
    data_path: str = field(default="data", metadata=FREE | {"staged": True})
    """files: the folder that holds them; what stage_to copies."""
    pattern: str = "**/*.txt"
    """files: which of them."""
    subset: str = ""
    """Of a Hugging Face data set, such as wikitext-2-raw-v1 of Salesforce/wikitext."""
    text_column: str = "text"
    """Of a Hugging Face data set."""
    validation_fraction: float = 0.05
    """Of the documents, chosen by their hashes."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, or a tokenizer's name on the hub."""
    cache_path: str = field(default="data/causal_lm", metadata=FREE)
    """Where the packed blocks are kept; a new folder for each data, tokenizer and length."""
    lanes: int = 0
    """Read the training documents as a stream of so many lanes; 0: pack them first. A batch mixes
    as many documents as there are lanes: best is the global batch size."""
    validation_blocks: int = 1000
    """With lanes: the validation set has at most so many blocks."""
    block_tokens: int = 256
    """Tokens that a sample predicts."""
    width: int = 256
    depth: int = 6
    heads: int = 4
    activation: Literal["swiglu", "gelu"] = "swiglu"
    dropout: float = 0.0
    checkpoint_activations: bool = False
    """Compute the blocks again in backward in place of keeping what they need; a third slower."""
    temperature: float = 0.8
    """Of predict: 0 always takes the likeliest token."""
    answer_tokens: int = 200
    """Of predict: how many to write."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Tokenise and pack the documents, unless the cache has them."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads {self.heads}: rotary positions"
                " turn pairs of numbers in each head"
            )
        folder = self._cache()
        if not folder.exists():
            self._pack(folder)
        PREPARED[self] = json.loads((folder / "about.json").read_text())
        return PREPARED[self]

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Open the blocks, memory-mapped, or the stream of them."""
        from datasets import load_from_disk

        folder = self._cache()
        train, validation = (
            Blocks(load_from_disk(str(folder / part))) if data_info[part]["blocks"] else None
            for part in ("train", "validation")
        )
        sets = {"validation": validation} if validation else {}
        return Stream(self, data_info) if self.lanes else train, sets

    def _cache(self) -> Path:
        """Name the folder of the blocks by all that they follow from."""
        what: list[Any] = [2]  # the form of what is in it
        what += [self.data, self.tokenizer, self.block_tokens, self.validation_fraction]
        if self.data == "python":
            what.append(sysconfig.get_python_version())
        elif self.data == "files":
            what += _contents(Path(self.data_path), self._files())
        else:
            what += [self.subset, self.text_column]
            if Path(self.data).exists():
                what += _contents(Path(self.data), sorted(Path(self.data).rglob("*")))
        if self.lanes:
            what.append({"stream": self.validation_blocks})
        if Path(self.tokenizer).is_file():
            what.append(Path(self.tokenizer).read_text(encoding="utf-8"))
        name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        return Path(self.cache_path) / name

    def _pack(self, folder: Path) -> None:
        """Write the blocks under another name first: what has the folder's name is complete."""
        from datasets import Dataset, Features, List, Value, disable_progress_bars

        disable_progress_bars()
        about = self._vocabulary()
        encode, end = encoder(about), about["end"]
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        temporary.mkdir(parents=True)
        features = Features({"tokens": List(Value("int32"), self.block_tokens + 1)})
        for part in ("train", "validation"):
            counts = {"documents": 0, "bytes": 0, "tokens": 0}

            def tokens_of(part: str, counts: dict[str, int]) -> Iterator[list[int]]:
                if part == "validation" and self.validation_fraction == 0:
                    return
                for text in self._documents():
                    if self._is_validation(text) == (part == "validation"):
                        tokens = [*encode(text), end]
                        counts["documents"] += 1
                        counts["bytes"] += len(text.encode())
                        counts["tokens"] += len(tokens)
                        yield tokens

            def blocks(part: str = part, counts: dict[str, int] = counts) -> Iterator[dict]:
                most = {"train": 0, "validation": self.validation_blocks}[part]
                packed = pack(tokens_of(part, counts), self.block_tokens)
                for block in islice(packed, most if self.lanes else None):
                    yield {"tokens": block}

            count = 0
            if next(blocks(counts=dict(counts)), None):  # a generator of nothing is refused
                packed: Any = Dataset.from_generator(
                    blocks, features=features, cache_dir=str(temporary / "unpacked")
                )
                packed.save_to_disk(str(temporary / part))
                count = len(packed)
            about[part] = counts | {"blocks": count}
        shutil.rmtree(temporary / "unpacked", ignore_errors=True)
        if about["train"]["blocks"] == 0 and not self.lanes:
            shutil.rmtree(temporary)
            raise ValueError(
                f"{self.data} ({about['train']['documents']} documents for training) makes not one"
                f" block of {self.block_tokens + 1} tokens; check data_path and pattern, or lower"
                " block_tokens"
            )
        (temporary / "about.json").write_text(json.dumps(about))
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)

    def _documents(self, lane: int | None = None, order: int = 0) -> Iterator[str]:
        """Read all documents as they lie, or those of a lane in one of many orders."""
        if self.data in ("python", "files"):
            paths = self._python_files() if self.data == "python" else self._files()
            if lane is not None:
                random.Random(order).shuffle(paths)
                paths = paths[lane :: self.lanes]
            for path in paths:
                yield path.read_text(encoding="utf-8", errors="replace")
            return
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from datasets.exceptions import DatasetsError

        how: dict[str, Any] = {"split": "train", "streaming": bool(self.lanes)}
        try:
            rows: Any = load_dataset(self.data, self.subset or None, **how)
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(
                f"data {self.data} is neither python nor files, and cannot be read as a Hugging"
                f" Face data set: {error}"
            ) from error
        if lane is not None:
            rows = rows.shuffle(seed=order, buffer_size=1000)
            if rows.num_shards >= 8 * self.lanes:  # some files each, if not the same number
                rows = rows.shard(num_shards=self.lanes, index=lane, contiguous=False)
            else:
                rows = split_dataset_by_node(rows, rank=lane, world_size=self.lanes)
        # by iter(): in a loader worker, `for row in rows` would give it a part of the lane only
        for some in rows.iter(batch_size=64):
            if self.text_column not in some:
                raise ValueError(
                    f"text_column is {self.text_column}, but the data has only {', '.join(some)}"
                )
            yield from (text for text in some[self.text_column] if text is not None)

    def _files(self) -> list[Path]:
        return sorted(path for path in Path(self.data_path).glob(self.pattern) if path.is_file())

    def _python_files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
        files = sorted(root.rglob("*.py"))
        return [path for path in files if not skipped & set(path.relative_to(root).parts)]

    def _is_validation(self, text: str) -> bool:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
        return draw < self.validation_fraction

    def _vocabulary(self) -> dict[str, Any]:
        """Return the size of the vocabulary, the end-of-text token, and the tokenizer as JSON."""
        if self.tokenizer == "bytes":
            return {"vocabulary": END_OF_BYTES + 1, "end": END_OF_BYTES, "tokenizer": None}
        from tokenizers import Tokenizer

        is_file = Path(self.tokenizer).is_file()
        try:
            read = Tokenizer.from_file if is_file else Tokenizer.from_pretrained
            tokenizer = read(self.tokenizer)
        except Exception as error:  # it raises nothing more precise
            raise ValueError(
                f"tokenizer {self.tokenizer} is neither bytes nor a tokenizer.json, and cannot be"
                f" had from the Hugging Face hub: {error}"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab()
        names = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
        end = next((vocabulary[name] for name in names if name in vocabulary), None)
        if end is None:
            raise ValueError(
                f"tokenizer {self.tokenizer} has none of {', '.join(names)} to end documents with;"
                " add one to it"
            )
        size = max(vocabulary.values()) + 1  # there may be gaps
        return {"vocabulary": size, "end": end, "tokenizer": tokenizer.to_str()}

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with fresh weights."""
        return GPT(
            data_info["vocabulary"],
            self.width,
            self.depth,
            self.heads,
            self.activation,
            self.dropout,
            self.checkpoint_activations,
        )

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, int]:
        """Sum the cross-entropy of the next tokens.

        Args:
            model: maps tokens (B, T) to logits (B, T, V).
            batch: (B, T + 1), int64.
            step: not used.

        Returns:
            The sum in nats, a scalar, and the number of tokens predicted.
        """
        total = _token_losses(model, batch).sum()
        return total, batch.shape[0] * (batch.shape[1] - 1)

    def per_sample(self, model: nn.Module) -> dict[str, float]:
        """Count a block's tokens, and its floating-point operations forward and backward.

        6 per weight and token, and attention's 12 x depth x width x T
        (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B).
        """
        weights = sum(p.numel() for p in model.parameters())
        per_token = 6 * weights + 12 * self.depth * self.width * self.block_tokens
        return {"tokens": self.block_tokens, "operations": per_token * self.block_tokens}

    # ---- evaluation and use ---------------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Name the loss per token in nats, and what it comes to in bits per byte of text."""
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric(), "bits_per_byte": MeanMetric()}

    def update_metrics(self, model: nn.Module, batch: Tensor, metrics: dict[str, Any]) -> None:
        """Count one micro-batch."""
        losses = _token_losses(model, batch)
        metrics["loss"].update(losses)
        text = PREPARED[self]["validation"]
        metrics["bits_per_byte"].update(losses * text["tokens"] / text["bytes"] / math.log(2))

    def sample(self, model: nn.Module) -> str:
        """Write a little, to be read at each evaluation."""
        about = PREPARED[self]
        return self._write(model, about, [about["end"]], 60)

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Continue the text that the argument is."""
        tokens = encoder(data_info)(argument) or [data_info["end"]]
        return self._write(model, data_info, tokens, self.answer_tokens)

    def _write(
        self, model: nn.Module, data_info: dict[str, Any], tokens: list[int], count: int
    ) -> str:
        draw, end = torch.Generator().manual_seed(0), data_info["end"]
        written = generate(model, tokens, count, self.block_tokens, self.temperature, end, draw)
        if not data_info["tokenizer"]:
            return bytes(token for token in written if token < END_OF_BYTES).decode(
                errors="replace"
            )
        return _tokenizer_of(data_info["tokenizer"]).decode(written)


def encoder(data_info: dict[str, Any]) -> Callable[[str], list[int]]:
    """Return what makes tokens of a text, without any that the tokenizer would add."""
    if not data_info["tokenizer"]:
        return lambda text: list(text.encode())
    tokenizer = _tokenizer_of(data_info["tokenizer"])
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@lru_cache
def _tokenizer_of(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def _contents(folder: Path, files: list[Path]) -> list[Any]:
    """List files by name, size and time, which a staged copy of the folder shares."""
    stats = ((path.relative_to(folder), path.stat()) for path in files)
    return [[str(name), stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of each next token in nats, (B * T), float32."""
    logits = model(batch[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: list[int],
    count: int,
    longest: int,
    temperature: float,
    end: int,
    draw: torch.Generator,
) -> list[int]:
    """Append up to count tokens to a text; the model sees the last `longest` of them."""
    device = next(model.parameters()).device
    tokens = list(tokens)
    for _ in range(count):
        context = torch.tensor([tokens[-longest:]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chances = (logits / temperature).softmax(0)
            token = int(torch.multinomial(chances, 1, generator=draw))
        if token == end:
            break
        tokens.append(token)
    return tokens


class Blocks(torch.utils.data.Dataset):
    """Blocks of T + 1 tokens."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed.with_format("numpy")

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Tensor:
        """Return a block (T + 1), int64."""
        return torch.from_numpy(self.packed[index]["tokens"]).long()

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return several blocks with one read."""
        return list(torch.from_numpy(self.packed[indices]["tokens"]).long())


class Stream:
    """Blocks of T + 1 tokens that are tokenised as they are read.

    Every epoch has its own order of the documents, and lane i every n-th of them.
    """

    def __init__(self, recipe: CausalLM, data_info: dict[str, Any]) -> None:
        self.recipe, self.lanes, self.data_info = recipe, recipe.lanes, data_info

    def lane(self, i: int, epoch: int, start: int, seed: int) -> Iterator[Tensor]:
        """Read the blocks (T + 1), int64, of a lane from the one numbered start on."""
        recipe, end = self.recipe, self.data_info["end"]
        encode = encoder(self.data_info)
        documents = recipe._documents(i, 1_000_003 * seed + epoch)
        tokens = ([*encode(text), end] for text in documents if not recipe._is_validation(text))
        for block in islice(pack(tokens, recipe.block_tokens), start, None):
            yield torch.tensor(block)


def pack(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Cut documents, end to end, into blocks; each begins with the last token of the one before."""
    rest: list[int] = []
    for tokens in documents:
        rest += tokens
        start = 0
        while start + length < len(rest):
            yield rest[start : start + length + 1]
            start += length
        rest = rest[start:]


# ---- the model ----------------------------------------------------------------------------------
class GPT(nn.Module):
    """A decoder (Radford et al. 2019) with RMSNorm, rotary positions and SwiGLU, as in Llama.

    Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        activation: str,
        dropout: float,
        checkpoint_activations: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, activation, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.checkpoint_activations, self.head_width = checkpoint_activations, width // heads
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.attention.out, block.mlp.out):  # what the residual stream adds up
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V)."""
        x = self.embedding(tokens)
        turns = rotary_turns(tokens.shape[1], self.head_width, x.device)
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a perceptron, each beside the residual stream and after a norm."""

    def __init__(self, width: int, heads: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = SwiGLU(width) if activation == "swiglu" else GELU(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), turns))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal self-attention; torch chooses the kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width, self.dropout = heads, width // heads, dropout
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, width = x.shape
        split = self.into(x).view(batch, length, 3, self.heads, self.head_width)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        y = F.scaled_dot_product_attention(
            rotate(query, turns),
            rotate(key, turns),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    """A gated perceptron of 8/3 the width (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 64 * math.ceil(8 * width / 3 / 64)  # a multiple that suits GPUs
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gate, value = self.into(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class GELU(nn.Module):
    """A perceptron of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.out(F.gelu(self.into(x)))


def rotary_turns(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's turns, (T, D / H / 2) each, float32.

    Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    pairs = torch.arange(0, head_width, 2, device=device, dtype=torch.float32)
    speeds = 10_000.0 ** (-pairs / head_width)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speeds
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of numbers of each head by their position; (B, H, T, D / H)."""
    cosine, sine = turns
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)
    return turned.to(x.dtype)
