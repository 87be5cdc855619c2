"""The recipe causal_lm: packing loses and repeats no text; the model is causal."""

import dataclasses
import json
import math
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import predict_as_typed, train_on_own_data, train_recipe_config
from runs import assert_same_weights, change, make_config, quick, records, train
from torch.nn import functional as F
from world import run_world

from my_project.config import Config
from my_project.loading.seeding import SampleSeeds
from my_project.recipes import causal_lm
from my_project.recipes.causal_lm import CausalLM

SMALL = {"sequence_length": 16, "width": 32, "depth": 2, "heads": 2}


def write(folder, count=12):
    """Write documents of several lengths; one is empty, and one is not ASCII."""
    (folder / "a folder.txt").mkdir(parents=True)
    for number in range(count):
        text = f"Document {number}: " + "the quick brown fox. " * (number % 5)
        text = {3: "", 4: "Grüße, ☃ and friends. " * 3}.get(number, text)
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def recipe_of(folder, **settings) -> CausalLM:
    if not (folder / "texts").exists():
        write(folder / "texts")
    options = SMALL | {"data": "files", "data_path": str(folder / "texts")}
    options |= {"cache_path": str(folder / "cache"), "validation_fraction": 0.3}
    return CausalLM(**options | settings)


def run_config(folder, **settings) -> Config:
    config = make_config(folder, **settings)
    return dataclasses.replace(config, recipe=recipe_of(folder))


def test_the_sequences_hold_every_document_once_in_order(tmp_path):
    recipe = recipe_of(tmp_path)
    data_info = recipe.prepare_data()
    train_set, validation = recipe.build_datasets(data_info)
    texts = [path.read_text() for path in sorted((tmp_path / "texts").glob("[0-9]*"))]
    for split, data in {"train": train_set, "validation": validation["validation"]}.items():
        chosen = [t for t in texts if recipe._is_validation(t) == (split == "validation")]
        expected = [token for text in chosen for token in [*text.encode(), 256]]
        sequences = [data[i].tolist() for i in range(len(data))]
        assert sequences[0][0] == expected[0]
        predicted = [token for sequence in sequences for token in sequence[1:]]
        assert predicted == expected[1 : 1 + len(predicted)]
        assert len(expected) - 1 - len(predicted) < recipe.sequence_length, "only the tail is left"
        for before, after in pairwise(sequences):
            assert before[-1] == after[0], "a sequence begins with the last token of the previous"
        assert data_info[split]["documents"] == len(chosen)
        assert data_info[split]["bytes"] == sum(len(text.encode()) for text in chosen)
    assert torch.equal(train_set.__getitems__([0, 2])[1], train_set[2])


def test_data_is_packed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path)
    recipe.prepare_data()
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "_pack", None)
        recipe.prepare_data()
    (tmp_path / "texts/00.txt").write_text("Another text, longer than the one before it was.")
    recipe.prepare_data()
    dataclasses.replace(recipe, sequence_length=8).prepare_data()
    with pytest.raises(ValueError, match="does not fill one sequence"):
        dataclasses.replace(recipe, pattern="00*", sequence_length=999).prepare_data()
    assert len(list((tmp_path / "cache").iterdir())) == 3, "and no temporary folder is left"


