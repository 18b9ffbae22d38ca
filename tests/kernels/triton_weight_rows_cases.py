"""Runs the Triton kernels of stacked rows: interpreted beside fp64 in PyTorch, or compiled for GPUs not here.

TRITON_INTERPRET=1 python tests/kernels/triton_weight_rows_cases.py run   prints for each case its largest errors
python tests/kernels/triton_weight_rows_cases.py compile                  prints for each kernel what it needs
"""

import itertools
import json
import sys

import torch
from triton_process import compiled_instead_of_launched

from headwise.attend.projections import triton_weight_rows
from headwise.attend.projections.weight_rows import _flat, stacked

# the axis of the outputs, the number of inputs, and the rows of each weight
SHAPES = {"one matrix of q, k, v, and an output": (0, 40, [72, 24]), "stored (in, out)": (1, 150, [75, 5, 33])}


def weights_of(axis, inputs, counts, dtype):
    """Return random weights."""
    return [torch.randn((n, inputs) if axis == 0 else (inputs, n)).to(dtype) for n in counts]


def relative(found, right):
    """Return the largest error over the largest number."""
    return ((found.double() - right).abs().max() / right.abs().max()).item()


def run():
    """Print the errors of weights and gradients relative to their largest number."""
    torch.manual_seed(0)
    for (name, (axis, inputs, counts)), dtype in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        weights = weights_of(axis, inputs, counts, dtype)
        stack, gain = stacked(weights, axis), torch.rand(sum(counts)) + 0.5
        above = stacked(weights_of(axis, inputs, counts, dtype), axis)
        made = triton_weight_rows.scaled(stack, gain, axis, counts)
        slopes, inner = triton_weight_rows.slopes(above, stack, gain, axis, counts)
        wide, gain64 = stack.double().requires_grad_(), gain.double().requires_grad_()
        made64 = gain64[:, None] * wide / wide.norm(dim=1, keepdim=True)
        slopes64, inner64 = torch.autograd.grad(made64, (wide, gain64), above.double())
        errors = {
            "weights": relative(made, _flat(made64.detach(), axis, counts)),
            "slopes": relative(slopes, _flat(slopes64, axis, counts)),
            "inner": relative(inner, inner64),
        }
        print(json.dumps({"case": name, "dtype": str(dtype), **errors}), flush=True)
        # alone, a weight has the bits that it has in a group
        first = slice(counts[0], counts[0] + counts[1])
        alone = triton_weight_rows.scaled(stacked(weights[1:2], axis), gain[first], axis, counts[1:2])
        at = weights[0].numel()
        assert torch.equal(alone, made[at : at + weights[1].numel()])


def compile_all():
    """Compile what a step of GPT-2 small launches, in both layouts."""
    for capability in (80, 90, 100):
        with compiled_instead_of_launched(capability) as made:
            for dtype, axis in itertools.product((torch.float32, torch.bfloat16), (0, 1)):
                stack = stacked(weights_of(axis, 768, [2304, 768], dtype), axis)
                triton_weight_rows.scaled(stack, torch.ones(3072), axis, [2304, 768])
                triton_weight_rows.slopes(stack, stack, torch.ones(3072), axis, [2304, 768])
        for line in made:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    {"run": run, "compile": compile_all}[sys.argv[1]]()
