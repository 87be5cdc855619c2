"""The recipe finetune: the loss ignores padding; transformers and peft load the export."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks, predict_as_typed, text_of, train_on_own_data, train_recipe_config
from runs import EXPORTED, change, make_config, quick, records, train, weights
from safetensors.torch import load_file, save_file
from world import run_world

from my_project.checkpoint import exporting
from my_project.checkpoint.saving import Checkpoints
from my_project.config import Config
from my_project.recipes import finetune
from my_project.recipes.finetune import Finetune
from my_project.run_files import checkpoints
from my_project.run_folder import Run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # libraries raise them

TEXTS = {
    "fruit": ["an apple", "two sweet pears and a plum", "plums", "pears with one sour apple in it"],
    "tool": ["a hammer", "the long red saw", "nails, nails and a hammer", "saw"],
}
PROMPTS = {"fruit": "eat: ", "tool": "use: "}


def make_model(folder, decoder: bool):
    """Write a model folder as on the Hugging Face Hub, weights included."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    # a trained vocabulary would have another order in each process
    split = pre_tokenizers.BertPreTokenizer()
    texts = [*TEXTS["fruit"], *TEXTS["tool"], *PROMPTS.values()]
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    every = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]", *words]
    vocabulary = {word: number for number, word in enumerate(every)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    names = {"unk_token": "[UNK]", "eos_token": "[EOS]"}
    if decoder:
        config = transformers.GPT2Config(
            vocab_size=tokenizer.get_vocab_size(), n_positions=32, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=4, eos_token_id=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    else:
        names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        config = transformers.BertConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        )  # fmt: skip
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    kind = transformers.AutoModelForCausalLM if decoder else transformers.AutoModel
    kind.from_config(config).save_pretrained(folder)
    return folder


def write_data(path, copies=6):
    rows = [
        {"text": text, "label": label, "number": number, "prompt": PROMPTS[label]}
        for number, (label, texts) in enumerate(TEXTS.items())
        for text in texts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * copies))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)  # otherwise the weights depend on earlier tests
    make_model(folder / "encoder", decoder=False)
    make_model(folder / "decoder", decoder=True)
    (folder / "data").mkdir()
    write_data(folder / "data/train.jsonl")
    write_data(folder / "data/validation.jsonl", copies=1)
    return folder


def recipe_of(folder, **settings) -> Finetune:
    decoder = settings.get("task") == "causal_lm"
    options = {"model": str(folder / ("decoder" if decoder else "encoder")), "data": "files"}
    options |= {"data_path": str(folder / "data"), "prompt_column": "prompt" if decoder else ""}
    return Finetune(**{"max_length": 32} | options | settings)


def run_config(tmp_path, folder, run_name="one", **settings) -> Config:
    config = make_config(
        tmp_path, run_name=run_name, steps=6, batches__global_batch_size=8, optim__lr=0.01
    )
    return dataclasses.replace(config, recipe=recipe_of(folder, **settings))


def model_of(recipe: Finetune):
    torch.manual_seed(0)
    return recipe.build_model(recipe.prepare_data()).eval()


def samples_of(recipe: Finetune) -> list:
    data, _ = recipe.build_datasets(recipe.prepare_data())
    return [data[i] for i in range(8)]


@pytest.mark.parametrize("settings", [{}, {"task": "causal_lm"}, {"model": "decoder"}])
def test_padding_is_ignored_by_loss_and_metrics(folder, settings):
    if "model" in settings:  # a decoder classifies by the last token of each text
        settings = {"model": str(folder / "decoder")}
    recipe = recipe_of(folder, **settings)
    model, samples = model_of(recipe), samples_of(recipe)
    with torch.no_grad():
        loss_sum, num_items = recipe.loss(model, recipe.collate(samples), 0)
        parts = [recipe.loss(model, recipe.collate([sample]), 0) for sample in samples]
    assert len({int(recipe.collate([sample])["input_ids"].shape[1]) for sample in samples}) > 2
    assert float(loss_sum) == pytest.approx(float(sum(part for part, _ in parts)), rel=1e-5)
    assert int(num_items) == sum(int(count) for _, count in parts)
    metrics = recipe.build_metrics()
    with torch.no_grad():
        recipe.update_metrics(model, recipe.collate(samples), metrics)
    assert float(metrics["loss"].compute()) == pytest.approx(float(loss_sum / num_items), rel=1e-5)


