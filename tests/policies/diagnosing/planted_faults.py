"""The table of planted faults."""

from planted_agent import AGENT
from planted_flow import FLOW
from planted_gpt import GPT
from planted_graphs import GRAPHS
from planted_numbers import NUMBERS
from planted_range import RANGE
from planted_resnet import RESNET
from planted_solvers import SOLVERS
from planted_sums import SUMS
from planted_updates import UPDATES

MODELS = AGENT + FLOW + GPT + GRAPHS + RESNET + SOLVERS  # of public models
FAULTS = NUMBERS + RANGE + SUMS + UPDATES + MODELS
