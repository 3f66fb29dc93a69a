"""Random changes of images: closed forms, torchvision with the same parameters, and their bits."""

import colorsys
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from engine.data.augmentation.augmenting import APPLIED, Augmenting
from engine.data.augmentation.random_numbers import RowRandom, _mixed, key_of
from glasshouse.spec.augmentation import Augment
from tests.unit.engine.vision import functional

ROWS = torch.arange(7) * 5 + 3
KEY = key_of(1, 2, "image", 0)
MODES = ("constant", "edge", "reflect", "symmetric")
READ = TypeAdapter(Augment)

EACH: list[dict[str, Any]] = [
    {"type": "RandomHorizontalFlip"},
    {"type": "RandomVerticalFlip", "args": {"p": 0.3}},
    *(
        {"type": "RandomCrop", "args": {"padding": [1, 2, 3, 4], "padding_mode": mode}}
        for mode in MODES
    ),
    {"type": "RandomRotation", "args": {"degrees": 30, "interpolation": "bilinear"}},
    {"type": "RandomAffine", "args": {"degrees": 5, "translate": [0.2, 0.1], "fill": 0.3}},
    {
        "type": "RandomAffine",
        "args": {"degrees": [0, 90], "scale": [0.5, 2], "shear": [-9, 9, 0, 20]},
    },
    {
        "type": "ColorJitter",
        "args": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2},
    },
    {"type": "RandomErasing", "args": {"p": 0.7}},
    {"type": "RandomErasing", "args": {"value": "random"}},
    {"type": "GaussianNoise"},
]


