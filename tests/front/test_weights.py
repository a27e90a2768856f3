"""Weights in and out: from files of every kind into any number of stages, and out again for programs without penstock."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint.weight_files import open_weights
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError
from tests.checkpoint import attack
from tests.front.models import Words, batch, loss_fn, make
from tests.gloo_pool import GlooPool


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same weights in files of every kind."""
    folder = tmp_path_factory.mktemp("weights")
    state = {name: value.clone() + 1 for name, value in make().state_dict().items()}
    names = list(state)
    half = [{n: state[n] for n in names[:5]}, {n: state[n] for n in names[5:]}]
    found: dict[str, Any] = {"state dict": state}
    for kind in ("pt", "bin"):
        torch.save(state, folder / f"model.{kind}")
        found[kind] = folder / f"model.{kind}"
    torch.save({"epoch": 3, "model": state}, folder / "nested.pt")
    found["nested"] = str(folder / "nested.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    found["old"] = folder / "old.pt"
    save_file(state, folder / "model.safetensors")
    found["safetensors"] = folder / "model.safetensors"
    for kind, write in (("safetensors", save_file), ("bin", torch.save)):
        sharded = folder / f"sharded-{kind}"
        sharded.mkdir()
        for number, part in enumerate(half):
            write(part, sharded / f"model-{number}.{kind}")
        found[f"several {kind}"] = sorted(sharded.glob(f"*.{kind}"))
        where = {name: f"model-{number}.{kind}" for number, part in enumerate(half) for name in part}
        index = sharded / f"model.{kind}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
        found[f"folder {kind}"], found[f"index {kind}"] = sharded, str(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.async_save({"model": state, "epoch": 3}, checkpoint_id=folder / "dcp", no_dist=True).result(60)
        dcp.save(dict(state), checkpoint_id=folder / "flat", no_dist=True)
    found["dcp"], found["flat dcp"] = folder / "dcp", folder / "flat"
    return found


KINDS = [
    "state dict",
    "pt",
    "bin",
    "nested",
    "old",
    "safetensors",
    "several safetensors",
    "several bin",
    "folder safetensors",
    "folder bin",
    "index safetensors",
    "index bin",
    "dcp",
    "flat dcp",
]


def by_hand(transport: LocalTransport, weights: Any) -> dict[str, Tensor]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    modules = penstock.split_modules(model, ["0", "1", "2", "3"], transport.num_ranks)
    stage = penstock.PipelineStage(modules[transport.rank], transport.rank, transport.num_ranks, "cpu", group=transport)
    pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, microbatches=2, weights=weights)
    return pipe.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind_are_the_same(files: dict[str, Any], kind: str) -> None:
    found, expected = open_weights(files[kind]), files["state dict"]
    assert set(found) >= set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    with pytest.raises(KeyError):
        found["no such name"]


@pytest.mark.parametrize(("kind", "ranks"), [("bin", 2), ("folder safetensors", 3), ("dcp", 2)])
def test_a_model_on_the_meta_device_gets_them_stage_by_stage(files: dict[str, Any], kind: str, ranks: int) -> None:
    expected = files["state dict"]

    def run(transport: LocalTransport) -> bool:
        with torch.device("meta"):
            model = Words().double()
        pipe = penstock.Pipeline(
            model, (batch()[0],), loss_fn=loss_fn, microbatches=4, profile=False, schedule="1f1b", group=transport,
            weights=files[kind],
        )  # fmt: skip
        return all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())

    assert LocalWorld(ranks).run(run) == [True] * ranks


def test_stages_made_by_hand_get_them_too(tmp_path: Path) -> None:
    """`weights=` was taken and forgotten with stages made by hand."""
    expected = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).state_dict()
    torch.save(expected, tmp_path / "model.pt")
    for state in LocalWorld(2).run(by_hand, tmp_path / "model.pt"):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("captured", [True, False])
def test_weights_that_one_rank_cannot_take_change_nothing_on_any(captured: bool) -> None:
    """The other ranks had copied theirs into the user's model by then."""

    def run(transport: LocalTransport) -> bool:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        weights = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        before = {name: value.clone() for name, value in model.state_dict().items()}
        weights["3.bias"] = torch.ones(3)
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "weights": weights}
        modules = penstock.split_modules(model, ["0", "1", "2", "3"], 2)
        stage = penstock.PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        of_model: dict[str, Any] = {
            "model": model, "example": (torch.ones(4, 2),), "profile": False, "schedule": "1f1b", "group": transport
        }  # fmt: skip
        with pytest.raises(PenstockError, match=r"3\.bias"):
            penstock.Pipeline(**(of_model if captured else {"stages": [stage]}), **options)
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    assert LocalWorld(2).run(run) == [True, True]


