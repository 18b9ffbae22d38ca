"""Judge ten changes of a small training, two of which help, by the loop of AGENTS.md and by "keep if better".

python examples/judge_ten_changes.py
"""

import numpy as np

import headwise
from headwise_verdict.judging.ledger import levels

# each change, as settings of `train`; the data are quadratic, and noisy enough for a ridge
CHANGES = {
    "features with squares": {"squares": True},
    "ridge 30": {"ridge": 30.0},
    "shuffled rows": {"salt": 1},
    "another order of features": {"salt": 2},
    "a new name of the run": {"salt": 3},
    "the same precision, named": {"salt": 4},
    "data loaded twice": {"salt": 5},
    "rows sorted": {"salt": 6},
    "another progress bar": {"salt": 7},
    "a later import": {"salt": 8},
}
HELP = {"features with squares", "ridge 30"}


def train(seed, squares=False, ridge=0.0, salt=0):
    """Fit a linear model to 60 rows; return its loss on others. `salt` changes only the noise of the training."""
    draws = np.random.default_rng(seed)
    inputs, targets = draw(draws, 60)
    tests, truth = draw(draws, 200)
    noise = np.random.default_rng([seed, salt, int(squares), int(ridge)])
    kept = noise.permutation(60)[:50]
    inputs, tests = features(inputs, squares), features(tests, squares)
    inputs, targets = inputs[kept], targets[kept]
    weights = np.linalg.solve(inputs.T @ inputs + (ridge + 1e-6) * np.eye(inputs.shape[1]), inputs.T @ targets)
    return float(np.mean((tests @ weights - truth) ** 2))


def draw(draws, rows):
    """Return inputs (rows, 20), and targets with noise."""
    inputs = draws.normal(size=(rows, 20))
    return inputs, inputs[:, 0] + 1.5 * (inputs[:, 1] ** 2 - 1) + 2.0 * draws.normal(size=rows)


def features(inputs, squares):
    """Return the features of a linear model: the inputs, and the squares of the first two if asked."""
    return np.concatenate([inputs, inputs[:, :2] ** 2 - 1], 1) if squares else inputs


def judged(change, alpha, budget=30):
    """Return the decision about a change: one pair of runs after another, until it is given."""
    differences = (train(seed, **CHANGES[change]) - train(seed) for seed in range(budget))
    return headwise.judge(differences, better="lower", alpha=alpha, budget=budget)


def keep_if_better(change, seed=0):
    """Return whether one run with the change has a lower loss than one without."""
    return train(seed, **CHANGES[change]) < train(seed)


def main():
    """Print both answers for each change, and how many false gains each way keeps."""
    accepted, kept, answers = set(), set(), []
    for change in CHANGES:
        # the level that --ledger would give it
        decision = judged(change, levels(answers, 0.05))
        answers.append(decision.answer == "accept")
        accepted |= {change} if decision.answer == "accept" else set()
        kept |= {change} if keep_if_better(change) else set()
        told = f"{decision.answer} after {decision.pairs} pairs"
        print(f"{change:28} {told:28} {'keep' if change in kept else 'drop'} if better")
    for name, chosen in (("headwise.judge", accepted), ("keep if better", kept)):
        print(f"{name}: {len(chosen & HELP)} of {len(HELP)} true gains, {len(chosen - HELP)} false gains")


if __name__ == "__main__":
    main()