def images(height: int = 13, width: int = 17, channels: int = 3, rows: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(rows, channels, height, width, generator=generator)


def chance(rows: Tensor = ROWS) -> RowRandom:
    return RowRandom(KEY, rows)


def changed(x: Tensor, kind: str, rows: Tensor = ROWS, **args: Any) -> Tensor:
    item = READ.validate_json(json.dumps({"type": kind, "args": args}))
    before = x.clone()
    made = APPLIED[kind](x, RowRandom(KEY, rows), item.args)
    assert torch.equal(x, before)
    assert made.shape == x.shape
    assert made.dtype == torch.float32
    return made


# --- chance ----------------------------------------------------------------------------------


def test_bits_are_mixed_as_in_the_published_generator():
    """The first numbers of splitmix64 with the seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    stride = 0x9E3779B97F4A7C15 - 2**64
    mine = _mixed(torch.arange(1, 4) * stride)
    assert [item % 2**64 for item in mine.tolist()] == published


def test_numbers_are_even_and_those_of_different_rows_and_keys_have_nothing_in_common():
    rows = torch.arange(1000)
    found = [
        RowRandom(key_of(seed, epoch, name, place), rows).uniform(50)
        for seed, epoch, name, place in ((0, 0, "x", 0), (1, 0, "x", 0), (0, 1, "x", 0))
    ]
    found += [RowRandom(key_of(0, 0, "y", 0), rows).uniform(50)]
    found += [RowRandom(key_of(0, 0, "x", 1), rows).uniform(50)]
    for numbers in found:
        assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
        counts = torch.histc(numbers, 20, 0, 1)
        assert float(((counts - 2500).square() / 2500).sum()) < 50  # chi square of 19, p < 1e-4
    flat = torch.stack([item.flatten() for item in found])
    assert float((flat.corrcoef() - torch.eye(5)).abs().max()) < 0.02
    along = found[0]
    for one, other in ((along[:-1], along[1:]), (along[:, :-1], along[:, 1:])):
        both = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(both.corrcoef()[0, 1])) < 0.02


def test_a_row_has_the_same_numbers_in_whatever_company():
    whole, alone = chance(), chance(ROWS[2:3])
    for number in (1, 3, 2):
        assert torch.equal(whole.uniform(number)[2:3], alone.uniform(number))
    assert not torch.equal(chance().uniform(1), chance().uniform(2)[:, 1:])


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    numbers = RowRandom(KEY, torch.arange(2000)).normal(100, torch.device("cpu"))
    assert numbers.dtype == torch.float32
    assert bool(numbers.isfinite().all())
    moments = [float((numbers**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)


# --- a row is what it is, whatever batch it is in ------------------------------------------------


@pytest.mark.parametrize("item", EACH, ids=lambda item: item["type"])
def test_a_row_is_changed_to_the_same_bits_alone_in_parts_and_in_another_order(item):
    """For sizes at which vectors of a processor have a rest."""
    x, rows = images(rows=37), torch.arange(37) * 11
    parsed = READ.validate_json(json.dumps(item))

    def made(chosen: Tensor) -> Tensor:
        wanted = Augmenting(3, {"image": (parsed, parsed)})
        return wanted.changes(rows[chosen], 1)["image"](x[chosen])

    whole = made(torch.arange(37))
    assert not torch.equal(whole, x)
    alone = [torch.tensor([number]) for number in range(37)]
    for part in (torch.arange(0, 19), torch.arange(19, 37), torch.arange(37).flip(0), *alone):
        assert torch.equal(made(part), whole[part])


def test_seed_epoch_field_and_place_all_count():
    x, flip = images(rows=64), READ.validate_json('{"type": "GaussianNoise"}')
    rows = torch.arange(64)
    found = [
        Augmenting(seed, {name: (flip,)}).changes(rows, epoch)[name](x)
        for seed, epoch, name in ((0, 0, "x"), (1, 0, "x"), (0, 1, "x"), (0, 0, "y"))
    ]
    twice = Augmenting(0, {"x": (flip, flip)}).changes(rows, 0)["x"](x)
    found += [twice - found[0] + x]
    for number, one in enumerate(found):
        for other in found[:number]:
            assert float((one - other).abs().mean()) > 0.05


# --- flips and crops -------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "axis"), [("RandomHorizontalFlip", 3), ("RandomVerticalFlip", 2)])
def test_a_flip_flips_rows_with_its_probability(kind, axis):
    x, rows = images(rows=1000), torch.arange(1000)
    assert torch.equal(changed(x, kind, rows, p=0), x)
    assert torch.equal(changed(x, kind, rows, p=1), x.flip(axis))
    made = changed(x, kind, rows, p=0.3)
    is_flipped = (made != x).flatten(1).any(1)
    assert torch.equal(made[is_flipped], x.flip(axis)[is_flipped])
    assert int(is_flipped.sum()) == pytest.approx(300, abs=45)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [2, [3, 1], [4, 0, 1, 5]])
def test_a_crop_is_a_part_of_what_numpy_pads(mode, padding):
    x = images(6, 8)
    filled = {"constant_values": 0.25} if mode == "constant" else {}
    args = {"fill": 0.25} if mode == "constant" else {}
    made = changed(x, "RandomCrop", padding=padding, padding_mode=mode, **args)
    left, top, right, bottom = {int: lambda p: (p,) * 4, list: lambda p: (p * 2)[:4]}[
        type(padding)
    ](padding)
    wide: Any = np.pad(
        x.numpy(), ((0, 0), (0, 0), (top, bottom), (left, right)), mode=mode, **filled
    )
    drawn = chance().uniform(2)
    for row, (down, across) in enumerate(drawn.tolist()):
        y, z = math.floor(down * (top + bottom + 1)), math.floor(across * (left + right + 1))
        assert np.array_equal(made[row].numpy(), wide[row, :, y : y + 6, z : z + 8])


def test_all_places_of_a_crop_come_and_each_channel_has_its_fill():
    x = images(1, 1, rows=2000)
    made = changed(x, "RandomCrop", torch.arange(2000), padding=1, fill=[0.5, 0.25, 2.0])
    is_own = (made == x).flatten(1).all(1)
    assert int(is_own.sum()) == pytest.approx(2000 / 9, abs=60)
    fill = torch.tensor([0.5, 0.25, 2.0])
    assert torch.equal(made[~is_own].flatten(1), fill.expand(int((~is_own).sum()), 3))


# --- rotations -------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_quarters_of_a_turn_are_those_of_torch(interpolation):
    square, wide = images(9, 9), images(4, 6)
    for quarters in range(4):
        ends = [90 * quarters, 90 * quarters]
        made = changed(square, "RandomRotation", degrees=ends, interpolation=interpolation)
        torch.testing.assert_close(made, square.rot90(quarters, (2, 3)), rtol=0, atol=1e-5)
        back = [-90 * quarters, -90 * quarters]
        clockwise = changed(square, "RandomAffine", degrees=back, interpolation=interpolation)
        torch.testing.assert_close(clockwise, made)
    turned = changed(wide, "RandomRotation", degrees=[180, 180], interpolation=interpolation)
    torch.testing.assert_close(turned, wide.flip(2, 3), rtol=0, atol=1e-5)


def test_a_way_is_one_of_whole_pixels_and_what_comes_in_is_filled():
    x = images(10, 20)
    made = changed(x, "RandomAffine", degrees=0, translate=[0.2, 0.3], fill=[7, 8, 9])
    wide = torch.nn.functional.pad(x, (4, 4, 3, 3), value=-1)
    fill = torch.tensor([7.0, 8.0, 9.0])[:, None, None]
    wide = torch.where(wide == -1, fill, wide)
    drawn = chance().uniform(3)[:, 1:]
    for row, (x_part, y_part) in enumerate(drawn.tolist()):
        right, down = round(-4 + 8 * x_part), round(-3 + 6 * y_part)
        there = wide[row, :, 3 - down : 13 - down, 4 - right : 24 - right]
        assert torch.equal(made[row], there)


def test_an_image_scaled_by_two_shows_each_pixel_twice():
    x = images(8, 12)
    made = changed(x, "RandomAffine", degrees=0, scale=[2, 2])
    middle = x[:, :, 2:6, 3:9].repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.equal(made, middle)


def test_a_shear_of_45_degrees_moves_each_line_by_its_distance_from_the_middle():
    x = images(5, 5)
    made = changed(x, "RandomAffine", degrees=0, shear=[45, 45])
    for y in range(5):
        line = torch.zeros_like(x[:, :, y])
        for place in range(5):
            source = place + (y - 2)
            if 0 <= source < 5:
                line[:, :, place] = x[:, :, y, source]
        torch.testing.assert_close(made[:, :, y], line)


# --- colours ---------------------------------------------------------------------------------


def test_colors_at_the_ends_of_their_factors_are_closed_forms():
    x = images()
    grey = 0.2989 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    mean = grey.mean((1, 2, 3), keepdim=True).expand_as(x)
    forms = {
        "brightness": {0.0: torch.zeros_like(x), 2.0: (2 * x).clamp(max=1)},
        "contrast": {0.0: mean, 2.0: (2 * x - mean).clamp(0, 1)},
        "saturation": {0.0: grey.expand_as(x), 2.0: (2 * x - grey).clamp(0, 1)},
        "hue": {1 / 3: x.roll(1, 1), -1 / 3: x.roll(-1, 1)},
    }
    for name, known in forms.items():
        for factor, expected in known.items():
            made = changed(x, "ColorJitter", **{name: [factor, factor]})
            torch.testing.assert_close(made, expected, rtol=0, atol=2e-6)


def test_a_turned_hue_is_that_of_the_standard_library_pixel_by_pixel():
    x = images(4, 5)
    x[0, :, 0, 0], x[0, :, 0, 1], x[0, :, 0, 2] = 0.0, 1.0, 0.5
    x[0, :2, 1, 1] = 0.75
    shift = 0.23
    made = changed(x, "ColorJitter", hue=[shift, shift])
    for row, y, z in np.ndindex(7, 4, 5):
        hue, saturation, value = colorsys.rgb_to_hsv(*x[row, :, y, z].tolist())
        expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        assert made[row, :, y, z].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_mean_grey_of_a_large_image_has_the_same_bits_alone():
    """Threads share the sum of one row, and not those of many."""
    x, before = torch.rand(9, 1, 301, 307), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = changed(x, "ColorJitter", torch.arange(9), contrast=[0, 0])
        for row in range(9):
            one = slice(row, row + 1)
            alone = changed(x[one], "ColorJitter", torch.arange(9)[one], contrast=[0, 0])
            assert torch.equal(alone, whole[one])
    finally:
        torch.set_num_threads(before)


def test_one_channel_is_its_own_grey():
    x = images(channels=1)
    made = changed(x, "ColorJitter", contrast=[0, 0])
    torch.testing.assert_close(made, x.mean((1, 2, 3), keepdim=True).expand_as(x))


def test_the_order_of_colors_is_drawn_by_row():
    """Lighter and then grey is not grey and then lighter, where what is above white is cut off."""
    x = torch.full((200, 3, 1, 1), 0.8)
    rows = torch.arange(200)
    x[:, 2] = 0.1
    made = changed(x, "ColorJitter", rows, brightness=[2, 2], saturation=[0, 0])
    assert 70 < int((made[:, 0, 0, 0] == made[0, 0, 0, 0]).sum()) < 130
    assert made[:, 0, 0, 0].unique().numel() == 2


# --- patches ---------------------------------------------------------------------------------


def test_what_is_erased_is_one_rectangle_of_the_area_and_shape_that_are_allowed():
    rows = torch.arange(400)
    x = torch.ones(400, 1, 40, 60)
    made = changed(x, "RandomErasing", rows, p=0.5, scale=[0.1, 0.2], ratio=[0.5, 2], value=0)
    is_erased = (made == 0)[:, 0]
    hit = is_erased.flatten(1).any(1)
    assert int(hit.sum()) == pytest.approx(200, abs=40)
    for one in is_erased[hit]:
        high, wide = int(one.any(1).sum()), int(one.any(0).sum())
        assert int(one.sum()) == high * wide
        assert 0.1 - 0.02 < high * wide / 2400 < 0.2 + 0.02
        assert 0.5 - 0.06 < high / wide < 2 + 0.2
        assert int(one.any(1).int().diff().abs().sum()) <= 2
    assert bool(is_erased.any(0).any(0).all())
    assert bool(is_erased.any(0).any(1).all())


def test_a_rectangle_that_never_fits_erases_nothing():
    x = images()
    assert torch.equal(changed(x, "RandomErasing", p=1, scale=[1, 1], ratio=[1, 1]), x)


def test_erased_values_are_those_that_were_asked_for():
    x = images(20, 20)
    for value in (0.5, [0.1, 0.2, 0.3]):
        made = changed(x, "RandomErasing", p=1, value=value)
        new = torch.tensor(value).expand(3)
        for row in range(7):
            is_new = (made[row] != x[row]).any(0)
            assert torch.equal(made[row][:, is_new].unique(dim=1)[:, 0], new)
    wide = torch.full((300, 1, 20, 20), 9.0)
    made = changed(wide, "RandomErasing", torch.arange(300), p=1, value="random")
    drawn = made[made != 9.0]
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert float(drawn.std()) == pytest.approx(1, abs=0.03)


def test_noise_has_its_mean_and_its_deviation_and_is_cut_off_where_that_is_asked():
    x = torch.full((50, 1, 40, 40), 0.5)
    rows = torch.arange(50)
    noise = changed(x, "GaussianNoise", rows, mean=0.25, sigma=2, clip=False) - 0.5
    assert float(noise.mean()) == pytest.approx(0.25, abs=0.03)
    assert float(noise.std()) == pytest.approx(2, abs=0.03)
    cut = changed(x, "GaussianNoise", rows, mean=0.25, sigma=2)
    torch.testing.assert_close(cut, (noise + 0.5).clamp(0, 1))


# --- torchvision, with the same parameters -------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill", [0.0, [0.5, 0.2, 0.9]])
@pytest.mark.parametrize("center", [None, [3, 4]])
def test_rotations_and_affine_changes_are_those_of_torchvision(interpolation, fill, center):
    library = functional()
    mode = library.InterpolationMode(interpolation)
    both = {"interpolation": interpolation, "fill": fill, "center": center}
    filled = fill if isinstance(fill, list) else [fill] * 3
    x = images()
    turned = changed(x, "RandomRotation", degrees=40, **both)
    moved = changed(
        x,
        "RandomAffine",
        degrees=40,
        translate=[0.2, 0.3],
        scale=[0.5, 1.5],
        shear=[-10, 10, -20, 20],
        **both,
    )
    angles, drawn = chance().uniform(1), chance().uniform(6)
    for row in range(7):
        angle = -40 + 80 * float(angles[row, 0])
        theirs = library.rotate(x[row], angle, mode, center=center, fill=filled)
        torch.testing.assert_close(turned[row], theirs, rtol=0, atol=1e-5)
        u = drawn[row].tolist()
        theirs = library.affine(
            x[row],
            -40 + 80 * u[0],
            [round(-3.4 + 6.8 * u[1]), round(-3.9 + 7.8 * u[2])],
            0.5 + u[3],
            [-10 + 20 * u[4], -20 + 40 * u[5]],
            mode,
            fill=filled,
            center=center,
        )
        torch.testing.assert_close(moved[row], theirs, rtol=0, atol=1e-5)


def test_colors_are_those_of_torchvision():
    library = functional()
    x = images()
    made = changed(x, "ColorJitter", brightness=0.4, contrast=0.5, saturation=0.6, hue=0.3)
    for row, drawn in enumerate(chance().uniform(8)):
        b, c, s, h = drawn[:4].tolist()
        steps = [
            (library.adjust_brightness, 0.6 + 0.8 * b),
            (library.adjust_contrast, 0.5 + c),
            (library.adjust_saturation, 0.4 + 1.2 * s),
            (library.adjust_hue, -0.3 + 0.6 * h),
        ]
        theirs = x[row]
        for number in drawn[4:].argsort().tolist():
            change, factor = steps[number]
            theirs = change(theirs, factor)
        torch.testing.assert_close(made[row], theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_flips_crops_and_erasing_are_those_of_torchvision(mode):
    library = functional()
    x = images()
    torch.testing.assert_close(changed(x, "RandomHorizontalFlip", p=1), library.hflip(x))
    torch.testing.assert_close(changed(x, "RandomVerticalFlip", p=1), library.vflip(x))
    padding = [1, 2, 3, 4]
    made = changed(x, "RandomCrop", padding=padding, padding_mode=mode)
    for row, (down, across) in enumerate(chance().uniform(2).tolist()):
        y, z = int(down * 7), int(across * 5)
        theirs = library.crop(library.pad(x[row], padding, 0, mode), y, z, 13, 17)
        assert torch.equal(made[row], theirs)
    made = changed(x, "RandomErasing", p=1, value=[0.1, 0.2, 0.3], scale=[0.1, 0.2])
    for row, u in enumerate(chance().uniform(23).tolist()):
        high, wide = next(
            both
            for area, ratio in zip(u[1:11], u[11:21], strict=True)
            for size in [(0.1 + 0.1 * area) * 13 * 17]
            for by in [math.exp(math.log(0.3) + (math.log(3.3) - math.log(0.3)) * ratio)]
            for both in [(round(math.sqrt(size * by)), round(math.sqrt(size / by)))]
            if both[0] < 13 and both[1] < 17
        )
        top, left = int(u[21] * (13 - high + 1)), int(u[22] * (17 - wide + 1))
        value = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
        assert torch.equal(made[row], library.erase(x[row], top, left, high, wide, value))
