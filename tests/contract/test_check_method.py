"""check_method: a stranger's method that breaks one promise is caught by the name of the check; a right one passes."""

import pytest
import torch

import headwise
from headwise.attend.core.method import REGISTRY
from headwise.testing import check_method
from headwise.testing.contract import CHECKS


class Right(headwise.Method):
    """Scales the weights, in both forms."""

    share: float = 0.5
    neutral = {"share": 1.0}
    live = ("share",)
    rowwise = True

    def weights(self, a, call):
        return (call.value(self, "share") * a).to(a.dtype)

    def attend(self, attend, call):
        return lambda v: (call.value(self, "share") * attend(v)).to(v.dtype)


class Undeclared(headwise.Method):
    """Draws without saying so."""

    neutral = {}

    def output(self, o, call):
        return o * (call.uniform_draw(self, o.shape) > 0.5)


class NeverCalled(headwise.Method):
    """Has a fast form of nothing."""

    neutral = {}

    def attend(self, attend, call):
        return attend


class Misspelled(headwise.Method):
    """Names its stage wrongly."""

    neutral = {}

    def weigths(self, a, call):
        return a * 0.5


class WrongText(headwise.Method):
    """Writes what cannot be read."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def __repr__(self):
        return "WrongText(shares=1)"

    def weights(self, a, call):
        return self.share * a


class HoldsMore(headwise.Method):
    """Keeps something on the instance."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def check(self):
        object.__setattr__(self, "calls", 0)

    def weights(self, a, call):
        return self.share * a


class OtherTwin(headwise.Method):
    """Has a fast form of another number."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def weights(self, a, call):
        return self.share * a

    def attend(self, attend, call):
        return lambda v: self.share**2 * attend(v)


class LearnsTimesInfinity(headwise.Method):
    """Multiplies the logits of forbidden keys too by what it learns."""

    factor: float = 1.0
    neutral = {"factor": 1.0}
    strong = {"factor": 3.0}
    acts, learns, shapes = "both", True, ("heads",)

    def build(self, site, state):
        state.parameter("factor", torch.full((site.heads,), self.factor))

    def logits(self, s, call):
        return s * call.state(self).tensor("factor")[:, None, None].to(s.dtype)


class RoughTwin(headwise.Method):
    """Has a fast form that is rough in bf16 alone."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def weights(self, a, call):
        return self.share * a

    def attend(self, attend, call):
        rough = 0.8 if call.q.dtype == torch.bfloat16 else 1.0
        return lambda v: rough * self.share * attend(v)


class NotBesideDropout(headwise.Method):
    """Adds a mean of values, and says that the host's dropout may come before."""

    share: float = 0.5
    neutral = {"share": 0.0}
    commutes_with_dropout = True

    def weights(self, a, call):
        return (1 - self.share) * a + self.share * call.uniform().to(a.dtype)

    def attend(self, attend, call):
        return lambda v: (1 - self.share) * attend(v) + self.share * call.mean_over_keys(v).to(v.dtype)


class NotNeutral(headwise.Method):
    """Scales the weights at its neutral setting too."""

    share: float = 0.5
    neutral = {"share": 0.9}

    def weights(self, a, call):
        return self.share * a


class Detached(headwise.Method):
    """Gives no gradient to the values."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def output(self, o, call):
        return self.share * o.detach()


class WrongRowwise(headwise.Method):
    """Mixes queries and says that it does not."""

    share: float = 0.5
    neutral = {"share": 0.0}
    rowwise = True

    def weights(self, a, call):
        return a - self.share * a.mean(-2, keepdim=True)


class SeesTheFuture(headwise.Method):
    """Mixes the mean of all values in, whatever the mask."""

    share: float = 0.5
    neutral = {"share": 0.0}

    def output(self, o, call):
        return o + self.share * call.v.mean(2, keepdim=True)


class TorchRand(headwise.Method):
    """Draws from torch's own generator."""

    share: float = 0.5
    neutral = {"share": 0.0}
    random = True

    def output(self, o, call):
        return o + self.share * torch.rand_like(o)


class NotNeutralOutside(headwise.Method):
    """Scales the branch at its neutral setting too."""

    share: float = 0.5
    neutral = {"share": 0.9}

    def branch(self, y, call):
        return self.share * y


class DoesNothing(headwise.Method):
    """Changes nothing."""

    neutral = {}

    def output(self, o, call):
        return o


class ActsInTrainingOnly(headwise.Method):
    """Says that it acts in evaluation, and does not."""

    neutral = {"share": 1.0}
    share: float = 0.5
    acts = "both"

    def output(self, o, call):
        return o * self.share if call.training else o


class Unused(headwise.Method):
    """Learns a number that it does not use."""

    share: float = 0.5
    neutral = {"share": 1.0}
    learns = True
    shapes = ()

    def build(self, site, state):
        state.parameter("gain", torch.ones(()))

    def branch(self, y, call):
        return self.share * y


class SpreadsPadding(headwise.Method):
    """Mixes the mean of all tokens into each, padding and later ones too."""

    share: float = 0.5
    neutral = {"share": 0.0}

    def branch(self, y, call):
        return y + self.share * y.mean(1, keepdim=True)


