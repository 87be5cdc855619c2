# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "tokenizers>=0.22.1",
# ]
# ///
"""Pretrain a GPT on any text, from bytes or tokens.

Data:  python (the source of Python's standard library, present on every machine), files (all files
       below data_path that match pattern; one file is one document), or the name or local path of a
       Hugging Face dataset with a text column: --recipe.data
Tokenizer: bytes, the path of a tokenizer.json, or the name of a tokenizer on the Hugging Face Hub:
       --recipe.tokenizer
Packing: documents are tokenized once, joined with an end-of-text token after each, and cut into
       sequences of sequence_length tokens. A sequence may hold the end of one document and the
       start of the next, and attention crosses that boundary. The packed sequences are stored in
       cache_path and memory-mapped; if cache_path is on each node's own disk, each node packs once.
Streaming: with --recipe.lanes 64 the training documents are not packed to disk but read
       and tokenized during training. A lane is a logical shard of the stream: the config sets the
       number of lanes, which does not depend on the number of processes (like the canonical nodes
       of MosaicML's streaming). Each process reads only its own lanes. If a Hugging Face dataset
       has fewer than 8 files per lane, and their number is not a multiple of lanes, each lane reads
       all files and keeps its share of the rows. Files are shuffled, and the rows of a file are
       shuffled in blocks of 1,000. A lane reads its documents repeatedly, each time in a different
       order; the config sets the number of steps. A checkpoint contains the position of each lane
       (an epoch, a document and an offset in its tokens), so a resumed run does not read or
       tokenize the documents before that position. With a Hugging Face dataset, a resumed run reads
       one block of rows again, and skips the rows of the same file before that block.
Model: a pre-norm transformer with RMSNorm, rotary position embeddings, SwiGLU or GELU, tied input
       and output embeddings, and no biases.
The default config, with its measured loss and time, is configs/causal_lm.yaml.
"""

import hashlib
import json
import logging
import math
import os
import random
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: sequences in a micro-batch, T: tokens in a sequence, D: width, H: heads, V: vocabulary size

BYTE_EOS = 256  # the end-of-text token of the byte tokenizer; tokens 0 to 255 are the bytes
ROWS_PER_BLOCK = 1000  # rows of a streamed Hugging Face dataset that are shuffled together
logger = logging.getLogger(__name__)
MAY_CHANGE: Any = {"changes_curve": False}
PREPARED: dict["CausalLM", dict[str, Any]] = {}  # the data_info that prepare_data returned


