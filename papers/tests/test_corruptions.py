"""The fifteen corruptions: by their definitions, and by the figures of the program that made CIFAR-10-C."""

import colorsys
import io

import numpy as np
import pytest
from grids import part_of_grid
from headwise_papers.data import camvid, frost
from headwise_papers.data.corruptions import blur, digital, noise, weather
from headwise_papers.data.corruptions.table import CONSTANTS, CORRUPTIONS, SEVERITIES, corrupt
from PIL import Image
from scipy import ndimage

# Mean absolute change of a value, out of 255, at severities 1 to 5, that the program which made CIFAR-10-C
# (hendrycks/robustness, make_cifar_c.py) gives on the images of `street`, with OpenCV 5.0, scikit-image 0.26 and
# ImageMagick 6.9; those of 500 images of CIFAR-10 stand in docs/results/neutreno-robust.
OFFICIAL = {
    "gaussian_noise": (7.657, 11.376, 14.965, 16.767, 18.462),
    "shot_noise": (5.360, 7.522, 11.785, 13.584, 16.525),
    "impulse_noise": (1.325, 2.561, 3.823, 6.358, 8.956),
    "defocus_blur": (1.341, 3.181, 4.754, 6.336, 8.633),
    "glass_blur": (9.434, 9.532, 9.423, 14.838, 14.257),
    "motion_blur": (5.641, 8.382, 10.435, 10.671, 12.301),
    "zoom_blur": (7.016, 7.877, 9.171, 10.346, 11.570),
    "snow": (9.116, 20.369, 21.691, 31.306, 45.100),
    "frost": (27.998, 39.387, 46.647, 41.952, 41.749),
    "fog": (11.762, 23.510, 30.852, 36.729, 44.609),
    "brightness": (9.931, 20.160, 30.142, 39.886, 58.295),
    "contrast": (13.742, 27.616, 33.166, 38.716, 47.040),
    "elastic_transform": (17.562, 16.003, 14.658, 13.295, 11.293),
    "pixelate": (1.503, 2.913, 3.447, 5.332, 7.451),
    "jpeg_compression": (4.374, 5.598, 5.985, 6.395, 6.907),
}
# Those that draw nothing, or for each value, agree closely; of the others 200 images leave the mean less certain.
TOLERANCE = dict.fromkeys(CORRUPTIONS, 0.005) | {
    "impulse_noise": 0.08,
    "glass_blur": 0.02,
    "motion_blur": 0.05,
    "snow": 0.04,
    "frost": 0.08,
    "fog": 0.08,
    "elastic_transform": 0.05,
}
DRAWS = np.random.default_rng(0)