def test_what_is_missing_is_named(files: dict[str, Any]) -> None:
    """With a model that had values, names that the weights lacked kept those, silently."""
    state = dict(files["state dict"])
    del state["blocks.1.up.weight"]
    with pytest.raises(PenstockError, match=r"no value for blocks\.1\.up\.weight"):
        penstock.Pipeline(make(), (batch()[0],), microbatches=4, profile=False, weights=state)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_files_that_are_no_weights_say_so_and_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    torch.save({"weight": Evil(mark)}, tmp_path / "evil.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "really-torch.safetensors")
    torch.save(3, tmp_path / "number.pt")
    for name, data in {
        "cut.safetensors": b"\x10\x00", "text.bin": b"hello", "x.index.json": b"{", "y.index.json": b"[]",
        "z.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}', "bomb.index.json": b"[" * 100_000,
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    (tmp_path / "empty").mkdir()
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / ".metadata").write_bytes(attack.simple_list(mark))
    for name in (*(p.name for p in tmp_path.iterdir()), "nowhere"):
        with pytest.raises(PenstockError, match=name.split("/")[0]):
            open_weights(tmp_path / name)
    assert not mark.exists()


def test_a_checkpoint_of_torchs_with_code_in_a_part_runs_nothing(tmp_path: Path) -> None:
    mark, place = tmp_path / "was here", tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=place, no_dist=True)
    (part,) = place.glob("*.distcp")
    evil = attack.evil_part(mark)
    part.write_bytes(evil + bytes(max(0, part.stat().st_size - len(evil))))
    with pytest.raises(PenstockError):
        open_weights(place)["weight"]
    assert not mark.exists()


# -- out


@pytest.mark.parametrize(("tied", "ranks", "most"), [(True, 2, 10**9), (False, 3, 4000), (True, 1, 10**9)])
def test_published_weights_load_without_penstock(tmp_path: Path, tied: bool, ranks: int, most: int) -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = penstock.Pipeline(
            make(tied=tied),
            (batch()[0],),
            loss_fn=loss_fn,
            microbatches=4,
            profile=False,
            schedule="1f1b",
            group=transport,
        )
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                parameter.mul_(1 + len(name) / 100)
        for shards in (100, most):  # the second save leaves nothing of the first
            pipe.save_pretrained(tmp_path, max_shard_bytes=shards)
        return pipe.predict(batch()[0])

    expected = LocalWorld(ranks).run(run)[0]
    shards = sorted(tmp_path.glob("*.safetensors"))
    model = make(tied=tied)
    if ranks == 1:
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
        load_model(model, shards[0])
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert {tmp_path / file for file in index["weight_map"].values()} == set(shards)
        state = {name: value for shard in shards for name, value in load_file(shard).items()}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
        assert ("head.weight" in state) != tied, "what has two names is written once"
        if tied:
            state["head.weight"] = state["embed.weight"]
        model.load_state_dict(state)
        assert len(shards) >= ranks
    with safe_open(shards[0], framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    torch.testing.assert_close(model(batch()[0]), expected)


def fsdp(folder: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = penstock.Pipeline(
        make(), (batch()[0],), mesh=mesh, data_parallel="fsdp", loss_fn=loss_fn, microbatches=4, profile=False
    )
    pipe.save_pretrained(folder)
    return sorted(pipe.state_dict())


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_sharded_parameters_are_published_whole(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(2, fsdp, str(tmp_path))
    state = load_file(tmp_path / "model.safetensors")
    for name, value in make().state_dict().items():
        assert torch.equal(state[name], value)


TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["tied llama", "gpt2"])
def test_a_transformers_model_goes_out_and_comes_back(tmp_path: Path, kind: str) -> None:
    """Trained in stages, saved, loaded by transformers alone: the same logits; and back into another number of stages."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "gpt2":
        config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    else:
        sizes = {**TINY, "intermediate_size": 32, "num_key_value_heads": 2, "tie_word_embeddings": True}
        config = AutoConfig.for_model("llama", use_cache=False, **sizes)
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))

    def pipeline(transport: LocalTransport, **options: Any) -> penstock.Pipeline:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        example = {"input_ids": tokens, "labels": tokens}
        return penstock.Pipeline(
            model, example_kwargs=example, microbatches=2, profile=False, schedule="1f1b", group=transport, **options
        )

    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(input_ids=tokens, labels=tokens)
        optimizer.step()
        pipe.save_pretrained(tmp_path)
        return pipe.evaluate(input_ids=tokens, labels=tokens).loss

    losses = LocalWorld(2).run(run)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"} <= names
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = model(input_ids=tokens, labels=tokens).loss.item()
    assert again == pytest.approx(losses[0], rel=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]

    def resume(transport: LocalTransport) -> Any:
        return pipeline(transport, weights=tmp_path).evaluate(input_ids=tokens, labels=tokens).loss

    assert LocalWorld(1).run(resume) == [pytest.approx(again, rel=1e-5)]
