"""What the user's function may take and return, and what the messages say of anything else."""

import itertools
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_ddp import EagerDDP
from compiled_ddp.tools.comparison.users_task import UsersWorkload, call_function, training_of
from compiled_ddp.tools.comparison.workload import on_device, samples_in, total_samples

BATCH = (torch.ones(2, 3), torch.tensor([0, 1]))
PLACE = {"rank": 1, "world_size": 2, "device": torch.device("cpu")}


def model() -> nn.Module:
    return nn.Linear(3, 2)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(self.layer(x), y))


def workload(returned: Any) -> UsersWorkload:
    return UsersWorkload("toy", lambda: returned, seed=0, **PLACE)


def loss_of(returned: Any) -> float:
    made = workload(returned)
    return made.loss(made.build_model("", PLACE["device"]), next(made.batches(1, 2))).item()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: (), ()),
        (lambda rank: rank, 1),
        (lambda world_size, rank: (world_size, rank), (2, 1)),
        (lambda rank, other=3: (rank, other), (1, 3)),
        (lambda **everything: sorted(everything), ["device", "rank", "world_size"]),
        (partial(lambda width, rank: (width, rank), 5), (5, 1)),
    ],
)
def test_a_function_gets_what_it_has_parameters_for(function: Any, expected: Any) -> None:
    assert call_function(function, **PLACE) == expected


def test_a_function_that_needs_something_else_is_told_what_it_can_have() -> None:
    with pytest.raises(TypeError, match="needs width, depth: it can be given rank, world_size, device by these names"):
        call_function(lambda width, depth, rank: None, **PLACE)


def test_every_form_of_the_same_training_has_the_same_loss() -> None:
    bare, loss = WithLoss(), nn.CrossEntropyLoss()
    without_function = loss_of((bare, [BATCH]))
    named = [{"x": BATCH[0], "y": BATCH[1]}]
    given = {"model": bare.layer, "batches": [BATCH], "loss_function": loss}
    forms = [(bare, named), (bare.layer, loss, [BATCH]), [bare.layer, loss, [BATCH]], given]
    forms += [types.SimpleNamespace(**given), types.SimpleNamespace(model=bare, batches=[BATCH])]
    assert [loss_of(form) for form in forms] == [without_function] * len(forms)


def test_an_optimizer_is_made_of_the_parameters_it_is_given() -> None:
    sgd = partial(torch.optim.SGD, lr=0.5)
    given = workload({"model": model(), "batches": [BATCH], "loss_function": nn.CrossEntropyLoss(), "optimizer": sgd})
    assert isinstance(given.optimizer(model().parameters()), torch.optim.SGD)
    assert isinstance(workload((model(), [BATCH])).optimizer(model().parameters()), torch.optim.AdamW)


def _returns(**changes: Any) -> dict[str, Any]:
    return {"model": model(), "batches": [BATCH], "loss_function": nn.CrossEntropyLoss(), **changes}


