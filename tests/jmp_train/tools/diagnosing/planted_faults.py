"""The table of planted faults."""

from planted_agent import AGENT
from planted_differences import DIFFERENCES
from planted_flow import FLOW
from planted_gpt import GPT
from planted_graphs import GRAPHS
from planted_losses import LOSSES
from planted_numbers import NUMBERS
from planted_places import PLACES
from planted_range import RANGE
from planted_resnet import RESNET
from planted_solvers import SOLVERS
from planted_sums import SUMS
from planted_updates import UPDATES

MODELS = AGENT + FLOW + GPT + GRAPHS + RESNET + SOLVERS  # of public models, ten in each
FAULTS = DIFFERENCES + LOSSES + NUMBERS + RANGE + SUMS + UPDATES + PLACES + MODELS