def test_the_loss_ignores_the_prompt_and_includes_the_end_of_text(folder):
    recipe = recipe_of(folder, task="causal_lm")
    tokenizer = finetune._load_tokenizer(recipe._model_folder())
    sample = {"text": "a hammer", "prompt": "use: "}
    batch = recipe.collate([sample])
    prompt, text = tokenizer("use: ").input_ids, tokenizer("a hammer").input_ids
    assert batch["input_ids"][0].tolist() == [*prompt, *text, tokenizer.eos_token_id]
    labels = batch["labels"][0]
    assert labels[labels != -100].tolist() == [*text, tokenizer.eos_token_id]
    model = model_of(recipe)
    assert int(recipe.loss(model, batch, 0)[1]) == len(text) + 1
    short = dataclasses.replace(recipe, max_length=2)
    cut = short.collate([sample | {"text": "a hammer and nails"}])["input_ids"][0].tolist()
    both = tokenizer("a hammer and nails").input_ids
    assert cut == [prompt[-1], both[0]], "a long prompt leaves at least one token to predict"


def test_a_pair_of_texts_is_tokenized_as_a_pair(folder):
    recipe = recipe_of(folder, second_text_column="prompt")
    samples = samples_of(recipe)
    batch = recipe.collate(samples)
    first_only = recipe_of(folder).collate(samples)
    assert batch["input_ids"].shape[1] > first_only["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"lora_rank": 2, "lora_dropout": 0.1}, {}, {"task": "causal_lm"}]
)
def test_two_processes_and_a_resumed_run_learn_the_same(tmp_path, folder, settings):
    one = run_config(tmp_path, folder, **settings)
    one = change(one, optim__schedule="constant", optim__lr=0.02)
    assert train(one) == 0
    two = change(one, run_name="two")
    assert run_world(2, train, two) == [0, 0]
    losses = [r["loss"] for r in records(one)]
    assert [r["loss"] for r in records(two)] == pytest.approx(losses, rel=1e-5)
    (result,) = records(one, "validation/loss")
    assert result["validation/loss"] < losses[0], "without dropout, of another batch than the last"
    stopped = change(one, run_name="stopped", steps=3)
    assert train(stopped) == 0
    assert train(change(stopped, steps=6)) == 0
    name = "adapter_model.safetensors" if settings.get("lora_rank") else "model.safetensors"
    ours, theirs = (load_file(config.folder / "export" / name) for config in (stopped, one))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def logits_of(recipe, model) -> torch.Tensor:
    with torch.no_grad():
        return recipe._logits(model.eval(), recipe.collate(samples_of(recipe)))[0]


def trained_model(config: Config):
    """Build the model of a run from its newest checkpoint."""
    weights_of = pytest.importorskip("my_project.weights")
    model = config.recipe.build_model(config.recipe.prepare_data())
    weights_of.load_weights(checkpoints(config.folder)[-1], model)
    return model


@pytest.mark.parametrize("task", quick(1, ["classification", "causal_lm"]))
def test_transformers_loads_the_export_of_a_full_model(tmp_path, folder, task):
    weights_of = pytest.importorskip("my_project.weights")
    import transformers

    config = run_config(tmp_path, folder, task=task)
    assert train(config) == 0
    exported, recipe = config.folder / "export", config.recipe
    wanted = logits_of(recipe, trained_model(config))
    kind = {
        "classification": transformers.AutoModelForSequenceClassification,
        "causal_lm": transformers.AutoModelForCausalLM,
    }[task]
    torch.testing.assert_close(logits_of(recipe, kind.from_pretrained(exported)), wanted)
    tokens = transformers.AutoTokenizer.from_pretrained(exported)("a saw").input_ids
    assert tokens == finetune._load_tokenizer(recipe._model_folder())("a saw").input_ids
    _, data_info, model = weights_of.load(exported)
    torch.testing.assert_close(logits_of(recipe, model), wanted)
    answer = recipe.predict(model, data_info, "an apple")
    if task == "classification":
        assert {line.split()[1] for line in answer.splitlines()} == {"fruit", "tool"}
        assert kind.from_pretrained(exported).config.id2label == {0: "fruit", 1: "tool"}
    else:
        assert answer.startswith("an apple")

    command = f"python -m my_project predict {config.folder}"
    shown, file = predict_as_typed(command), tmp_path / "text.txt"
    right = f"{8 - shown.count(' wrong ')} of 8 validation samples right"
    assert (right in shown) == (task == "classification")
    file.write_text("an apple")
    assert predict_as_typed(f"{command} {file}") == f"{answer}\n"


