"""The recipe embedding: negatives and gradients across processes, recall over the whole set."""

import dataclasses
import json
import random
from itertools import combinations

import pytest
import torch
from documents import predict_as_typed, train_on_own_data, train_recipe_config
from runs import assert_same_weights, change, make_config, records, train, weights
from torch.nn import functional as F
from world import run_world

from my_project.config import Config
from my_project.recipes import embedding
from my_project.recipes.embedding import Embedding, RecallAtK, TwoTowers, ngrams, standard_library

WORDS = (
    "apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor", "island",
    "jungle", "kettle", "ladder", "meadow",
)  # fmt: skip


def write(folder, count=48, held_out=23):
    """Write pairs: a query of two words, and a document with the same words in reverse order.

    No two queries have the same words, since their n-grams, and so their scores, would be equal.
    """
    folder.mkdir(exist_ok=True)
    pairs = list(combinations(WORDS, 2))
    random.Random(0).shuffle(pairs)
    pairs = pairs[: count + held_out]
    assert len(pairs) == count + held_out
    rows = [{"query": f"{a} {b}", "document": f"{b} with a {a}"} for a, b in pairs]
    splits = {"train": rows[:count], "validation": rows[count:]}
    for split, chosen in splits.items():
        lines = (json.dumps(row) + "\n" for row in chosen)
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def run_config(folder, **settings) -> Config:
    recipe = Embedding(data="pairs", data_path=str(write(folder / "pairs")), buckets=512, width=16)
    settings = {"batches__global_batch_size": 12, "batches__micro_batch_size": 0} | settings
    return dataclasses.replace(make_config(folder, **settings), recipe=recipe)


@pytest.mark.slow
def test_training_is_the_same_for_any_number_of_processes(tmp_path):
    one = run_config(tmp_path, run_name="one")
    assert train(one) == 0
    expected = records(one)
    for processes in (2, 3):
        several = change(one, run_name=f"on_{processes}")
        assert run_world(processes, train, several) == [0] * processes
        for ours, theirs in zip(records(several), expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        ours, theirs = weights(several.folder / "export"), weights(one.folder / "export")
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)
        name = "validation/recall_at_1"
        recalls = [records(config, name)[-1][name] for config in (several, one)]
        assert recalls[0] == pytest.approx(recalls[1])


@pytest.mark.parametrize(("global_batch", "micro"), [(9, 0), (10, 3)])
def test_unequal_micro_batches_are_refused_in_the_first_step(tmp_path, global_batch, micro):
    batches = {"batches__global_batch_size": global_batch, "batches__micro_batch_size": micro}
    config = run_config(tmp_path, **batches, distributed__timeout_seconds=20)
    with pytest.raises(RuntimeError, match="ValueError: the micro-batches of the 2 processes have"):
        run_world(2, train, config)
    assert not records(config)


def test_the_loss_equals_the_symmetric_cross_entropy_of_all_pairs(tmp_path):
    config = run_config(tmp_path)
    recipe = config.recipe
    train_set, _ = recipe.build_datasets({})
    batch = recipe.collate([train_set[i] for i in range(6)])
    torch.manual_seed(0)
    model = recipe.build_model({})
    loss_sum, num_items = recipe.loss(model, batch, 0)
    assert num_items == 6
    query = model.encode(batch["query"], "query")
    document = model.encode(batch["document"], "document")
    scores = (query @ document.T) / recipe.temperature
    own = torch.arange(6)
    expected = F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)
    assert float(loss_sum.detach()) / 6 == pytest.approx(float(expected.detach()) / 2, rel=1e-4)


def test_recall_is_exact(tmp_path):
    torch.manual_seed(0)
    queries, documents = F.normalize(torch.randn(2, 3000, 8).double(), dim=-1)
    scores = queries @ documents.T
    rank = (scores > scores.diagonal()[:, None]).sum(1)
    for k in (1, 10):
        metric = RecallAtK(k=k)
        for start in range(0, 3000, 700):
            metric.update(queries[start : start + 700], documents[start : start + 700])
        assert metric.compute() == pytest.approx(float((rank < k).float().mean()))


def test_recall_does_not_depend_on_rounding():
    """Each document occurs twice; noise as small as rounding must not change the result."""
    torch.manual_seed(0)
    queries = F.normalize(torch.randn(80, 8), dim=-1)
    documents = F.normalize(queries[:40] + queries[40:], dim=-1).repeat(2, 1)
    results = set()
    for repeat in range(8):
        order = torch.randperm(80)
        metric = RecallAtK(k=3)
        for part in order.split(repeat + 1):
            noise = 1e-7 * torch.randn(len(part), 8)
            metric.update(queries[part], documents[part] + noise)
        results.add(round(float(metric.compute()), 9))
    assert len(results) == 1


