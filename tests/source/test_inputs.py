"""Random inputs have the shapes, types and ranges of the example."""

import torch

from deadweight.source.inputs import Inputs, Span, as_inputs


def drawn(inputs: Inputs, seed: int = 0) -> tuple[tuple, dict]:
    return inputs.draw(torch.Generator().manual_seed(seed))


def test_a_draw_has_the_shapes_and_types_of_the_example() -> None:
    example = as_inputs({"a": torch.randn(2, 3, dtype=torch.float64), "b": torch.tensor([[1, 4]], dtype=torch.int32)})
    _, kwargs = drawn(example)
    for name, value in example.kwargs.items():
        assert kwargs[name].shape == value.shape and kwargs[name].dtype == value.dtype


def test_draws_differ_by_seed_and_repeat_by_seed() -> None:
    example = as_inputs(torch.randn(4))
    assert torch.equal(drawn(example, 1)[0][0], drawn(example, 1)[0][0])
    assert not torch.equal(drawn(example, 1)[0][0], drawn(example, 2)[0][0])


def test_integers_are_drawn_between_the_least_and_the_greatest_of_the_example() -> None:
    (value,), _ = drawn(as_inputs(torch.tensor([3, 7] * 200)))
    assert set(value.tolist()) == {3, 4, 5, 6, 7}


def test_floats_keep_their_scale() -> None:
    (value,), _ = drawn(as_inputs(10 * torch.randn(5000)))
    assert 9 < value.std() < 11


def test_booleans_numbers_and_fixed_inputs_stay() -> None:
    mask, ones = torch.tensor([True, False]), torch.ones(1, 5, dtype=torch.long)
    given = {"mask": mask, "ones": ones, "flag": False, "n": 3}
    _, kwargs = drawn(Inputs(kwargs=given, spans={"ones": None}))
    assert torch.equal(kwargs["mask"], mask) and torch.equal(kwargs["ones"], ones)
    assert kwargs["flag"] is False and kwargs["n"] == 3


def test_tokens_are_drawn_over_the_whole_span_but_for_the_avoided() -> None:
    inputs = Inputs(kwargs={"input_ids": torch.ones(1, 500, dtype=torch.long)}, spans={"input_ids": Span(0, 9, (4,))})
    assert set(drawn(inputs)[1]["input_ids"].flatten().tolist()) == set(range(10)) - {4}


def test_nested_inputs_are_drawn_too() -> None:
    (pair,), _ = drawn(as_inputs(((torch.zeros(3), torch.ones(2)),)))
    assert pair[0].shape == (3,) and pair[1].shape == (2,) and not torch.equal(pair[1], torch.ones(2))


def test_a_mask_of_infinities_stays() -> None:
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert torch.equal(drawn(as_inputs(mask))[0][0], mask)