def test_lora_exports_the_adapter_or_the_merged_model(tmp_path, folder, monkeypatch):
    weights_of = pytest.importorskip("my_project.weights")
    import transformers
    from peft import AutoPeftModelForSequenceClassification

    config = run_config(tmp_path, folder, lora_rank=2)
    before = model_of(config.recipe).state_dict()
    assert train(config) == 0
    exported, recipe = config.folder / "export", config.recipe
    model = trained_model(config)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed
    assert all("lora" in name or "modules_to_save" in name for name in changed)
    names = {path.name for path in exported.iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    assert (exported / "adapter_model.safetensors").stat().st_size < 20_000
    wanted = logits_of(recipe, model)
    from_predict = weights_of.load(exported)[2]
    from_peft = AutoPeftModelForSequenceClassification.from_pretrained(exported, num_labels=2)
    answer = recipe.predict(from_predict, {"classes": ["fruit", "tool"]}, "an apple")
    assert {line.split()[1] for line in answer.splitlines()} == {"fruit", "tool"}
    for loaded in (from_predict, from_peft):
        torch.testing.assert_close(logits_of(recipe, loaded), wanted)
    hostile = json.loads((exported / "adapter_config.json").read_text())
    hostile |= {"megatron_config": {"x": 1}, "megatron_core": "export.evil"}  # old peft imports it
    (exported / "adapter_config.json").write_text(json.dumps(hostile))
    with pytest.raises(ValueError, match="is not an adapter of this recipe"):
        weights_of.load(exported)

    merged = change(config, run_name="merged")
    merged = dataclasses.replace(merged, recipe=dataclasses.replace(recipe, merge_adapter=True))
    merged = change(merged, evaluation__best_metric="validation/loss", evaluation__best_mode="min")
    merged = change(merged, evaluation__every_steps=1)  # each evaluation merges a copy
    assert train(merged) == 0
    kind = transformers.AutoModelForSequenceClassification
    whole = kind.from_pretrained(merged.folder / "export")
    torch.testing.assert_close(logits_of(recipe, whole), wanted, atol=1e-5, rtol=1e-4)
    ends = [checkpoints(run.folder)[-1] for run in (config, merged)]
    ours, theirs = map(weights, ends)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), (
        "merging does not affect training"
    )
    model = trained_model(merged)
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", lambda *_: 1 / 0)  # a copy on the GPU
    merged.recipe.export(model, {}, {}, tmp_path / "again")


def trained_a_little(config: Config):
    model = model_of(config.recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25).add_(0.01)  # LoRA begins with zeros
    return model


def export_of(config: Config, model: Any, rank: int = 0, ranks: int = 1) -> Path:
    """Export a model; return the folder."""
    run = Run(config, rank)
    run.hosts = ["here"] * ranks
    saver = Checkpoints(run, model, torch.optim.SGD(model.parameters()), None)
    exporting.export(run, config.recipe.prepare_data(), model, saver)
    assert not saver.failures
    return run.folder / "export"


