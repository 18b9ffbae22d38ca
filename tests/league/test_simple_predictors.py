"""Simple predictors: what a world's plain model must beat."""

import pytest
import torch
from headwise_papers.league.simple_predictors import constant_accuracy, simple_accuracy


def test_a_constant_is_the_most_frequent_target_of_training():
    assert constant_accuracy(torch.tensor([2, 2, 0]), torch.tensor([2, 0, 0, 0])) == 0.25


def test_real_inputs_get_the_class_of_the_nearest_mean():
    train = torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([3, 3, 7, 7])
    assert simple_accuracy(train, (torch.tensor([[5.9], [6.1]]), torch.tensor([3, 7]))) == 1
    assert simple_accuracy(train, (torch.tensor([[6.1], [5.9]]), torch.tensor([3, 7]))) == 0


def test_a_sequence_gets_the_class_that_its_tokens_make_likely():
    train = torch.tensor([[0, 0, 1], [0, 1, 0], [2, 2, 1], [1, 2, 2]]), torch.tensor([0, 0, 1, 1])
    assert simple_accuracy(train, (torch.tensor([[0, 1, 1], [2, 1, 1]]), torch.tensor([0, 1]))) == 1


def test_each_token_gets_its_most_frequent_follower():
    train = torch.tensor([[0, 1, 0], [0, 1, 1]]), torch.tensor([[1, 0], [1, 1]])
    # 0 is followed by 0 here once, as the last token; 1 by 1 twice
    assert simple_accuracy(train, (torch.tensor([[5, 1, 0]]), torch.tensor([[1, 0]]))) == 1
    # a token never seen gets the most frequent target, 1
    assert simple_accuracy(train, (torch.tensor([[0, 1, 4]]), torch.tensor([[1, 1]]))) == 1


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="no simple predictor"):
        simple_accuracy((torch.rand(3, 2), torch.rand(3, 2)), (torch.rand(3, 2), torch.rand(3, 2)))