def test_what_a_kill_while_packing_leaves_is_not_in_the_way(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path)
    with monkeypatch.context() as patch:  # as if it was killed: its folder stays
        patch.setattr("shutil.rmtree", lambda *_, **options: None)
        patch.setattr(CausalLM, "_is_validation", None)
        with pytest.raises(TypeError):
            recipe.prepare_data()
    (left,) = (tmp_path / "cache").iterdir()
    recipe.prepare_data()  # in a container, its process may have the same ID
    assert left.is_dir()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_table_on_disk_is_packed_again_when_it_changes(tmp_path):
    table = tmp_path / "rows/table.jsonl"
    table.parent.mkdir()
    counts = []
    for rows in (20, 30):
        table.write_text(
            "".join(json.dumps({"text": f"row {i} of a table"}) + "\n" for i in range(rows))
        )
        recipe = recipe_of(tmp_path, data=str(table.parent), validation_fraction=0.0)
        counts.append(recipe.prepare_data()["train"]["documents"])
    assert counts == [20, 30]
    with pytest.raises(ValueError, match="text_column is body, but the data has only text"):
        dataclasses.replace(recipe, text_column="body").prepare_data()


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_model_is_causal_and_its_first_loss_is_that_of_chance(tmp_path, activation):
    torch.manual_seed(0)
    recipe = recipe_of(tmp_path, activation=activation)
    model = recipe.build_model({"vocab_size": 257})
    tokens = torch.randint(257, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 257
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    loss_sum, num_items = recipe.loss(model, torch.randint(257, (4, 17)), 0)
    assert float(loss_sum.detach()) / num_items == pytest.approx(math.log(257), rel=0.02)
    assert model.head.weight is model.embedding.weight
    out = model.blocks[0].mlp.out.weight
    assert float(out.detach().std()) == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)


def test_rotary_embeddings_depend_on_distance_only():
    query, key = torch.randn(2, 1, 1, 1, 8)
    rotary = causal_lm.rotary_embedding(30, 8, torch.device("cpu"))

    def score(i: int, j: int) -> float:
        def at(position: int) -> tuple:
            return tuple(part[position : position + 1] for part in rotary)

        rotated_query = causal_lm.apply_rotary(query, at(i))
        return float((rotated_query * causal_lm.apply_rotary(key, at(j))).sum())

    assert score(3, 1) == pytest.approx(score(29, 27), abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-5)


@pytest.mark.slow
def test_two_processes_and_a_resumed_run_learn_the_same(tmp_path):
    one = run_config(tmp_path, run_name="one", batches__global_batch_size=8)
    two = change(one, run_name="two", batches__micro_batch_size=2)
    assert train(one) == 0
    assert run_world(2, train, two) == [0, 0]
    losses = [r["loss"] for r in records(one)]
    assert [r["loss"] for r in records(two)] == pytest.approx(losses, rel=1e-5)
    stopped = change(one, run_name="stopped", steps=5, optim__schedule="constant")
    assert train(stopped) == 0
    whole = change(stopped, run_name="whole", steps=10)
    assert train(whole) == 0
    assert train(change(stopped, steps=10)) == 0
    assert_same_weights(stopped, whole)

    command = f"python -m my_project predict {whole.folder}"
    assert predict_as_typed(command).strip()
    (tmp_path / "prompt.txt").write_text("def ")
    assert predict_as_typed(f"{command} {tmp_path}/prompt.txt").startswith("def ")


def test_a_continuation_does_not_repeat_a_prompt_that_ends_within_a_character(tmp_path):
    recipe = recipe_of(tmp_path, temperature=0.0, max_new_tokens=1, sequence_length=8)
    data_info = {"tokenizer": None, "eos_token_id": 256}
    tokens = torch.tensor([*"ab☃".encode()])  # the prompt has 4 of these 5 bytes
    scores = F.one_hot(torch.tensor(0x83), 257).float()  # the last byte of the character

    class Completing(torch.nn.Linear):
        def forward(self, context):
            return scores.expand(*context.shape, 257)

    shown = recipe.predict_samples(Completing(1, 1), data_info, [tokens], tmp_path)
    assert shown == "--- prompt\nab\ufffd\n--- continuation\n\ufffd\n"


