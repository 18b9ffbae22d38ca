"""A pickled regularized model works in another process, which has replaced no attention function yet."""

import pickle
import subprocess
import sys

import pytest
import torch
from small_models import HOSTS, fresh

import headwise

READ = """
import pickle, sys
import torch

net, args, kwargs, want = pickle.load(open(sys.argv[1], "rb"))
import headwise

for _ in range(2):
    out = net(*args, **kwargs)
    torch.testing.assert_close(out if isinstance(out, torch.Tensor) else out[0], want, rtol=1e-4, atol=1e-5)
out = net.train()(*args, **kwargs)
out = out if isinstance(out, torch.Tensor) else out[0]
(out.square().mean() + headwise.handle(net).loss()).backward()
headwise.handle(net).after_step()
"""


@pytest.mark.parametrize("host", ["own", "torch", "llama"])
def test_a_regularized_model_works_in_another_process(host, tmp_path):
    net = fresh(HOSTS[host])
    args, kwargs = HOSTS[host].batch()
    headwise.regularize(net, headwise.NeuTRENO(), headwise.EntropyPenalty(), example=kwargs or tuple(args))
    net.eval()
    out = net(*args, **kwargs)
    want = (out if isinstance(out, torch.Tensor) else out[0]).detach()
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps((net, args, kwargs, want)))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
