"""Lightning: the callback's training equals the plain loop's, resumes from a checkpoint, and refuses settings without
effect."""

import warnings

import pytest
import torch
from absent_libraries import run_without
from rounding import assert_same_to_rounding

import headwise
from headwise import DropHead, EntropyPenalty, GatedOutput

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch")

from headwise.lightning import HeadwiseCallback

# Lightning's advice on workers, loggers and intervals is not tested here; headwise's own warnings remain errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning", "ignore:.*LeafSpec:FutureWarning"),
]

BATCHES = [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
# Lightning takes a list for several loaders.
LOADER, FEW = (torch.utils.data.DataLoader(rows, batch_size=None) for rows in (BATCHES, BATCHES[:2]))


class Plain(pl.LightningModule):
    """A tiny encoder under a head; only the encoder holds attention."""

    def __init__(self, manual=False, penalties=False):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 16)
        self.automatic_optimization = not manual
        self.penalties = penalties
        self.losses = []

    def loss(self, batch):
        return (self.head(self.encoder(batch)) - batch).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.automatic_optimization:
            return {"loss": loss, "shown": loss.detach()} if batch_idx % 2 else loss
        optimizer = self.optimizers()
        if self.penalties:
            loss = loss + headwise.handle(self.encoder).loss()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch):
        self.losses.append(float(self.loss(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(*callbacks, **options):
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(callbacks=list(callbacks), **{**settings, **quiet, **options})


METHODS = (DropHead(p=0.4), EntropyPenalty(strength=0.5), GatedOutput())


def plain_loop(accumulate=1):
    """Return the result of a loop with three lines of headwise on the same model, batches and methods."""
    module = Plain()
    handle = headwise.regularize(module.encoder.train(), *METHODS, seed=7)
    optimizer = module.configure_optimizers()
    for first in range(0, len(BATCHES), accumulate):
        optimizer.zero_grad()
        for batch in BATCHES[first : first + accumulate]:
            ((module.loss(batch) + handle.loss()) / accumulate).backward()
        optimizer.step()
        handle.after_step()
    return module, handle


def same(one, other):
    for (key, here), (_, there) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_is_that_of_the_plain_loop(accumulate):
    expected, handle = plain_loop(accumulate)
    module, callback = Plain(), HeadwiseCallback(*METHODS, seed=7)
    own = dict(module.__dict__)
    trainer(callback, accumulate_grad_batches=accumulate).fit(module, LOADER)
    assert callback.regularized.model is module.encoder
    assert callback.regularized.step == 6 // accumulate and callback.regularized.state() == handle.state()
    same(module, expected)
    assert "training_step" in vars(Plain) and "training_step" not in module.__dict__, own.keys()
    assert torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])._optimizer_step_post_hooks == {}


def test_validation_takes_no_part(tmp_path):
    expected, _ = plain_loop()
    module, log = Plain(), headwise.JsonLines(tmp_path / "health.jsonl")
    callback = HeadwiseCallback(*METHODS, seed=7, watch={"every": 2, "log": log, "on_alert": None})
    trainer(callback, val_check_interval=2, num_sanity_val_steps=1).fit(module, LOADER, FEW)
    same(module, expected)
    assert len(module.losses) > 6
    # only of the steps that were trained
    assert {record["step"] for record in callback.watch.records()} == {0, 2, 4} and callback.watch.removed
    # the last validation is that of the regularized model in evaluation
    callback.regularized.model.eval()
    with torch.no_grad():
        assert module.losses[-1] == pytest.approx(float(module.loss(BATCHES[1])), rel=1e-5)


def test_manual_optimization_is_that_of_the_plain_loop_where_it_reads_the_penalties():
    expected, handle = plain_loop()
    module, callback = Plain(manual=True, penalties=True), HeadwiseCallback(*METHODS, seed=7)
    trainer(callback).fit(module, LOADER)
    same(module, expected)
    assert callback.regularized.state() == handle.state()
    following = HeadwiseCallback(*METHODS, seed=7, draws="torch")
    trainer(following).fit(Plain(), LOADER)
    assert following.regularized.state()["draws"] == "torch"


def test_manual_optimization_that_forgets_the_penalties_is_refused():
    module = Plain(manual=True)
    with pytest.raises(RuntimeError, match=r"EntropyPenalty.* did nothing.*headwise.handle\(model\).loss\(\)"):
        trainer(HeadwiseCallback(EntropyPenalty(strength=0.5))).fit(module, LOADER)
    assert "training_step" not in module.__dict__
    # methods without penalties need nothing
    callback = HeadwiseCallback(DropHead(p=0.4))
    trainer(callback).fit(Plain(manual=True), LOADER)
    assert callback.regularized.step == 6


def test_two_optimizers_of_one_model_make_one_step_of_a_batch():
    class Two(Plain):
        def __init__(self):
            super().__init__(manual=True)

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            first, *others = self.encoder.parameters()
            return [
                torch.optim.SGD([first], lr=0.1),
                torch.optim.SGD(others, lr=0.1),
                torch.optim.SGD(self.head.parameters()),
            ]

    callback = HeadwiseCallback(DropHead(p=0.4))
    trainer(callback).fit(Two(), LOADER)
    assert callback.regularized.step == 6


def test_a_resumed_fit_ends_as_one_that_was_never_stopped(tmp_path):
    def run(epochs, **options):
        module = Plain()
        callback = HeadwiseCallback(*METHODS, seed=7, watch={"every": 4, "on_alert": None})
        fitted = trainer(callback, max_epochs=epochs)
        fitted.fit(module, LOADER, **options)
        return module, callback, fitted

    expected, whole, _ = run(2)
    _, _, first = run(1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    module, callback, _ = run(2, ckpt_path=tmp_path / "half.ckpt")
    same(module, expected)
    assert callback.regularized.state() == whole.regularized.state() and callback.regularized.step == 12
    assert {record["step"] for record in callback.watch.records()} == {8}
    # only the checkpoint, with a plain model
    plain = Plain()
    trainer(HeadwiseCallback(*METHODS)).validate(plain, LOADER, ckpt_path=tmp_path / "half.ckpt", verbose=False)
    gates = [parameter for name, parameter in plain.named_parameters() if "gate" in name.lower() or "headwise" in name]
    assert gates and any(gate.abs().sum() > 0 for gate in gates)


def test_the_health_goes_to_the_loggers_of_the_trainer():
    class Kept(pl.loggers.logger.Logger):
        name, version = "kept", 0

        def __init__(self):
            super().__init__()
            self.figures = {}

        def log_metrics(self, metrics, step=None):
            self.figures.setdefault(step, {}).update(metrics)

        def log_hyperparams(self, *args, **kwargs):
            pass

    kept = Kept()
    callback = HeadwiseCallback(watch={"every": 3, "on_alert": None})
    trainer(callback, logger=kept).fit(Plain(), LOADER)
    assert {step for step, figures in kept.figures.items() if any("entropy" in name for name in figures)} == {0, 3}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_watch_gets_the_loss_of_every_step(accumulate, monkeypatch):
    from headwise.health.watching.losses import Losses

    taken = []
    monkeypatch.setattr(Losses, "add", lambda self, step, loss: taken.append(float(loss)))
    callback = HeadwiseCallback(watch={"every": 50, "on_alert": None})
    trainer(callback, accumulate_grad_batches=accumulate).fit(Plain(), LOADER)
    module, losses = Plain(), []
    optimizer = module.configure_optimizers()
    for first in range(0, len(BATCHES), accumulate):
        optimizer.zero_grad()
        loss = sum(module.loss(batch) for batch in BATCHES[first : first + accumulate]) / accumulate
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert taken == pytest.approx(losses, rel=1e-4)


def test_a_step_that_is_skipped_takes_its_penalties_along():
    class Skipping(Plain):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return None if batch_idx == 1 else loss

    callback = HeadwiseCallback(EntropyPenalty(strength=0.5))
    trainer(callback).fit(Skipping(), LOADER)
    assert not callback.regularized.drop_penalties()


class Loose(Plain):
    """Its training step calls the layers directly, not through a forward around them."""

    def loss(self, batch):
        for layer in self.encoder.layers:
            batch = layer(batch)
        return self.head(batch).square().mean()


def test_a_part_whose_forward_is_not_called_is_told():
    with pytest.raises(
        RuntimeError, match="did not call the forward of the TransformerEncoder that was regularized: name"
    ):
        trainer(HeadwiseCallback(DropHead(p=0.4))).fit(Loose(), LOADER)
    with pytest.raises(ValueError, match=r"has no part 'enc' when the Trainer sets up: .* it has encoder, head"):
        trainer(HeadwiseCallback(DropHead(p=0.4), model="enc")).fit(Plain(), LOADER)


def test_two_parts_have_a_callback_each(tmp_path):
    class Pair(Plain):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.second = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def loss(self, batch):
            return self.second(self.encoder(batch)).square().mean()

    def callbacks():
        return [HeadwiseCallback(EntropyPenalty(strength=0.5), model=name) for name in ("encoder", "second")]

    module, both = Pair(), callbacks()
    made = trainer(*both)
    made.fit(module, LOADER)
    assert [len(one.regularized.fitted) for one in both] == [2, 1] and "training_step" not in module.__dict__
    assert not any(one.regularized.drop_penalties() for one in both)
    made.save_checkpoint(tmp_path / "two.ckpt")
    kept = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert [state["progress"]["step"] for state in kept.values()] == [6, 6]


def test_the_whole_module_is_taken_where_its_own_forward_is_called():
    class Whole(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, batch):
            for layer in self.layers:
                batch = layer(batch)
            return batch

        def training_step(self, batch):
            return self(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, callback = Whole(), HeadwiseCallback(DropHead(p=0.4))
    trainer(callback, fast_dev_run=2).fit(module, LOADER)
    assert callback.regularized.model is module and callback.regularized.step == 2
    callback.regularized.remove()


def test_without_lightning_the_remedy_is_named():
    code = "import headwise\nheadwise.DropHead\nimport headwise.lightning"
    done = run_without({"lightning", "pytorch_lightning"}, code)
    assert (
        "ImportError: headwise.lightning needs Lightning, which is not installed: pip install lightning" in done.stderr
    )


@pytest.mark.grid
def test_the_other_name_of_lightning_is_taken_where_a_script_imports_it(tmp_path):
    (tmp_path / "pytorch_lightning.py").write_text("class Callback: pass\n")
    # to be found again, but not imported yet
    code = (
        "import sys\ndel sys.modules['lightning'], sys.modules['pytorch_lightning']\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nimport pytorch_lightning\nfrom headwise.lightning import "
        "HeadwiseCallback\n"
    )
    done = run_without(
        {"lightning", "pytorch_lightning"}, code + "print(issubclass(HeadwiseCallback, pytorch_lightning.Callback))"
    )
    assert done.stdout == "True\n", done.stderr


def test_a_removed_handle_is_left_alone_after_training():
    module, callback = Plain(), HeadwiseCallback(DropHead(p=0.4))
    made = trainer(callback)
    made.fit(module, LOADER)
    callback.regularized.remove()
    made.validate(module, FEW, verbose=False)
    assert callback.regularized.removed
    made.fit_loop.max_epochs = 2
    made.fit(module, LOADER)
    assert not callback.regularized.removed
    assert_same_to_rounding(module.encoder.eval()(BATCHES[0]), module.encoder(BATCHES[0]))
