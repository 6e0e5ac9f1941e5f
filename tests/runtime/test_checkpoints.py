"""Checkpoints from every wrapper into every other: by torch.save, torch.distributed.checkpoint and safetensors.

docs/checkpoints.md has the table of what is tested here.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import KINDS, OURS, WITH_MODULE, Counted, Model, assert_same, made, step_of, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranks import RankPool

Made = tuple[nn.Module, torch.optim.Optimizer]


def names_fit(saved: str, loaded: str) -> bool:
    """Whether load_state_dict() of the one takes what state_dict() of the other has returned, as it is."""
    return loaded in OURS or (loaded in WITH_MODULE) == (saved in WITH_MODULE)


def trained(kind: str) -> Made:
    """After two steps on the same data everywhere, as nothing is averaged of a bare model: either rank's is saved."""
    model, optimizer = made(kind, 0)
    for step in range(2):
        torch.manual_seed(step)
        step_of(model, optimizer, 0, step)
    (counted,) = (part for part in model.modules() if type(part) is Counted)
    counted.calls = 5
    return model, optimizer


def _save_all(rank: int, folder: str) -> None:
    for number, kind in enumerate(KINDS):
        model, optimizer = trained(kind)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{number}.dcp")
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{folder}/{number}.pt")
            torch.save(values(model, optimizer), f"{folder}/{number}.values")
        dist.barrier()