@dataclass(frozen=True, kw_only=True)
class CausalLM:
    """Predict the next token; every field can be set from the command line."""

    data: str = "python"
    """python, files, or the name or path of a Hugging Face dataset."""
    data_path: str = field(default="data", metadata=MAY_CHANGE)
    """files: the folder with the files."""
    pattern: str = "**/*.txt"
    """files: which files below data_path are read."""
    subset: str = ""
    """Hugging Face dataset: its configuration, such as wikitext-2-raw-v1 of Salesforce/wikitext."""
    text_column: str = "text"
    """Hugging Face dataset: the column that holds the text."""
    validation_fraction: float = 0.05
    """Fraction of the documents that are held out for validation, chosen by their hashes."""
    tokenizer: str = "bytes"
    """bytes, the path of a tokenizer.json, or the name of a tokenizer on the Hugging Face Hub."""
    cache_path: str = field(default="data/causal_lm", metadata=MAY_CHANGE)
    """Folder of the packed sequences, with a subfolder per data, tokenizer and sequence length."""
    lanes: int = 0
    """Stream the training documents in this many lanes; 0: pack them to disk first. A batch mixes
    as many documents as there are lanes; the best choice is the global batch size."""
    max_validation_sequences: int = 1000
    """With lanes: the maximum number of sequences in the validation set."""
    sequence_length: int = 256
    """The number of tokens predicted per sequence."""
    width: int = 256
    """Size of the residual stream."""
    depth: int = 6
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads per block."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    dropout: float = 0.0
    temperature: float = 0.8
    """predict: the sampling temperature; 0 always takes the most likely token."""
    max_new_tokens: int = 200
    """predict: the maximum number of tokens to generate."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Tokenize and pack the documents, unless the cache holds them already."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads {self.heads}: rotary position"
                " embeddings rotate pairs of dimensions in each head"
            )
        folder = self._cache_folder()
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            options: Any = {"dir": folder.parent, "ignore_cleanup_errors": True}
            with TemporaryDirectory(prefix=f".{folder.name}.", **options) as temporary:
                packed = self._pack(Path(temporary))
                with suppress(OSError):  # another process finished first
                    packed.rename(folder)
        data_info = json.loads((folder / "data_info.json").read_text())
        if self.validation_fraction and not data_info["validation"]["sequences"]:
            logger.warning(
                "validation_fraction %s holds out too few documents (%d) to fill one sequence of"
                " %d tokens, so nothing is evaluated: raise it, or set it to 0",
                self.validation_fraction,
                data_info["validation"]["documents"],
                self.sequence_length + 1,
            )
        PREPARED[self] = data_info
        return data_info

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Open the packed sequences, memory-mapped, or the stream of training sequences."""
        from datasets import load_from_disk

        folder = self._cache_folder()
        train, validation = (
            PackedSequences(load_from_disk(str(folder / split)))
            if data_info[split]["sequences"]
            else None
            for split in ("train", "validation")
        )
        sets = {"validation": validation} if validation else {}
        return SequenceStream(self, data_info) if self.lanes else train, sets

    def _cache_folder(self) -> Path:
        """Return the folder of the packed sequences, named by a hash of what determines them."""
        key: list[Any] = [1]  # version of the folder's format
        key += [self.data, self.tokenizer, self.sequence_length, self.validation_fraction]
        if self.data == "python":
            key.append(sysconfig.get_python_version())
        elif self.data == "files":
            key += _file_stats(Path(self.data_path), self._files())
        else:
            key += [self.subset, self.text_column]
            if Path(self.data).exists():
                files = (path for path in Path(self.data).rglob("*") if path.is_file())
                key += _file_stats(Path(self.data), sorted(files))
        if self.lanes:
            key.append({"stream": self.max_validation_sequences})
        if Path(self.tokenizer).is_file():
            key.append(Path(self.tokenizer).read_text(encoding="utf-8"))
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        return Path(self.cache_path) / name

    def _pack(self, temporary: Path) -> Path:
        """Write the packed sequences into a subfolder of a temporary folder; return its path."""
        from datasets import Dataset, Features, List, Value, disable_progress_bars

        disable_progress_bars()
        data_info = self._tokenizer_info()
        encode, end = encoder(data_info), data_info["eos_token_id"]
        folder = temporary / "packed"
        folder.mkdir()
        features = Features({"tokens": List(Value("int32"), self.sequence_length + 1)})
        for split in ("train", "validation"):
            counts = {"documents": 0, "bytes": 0, "tokens": 0}

            def tokenize(split: str, counts: dict[str, int]) -> Iterator[list[int]]:
                if split == "validation" and self.validation_fraction == 0:
                    return
                for text, _ in self._documents():
                    if self._is_validation(text) == (split == "validation"):
                        tokens = [*encode(text), end]
                        counts["documents"] += 1
                        counts["bytes"] += len(text.encode())
                        counts["tokens"] += len(tokens)
                        yield tokens

            def rows(split: str = split, counts: dict[str, int] = counts) -> Iterator[dict]:
                limit = {"train": 0, "validation": self.max_validation_sequences}[split]
                documents = ((tokens, None) for tokens in tokenize(split, counts))
                sequences = pack(documents, self.sequence_length)
                for sequence, _ in islice(sequences, limit if self.lanes else None):
                    yield {"tokens": sequence}

            count = 0
            if next(rows(counts=dict(counts)), None):  # from_generator refuses an empty generator
                packed: Any = Dataset.from_generator(
                    rows, features=features, cache_dir=str(temporary / "unpacked")
                )
                packed.save_to_disk(str(folder / split))
                count = len(packed)
            data_info[split] = counts | {"sequences": count}
        if data_info["train"]["sequences"] == 0 and not self.lanes:
            raise ValueError(
                f"{self.data} ({data_info['train']['documents']} documents for training) does not"
                f" fill one sequence of {self.sequence_length + 1} tokens; check data_path and"
                " pattern, or lower sequence_length"
            )
        (folder / "data_info.json").write_text(json.dumps(data_info))
        return folder

    def _documents(
        self, lane: int | None = None, shuffle_seed: int = 0, start: Any = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield all documents in stored order, or those of one lane in shuffled order.

        Each document comes with its position (plain JSON). If a later call gets it as `start`, the
        call begins with that document.
        """
        if self.data in ("python", "files"):
            paths = self._python_files() if self.data == "python" else self._files()
            if lane is not None:
                random.Random(shuffle_seed).shuffle(paths)
                paths = paths[lane :: self.lanes]
            for index in range(start or 0, len(paths)):
                yield paths[index].read_text(encoding="utf-8", errors="replace"), index
            return
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        options: dict[str, Any] = {"split": "train", "streaming": bool(self.lanes)}
        try:
            rows: Any = load_dataset(self.data, self.subset or None, **options)
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(
                f"data {self.data} is neither python nor files, and cannot be read as a Hugging"
                f" Face dataset: {error}"
            ) from error
        if lane is not None:
            yield from self._lane_texts(rows, lane, shuffle_seed, start)
            return
        # not `for row in rows`, which yields only a worker's share inside a loader worker
        for block in rows.iter(batch_size=64):
            yield from ((text, None) for text in self._texts(block))

    def _lane_texts(
        self, rows: Any, lane: int, shuffle_seed: int, start: dict[str, Any] | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the texts of one lane, with their positions.

        Rows are shuffled here, in blocks: the state_dict of `rows.shuffle` does not contain its
        buffer, so a resumed run would miss the rows in the buffer.
        """
        from datasets.distributed import split_dataset_by_node

        files = list(range(rows.num_shards))
        random.Random(shuffle_seed).shuffle(files)
        # each lane gets whole files; if there are many, lanes may get unequal numbers of them
        whole = len(files) % self.lanes == 0 or len(files) >= 8 * self.lanes
        own = files[lane :: self.lanes] if whole else files
        first = start or {"file": 0, "block": 0, "row": 0, "state": None}
        for number in range(first["file"], len(own)):
            part = rows.shard(num_shards=len(files), index=own[number])
            # the lanes' shares rotate from file to file: files with few rows have empty shares
            if not whole:
                rank = (lane + number) % self.lanes
                part = split_dataset_by_node(part, rank=rank, world_size=self.lanes)
            block, first_row, state = 0, 0, None
            if number == first["file"]:
                block, first_row, state = first["block"], first["row"], first["state"]
            if state:
                part.load_state_dict(state)
            for columns in part.iter(batch_size=ROWS_PER_BLOCK):
                texts = self._texts(columns)
                random.Random(f"{shuffle_seed} {own[number]} {block}").shuffle(texts)
                for row in range(first_row, len(texts)):
                    position = {"file": number, "block": block, "row": row, "state": state}
                    yield texts[row], position
                block, first_row, state = block + 1, 0, part.state_dict()

    def _texts(self, columns: dict[str, list[Any]]) -> list[str]:
        if self.text_column not in columns:
            raise ValueError(
                f"text_column is {self.text_column}, but the data has only {', '.join(columns)}"
            )
        return [text for text in columns[self.text_column] if text is not None]

    def _files(self) -> list[Path]:
        return sorted(path for path in Path(self.data_path).glob(self.pattern) if path.is_file())

    def _python_files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
        files = sorted(root.rglob("*.py"))
        return [path for path in files if not skipped & set(path.relative_to(root).parts)]

    def _is_validation(self, text: str) -> bool:
        """Return whether a document's hash, scaled to 0 to 1, is below validation_fraction."""
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
        return number < self.validation_fraction

    def _tokenizer_info(self) -> dict[str, Any]:
        """Return the vocabulary size, the end-of-text token, and the tokenizer as JSON."""
        if self.tokenizer == "bytes":
            return {"vocab_size": BYTE_EOS + 1, "eos_token_id": BYTE_EOS, "tokenizer": None}
        from tokenizers import Tokenizer

        is_file = Path(self.tokenizer).is_file()
        try:
            read = Tokenizer.from_file if is_file else Tokenizer.from_pretrained
            tokenizer = read(self.tokenizer)
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(
                f"tokenizer {self.tokenizer} is neither bytes nor a tokenizer.json, and cannot be"
                f" downloaded from the Hugging Face Hub: {error}"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab()
        names = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
        end = next((vocabulary[name] for name in names if name in vocabulary), None)
        if end is None:
            raise ValueError(
                f"tokenizer {self.tokenizer} has no end-of-text token (one of {', '.join(names)});"
                " add one to it"
            )
        size = max(vocabulary.values()) + 1  # the ids may have gaps
        return {"vocab_size": size, "eos_token_id": end, "tokenizer": tokenizer.to_str()}

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the model with randomly initialized weights."""
        return GPT(
            data_info["vocab_size"],
            self.width,
            self.depth,
            self.heads,
            self.activation,
            self.dropout,
        )

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of the next tokens, and their number.

        Args:
            model: maps tokens (B, T) to logits (B, T, V).
            batch: (B, T + 1), int64.
            step: not used.

        Returns:
            loss_sum in nats, a scalar, and num_items, the number of predicted tokens.
        """
        loss_sum = _token_losses(model, batch).sum()
        return loss_sum, batch.shape[0] * (batch.shape[1] - 1)

    def flops_per_item(self, model: nn.Module) -> float:
        """Return the FLOPs of a token, forward and backward, for MFU.

        6 FLOPs per parameter, and 12 x depth x width x T for attention
        (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B).
        """
        num_parameters = sum(p.numel() for p in model.parameters())
        return 6 * num_parameters + 12 * self.depth * self.width * self.sequence_length

    # ---- evaluation and inference ---------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Return the loss per token in nats, and the same loss in bits per byte of text."""
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric(), "bits_per_byte": MeanMetric()}

    def update_metrics(self, model: nn.Module, batch: Tensor, metrics: dict[str, Any]) -> None:
        """Update the metrics with one micro-batch."""
        losses = _token_losses(model, batch)
        metrics["loss"].update(losses)
        text = PREPARED[self]["validation"]
        metrics["bits_per_byte"].update(losses * text["tokens"] / text["bytes"] / math.log(2))

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        """Generate a continuation of the argument: a text, or the path of a text file."""
        tokens = encoder(data_info)(read_if_file(argument)) or [data_info["eos_token_id"]]
        return decode(data_info, self._generate(model, data_info, tokens))

    def predict_samples(
        self, model: nn.Module, data_info: dict[str, Any], samples: Any, folder: Path
    ) -> str:
        """Return three prompts from the validation texts, each with a continuation."""
        parts = []
        for i in range(0, len(samples), max(1, -(-len(samples) // 3))):
            tokens = samples[i][: max(1, self.sequence_length // 2)].tolist()
            prompt = decode(data_info, tokens)
            # decode the new tokens alone, since the prompt may end inside a character's bytes
            new = decode(data_info, self._generate(model, data_info, tokens)[len(tokens) :])
            parts.append(f"--- prompt\n{prompt}\n--- continuation\n{new}\n")
        return "\n".join(parts)

    def _generate(
        self, model: nn.Module, data_info: dict[str, Any], prompt: list[int]
    ) -> list[int]:
        return generate(
            model,
            prompt,
            max_new_tokens=self.max_new_tokens,
            max_length=self.sequence_length,
            temperature=self.temperature,
            end=data_info["eos_token_id"],
            generator=torch.Generator().manual_seed(0),
        )


def encoder(data_info: dict[str, Any]) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text, without the tokenizer's special tokens."""
    if not data_info["tokenizer"]:
        return lambda text: list(text.encode())
    tokenizer = _load_tokenizer(data_info["tokenizer"])
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def decode(data_info: dict[str, Any], tokens: list[int]) -> str:
    """Return the text that some tokens encode."""
    if not data_info["tokenizer"]:
        return bytes(token for token in tokens if token < BYTE_EOS).decode(errors="replace")
    return _load_tokenizer(data_info["tokenizer"]).decode(tokens)


def read_if_file(argument: str) -> str:
    """Return the content of a file if the argument is the path of one, else the argument."""
    if not os.path.isfile(argument):
        return argument
    return Path(argument).read_text(encoding="utf-8", errors="replace")


@lru_cache
def _load_tokenizer(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


def _file_stats(folder: Path, files: list[Path]) -> list[Any]:
    """Return name, size and modification time of files; a copy by rsync -a has the same.

    Args:
        folder: the folder that contains the files; the names are relative to it.
        files: their paths.
    """
    stats = ((path.relative_to(folder), path.stat()) for path in files)
    return [[str(name), stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of each next token in nats, (B * T,), float32."""
    logits = model(batch[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: list[int],
    *,
    max_new_tokens: int,
    max_length: int,
    temperature: float,
    end: int,
    generator: torch.Generator,
) -> list[int]:
    """Return the tokens, followed by up to max_new_tokens sampled ones.

    Args:
        model: maps tokens (B, T) to logits (B, T, V).
        tokens: the prompt, not empty.
        max_new_tokens: generation stops after this many tokens, or at the token `end`.
        max_length: the model sees only the last max_length tokens.
        temperature: divides the logits; 0 always takes the most likely token.
        end: the end-of-text token.
        generator: draws the samples, on the CPU.
    """
    device = next(model.parameters()).device
    tokens = list(tokens)
    for _ in range(max_new_tokens):
        context = torch.tensor([tokens[-max_length:]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probabilities = (logits / temperature).softmax(0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == end:
            break
        tokens.append(token)
    return tokens


class PackedSequences(torch.utils.data.Dataset):
    """Sequences of T + 1 tokens: T inputs, and the same shifted by one as labels."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed.with_format("numpy")

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Tensor:
        """Return a sequence (T + 1,), int64."""
        return torch.from_numpy(self.packed[index]["tokens"]).long()

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return several sequences with one read."""
        return list(torch.from_numpy(self.packed[indices]["tokens"]).long())


class SequenceStream:
    """Sequences of T + 1 tokens, tokenized while they are read.

    Lane i reads its share of the documents repeatedly, shuffled differently each time.
    """

    def __init__(self, recipe: CausalLM, data_info: dict[str, Any]) -> None:
        self.recipe = recipe
        self.lanes = recipe.lanes
        self.data_info = data_info

    def lane(self, i: int, start: int, seed: int) -> "SequenceLane":
        """Return the sequences of lane i, without the first `start` of them."""
        return SequenceLane(self.recipe, self.data_info, i, start, seed)


class SequenceLane:
    """An endless iterator over the sequences (T + 1,), int64, of one lane.

    Its state is where the next sequence begins: the epoch, the position of the document (see
    CausalLM._documents), and the offset in the document's tokens.
    """

    def __init__(
        self, recipe: CausalLM, data_info: dict[str, Any], i: int, start: int, seed: int
    ) -> None:
        self.recipe = recipe
        self.data_info = data_info
        self.i = i
        self.start = start
        self.seed = seed
        self.state: dict[str, Any] = {"epoch": 0, "document": None, "offset": 0}

    def __iter__(self) -> Iterator[Tensor]:
        return islice(self._sequences(), self.start, None)

    def _sequences(self) -> Iterator[Tensor]:
        recipe, end = self.recipe, self.data_info["eos_token_id"]
        encode = encoder(self.data_info)
        empty_epochs = 0
        for epoch in count(self.state["epoch"]):
            start = self.state["document"]
            texts = recipe._documents(self.i, 1_000_003 * self.seed + epoch, start)
            documents = (
                ([*encode(text), end], position)
                for text, position in texts
                if not recipe._is_validation(text)
            )
            sequences = pack(documents, recipe.sequence_length, self.state["offset"])
            empty_epochs += 1
            for sequence, (document, offset) in sequences:
                self.state = {"epoch": epoch, "document": document, "offset": offset}
                yield torch.tensor(sequence)
                empty_epochs = 0
            if empty_epochs == 10:  # one proves nothing: a lane's documents change with the epoch
                raise ValueError(
                    f"lane {self.i} of {recipe.lanes} does not fill one sequence of"
                    f" {recipe.sequence_length + 1} tokens: set fewer lanes, or add data"
                )
            self.state = {"epoch": epoch + 1, "document": None, "offset": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next sequence."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin at a position, without reading the documents before it."""
        self.state = state


def pack(
    documents: Iterable[tuple[list[int], Any]], length: int, offset: int = 0
) -> Iterator[tuple[list[int], tuple[Any, int]]]:
    """Yield sequences of length + 1 tokens, cut from the concatenated documents.

    Each begins with the last token of the previous one, so that every token is predicted once.

    Args:
        documents: the tokens and the position of each document.
        length: the number of tokens that are predicted per sequence.
        offset: where the first sequence begins in the first document.

    Yields:
        A sequence, and where the next one begins: the position of a document, and an offset in it.
    """
    rest: list[int] = []
    begins: deque[tuple[int, Any]] = deque()  # each document: its start in rest, its position
    for tokens, position in documents:
        begins.append((len(rest) - offset, position))
        rest += tokens[offset:]
        start = offset = 0
        while start + length < len(rest):
            start += length
            while len(begins) > 1 and begins[1][0] <= start:
                begins.popleft()
            begin, document = begins[0]
            yield rest[start - length : start + 1], (document, start - begin)
        rest = rest[start:]
        begins = deque((begin - start, document) for begin, document in begins)


# ---- the model ----------------------------------------------------------------------------------
class GPT(nn.Module):
    """A decoder-only transformer with RMSNorm, rotary position embeddings and, by default, SwiGLU.

    Like Llama: Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        activation: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, activation, dropout) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.head_dim = width // heads
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            # scaled down as in GPT-2, since 2 x depth outputs add up in the residual stream
            for output in (block.attention.out, block.mlp.out):
                nn.init.normal_(output.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V)."""
        x = self.embedding(tokens)
        rotary = rotary_embedding(tokens.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = SwiGLU(width) if activation == "swiglu" else GELU(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal self-attention; scaled_dot_product_attention chooses the kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # query, key and value in one matrix
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        y = F.scaled_dot_product_attention(
            apply_rotary(query, rotary),
            apply_rotary(key, rotary),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    """A gated MLP of hidden size 8/3 D (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 64 * math.ceil(8 * width / 3 / 64)  # a multiple of 64 suits GPUs
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class GELU(nn.Module):
    """An MLP of hidden size 4 D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.out(F.gelu(self.up(x)))


def rotary_embedding(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotation angles, each (T, D / H / 2), float32.

    Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 10_000.0 ** (-pairs / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each head's pairs of dimensions by their position's angles; (B, H, T, D / H)."""
    cosine, sine = rotary
    left, right = x.float().chunk(2, dim=-1)
    rotated = torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)
    return rotated.to(x.dtype)