def some(count=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def street(real_data):
    """The middles of 200 street scenes, of the size of CIFAR's images."""
    images, _ = camvid.read(real_data, "train")
    squares = images[:200, :, :, 30:210].permute(0, 2, 3, 1).numpy()
    return np.stack([np.asarray(Image.fromarray(one).resize((32, 32), Image.Resampling.BOX)) for one in squares])


@pytest.fixture(scope="module")
def photographs(real_data):
    return frost.read(real_data)


# of each group one: noise, blur, weather, digital
@pytest.mark.parametrize(
    "name", part_of_grid(CORRUPTIONS, ("gaussian_noise", "defocus_blur", "frost", "elastic_transform"))
)
def test_images_change_as_much_as_the_official_program_changes_them(street, photographs, name):
    found = [corrupt(street, name, severity, seed=0, photographs=photographs) for severity in SEVERITIES]
    change = [np.abs(made.astype(float) - street).mean() for made in found]
    assert change == pytest.approx(OFFICIAL[name], rel=TOLERANCE[name])
    assert all(made.dtype == np.uint8 and made.shape == street.shape for made in found)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_same_seed_gives_the_same_bytes_and_nothing_else_is_drawn_from(name):
    images, photographs = some(), [np.full((200, 250, 3), 100 + n, np.uint8) for n in range(6)]
    state = np.random.get_state()[1].copy()
    first = corrupt(images, name, 3, seed=1, photographs=photographs)
    assert (first == corrupt(images, name, 3, seed=1, photographs=photographs)).all()
    assert (np.random.get_state()[1] == state).all()
    if name not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"):
        other = corrupt(some(40, 5) if name == "frost" else images, name, 3, seed=2, photographs=photographs)
        assert other.shape != first.shape or (other != first).any()


def test_noises_have_their_spread():
    gray = np.full((200, 32, 32, 3), 128, np.uint8)
    for found, deviation in (
        (noise.gaussian(gray, 0.08, DRAWS), 0.08),
        (noise.shot(gray, 100, DRAWS), (128 / 255 / 100) ** 0.5),
    ):
        assert found.mean() == pytest.approx(128, abs=0.2) and found.std() / 255 == pytest.approx(deviation, rel=0.01)
    found = noise.impulse(gray, 0.05, DRAWS)
    assert [(found == value).mean() for value in (0, 255, 128)] == pytest.approx([0.025, 0.025, 0.95], abs=0.002)
    # nothing leaves the range
    assert noise.gaussian(np.full_like(gray, 255), 0.1, DRAWS).max() == 255


def test_a_point_out_of_focus_is_a_disk():
    point = np.zeros((1, 17, 17, 3), np.uint8)
    point[0, 8, 8] = 255
    found = blur.defocus(point, (1.5, 0.1), DRAWS)[0, :, :, 0] / 255
    assert found[7:10, 7:10] == pytest.approx(np.full((3, 3), 1 / 9), abs=1e-6) and found.sum() == pytest.approx(1)
    # a soft rim reaches farther, and the picture's rim is mirrored without repeating it
    soft = blur.defocus(point, (1.0, 0.5), DRAWS)[0, :, :, 0]
    assert soft[8, 10] > 0 and soft[8, 8] > soft[8, 9] > soft[8, 10]
    corner = np.zeros((1, 17, 17, 3), np.uint8)
    corner[0, 0, 1] = 255
    assert blur.defocus(corner, (1.5, 0.1), DRAWS)[0, 0, 0, 0] == pytest.approx(255 * 2 / 9, abs=1e-3)


def test_glass_copies_neighbours_above_and_left_and_leaves_the_first_rows():
    images = some(2)
    found = blur.glass(images, (0.05, 1), DRAWS)
    assert np.rint(found[:, :1]).astype(int).tolist() == images[:, :1].astype(int).tolist()
    for row, column in ((2, 2), (17, 9), (31, 31)):
        near = images[0, row - 1 : row + 1, column - 1 : column + 1].reshape(4, 3).astype(int).tolist()
        assert np.rint(found[0, row, column]).astype(int).tolist() in near
    # a second round reaches pixels two away
    far = blur.glass(images, (0.05, 2), np.random.default_rng(3))
    assert any(
        np.rint(far[0, r, c]).astype(int).tolist() == images[0, r - 2, c].astype(int).tolist()
        for r in range(3, 32)
        for c in range(3, 32)
    )


def test_motion_drags_to_one_side_along_the_angle():
    point = np.zeros((3, 33, 33, 3), np.uint8)
    point[:, 16, 16] = 255
    level, down, slant = blur.drag(point, 6, 2, np.array([0.0, 90.0, 45.0]))[..., 0]
    weights = np.exp(-(np.arange(13) ** 2) / 8)
    weights = np.floor(255 * weights / weights.sum() + 1e-9)
    assert level[16, 4:17][::-1].tolist() == weights.tolist() and np.count_nonzero(level[:16]) == 0
    assert down[4:17, 16][::-1].tolist() == weights.tolist()
    assert slant[15, 15] > 0 and np.count_nonzero(slant.diagonal()[:17]) == np.count_nonzero(slant)
    # at the rim its pixels repeat: a picture of one value stays
    assert (blur.drag(np.full((1, 32, 32, 1), 77, np.uint8), 9, 2.5, np.array([33.0])) >= 76).all()


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.06, 1.25, 1.75, 2.25])
def test_zooming_in_is_scipys_zoom_of_the_middle(factor):
    (image,) = some(1).astype(float)
    part = int(np.ceil(32 / factor))
    start = (32 - part) // 2
    large = ndimage.zoom(image[start : start + part, start : start + part], (factor, factor, 1), order=1)
    start = (len(large) - 32) // 2
    assert blur.zoom_in(image[None], factor)[0] == pytest.approx(
        large[start : start + 32, start : start + 32], abs=1e-9
    )


def test_zooms_are_averaged_with_the_image_and_counted_as_rounding_has_it():
    images = some(1)
    factors = [1 + n / 100 for n in range(7)]
    mean = np.mean([images.astype(float), *(blur.zoom_in(images, factor) for factor in factors)], axis=0)
    assert blur.zoom(images, 1.06, DRAWS) == pytest.approx(mean, abs=1e-6)
    assert [len(np.arange(1, stop, 0.01)) for stop in CONSTANTS["zoom_blur"][1]] == [7, 12, 16, 21, 26]


def test_brightness_raises_the_value_of_hue_saturation_and_value():
    images = some(1)
    images[0, 0, :3] = [[0, 0, 0], [255, 255, 255], [7, 7, 7]]
    found = weather.brightness(images, 0.2, DRAWS)[0].reshape(-1, 3)
    for pixel, other in zip(images.reshape(-1, 3)[:200] / 255, found[:200]):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        assert 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1))) == pytest.approx(
            other, abs=1e-9
        )


