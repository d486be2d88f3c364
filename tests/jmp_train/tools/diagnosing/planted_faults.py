"""The table of planted faults."""

from planted_differences import DIFFERENCES
from planted_gpt import GPT
from planted_graphs import GRAPHS
from planted_models import MODELS
from planted_numbers import NUMBERS
from planted_places import PLACES
from planted_range import RANGE
from planted_sums import SUMS
from planted_updates import UPDATES

FAULTS = DIFFERENCES + NUMBERS + RANGE + SUMS + UPDATES + PLACES + GPT + GRAPHS + MODELS