def export_sharded(configs: list[Config]) -> list[int]:
    """Export; return how often each export builds a whole model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    finetune.MAX_FILE_SIZE = "20KB"
    dist.init_process_group("gloo")
    counts, build = [], Finetune.build_model
    for config in configs:
        model = trained_a_little(config)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        built = []

        def counted(recipe, data_info, built=built):
            built.append(recipe)
            return build(recipe, data_info)

        Finetune.build_model = counted
        export_of(config, model, dist.get_rank(), 2)
        Finetune.build_model = build
        counts.append(len(built))
    dist.barrier()
    dist.destroy_process_group()
    return counts


@pytest.mark.slow
def test_the_export_of_a_sharded_model_equals_that_of_a_whole_one(tmp_path, folder, monkeypatch):
    """No rank builds a whole model for it, unless an adapter is merged into the weights."""
    weights_of = pytest.importorskip("my_project.weights")
    import transformers
    from peft import AutoPeftModelForSequenceClassification

    settings = {
        "decoder": {"task": "causal_lm"},
        "encoder": {},
        "adapter": {"lora_rank": 2},
        "merged": {"lora_rank": 2, "merge_adapter": True},
    }
    configs = [run_config(tmp_path, folder, name, **value) for name, value in settings.items()]
    for config in configs:
        config.folder.mkdir()
    assert run_world(2, export_sharded, configs) == [[0, 0, 0, 1], [0] * 4]
    kinds = {
        "decoder": transformers.AutoModelForCausalLM,
        "encoder": transformers.AutoModelForSequenceClassification,
        "adapter": AutoPeftModelForSequenceClassification,
        "merged": transformers.AutoModelForSequenceClassification,
    }
    monkeypatch.setattr(finetune, "MAX_FILE_SIZE", "20KB")
    for config in configs:
        name, recipe, exported = config.run_name, config.recipe, config.folder / "export"
        whole = trained_a_little(config)
        (tmp_path / "whole" / name).mkdir(parents=True)
        expected = export_of(change(config, runs_folder=str(tmp_path / "whole")), whole)
        assert (exported / "model.safetensors.index.json").is_file() == (name == "merged")
        others = {path.name for path in exported.iterdir() if "model" not in path.name}
        written = {path.name for path in expected.iterdir() if "model" not in path.name}
        assert others == written
        # tokenizer.json records how the tokenizer was last called
        for file in written - EXPORTED - {"tokenizer.json"}:
            # some settings of the adapter are sets, written as lists
            ours, theirs = (sorted((at / file).read_text()) for at in (exported, expected))
            assert ours == theirs, file
        classes = {"num_labels": 2} if name == "adapter" else {}
        wanted = logits_of(recipe, whole)
        for model in (
            kinds[name].from_pretrained(exported, **classes),
            weights_of.load(exported)[2],
        ):
            torch.testing.assert_close(logits_of(recipe, model), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_frozen_weights_may_be_bfloat16(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = run_config(tmp_path, folder, lora_rank=2, frozen_dtype="bfloat16")
    model = model_of(config.recipe)
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert (True, torch.bfloat16) not in kinds
    assert (False, torch.bfloat16) in kinds
    assert train(change(config, steps=20)) == 0
    losses = [r["loss"] for r in records(change(config, steps=20))]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft warns of GPT-2's layers
@pytest.mark.parametrize("task", ["causal_lm", "classification"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_activation_checkpointing_gives_the_same_gradients(folder, task, lora_rank):
    """Even for a decoder, which must not cache keys and values of both forward passes."""
    blocks = pytest.importorskip("my_project.blocks")
    gradients = []
    for checkpointed in (False, True):
        settings = {"model": str(folder / "decoder"), "lora_rank": lora_rank}
        recipe = recipe_of(folder, task=task, **settings)
        torch.manual_seed(0)
        model = model_of(recipe).train()
        layers = blocks.blocks(recipe, model)
        assert len(layers) == model.config.num_hidden_layers
        for layer in layers if checkpointed else ():
            blocks.recompute_activations(layer)
        recipe.loss(model, recipe.collate(samples_of(recipe)), 0)[0].backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# ---- the user's own data and models -------------------------------------------------------------
# datasets before 5.2 does not close a CSV file
@pytest.mark.parametrize("name", ["dev_2", "Test", "eval.clean"])
def test_files_are_held_out_by_their_names(tmp_path, folder, name):
    write_data(tmp_path / "testimony.jsonl")
    write_data(tmp_path / f"{name}.jsonl", copies=1)
    _, files = recipe_of(folder, data_path=str(tmp_path))._files()
    split = "test" if name == "Test" else "validation"
    assert files == {
        "train": [str(tmp_path / "testimony.jsonl")],
        split: [str(tmp_path / f"{name}.jsonl")],
    }


def test_rows_without_a_text_or_a_label_are_skipped(tmp_path, folder):
    write_data(tmp_path / "train.jsonl", copies=1)
    with (tmp_path / "train.jsonl").open("a") as file:
        for row in ({"text": "a nail"}, {"label": "tool"}, {"text": "", "label": "tool"}):
            file.write(json.dumps(row) + "\n")
    recipe = recipe_of(folder, data_path=str(tmp_path), validation_fraction=0.0)
    data_info = recipe.prepare_data()
    train_set, _ = recipe.build_datasets(data_info)
    assert data_info["classes"] == ["fruit", "tool"]
    assert len(train_set) == 8


@pytest.mark.parametrize("prompt_column", ["", "prompt"])
def test_samples_are_shown_if_a_prompt_has_no_token(tmp_path, folder, prompt_column):
    recipe = recipe_of(folder, task="causal_lm", prompt_column=prompt_column)
    samples = [{"prompt": "", "text": "an apple"}, {"prompt": " ", "text": "    a saw"}]
    table = recipe.predict_samples(model_of(recipe), {}, samples, tmp_path)
    assert table.row_count == 2


def test_the_standard_library_is_read_also_below_a_folder_named_test(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune.sysconfig, "get_path", lambda _: str(tmp_path / "test"))
    for folder in ("email", "email/test"):
        (tmp_path / "test" / folder).mkdir(parents=True)
        code = f'def f():\n    """Return what is in the folder {folder}."""\n'
        (tmp_path / "test" / folder / "a.py").write_text(code)
    rows = finetune.standard_library.__wrapped__()
    assert [row["text"] for row in rows] == ["Return what is in the folder email."]


def test_a_model_of_the_hub_comes_from_its_cache_and_the_adapter_names_it(
    tmp_path, folder, monkeypatch
):
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(folder / "encoder", cached / "snapshots/0123456789")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123456789")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    finetune._snapshot.cache_clear()
    recipe = recipe_of(folder, model="someone/tiny", lora_rank=2)
    model = model_of(recipe)
    recipe.export(model, recipe.prepare_data(), model.state_dict(), tmp_path / "export")
    adapter = json.loads((tmp_path / "export/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "someone/tiny"
    finetune._snapshot.cache_clear()


@pytest.mark.slow
def test_layers_missing_from_the_weights_are_saved_with_the_adapter(tmp_path, folder):
    """The weights of RoBERTa do not contain its head, which has two layers."""
    from transformers import AutoModelForMaskedLM, RobertaConfig

    shutil.copytree(folder / "encoder", tmp_path / "model")
    model = AutoModelForMaskedLM.from_config(
        RobertaConfig(vocab_size=200, hidden_size=16, num_hidden_layers=1, pad_token_id=0,
                      num_attention_heads=2, intermediate_size=32, max_position_embeddings=40)
    )  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    recipe = recipe_of(folder, model=str(tmp_path / "model"), lora_rank=2)
    data_info = recipe.prepare_data()
    model = model_of(recipe)
    recipe.loss(model, recipe.collate(samples_of(recipe)), 0)[0].backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    assert any("classifier" in name for name in trained)
    torch.manual_seed(1)
    for parameter in trained.values():
        torch.nn.init.normal_(parameter.data)
    (tmp_path / "export").mkdir()
    stem, tensors = recipe.export(model, data_info, model.state_dict(), None)
    recipe.export(model, data_info, model.state_dict(), tmp_path / "export")
    save_file(tensors, tmp_path / f"export/{stem}.safetensors")
    loaded = recipe.load(data_info, tmp_path / "export")
    torch.testing.assert_close(logits_of(recipe, loaded), logits_of(recipe, model))


@pytest.mark.parametrize("classes", [("good", "bad"), ("a", "b", "c"), ("fruit", "tool")])
def test_a_model_trained_for_other_classes_gets_a_new_head(tmp_path, folder, classes):
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(folder / "encoder", tmp_path / "model")
    labels = dict(enumerate(classes))
    theirs = AutoModelForSequenceClassification.from_pretrained(
        folder / "encoder", id2label=labels, label2id={name: i for i, name in labels.items()}
    )
    theirs.save_pretrained(tmp_path / "model")
    ours = model_of(recipe_of(folder, model=str(tmp_path / "model")))
    assert ours.classifier.out_features == 2
    kept = ours.classifier.weight.shape == theirs.classifier.weight.shape and torch.equal(
        ours.classifier.weight, theirs.classifier.weight
    )
    assert kept == (classes == ("fruit", "tool"))
    torch.testing.assert_close(ours.bert.pooler.dense.weight, theirs.bert.pooler.dense.weight)


def test_a_folder_without_weights_makes_a_new_model(tmp_path, folder):
    shutil.copytree(folder / "encoder", tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    recipe = recipe_of(folder, model=str(tmp_path / "model"))
    new, known = (model_of(r).state_dict() for r in (recipe, recipe_of(folder)))
    assert new.keys() == known.keys()
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(new[name], known[name])
    with pytest.raises(ValueError, match="has no pretrained weights to adapt"):
        model_of(dataclasses.replace(recipe, lora_rank=2))


def test_weights_that_can_run_code_are_refused(tmp_path, folder):
    shutil.copytree(folder / "encoder", tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    (tmp_path / "model/pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="can run code when it is loaded"):
        model_of(recipe_of(folder, model=str(tmp_path / "model")))


def test_code_beside_the_weights_is_not_run(tmp_path, folder, monkeypatch):
    """Not even if the user would answer yes when transformers asks."""
    model = shutil.copytree(folder / "encoder", tmp_path / "model")
    marker = tmp_path / "marker"
    (model / "theirs.py").write_text(f"import os\nos.mkdir({str(marker)!r})")
    settings = json.loads((model / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "theirs.X"}, "model_type": "theirs"}
    (model / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(ValueError, match=r"trust_remote_code|does not recognize"):
        recipe_of(folder, model=str(model)).build_model({"classes": ["fruit", "tool"]})
    assert not marker.exists()


@pytest.mark.slow
def test_the_default_config_trains_the_packaged_encoder(tmp_path):
    train_recipe_config("finetune", tmp_path, steps=3, recipe__max_length=8)
    rows = finetune.standard_library()
    lacking = set(finetune.MODULES) - {row["label"] for row in rows}
    assert lacking <= {"tkinter"}, "which Debian packs apart"
    assert len(rows) > 1500


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_your_own_texts_are_read_and_transformers_loads_the_export(tmp_path, monkeypatch, capsys):
    weights_of = pytest.importorskip("my_project.weights")
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": text, "class": name} for name in TEXTS for text in TEXTS[name] * 5]
    table = datasets.Dataset.from_list(rows)
    (tmp_path / "data/questions").mkdir(parents=True)
    table.rename_columns({"text": "review", "class": "stars"}).to_csv("data/reviews.csv")
    for part in ("train", "test"):
        named = table.rename_columns({"text": "question", "class": "topic"})
        named.to_parquet(f"data/questions/{part}.parquet")
    configs = train_on_own_data("finetune", tmp_path)
    assert configs.keys() == {"reviews", "questions"}
    for config in configs.values():
        info = json.loads((config.folder / "export/data_info.json").read_text())
        assert info == {"classes": ["fruit", "tool"]}

    (tmp_path / "runs/questions").rename(tmp_path / "runs/finetune")
    (block,) = blocks(text_of("docs/your-own-recipe.md", "### In transformers"), "python")
    capsys.readouterr()
    exec(block, {})
    config, info, model = weights_of.load(tmp_path / "runs/finetune/export")
    answer = config.recipe.predict(model, info, "Wait until all are done.")
    assert capsys.readouterr().out.split() == answer.splitlines()[0].split()[1:]