@pytest.mark.slow
def test_it_memorizes_a_text_and_generates_it(tmp_path):
    weights_of = pytest.importorskip("my_project.weights")
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / f"texts/{number}.txt").write_text("to be or not to be, " * 30)
    config = run_config(
        tmp_path, steps=300, batches__global_batch_size=16, optim__lr=0.01,
        telemetry__peak_tflops=1.0, optim__clip_norm=1.0,
    )  # fmt: skip
    recipe = dataclasses.replace(config.recipe, temperature=0.0, max_new_tokens=30)
    config = dataclasses.replace(config, recipe=recipe)
    assert train(config) == 0
    last = records(config)[-1]
    assert last["loss"] < 0.2
    rate = last["items_per_second"]
    rounding = {"rel": 2e-3}  # records are rounded to four digits
    assert rate == pytest.approx(last["samples_per_second"] * 16, **rounding)
    model = recipe.build_model({"vocab_size": 257})
    num_parameters = sum(p.numel() for p in model.parameters())
    flops_per_token = 6 * num_parameters + 12 * 2 * 32 * 16
    assert last["mfu"] == pytest.approx(rate * flops_per_token / 1e12, **rounding)
    _, data_info, model = weights_of.load(config.folder / "export")
    answer = recipe.predict(model, data_info, "to be or")
    assert answer.startswith("to be or not to be, to be")


def test_bits_per_byte_are_per_byte_of_the_text(tmp_path):
    recipe = recipe_of(tmp_path)
    data_info = recipe.prepare_data()
    _, sets = recipe.build_datasets(data_info)
    model = recipe.build_model(data_info)
    metrics = recipe.build_metrics()
    batch = torch.stack([sets["validation"][i] for i in range(len(sets["validation"]))])
    with torch.no_grad():
        recipe.update_metrics(model, batch, metrics)
        logits = model(batch[:, :-1])
    nats = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert metrics["loss"].compute() == pytest.approx(float(nats), rel=1e-5)
    per_byte = data_info["validation"]["tokens"] / data_info["validation"]["bytes"]
    bits = float(nats) * per_byte / math.log(2)
    assert metrics["bits_per_byte"].compute() == pytest.approx(bits, rel=1e-5)


def test_a_custom_tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    texts = write(tmp_path / "texts")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.train([str(path) for path in texts.glob("[0-9]*")], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    recipe = recipe_of(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=4)
    data_info = recipe.prepare_data()
    assert data_info["eos_token_id"] == 0
    assert data_info["train"]["tokens"] < 0.6 * data_info["train"]["bytes"]
    model = recipe.build_model(data_info)
    (tmp_path / "tokenizer.json").rename(tmp_path / "moved.json")
    assert recipe.predict(model, data_info, "the quick"), "an export contains its tokenizer"
    recipe = dataclasses.replace(recipe, tokenizer=str(tmp_path / "moved.json"))

    # settings that the tokenizer of another task may have
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=40)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "moved.json"))
    counts = ("documents", "bytes", "tokens")
    again = recipe.prepare_data()
    assert [again["train"][name] for name in counts] == [
        data_info["train"][name] for name in counts
    ]
    without = json.loads(tokenizer.to_str().replace("<|endoftext|>", "<nothing>"))
    (tmp_path / "moved.json").write_text(json.dumps(without))
    with pytest.raises(ValueError, match="has no end-of-text token"):
        recipe.prepare_data()


# ---- streaming ----------------------------------------------------------------------------------
def sequences_of(stream: Any, i: int, start: int = 0, epochs: int = 1) -> list[Any]:
    """Read a lane from `start` to the end of the given number of passes over its documents."""
    lane, read = stream.lane(i, 0, 0), []
    for sequence in lane:
        if lane.state_dict()["epoch"] == epochs:
            break
        read.append(sequence)
    return [*islice(stream.lane(i, start, 0), len(read) - start)]


