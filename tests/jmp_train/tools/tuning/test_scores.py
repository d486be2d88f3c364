"""Of the loss scales that were tried: at which least is lost."""

import pytest

from jmp_train.tools.tuning.scores import best_scale, no_scores

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("lost", "wanted"),
    [
        ({1.0: 0.5, 16.0: 0.2, 256.0: 0.2, 4096.0: 0.9}, 256.0),  # the largest of equals
        ({1.0: 0.5, 16.0: 0.2, 256.0: 0.205}, 256.0),  # and of those within a twentieth
        ({1.0: 0.2, 16.0: 0.22}, 1.0),
        ({1.0: 0.0, 16.0: 0.0}, 16.0),
    ],
)
def test_the_largest_scale_at_which_least_is_lost(lost: dict[float, float], wanted: float) -> None:
    scores = {}
    for scale, share in lost.items():
        scores[scale] = no_scores(2)
        scores[scale][:, 0], scores[scale][:, 1] = (8 * share, 0), (8, 1)
    assert best_scale(scores) == wanted
