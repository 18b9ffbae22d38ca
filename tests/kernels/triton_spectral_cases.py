"""Runs the Triton kernels of stacked weights: interpreted beside fp64 in PyTorch, or compiled for GPUs not here.

TRITON_INTERPRET=1 python tests/kernels/triton_spectral_cases.py run      prints for each case its largest errors
python tests/kernels/triton_spectral_cases.py compile                     prints for each kernel what it needs
"""

import itertools
import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.projections import spectral_group, triton_spectral
from headwise.attend.projections.spectral_group import Tiling, dot_of, iterated, ratio_of, slopes_of, stacked

# axis of the blocks, their size, the weight's other size, and the number of blocks of each weight
SHAPES = {
    "one matrix of q, k, v, and an output": (0, 24, 40, [3, 1, 2]),
    "stored (in, out)": (1, 40, 150, [3, 1, 1]),
    "more than a tile": (0, 65, 300, [1]),
}


def weights_of(shape, dtype):
    """Return random weights, and their tilings."""
    axis, size, other, counts = shape
    made = [torch.randn((n * size, other) if axis == 0 else (other, n * size)).to(dtype) for n in counts]
    return made, [Tiling(axis, size, n, flipped=axis == 1) for n in counts]


def leading_of(stack):
    """Return rounded vectors that are near the leading ones, with other norms."""
    left, _, right = torch.linalg.svd(stack.double(), full_matrices=False)
    return (0.9 * (x + 0.01 * torch.randn_like(x)).float() for x in (left[..., 0], right[:, 0]))


def relative(found, right):
    """Return the largest error over the largest number."""
    return ((found.double() - right).abs().max() / right.abs().max()).item()


def flat(stack, tilings):
    """Return blocks as the kernels write them."""
    return spectral_group._flat(stack, tilings[0].axis, [tiling.blocks for tiling in tilings])


def run():
    """Print the errors of weights, sigma, gradients and vectors relative to their largest number."""
    torch.manual_seed(0)
    cases = itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16), (True, False))
    for (name, shape), dtype, learned in cases:
        weights, tilings = weights_of(shape, dtype)
        stack, counts = stacked(weights, tilings), shape[3]
        a, b = leading_of(stack)
        gamma = torch.rand(len(stack)) + 0.5 if learned else None
        made, sigma, norm = triton_spectral.scale(stack, a, b, gamma, shape[0], counts)
        wide = stack.double()
        dot64, norm64 = dot_of(wide, a, b)
        ratio64, sigma64 = ratio_of(gamma, dot64, norm64), dot64 / norm64
        errors = {
            "weights": relative(made, flat(wide * ratio64.view(-1, 1, 1), tilings)),
            "sigma": relative(sigma, sigma64),
        }
        above = stacked([torch.randn_like(w) for w in weights], tilings)
        slopes, inner = triton_spectral.slopes(above, stack, a, b, gamma, sigma, norm, shape[0], counts)
        slopes64, inner64 = slopes_of(above.double(), wide, a, b, ratio64, dot64)
        errors |= {"slopes": relative(slopes, flat(slopes64, tilings)), "inner": relative(inner, inner64 / sigma64)}
        for flipped in (False, True):
            start = a if flipped else b
            pairs = zip(triton_spectral.iteration(stack, start, flipped), iterated(wide, start, flipped), strict=True)
            errors[f"vectors, flipped {flipped}"] = max(relative(*pair) for pair in pairs)
        print(json.dumps({"case": name, "dtype": str(dtype), "learned": learned, **errors}), flush=True)
        # alone, a weight has the bits that it has in a group
        part = stacked(weights[:1], tilings[:1])
        alone = triton_spectral.scale(
            part, a[: len(part)], b[: len(part)], None if gamma is None else gamma[: len(part)], shape[0], counts[:1]
        )
        assert torch.equal(alone[0], made[: weights[0].numel()])


def compile_all():
    """Compile what a step of GPT-2 small launches, in both layouts."""
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            for dtype, axis in itertools.product((torch.float32, torch.bfloat16), (0, 1)):
                weights, tilings = weights_of((axis, 768, 768, [3, 1]), dtype)
                stack = stacked(weights, tilings)
                a = b = torch.randn(4, 768)
                out, sigma, norm = triton_spectral.scale(stack, a, b, a[:, 0].contiguous(), axis, [3, 1])
                triton_spectral.slopes(stack, stack, a, b, None, sigma, norm, axis, [3, 1])
                triton_spectral.iteration(stack, b, axis == 1)
                assert len(out) == stack.numel()
        for line in made:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "compile": compile_all}[sys.argv[1]]()