def test_lanes_hold_every_training_document_once_and_epochs_are_shuffled(tmp_path):
    recipe = recipe_of(tmp_path, lanes=4, sequence_length=4, max_validation_sequences=7)
    data_info = recipe.prepare_data()
    stream, sets = recipe.build_datasets(data_info)
    assert len(sets["validation"]) == data_info["validation"]["sequences"] == 7
    texts = [path.read_text() for path in (tmp_path / "texts").glob("[0-9]*")]
    expected = sorted(text for text in texts if not recipe._is_validation(text))
    epochs = []
    for epoch in range(2):
        first = [len(sequences_of(stream, i, epochs=epoch)) if epoch else 0 for i in range(4)]
        lanes = [sequences_of(stream, i, first[i], epoch + 1) for i in range(4)]
        epochs.append(lanes)
        documents = []
        for lane in lanes:
            tokens = [int(lane[0][0]), *torch.cat([sequence[1:] for sequence in lane]).tolist()]
            assert all(a[-1] == b[0] for a, b in pairwise(lane))
            *whole, cut_off = bytes(token % 256 if token < 256 else 1 for token in tokens).split(
                b"\1"
            )
            documents += [text.decode() for text in whole]
            missing = [text for text in expected if text.encode().startswith(cut_off)]
            assert missing, "only the tail of a lane's last document is left"
        assert len(documents) >= len(expected) - 4
        assert len(documents) == len(set(documents))
        assert set(documents) <= set(expected)
    assert [len(lane) for lane in epochs[0]] != [len(lane) for lane in epochs[1]]


def test_a_lane_that_does_not_fill_a_sequence_is_named(tmp_path):
    recipe = recipe_of(tmp_path, lanes=64, sequence_length=400, validation_fraction=0.0)
    stream, _ = recipe.build_datasets(recipe.prepare_data())
    with pytest.raises(ValueError, match="lane 63 of 64 does not fill one sequence of 401 tokens"):
        next(iter(stream.lane(63, 0, 0)))


@pytest.mark.parametrize("sequence_length", quick(1, [60, 4]))
def test_a_lane_goes_on_at_its_state_and_reads_no_document_before_it(
    tmp_path, sequence_length, monkeypatch
):
    write(tmp_path / "texts", 60)
    recipe = recipe_of(tmp_path, lanes=2, sequence_length=sequence_length)
    stream, _ = recipe.build_datasets(recipe.prepare_data())
    read: list[str] = []
    read_text = Path.read_text

    def recorded(path: Path, *args: Any, **kwargs: Any) -> str:
        read.append(path.name)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", recorded)
    orders = []
    for epoch in range(3):
        read.clear()
        assert [*recipe._documents(1, epoch)]
        orders.append([*read])
    sequences, states = [], []
    lane = stream.lane(1, 0, 0)
    samples = iter(lane)
    while lane.state_dict()["epoch"] < 2:
        states.append(json.dumps(lane.state_dict()))
        sequences.append(next(samples))
    assert len(sequences) > 20
    assert max(map(len, states)) < 60, "a position, not the tokens"
    for number, state in enumerate(map(json.loads, states)):
        read.clear()
        resumed = stream.lane(1, 0, 0)
        resumed.load_state_dict(state)
        rest = [*islice(resumed, len(sequences) - number)]
        assert torch.equal(torch.stack(rest), torch.stack(sequences[number:]))
        epoch = state["epoch"]
        whole = [*orders[epoch][state["document"] or 0 :], *chain(*orders[epoch + 1 :])]
        assert read == whole[: len(read)] != []


def write_rows(folder, texts, files):
    """Write a Hugging Face dataset of several files; row n is in file n % files."""
    folder.mkdir()
    for file in range(files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[file::files]]
        (folder / f"part_{file:02}.jsonl").write_text("".join(lines))
    return str(folder)


