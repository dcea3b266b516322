"""The best tokens found block by block are those that a sort finds."""

import pytest
import torch

from dist_tfm.inference.ranking import BLOCK, FastRanking, top_of_blocks


@pytest.mark.parametrize("width", [24, 18 * BLOCK + 1, 19 * BLOCK, 4000, 37_001])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_blocks_hold_the_same_best_as_a_sort(width: int, count: int) -> None:
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    scores[0] = scores[0].sort().values  # the best stand together, in the rest that fills no block
    scores[1] = scores[1].sort(descending=True).values
    scores[2, :: width // count] += 10.0  # the best stand apart
    expected = scores.sort(-1, descending=True)
    for values, ids in (top_of_blocks(scores, count), FastRanking(0.0).best(scores, count)):
        assert torch.equal(values, expected.values[:, :count])
        assert torch.equal(ids, expected.indices[:, :count])


def test_what_is_impossible_or_no_number_is_found_too() -> None:
    scores = torch.full((2, 4000), -torch.inf)
    scores[0, [7, 3999]] = torch.tensor([-5.0, -4.0])
    scores[1, 2500] = torch.nan
    values, ids = top_of_blocks(scores, 9)
    assert ids[0, :2].tolist() == [3999, 7]
    assert values[0].tolist() == [-4.0, -5.0, *[-torch.inf] * 7]
    assert len(set(ids[0].tolist())) == 9, "no token twice"
    assert values[1, 0].isnan()
    assert ids[1, 0] == 2500