WRONG = {
    "nothing": (None, TypeError, r"returned None: return \(model, batches\), \(model, loss_function, batches\), or"),
    "a model alone": (model(), TypeError, "returned a Linear: return"),
    "four": ((1, 2, 3, 4), TypeError, "returned a tuple of 4: return"),
    "no batches": ({"model": model()}, TypeError, "returned no batches: return"),
    "a field that is none": (_returns(scheduler=1), TypeError, r"\['scheduler'\], which are none of"),
    "the loss last": ((model(), [BATCH], nn.CrossEntropyLoss()), TypeError, "the loss function comes second"),
    "a class of models": ((nn.Linear, [BATCH]), TypeError, "must be a torch.nn.Module, found a type"),
    "the batches first": (([BATCH], model()), TypeError, "must be a torch.nn.Module, found a list"),
    "nothing to train": ((nn.ReLU(), [BATCH]), ValueError, "there is nothing to train"),
    "one batch": ((model(), BATCH), TypeError, "batches is a tuple, which looks like one batch: return a list"),
    "a tensor": ((model(), BATCH[0]), TypeError, "batches is a Tensor, which looks like one batch"),
    "a number": ((model(), 3), TypeError, "batches must be a list, a DataLoader, .* found a int"),
    "a loss": (_returns(loss_function=3), TypeError, "loss_function must be a function, found a int"),
    "no number of samples": (_returns(batch_size=0), TypeError, "batch_size must be the number of .* found 0"),
    "an optimizer": (_returns(optimizer="adam"), TypeError, "optimizer must be a function, found a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_refused_with_what_to_return(name: str) -> None:
    returned, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        training_of(returned)


def _wrapped(rank: int) -> None:
    with pytest.raises(ValueError, match="the model is wrapped already: return it bare"):
        training_of((EagerDDP(model()), [BATCH]))
    with pytest.raises(ValueError, match="has a wrapper inside, 1: return it bare"):
        training_of((nn.Sequential(model(), nn.parallel.DistributedDataParallel(model())), [BATCH]))


def test_a_model_that_is_wrapped_is_refused(ranks2: Any) -> None:
    ranks2.run(_wrapped)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((model(), [BATCH[0]]), "the model returned Tensor, which is no loss and has none: return \\(model, loss"),
        (
            (model(), lambda output, y: output, [BATCH]),
            "the loss function returned Tensor, which is no loss",
        ),
        ((model(), nn.CrossEntropyLoss(), [BATCH[0]]), r"a batch is \(inputs, target\), found a Tensor"),
        ((model(), nn.CrossEntropyLoss(), [(*BATCH, 1)]), r"a batch is \(inputs, target\), found a tuple of 3"),
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        loss_of(returned)


def test_an_optimizer_that_cannot_step_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must make one with a step\(\), found None"):
        workload(_returns(optimizer=lambda parameters: None)).optimizer([])


def _three() -> Iterator[int]:
    yield from range(3)


def test_a_list_begins_again_and_a_function_is_asked_for_each_step() -> None:
    for batches, expected in (([1, 2], [1, 2, 1, 2, 1]), (lambda step: -step, [0, -1, -2, -3, -4])):
        assert [*itertools.islice(workload((model(), batches)).batches(0, 1), 5)] == expected
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(3)), batch_size=2)
    lengths = [len(batch) for (batch,) in itertools.islice(workload((model(), loader)).batches(0, 1), 4)]
    assert lengths == [2, 1, 2, 1]


@pytest.mark.parametrize(("batches", "number"), [(_three(), 3), ([], 0)])
def test_batches_that_come_to_an_end_say_what_to_return(batches: Any, number: int) -> None:
    read = workload((model(), batches)).batches(0, 1)
    assert len([next(read) for _ in range(number)]) == number
    with pytest.raises(ValueError, match="there are no more batches: return a list, a DataLoader"):
        next(read)


def test_each_call_has_the_same_random_numbers_and_each_rank_other_ones() -> None:
    def drawn(seed: int) -> list[float]:
        made = UsersWorkload("toy", lambda: (model(), [torch.rand(2)]), seed=seed, **PLACE)
        return next(made.batches(0, 1)).tolist()

    assert drawn(3) == drawn(3) != drawn(4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(5, 3), 5),
        (BATCH, 2),
        ({"name": "a", "x": [torch.tensor(1.0), torch.ones(7, 2)], "y": torch.ones(3)}, 7),
        (torch.tensor(1.0), None),
        (["text"], None),
        (object(), None),
    ],
)
def test_the_samples_of_a_batch_are_the_leading_dimension_of_its_first_tensor(batch: Any, expected: int | None) -> None:
    assert samples_in(batch) == expected


def test_samples_of_all_ranks_are_known_where_each_rank_knows_its_own() -> None:
    assert total_samples([2, 3]) == 5
    assert total_samples([2, None]) is None


def test_the_function_may_tell_how_many_samples_a_batch_has() -> None:
    assert workload(_returns()).samples(BATCH) == 2
    assert workload(_returns(batch_size=64)).samples(BATCH) == 64


def test_tensors_of_nested_batches_are_moved() -> None:
    batch = {"x": [torch.ones(2), (torch.ones(1), "text")], "n": 3}
    moved = on_device(batch, torch.device("meta"))
    assert moved["x"][0].is_meta and moved["x"][1][0].is_meta
    assert (moved["x"][1][1], moved["n"]) == ("text", 3)


def test_a_model_that_was_given_up_is_held_no_longer() -> None:
    import weakref

    held = model()
    made = workload((held, [BATCH]))
    alive = weakref.ref(held)
    made.forget_model()
    del held
    assert alive() is None