class OnlyFp32(headwise.Method):
    """Has no gradient in bf16."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def branch(self, y, call):
        return self.share * y * (float("inf") if y.dtype == torch.bfloat16 else 1.0)


class AlwaysPenalizes(headwise.Method):
    """Adds to the loss in evaluation too."""

    strength: float = 1.0
    neutral = {"strength": 0.0}
    live = ("strength",)
    penalizes = True
    acts = "both"

    def output(self, o, call):
        call.penalize(self, self.strength * o.square().mean(-1))
        return o


class WrongFold(headwise.Method):
    """Folds nothing into the weights."""

    share: float = 0.5
    neutral = {"share": 1.0}
    acts = "both"

    def output(self, o, call):
        return self.share * o

    def fold(self, site, state):
        pass


class LeavesTrace(headwise.Method):
    """Leaves an attribute on the layer."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def build(self, site, state):
        site.module.left_behind = True

    def branch(self, y, call):
        return self.share * y


class SharedByCopies(headwise.Method):
    """Scales by a number that copies of a model share."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def branch(self, y, call):
        Counted.now += 1
        return self.share * y * (1 + (Counted.now if self.share != 1.0 else 0))


class Counted:
    now = 0


class BreaksGraphs(headwise.Method):
    """Reads a number out of the graph."""

    share: float = 0.5
    neutral = {"share": 1.0}

    def output(self, o, call):
        return self.share * o if float(o.detach().sum()) != 0.0 else o


class FixedStrength(headwise.Method):
    """Penalizes with a strength that is not live."""

    strength: float = 1.0
    neutral = {"strength": 0.0}
    penalizes = True

    def output(self, o, call):
        call.penalize(self, self.strength * o.square().mean(-1))
        return o


WRONG = {
    "declarations": (Undeclared, NeverCalled, Misspelled, FixedStrength),
    "text": (WrongText,),
    "copies": (HoldsMore,),
    "both_forms_agree": (OtherTwin, LearnsTimesInfinity),
    "both_forms_agree_in_bf16": (RoughTwin,),
    "both_forms_agree_under_dropout": (NotBesideDropout,),
    "neutral_is_neutral": (NotNeutral,),
    "gradients_flow": (Detached,),
    "blocks_equal_the_whole": (WrongRowwise,),
    "masks_are_respected": (SeesTheFuture,),
    "draws_repeat": (TorchRand,),
    "neutral_changes_nothing": (NotNeutralOutside,),
    "strong_setting_acts": (DoesNothing, ActsInTrainingOnly),
    "training_steps_work": (Unused,),
    "tokens_out_of_sight_do_not_matter": (SpreadsPadding,),
    "autocast_works": (OnlyFp32,),
    "losses_only_in_training": (AlwaysPenalizes,),
    "folding_keeps_the_bits": (WrongFold,),
    "removal_leaves_no_trace": (LeavesTrace,),
    "copied_models_stand_alone": (SharedByCopies,),
    "compiles": (BreaksGraphs,),
}
CASES = [(check, cls) for check, classes in WRONG.items() for cls in classes]
# Other tests walk the registry.
MADE = {cls.__name__: cls for cls in [Right, *(cls for _, cls in CASES)]}
for name in MADE:
    del REGISTRY[name]


@pytest.fixture(autouse=True)
def _strangers_are_known(monkeypatch):
    for name, cls in MADE.items():
        monkeypatch.setitem(REGISTRY, name, cls)


@pytest.mark.parametrize(("check", "cls"), CASES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_wrong_method_is_caught_by_the_name_of_the_check(check, cls):
    others = [name for name in CHECKS if name != check]
    with pytest.raises(AssertionError, match=rf"^{cls.__name__} fails {check}"):
        check_method(cls, skip=others, compile=check == "compiles")


def test_every_check_catches_something():
    assert {*WRONG} == {*CHECKS}


WRONG_ROWS = r"blocks_equal_the_whole on a plain call: .*largest difference is 0\.\d+: is rowwise"


def test_a_wrong_rowwise_is_told_with_the_call_and_the_largest_difference():
    with pytest.raises(AssertionError, match=WRONG_ROWS):
        check_method(WrongRowwise)


@pytest.mark.grid
def test_a_right_method_passes_every_check():
    checked = check_method(Right, compile=True)
    assert [one.name for one in checked] == [*CHECKS]
    assert not any(one.refused for one in checked)


def test_what_was_skipped_is_missing_from_what_was_checked():
    skipped = ("blocks_equal_the_whole", "masks_are_respected", "tokens_out_of_sight_do_not_matter", "compiles")
    checked = check_method(WrongRowwise, skip=skipped)
    assert [one.name for one in checked] == [name for name in CHECKS if name not in skipped]


def test_what_is_no_method_and_what_is_no_check_are_told():
    with pytest.raises(TypeError, match="takes a class that derives from"):
        check_method(Right())
    with pytest.raises(TypeError, match="takes names in a tuple"):
        check_method(Right, skip="text")
    with pytest.raises(ValueError, match=r"no check 'txt'\. Did you mean 'text'"):
        check_method(Right, skip=("txt",))


def test_a_method_that_fits_nowhere_is_told():
    class Nowhere(headwise.Method):
        """Refuses every layer."""

        neutral = {}

        def refuse(self, site):
            return "has no meaning here"

        def branch(self, y, call):
            return y

    try:
        with pytest.raises(AssertionError, match=r"(?s)fits onto none of the models: .*has no meaning here"):
            check_method(Nowhere, skip=("copies",))
    finally:
        del REGISTRY["Nowhere"]