@pytest.fixture(scope="module")
def folder(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where each kind, after the same training, was saved in each way."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    ranks2.run(_save_all, folder)
    return folder


def path_of(folder: str, saved: str, ending: str) -> str:
    return f"{folder}/{list(KINDS).index(saved)}.{ending}"


def expected_of(folder: str, saved: str) -> dict[str, Any]:
    return torch.load(path_of(folder, saved, "values"))


@contextlib.contextmanager
def loading_into(kind: str) -> Iterator[None]:
    """Name the kind in whatever fails: a test loads into all kinds in one run of the ranks, which costs most of it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while loading into {kind}")
        raise


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def _dcp(rank: int, folder: str, saved: str) -> None:
    for loaded in KINDS:
        with loading_into(loaded):
            model, optimizer = made(loaded, 1, lr=0.5)
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path_of(folder, saved, "dcp"))
            result = set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert_same(values(model, optimizer), expected_of(folder, saved))


@pytest.mark.parametrize("saved", KINDS)
def test_distributed_checkpoints_load_into_all(ranks2: RankPool, folder: str, saved: str) -> None:
    ranks2.run(_dcp, folder, saved)


def _stateful(rank: int, folder: str, loaded: str) -> None:
    """A wrapper given to dcp.save and dcp.load itself, which call its state_dict() and load_state_dict()."""
    model, _ = trained("torch DDP")
    dcp.save({"model": model.module}, checkpoint_id=folder)
    other, _ = made(loaded, 1)
    dcp.load({"model": other}, checkpoint_id=folder)
    assert torch.equal(other.module.head.weight, model.module.head.weight)


@pytest.mark.parametrize("loaded", ["compile_ddp", "EagerDDP"])
def test_a_wrapper_itself_is_given_to_distributed_checkpoint(ranks2: RankPool, tmp_path: Path, loaded: str) -> None:
    ranks2.run(_stateful, str(tmp_path), loaded)


OPTIONS = {
    "full_state_dict": StateDictOptions(full_state_dict=True),
    "cpu_offload": StateDictOptions(cpu_offload=True),
    "full and offloaded": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "broadcast_from_rank0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flatten_optimizer_state_dict": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _options(rank: int, option: str, saved: str) -> None:
    options = OPTIONS[option]
    model, optimizer = trained(saved)
    expected = values(model, optimizer)
    of_model = get_model_state_dict(model, options=options)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    if option == "full and offloaded":
        assert bool(of_model) == (rank == 0), "rank 0 alone has it"
        everything = [of_model, of_optimizer]
        dist.broadcast_object_list(everything, 0)
        of_model, of_optimizer = everything
    if option == "broadcast_from_rank0" and rank == 1:
        of_model, of_optimizer = {}, {}
    for loaded in KINDS:
        other, its_optimizer = made(loaded, 1, lr=0.5)
        set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(of_optimizer), options=options)
        set_model_state_dict(other, copy.deepcopy(of_model), options=options)
        assert_same(values(other, its_optimizer), expected)


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_state_dicts_is_taken_from_and_by_all(ranks2: RankPool, option: str, saved: str) -> None:
    ranks2.run(_options, option, saved)


# ---- torch.save ------------------------------------------------------------------------------------------------------


def load_somehow(model: nn.Module, state: dict[str, Any], saved: str, loaded: str) -> None:
    """As it is, where the names fit; else as docs/checkpoints.md says."""
    if names_fit(saved, loaded):
        model.load_state_dict(state)
        return
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    if saved in WITH_MODULE:
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare = model.module if isinstance(model, TorchDDP) else model
    bare.load_state_dict(state)


def _torch_save(rank: int, folder: str, saved: str) -> None:
    for loaded in KINDS:
        with loading_into(loaded):
            model, optimizer = made(loaded, 1, lr=0.5)
            checkpoint = torch.load(path_of(folder, saved, "pt"))
            optimizer.load_state_dict(checkpoint["optimizer"])
            load_somehow(model, checkpoint["model"], saved, loaded)
            assert_same(values(model, optimizer), expected_of(folder, saved))


@pytest.mark.parametrize("saved", KINDS)
def test_what_torch_save_has_written_loads(ranks2: RankPool, folder: str, saved: str) -> None:
    ranks2.run(_torch_save, folder, saved)


def _way_back(rank: int, saved: str) -> None:
    model, optimizer = trained(saved)
    torchs, its_optimizer = made("torch DDP", 1)
    before = list(model.state_dict())
    state = model.state_dict_for_ddp()
    assert list(state) == list(torchs.state_dict())
    assert state._metadata == torchs.state_dict()._metadata
    result = torchs.load_state_dict(state, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert_same(values(torchs, its_optimizer), values(model, optimizer))
    model.load_state_dict(state)  # what it has given away, too
    assert list(model.state_dict()) == before
    copied = copy.deepcopy(model)
    torchs.load_state_dict(copied.state_dict_for_ddp())
    model.unwrap()
    torchs.load_state_dict(model.state_dict_for_ddp())


@pytest.mark.parametrize("saved", OURS)
def test_the_way_back_loads_into_torchs_class(ranks2: RankPool, saved: str) -> None:
    ranks2.run(_way_back, saved)


def _named_optimizer(rank: int, saved: str, loaded: str) -> None:
    """Optimizers that were given names keep them in their state: those that were saved."""
    model, optimizer = made(saved, 0, named=True)
    step_of(model, optimizer, 0, 0)
    other, its_optimizer = made(loaded, 1, named=True, lr=0.5)
    assert all("module" not in name for group in its_optimizer.param_groups for name in group["param_names"])
    its_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    assert_same(values(other, its_optimizer), values(model, optimizer))
    state, optimizer_state = get_state_dict(model, optimizer)
    other, its_optimizer = made(loaded, 2, named=True, lr=0.5)
    set_state_dict(other, its_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert_same(values(other, its_optimizer), values(model, optimizer))


@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(["torch DDP", "EagerDDP"], OURS[:2])])
def test_optimizers_with_names_load(ranks2: RankPool, saved: str, loaded: str) -> None:
    ranks2.run(_named_optimizer, saved, loaded)


# ---- safetensors -----------------------------------------------------------------------------------------------------


def of_tensors(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind](Model(tensors_only=True))


def _safetensors(rank: int, folder: str, saved: str) -> None:
    model = of_tensors(saved, 0)
    files = (f"{folder}/{rank}.model", f"{folder}/{rank}.file")
    safetensors.torch.save_model(model, files[0])
    separate = {name: value.clone() for name, value in model.state_dict().items()}  # it refuses tensors that are tied
    safetensors.torch.save_file(separate, files[1])
    bare = [*model.parameters(), *model.buffers()]
    for loaded in KINDS:
        fits = names_fit(saved, loaded)
        for number, file in enumerate(files):
            other = of_tensors(loaded, 1)
            if not fits:
                with pytest.raises(RuntimeError, match="Missing key"):
                    safetensors.torch.load_model(other, file)
            if number == 0 and fits:
                assert safetensors.torch.load_model(other, file) == (set(), [])
            elif number == 1:
                load_somehow(other, safetensors.torch.load_file(file), saved, loaded)
            else:
                continue
            found = [*other.parameters(), *other.buffers()]
            assert all(torch.equal(one, two) for one, two in zip(found, bare, strict=True))


@pytest.mark.parametrize("saved", KINDS)
def test_safetensors_load_where_the_names_fit(ranks2: RankPool, tmp_path: Path, saved: str) -> None:
    ranks2.run(_safetensors, str(tmp_path), saved)


# ---- asynchronous saving ---------------------------------------------------------------------------------------------


def _async(rank: int, folder: str, kind: str) -> None:
    model, optimizer = trained(kind)
    expected = values(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    saving = dcp.async_save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    for step in range(2, 8):  # with their collectives, while a thread writes with collectives of its own
        step_of(model, optimizer, rank, step)
    saving.result()
    assert not torch.equal(expected["model head.weight"], values(model, optimizer)["model head.weight"])
    dist.barrier()
    for loaded in ("torch DDP", "bare model", kind):
        other, its_optimizer = made(loaded, 1, lr=0.5)
        state, optimizer_state = get_state_dict(other, its_optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(other, its_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        assert_same(values(other, its_optimizer), expected)


@pytest.mark.parametrize("kind", ["compile_ddp", "EagerDDP", "the subclass", "the eager subclass"])
def test_an_asynchronous_checkpoint_has_the_bits_of_the_moment_of_the_call(
    ranks2: RankPool, tmp_path: Path, kind: str
) -> None:
    ranks2.run(_async, str(tmp_path), kind)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def _mistakes(rank: int, kind: str) -> None:
    model, optimizer = made(kind, 0)
    checkpoint = {"step": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(ValueError, match=r"beside \['optimizer', 'step'\]: load checkpoint\['model'\]"):
        model.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match=r"load checkpoint\['model'\]"):
        model.load_state_dict({"model": TorchDDP(Model()).state_dict()})
    with pytest.raises(TypeError, match=r"takes what state_dict\(\) has returned, found 'last.pt'"):
        model.load_state_dict("last.pt")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(checkpoint["optimizer"])
    state = get_model_state_dict(model)
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        set_model_state_dict(model, state)


@pytest.mark.parametrize("kind", OURS)
def test_what_is_no_state_of_the_model_is_refused(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_mistakes, kind)


def test_the_table_is_what_is_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    header, _, *rows = page[page.index("| saved by |") :].partition("\n\n")[0].splitlines()
    columns = [cell.strip(" `") for cell in header.split("|")[3:-2]]
    assert {"bare model", *KINDS} >= set(columns) and len(rows) == 3 * len(columns)
    for row in rows:
        saved, way, *cells = (cell.strip(" ") for cell in row.split("|")[1:-2])
        for loaded, cell in zip(columns, cells, strict=True):
            assert (cell == "yes") == (way == "DCP" or names_fit(saved.strip("`"), loaded)), (saved, way, loaded)


def test_all_kinds_of_state_are_compared() -> None:
    model, optimizer = made("bare model", 0)
    step_of(model, optimizer, 0, 0)
    names = values(model, optimizer)
    for name in ("model part.4._extra_state", "model part.1.running_var", "group 1 lr", "optimizer scale exp_avg_sq"):
        assert name in names
    assert isinstance(names["model shift"], Tensor) and "model scratch" not in names