def test_fog_is_a_cloud_in_the_unit_range_that_keeps_the_brightest_value_within_reach():
    clouds = weather.plasma(5, 32, 2.0, np.random.default_rng(0))
    assert clouds.shape == (5, 32, 32) and clouds.min() == 0 and clouds.max() == 1
    # a faster decay is smoother
    rough, smooth = (
        np.abs(np.diff(weather.plasma(200, 32, decay, np.random.default_rng(1)), axis=1)).mean()
        for decay in (1.75, 3.0)
    )
    assert smooth < 0.8 * rough
    black = np.zeros((2, 32, 32, 3), np.uint8)
    black[:, 0, 0] = 51
    assert weather.fog(black, (1, 2), np.random.default_rng(2)).max() <= 51 + 1e-9


def test_frost_lies_a_part_of_one_of_the_first_five_photographs_on_each_image():
    photographs = [np.full((200, 300, 3), 10 * n, np.uint8) for n in range(6)]
    found = weather.frost(
        np.full((300, 32, 32, 3), 100, np.uint8), (0.5, 1.0), np.random.default_rng(0), photographs=photographs
    )
    assert sorted(set(found[:, 0, 0, 0].tolist())) == [50, 60, 70, 80, 90]
    assert (found == found[:, :1, :1, :1]).all()
    big = np.arange(600 * 900 * 3, dtype=np.uint64).astype(np.uint8).reshape(600, 900, 3)
    assert weather._fifth(big).shape == (120, 180, 3) and (weather._fifth(big)[3, 4] == big[17, 22]).all()


def test_snow_whitens_and_its_flakes_lie_twice():
    black = np.zeros((50, 32, 32, 3), np.uint8)
    found = weather.snow(black, (0.1, 0.2, 1, 0.5, 10, 4, 0.9), np.random.default_rng(0))
    # a tenth of one half lies on black, and flakes on top, the same after half a turn
    assert found.min() == pytest.approx(255 * 0.05) and found == pytest.approx(found[:, ::-1, ::-1])
    assert 0.05 < (found > 20).mean() < 0.95
    assert (found[..., 0] == found[..., 1]).all()


def test_contrast_pulls_to_the_mean_of_each_colour():
    images = some(2)
    found = digital.contrast(images, 0.15, DRAWS)
    assert found.mean((1, 2)) == pytest.approx(images.mean((1, 2))) and found.std() < 0.2 * images.std()


def test_an_elastic_warp_without_shifts_is_the_image_and_follows_its_map():
    images = some(2)
    assert digital.elastic(images, (0, 0, 0.0), np.random.default_rng(0)) == pytest.approx(
        images.astype(float), abs=1e-9
    )
    matrix, start = digital._affine(32, 2.0, np.random.default_rng(4))
    after = np.array([[1, 1], [-1, 1], [-1, -1]]) * 10 + 16 + np.random.default_rng(4).uniform(-2, 2, (3, 2))
    assert (matrix @ after.T).T + start == pytest.approx(np.array([[26.0, 26], [6, 26], [6, 6]]))
    ramp = np.broadcast_to(np.arange(32)[None, :, None, None] * 4, (20, 32, 32, 3)).astype(np.uint8)
    waves = digital.elastic(ramp, (3.2, 0.96, 0.0), np.random.default_rng(1))
    # a wave moves a ramp by its length times the deviation of smoothed noise
    moved = (waves - ramp)[:, 8:24, 8:24, 0] / 4
    smooth = 3.2 * ndimage.gaussian_filter(
        np.random.default_rng(9).uniform(-1, 1, (500, 32, 32)), (0, 0.96, 0.96), truncate=3
    )
    assert moved.std() == pytest.approx(smooth.std(), rel=0.05)


def test_coarse_pixels_and_jpeg_are_pillows():
    images = some(2)
    small = Image.fromarray(images[1]).resize((20, 20), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    assert (corrupt(images, "pixelate", 5, seed=0)[1] == np.asarray(small)).all()
    packed = io.BytesIO()
    Image.fromarray(images[1]).save(packed, "JPEG", quality=40)
    assert (corrupt(images, "jpeg_compression", 5, seed=0)[1] == np.asarray(Image.open(packed))).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "fogg"}, "There is no corruption 'fogg'; the corruptions are gaussian_noise"),
        ({"severity": 6}, "severity 6: the severities are 1, 2, 3, 4, 5"),
        ({"images": some().astype(float)}, r"images float64 \(3, 32, 32, 3\): bytes of shape"),
        ({"images": some()[:, :16]}, r"images uint8 \(3, 16, 32, 3\)"),
        ({"name": "frost"}, "frost blends photographs into images: pass photographs"),
        (
            {"name": "frost", "photographs": [np.zeros((400, 160, 3), np.uint8)] * 6},
            "a photograph of frost is 32 pixels",
        ),
    ],
)
def test_what_cannot_be_corrupted_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        corrupt(**({"images": some(), "name": "fog", "severity": 1, "seed": 0} | change))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_image_is_no_image(name):
    assert corrupt(some(0), name, 3, seed=0, photographs=[np.zeros((400, 400, 3), np.uint8)] * 6).shape == (
        0,
        32,
        32,
        3,
    )