@pytest.mark.parametrize("files", quick(1, [4, 1, 17]))
def test_a_lane_of_streamed_hugging_face_data_goes_on_at_its_state(tmp_path, files, monkeypatch):
    texts = [f"row {number} " + "of a table. " * (number % 7) for number in range(80)]
    data = write_rows(tmp_path / "rows", texts, files)
    recipe = recipe_of(tmp_path, lanes=2, data=data, validation_fraction=0.0)
    stream, _ = recipe.build_datasets(recipe.prepare_data())
    monkeypatch.setattr(causal_lm, "ROWS_PER_BLOCK", 7)
    blocks: list[list[str]] = []
    texts_of = CausalLM._texts

    def recorded(recipe: CausalLM, columns: Any) -> list[str]:
        blocks.append(texts_of(recipe, columns))
        return blocks[-1]

    monkeypatch.setattr(CausalLM, "_texts", recorded)
    lanes = [list(recipe._documents(i, 0)) for i in range(2)]
    assert sorted(text for lane in lanes for text, _ in lane) == sorted(texts), "each row once"
    sizes = [len(lane) for lane in lanes]
    assert files == 17 or max(sizes) - min(sizes) <= 2, "also of files with odd numbers of rows"
    assert [text for text, _ in lanes[0]] != [text for text, _ in recipe._documents(0, 1)]
    positions = [json.dumps(position) for _, position in lanes[1]]
    sequences = sequences_of(stream, 1)
    for number in range(0, len(sequences), 5):
        part = stream.lane(1, 0, 0)
        assert len(list(islice(part, number))) == number
        state = json.loads(json.dumps(part.state_dict()))
        blocks.clear()
        resumed = stream.lane(1, 0, 0)
        resumed.load_state_dict(state)
        rest = list(islice(resumed, len(sequences) - number))
        assert torch.equal(torch.stack([*sequences[:number], *rest]), torch.stack(sequences))
        before = positions.index(json.dumps(state["document"])) if number else 0
        rows = sum(map(len, blocks))
        assert rows - 7 < len(positions) - before, "at most one block is read again"
        if number == 0:
            assert rows > len(positions) - 7 * 2


def test_loader_workers_read_a_streamed_hugging_face_dataset_once(tmp_path):
    """A plain read of the dataset would give each loader worker a different share."""
    texts = [f"row {number} " + "of a table. " * (number % 7) for number in range(80)]
    data = write_rows(tmp_path / "rows", texts, 17)
    recipe = recipe_of(tmp_path, lanes=2, data=data, validation_fraction=0.0)
    stream, _ = recipe.build_datasets(recipe.prepare_data())
    here = [sequences_of(stream, i) for i in range(2)]
    streams = pytest.importorskip("my_project.loading.streams")
    reader = streams.LaneReader(
        stream=stream, lanes=[range(2)], per_step=1, start=0,
        seeds=SampleSeeds(0, False), states={},
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(reader, batch_size=None, num_workers=2)
    parts = list(islice(loader, 2 * max(map(len, here))))
    for lane, sequences in enumerate(here):
        lane_sequences = [s for part in parts for s in (part[lane][0] if lane in part else [])]
        assert torch.equal(torch.stack(lane_sequences[: len(sequences)]), torch.stack(sequences))


@pytest.mark.slow
def test_the_default_config_trains_on_the_standard_library(tmp_path):
    losses = train_recipe_config(
        "causal_lm", tmp_path, steps=6, recipe__cache_path=str(tmp_path / "cache")
    )
    # lower: a space is often followed by a space
    assert losses[0] == pytest.approx(math.log(257), rel=0.1)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_your_own_texts_are_read_as_the_document_says(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"Chapter {number}. " + "It was a dark and stormy night. " * 9 for number in range(40)]
    (tmp_path / "data/novels/one").mkdir(parents=True)
    for number, text in enumerate(texts):
        (tmp_path / f"data/novels/one/{number}.txt").write_text(text)
    (tmp_path / "data/articles").mkdir()
    lines = [json.dumps({"title": "a title", "body": text}) for text in texts]
    (tmp_path / "data/articles/articles.jsonl").write_text("\n".join(lines))
    configs = train_on_own_data("causal_lm", tmp_path)
    assert configs.keys() == {"novels", "articles"}
    for config in configs.values():
        info = json.loads((config.folder / "export/data_info.json").read_text())
        assert info["train"]["documents"] + info["validation"]["documents"] == len(texts)