@pytest.mark.parametrize(("value", "recall"), [(1.0, 1 / 50), (float("nan"), 0)])
def test_a_constant_encoder_has_the_recall_of_chance(value, recall):
    metric = RecallAtK(k=1)
    metric.update(torch.full((50, 8), value), torch.full((50, 8), value))
    assert float(metric.compute()) == pytest.approx(recall)


def test_it_learns_to_retrieve_resumes_exactly_and_predicts(tmp_path):
    weights_of = pytest.importorskip("my_project.weights")
    config = run_config(tmp_path, optim__lr=0.02, steps=60, optim__schedule="constant")
    half = change(config, run_name="half", steps=30)
    assert train(half) == 0
    assert train(change(half, steps=60)) == 0
    assert train(config) == 0
    assert_same_weights(half, config)
    last = records(config, "validation/recall_at_1")[-1]
    assert last["validation/recall_at_1"] > 5 / 23, "chance is 1 / 23"
    assert last["validation/recall_at_10"] > 18 / 23
    settings, data_info, model = weights_of.load(config.folder / "export")
    recipe = settings.recipe
    answer = recipe.predict(
        model, data_info, "apple bridge\nkettle with a ladder\nbridge with a apple"
    )
    assert answer.splitlines()[0].endswith("bridge with a apple")

    command = f"python -m my_project predict {config.folder}"
    shown = predict_as_typed(command)
    pairs = recipe._pairs()[1]
    queries, documents = (
        recipe._encode(model, [pair[k] for pair in pairs], side)
        for k, side in enumerate(("query", "document"))
    )
    chosen = [i * 23 // 16 for i in range(16)]
    is_nearest = (queries @ documents.T).argmax(1)[chosen] == torch.tensor(chosen)
    nearest = int(is_nearest.sum())
    assert f"{nearest} of 16 queries are nearest to their own document" in shown
    (tmp_path / "query.txt").write_text("a cat\na dog with a tail\na cat with a hat")
    answer = recipe.predict(model, data_info, (tmp_path / "query.txt").read_text())
    assert predict_as_typed(f"{command} {tmp_path}/query.txt") == f"{answer}\n"


def test_ngrams_are_the_same_on_every_machine():
    assert ngrams("ab", 1000, 100).tolist() == ngrams("AB", 1000, 100).tolist()
    assert ngrams("ab", 100_000, 100).tolist() == [91_444, 44_843, 55_580]
    assert ngrams("", 1000, 100).tolist() == [0]
    model = TwoTowers(1000, 8, 0.1)
    lengths = model.encode((torch.tensor([1, 2, 3]), torch.tensor([0, 1])), "query").norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(2))


def test_only_line_ends_separate_pairs_and_lines_of_code(tmp_path, monkeypatch):
    pair = {"query": "a\u2028b\u2029c", "document": "d\x85e"}
    line = json.dumps(pair, ensure_ascii=False)
    (tmp_path / "train.jsonl").write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    assert embedding._read_jsonl(tmp_path / "train.jsonl") == [(*pair.values(),)] * 2
    code = [
        "def f(x):",
        '    """Return the number that follows."""',
        "    y = x + 1",
        "    return y",
    ]
    (tmp_path / "a.py").write_text("\n".join(["x = 1", "\f", *code]))
    monkeypatch.setattr(embedding.sysconfig, "get_path", lambda _: str(tmp_path))
    wanted = "\n".join([code[0], *code[2:]])
    assert standard_library() == [("Return the number that follows.", wanted)]


def test_samples_are_shown_with_overfit_batches(tmp_path):
    config = run_config(tmp_path, overfit_batches=1, steps=1)
    assert train(config) == 0
    (shown,) = records(config, "sample")
    assert "of 8 queries are nearest" in shown["sample"]
    assert "among 12 documents" in shown["sample"]


@pytest.mark.slow
def test_the_default_config_trains_on_the_standard_library(tmp_path, monkeypatch):
    pairs = standard_library()
    monkeypatch.setattr(embedding, "standard_library", lambda: pairs)  # it takes seconds
    assert len(pairs) > 1000
    assert not any('"""' in document[:50] for _, document in pairs[:200])
    losses = train_recipe_config("embedding", tmp_path, steps=8)
    assert losses[-1] < losses[0]


def test_your_own_pairs_are_read_as_the_document_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/faq").mkdir(parents=True)
    pairs = [{"query": f"How do I open a {w}?", "document": f"First, the {w}."} for w in WORDS]
    for part in ("train", "validation"):
        lines = "\n".join(map(json.dumps, pairs))
        (tmp_path / f"data/faq/{part}.jsonl").write_text(lines)
    configs = train_on_own_data("embedding", tmp_path)
    assert configs.keys() == {"faq"}
    info = json.loads((configs["faq"].folder / "export/data_info.json").read_text())
    assert info == {"pairs": len(WORDS), "validation_pairs": len(WORDS)}
